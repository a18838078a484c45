"""Rows chosen by a Beta posterior: the draws follow the law, the evidence is counted by hand, and a run resumes."""

import collections
import itertools

import numpy as np
import pytest
import scipy.stats
from test_collect import ROWS, collected, run_of, silent_for
from test_resume import Cut, assert_same_run, cut_at
from test_resume import run as run_in

from grpo_jax import GRPOConfig
from grpo_jax.run.selection import next_rows, no_evidence, success_reward, thompson, use_of_rows, with_evidence
from grpo_jax.text.prompts import prompt_indices

BETA = {"prompt_selection": "beta"}


def table(*rows):
    return np.array(rows, np.float32)


@pytest.mark.quick
def test_draws_follow_the_posteriors():
    """How often the first of two rows is chosen: P(|p − ½| < |q − ½|), by numerical integration."""
    known = table([3, 1, 1], [0, 5, 1])
    first, second = scipy.stats.beta(4, 2), scipy.stats.beta(1, 6)
    grid = (np.arange(20_000) + 0.5) / 40_000  # the distance from a half
    nearer = first.cdf(0.5 + grid) - first.cdf(0.5 - grid)
    density = second.pdf(0.5 + grid) + second.pdf(0.5 - grid)
    expected = np.sum(nearer * density) / 40_000
    chosen = [thompson(known, 1, seed=3, cursor=cursor)[0] for cursor in range(4000)]
    assert 0.6 < expected < 0.95
    assert 1 - np.mean(chosen) == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 4000))


@pytest.mark.quick
def test_rows_are_distinct_while_there_are_enough_and_others_with_each_seed_and_cursor():
    known = table(*[[0, 0, 0]] * 5)
    for count in range(1, 12):
        times = collections.Counter(thompson(known, count, seed=0, cursor=7))
        assert max(times.values()) - min([times[row] for row in range(5)]) <= 1
        assert sum(times.values()) == count
    assert (
        len({tuple(thompson(known, 5, seed=seed, cursor=c)) for seed, c in itertools.product(range(5), range(5))}) > 15
    )


@pytest.mark.quick
def test_evidence_by_hand():
    nan = np.nan
    config = GRPOConfig(**BETA, reward_weights=[1.0, -2.0, 0.5], prompt_decay=0.25)
    assert success_reward(config, 3) == 1.5, "full marks, without the function of a negative weight"
    rewards = np.array(
        [
            [[1, 0, 1], [1, 0, nan], [1, nan, 1], [nan, nan, nan]],
            [[0, 0, 1], [0, 0, 0], [2, 0, 0], [3, 1, 1]],
            [[1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1]],
        ]
    )
    before = table([4, 8, 2], [0, 0, 0], [1, 0, 1], [0, 2, 5], [9, 9, 9], [0, 0, 0])
    after, metrics = with_evidence(before, [2, 0, 2], rewards, config)
    # Three of six rows: what was known fades by √¼.
    expected = table([4 / 2 + 2, 8 / 2 + 2, 3], [0, 0, 0], [1 / 2 + 6, 1, 3], [0, 1, 5], [4.5, 4.5, 9], [0, 0, 0])
    np.testing.assert_allclose(after, expected)
    assert after.dtype == np.float32
    np.testing.assert_array_equal(before[2], [1, 0, 1], "the table that was given stays")
    assert metrics["prompt_selection/success"] == pytest.approx(8 / 11)
    assert metrics["prompt_selection/expected"] == pytest.approx((2 / 3 + 5 / 14 + 2 / 3) / 3)
    lower = GRPOConfig(**BETA, prompt_success=1.0)
    assert success_reward(lower, 3) == 1.0
    unscored, metrics = with_evidence(before, [1], np.full((1, 2, 3), nan), lower)
    assert unscored[1].tolist() == [0, 0, 1]
    assert np.isnan(metrics["prompt_selection/success"])


@pytest.mark.quick
def test_what_was_used_of_the_rows():
    none = use_of_rows(table([0, 0, 0], [0, 0, 0]))
    assert none == {"prompt_selection/coverage": 0, "prompt_selection/share": 0}
    half = use_of_rows(table([0, 0, 3], [1, 0, 3], [0, 0, 0], [0, 9, 0]))
    assert half == {"prompt_selection/coverage": 0.5, "prompt_selection/share": 0.5}
    assert use_of_rows(table([0, 0, 1], [0, 0, 3]))["prompt_selection/share"] == pytest.approx(16 / 20)


@pytest.mark.quick
def test_without_posteriors_rows_come_in_epochs():
    config = GRPOConfig(seed=5)
    assert no_evidence(config, ROWS) is None
    assert next_rows(config, None, 4, 5, 6) == [row for _, row in prompt_indices(4, 5, num_rows=6, seed=5)]


def half_right(completion_ids, number):
    """Row 3 is right now and then, the others always or never."""
    return [float(i % 2 if n == 3 else n % 2) for i, n in enumerate(number)]


@pytest.mark.quick
def test_a_rollout_takes_the_chosen_rows_and_learns_of_them():
    run = run_of(half_right, shuffle_dataset=True, prompt_decay=1.0, **BETA)
    posteriors = no_evidence(run.config, ROWS)
    prompts = [row["prompt"] for row in ROWS]
    for cursor in range(0, 24, 4):
        chosen = thompson(posteriors, 4, seed=run.config.seed, cursor=cursor)
        experience = collected(run, cursor, posteriors=posteriors)
        assert [prompts.index(row["prompt"]) for row in experience.rows[::4]] == chosen
        expected, measured = with_evidence(posteriors, chosen, half(chosen), run.config)
        np.testing.assert_array_equal(experience.posteriors, expected)
        posteriors = experience.posteriors
        assert measured.items() <= experience.metrics.items()
        assert use_of_rows(posteriors).items() <= experience.metrics.items()
    assert posteriors[:, 2].argmax() == 3, "whose chance is a half"


def half(rows):
    return np.array([[[float(i % 2 if n == 3 else n % 2)] for i in range(4)] for n in rows])


@pytest.mark.quick
def test_refills_choose_by_what_the_rollout_before_has_shown():
    run = run_of(silent_for(0, 1, 2, 4, 5), shuffle_dataset=True, dynamic_sampling=True, max_refills=2, **BETA)
    experience = collected(run, posteriors=no_evidence(run.config, ROWS))
    assert experience.posteriors[:, 2].sum() == experience.cursor == 12


def test_a_run_resumes_to_the_same_bytes(tmp_path):
    """Killed between iterations and within one, with rows in hand that were chosen by posteriors that are gone."""
    settings = {"rollout_ahead": True, "max_steps": 12, "num_iterations": 2, "eval_steps": None, "logging_steps": 1}
    settings |= {"prompt_success": 0.25, "dynamic_sampling": False, **BETA}
    whole = run_in(tmp_path / "whole", **settings)
    for step in (5, 7):  # the newest checkpoints are of steps 4 and 6; iterations begin after 4 and 8
        with pytest.raises(Cut):
            run_in(tmp_path / "cut", callbacks=[cut_at(step)], **settings)
    assert_same_run(run_in(tmp_path / "cut", **settings), whole, tmp_path / "cut", tmp_path / "whole")
