"""Rewards of a run's completions, scored by each process for its own rows, and groups of completions with rewards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.advantages import zero_signal_groups
from grpo_jax.models.sharding import gather_objects, own_part
from grpo_jax.rewards.calls import Rewards, compute_rewards, mean_of_scored, reward_stats, total_rewards
from grpo_jax.rewards.contract import TrainerState, copy_containers, reward_names
from grpo_jax.rewards.outcomes import RewardParts
from grpo_jax.run.sample import RolloutResult
from grpo_jax.text.completions import reward_inputs
from grpo_jax.text.rows import is_conversation
from grpo_jax.types import RewardFn, Tokenizer

if TYPE_CHECKING:
    from grpo_jax.rollout.interaction import Played


def score_rollout(
    tokenizer: Tokenizer,
    reward_fns: RewardFn | Sequence[RewardFn],
    sampled: RolloutResult,
    *,
    on_error: str,
    trainer_state: TrainerState | None = None,
) -> Rewards:
    """Call the reward functions for this process's share of the B rows and their completions [B, G, T].

    The scores are for `gather_rewards`. Where there are more processes than rows, some of them score nothing.
    """
    rows, tokens, present = sampled.rows, sampled.completions.tokens, sampled.present
    g = np.shape(tokens)[1]
    part = own_part(len(rows)) if sampled.process_rows is None else sampled.process_rows
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


def gather_rewards(own: Rewards, reward_fns: RewardFn | Sequence[RewardFn]) -> Rewards:
    """The rewards of all rows, gathered from the processes, which call this together.

    Statistics are over all completions; faults are summed, and the seconds are the slowest process's.
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
    scores: Rewards, names: Sequence[str], sampled: RolloutResult, advantages: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """One dict per completion, in prompt-major order, as a line of `completions.jsonl`.

    `advantages` are [B, G], or None in an evaluation.
    """
    rows, ended, episodes = sampled.rows, sampled.completions.ended, sampled.episodes
    g = ended.shape[1]

    of_turns: dict[int, dict[str, list[float]]] = {}
    for part in scores.parts:
        if not part.per_token:
            of_turns.setdefault(part.completion, {})[names[part.function]] = part.values

    return [
        {
            **scores.columns[i],
            "prompt": copy_containers(rows[i // g]["prompt"]),
            "completion": text,
            **({} if episodes is None else {"turns": _turn_texts(episodes[i])}),
            "rewards": dict(zip(names, scores.values[i // g, i % g].tolist(), strict=True)),
            **({"turn_rewards": of_turns[i]} if i in of_turns else {}),
            **({} if advantages is None else {"advantage": float(advantages[i // g, i % g])}),
            "ended": bool(ended[i // g, i % g]),
        }
        for i, text in enumerate(scores.completions)
    ]


def _turn_texts(episode: Played) -> list[dict[str, str]]:
    return [{"by": "policy" if own else "environment", "text": text} for own, text in episode.turns]


_jit_zero_signal = jax.jit(zero_signal_groups, static_argnames=("weights", "multi_objective_aggregation"))


def take_groups(scores: Rewards, groups: np.ndarray) -> Rewards:
    """The rewards of these groups, in this order; statistics are unchanged."""
    g = scores.values.shape[1]
    old = [b * g + i for b in groups.tolist() for i in range(g)]
    new = {completion: at for at, completion in enumerate(old)}
    return scores._replace(
        completions=[scores.completions[i] for i in old],
        columns=[scores.columns[i] for i in old],
        values=scores.values[groups],
        parts=[part._replace(completion=new[part.completion]) for part in scores.parts if part.completion in new],
    )


def join_groups(first: Rewards, other: Rewards) -> Rewards:
    """The rewards of these groups and then of the others; statistics are the first ones'."""
    count = len(first.completions)
    return first._replace(
        completions=first.completions + other.completions,
        columns=first.columns + other.columns,
        values=np.concatenate((first.values, other.values)),
        parts=[*first.parts, *(part._replace(completion=count + part.completion) for part in other.parts)],
    )


def zero_signal(rewards: np.ndarray, config: GRPOConfig) -> np.ndarray:
    """[B] groups whose rewards are all equal."""
    found = _jit_zero_signal(
        rewards, weights=config.reward_weights, multi_objective_aggregation=config.multi_objective_aggregation
    )
    return np.asarray(found)


def rollout_metrics(config: GRPOConfig, scores: np.ndarray, sampled: RolloutResult) -> dict[str, float]:
    """Rewards and lengths of a rollout, under TRL's names; `scores` are the rewards [B, G, K]."""
    lengths = sampled.present.sum(axis=-1)
    rewards = total_rewards(scores, config.reward_weights)
    spread = [np.std(group[~np.isnan(group)], ddof=1) for group in rewards if (~np.isnan(group)).sum() > 1]
    return {
        "reward": mean_of_scored(rewards),
        "reward_std": float(np.mean(spread)) if spread else float("nan"),
        "frac_reward_zero_std": float(zero_signal(scores, config).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - sampled.completions.ended.mean()),
        "num_tokens": float(lengths.sum()),
    }
