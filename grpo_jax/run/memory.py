"""A run's largest programs, bound to abstract arrays, and the choice of `gradient_checkpointing` by memory use."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from grpo_jax.models.devices import ProgramCost, compile_program
from grpo_jax.models.sharding import (
    abstract,
    batch_sharding,
    device_bytes,
    gather_objects,
    lower_call,
    place_of,
    placed_shapes,
    shard_count,
    tree_sharding,
)
from grpo_jax.models.threads import devices_of
from grpo_jax.rollout.decode_plan import decode_call
from grpo_jax.rollout.ends import decode_settings
from grpo_jax.run.placement import with_shape
from grpo_jax.run.run import BaseRun, Run, new_state
from grpo_jax.types import Batch, Params, as_jit_argument
from grpo_jax.update.objective import count_totals, sampling_distribution
from grpo_jax.update.packed import PackedUpdater, Part, add_gradients, score_part, zero_gradients
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import Updater, score_padded, update_padded

Tree = TypeVar("Tree")

COMPILED = 0.9
"""Maximum ratio of the compiler's memory estimate to a device's memory. The rest allows for fragmentation."""


def decide_checkpointing(run: Run, memory: float | None) -> Run:
    """If the config does not set `gradient_checkpointing`, choose it based on a device's `memory` in bytes.

    Activations are kept on CPUs, where packed sequences are short. On other devices, they are kept if the compiled
    update fits in the memory of every process's device. If `memory` is None (unknown), they are recomputed.
    """
    if run.config.gradient_checkpointing is not None:
        return run
    kept, limits = _with_recomputation(run, recompute=False), gather_objects(memory)
    on_cpu = all(device.platform == "cpu" for device in devices_of(run.policy.params))
    if on_cpu or (None not in limits and compiled_peak_bytes(kept) <= COMPILED * min(limits)):
        return kept
    return _with_recomputation(run, recompute=True)


def _with_recomputation(run: Run, *, recompute: bool) -> Run:
    config = dataclasses.replace(run.config, gradient_checkpointing=recompute)
    policy = run.policy.replace(model=with_shape(run.policy.model, remat=recompute))
    updater = dataclasses.replace(run.updater, model=as_jit_argument(policy.model), config=config)
    return dataclasses.replace(run, config=config, policy=policy, updater=updater)


def compiled_peak_bytes(run: Run) -> int:
    """Return an update's peak memory per device in bytes: state, models and what the compiled program adds."""
    state, batch = abstract_arrays(run)
    constant_bytes = device_bytes(state) + run.param_bytes(run.policy.params)
    if run.teacher_scoring is not None:
        constant_bytes += device_bytes(run.teacher_scoring.local)
    arguments = run.param_bytes(state.params)
    cost = compile_program(lower_call(update_calls(run.updater, state, batch).update), arguments)
    return constant_bytes + added_bytes(run, state, batch, cost)


def added_bytes(run: BaseRun, state: TrainState, batch: Batch, cost: ProgramCost) -> int:
    """Return how many bytes per device an update needs beyond the state, from the `cost` of its largest program."""
    return max(0, cost.arguments + cost.results - run.param_bytes(state.params)) + cost.temporaries


def abstract_arrays(run: BaseRun) -> tuple[TrainState, Batch]:
    """Return the initial state and a minibatch as abstract arrays. Without a mesh, the params are not made abstract."""

    def make_state(params: Params) -> TrainState:
        return new_state(dataclasses.replace(run, policy=run.policy.replace(params=params), mesh=None))

    state = jax.eval_shape(make_state, run.policy.params)
    batch = jax.eval_shape(lambda: run.zero_batch(state))
    if run.mesh is None:
        return state.replace(params=run.policy.params), batch
    state = placed_shapes(state, tree_sharding(state, run.mesh))
    return state, placed_shapes(batch, batch_sharding(batch, run.mesh))


def rollout_call(run: Run, params: Params) -> functools.partial[object] | None:
    """Return the largest decode program with bound arguments, or None if an engine samples or there is no KV cache."""
    config = run.config
    if run.sampler is not None:
        return None
    return decode_call(
        run.policy.model,
        params,
        run.sizes.prompts_per_iteration,
        run.prompt_length,
        num_generations=config.num_generations,
        max_completion_length=config.max_completion_length,
        batch_size=config.rollout_batch_size,
        # `stop` is omitted: it needs a tokenizer and does not add a large array.
        settings=decode_settings(sampling_distribution(config), run.policy.eos_token_ids, run.policy.pad_token_id),
    )


class UpdateCalls(NamedTuple):
    """An updater's largest compiled functions, bound to abstract completions of the maximum length T."""

    update: functools.partial[Any]  # the gradient for one part, or the whole step if completions are padded
    score: functools.partial[Any]  # log-probs under the reference if there is one, else the policy


def update_calls(updater: Updater, state: TrainState, batch: Batch) -> UpdateCalls:
    """Bind an updater's functions to `state` and `batch`, which may contain arrays or `ShapeDtypeStruct`s."""
    scored_by = state.params if state.ref_params is None else state.ref_params
    if not isinstance(updater, PackedUpdater):
        scores = functools.partial(score_padded, updater, scored_by, batch.prompts, batch.tokens, batch.mask)
        return UpdateCalls(functools.partial(update_padded, updater, state, batch), scores)
    mesh, part = updater.mesh, abstract_part(updater, state, batch)
    state, batch = abstract((state, batch))
    selected = None if part.selected is None else batch.mask
    totals = _placed(jax.eval_shape(count_totals, batch, selected), mesh, (batch, part))
    total = jax.eval_shape(zero_gradients, updater, state.params)
    if mesh is not None:  # use the sharding table, which also names the leaves to replicate
        total = jax.tree.map(_with_sharding, total, tree_sharding(total, mesh))
    total, state = _placed(total, mesh, state.params), _placed(state, mesh)
    scored_by = state.params if state.ref_params is None else state.ref_params
    return UpdateCalls(
        functools.partial(add_gradients, updater, total, state, part, totals),
        functools.partial(score_part, updater, scored_by, part, False),
    )


def abstract_part(updater: PackedUpdater, state: TrainState, batch: Batch) -> Part:
    """Return an abstract part of a minibatch whose completions all have the maximum length T."""
    _, _, prompts_per_device = updater.plan_parts(state.params, batch)
    rows, shapes = prompts_per_device * shard_count(updater.mesh), updater.shapes(state.params, batch.mask.shape)
    part: Batch = jax.tree.map(lambda x: np.zeros((rows, *x.shape[1:]), x.dtype), batch.replace(counted=None))
    part = part.replace(mask=~part.mask)
    selected = part.mask if updater.config.top_entropy_quantile < 1 else None
    shape = next((shape for shape in shapes if shape.whole), shapes[0])
    packed = updater.pack_part(part, selected, np.ones(rows, bool), shape, 0)
    return _placed(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), packed), updater.mesh)


def _placed(tree: Tree, mesh: jax.sharding.Mesh | None, source: object = None) -> Tree:
    """Shard abstract arrays by `TABLE`, or else along the prompt axis. Without a mesh, use `source`'s sharding."""
    if mesh is None:
        sharding = place_of(source)
        return tree if sharding is None else jax.tree.map(lambda x: _with_sharding(x, sharding), tree)
    by_prompts, by_table = batch_sharding(tree, mesh), tree_sharding(tree, mesh)
    return jax.tree.map(
        lambda x, prompts, table: _with_sharding(x, table if any(table.spec) else prompts), tree, by_prompts, by_table
    )


def _with_sharding(x: jax.Array | jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Make an array abstract, with the given sharding unless it already has a sharding."""
    sharding = getattr(x, "sharding", None) or sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))
