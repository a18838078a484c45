"""A run in one sentence."""

import pytest

from grpo_jax.watch.headline import headline, phase_seconds


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], ""),
        ([{"step": 1}], "1 step"),
        ([{"step": 1, "reward": 0.5}], "reward 0.5 in 1 step"),
        (
            [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}, {"step": 3, "reward": 1}],
            "reward 0.5 → 1 in 3 steps",
        ),
        # A score on held-out prompts tells more than a reward, also where it is logged later.
        (
            [{"step": 10, "reward": 0.5, "eval/mean_length": 9.0}, {"step": 2000, "reward": 0.9, "eval/right": 0.1234}],
            "right on held-out prompts 0.123 in 2,000 steps",
        ),
        (
            [{"step": 1, "seconds/rollout": 3.0, "seconds/update": 1.0, "seconds/total": 5.0}] * 2,
            "1 step; 60 % of the time in rollouts",
        ),
        ([{"step": 1, "seconds/reindexing": 3.0, "seconds/total": 3.0}], "1 step; 100 % of the time in reindexing"),
    ],
    ids=str,
)
def test_a_run_is_told_by_its_score_its_steps_and_its_longest_phase(lines, sentence):
    assert headline(lines) == sentence


@pytest.mark.quick
def test_seconds_that_no_phase_holds_are_other():
    lines = [{"step": 1, "seconds/update": 1.0, "seconds/total": 1.5}, {"step": 2, "seconds/rollout": 2.0}]
    assert phase_seconds(lines) == {"update": 1.0, "rollout": 2.0}  # rounding: no less than nothing is left over
    assert phase_seconds([*lines, {"step": 3, "seconds/total": 2.5}]) == {"update": 1.0, "rollout": 2.0, "other": 1.0}
    assert phase_seconds([{"step": 1, "seconds/update": None, "tokens_per_second": 3}]) == {}
