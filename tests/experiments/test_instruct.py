"""The experiment on reasoning-gym: its problems."""

import pytest

from experiments import instruct, problems

pytestmark = pytest.mark.quick

gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed, which makes the problems")


def test_problems_are_shown_once_and_none_is_held_out_and_learnt():
    test, learnt = instruct.held_out(size=20), instruct.train_problems(seed=3, size=30)
    questions = [row["prompt"][-1]["content"] for row in (*test, *learnt)]
    assert len(questions) == len(set(questions))
    assert {row["task"] for row in test} == {row["task"] for row in learnt} == set(problems.TASKS)
    assert [row["task"] for row in test[: len(problems.TASKS)]] == list(problems.TASKS)
    assert [turn["role"] for turn in test[0]["prompt"]] == ["user", "assistant", "user"]
    shown = [row["prompt"][0]["content"] for row in test]
    assert len(set(shown)) == len(shown), "another example before each: one alone would be what the model says"
    assert instruct.train_problems(seed=3, size=30) == learnt != instruct.train_problems(seed=4, size=30)
