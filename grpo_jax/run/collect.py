"""One iteration's batch: prompts → completions → rewards → advantages → `Batch`.

While the reward functions run on the host, the device computes the log-probs under the reference (with
`dynamic_sampling` afterwards, because rewards choose the groups), and then, if completions are prefetched
(`run.sources`), samples the next ones. It holds the training state (`run.new_state`), a frozen base, a teacher and,
without `donate`, the caller's params; the prompts' keys and values with one packed sequence; and the caches of the next
rollout. The caches of this iteration's rollout are freed, and its tokens and log-probs are on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from grpo_jax.config import settings
from grpo_jax.maths.advantages import compute_advantages
from grpo_jax.models.packing import lengths_of
from grpo_jax.models.sharding import fetch
from grpo_jax.rewards.calls import Rewards, means_of
from grpo_jax.rewards.contract import check_metrics, reward_names
from grpo_jax.run.run import Run
from grpo_jax.run.sample import RolloutResult
from grpo_jax.run.scores import (
    completion_rows,
    gather_rewards,
    join_groups,
    rollout_metrics,
    score_rollout,
    take_groups,
    zero_signal,
)
from grpo_jax.run.sources import LocalRollouts
from grpo_jax.types import Batch, Params
from grpo_jax.update.state import TrainState

Phase = Callable[[str], AbstractContextManager[None]]
"""Called with the name of a phase; returns a context in which its seconds are measured."""

_jit_advantages = jax.jit(
    compute_advantages, static_argnames=("weights", "estimator", "scale_rewards", "multi_objective_aggregation")
)


def collect(
    run: Run,
    state: TrainState,
    source: LocalRollouts,
    *,
    phase: Phase = lambda name: contextlib.nullcontext(),
    interrupt: Callable[[], None] = lambda: None,
) -> tuple[Batch, dict[str, float], list[dict[str, Any]]]:
    """Sample and score one iteration's completions, and compute their advantages and log-probs.

    Args:
      state: completions are sampled from its `old_params`, or from `params` if no old policy is kept.
      source: the source of rollouts; its position advances.
      phase: measures the seconds of "rollout", "reference", "rewards" and "teacher".
      interrupt: called before each phase and at the end; an exception that it raises ends the iteration.

    Returns:
      batch: the whole iteration's `Batch`, [B, G, T], in NumPy's arrays, as long as the updater needs them.
      metrics: of the rollout; with `dynamic_sampling` as in `_refill`.
      rows: one dict per completion, for `completions.jsonl`.
    """
    config = run.config

    def timed(name: str) -> AbstractContextManager[None]:
        interrupt()
        return phase(name)

    rollout, rewards, metrics, batch = _score_rollout(run, state, source, timed)
    counted = np.ones(len(rollout.rows), bool)
    if config.dynamic_sampling:
        rollout, rewards, metrics, counted = _refill(run, state, source, timed, rollout, rewards, metrics)
        with timed("reference"):
            batch = _with_log_probs(run, state, rollout, counted)
    assert batch is not None
    with timed("reference"):  # waits for the log-probs
        batch = fetch(batch)
        batch = batch.replace(advantages=_advantages(run, state, batch, rollout, rewards, counted))
    if run.teaching is not None:
        with timed("teacher"):
            batch = run.teaching.add_log_probs(batch, rollout.completions, config)
    if run.sampler is not None:
        from grpo_jax.run.sampler import mismatch

        metrics |= mismatch(batch, config)
    interrupt()
    source.commit()
    return batch, metrics, completion_rows(rewards, reward_names(run.reward_fns), rollout, _per_completion(batch))


def _score_rollout(
    run: Run, state: TrainState, source: LocalRollouts, timed: Phase
) -> tuple[RolloutResult, Rewards, dict[str, float], Batch | None]:
    """The next rollout, its rewards and metrics, and its batch with log-probs (None with `dynamic_sampling`)."""
    config, trainer_state = run.config, run.trainer_state(int(state.step), source.position)
    with timed("rollout"):
        rollout = source.next(state)
    batch = None
    if not config.dynamic_sampling:
        with timed("reference"):  # the device may still be computing when this returns
            batch = _with_log_probs(run, state, rollout)
    with timed("rollout"), source.prefetch(state, batch), timed("rewards"):
        own = score_rollout(
            run.policy.tokenizer, run.reward_fns, rollout, on_error=config.on_reward_error, trainer_state=trainer_state
        )
    with timed("rewards"):
        rewards = gather_rewards(own, run.reward_fns)
    metrics = rewards.stats | rollout_metrics(config, rewards.values, rollout)
    metrics |= rollout.episode_metrics | dict(rollout.metrics)
    check_metrics(rewards.metrics, metrics)
    return rollout, rewards, means_of(rewards.metrics) | metrics, batch


def _refill(
    run: Run,
    state: TrainState,
    source: LocalRollouts,
    timed: Phase,
    rollout: RolloutResult,
    rewards: Rewards,
    metrics: dict[str, float],
) -> tuple[RolloutResult, Rewards, dict[str, float], np.ndarray]:
    """Replace groups whose rewards are all equal by groups of further prompts (DAPO's dynamic sampling).

    Sampling stops after `MAX_REFILLS` further rollouts. Zero-signal groups then fill the batch, and are not counted in
    the loss, its denominators and batch statistics. Metrics are the first rollout's, whose prompts are not
    selected; costs are summed over the rollouts.

    Returns:
      The selected completions, their rewards, the metrics, and [B] bool, which groups count.
    """
    config, count, refills = run.config, len(rollout.rows), 0
    costs = [name for name in metrics if name.startswith("rewards/") and name.endswith(("/errors", "/seconds"))]
    while True:
        has_signal = ~zero_signal(rewards.values, config)
        if has_signal.sum() >= count or refills == settings.MAX_REFILLS:
            break
        more_rollout, more_rewards, more, _ = _score_rollout(run, state, source, timed)
        rollout, rewards = rollout.join(more_rollout), join_groups(rewards, more_rewards)
        metrics |= {name: metrics[name] + more[name] for name in ("num_tokens", *costs)}
        refills += 1
    metrics["dynamic_sampling/refills"] = float(refills)
    metrics["dynamic_sampling/groups_without_signal"] = float((~has_signal).sum())
    groups = np.argsort(~has_signal, kind="stable")[:count]
    return rollout.take(groups), take_groups(rewards, groups), metrics, has_signal[groups]


def _with_log_probs(run: Run, state: TrainState, rollout: RolloutResult, counted: Any = None) -> Batch:
    """The `Batch` of some completions with the log-probs under the references, which the device may still be computing.

    Its advantages are 0. `counted` [B] bool is False for groups that only fill the batch; None: all count.
    """
    prompts, completions, config = rollout.prompts, rollout.completions, run.config
    t = run.updater.columns(int(lengths_of(np.asarray(completions.mask)).max()))
    tokens, mask = completions.tokens[:, :, :t], completions.mask[:, :, :t]
    if counted is not None:
        mask = mask & counted[:, None, None]
    if config.mask_truncated_completions:
        mask = mask & completions.ended[:, :, None]

    def log_probs(params: Params | None) -> jax.Array | None:
        return None if params is None else run.updater.score(params, prompts, tokens, mask)

    zeros: Any = np.zeros(mask.shape[:2], np.float32)  # typed as JAX's arrays
    return Batch(
        prompts=prompts,
        tokens=tokens,
        mask=mask,
        advantages=zeros,
        sampling_log_probs=completions.log_probs[:, :, :t],  # also the old ones of the ratio: see `types.Batch`
        ref_log_probs=log_probs(state.ref_params),
        initial_log_probs=log_probs(state.initial_params),
        counted=counted,
        old_log_probs=None if completions.old_log_probs is None else completions.old_log_probs[:, :, :t],
    )


def _advantages(
    run: Run, state: TrainState, batch: Batch, rollout: RolloutResult, rewards: Rewards, counted: np.ndarray
) -> np.ndarray:
    """The advantages [B, G] or [B, G, T] of a batch; `counted` [B] is False for groups that only fill it."""
    config = run.config
    if run.advantage_fn is not None:
        return run.advantage_fn(state, batch, rollout, rewards, counted, reward_names(run.reward_fns))
    advantages = _jit_advantages(
        # Groups that only fill the batch count as not scored: NaN keeps them out of the statistics of the whole batch.
        np.where(counted[:, None, None], rewards.values, np.float32(np.nan)),
        weights=config.reward_weights,
        multi_objective_aggregation=config.multi_objective_aggregation,
        estimator=config.advantage_estimator,
        scale_rewards=config.scale_rewards,
        lengths=np.sum(rollout.completions.mask, axis=-1) if config.advantage_estimator == "opo" else None,
    )
    return fetch(advantages)


def _per_completion(batch: Batch) -> np.ndarray:
    """One advantage for each completion [B, G]: the mean over its tokens, if each token has its own."""
    advantages = np.asarray(batch.advantages)
    return advantages if advantages.ndim == 2 else advantages.sum(-1) / np.maximum(np.sum(batch.mask, axis=-1), 1)
