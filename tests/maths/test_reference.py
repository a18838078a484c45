"""Reference mixup and its schedule."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precision import x64

from grpo_jax.maths.reference import mixup, sync_reference

pytestmark = pytest.mark.quick

REF = {"a": {"w": jnp.array([[0.0, 2.0], [4.0, -8.0]])}, "b": jnp.array([1.0, 1.0])}
NEW = {"a": {"w": jnp.array([[1.0, 2.0], [0.0, 8.0]])}, "b": jnp.array([-1.0, 3.0])}


def test_mixup_is_exact_at_its_end_points_and_keeps_the_containers():
    quarter = {"a": {"w": jnp.array([[0.25, 2.0], [3.0, -4.0]])}, "b": jnp.array([0.5, 1.5])}
    chex.assert_trees_all_equal(mixup(REF, NEW, 0.25), quarter)
    chex.assert_trees_all_equal(mixup(REF, NEW, 1.0), NEW)
    chex.assert_trees_all_equal(mixup(REF, NEW, 0.0), REF)
    chex.assert_trees_all_equal(mixup(REF, NEW, 1), NEW)
    ref, new = {"w": (jnp.zeros(2), None), "bias": None}, {"w": (jnp.ones(2), None), "bias": None}
    mixed = mixup(ref, new, 0.5)
    chex.assert_trees_all_equal_structs(mixed, ref)
    np.testing.assert_array_equal(mixed["w"][0], 0.5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_leaves_keep_the_dtype_of_the_reference(dtype):
    other = jnp.float32 if dtype != jnp.float32 else jnp.bfloat16
    mixed = mixup({"w": jnp.ones(3, dtype)}, {"w": jnp.zeros(3, other)}, 0.5)
    assert mixed["w"].dtype == dtype
    np.testing.assert_array_equal(mixed["w"].astype(jnp.float32), 0.5)


def test_arithmetic_is_float32_for_bfloat16_leaves_and_float64_for_float64_leaves():
    # 1.02 is rounded to bfloat16 once; rounding each step to bfloat16 (8 bits) would give another value.
    ref, new, alpha = 1.0, 3.0, 0.01
    mixed = mixup({"w": jnp.array([ref], jnp.bfloat16)}, {"w": jnp.array([new], jnp.bfloat16)}, alpha)
    exact = jnp.asarray(alpha * new + (1 - alpha) * ref, jnp.float32).astype(jnp.bfloat16)
    in_bfloat16 = jnp.bfloat16(alpha) * jnp.bfloat16(new) + (jnp.bfloat16(1) - jnp.bfloat16(alpha)) * jnp.bfloat16(ref)
    assert float(exact) != float(in_bfloat16), "the two ways of rounding must differ for these values"
    assert float(mixed["w"][0]) == float(exact)
    with x64():
        mixed = mixup({"w": jnp.array([1.0], jnp.float64)}, {"w": jnp.array([2.0], jnp.float64)}, 0.1)
        assert mixed["w"].dtype == jnp.float64
        assert float(mixed["w"][0]) == pytest.approx(1.1, abs=1e-15)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_result_shares_no_buffer_with_its_inputs(alpha):
    # A state in which two trees share a buffer cannot be donated.
    mixed = mixup(REF, NEW, alpha)
    buffers = [{leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)} for tree in (mixed, REF, NEW)]
    assert not buffers[0] & (buffers[1] | buffers[2])


def test_each_sync_shrinks_the_distance_by_one_minus_alpha():
    """n syncs to fixed params shrink the reference's distance to them by (1 − α)ⁿ."""
    ref, new, alpha = REF, NEW, 0.3
    for step in range(1, 11):
        ref = sync_reference(ref, new, step, every=2, alpha=alpha)
    distance = jax.tree.map(lambda r, p: np.asarray(r) - np.asarray(p), ref, NEW)
    initial_distance = jax.tree.map(lambda r, p: np.asarray(r) - np.asarray(p), REF, NEW)
    chex.assert_trees_all_close(distance, jax.tree.map(lambda x: x * 0.7**5, initial_distance), atol=1e-6)


def test_schedule_is_traced_once_and_ignores_params_between_syncs():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def sync(ref, new, step):
        return sync_reference(ref, new, step, every=3, alpha=0.25)

    for step in range(1, 7):
        expected = mixup(REF, NEW, 0.25) if step in (3, 6) else REF
        chex.assert_trees_all_close(sync(REF, NEW, jnp.asarray(step)), expected, rtol=1e-7)
    ref = sync_reference({"w": jnp.ones(2)}, {"w": jnp.full(2, jnp.nan)}, 1, every=2, alpha=0.5)
    np.testing.assert_array_equal(ref["w"], 1.0)
