"""The state and its transitions: nothing shared, nothing kept that is not needed, nothing moved that must stay."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.state import begin_iteration, create_state, finish_update

PARAMS = {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.ones(4, jnp.bfloat16)}
OPTIMIZER = optax.adam(0.1)
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def state_of(**keep):
    return create_state(PARAMS, OPTIMIZER, jax.random.key(0), **keep)


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.random.key(0).dtype]


def test_no_two_trees_share_a_buffer_with_each_other_or_with_the_caller():
    state = state_of(keep_old=True, keep_reference=True, keep_initial=True)
    trees = [PARAMS, state.params, state.old_params, state.ref_params, state.initial_params]
    held = [pointer for tree in trees for pointer in pointers(tree)]
    assert len(held) == len(set(held)) == 10


def test_a_full_state_can_be_donated_and_the_callers_params_live_on():
    state = state_of(keep_old=True, keep_reference=True, keep_initial=True)
    step = jax.jit(
        lambda state: finish_update(begin_iteration(state), GRADS, True, OPTIMIZER, sync_every=1, sync_alpha=0.5),
        donate_argnums=0,
    )
    state = step(step(state))
    assert int(state.step) == 2
    assert float(PARAMS["a"]["w"].sum()) == 15.0
    held = pointers((state.params, state.old_params, state.ref_params, state.initial_params))
    assert len(held) == len(set(held))


def test_what_is_not_needed_is_not_held():
    state = state_of()
    assert (state.old_params, state.ref_params, state.initial_params) == (None, None, None)
    assert begin_iteration(state) is state


def test_begin_iteration_takes_the_snapshot():
    state = state_of(keep_old=True)
    state = finish_update(state, GRADS, jnp.array(True), OPTIMIZER)
    assert not np.array_equal(state.params["a"]["w"], state.old_params["a"]["w"])
    chex.assert_trees_all_equal(begin_iteration(state).old_params, state.params)


def test_an_update_that_is_not_ok_changes_nothing_but_the_counts():
    before = state_of(keep_reference=True)
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), GRADS)
    after = jax.jit(lambda s, g, ok: finish_update(s, g, ok, OPTIMIZER))(before, nan, jnp.array(False))
    chex.assert_trees_all_equal(after.params, before.params)
    chex.assert_trees_all_equal(after.opt_state, before.opt_state)
    assert (int(after.step), int(after.skipped)) == (1, 1)
    good = finish_update(after, GRADS, jnp.array(True), OPTIMIZER)
    assert (int(good.step), int(good.skipped)) == (2, 1)
    assert not np.array_equal(good.params["a"]["w"], before.params["a"]["w"])


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_reference_follows_after_every_nth_step(every):
    state = state_of(keep_reference=True)
    expected = PARAMS["a"]["w"]
    for step in range(1, 7):
        state = finish_update(state, GRADS, jnp.array(True), OPTIMIZER, sync_every=every, sync_alpha=0.25)
        if step % every == 0:
            expected = 0.25 * state.params["a"]["w"] + 0.75 * expected
        np.testing.assert_allclose(state.ref_params["a"]["w"], expected, rtol=1e-6)
    chex.assert_trees_all_equal_dtypes(state.ref_params, PARAMS)
