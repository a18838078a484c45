"""Collection of one iteration's batch: prompts → completions → rewards → advantages → `Batch`.

While the reward functions run on the host, an accelerator computes the reference log-probs and then, with
`rollout_ahead`, samples (prefetches) the next completions. With `dynamic_sampling`, the reference log-probs are
computed after the rewards, because the rewards determine which groups are kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.advantages import compute_advantages
from grpo_jax.models.packing import lengths_to_last_true
from grpo_jax.models.sharding import fetch, local_range
from grpo_jax.policy import Policy
from grpo_jax.rewards.calls import Rewards, compute_rewards, means_of
from grpo_jax.rewards.contract import TrainerState, reward_names
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.rollout.generate import OnTokens, generate
from grpo_jax.run.policy_checks import check_context_length
from grpo_jax.run.rollout_result import (
    RolloutResult,
    completion_records,
    gather_rewards,
    refill_groups,
    rollout_metrics,
)
from grpo_jax.run.run import Run
from grpo_jax.text.completions import reward_inputs
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.text.rows import is_conversation
from grpo_jax.types import Batch, Completions, Json, Params, Prompts, RewardFn, Tokenizer
from grpo_jax.update.state import TrainState

if TYPE_CHECKING:  # imported at runtime only when a run needs them
    from grpo_jax.rollout.episode_setup import EpisodeSetup
    from grpo_jax.rollout.turns import NextObservation
    from grpo_jax.run.sampler import Sampler

Phase = Callable[[str], AbstractContextManager[None]]
"""Function that takes a phase's name and returns a context manager that measures the phase's duration."""

_jit_advantages = jax.jit(
    compute_advantages, static_argnames=("weights", "estimator", "scale_rewards", "multi_objective_aggregation")
)


class RolloutSource:
    """A source of rollouts that samples completions from the current policy on request. Subclasses prefetch.

    Attributes:
      cursor: number of prompts whose batches have been collected. Checkpoints store it, so a resumed run repeats an
        interrupted `collect`. Prompts and keys depend only on the position in the shuffled epochs.
      next_cursor: as `cursor`, but includes the prompts that are being collected.
      in_progress: whether an engine is sampling completions for the prompts from `cursor` on. Checkpoints store it.
    """

    in_progress = False

    def __init__(
        self,
        run: Run,
        *,
        cursor: int = 0,
        num_prompts: int | None = None,
        check_interrupt: Callable[[], None] = lambda: None,
    ):
        self.run, self._check_interrupt = run, check_interrupt
        self._num_prompts = run.sizes.prompts_per_iteration if num_prompts is None else num_prompts
        self.cursor = self.next_cursor = cursor

    def wait_pending(self, state: TrainState) -> None:
        """Wait for pending completions. Must be called before the params that they are sampled from are overwritten."""

    def next(self, state: TrainState) -> RolloutResult:
        """Sample and return completions for the next prompts."""
        start, self.next_cursor = self.next_cursor, self.next_cursor + self._num_prompts
        return self.sample_at(state, start)

    def prefetch(self, state: TrainState, batch: Batch | None) -> AbstractContextManager[None]:
        """Return a context manager that may sample the next completions. The device may still be computing `batch`."""
        return contextlib.nullcontext()

    def commit(self) -> None:
        """Mark the current batch as collected: advance `cursor` to `next_cursor`."""
        self.cursor = self.next_cursor

    def to_checkpoint(self) -> tuple[Completions | None, Json | None]:
        """Return the prefetched completions and their JSON metadata (such as episodes), or (None, None)."""
        return None, None

    def close(self) -> None:
        """Stop sampling and discard the completions in progress."""

    def sample_at(self, state: TrainState, start: int) -> RolloutResult:
        """Sample completions for the prompts that start at position `start` in the shuffled epochs."""
        params = rollout_params(state)
        result = self.sample_with(params, sampling_key(state), start, self._check_interrupt)
        if self.run.sampler is None:
            return result
        from grpo_jax.run.sampler import with_old_log_probs

        return with_old_log_probs(result, self.run.updater, params)

    def sample_with(
        self, params: Params, key: jax.Array, start: int, check_interrupt: Callable[[], None]
    ) -> RolloutResult:
        """Sample completions like `sample_at`, but do not compute `old_log_probs` for an engine's completions."""
        run = self.run
        return sample(
            run.policy,
            params,
            run.data,
            run.row_indices(start, self._num_prompts),
            key,
            run.config,
            prompt_indices=start + np.arange(self._num_prompts),
            prompt_length=run.prompt_length,
            episode_setup=run.episode_setup,
            sampler=run.sampler,
            check_interrupt=check_interrupt,
        )


def collect(
    run: Run,
    state: TrainState,
    source: RolloutSource,
    phase: Phase = lambda name: contextlib.nullcontext(),
    check_interrupt: Callable[[], None] = lambda: None,
) -> tuple[Batch, dict[str, float], list[dict[str, Any]]]:
    """Sample one iteration's completions and compute their rewards, advantages and log-probs.

    Returns the `Batch` with NumPy arrays, the rollout's metrics, and one dict per completion for
    `completions.jsonl`. `phase` times the phases "rollout", "reference" (log-probs and advantages), "rewards" and
    "teacher". `check_interrupt` is called between phases and may raise an exception.
    """
    config = run.config

    def interruptible_phase(name: str) -> AbstractContextManager[None]:
        check_interrupt()
        return phase(name)

    rollout, rewards, metrics, batch = _sample_and_reward(run, state, source, interruptible_phase)
    counted = np.ones(len(rollout.rows), bool)
    if config.dynamic_sampling:
        sample_more = functools.partial(_sample_and_reward, run, state, source, interruptible_phase)
        rollout, rewards, metrics, counted = refill_groups(rollout, rewards, metrics, config, sample_more)
        with interruptible_phase("reference"):
            batch = _make_batch(run, state, rollout, counted)
    assert batch is not None
    with interruptible_phase("reference"):  # waits for the log-probs
        batch = fetch(batch)
        batch = batch.replace(advantages=_advantages(run, state, batch, rollout, rewards, counted))
    if run.teacher_scoring is not None:  # does nothing if distillation_mode="full_logits" (see the update)
        with interruptible_phase("teacher"):
            batch = run.teacher_scoring.add_log_probs(batch, rollout.completions, config)
    if run.sampler is not None:
        from grpo_jax.run.sampler import mismatch_metrics

        metrics |= mismatch_metrics(batch, config)
    check_interrupt()
    source.commit()
    return batch, metrics, completion_records(rewards, reward_names(run.reward_fns), rollout, _mean_advantages(batch))


def _sample_and_reward(
    run: Run, state: TrainState, source: RolloutSource, phase: Phase
) -> tuple[RolloutResult, Rewards, dict[str, float], Batch | None]:
    """Return the next rollout, its rewards and metrics, and its batch (None with `dynamic_sampling`)."""
    config, trainer_state = run.config, run.trainer_state(int(state.step), source.next_cursor)
    with phase("rollout"):
        rollout = source.next(state)
    batch = None
    if not config.dynamic_sampling:
        with phase("reference"):  # on accelerators, dispatches the computation without waiting for it
            batch = _make_batch(run, state, rollout)
    # A phase's time excludes nested phases, so the outer "rollout" measures only the wait for prefetched completions.
    with phase("rollout"), source.prefetch(state, batch), phase("rewards"):
        local_rewards = call_reward_fns(
            run.policy.tokenizer, run.reward_fns, rollout, on_error=config.on_reward_error, trainer_state=trainer_state
        )
    with phase("rewards"):
        rewards = gather_rewards(local_rewards, run.reward_fns)
    metrics = dict(rewards.stats) | rollout_metrics(config, rewards.values, rollout)
    metrics |= rollout.episode_metrics | dict(rollout.engine_metrics)
    return rollout, rewards, means_of(rewards.logged_metrics) | metrics, batch


def _make_batch(run: Run, state: TrainState, rollout: RolloutResult, counted: Any = None) -> Batch:
    """Build a rollout's `Batch`, with zero advantages. On accelerators, its log-probs are computed asynchronously.

    `counted` [B] is False for padding groups, which fill the batch if dynamic sampling found too few groups.
    """
    prompts, completions, config = rollout.prompts, rollout.completions, run.config
    t = run.updater.padded_length(int(lengths_to_last_true(np.asarray(completions.mask)).max()))
    tokens, mask = completions.tokens[:, :, :t], completions.mask[:, :, :t]
    if counted is not None:
        mask = mask & counted[:, None, None]
    if config.mask_truncated_completions:
        mask = mask & completions.ended[:, :, None]

    def log_probs_under(params: Params | None) -> jax.Array | None:
        return None if params is None else run.updater.log_probs(params, prompts, tokens, mask)

    zeros: Any = np.zeros(mask.shape[:2], np.float32)  # `Any`: the fields of `Batch` are annotated as JAX arrays
    return Batch(
        prompts=prompts,
        tokens=tokens,
        mask=mask,
        advantages=zeros,
        sampling_log_probs=completions.log_probs[:, :, :t],  # also the old log-probs if `old_log_probs` is None
        ref_log_probs=log_probs_under(state.ref_params),
        initial_log_probs=log_probs_under(state.initial_params),  # params at the start of the run, if kept
        counted=counted,
        old_log_probs=None if completions.old_log_probs is None else completions.old_log_probs[:, :, :t],
    )


def _advantages(
    run: Run, state: TrainState, batch: Batch, rollout: RolloutResult, rewards: Rewards, counted: np.ndarray
) -> np.ndarray:
    """Compute a batch's advantages, [B, G] or [B, G, T]. `counted` [B] is False for padding groups."""
    config = run.config
    # NaN rewards exclude padding groups from batch statistics.
    values = np.where(counted[:, None, None], rewards.values, np.float32(np.nan))
    if run.custom_advantages is not None:
        return run.custom_advantages(state, batch, rollout, rewards._replace(values=values), counted)
    if config.turn_credit == "to_go":  # a turn is credited with its own and later turns' rewards
        from grpo_jax.run.multi_turn import credit_turns

        return credit_turns(batch, rollout, rewards._replace(values=values), reward_names(run.reward_fns), config)
    advantages = _jit_advantages(
        values,
        weights=config.reward_weights,
        multi_objective_aggregation=config.multi_objective_aggregation,
        estimator=config.advantage_estimator,
        scale_rewards=config.scale_rewards,
        lengths=np.sum(rollout.completions.mask, axis=-1) if config.advantage_estimator == "opo" else None,
    )
    return fetch(advantages)


def _mean_advantages(batch: Batch) -> np.ndarray:
    """Return one advantage per completion, [B, G]. Per-token advantages are averaged over the completion."""
    advantages = np.asarray(batch.advantages)
    return advantages if advantages.ndim == 2 else advantages.sum(-1) / np.maximum(np.sum(batch.mask, axis=-1), 1)


# Sampling -------------------------------------------------------------------------------------------------------------


def rollout_params(state: TrainState) -> Params:
    """Return the params to sample from: `old_params` if the state has them, else `params`."""
    return state.params if state.old_params is None else state.old_params


def sampling_key(state: TrainState) -> jax.Array:
    """Return the run's sampling key, into which `generate` folds each prompt's index."""
    return jax.random.fold_in(state.key, 0)


def sample(
    policy: Policy,
    params: Params,
    data: EncodedPrompts,
    row_indices: Sequence[int],
    key: jax.Array,
    config: GRPOConfig,
    *,
    prompt_indices: np.ndarray,
    prompt_length: int,
    evaluation: bool = False,
    episode_setup: EpisodeSetup | None = None,
    sampler: Sampler | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
    on_tokens: OnTokens | None = None,
) -> RolloutResult:
    """Sample completions for the rows of `data` at `row_indices`, with `generate` or with the engine `sampler`.

    The PRNG keys are derived from `key` and `prompt_indices` [B]. Prompts are padded to `prompt_length` tokens, or more
    if an environment makes one longer. `check_interrupt` is called repeatedly and may raise an exception.
    """
    turn_ends, g = TurnEnds.of(config), config.eval_generations if evaluation else config.num_generations
    generate_fn: Callable[..., Completions] = generate
    if sampler is not None:
        from grpo_jax.run.sampler import generate_with_engine

        generate_fn = functools.partial(generate_with_engine, sampler, policy)

    def sample_completions(prompts: Prompts, next_observation: NextObservation | None = None) -> Completions:
        check_context_length(policy, int(np.max(prompts.lengths)), config.max_completion_length)  # `reset` may add text
        return generate_fn(
            policy.model,
            params,
            prompts,
            key,
            num_generations=g,
            max_completion_length=config.max_completion_length,
            temperature=config.eval_temperature if evaluation else config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            eos_token_ids=policy.eos_token_ids,
            stop=turn_ends.stop,
            stop_token_ids=turn_ends.stop_token_ids,
            max_turn_length=turn_ends.max_turn_length,
            tokenizer=policy.tokenizer,
            pad_token_id=policy.pad_token_id,
            prompt_indices=prompt_indices,
            batch_size=None if evaluation else config.rollout_batch_size,
            next_observation=next_observation,
            check_interrupt=check_interrupt,
            on_tokens=on_tokens,
            as_numpy=True,
        )

    if episode_setup is None:
        prompts = data.prompts(row_indices, length=prompt_length)
        result = RolloutResult([data.rows[i] for i in row_indices], prompts, sample_completions(prompts))
    else:
        from grpo_jax.run.multi_turn import sample_episodes

        result = sample_episodes(episode_setup, sample_completions, data, row_indices, g, prompt_length)
    return result._replace(engine_metrics=dict(getattr(sampler, "last_metrics", {})))


# Rewards --------------------------------------------------------------------------------------------------------------


def call_reward_fns(
    tokenizer: Tokenizer,
    reward_fns: RewardFn | Sequence[RewardFn],
    rollout: RolloutResult,
    *,
    on_error: str,
    trainer_state: TrainerState | None = None,
) -> Rewards:
    """Return the reward functions' results for this process's rows. A process may have no rows."""
    tokens, names = rollout.completions.tokens, reward_names(reward_fns)
    present = rollout.present  # all tokens of the completions, including observations
    g = np.shape(tokens)[1]
    process_rows = local_range(len(rollout.rows)) if rollout.process_rows is None else rollout.process_rows
    if not process_rows:
        return Rewards(np.zeros((0, g, len(names)), np.float32))
    local_rows = slice(process_rows.start, process_rows.stop)
    local_completions = slice(local_rows.start * g, local_rows.stop * g)  # this process's share of the B·G completions
    prompts = zip(
        np.asarray(rollout.prompts.tokens)[local_rows], np.asarray(rollout.prompts.lengths)[local_rows], strict=True
    )
    ids = [row[:length] for row, length in prompts]
    inputs = reward_inputs(tokenizer, rollout.rows[local_rows], tokens[local_rows], present[local_rows], prompt_ids=ids)
    if rollout.episodes is not None:
        if is_conversation(rollout.rows[0]["prompt"]):
            inputs = inputs._replace(completions=[episode.messages for episode in rollout.episodes[local_completions]])
        inputs.columns["environment_rewards"] = [episode.reward for episode in rollout.episodes[local_completions]]
    if rollout.environments is not None:
        inputs.columns["environments"] = list(rollout.environments[local_completions])
    if not names:  # the run has a teacher and no reward functions
        texts = list(inputs.completions)
        values = np.zeros((len(process_rows), g, 0), np.float32)
        return Rewards(values, logged_columns=[{} for _ in texts], completions=texts)
    return compute_rewards(
        reward_fns,
        prompts=inputs.prompts,
        completions=inputs.completions,
        completion_ids=inputs.completion_ids,
        columns=inputs.columns,
        num_generations=g,
        turn_counts=rollout.turn_counts[local_completions],
        on_error=on_error,
        trainer_state=trainer_state,
    )
