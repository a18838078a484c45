"""Rollout rewards: gathering across processes, metrics, lines of `completions.jsonl`, and dynamic sampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax.config import settings
from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.advantages import zero_signal_groups
from grpo_jax.models.sharding import gather_objects
from grpo_jax.rewards.calls import Rewards, mean_of_scored, reward_stats, total_rewards
from grpo_jax.rewards.contract import copy_containers, reward_names
from grpo_jax.rewards.outcomes import RewardParts
from grpo_jax.run.rollout_result import RolloutResult
from grpo_jax.text.images import images_of
from grpo_jax.types import Batch, RewardFn
from grpo_jax.watch.writer import to_json

_jit_zero_signal = jax.jit(zero_signal_groups, static_argnames=("weights", "multi_objective_aggregation"))


def gather_rewards(process_rewards: Rewards, reward_fns: RewardFn | Sequence[RewardFn]) -> Rewards:
    """Gather the rewards for all rows from all processes. Each process passes the rewards for its own rows.

    Reward statistics are recomputed over all completions. Error counts are summed, and times are maxima over processes.
    """
    if jax.process_count() == 1:
        return process_rewards
    names, (_, g, k) = reward_names(reward_fns), process_rewards.values.shape
    arrays = {"values": process_rewards.values.tolist(), "logged_columns": to_json(process_rewards.logged_columns)}
    sent = [Rewards._make(one) for one in gather_objects([*(process_rewards._asdict() | arrays).values()])]
    values = [np.asarray(one.values, np.float32).reshape(-1, g, k) for one in sent]
    parts = [[RewardParts._make(part) for part in one.parts] for one in sent]
    joined = join_rewards([one._replace(values=x, parts=p) for one, x, p in zip(sent, values, parts, strict=True)])
    stats = reward_stats(names, joined.values.reshape(-1, len(names)))
    for name in dict.fromkeys(name for one in sent for name in one.stats):
        per_process = [one.stats[name] for one in sent if name in one.stats]
        if name.endswith("/errors"):
            stats[name] = float(sum(per_process))
        elif name.endswith("/seconds"):
            stats[name] = float(max(per_process))
    return joined._replace(stats=stats)


def join_rewards(parts: Sequence[Rewards]) -> Rewards:
    """Concatenate rewards. Statistics are taken from the first part."""
    firsts = itertools.accumulate((len(part.completions) for part in parts), initial=0)
    metrics: dict[str, list[float]] = {}
    for name, values in (item for part in parts for item in part.logged_metrics.items()):
        metrics.setdefault(name, []).extend(values)
    return Rewards(
        values=np.concatenate([part.values for part in parts]),
        stats=parts[0].stats,
        parts=[
            one._replace(completion=first + one.completion)
            for first, part in zip(firsts, parts, strict=False)
            for one in part.parts
        ],
        logged_metrics=metrics,
        logged_columns=[columns for part in parts for columns in part.logged_columns],
        completions=[completion for part in parts for completion in part.completions],
    )


def zero_signal(rewards: np.ndarray, config: GRPOConfig) -> np.ndarray:
    """Return a bool mask [B] that is True for groups whose rewards are all equal."""
    found = _jit_zero_signal(
        rewards, weights=config.reward_weights, multi_objective_aggregation=config.multi_objective_aggregation
    )
    return np.asarray(found)


def rollout_metrics(config: GRPOConfig, rewards: np.ndarray, rollout: RolloutResult) -> dict[str, float]:
    """Compute metrics from rewards [B, G, K] and completion lengths, with TRL's names."""
    lengths = rollout.present.sum(axis=-1)
    totals = total_rewards(rewards, config.reward_weights)
    spread = [np.std(group[~np.isnan(group)], ddof=1) for group in totals if (~np.isnan(group)).sum() > 1]
    return {
        "reward": mean_of_scored(totals),
        "reward_std": float(np.mean(spread)) if spread else float("nan"),
        "frac_reward_zero_std": float(zero_signal(rewards, config).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - rollout.completions.ended.mean()),
        "num_tokens": float(lengths.sum()),
    }


def completion_records(
    rewards: Rewards, names: Sequence[str], rollout: RolloutResult, advantages: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Return a dict per completion for `completions.jsonl`, prompt-major. In evaluations, `advantages` is None."""
    rows, ended = rollout.rows, rollout.completions.ended
    g, images = ended.shape[1], [images_of(row, row["prompt"]) for row in rows]
    turns = [
        [{"by": "policy" if by_policy else "environment", "text": text} for by_policy, text in episode.turns]
        for episode in rollout.episodes or ()
    ]
    turn_rewards: dict[int, dict[str, list[float]]] = {}
    for part in rewards.parts:
        if not part.per_token:
            turn_rewards.setdefault(part.completion, {})[names[part.function]] = part.values

    return [
        {
            **rewards.logged_columns[i],
            "prompt": copy_containers(rows[i // g]["prompt"]),
            **({"images": images[i // g]} if images[i // g] else {}),
            "completion": text,
            **({"turns": turns[i]} if turns else {}),
            "rewards": dict(zip(names, rewards.values[i // g, i % g].tolist(), strict=True)),
            **({"turn_rewards": turn_rewards[i]} if i in turn_rewards else {}),
            **({} if advantages is None else {"advantage": float(advantages[i // g, i % g])}),
            "ended": bool(ended[i // g, i % g]),
        }
        for i, text in enumerate(rewards.completions)
    ]


# Dynamic sampling -----------------------------------------------------------------------------------------------------


def refill_groups(
    rollout: RolloutResult,
    rewards: Rewards,
    metrics: dict[str, float],
    config: GRPOConfig,
    sample_more: Callable[[], tuple[RolloutResult, Rewards, dict[str, float], Batch | None]],
) -> tuple[RolloutResult, Rewards, dict[str, float], np.ndarray]:
    """Replace zero-signal groups with groups for the next prompts from `sample_more` (DAPO's dynamic sampling).

    After `MAX_REFILLS` additional rollouts, missing groups are padded with zero-signal groups. The last result is a
    mask [B], False for padding groups, which are excluded from the loss, its normalizers and batch statistics. Metrics
    are from the first rollout, because rewards did not select its prompts. Only costs are summed over all rollouts.
    """
    count, refills = len(rollout.rows), 0
    costs = [name for name in metrics if name.startswith("rewards/") and name.endswith(("/errors", "/seconds"))]
    while True:
        has_signal = ~zero_signal(rewards.values, config)
        if has_signal.sum() >= count or refills == settings.MAX_REFILLS:
            break
        more_rollout, more_rewards, more, _ = sample_more()
        rollout, rewards = rollout.join(more_rollout), join_rewards([rewards, more_rewards])
        metrics |= {name: metrics[name] + more[name] for name in ("num_tokens", *costs)}
        refills += 1
    metrics["dynamic_sampling/refills"] = float(refills)
    metrics["dynamic_sampling/groups_without_signal"] = float((~has_signal).sum())
    groups = np.argsort(~has_signal, kind="stable")[:count]
    return rollout.take(groups), _take_groups(rewards, groups), metrics, has_signal[groups]


def _take_groups(rewards: Rewards, groups: np.ndarray) -> Rewards:
    """Return the rewards for the given groups, in the given order."""
    g = rewards.values.shape[1]
    old = [b * g + i for b in groups.tolist() for i in range(g)]
    new = {completion: at for at, completion in enumerate(old)}
    return rewards._replace(
        completions=[rewards.completions[i] for i in old],
        logged_columns=[rewards.logged_columns[i] for i in old],
        values=rewards.values[groups],
        parts=[part._replace(completion=new[part.completion]) for part in rewards.parts if part.completion in new],
    )
