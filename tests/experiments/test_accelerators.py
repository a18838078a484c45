"""The page of docs/accelerators.md, from cells written by hand; `tests/devices/test_targets.py` compiles some."""

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


def test_a_line_says_whether_it_fits():
    assert targets.line("m", 1024, cell(40, 10), "4,608") == "| m | 1,024 | yes | 5.0 | 40.0 | 10.0 | 4,608 | 12 |"
    assert targets.line("m", 8192, cell(120, 10), "4,608") == "| m | 8,192 | **no** | 5.0 | 120.0 | 10.0 | 4,608 | 12 |"
    assert targets.line("m", 1024, {"error": "refused"}, "?") == "| m | 1,024 | refused | | | | |"


def test_the_page_has_what_was_compiled_and_names_the_rest():
    page = targets.page({"H100 Qwen2.5-0.5B 1024": cell(40, 10), "H100 Qwen2.5-0.5B 8192": cell(120, 10)})
    assert "**Compiled, not run**" in page.split("\n\n")[1]
    assert [row for row in page.splitlines() if row.startswith("### ")] == ["### H100 × 1, 80 GB each"]
    assert page.count("| Qwen2.5-0.5B | ") == 2
    (missing,) = [row for row in page.splitlines() if row.startswith("Not compiled yet: ")]
    assert missing.count(" on ") == len(targets.MACHINES) * len(targets.MODELS) - 1
    assert "Qwen2.5-0.5B on H100 × 1;" not in missing
    assert "Qwen2.5-0.5B on v5e-8;" in missing


def test_where_only_the_rollout_is_too_large_a_line_is_of_one_group_at_a_time():
    key, waves = "H100 Qwen2.5-0.5B 1024", "H100 Qwen2.5-0.5B 1024 one group at a time"
    row = lambda results: next(x for x in targets.page(results).splitlines() if x.startswith("| Qwen2.5-0.5B |"))
    assert targets.only_the_rollout_is_too_large(cell(120, 10))
    assert not targets.only_the_rollout_is_too_large(cell(120, 90))
    assert not targets.only_the_rollout_is_too_large(cell(40, 10))
    assert not targets.only_the_rollout_is_too_large({"error": "refused"})
    assert "| one group at a time | 5.0 | 30.0 | 10.0 | none |" in row({key: cell(120, 10), waves: cell(30, 10)})
    assert "| **no** | 5.0 | 120.0 | 10.0 | none |" in row({key: cell(120, 10), waves: cell(90, 10)})
    assert "| yes | 5.0 | 40.0 |" in row({key: cell(40, 10)})
