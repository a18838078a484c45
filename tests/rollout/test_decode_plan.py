"""The plan of a rollout: few shapes, which depend on its size; a change of shape keeps all live completions."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import tiny_model

from grpo_jax.hub.quantize import quantized_shape
from grpo_jax.models.config import StepCost
from grpo_jax.rollout.decode_plan import BURST, MAX_SMALLER, MIN_COMPLETIONS, DecodePlan, decode_step_cost
from grpo_jax.types import as_jit_argument

pytestmark = pytest.mark.quick

SMALL = StepCost(weights=0.0, prompt=0.5, own=1.0, products=1.0)


def plan_of(groups=8, width=8, length=256, step=SMALL, *, fixed=False, **how):
    return DecodePlan.of(groups, width, length, step, all_steps=fixed, **how)


@pytest.mark.parametrize(
    ("step", "shards"),
    [(SMALL, 1), (StepCost(weights=0.0, prompt=50.0, own=1.0), 1), (SMALL, 4)],
    ids=["single completions", "whole groups", "on a mesh"],
)
def test_no_live_completion_is_lost(step, shards):
    plan, rng = plan_of(step=step, shards=shards), np.random.default_rng(0)
    assert 1 < len(plan.shapes) <= 1 + MAX_SMALLER
    reached = set()
    for _ in range(200):
        ids, at = np.arange(64).reshape(8, 8), 0
        while (ids >= 0).any():
            ids = np.where(rng.random(ids.shape) < rng.uniform(0.3, 0.95), ids, -1)
            move = plan.smaller(at, 255, ids >= 0)
            if move is None:
                continue
            at, _, (groups, order) = move
            moved = ids[groups[:, None], order]
            assert moved.shape == plan.shapes[at]
            assert sorted(moved[moved >= 0]) == sorted(ids[ids >= 0])
            if shards > 1:
                np.testing.assert_array_equal(groups, np.arange(8), "a group left its device")
            ids = moved
            reached.add(at)
    assert reached == set(range(1, len(plan.shapes)))


def test_completions_keep_their_group_if_prompts_are_expensive():
    assert plan_of(step=dataclasses.replace(SMALL, prompt=0.1)).shapes == ((8, 8), (32, 1), (16, 1), (8, 1))
    shapes = plan_of(step=dataclasses.replace(SMALL, prompt=2.0, own=0.5, products=0.5)).shapes
    assert shapes[1] == (8, 4)
    assert all(b * g >= MIN_COMPLETIONS for b, g in shapes), "smaller shapes take as long"


@pytest.mark.parametrize(("weights", "count"), [(0, 4), (60, 3), (2000, 1)])  # 5M parameters on a CPU: 20
def test_expensive_weights_leave_fewer_shapes(weights, count):
    """Reading the weights costs the same in every shape, so the more it costs, the fewer smaller shapes pay off."""
    step = StepCost(weights=weights, prompt=0.25, own=0.25, products=1.3)
    assert len(plan_of(step=step).shapes) == count


def moves(plan, index, slots, alive):
    """Index and cache size of the shape that follows when `alive` completions are left, or None."""
    shape = plan.shapes[index]
    move = plan.smaller(index, slots, (np.arange(shape[0] * shape[1]) < alive).reshape(shape))
    return move and move[:2]


def test_small_cache_is_left_only_for_a_cheaper_shape():
    step = StepCost(weights=0.0, prompt=0.0, own=1.0)
    plan = plan_of(step=step)
    assert plan.cache_sizes == (64, 128, 255)
    assert plan.shapes == ((8, 8), (32, 1), (16, 1), (8, 1))
    assert [moves(plan, 0, slots, 32) for slots in plan.cache_sizes] == [None, (1, 128), (1, 255)]
    assert moves(plan, 3, 255, 1) is None, "there is no smaller shape"
    dear = plan_of(step=dataclasses.replace(step, products=100.0))
    assert [moves(dear, 0, slots, 32) for slots in dear.cache_sizes] == [(1, 128), (1, 128), (1, 255)]
    assert [moves(dear, 1, slots, 16) for slots in dear.cache_sizes[1:]] == [(2, 255), (2, 255)]


def test_moves_to_the_cheapest_shape_that_holds_all_active_completions():
    plan = plan_of(step=StepCost(weights=0.0, prompt=0.0, own=1.0))
    assert [moves(plan, 0, 255, n) for n in (1, 8, 9, 16, 17, 32, 33)] == [
        *[(3, 255)] * 2, *[(2, 255)] * 2, *[(1, 255)] * 2, None,
    ]  # fmt: skip
    # Compared with 64 × 64 slots, 8 × 255 slots cost half as much, but 32 × 128 slots would cost the same.
    assert moves(plan, 0, 64, 8) == (3, 255)


@pytest.mark.parametrize("length", [1, 2, 17, 64, 70, 192, 1000, 8192])
@pytest.mark.parametrize("fixed", [False, True])
def test_slots_and_bursts_hold_every_completion(length, fixed):
    plan = plan_of(length=length, fixed=fixed)
    assert max(1, length - 1) <= plan.cache_sizes[-1] < max(1, length - 1) + (64 if fixed else 1)
    assert len(plan.cache_sizes) <= 3
    assert list(plan.cache_sizes) == sorted(set(plan.cache_sizes))
    assert 1 <= plan.burst_steps <= BURST
    if fixed:  # bursts end where the cache grows, with few steps past the last token
        assert all(n % plan.burst_steps == 0 for n in plan.cache_sizes[:-1])
        assert -(-max(1, length - 1) // plan.burst_steps) * plan.burst_steps < max(1, length - 1) * 1.1 + 8
        assert all(n % 64 == 0 for n in plan.cache_sizes), "a GPU copies the values to pad any other size"


def test_a_decode_step_reads_half_a_byte_per_weight_in_nf4():
    model, shape = as_jit_argument(tiny_model()[0]), (4096, 4096)
    whole = decode_step_cost(model, {"kernel": jax.ShapeDtypeStruct(shape, "float32")}, 8, 8, cpu=True)
    packed = quantized_shape(shape, "nf4", "float32", jax.ShapeDtypeStruct)
    read = decode_step_cost(model, {"kernel": packed}, 8, 8, cpu=True)
    assert read.weights / whole.weights == pytest.approx((1 / 2 + 1 / 64) / 4, rel=0.01), "codes and scales"
