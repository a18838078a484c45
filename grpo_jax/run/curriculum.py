"""Rows of rising levels: those of the lowest at first, and of the next one once the rewards are high enough.

`prompt_selection="curriculum"` reads the column `level` of the rows. Level 1 is the lowest number in it, 2 the next,
and so on. Rows are admitted up to one level, the highest so far; those that were sampled least come next, in an order
drawn anew, so that the rows of a new level come until they have been sampled as often as the others. The next level is
admitted once the mean reward of the highest, over the rows of it that were sampled last, reaches a bound, and stays so.

What is known stands in one table, [N, 4] float32, which is in every checkpoint in the place of the posteriors.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import show
from grpo_jax.rewards.calls import total_rewards
from grpo_jax.types import Row

Table = np.ndarray
"""[N, 4] float32, of each row: the mean reward of its last group as long as its level was the highest, NaN for none;
how many prompts had been sampled then, exact up to 2²⁴; how often it was sampled; its level, from 1 up."""


def level_table(rows: Sequence[Row]) -> Table:
    """The table of a run that begins.

    Raises:
      ValueError: a row without a number in the column `level`.

    Example:
      >>> level_table([{"level": 5}, {"level": 0}, {"level": 5}])[:, 3]
      array([2., 1., 2.], dtype=float32)
    """
    levels = []
    for index, row in enumerate(rows):
        level = row.get("level")
        if isinstance(level, bool) or not isinstance(level, int | float) or not np.isfinite(level):
            raise ValueError(
                f'dataset: row {index} has the level {show(level)}, and prompt_selection = "curriculum" needs a number'
                ' in the column "level" of each row'
            )
        levels.append(float(level))
    table = np.zeros((len(rows), 4), np.float32)
    table[:, 0], table[:, 3] = np.nan, 1 + np.unique(np.array(levels), return_inverse=True)[1]
    return table


def highest_level(table: Table, config: GRPOConfig) -> int:
    """The highest level that is admitted: the first whose newest rewards do not reach the bound, else the last.

    Only the highest has its rewards written down, so that a level which has reached the bound remains so.
    """
    last, success = int(table[:, 3].max()), config.prompt_success
    assert success is not None, "the config says so"
    for level in range(1, last):
        rewards = newest_rewards(table, level, config.prompt_groups)
        enough = len(rewards) == min(config.prompt_groups, np.count_nonzero(table[:, 3] == level))
        if not enough or rewards.mean() < success:
            return level
    return last


def newest_rewards(table: Table, level: int, count: int) -> np.ndarray:
    """The mean rewards of the `count` rows of a level that were sampled last; fewer, if there are fewer.

    Example:
      >>> table = np.array([[0.5, 1, 1, 1], [0.25, 3, 2, 1], [np.nan, 0, 0, 1], [1, 2, 1, 1]], np.float32)
      >>> newest_rewards(table, 1, 2)
      array([0.25, 1.  ])
    """
    known = table[(table[:, 3] == level) & ~np.isnan(table[:, 0])].astype(float)
    return known[np.argsort(-known[:, 1], kind="stable")][:count, 0]


def admitted_rows(table: Table, count: int, *, cursor: int, config: GRPOConfig) -> list[int]:
    """The rows that come next; where `count` is above their number, rows are repeated."""
    # NumPy keeps the streams of RandomState the same for ever, and those of Generator's methods not (NEP 19).
    draw = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((config.seed, cursor))))
    rows = np.flatnonzero(table[:, 3] <= highest_level(table, config))
    order = np.lexsort((draw.permutation(len(rows)), table[rows, 2]))
    return np.resize(rows[order], count).tolist()


def with_rewards(
    table: Table, rows: Sequence[int], rewards: np.ndarray, config: GRPOConfig
) -> tuple[Table, dict[str, float]]:
    """The table after a rollout, and its metrics.

    Args:
      rows: B rows that were sampled.
      rewards: [B, G, K] of their completions, NaN = not scored.

    Returns:
      Another table, and metrics: `prompt_selection/level`, the highest level that is admitted now, from 1 up, and
      `prompt_selection/level_reward`, the mean reward over those rows of it that decide, NaN before there are any.
    """
    after, before = table.copy(), int(table[:, 2].sum(dtype=float))
    level = highest_level(table, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a group without a score has no mean
        means = np.nanmean(total_rewards(rewards, config.reward_weights), axis=1)
    for at, (row, mean) in enumerate(zip(rows, means, strict=True), before + 1):
        after[row, 2] += 1
        if after[row, 3] == level and not np.isnan(mean):
            after[row, :2] = mean, at
    now = highest_level(after, config)
    newest = newest_rewards(after, now, config.prompt_groups)
    return after, {
        "prompt_selection/level": float(now),
        "prompt_selection/level_reward": float(newest.mean()) if len(newest) else float("nan"),
    }
