"""Some groups as they came from the sampler, on the host, while it is not known yet which of them are learned from."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.advantages import zero_signal_groups
from grpo_jax.rewards.calls import mean_of_scored, total_rewards
from grpo_jax.run.seams import PlacedParts
from grpo_jax.types import Completions, Prompts

_jit_zero_signal = jax.jit(zero_signal_groups, static_argnames=("weights", "multi_objective_aggregation"))


class Groups(NamedTuple):
    """Lists and arrays with B in front."""

    rows: list[list[dict[str, Any]]]  # of each group those of its completions, for `completions.jsonl`
    prompts: Prompts
    completions: Completions
    rewards: np.ndarray  # [B, G, K]
    parts: PlacedParts | None  # None where nobody asks

    def take(self, groups: np.ndarray) -> Groups:
        """Only these groups, in this order."""
        arrays = jax.tree.map(lambda x: np.asarray(x)[groups], self[1:])
        return Groups([self.rows[b] for b in groups], *arrays)

    def join(self, other: Groups) -> Groups:
        """These groups and then the others."""
        mine, theirs = _equally_long(self.prompts, other.prompts)
        arrays = jax.tree.map(lambda *x: np.concatenate(x), (mine, *self[2:]), (theirs, *other[2:]))
        return Groups(self.rows + other.rows, *arrays)


def _equally_long(*prompts: Prompts) -> list[Prompts]:
    """Prompts of several rollouts, padded to the longest: environments may have added to some."""
    longest = max(some.tokens.shape[1] for some in prompts)
    return [some.replace(tokens=np.pad(some.tokens, ((0, 0), (0, longest - some.tokens.shape[1])))) for some in prompts]


def zero_signal(rewards: np.ndarray, config: GRPOConfig) -> np.ndarray:
    """[B] groups whose rewards are all equal."""
    found = _jit_zero_signal(
        rewards, weights=config.reward_weights, multi_objective_aggregation=config.multi_objective_aggregation
    )
    return np.asarray(found)


def rollout_metrics(config: GRPOConfig, groups: Groups, present: np.ndarray) -> dict[str, float]:
    """Rewards and lengths of a rollout, under TRL's names."""
    lengths = present.sum(axis=-1)
    rewards = total_rewards(groups.rewards, config.reward_weights)
    spread = [np.std(group[~np.isnan(group)], ddof=1) for group in rewards if (~np.isnan(group)).sum() > 1]
    return {
        "reward": mean_of_scored(rewards),
        "reward_std": float(np.mean(spread)) if spread else float("nan"),
        "frac_reward_zero_std": float(zero_signal(groups.rewards, config).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - groups.completions.ended.mean()),
        "num_tokens": float(lengths.sum()),
    }
