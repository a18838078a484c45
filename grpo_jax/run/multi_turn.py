"""Multi-turn rollouts and per-turn advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.credit import in_units_of_rewards, turn_advantages
from grpo_jax.rewards.calls import Rewards
from grpo_jax.rewards.outcomes import place_rewards
from grpo_jax.rollout.episode_setup import EpisodeSetup
from grpo_jax.rollout.episodes import Episodes
from grpo_jax.rollout.turns import NextObservation
from grpo_jax.run.rollout_result import RolloutResult
from grpo_jax.text.prompts import EncodedPrompts, encode_prompts
from grpo_jax.types import Batch, Completions, Prompts, Row

_jit_turn_advantages = jax.jit(
    turn_advantages, static_argnames=("scale_rewards", "multi_objective_aggregation", "estimator")
)


def sample_episodes(
    episode_setup: EpisodeSetup,
    complete: Callable[[Prompts, NextObservation], Completions],
    data: EncodedPrompts,
    rows: Sequence[int],
    num_generations: int,
    prompt_length: int,
) -> RolloutResult:
    """Reset environments and sample multi-turn completions for the rows of `data` at the indices `rows`."""
    reset_rows = [data.rows[i] for i in rows]
    with Episodes(episode_setup, reset_rows, num_generations, rows) as episodes:
        reset_rows = episodes.reset(reset_rows)
        prompts = episode_prompts(episode_setup, data, rows, reset_rows, length=prompt_length)
        episodes.set_prompts(reset_rows, prompts)
        completions = complete(prompts, episodes)
        tokens, mask = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (completions.tokens, completions.mask))
        records = episodes.end(tokens, mask)
    environments = [episode.environment for episode in episodes.episodes]
    return RolloutResult(reset_rows, prompts, completions, records, environments, episodes.local_rows)


def episode_prompts(
    episode_setup: EpisodeSetup, data: EncodedPrompts, rows: Sequence[int], reset_rows: Sequence[Row], *, length: int
) -> Prompts:
    """Return prompts for `reset_rows`, padded to at least `length` tokens. Changed prompts are encoded again."""
    ids = []
    for i, row in zip(rows, reset_rows, strict=True):
        encoded = data.token_ids[i]
        if row is not data.rows[i]:
            encoded = encode_prompts(
                [row],
                episode_setup.tokenizer,
                max_prompt_length=episode_setup.config.max_prompt_length,
                chat_template_kwargs=episode_setup.config.chat_template_kwargs,
                tools=[episode_setup.schemas(row)],
                processor=None if data.image_encoder is None else data.image_encoder.processor,
                argument="after reset,",
            ).token_ids[0]
        ids.append(encoded)
    longest = episode_setup.config.padded(max(map(len, ids)))
    return data.prompts(rows, length=max(length, longest), token_ids=ids)


def credit_turns(
    batch: Batch, rollout: RolloutResult, rewards: Rewards, names: Sequence[str], config: GRPOConfig
) -> np.ndarray:
    """Compute advantages [B, G, T] for turn_credit="to_go". They are 0 where the mask is False."""
    per_token_part = next((part for part in rewards.parts if part.per_token), None)
    aggregation = config.multi_objective_aggregation
    unscaled = in_units_of_rewards(config.scale_rewards, aggregation, config.advantage_estimator)
    if per_token_part is not None and not unscaled:
        raise ValueError(
            f"reward function {names[per_token_part.function]!r} returned an array of per-token rewards, which"
            f' turn_credit={config.turn_credit!r} supports only for unscaled advantages. Set scale_rewards="none" with'
            ' multi_objective_aggregation="sum_then_normalize" and advantage_estimator="grpo" or "rloo", or return a'
            " list with one reward per turn"
        )
    t, turns = batch.mask.shape[2], rollout.turns
    advantages = _jit_turn_advantages(
        place_rewards(rewards.values, rewards.parts, turns, rollout.present)[:, :, :t],
        turns[:, :, :t],
        weights=np.asarray(config.reward_weights or [1.0] * rewards.values.shape[2], np.float32),
        scale_rewards=config.scale_rewards,
        multi_objective_aggregation=aggregation,
        estimator=config.advantage_estimator,
    )
    return np.where(batch.mask, np.asarray(advantages, np.float32), np.float32(0))
