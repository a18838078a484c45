"""The lengths in docs/accelerators.md, from cells written by hand; `tests/devices/test_targets.py` compiles some."""

import pytest

from experiments import targets

pytestmark = pytest.mark.quick


def cell(rollout, update, *, memory=80e9):
    peaks = {"rollout": rollout * 1e9, "update": update * 1e9}
    return {"memory": memory, "held": 5e9, "peaks": peaks, "seconds": 12.4}


def test_the_longest_completion_is_where_the_first_phase_reaches_the_memory():
    """Between 1,024 and 8,192 tokens the rollout goes from 40 to 120 GB: 80 GB are half of the way, at 4,608."""
    assert targets.longest_that_fits({1024: cell(40, 10), 8192: cell(120, 20)}) == "4,608"
    assert targets.longest_that_fits({1024: cell(40, 10), 8192: cell(120, 290)}) == "2,816"  # a quarter, by the update
    assert targets.longest_that_fits({1024: cell(40, 10), 8192: cell(60, 220)}) == "3,392"  # 1,024 + 7,168 / 3, by 64
    assert targets.longest_that_fits({t: cell(40, 10) for t in targets.LENGTHS}) == "≥ 32,768"
    assert targets.longest_that_fits({1024: cell(81, 10)}) == "none"
    assert targets.longest_that_fits({1024: {"error": "refused"}}) == "?"
