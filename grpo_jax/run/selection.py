"""Which rows are sampled next: in shuffled epochs, by levels, or by the chance of success that is believed of each row.

`prompt_selection="beta"` keeps a Beta posterior for each row on the host (MoPPS, arXiv:2507.04632): a group's successes
and failures are added to those of its row, and all of them fade. Rows are chosen by Thompson sampling: of each row a
chance p is drawn from its posterior, and those go next whose p(1 − p), the variance of a success, is the largest. Rows
that were never sampled are believed to have any chance, so that they keep being tried.

The table is in every checkpoint, draws depend on the seed and the number of prompts sampled before alone, and process 0
chooses for all: a run resumes to the same bytes, and is the same on any devices. The same holds for the table of
`prompt_selection="curriculum"` (`run.curriculum`), which stands in its place. Both have no epochs: they sample as
many prompts as the epochs would, some rows often and some never. With `rollout_ahead` rows are chosen before the
rewards of the iteration before are known.

After a kill the newest whole checkpoint decides (`run.loop.begin_or_resume`): the updates that its batch still waits
for come first, then the completions that it holds for the next iteration, or the rows that an engine was at, and then
the rows from its `Progress.cursor` on, which counts all prompts that were sampled before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.sharding import gather_objects
from grpo_jax.rewards.calls import total_rewards
from grpo_jax.run.curriculum import admitted_rows, level_table, with_rewards
from grpo_jax.text.prompts import prompt_indices
from grpo_jax.types import Row

Posteriors = np.ndarray
"""[N, 3] float32: of each row its faded successes and failures, and how often it was sampled. The posterior of its
chance of success is Beta(1 + successes, 1 + failures). With levels: `curriculum.Table`, [N, 4]."""


def no_evidence(config: GRPOConfig, rows: Sequence[Row]) -> Posteriors | None:
    """The posteriors of a run that begins; None where rows are not chosen by them."""
    if config.prompt_selection == "curriculum":
        return level_table(rows)
    return np.zeros((len(rows), 3), np.float32) if config.prompt_selection == "beta" else None


def next_rows(config: GRPOConfig, posteriors: Posteriors | None, cursor: int, count: int, num_rows: int) -> list[int]:
    """The rows of the prompts from `cursor` on, by their indices; to be called by all processes, which exchange them.

    Args:
      posteriors: those to choose by; None: the shuffled epochs.
      cursor: prompts sampled since the start of the run.
      count: how many; where it is above `num_rows`, rows are repeated.
    """
    if posteriors is None:
        entries = prompt_indices(cursor, count, num_rows=num_rows, seed=config.seed, shuffle=config.shuffle_dataset)
        return [row for _, row in entries]
    if config.prompt_selection == "curriculum":
        return gather_objects(admitted_rows(posteriors, count, cursor=cursor, config=config))[0]
    return gather_objects(thompson(posteriors, count, seed=config.seed, cursor=cursor))[0]


def thompson(posteriors: Posteriors, count: int, *, seed: int, cursor: int) -> list[int]:
    """The rows whose drawn chance is nearest to a half, the nearest first.

    Example:
      >>> known = np.array([[90, 0, 1], [40, 40, 1], [0, 90, 1]], np.float32)
      >>> thompson(known, 1, seed=0, cursor=0), thompson(known, 4, seed=0, cursor=0)[::3]
      ([1], [1, 1])
    """
    # NumPy keeps the streams of RandomState the same for ever, and those of Generator's methods not (NEP 19).
    draw = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, cursor))))
    successes, failures = posteriors[:, 0].astype(float), posteriors[:, 1].astype(float)
    order = np.argsort(np.abs(draw.beta(1 + successes, 1 + failures) - 0.5), kind="stable")
    return np.resize(order, count).tolist()


def with_evidence(
    posteriors: Posteriors, rows: Sequence[int], rewards: np.ndarray, config: GRPOConfig
) -> tuple[Posteriors, dict[str, float]]:
    """The posteriors after a rollout, and its metrics.

    All evidence fades by `prompt_decay` over as many prompts as there are rows. A completion is a success
    if the weighted sum of its rewards reaches `prompt_success`; one that is not scored is neither.

    Args:
      rows: B rows that were sampled.
      rewards: [B, G, K] of their completions, NaN = not scored.

    Returns:
      Other posteriors, and metrics: `prompt_selection/expected` and `prompt_selection/success`, the mean success that
      was believed of these rows and the one that was seen. With levels: what `curriculum.with_rewards` returns.
    """
    if config.prompt_selection == "curriculum":
        return with_rewards(posteriors, rows, rewards, config)
    totals = total_rewards(rewards, config.reward_weights)
    scored = ~np.isnan(totals)
    right = (totals >= success_reward(config, rewards.shape[2]) - 1e-6) & scored
    at = list(rows)
    believed = (1 + posteriors[at, 0]) / (2 + posteriors[at, 0] + posteriors[at, 1])
    kept = np.float32(config.prompt_decay ** (len(at) / len(posteriors)))
    after = posteriors * np.array([kept, kept, 1], np.float32)
    seen = np.stack([right.sum(1), (scored & ~right).sum(1), np.ones(len(at))], axis=1).astype(np.float32)
    np.add.at(after, at, seen)
    success = float(right.sum() / scored.sum()) if scored.any() else float("nan")
    return after, {"prompt_selection/expected": float(believed.mean()), "prompt_selection/success": success}


def success_reward(config: GRPOConfig, num_reward_fns: int) -> float:
    """The weighted sum of rewards from which on a completion is a success: the config's, or 1 of each function."""
    if config.prompt_success is not None:
        return config.prompt_success
    weights = [1.0] * num_reward_fns if config.reward_weights is None else config.reward_weights
    return sum(max(weight, 0.0) for weight in weights)


def use_of_rows(posteriors: Posteriors) -> dict[str, float]:
    """How much of the dataset has been used so far.

    Returns:
      `prompt_selection/coverage`: the share of rows that were sampled at least once; `prompt_selection/share`:
      (Σ n)² / (N·Σ n²) of the rows' numbers of samples n, which is 1 where all were sampled as often, and k/N where k
      were and no other.
    """
    n = posteriors[:, 2].astype(float)
    return {
        "prompt_selection/coverage": float((n > 0).mean()),
        "prompt_selection/share": float(n.sum() ** 2 / max(len(n) * (n**2).sum(), 1.0)),
    }
