"""Rollout results (completions, prompts, rows, episodes), their rewards, metrics and records, and dynamic sampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config import settings
from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.advantages import zero_signal_groups
from grpo_jax.models.sharding import gather_objects
from grpo_jax.rewards.calls import Rewards, mean_of_scored, reward_stats, total_rewards
from grpo_jax.rewards.contract import copy_containers, reward_names
from grpo_jax.rewards.outcomes import RewardParts
from grpo_jax.text.images import images_of
from grpo_jax.types import Batch, Completions, Prompts, RewardFn, Row
from grpo_jax.watch.writer import to_json

if TYPE_CHECKING:  # imported at runtime only by multi-turn runs
    from grpo_jax.rollout.episode_setup import EpisodeRecord

_jit_zero_signal = jax.jit(zero_signal_groups, static_argnames=("weights", "multi_objective_aggregation"))


class RolloutResult(NamedTuple):
    """Completions [B, G, T] for B dataset rows, as NumPy arrays.

    The prompts in `rows` include text that environments added. `episodes` are the records of B·G multi-turn
    completions, prompt-major. `environments` has an entry per completion (None for another process's completion), or is
    None for prefetched and single-turn completions. `process_rows` are the indices of this process's rows. If None, the
    rows are divided equally among processes. `engine_metrics` are the `last_metrics` of an engine.
    """

    rows: list[Row]
    prompts: Prompts
    completions: Completions
    episodes: Sequence[EpisodeRecord] | None = None
    environments: Sequence[object] | None = None
    process_rows: range | None = None
    engine_metrics: Mapping[str, float] = {}

    @property
    def present(self) -> np.ndarray:
        """Mask [B, G, T] bool, True for all of a completion's tokens, including observations."""
        return np.asarray(self.completions.mask if self.completions.present is None else self.completions.present)

    @property
    def turns(self) -> np.ndarray:
        """Turn index of each sampled token, [B, G, T] int32, starting at 0; −1 elsewhere."""
        sampled = np.asarray(self.completions.mask)
        if self.episodes is None:
            return np.where(sampled, np.int32(0), np.int32(-1))
        from grpo_jax.rollout.episode_setup import turn_ids

        return turn_ids(sampled.reshape(-1, sampled.shape[-1]), self.episodes).reshape(sampled.shape)

    @property
    def turn_counts(self) -> list[int]:
        """Number of turns in each of the B·G completions."""
        if self.episodes is None:
            return [1] * self.completions.ended.size
        return [max(1, len(episode.lengths)) for episode in self.episodes]

    @property
    def episode_metrics(self) -> dict[str, float]:
        """Metrics of the episodes, empty for single-turn completions."""
        if self.episodes is None:
            return {}
        from grpo_jax.rollout.episode_setup import metrics_of

        observed = (self.present & ~np.asarray(self.completions.mask)).sum(axis=-1)
        return metrics_of(self.episodes) | {"completions/observation_tokens": float(observed.mean())}

    def head(self, count: int) -> RolloutResult:
        """Return the completions for the first `count` rows."""
        process_rows, end = self.process_rows, count * self.completions.tokens.shape[1]
        if process_rows is not None:
            process_rows = range(min(process_rows.start, count), min(process_rows.stop, count))
        environments = None if self.environments is None else self.environments[:end]
        return self.take(np.arange(count))._replace(environments=environments, process_rows=process_rows)

    def take(self, groups: np.ndarray) -> RolloutResult:
        """Return the completions of the given rows, in the given order. The result has no environments."""
        g = self.completions.tokens.shape[1]
        prompts, completions = jax.tree.map(lambda x: np.asarray(x)[groups], (self.prompts, self.completions))
        episodes = self.episodes
        if episodes is not None:
            episodes = [episodes[b * g + i] for b in groups for i in range(g)]
        return RolloutResult(
            [self.rows[b] for b in groups], prompts, completions, episodes, engine_metrics=self.engine_metrics
        )

    def join(self, other: RolloutResult) -> RolloutResult:
        """Concatenate two rollouts and drop their environments. Pads prompts to the longer of the two lengths."""

        def joined(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            shape = np.maximum(x.shape, y.shape)[1:]
            widths = ([(0, 0), *((0, n - size) for n, size in zip(shape, z.shape[1:], strict=True))] for z in (x, y))
            # Repeat the last values: in `PromptImages.feature_index`, 0 would mark the padding as an image token.
            return np.concatenate([np.pad(z, width, mode="edge") for z, width in zip((x, y), widths, strict=True)])

        first, second = ((x.prompts, x.completions) for x in (self, other))
        prompts, completions = jax.tree.map(joined, first, second)
        episodes = None
        if self.episodes is not None and other.episodes is not None:
            episodes = [*self.episodes, *other.episodes]
        return RolloutResult(self.rows + other.rows, prompts, completions, episodes, engine_metrics=self.engine_metrics)


# Rewards --------------------------------------------------------------------------------------------------------------


def gather_rewards(process_rewards: Rewards, reward_fns: RewardFn | Sequence[RewardFn]) -> Rewards:
    """Gather the rewards from all processes. Error counts are summed, and times are maxima over processes."""
    if jax.process_count() == 1:
        return process_rewards
    names, (_, g, k) = reward_names(reward_fns), process_rewards.values.shape
    arrays = {"values": process_rewards.values.tolist(), "logged_columns": to_json(process_rewards.logged_columns)}
    by_process = [Rewards._make(local) for local in gather_objects([*(process_rewards._asdict() | arrays).values()])]
    values = [np.asarray(local.values, np.float32).reshape(len(local.values), g, k) for local in by_process]
    parts = [[RewardParts._make(part) for part in local.parts] for local in by_process]
    joined = join_rewards(
        [local._replace(values=x, parts=p) for local, x, p in zip(by_process, values, parts, strict=True)]
    )
    stats = reward_stats(names, np.concatenate(joined.values)) if names else {}
    for name in dict.fromkeys(name for local in by_process for name in local.stats):
        per_process = [local.stats[name] for local in by_process if name in local.stats]
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
            reward_part._replace(completion=first + reward_part.completion)
            for first, part in zip(firsts, parts, strict=False)
            for reward_part in part.parts
        ],
        logged_metrics=metrics,
        logged_columns=[columns for part in parts for columns in part.logged_columns],
        completions=[completion for part in parts for completion in part.completions],
    )


def zero_signal(rewards: np.ndarray, config: GRPOConfig) -> np.ndarray:
    """Return a bool mask [B] that is True for groups without a training signal; see `zero_signal_groups`."""
    weights, aggregation = config.reward_weights, config.multi_objective_aggregation
    return np.asarray(_jit_zero_signal(rewards, weights=weights, multi_objective_aggregation=aggregation))


def rollout_metrics(config: GRPOConfig, rewards: np.ndarray, rollout: RolloutResult) -> dict[str, float]:
    """Compute metrics, named as in TRL, from rewards [B, G, K] and the lengths and ends of completions."""
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
    """Replace zero-signal groups with groups that `sample_more` samples for the next prompts (DAPO's dynamic sampling).

    If groups are still missing after `MAX_REFILLS` further rollouts, the batch is padded with zero-signal groups. The
    last array returned, [B], is False for them. Metrics are from the first rollout, whose prompts were not selected by
    their rewards. Only `num_tokens`, error counts and times are summed over the rollouts.
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
    new = {completion: i for i, completion in enumerate(old)}
    return rewards._replace(
        completions=[rewards.completions[i] for i in old],
        logged_columns=[rewards.logged_columns[i] for i in old],
        values=rewards.values[groups],
        parts=[part._replace(completion=new[part.completion]) for part in rewards.parts if part.completion in new],
    )
