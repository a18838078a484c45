"""The programs of an update by the shapes of their arguments: of packed sequences, or of whole steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from grpo_jax.devices.program import Program
from grpo_jax.devices.sharding import abstract, device_bytes, place_of, split_sharding, tree_sharding
from grpo_jax.devices.streams import count_streams
from grpo_jax.models.packing import PackedSequence, SequenceShape, pack_as
from grpo_jax.models.scoring import ReadPrompts, score_packed
from grpo_jax.types import Batch, CachedModel, Params, Prompts
from grpo_jax.update.objective import chooses_by_covariance, count_totals, sampling_of
from grpo_jax.update.packed import Minibatch, PackedUpdater, Updater, zero_gradients
from grpo_jax.update.prompts import Reading, Shards, count_reads, join_reads, read_some
from grpo_jax.update.state import TrainState, same_shapes
from grpo_jax.update.step import PaddedUpdater, dropout_key, zeros_like
from grpo_jax.update.teaching import Reader, apart, teacher_prompts

Tree = TypeVar("Tree")


class UpdatePrograms(NamedTuple):
    """The programs of an updater by the shapes of their arguments, for warm-up, rehearsal and plan.

    Attributes:
      update: of one update of completions that are all T long, the largest program.
      score: of scoring them, likewise: by the reference, or by the policy where there is none.
      by_length: the programs that the lengths of completions choose from: the only ones that a later iteration may be
        the first to need.
    """

    update: Program
    score: Program
    by_length: tuple[Program, ...]


def update_programs(updater: Updater, state: TrainState, batch: Batch, *, tokens: int | None = None) -> UpdatePrograms:
    """The programs of an updater.

    Args:
      state, batch: as they are, or their shapes.
      tokens: of a packed sequence at most; None for those of the present device.
    """
    if isinstance(updater, PaddedUpdater):  # which lengths will come is not known
        scored_by = state.params if state.ref_params is None else state.ref_params
        scores = updater.score_call(scored_by, batch.prompts, batch.tokens, batch.mask)
        return UpdatePrograms(updater.update_call(state, batch), scores, ())
    batch = batch if batch.teacher_prompts is None else jax.eval_shape(apart, batch)
    t, shards = batch.mask.shape[2], updater.shards(batch.prompts)
    shapes = updater.shapes(state.params, t, tokens)
    state, batch = abstract((state, batch))
    quantile, params, reference = updater.config.top_entropy_quantile, state.params, state.ref_params
    read = _shape_read(updater, params, batch.prompts, shapes[0].size, shards)
    zeros = _placed(
        jax.eval_shape(functools.partial(zero_gradients, shards=shards), (params, read)), updater.mesh, params
    )
    read = _placed(read, updater.mesh, params)
    selected = _placed(batch.mask, updater.mesh, (batch, params)) if quantile < 1 else None
    totals = _placed(jax.eval_shape(count_totals, batch, selected), updater.mesh, (batch, selected))
    dropout = _placed(jax.eval_shape(lambda state: dropout_key(updater.model, state), state), updater.mesh, params)
    zero_scores = _placed(jax.eval_shape(lambda mask: (jnp.zeros(mask.shape),) * 2, batch.mask), updater.mesh)
    state, batch = _placed((state, batch), updater.mesh)
    by_covariance = chooses_by_covariance(updater.config)
    if by_covariance:
        batch = batch.replace(cov_share=batch.sampling_log_probs)
    reader = _shape_teacher(updater, state, batch, shapes[0].size, shards)
    minibatch = Minibatch(state, read, batch, totals, selected, dropout, reader)

    def update(shape: SequenceShape) -> Program:
        sequence, name = _placed(_filled(batch, shape, shards), updater.mesh), f"update {_sizes(shape)}"
        return updater.add_sequence(zeros, minibatch, sequence, 0, shards, name)

    def score(shape: SequenceShape, params: Params, suffix: str = "", *, with_entropy: bool = False) -> Program:
        sequence, name = _placed(_filled(batch, shape, shards), updater.mesh), f"score {_sizes(shape)}{suffix}"
        lengths, mask = batch.prompts.lengths, batch.mask
        return updater.put_scores(
            zero_scores, params, read, lengths, mask, sequence, shards, name, with_entropy=with_entropy
        )

    def by_length() -> Iterator[Program]:
        for shape in shapes:
            yield update(shape)
            chosen_first = by_covariance and not updater.on_policy and quantile == 1
            if batch.ref_log_probs is not None or batch.old_log_probs is not None or chosen_first:
                yield score(shape, state.params)
            if quantile < 1:
                yield score(shape, state.params, ", with entropy", with_entropy=True)
            if reference is not None and not same_shapes(reference, params):
                yield score(shape, state.ref_params, ", by the reference")

    full = next((shape for shape in shapes if shape.whole), shapes[0])
    scored_by = state.params if reference is None else state.ref_params
    return UpdatePrograms(update(full), score(full, scored_by), tuple(by_length()))


def kept_bytes(updater: Updater, state: TrainState, batch: Batch, *, tokens: int | None = None) -> int:
    """Bytes that an update holds on a device beside its largest program: the activations of all prompts."""
    if isinstance(updater, PaddedUpdater):  # all is one program
        return 0
    shards = updater.shards(batch.prompts)
    size = updater.shapes(state.params, batch.mask.shape[2], tokens)[0].size
    count = count_reads(batch.prompts, size, shards)
    read = functools.partial(read_some, count=count, backward=True, shards=shards)
    dropout = jax.eval_shape(lambda state: dropout_key(updater.model, state), state)
    _, kept = jax.eval_shape(read, Reading(state.params, batch.prompts, dropout, updater.model), 0)
    return count * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)) // shards.devices


def update_bytes(updater: Updater, state: TrainState, batch: Batch, *, tokens: int | None = None) -> int:
    """Bytes that wait for the way back in an update, on a device: gradients, and the activations of all prompts and of
    the packed sequences that are at work.

    Counted without a compiler, from what a traced forward pass hands on: a lower bound, without what comes and goes.
    """
    if isinstance(updater, PaddedUpdater):  # made of whatever the model is
        return 0
    shards, shape = updater.shards(batch.prompts), updater.shapes(state.params, batch.mask.shape[2], tokens)[0]
    params, model, lengths = abstract((state.params, updater.model, batch.prompts.lengths))
    read = _shape_read(updater, params, batch.prompts, shape.size, shards)
    sequence, sampling = _filled(batch, shape, shards), sampling_of(updater.config)

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
    return kept_bytes(updater, state, batch, tokens=tokens) + streams * (gradients + activations)


def _shape_read(updater: PackedUpdater, params: Params, prompts: Prompts, size: int, shards: Shards) -> ReadPrompts:
    """The shapes of `ReadPrompts`."""
    count = count_reads(prompts, size, shards)
    some = functools.partial(read_some, count=count, backward=False, shards=shards)
    part, _ = jax.eval_shape(some, Reading(params, prompts, None, updater.model), 0)
    return jax.eval_shape(functools.partial(join_reads, shards=shards), [part] * count)


def _shape_teacher(updater: PackedUpdater, state: TrainState, batch: Batch, size: int, shards: Shards) -> Reader | None:
    """The shapes of a teacher that has read the prompts; None where it has no part in an update."""
    if updater.teacher is None:
        return None
    teacher, prompts = abstract(updater.teacher.held(state)), jax.eval_shape(teacher_prompts, batch)
    count = count_reads(prompts, size, shards)
    some = functools.partial(read_some, count=count, backward=False, shards=shards)
    part, _ = jax.eval_shape(some, Reading(teacher.params, prompts, None, teacher.model), 0)
    read = jax.eval_shape(functools.partial(join_reads, shards=shards), [part] * count)
    return _placed(Reader(teacher, read, prompts.lengths), updater.mesh, state.params)


def _sizes(shape: SequenceShape) -> str:
    return f"{shape.size} tokens, completions of {'' if shape.whole else 'up to '}{shape.longest}"


def _filled(batch: Batch, shape: SequenceShape, shards: Shards) -> PackedSequence:
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
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or sharding)
