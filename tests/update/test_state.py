"""`TrainState` and its transitions: no shared buffers, no unneeded copies, and exact float32 master params."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.update.state import apply_optimizer, begin_iteration, create_state

pytestmark = pytest.mark.quick

PARAMS = {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.ones(4, jnp.bfloat16)}
OPTIMIZER = optax.adam(0.1)
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
state_of = lambda **keep: create_state(PARAMS, OPTIMIZER, jax.random.key(0), **keep)


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.random.key(0).dtype]


def test_full_state_can_be_donated_without_the_callers_params():
    """The trees of a state share no buffer with each other or with the caller's params, so it can be donated."""
    state = state_of(keep_old=True, keep_reference=True, keep_initial=True)
    held = pointers((PARAMS, state.params, state.old_params, state.ref_params, state.initial_params))
    assert len(held) == len(set(held)) == 10
    step = jax.jit(
        lambda state: apply_optimizer(begin_iteration(state), GRADS, True, OPTIMIZER, sync_every=1, sync_alpha=0.5),
        donate_argnums=0,
    )
    state = step(step(state))
    assert int(state.step) == 2
    assert float(PARAMS["a"]["w"].sum()) == 15.0
    held = pointers((state.params, state.old_params, state.ref_params, state.initial_params))
    assert len(held) == len(set(held))


@pytest.mark.parametrize("donate", [False, True])
def test_shared_leaves_and_params_in_the_optimizer_state_are_copied(donate):
    twice = jnp.ones(3)
    params = {"a": twice, "b": twice, "c": np.ones(2, np.float32)}
    keeping = optax.GradientTransformation(lambda params: {"start": params}, OPTIMIZER.update)
    key, coef = jax.random.key(0), jnp.float32(0.1)
    state = create_state(params, keeping, key, entropy_coef=coef, donate=donate)
    held = pointers(state) + ([] if donate else [twice.unsafe_buffer_pointer()])
    assert len(held) == len(set(held))
    jax.block_until_ready(jax.jit(lambda state: state.replace(step=state.step + 1), donate_argnums=0)(state))
    assert twice.is_deleted() == donate
    assert not any(x.is_deleted() for x in (key, coef)), "only params are donated"


def test_old_params_are_kept_only_if_needed():
    state = apply_optimizer(state_of(keep_old=True), GRADS, jnp.array(True), OPTIMIZER)
    assert not np.array_equal(state.params["a"]["w"], state.old_params["a"]["w"])
    chex.assert_trees_all_equal(begin_iteration(state).old_params, state.params)
    state = state_of()
    assert (state.old_params, state.ref_params, state.initial_params) == (None, None, None)
    assert begin_iteration(state) is state


HALF = {"w": jnp.linspace(0.5, 2.0, 64, dtype=jnp.bfloat16), "b": jnp.ones(64, jnp.bfloat16)}


@functools.partial(jax.jit, static_argnames=("optimizer",), donate_argnums=0)
def move(state, grads, ok=True, *, optimizer):
    return apply_optimizer(state, grads, jnp.asarray(ok), optimizer)


def test_bfloat16_params_are_the_rounded_params_of_a_float32_run():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), HALF)
    opt_state = optimizer.init(params)
    state = create_state(HALF, optimizer, jax.random.key(0))
    plain = jax.jit(lambda grads, opt_state, params: optimizer.update(grads, opt_state, params))
    for i in range(10):
        grads = jax.tree.map(lambda x, i=i: jax.random.normal(jax.random.key(i), x.shape), params)
        updates, opt_state = plain(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state = move(state, grads, optimizer=optimizer)
    chex.assert_trees_all_close(state.master_params, params, rtol=1e-6)
    chex.assert_trees_all_equal(state.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.master_params))
    assert np.mean(np.asarray(state.params["w"] == params["w"].astype(jnp.bfloat16))) > 0.98
    same = move(jax.tree.map(jnp.copy, state), jax.tree.map(lambda x: x * jnp.nan, grads), False, optimizer=optimizer)
    chex.assert_trees_all_equal(same.master_params, state.master_params)
