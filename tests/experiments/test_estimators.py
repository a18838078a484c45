"""The comparison of estimators and losses: its settings, and a table by hand."""

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


def test_the_table_has_means_and_steps_to_half_of_the_gain_of_dapo():
    line = {"task": "sort_digits", "pass@8": 0.5, "entropy": 0.25, "kl": 0.0}
    curve = [[4 * i, 0.1 * i] for i in range(1, 11)]  # means of five: 0.3 at step 20, 0.4 at 24, …
    results = [
        {**line, "setting": "base", "seed": 0, "sampled": 0.2},
        {**line, "setting": "dapo", "seed": 0, "sampled": 0.9, "curve": curve},
        {**line, "setting": "rloo", "seed": 0, "sampled": 0.8, "curve": curve[:4]},
        {**line, "setting": "rloo", "seed": 1, "sampled": 0.6, "curve": curve},
        {**line, "setting": "rloo", "seed": 0, "sampled": 0.0, "task": "countdown"},
    ]
    middle = "0.500 (0.500 … 0.500) | 0.250 (0.250 … 0.250) | 0.000 (0.000 … 0.000)"
    assert estimators.table(results, "sort_digits").splitlines()[2:] == [
        f"| base | 1 | 0.200 (0.200 … 0.200) | {middle} |  |",
        f"| dapo | 1 | 0.900 (0.900 … 0.900) | {middle} | 32 |",
        f"| rloo | 2 | 0.700 (0.600 … 0.800) | {middle} | –, ? |",
    ]
