"""The largest programs of an update for the shapes of their arguments, and the bytes held between its programs.

Nothing here is called while a run updates: the dry run, the plan and the choice of `gradient_checkpointing` use it
before there are arrays.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from grpo_jax.models.packing import PackedSequence, SequenceShape, pack_as
from grpo_jax.models.scoring import ReadPrompts, score_packed
from grpo_jax.models.sharding import abstract, device_bytes, place_of, split_sharding, tree_sharding
from grpo_jax.models.streams import count_streams
from grpo_jax.types import Batch, CachedModel, Model, Params, Prompts, is_cached
from grpo_jax.update.objective import count_totals, sampling_of
from grpo_jax.update.packed import PackedUpdater, Updater
from grpo_jax.update.prompts import (
    Reading,
    Shards,
    count_neighbours,
    count_reads,
    read_some,
    zero_gradients,
    zero_reads,
)
from grpo_jax.update.sequences import Minibatch
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import PaddedUpdater, dropout_key, zeros_like

Tree = TypeVar("Tree")


class UpdateCalls(NamedTuple):
    """Calls of the largest programs of an updater, for completions that are all T long: `update`, of one packed
    sequence or a whole step, and `score`, by the reference, or by the policy if there is none.
    """

    update: functools.partial[Any]
    score: functools.partial[Any]


def update_calls(updater: Updater, state: TrainState, batch: Batch) -> UpdateCalls:
    """The largest programs of an updater, as calls of shapes; `state` and `batch` are arrays or shapes."""
    scored_by = state.params if state.ref_params is None else state.ref_params
    if isinstance(updater, PaddedUpdater):
        scores = updater.score_call(scored_by, batch.prompts, batch.tokens, batch.mask)
        return UpdateCalls(updater.update_call(state, batch), scores)
    shards, shapes = updater.shards(batch.prompts), updater.shapes(state.params, batch.mask.shape)
    zeros, minibatch = abstract_minibatch(updater, state, batch)
    state, batch = minibatch.state, minibatch.batch
    scored_by = state.params if state.ref_params is None else state.ref_params
    shape = next((shape for shape in shapes if shape.whole), shapes[0])
    sequence = _placed(filled_sequence(batch, shape, shards), updater.mesh)
    score: jax.Array = _placed(jax.eval_shape(lambda mask: jnp.zeros(mask.shape), batch.mask), updater.mesh)
    lengths, mask = batch.prompts.lengths, batch.mask
    return UpdateCalls(
        updater.add_sequence(zeros, minibatch, sequence, 0, shards),
        updater.put_scores(
            (score, score), scored_by, minibatch.read, lengths, mask, sequence, shards, with_entropy=False
        ),
    )


def abstract_minibatch(
    updater: PackedUpdater, state: TrainState, batch: Batch
) -> tuple[tuple[Params, ReadPrompts], Minibatch]:
    """The shapes of the gradients and of the arguments that all packed sequences of an update share."""
    shards, size = updater.shards(batch.prompts), updater.shapes(state.params, batch.mask.shape)[0].size
    state, batch = abstract((state, batch))
    params, mesh = state.params, updater.mesh
    read = _shape_read(updater.model, params, batch.prompts, size, shards)
    of_params, of_read = jax.eval_shape(functools.partial(zero_gradients, shards=shards), (params, read))
    if mesh is not None:  # by the table all of them, also those that are whole on every device
        of_params = jax.tree.map(_at, of_params, tree_sharding(of_params, mesh))
    zeros = _placed((of_params, of_read), mesh, params)
    read = _placed(read, mesh, params)
    selected = _placed(batch.mask, mesh, (batch, params)) if updater.config.top_entropy_quantile < 1 else None
    totals = _placed(jax.eval_shape(count_totals, batch, selected), mesh, (batch, selected))
    dropout = _placed(jax.eval_shape(lambda state: dropout_key(updater.model, state), state), mesh, params)
    state, batch = _placed((state, batch), mesh)
    minibatch = Minibatch(state, read, batch, totals, selected, dropout)
    if updater.teacher is not None:
        teacher = abstract(updater.teacher)
        of_teacher = _shape_read(teacher.model, teacher.params, batch.prompts, size, shards)
        teacher, of_teacher = _placed((teacher, of_teacher), mesh, params)
        minibatch = minibatch._replace(teacher=teacher, teacher_read=of_teacher)
    return zeros, minibatch


def kept_bytes(updater: Updater, state: TrainState, batch: Batch) -> int:
    """Bytes that an update holds on a device beside its largest program: activations of prompts, at most.

    Those of all prompts that may have completions in one packed sequence (`prompts.count_neighbours`).
    """
    if isinstance(updater, PaddedUpdater):  # all is one program
        return 0
    shards = updater.shards(batch.prompts)
    size = updater.shapes(state.params, batch.mask.shape)[0].size
    count = count_reads(batch.prompts, size, shards)
    read = functools.partial(read_some, count=count, backward=True, shards=shards)
    dropout = jax.eval_shape(lambda state: dropout_key(updater.model, state), state)
    _, kept = jax.eval_shape(read, Reading(state.params, batch.prompts, dropout, updater.model), 0)
    together = count * count_neighbours(batch.prompts, size, shards) * shards.devices // len(batch.prompts.lengths)
    return together * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)) // shards.devices


def update_bytes(updater: Updater, state: TrainState, batch: Batch) -> int:
    """Bytes that wait for the way back in an update, on a device: gradients, and the activations of prompts and of the
    packed sequences that are at work.

    Counted without a compiler, from all that a traced forward pass hands on. A compiler keeps less, since it repeats
    cheap operations: an H100's three quarters of it for Qwen3-1.7B and 16 completions of 512 tokens.
    """
    if isinstance(updater, PaddedUpdater):  # made of whatever the model is
        return 0
    shards, shape = updater.shards(batch.prompts), updater.shapes(state.params, batch.mask.shape)[0]
    params, model, lengths = abstract((state.params, updater.model, batch.prompts.lengths))
    read = _shape_read(updater.model, params, batch.prompts, shape.size, shards)
    sequence, sampling = filled_sequence(batch, shape, shards), sampling_of(updater.config)

    def forward(params: Params, read: ReadPrompts, model: CachedModel, lengths: jax.Array) -> list[jax.Array]:
        def scores(params: Params, read: ReadPrompts) -> tuple[jax.Array, jax.Array]:
            return score_packed(model, params, read, lengths, sequence, sampling)[:2]

        return jax.tree.leaves(jax.vjp(scores, params, read)[1])

    traced, shapes = jax.make_jaxpr(forward, return_shape=True)(params, read, model, lengths)
    inputs = {*traced.jaxpr.invars, *traced.jaxpr.constvars}
    kept = {x: at for x, at in zip(traced.jaxpr.outvars, shapes, strict=True) if isinstance(x, Var) and x not in inputs}
    activations = sum(x.size * x.dtype.itemsize for x in kept.values()) // shards.devices
    gradients = device_bytes(jax.eval_shape(zeros_like, params), updater.mesh)
    streams = count_streams(state.params, -(-batch.mask.size // shape.size))
    return kept_bytes(updater, state, batch) + streams * (gradients + activations)


def _shape_read(model: Model, params: Params, prompts: Prompts, size: int, shards: Shards) -> ReadPrompts:
    """The shapes of `ReadPrompts`."""
    count = count_reads(prompts, size, shards)
    some = functools.partial(read_some, count=count, backward=False, shards=shards)
    assert is_cached(model)
    part, _ = jax.eval_shape(some, Reading(params, prompts, None, model), 0)
    return jax.eval_shape(functools.partial(zero_reads, count=count, shards=shards), part)


def filled_sequence(batch: Batch, shape: SequenceShape, shards: Shards) -> PackedSequence:
    """A packed sequence of that shape."""
    mask = np.ones(batch.mask.shape, bool)
    if not shape.whole:
        mask[:, :, shape.longest // 2 :] = False
    return pack_as(shape, mask.astype(np.int32), mask, devices=shards.devices)[0]


def _placed(tree: Tree, mesh: jax.sharding.Mesh | None, source: object = None) -> Tree:
    """Shapes where the arrays of a run are: on a mesh params by their table and all others by prompts; on one device
    where the `source` is, from which they are computed."""
    if mesh is None:
        at = place_of(source)
        return tree if at is None else jax.tree.map(lambda x: _at(x, at), tree)
    by_prompts, by_table = split_sharding(tree, mesh), tree_sharding(tree, mesh)
    return jax.tree.map(
        lambda x, prompts, table: _at(x, table if any(table.spec) else prompts), tree, by_prompts, by_table
    )


def _at(x: jax.Array | jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """A shape with that place, unless it has one."""
    sharding = getattr(x, "sharding", None) or sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))
