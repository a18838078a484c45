"""`train` also trains LoRA adapters and bfloat16 params."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from test_train import ROWS, SMALL, lower_case
from tiny import tiny_policy

from grpo_jax import GRPOConfig, add_lora, merge_lora, train


def learn(policy, rows=ROWS, *, steps, **settings):
    rewards = []
    settings = {"per_device_train_batch_size": 24, "learning_rate": 3e-2, "max_steps": steps} | settings
    config = GRPOConfig(**SMALL | settings)
    state = train(policy, rows, lower_case, config, callbacks=[lambda step, m: rewards.append(m.get("reward"))])
    return state, rewards


def test_adapters_are_trained_and_the_base_is_unchanged():
    policy = add_lora(tiny_policy(), jax.random.key(0), rank=4, dropout=0.1)
    before = jax.tree.map(np.array, policy.model.base)
    settings = {"beta": 0.01, "sync_ref_model": True, "ref_model_sync_steps": 2, "learning_rate": 0.01, "steps": 4}
    state, _ = learn(policy, **settings)
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), state.params, policy.params)
    assert min(jax.tree.leaves(moved)) > 1e-3, "test_packed.py compares the gradient"
    widths = [x["layers_0"]["self_attn"]["q_proj"]["a"].shape[1] for x in (state.params, state.ref_params)]
    assert widths[0] < widths[1], "the reference mixes weights, not factors (test_lora.py), so its rank grows"
    chex.assert_trees_all_equal(policy.model.base, before)
    # The optimizer state, initial policy and policy have the adapters' size.
    size = sum(x.size for x in jax.tree.leaves(policy.params))
    assert size < 0.5 * sum(x.size for x in jax.tree.leaves(before))
    assert sum(x.size for x in jax.tree.leaves(state.initial_params)) == size
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) < 2.1 * size
    merged = merge_lora(policy.replace(params=state.params))
    tokens = jnp.arange(12).reshape(2, 6)
    one, other = (jax.jit(some.model.apply) for some in (policy, merged))
    logits = one({"params": state.params}, tokens)
    np.testing.assert_allclose(other({"params": merged.params}, tokens), logits, atol=1e-5)


def test_bfloat16_compute_with_params_in_bfloat16():
    policy = tiny_policy()
    params = jax.tree.map(lambda x: x.astype("bfloat16"), policy.params)
    state, rewards = learn(policy.replace(params=params), steps=20, compute_dtype="bfloat16", beta=0.01)
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    chex.assert_trees_all_equal(state.params, jax.tree.map(lambda x: x.astype("bfloat16"), state.master_params))
    assert {str(x.dtype) for x in jax.tree.leaves(state.opt_state) if x.ndim} == {"float32"}
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3
