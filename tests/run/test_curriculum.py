"""Rows of rising levels: who is admitted and when, by hand and by a walk through all results; a run resumes."""

import collections
import itertools

import numpy as np
import pytest
import test_collect
import test_resume
from test_collect import POLICY, ROWS, collected, run_of

from grpo_jax import GRPOConfig, train
from grpo_jax.run.curriculum import admitted_rows, highest_level, level_table, with_rewards
from grpo_jax.run.selection import next_rows, no_evidence, use_of_rows, with_evidence

LEVELS = {"prompt_selection": "curriculum", "prompt_success": 0.5}


def config_of(**settings):
    return GRPOConfig(**LEVELS | {"prompt_groups": 2} | settings)


def rows_of(*levels):
    return [{"level": level} for level in levels]


def scored(*means):
    """Rewards [B, 2, 1] with these means; None: not scored."""
    return np.array([[[np.nan], [np.nan]] if mean is None else [[mean], [mean]] for mean in means], np.float32)


@pytest.mark.quick
def test_the_next_level_is_admitted_by_the_newest_groups_of_the_highest_by_hand():
    config, table = config_of(), level_table(rows_of(7, 0, 0, 0.5, 0, 7))
    assert table[:, 3].tolist() == [3, 1, 1, 2, 1, 3]
    assert no_evidence(config, rows_of(7, 0)).shape == (2, 4)
    steps = [
        # Rows, their means, the highest level after them, the mean that decided on it.
        ([1], [0.9], 1, 0.9),  # one of two
        ([2], [None], 1, 0.9),  # not scored: still one
        ([2, 4], [0.0, 0.25], 1, 0.125),  # the newest two, of which 0.9 is none
        ([1], [0.5], 1, 0.375),
        ([2], [0.5], 2, None),  # reached, with none of the next level yet
        ([1, 2], [0.0, 0.0], 2, None),  # a level that was reached remains so
        ([3], [0.25], 2, 0.25),  # its only row
        ([3, 1], [0.75, 0.0], 3, None),
        ([0, 5], [0.0, 0.0], 3, 0.0),
    ]
    for rows, means, level, mean in steps:
        table, metrics = with_evidence(table, rows, scored(*means), config)
        assert (metrics["prompt_selection/level"], highest_level(table, config)) == (level, level)
        assert metrics["prompt_selection/level_reward"] == pytest.approx(np.nan if mean is None else mean, nan_ok=True)
    assert table[:, 2].tolist() == [1, 4, 4, 2, 1, 1]
    assert use_of_rows(table)["prompt_selection/coverage"] == 1.0
    assert table.dtype == np.float32


@pytest.mark.quick
def test_rewards_are_weighed_and_completions_without_a_score_are_left_out():
    config = config_of(reward_weights=[1.0, 0.5], prompt_groups=1)
    rewards = np.array([[[0.25, 0.5], [np.nan, np.nan], [0.5, 0.5]]], np.float32)
    after, metrics = with_rewards(level_table(rows_of(1, 2)), [0], rewards, config)
    assert metrics["prompt_selection/level"] == 2.0
    assert after[0].tolist() == [pytest.approx((0.5 + 0.75) / 2), 1, 1, 1]


@pytest.mark.quick
def test_every_short_history_is_that_of_a_loop_without_a_table():
    """Three rows of level 1 and one of level 2, two rows in a step, each result 0 or 1: three steps."""
    config = config_of(prompt_success=0.75)
    results = list(itertools.product((0.0, 1.0), repeat=2))
    for history in itertools.product([(0, 1), (2, 0)], results, repeat=3):
        table, newest, reached = level_table(rows_of(1, 1, 1, 2)), {}, False
        for rows, means in zip(history[::2], history[1::2], strict=True):
            table, metrics = with_rewards(table, list(rows), scored(*means), config)
            if not reached:
                for row, mean in zip(rows, means, strict=True):
                    newest.pop(row, None)
                    newest[row] = mean  # the last is the newest
                reached = len(newest) >= 2 and np.mean(list(newest.values())[-2:]) >= 0.75
            assert metrics["prompt_selection/level"] == 1 + reached


@pytest.mark.quick
def test_the_rows_that_were_sampled_least_come_next_in_an_order_drawn_anew():
    config, table = config_of(), level_table(rows_of(*[0] * 4, *[1] * 4))
    times = collections.Counter()
    for cursor in range(0, 30, 3):
        rows = next_rows(config, table, cursor, 3, 8)
        assert rows == next_rows(config, table, cursor, 3, 8)
        table, _ = with_evidence(table, rows, scored(0, 0, 0), config)
        times.update(rows)
        assert set(times) <= set(range(4))
        assert max(times.values()) - min(times[row] for row in range(4)) <= 1
    fresh = level_table(rows_of(*[0] * 4, *[1] * 4))
    assert len({tuple(admitted_rows(fresh, 4, cursor=cursor, config=config)) for cursor in range(40)}) > 10
    other = config_of(seed=1)
    drawn = [[admitted_rows(fresh, 4, cursor=cursor, config=one) for cursor in range(10)] for one in (config, other)]
    assert drawn[0] != drawn[1]
    assert admitted_rows(fresh, 9, cursor=0, config=config) == drawn[0][0] * 2 + drawn[0][0][:1]
    table, metrics = with_evidence(table, [0, 1], scored(1, 1), config)
    assert metrics["prompt_selection/level"] == 2
    assert set(next_rows(config, table, 32, 4, 8)) == {4, 5, 6, 7}, "the new ones first"


@pytest.mark.quick
@pytest.mark.parametrize("level", [None, "3", True, float("nan")])
def test_rows_without_a_level_are_refused_before_anything_is_sampled(level):
    rows = [{**ROWS[0], "level": 1}, {**ROWS[1], "level": level}]
    config = GRPOConfig(max_steps=1, max_completion_length=8, **LEVELS)
    with pytest.raises(ValueError, match=r'row 1 has the level .*a number in the column "level" of each row'):
        train(POLICY, rows, lambda completions: [0.0], config)
    with pytest.raises(ValueError, match="row 0 has the level None"):
        train(POLICY, ROWS, lambda completions: [0.0], config)


def even(completion_ids, level):
    return [float(level % 2 == 0) for level in level]


@pytest.mark.quick
def test_a_rollout_takes_the_admitted_rows_and_learns_of_them(monkeypatch):
    rows = [{**row, "level": index // 2} for index, row in enumerate(ROWS)]
    monkeypatch.setattr(test_collect, "ROWS", rows)
    run = run_of(even, shuffle_dataset=True, **LEVELS)
    table, levels, prompts = no_evidence(run.config, rows), [], [row["prompt"] for row in rows]
    for cursor in range(0, 16, 4):
        expected = next_rows(run.config, table, cursor, 4, len(rows))
        experience = collected(run, cursor, posteriors=table)
        assert [prompts.index(row["prompt"]) for row in experience.rows[::4]] == expected
        table = experience.posteriors
        levels.append(experience.metrics["prompt_selection/level"])
    assert levels == [2.0] * 4, "the second level is never rewarded"
    assert table[:, 2].tolist() == [5, 5, 3, 3, 0, 0], "at first the two of the first level twice, then all four"


def test_a_run_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    """Killed between iterations and within one, with rows in hand that were chosen by a table that is gone."""
    monkeypatch.setattr(test_resume, "ROWS", [{**row, "level": i % 3} for i, row in enumerate(test_resume.ROWS)])
    settings = {"rollout_ahead": True, "max_steps": 12, "num_iterations": 2, "eval_steps": None, "logging_steps": 1}
    settings |= {**LEVELS, "prompt_success": 0.0, "prompt_groups": 2, "dynamic_sampling": False}
    lines = []
    keep = lambda step, line: lines.append(line)
    whole = test_resume.run(tmp_path / "whole", callbacks=[keep], **settings)
    levels = [line["prompt_selection/level"] for line in lines if "prompt_selection/level" in line]
    assert levels == [2.0, 2.0, 3.0], "the second rows were chosen before the first rewards"
    for step in (5, 7):  # the newest checkpoints are of steps 4 and 6; iterations begin after 4 and 8
        with pytest.raises(test_resume.Cut):
            test_resume.run(tmp_path / "cut", callbacks=[test_resume.cut_at(step)], **settings)
    again = test_resume.run(tmp_path / "cut", **settings)
    test_resume.assert_same_run(again, whole, tmp_path / "cut", tmp_path / "whole")
