"""The shapes that a run's largest programs are called with, for its dry run and its plan."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.rollout.draw import decode_settings
from grpo_jax.rollout.programs import decode_call
from grpo_jax.run.run import BaseRun, Run
from grpo_jax.types import Batch, Params, Prompts
from grpo_jax.update.objective import sampling_of
from grpo_jax.update.state import TrainState


def rollout_call(run: Run, params: Params) -> functools.partial[Any] | None:
    """The largest decode of a rollout by those params; None for a model without a cache, or another engine's."""
    if run.sampler is not None:
        return None
    config = run.config
    return decode_call(
        run.policy.model,
        params,
        run.sizes.prompts,
        run.prompt_length,
        num_generations=config.num_generations,
        max_completion_length=min(config.max_completion_length, config.max_turn_length or config.max_completion_length),
        batch_size=config.rollout_batch_size,
        settings=decode_settings(
            sampling_of(config),
            run.policy.eos_token_ids,
            run.policy.pad_token_id,
            stop=None if run.policy.tokenizer is None else config.stop,  # of a plan, to which it adds no array
            stop_token_ids=config.stop_token_ids,
            tokenizer=run.policy.tokenizer,
        ),
    )


def _with_teacher(batch: Batch, run: BaseRun) -> Batch:
    """A batch with the log-probs that a teacher adds to it."""
    if not isinstance(run, Run) or run.teaching is None:
        return batch
    log_probs, k = batch.sampling_log_probs, run.config.distillation_topk
    if k is not None:
        told = jnp.zeros((*log_probs.shape, k))
        return batch.replace(teacher_top_ids=told.astype(jnp.int32), teacher_top_log_probs=told)
    return batch.replace(teacher_log_probs=log_probs if run.config.distillation_mode == "sampled_token" else None)


def abstract_batch(run: BaseRun, state: TrainState) -> Batch:
    """The shapes of a minibatch, which comes from the host."""
    (b, g), t = run.batch_shape, run.updater.config.max_completion_length

    per_token = isinstance(run, Run) and run.per_token

    def make() -> Batch:
        log_probs = jnp.zeros((b, g, t))
        return Batch(
            prompts=Prompts(jnp.zeros((b, run.prompt_length), jnp.int32), jnp.zeros(b, jnp.int32)),
            tokens=jnp.zeros((b, g, t), jnp.int32),
            mask=jnp.zeros((b, g, t), bool),
            advantages=log_probs if per_token else jnp.zeros((b, g)),
            sampling_log_probs=log_probs,
            ref_log_probs=None if state.ref_params is None else log_probs,
            initial_log_probs=None if state.initial_params is None else log_probs,
            counted=jnp.zeros(b, bool) if run.config.dynamic_sampling else None,
            old_log_probs=log_probs if isinstance(run, Run) and run.sampler is not None else None,
        )

    return jax.eval_shape(lambda: _with_teacher(make(), run))
