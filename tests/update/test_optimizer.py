"""Learning-rate schedules, gradient clipping before AdamW, and weight decay."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from tiny import tiny_policy

from grpo_jax import GRPOConfig, add_lora
from grpo_jax.update.optimizer import make_optimizer, make_schedule
from grpo_jax.update.state import apply_optimizer, create_state

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("settings", "expected"), [
    ({"lr_scheduler_type": "constant"}, [2, 2, 2, 2, 2, 2]),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}, [0, 1, 2, 2, 2, 2]),
    ({"lr_scheduler_type": "linear"}, [2, 1.5, 1, 0.5, 0, 0]),
    ({"lr_scheduler_type": "linear", "warmup_steps": 0.5}, [0, 1, 2, 1, 0, 0]),
    ({"lr_scheduler_type": "cosine"}, [2, 1 + np.cos(np.pi / 4), 1, 1 + np.cos(3 * np.pi / 4), 0, 0]),
])  # fmt: skip
def test_schedules(settings, expected):
    schedule = make_schedule(GRPOConfig(learning_rate=2.0, **settings), total_steps=4)
    np.testing.assert_allclose([schedule(step) for step in range(6)], expected, atol=1e-6)


def test_norms_and_biases_do_not_decay():
    """With zero gradients, matrices shrink by lr · weight_decay, and norms and biases do not change."""
    optimizer = make_optimizer(GRPOConfig(learning_rate=0.1, lr_scheduler_type="constant", weight_decay=0.5), 10)
    lora = add_lora(tiny_policy(), jax.random.key(0), rank=2).params
    linen = {"LayerNorm_0": {"scale": jnp.ones(2), "bias": jnp.ones(2)}, "Dense_0": {"kernel": jnp.ones((2, 2))}}
    params = {"whole": tiny_policy().params, "lora": lora, "linen": linen}
    unmoved = lambda params: optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    updates, _ = jax.jit(unmoved)(params)
    for path, update in flatten_dict(updates).items():
        matrix = path[-1] in ("kernel", "embedding", "a", "b")
        np.testing.assert_allclose(update, -0.05 * matrix * flatten_dict(params)[path], rtol=1e-6, err_msg=path)


def test_clipping_does_not_copy_the_gradient():
    """Clipping allocates no second gradient, unlike `optax.clip_by_global_norm`, where XLA holds all clipped leaves."""
    optimizer = make_optimizer(GRPOConfig(learning_rate=0.1), 10)
    params = {str(i): jnp.zeros((64, 64 + i)) for i in range(20)}

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * sum(x.nbytes for x in jax.tree.leaves(params))


def test_skipped_updates_do_not_delay_the_schedule():
    """After a skipped update, the learning rate follows the run's step, even if the optimizer state's own count lags.

    Such states are in older checkpoints. With a constant gradient, Adam's step is the learning rate.
    """
    config = GRPOConfig(learning_rate=1.0, lr_scheduler_type="linear", adam_epsilon=1e-12)
    optimizer, schedule = make_optimizer(config, 8), make_schedule(config, 8)
    state = create_state({"w": jnp.zeros(1)}, optimizer, jax.random.key(0))
    place, oks = [0.0], [True, False, True, True, False, False, True]
    for ok in oks:
        state = apply_optimizer(state, {"w": jnp.full(1, 0.1)}, jnp.array(ok), optimizer)
        place.append(float(state.params["w"][0]))
    moved = -np.diff(place)
    np.testing.assert_allclose(moved, [1, 0, 6 / 8, 5 / 8, 0, 0, 2 / 8], atol=1e-5)
    np.testing.assert_allclose(moved, [float(schedule(step)) * ok for step, ok in enumerate(oks)], atol=1e-5)


@pytest.mark.parametrize("bound", [0.5, 0])
def test_updates_and_state_equal_optax_adamw(bound):
    """Updates equal optax.clip_by_global_norm with optax.adamw, and the state has the structure of `optax.adamw`."""
    config = GRPOConfig(learning_rate=0.1, warmup_steps=2, max_grad_norm=bound, adam_beta2=0.9, adam_epsilon=1e-3)
    adamw = optax.adamw(make_schedule(config, 6), b1=0.9, b2=0.9, eps=1e-3, weight_decay=0.0)
    ours, theirs = make_optimizer(config, 6), optax.chain(optax.clip_by_global_norm(bound or np.inf), adamw)
    params = {"w": jnp.array([0.3, -2.0]), "b": jnp.ones(3)}
    mine, other = ours.init(params), theirs.init(params)
    for step in range(5):  # gradient norms are below and above the bound
        grads = jax.tree.map(lambda x, step=step: 0.1 * 4**step * jnp.cos(x + step), params)
        updates, mine = ours.update(grads, mine, params, step=jnp.int32(step))
        expected, other = theirs.update(grads, other, params)
        chex.assert_trees_all_equal((updates, mine), (expected, other))
