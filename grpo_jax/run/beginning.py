"""The state that a run begins with, and the shapes that its largest programs are called with."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.hub.policy import with_shape
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import (
    device_bytes,
    gather_objects,
    lower_call,
    place,
    placed_shapes,
    split_sharding,
    tree_sharding,
)
from grpo_jax.models.targets import ProgramCost, compile_program
from grpo_jax.rollout.ends import decode_settings
from grpo_jax.rollout.programs import decode_call
from grpo_jax.run.run import BaseRun, Run
from grpo_jax.types import Batch, Params, Prompts, as_argument
from grpo_jax.update.objective import sampling_of
from grpo_jax.update.programs import kept_bytes, update_bytes, update_calls
from grpo_jax.update.state import TrainState, create_state

FILLED = 0.7
"""Share of a device's memory that a run may be estimated to hold; the rest is for a program's other temporaries."""

COMPILED = 0.9
"""Share of a device's memory that an update may hold by the compiler's count; the rest is for fragmentation."""


def new_state(run: BaseRun, *, donate: bool = False) -> TrainState:
    """The state at step 0, holding only what this config will read; with `donate` the params of the run's policy."""
    config = run.config
    adapted = isinstance(run.policy.model, LoraModel)
    state = create_state(
        run.policy.params,
        run.optimizer,
        jax.random.key(config.seed),
        keep_old=run.sizes.updates > 1 or (isinstance(run, Run) and run.samples_beside),
        keep_reference=config.beta > 0,
        keep_initial=config.sync_ref_model,
        mix_adapters=config.ref_model_mixup_alpha if config.sync_ref_model and adapted else None,
        entropy_coef=config.entropy_coef,
        # The adaptive bonus acts on a measured entropy, and nothing has been measured yet.
        entropy_bonus=0.0 if config.use_adaptive_entropy else None,
        donate=donate,
    )
    return place(state, run.mesh)


def decide_checkpointing(run: Run, memory: float | None) -> Run:
    """The run whose config says whether activations are recomputed, where it was left to the memory.

    They are kept if they fit into the `memory` of each device, in bytes, next to the state and the caller's params.
    `peak_bytes` counts everything that a traced forward pass hands on, of which a compiler keeps a part. So if that
    does not fit, the update is compiled, and the compiler's count decides. Of several processes, the one with the least
    memory decides for all.
    """
    if run.config.gradient_checkpointing is not None:
        return run
    kept, limits = _with_recomputation(run, recompute=False), gather_objects(memory)
    if None not in limits:
        least = min(limits)
        if peak_bytes(kept) <= FILLED * least or compiled_peak_bytes(kept) <= COMPILED * least:
            return kept
    return _with_recomputation(run, recompute=True)


def _with_recomputation(run: Run, *, recompute: bool) -> Run:
    config = dataclasses.replace(run.config, gradient_checkpointing=recompute)
    policy = run.policy.replace(model=with_shape(run.policy.model, remat=recompute))
    updater = dataclasses.replace(run.updater, model=as_argument(policy.model), config=config)
    return dataclasses.replace(run, config=config, policy=policy, updater=updater)


def peak_bytes(run: Run) -> int:
    """Estimate of the bytes that a device holds in an update, without a compiler."""
    held, state, batch = _held(run)
    return held + update_bytes(run.updater, state, batch)


def compiled_peak_bytes(run: Run) -> int:
    """Bytes that a device holds in an update, by the compiler's count."""
    held, state, batch = _held(run)
    own = device_bytes((as_argument(run.policy.model), state.params), run.mesh)
    cost = compile_program(lower_call(update_calls(run.updater, state, batch).update), own)
    return held + added_bytes(run, state, batch, cost)


def added_bytes(run: BaseRun, state: TrainState, batch: Batch, cost: ProgramCost) -> int:
    """Bytes that an update adds on a device to those that stay, by the cost of its largest program.

    The program of a packed sequence is given the gradients so far; activations of prompts wait for the backward pass.
    """
    own = device_bytes((as_argument(run.policy.model), state.params), run.mesh)
    waiting = kept_bytes(run.updater, state, batch)
    return max(0, cost.arguments + cost.results - own) + cost.temporaries + waiting


def abstract_arrays(run: BaseRun) -> tuple[TrainState, Batch]:
    """The shapes of the state at step 0 and of a minibatch, with their shardings on the mesh of the run.

    Without a mesh only the params have one.
    """

    def make_state(params: Params) -> TrainState:
        return new_state(dataclasses.replace(run, policy=run.policy.replace(params=params), mesh=None))

    state = jax.eval_shape(make_state, run.policy.params)
    batch = abstract_batch(run, state)
    if run.mesh is None:
        return state.replace(params=run.policy.params), batch
    state = placed_shapes(state, tree_sharding(state, run.mesh))
    return state, placed_shapes(batch, split_sharding(batch, run.mesh))


def _held(run: Run) -> tuple[int, TrainState, Batch]:
    """Bytes that stay on a device, and the shapes of the state and of a minibatch."""
    state, batch = abstract_arrays(run)
    held = device_bytes(state, run.mesh) + device_bytes((as_argument(run.policy.model), run.policy.params), run.mesh)
    if run.teaching is not None:
        held += device_bytes(run.teaching.teacher, run.mesh)
    return held, state, batch


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
