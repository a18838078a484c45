"""Schedules at hand-computed points, and the clip in front of AdamW."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import GRPOConfig
from grpo_jax.update.optimizer import make_optimizer, make_schedule


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_scheduler_type": "constant"}, [2, 2, 2, 2, 2, 2]),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}, [0, 1, 2, 2, 2, 2]),
        ({"lr_scheduler_type": "linear"}, [2, 1.5, 1, 0.5, 0, 0]),
        ({"lr_scheduler_type": "linear", "warmup_steps": 0.5}, [0, 1, 2, 1, 0, 0]),
        ({"lr_scheduler_type": "cosine"}, [2, 1 + np.cos(np.pi / 4), 1, 1 + np.cos(3 * np.pi / 4), 0, 0]),
    ],
)
def test_schedules(settings, expected):
    schedule = make_schedule(GRPOConfig(learning_rate=2.0, **settings), total_steps=4)
    np.testing.assert_allclose([schedule(step) for step in range(6)], expected, atol=1e-6)


@pytest.mark.quick
def test_the_gradient_is_clipped_by_its_global_norm_before_adam():
    config = GRPOConfig(learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=1.0, adam_epsilon=1.0)
    optimizer = make_optimizer(config, 10)
    params = {"w": jnp.zeros(2)}
    updates, _ = optimizer.update({"w": jnp.array([30.0, 40.0])}, optimizer.init(params), params)
    # clipped to (0.6, 0.8); Adam's first step is lr·g/(|g| + eps)
    np.testing.assert_allclose(updates["w"], [-0.1 * 0.6 / 1.6, -0.1 * 0.8 / 1.8], rtol=1e-5)
    free = make_optimizer(dataclasses.replace(config, max_grad_norm=0), 10)
    updates, _ = free.update({"w": jnp.array([30.0, 40.0])}, free.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.1 * 30 / 31, -0.1 * 40 / 41], rtol=1e-5)


@pytest.mark.quick
def test_weight_decay_is_decoupled():
    config = GRPOConfig(learning_rate=0.1, lr_scheduler_type="constant", weight_decay=0.5)
    optimizer = make_optimizer(config, 10)
    params = {"w": jnp.array([2.0])}
    updates, _ = optimizer.update({"w": jnp.zeros(1)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.1 * 0.5 * 2.0], rtol=1e-6)


@pytest.mark.quick
def test_one_config_gives_one_object_so_that_jit_knows_it_again():
    assert make_optimizer(GRPOConfig(), 10) is make_optimizer(GRPOConfig(), 10)
    assert make_optimizer(GRPOConfig(), 10) is not make_optimizer(GRPOConfig(), 11)
    assert isinstance(make_optimizer(GRPOConfig(), 10), optax.GradientTransformation)
