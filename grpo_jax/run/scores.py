"""Rewards of the completions of a run: each of its processes calls the reward functions for its own rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.devices.sharding import gather_objects
from grpo_jax.rewards.calls import compute_rewards, reward_stats
from grpo_jax.rewards.contract import Extras, reward_names
from grpo_jax.text.completions import reward_inputs
from grpo_jax.types import Completions

__all__ = ["Scores", "of_all_processes", "score_own"]


class Scores(NamedTuple):
    """What reward functions said of some completions.

    Attributes:
      texts: B·G completions, text or messages.
      extras: B·G dicts of what the functions kept by `log_extra`.
      rewards: [B, G, K] float32, NaN for "not scored".
      logged: what they logged by `log_metric`, by its name.
      stats: as from `compute_rewards`.
    """

    texts: list[Any]
    extras: list[dict[str, Any]]
    rewards: np.ndarray
    logged: dict[str, list[float]]
    stats: dict[str, float]


def score_own(
    tokenizer: Any,
    reward_fns: Callable[..., Any] | Sequence[Callable[..., Any]],
    rows: Sequence[dict[str, Any]],
    completions: Completions,
    *,
    on_error: str,
    extras: Extras,
) -> Scores:
    """Call the reward functions for this process's part of the rows: rows/n of n processes, in their order.

    Args:
      tokenizer: decodes the completions.
      reward_fns: K reward functions, or one.
      rows: B rows of the dataset, the same on all processes.
      completions: theirs, [B, G, T], on the host.
      on_error: see `compute_rewards`.
      extras: what the functions are given besides lists.

    Returns:
      The scores of [B', G] completions, for `of_all_processes`. B' is 0 on some processes if there are more of them
      than rows.

    Raises:
      ValueError: as `compute_rewards`.
    """
    n, process, (_, g, _) = jax.process_count(), jax.process_index(), np.shape(completions.tokens)
    own = slice(len(rows) * process // n, len(rows) * (process + 1) // n)
    if own.start == own.stop:
        return Scores([], [], np.zeros((0, g, len(reward_names(reward_fns))), np.float32), {}, {})
    inputs = reward_inputs(tokenizer, rows[own], completions.tokens[own], completions.mask[own])
    rewards, stats = compute_rewards(reward_fns, num_generations=g, on_error=on_error, extras=extras.given(), **inputs)
    texts = inputs["completions"]
    return Scores(texts, extras.rows(len(texts)), rewards, extras.values(), stats)


def of_all_processes(own: Scores, reward_fns: Callable[..., Any] | Sequence[Callable[..., Any]]) -> Scores:
    """The scores of all rows, from those of each process; all processes have to ask together.

    Statistics are those of all completions; faults are added, and of the seconds the slowest process's count.
    """
    if jax.process_count() == 1:
        return own
    parts = [Scores(*part) for part in gather_objects([*own._replace(rewards=own.rewards.tolist())])]
    chain, names = itertools.chain.from_iterable, reward_names(reward_fns)
    rewards = np.array([*chain(part.rewards for part in parts)], np.float32)

    def together(dicts: list[dict[str, Any]]) -> dict[str, list[Any]]:
        return {name: [some[name] for some in dicts if name in some] for name in dict.fromkeys(chain(dicts))}

    counted = {
        name: float(sum(values) if name.endswith("/errors") else max(values))
        for name, values in together([part.stats for part in parts]).items()
        if name.endswith(("/errors", "/seconds"))
    }
    return Scores(
        texts=[*chain(part.texts for part in parts)],
        extras=[*chain(part.extras for part in parts)],
        rewards=rewards,
        logged={name: [*chain(lists)] for name, lists in together([part.logged for part in parts]).items()},
        stats=reward_stats(names, rewards.reshape(-1, len(names))) | counted,
    )
