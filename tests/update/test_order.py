"""Prompts are read before the first sequence that needs them, and left after the last one."""

import numpy as np
import pytest

from grpo_jax.update.order import plan_order

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_part_is_read_before_it_is_needed_and_left_after(seed, at_once):
    rng = np.random.default_rng(seed)
    needs = [set(rng.integers(0, 6, rng.integers(0, 4)).tolist()) for _ in range(rng.integers(1, 6))]
    legs, kept = plan_order(needs, at_once=at_once), set()
    for leg in legs:
        assert not kept & set(leg.reads)
        kept |= set(leg.reads)
        assert all(needs[number] <= kept for number in leg.sequences)
        assert set(leg.backs) <= kept
        kept -= set(leg.backs)
    assert not kept
    assert [number for leg in legs for number in leg.sequences] == list(range(len(needs)))
    reads = [part for leg in legs for part in leg.reads]
    assert sorted(reads) == sorted(part for leg in legs for part in leg.backs) == sorted(set().union(*needs) or {0})


def test_no_part_is_kept_longer_than_it_is_needed():
    legs = plan_order([{0, 1}, {1}, {3, 2}, {3}])
    assert [tuple(leg) for leg in legs] == [([0, 1], [0], [0]), ([], [1], [1]), ([2, 3], [2], [2]), ([], [3], [3])]
    legs = plan_order([{0, 1}, {1}, {2}, {3, 2}], at_once=True)
    assert [leg.sequences for leg in legs] == [[0, 1], [2, 3]]
    assert [sorted(leg.reads) for leg in legs] == [sorted(leg.backs) for leg in legs] == [[0, 1], [2, 3]]
