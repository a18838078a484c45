"""The comparison of estimators and losses: its settings."""

import pytest

from experiments import estimators
from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.surrogates import LOSS_TYPES

pytestmark = pytest.mark.quick


def test_every_estimator_and_loss_is_compared():
    configs = [estimators.make_config(0, 4, 12, settings) for settings in estimators.SETTINGS.values()]
    assert {config.loss_type for config in configs} == set(LOSS_TYPES)
    names = GRPOConfig.__annotations__["advantage_estimator"].__args__
    assert {config.advantage_estimator for config in configs} == set(names)
    assert len(set(configs)) == len(configs)
    assert {config.sizes().updates for config in configs} == {4}
