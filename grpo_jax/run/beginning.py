"""The state that a run begins with, and whether the activations of an update fit beside it."""

from __future__ import annotations

import dataclasses

import jax

from grpo_jax.devices.sharding import device_bytes, gather_objects, place
from grpo_jax.hub.policy import with_checkpointing
from grpo_jax.models.lora import LoraModel
from grpo_jax.run.programs import abstract_batch
from grpo_jax.run.run import BaseRun, Run
from grpo_jax.types import Params, as_argument
from grpo_jax.update.programs import update_bytes
from grpo_jax.update.state import TrainState, create_state

FILLED = 0.7
"""Share of a device's memory that a run may be planned for; the rest is for what comes and goes inside a program."""


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

    They are kept if there is room for them in the `memory` of each device, in bytes: beside the state, the caller's
    params and the rest of what an update adds (`update_bytes`). Of several processes, one that has no room decides for
    all.
    """
    if run.config.gradient_checkpointing is not None:
        return run
    room = memory is not None and peak_bytes(run) <= FILLED * memory
    recompute = not all(gather_objects(room))
    config = dataclasses.replace(run.config, gradient_checkpointing=recompute)
    policy = run.policy.replace(model=with_checkpointing(run.policy.model, recompute=recompute))
    updater = dataclasses.replace(run.updater, model=as_argument(policy.model), config=config)
    return dataclasses.replace(run, config=config, policy=policy, updater=updater)


def peak_bytes(run: Run) -> int:
    """Bytes that a device holds in an update, without a compiler and without what comes and goes inside a program."""

    def make_state(params: Params) -> TrainState:
        return new_state(dataclasses.replace(run, policy=run.policy.replace(params=params), mesh=None))

    model, params = as_argument(run.policy.model), run.policy.params
    state = jax.eval_shape(make_state, params)
    held = device_bytes(state, run.mesh) + device_bytes((model, params), run.mesh)
    if run.teaching is not None:
        held += device_bytes(run.teaching.teacher, run.mesh)
    state = state.replace(params=params)  # with their places
    return held + update_bytes(run.updater, state, abstract_batch(run, state))
