"""Rewards of a run's completions, scored by each process for its own rows, and groups of completions with rewards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.advantages import zero_signal_groups
from grpo_jax.models.sharding import gather_objects, own_part
from grpo_jax.rewards.calls import Rewards, compute_rewards, mean_of_scored, reward_stats, total_rewards
from grpo_jax.rewards.contract import TrainerState, own_copy, reward_names
from grpo_jax.rewards.outcomes import RewardParts
from grpo_jax.rollout.interaction import Played
from grpo_jax.run.sample import Sampled
from grpo_jax.text.completions import reward_inputs
from grpo_jax.text.rows import is_conversation
from grpo_jax.types import Batch, Completions, Prompts, RewardFn, Tokenizer


def score_own(
    tokenizer: Tokenizer,
    reward_fns: RewardFn | Sequence[RewardFn],
    sampled: Sampled,
    *,
    on_error: str,
    trainer_state: TrainerState | None = None,
) -> Rewards:
    """Call the reward functions for this process's share of the B rows and their completions [B, G, T].

    The scores are for `of_all_processes`. Where there are more processes than rows, some of them score nothing.
    """
    rows, tokens, present = sampled.rows, sampled.completions.tokens, sampled.present
    g = np.shape(tokens)[1]
    part = own_part(len(rows)) if sampled.own is None else sampled.own
    own, places = slice(part.start, part.stop), slice(part.start * g, part.stop * g)
    if not part:
        return Rewards(np.zeros((0, g, len(reward_names(reward_fns))), np.float32), {}, [], {}, [], [])
    prompts = zip(*map(np.asarray, (sampled.prompts.tokens[own], sampled.prompts.lengths[own])), strict=True)
    ids = [row[:length] for row, length in prompts]
    inputs = reward_inputs(tokenizer, rows[own], tokens[own], present[own], prompt_ids=ids)
    if sampled.episodes is not None:
        if is_conversation(rows[0]["prompt"]):
            inputs = inputs._replace(completions=[episode.messages for episode in sampled.episodes[places]])
        inputs.columns["environment_rewards"] = [episode.reward for episode in sampled.episodes[places]]
    if sampled.environments is not None:
        inputs.columns["environments"] = list(sampled.environments[places])
    if not reward_names(reward_fns):  # only a teacher judges
        texts = list(inputs.completions)
        return Rewards(np.zeros((len(part), g, 0), np.float32), {}, [], {}, [{} for _ in texts], texts)
    return compute_rewards(
        reward_fns,
        prompts=inputs.prompts,
        completions=inputs.completions,
        completion_ids=inputs.completion_ids,
        columns=inputs.columns,
        num_generations=g,
        turns=sampled.turn_counts[places],
        on_error=on_error,
        trainer_state=trainer_state,
    )


def of_all_processes(own: Rewards, reward_fns: RewardFn | Sequence[RewardFn]) -> Rewards:
    """The scores of all rows, from those of each process; all processes have to ask together.

    Statistics are those of all completions; faults are added, and of the seconds the slowest process's count.
    """
    if jax.process_count() == 1:
        return own
    parts = [Rewards(*part) for part in gather_objects([*own._replace(values=own.values.tolist())])]
    chain, names = itertools.chain.from_iterable, reward_names(reward_fns)
    values = np.array([*chain(part.values for part in parts)], np.float32)
    firsts = itertools.accumulate((len(part.completions) for part in parts), initial=0)

    def together(dicts: list[dict[str, Any]]) -> dict[str, list[Any]]:
        return {name: [some[name] for some in dicts if name in some] for name in dict.fromkeys(chain(dicts))}

    counted = {
        name: float(sum(numbers) if name.endswith("/errors") else max(numbers))
        for name, numbers in together([part.stats for part in parts]).items()
        if name.endswith(("/errors", "/seconds"))
    }
    return Rewards(
        values=values,
        stats=reward_stats(names, values.reshape(-1, len(names))) | counted,
        metrics={name: [*chain(lists)] for name, lists in together([part.metrics for part in parts]).items()},
        columns=[*chain(part.columns for part in parts)],
        completions=[*chain(part.completions for part in parts)],
        parts=[
            RewardParts(*one)._replace(completion=first + one[0])
            for first, part in zip(firsts, parts, strict=False)
            for one in part.parts
        ],
    )


def completion_rows(
    scores: Rewards, names: Sequence[str], sampled: Sampled, *, weighed: bool = False
) -> list[dict[str, Any]]:
    """One dict per completion, in prompt-major order; of one with several turns, who said what.

    Those that will be `weighed` have a place for the advantage.
    """
    rows, ended, episodes = sampled.rows, sampled.completions.ended, sampled.episodes
    g = ended.shape[1]

    of_turns: dict[int, dict[str, list[float]]] = {}
    for part in scores.parts:
        if not part.of_tokens:
            of_turns.setdefault(part.completion, {})[names[part.function]] = part.values

    def turns_of(episode: Played) -> list[dict[str, str]]:
        return [{"by": "policy" if own else "environment", "text": text} for own, text in episode.turns]

    return [
        {
            **scores.columns[i],
            "prompt": own_copy(rows[i // g]["prompt"]),
            "completion": text,
            **({} if episodes is None else {"turns": turns_of(episodes[i])}),
            "rewards": dict(zip(names, scores.values[i // g, i % g].tolist(), strict=True)),
            **({"turn_rewards": of_turns[i]} if i in of_turns else {}),
            **({"advantage": None} if weighed else {}),
            "ended": bool(ended[i // g, i % g]),
        }
        for i, text in enumerate(scores.completions)
    ]


_jit_zero_signal = jax.jit(zero_signal_groups, static_argnames=("weights", "multi_objective_aggregation"))


class PlacedParts(NamedTuple):
    """The turns [B, G, T] int32 of completions, as `Sampled.turns`; rewards [B, G, T, K] by `place_rewards`, or None if
    not needed; and scores [B, G, K], their sums.
    """

    turns: np.ndarray
    rewards: np.ndarray | None
    scores: np.ndarray

    @property
    def functions(self) -> int:
        """K."""
        return self.scores.shape[2]

    def of(self, batch: Batch, counted: np.ndarray) -> PlacedParts:
        """Those of a batch, as long as it; groups that are not `counted` [B] have no score."""
        t = batch.mask.shape[2]
        if self.rewards is None:
            return self._replace(turns=self.turns[:, :, :t])
        rewards = np.where(counted[:, None, None, None], self.rewards[:, :, :t], np.float32(np.nan))
        return self._replace(turns=self.turns[:, :, :t], rewards=rewards)


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
