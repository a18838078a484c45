"""One iteration's experience: prompts → completions → rewards → advantages → `Batch`.

The host's part of the loop. What is random or ordered is found by counting prompts since the start of the run: the n-th
prompt is the n-th entry of the shuffled epochs, and its samples come from the keys of n. So the cursor is one integer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.advantages import compute_advantages, zero_signal_groups
from grpo_jax.config import GRPOConfig
from grpo_jax.objective import sampling_settings
from grpo_jax.packed import score
from grpo_jax.prompts import EncodedPrompts, make_prompts, prompt_indices, reward_inputs
from grpo_jax.reward_calls import Extras, TrainerState
from grpo_jax.rewards import compute_rewards, reward_names
from grpo_jax.rollout import generate
from grpo_jax.sharding import fetch, gather_objects
from grpo_jax.state import TrainState
from grpo_jax.types import Batch, Completions, Model, Params, Prompts

__all__ = ["Experience", "Task", "collect"]

Phase = Callable[[str], AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a run trains on; nothing in it changes.

    Attributes:
      model: the model.
      tokenizer: decodes completions for the reward functions.
      eos_token_ids: token ids that end a completion.
      pad_token_id: what stands after the end.
      data: the encoded dataset.
      prompt_length: P, one for all batches, so that nothing is compiled twice.
      reward_fns: K reward functions.
      config: the run's settings.
    """

    model: Model
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    data: EncodedPrompts
    prompt_length: int
    reward_fns: Sequence[Callable[..., Any]]
    config: GRPOConfig

    def trainer_state(self, step: int, cursor: int) -> TrainerState:
        """What reward functions may know of the run after so many optimizer steps and sampled prompts."""
        rows = len(self.data.rows)
        return TrainerState(step, self.config.total_steps(rows), cursor / rows)


@dataclasses.dataclass(frozen=True)
class Experience:
    """A batch and what a person wants to know of it.

    Attributes:
      batch: the whole iteration's `Batch`, [B, G, T].
      cursor: prompts used since the start of the run, after this iteration.
      metrics: of the rollout: rewards, lengths, counts.
      rows: one dict a completion: prompt, completion, rewards, advantage, ended.
    """

    batch: Batch
    cursor: int
    metrics: dict[str, float]
    rows: list[dict[str, Any]]


def bucket_length(longest: int, largest: int) -> int:
    """The smallest of largest, largest/2, largest/4, … that holds `longest`: few shapes, so few compilations."""
    while largest % 2 == 0 and largest // 2 >= max(longest, 8):
        largest //= 2
    return largest


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Some groups as they came from the sampler, on the host: rows of the dataset, and arrays with B in front."""

    rows: list[dict[str, Any]]
    prompts: Prompts
    completions: Completions
    texts: list[Any]
    extras: list[dict[str, Any]]
    rewards: np.ndarray

    def take(self, groups: np.ndarray) -> _Groups:
        """Only these groups, in this order."""
        g = self.rewards.shape[1]
        pick = lambda x: np.asarray(x)[groups]
        return _Groups(
            rows=[self.rows[b] for b in groups],
            prompts=jax.tree.map(pick, self.prompts),
            completions=jax.tree.map(pick, self.completions),
            texts=[self.texts[b * g + i] for b in groups for i in range(g)],
            extras=[self.extras[b * g + i] for b in groups for i in range(g)],
            rewards=self.rewards[groups],
        )

    def join(self, other: _Groups) -> _Groups:
        """These groups and then the others."""
        both = lambda x, y: np.concatenate([np.asarray(x), np.asarray(y)])
        return _Groups(
            rows=self.rows + other.rows,
            prompts=jax.tree.map(both, self.prompts, other.prompts),
            completions=jax.tree.map(both, self.completions, other.completions),
            texts=self.texts + other.texts,
            extras=self.extras + other.extras,
            rewards=both(self.rewards, other.rewards),
        )


def _sample(
    task: Task, params: Params, key: jax.Array, cursor: int, count: int, step: int, phase: Phase
) -> tuple[_Groups, dict[str, float]]:
    """The next `count` prompts with their completions and rewards, and the rewards' metrics."""
    config = task.config
    entries = prompt_indices(
        cursor, count, num_rows=len(task.data.rows), seed=config.seed, shuffle=config.shuffle_dataset
    )
    rows = [task.data.rows[row] for _, row in entries]
    with phase("rollout"):
        completions = generate(
            task.model,
            params,
            make_prompts([task.data.token_ids[row] for _, row in entries], length=task.prompt_length),
            key,
            num_generations=config.num_generations,
            max_completion_length=config.max_completion_length,
            eos_token_ids=task.eos_token_ids,
            pad_token_id=task.pad_token_id,
            prompt_indices=cursor + np.arange(count),
            batch_size=config.rollout_batch_size,
            **sampling_settings(config),
        )
        completions = fetch(completions)
    with phase("rewards"):
        texts, extra, rewards, metrics = _score(task, rows, completions, Extras(task.trainer_state(step, cursor)))
    prompts = make_prompts([task.data.token_ids[row] for _, row in entries], length=task.prompt_length)
    return _Groups(rows, prompts, completions, texts, extra, rewards), metrics


def _score(
    task: Task, rows: list[dict[str, Any]], completions: Completions, extras: Extras
) -> tuple[list[Any], list[dict[str, Any]], np.ndarray, dict[str, float]]:
    """Texts, extras and rewards [B, G, K] of completions, and the rewards' metrics.

    Each process of a run calls the reward functions for its own prompts, and all get the results.
    """
    config, g, n = task.config, task.config.num_generations, jax.process_count()
    own = range(len(rows))
    if n > 1 and len(rows) % n == 0:
        size = len(rows) // n
        own = range(jax.process_index() * size, (jax.process_index() + 1) * size)
    mine = slice(own.start, own.stop)
    inputs = reward_inputs(task.tokenizer, rows[mine], completions.tokens[mine], completions.mask[mine])
    rewards, metrics = compute_rewards(
        task.reward_fns, num_generations=g, on_error=config.on_reward_error, extras=extras.given(), **inputs
    )
    texts = inputs["completions"]
    results = (texts, extras.rows(len(texts)), rewards, extras.metrics() | metrics)
    if len(own) == len(rows):
        return results
    parts = gather_objects([*results[:2], rewards.tolist(), results[3]])
    texts, extra = (list(itertools.chain.from_iterable(part[i] for part in parts)) for i in (0, 1))
    scores = np.array([row for part in parts for row in part[2]], np.float32)
    return texts, extra, scores, _merge([part[3] for part in parts])


def _merge(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of all processes: counts are added, the slowest one's seconds count, the rest are means."""
    merged = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(metrics)):
        values = [part[name] for part in metrics if name in part]
        how = sum if name.endswith("/errors") else max if name.endswith("/seconds") else np.mean
        merged[name] = float(how(values))
    return merged


def _with_signal(
    task: Task, params: Params, key: jax.Array, cursor: int, count: int, step: int, phase: Phase
) -> tuple[_Groups, int, np.ndarray, dict[str, float]]:
    """`count` groups whose rewards differ, by sampling further prompts for those whose rewards do not (DAPO).

    Sampling goes on for `max_refills` rounds at most. What is missing then is filled with groups without a signal,
    which count nowhere: not in the loss, not in its denominators, not in the batch's statistics.

    Returns:
      The groups, the cursor, which of the groups count [count] bool, and metrics.
    """
    groups: _Groups | None = None
    metrics: dict[str, float] = {}
    rounds = 0
    while True:
        new, stats = _sample(task, params, key, cursor, count, step, phase)
        metrics = metrics or stats  # of the first round: refills are a biased sample of the policy's rewards
        cursor += count
        groups = new if groups is None else groups.join(new)
        kept = ~_silent(task.config, groups.rewards)
        if kept.sum() >= count or rounds == task.config.max_refills:
            break
        rounds += 1
    order = np.argsort(~kept, kind="stable")[:count]
    metrics["dynamic_sampling/refills"] = float(rounds)
    metrics["dynamic_sampling/groups_without_signal"] = float((~kept).sum())
    return groups.take(order), cursor, kept[order], metrics


@functools.partial(jax.jit, static_argnames=("weights", "scale_rewards", "multi_objective_aggregation"))
def _advantages(rewards, *, scale_rewards, **settings):
    return compute_advantages(rewards, scale_rewards=scale_rewards, **settings)


@functools.partial(jax.jit, static_argnames=("weights", "multi_objective_aggregation"))
def _zero_signal(rewards, **settings):
    return zero_signal_groups(rewards, **settings)


def _aggregation(config: GRPOConfig) -> dict[str, Any]:
    return {"weights": config.reward_weights, "multi_objective_aggregation": config.multi_objective_aggregation}


def _silent(config: GRPOConfig, rewards: np.ndarray) -> np.ndarray:
    """[B] bool: groups whose rewards are all equal."""
    return np.asarray(_zero_signal(rewards, **_aggregation(config)))


def collect(
    task: Task,
    state: TrainState,
    cursor: int,
    *,
    count: int,
    micro: tuple[int, int],
    phase: Phase = contextlib.nullcontext,
) -> Experience:
    """Sample, score and weigh one iteration's completions.

    Args:
      task: what the run trains on.
      state: the present state; completions come from `old_params`, or from `params` where no old policy is kept.
      cursor: prompts used since the start of the run.
      count: B, prompts of the iteration.
      micro: (prompts, completions) of a micro-batch, for the reference's log-probs.
      phase: `phase(name)` is a context in which that part of the work is timed.

    Returns:
      `Experience`. Its arrays are cut to the bucket of the longest completion.
    """
    config = task.config
    params = state.params if state.old_params is None else state.old_params
    key = jax.random.fold_in(state.key, 0)
    counts_in, step = np.ones(count, bool), int(state.step)
    if config.dynamic_sampling:
        groups, cursor, counts_in, metrics = _with_signal(task, params, key, cursor, count, step, phase)
    else:
        groups, metrics = _sample(task, params, key, cursor, count, step, phase)
        cursor += count
    # Groups that only fill the batch are not scored: NaN keeps them out of the statistics of the whole batch.
    rewards = np.where(counts_in[:, None, None], groups.rewards, np.nan)
    advantages = _advantages(rewards, scale_rewards=config.scale_rewards, **_aggregation(config))
    completions = groups.completions
    lengths = np.asarray(completions.mask).sum(axis=-1)
    metrics |= _rollout_metrics(config, groups, lengths)

    t = bucket_length(int(lengths.max()), config.max_completion_length)
    mask = completions.mask[:, :, :t] & counts_in[:, None, None]
    if config.mask_truncated_completions:
        mask &= completions.ended[:, :, None]
    batch = Batch(
        prompts=jax.tree.map(jnp.asarray, groups.prompts),
        tokens=jnp.asarray(completions.tokens[:, :, :t]),
        mask=jnp.asarray(mask),
        advantages=advantages,
        sampling_log_probs=jnp.asarray(completions.log_probs[:, :, :t]),
        counted=jnp.asarray(counts_in) if config.dynamic_sampling else None,
    )
    with phase("reference"):
        tokens = (batch.prompts, batch.tokens, batch.mask)
        at: dict[str, Any] = {"model": task.model, "config": config, "micro": micro}
        if state.ref_params is not None:
            log_probs = score(state.ref_params, *tokens, **at)
            batch = batch.replace(ref_log_probs=log_probs)
        if state.initial_params is not None:
            log_probs = score(state.initial_params, *tokens, **at)
            batch = batch.replace(initial_log_probs=log_probs)
        jax.block_until_ready(batch)
    return Experience(batch, cursor, metrics, _rows(task, groups, np.asarray(advantages)))


def _rollout_metrics(config: GRPOConfig, groups: _Groups, lengths: np.ndarray) -> dict[str, float]:
    """What TRL logs of a rollout, under TRL's names."""
    weights = np.ones(groups.rewards.shape[2]) if config.reward_weights is None else np.array(config.reward_weights)
    rewards = np.where(
        np.isnan(groups.rewards).all(axis=2), np.nan, np.nansum(groups.rewards * weights.reshape(1, 1, -1), axis=2)
    )
    scored = rewards[~np.isnan(rewards)]
    spread = [np.std(group[~np.isnan(group)], ddof=1) for group in rewards if (~np.isnan(group)).sum() > 1]
    return {
        "reward": float(scored.mean()) if scored.size else float("nan"),
        "reward_std": float(np.mean(spread)) if spread else 0.0,
        "frac_reward_zero_std": float(_silent(config, groups.rewards).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - groups.completions.ended.mean()),
        "num_tokens": float(lengths.sum()),
    }


def _rows(task: Task, groups: _Groups, advantages: np.ndarray) -> list[dict[str, Any]]:
    """One dict a completion, for `completions.jsonl`."""
    names, g = reward_names(task.reward_fns), advantages.shape[1]
    return [
        {
            **groups.extras[b * g + i],
            "prompt": row["prompt"],
            "completion": groups.texts[b * g + i],
            "rewards": dict(zip(names, groups.rewards[b, i].tolist(), strict=True)),
            "advantage": float(advantages[b, i]),
            "ended": bool(groups.completions.ended[b, i]),
        }
        for b, row in enumerate(groups.rows)
        for i in range(g)
    ]
