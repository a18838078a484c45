"""The programs of an update by the shapes of their arguments: of packed sequences, or of whole steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from grpo_jax.devices.program import Program
from grpo_jax.devices.sharding import abstract, device_bytes, place_of, split_sharding, tree_sharding
from grpo_jax.devices.streams import count_streams
from grpo_jax.models.packing import PackedSequence, SequenceShape, pack_as
from grpo_jax.models.scoring import ReadPrompts, score_packed
from grpo_jax.types import Batch, CachedModel, Model, Params, Prompts, is_cached
from grpo_jax.update.objective import count_totals, sampling_of
from grpo_jax.update.packed import PackedUpdater, Updater, apply_sums
from grpo_jax.update.prompts import (
    Reading,
    Shards,
    add_prompts,
    count_neighbours,
    count_reads,
    read_some,
    zero_gradients,
    zero_reads,
)
from grpo_jax.update.sequences import Minibatch
from grpo_jax.update.state import TrainState, same_shapes
from grpo_jax.update.step import PaddedUpdater, dropout_key, zeros_like

Tree = TypeVar("Tree")


class UpdatePrograms(NamedTuple):
    """The programs of an updater by the shapes of their arguments, for warm-up, rehearsal and plan.

    Attributes:
      update: of one update of completions that are all T long, the largest program.
      score: of scoring them, likewise: by the reference, or by the policy where there is none.
      by_length: the programs that the lengths of completions choose from: the only ones that a later iteration may be
        the first to need. The first is for completions of any length.
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
    return _PackedShapes.of(updater, state, batch, tokens).programs()


def constant_programs(
    updater: Updater, state: TrainState, batch: Batch, *, tokens: int | None = None
) -> tuple[Program, ...]:
    """The programs of an update that no length chooses: through the prompts and back, and the optimizer's.

    None on a mesh: there they take what other programs leave, and where that is XLA says once it has compiled those.
    The arguments are those of `update_programs`.
    """
    if isinstance(updater, PaddedUpdater) or updater.mesh is not None:
        return ()
    return tuple(_PackedShapes.of(updater, state, batch, tokens).constant())


class _PackedShapes(NamedTuple):
    """The arguments of an update's programs by their shapes, where the arrays of a run will be.

    Attributes:
      updater: of the run.
      state, batch: those of an update.
      shapes: that packed sequences may have.
      shards: how the prompts are cut over the mesh.
      zeros: gradients of the params, and of the read prompts.
      minibatch: what all packed sequences share.
      zero_scores: log-probs and entropies [B, G, T].
    """

    updater: PackedUpdater
    state: TrainState
    batch: Batch
    shapes: list[SequenceShape]
    shards: Shards
    zeros: tuple[Params, ReadPrompts]
    minibatch: Minibatch
    zero_scores: tuple[jax.Array, jax.Array]

    @classmethod
    def of(cls, updater: PackedUpdater, state: TrainState, batch: Batch, tokens: int | None) -> _PackedShapes:
        """The shapes for a state and a batch, as `update_programs` is given them."""
        shards, shapes = updater.shards(batch.prompts), updater.shapes(state.params, batch.mask.shape, tokens)
        state, batch = abstract((state, batch))
        quantile, params, mesh = updater.config.top_entropy_quantile, state.params, updater.mesh
        read = _shape_read(updater.model, params, batch.prompts, shapes[0].size, shards)
        of_params, of_read = jax.eval_shape(functools.partial(zero_gradients, shards=shards), (params, read))
        if mesh is not None:  # by the table all of them, those that are whole on every device too
            of_params = jax.tree.map(_at, of_params, tree_sharding(of_params, mesh))
        zeros = _placed((of_params, of_read), mesh, params)
        read = _placed(read, mesh, params)
        selected = _placed(batch.mask, mesh, (batch, params)) if quantile < 1 else None
        totals = _placed(jax.eval_shape(count_totals, batch, selected), mesh, (batch, selected))
        dropout = _placed(jax.eval_shape(lambda state: dropout_key(updater.model, state), state), mesh, params)
        zero_scores = _placed(jax.eval_shape(lambda mask: (jnp.zeros(mask.shape),) * 2, batch.mask), mesh)
        state, batch = _placed((state, batch), mesh)
        minibatch = Minibatch(state, read, batch, totals, selected, dropout)
        if updater.teacher is not None:
            teacher = abstract(updater.teacher)
            of_teacher = _shape_read(teacher.model, teacher.params, batch.prompts, shapes[0].size, shards)
            teacher, of_teacher = _placed((teacher, of_teacher), mesh, params)
            minibatch = minibatch._replace(teacher=teacher, teacher_read=of_teacher)
        return cls(updater, state, batch, shapes, shards, zeros, minibatch, zero_scores)

    def programs(self) -> UpdatePrograms:
        """All of them."""
        full, scored_by = next((shape for shape in self.shapes if shape.whole), self.shapes[0]), self.scored_by
        return UpdatePrograms(self.update(full), self.score(full, scored_by), tuple(self.by_length()))

    @property
    def scored_by(self) -> Params:
        """Whose log-probs are asked for before an update: the reference's, or the policy's where there is none."""
        return self.state.params if self.state.ref_params is None else self.state.ref_params

    @property
    def scores(self) -> bool:
        """Whether somebody's log-probs are part of a batch."""
        return self.batch.ref_log_probs is not None or self.batch.old_log_probs is not None

    def update(self, shape: SequenceShape) -> Program:
        """Adds the gradient of a packed sequence."""
        sequence = _placed(_filled(self.batch, shape, self.shards), self.updater.mesh)
        name = f"update {_sizes(shape)}"
        return self.updater.add_sequence(self.zeros, self.minibatch, sequence, 0, self.shards, name)

    def measure(self, shape: SequenceShape) -> Program:
        """The metrics of a packed sequence without a gradient."""
        sequence = _placed(_filled(self.batch, shape, self.shards), self.updater.mesh)
        return self.updater.measure_sequence(self.minibatch, sequence, 0, f"measure {_sizes(shape)}")

    def score(self, shape: SequenceShape, params: Params, suffix: str = "", *, with_entropy: bool = False) -> Program:
        """Puts the scores of a packed sequence in their places."""
        sequence = _placed(_filled(self.batch, shape, self.shards), self.updater.mesh)
        name, prompts = f"score {_sizes(shape)}{suffix}", self.batch.prompts.lengths
        arguments = (self.zero_scores, params, self.minibatch.read, prompts, self.batch.mask, sequence, self.shards)
        return self.updater.put_scores(*arguments, name, with_entropy=with_entropy)

    def by_length(self) -> Iterator[Program]:
        """Those that the lengths of completions choose from."""
        updater, state = self.updater, self.state
        quantile = updater.config.top_entropy_quantile
        # Where a batch may be packed in halves, it mostly is: with half blocks, few lengths take no fewer tokens so.
        for shape in sorted(self.shapes, key=lambda shape: shape.block):
            yield self.update(shape)
            if updater.skips:
                yield self.measure(shape)
            if self.scores:
                yield self.score(shape, state.params)
            if quantile < 1:
                yield self.score(shape, state.params, ", with entropy", with_entropy=True)
            if state.ref_params is not None and not same_shapes(state.ref_params, state.params):
                yield self.score(shape, state.ref_params, ", by the reference")

    def constant(self) -> Iterator[Program]:
        """Those of `constant_programs`."""
        updater, shards = self.updater, self.shards
        prompts, dropout = self.batch.prompts, self.minibatch.dropout
        count = count_reads(prompts, self.shapes[0].size, shards)
        sizes = f"{prompts.tokens.shape[0]} prompts in {count} parts"
        if self.scores:
            reading = Reading(self.scored_by, prompts, None, updater.model)
            name = f"read {sizes}, to score"
            yield Program.of(name, read_some, reading, 0, count=count, backward=False, shards=shards)
        reading = Reading(self.state.params, prompts, dropout, updater.model)
        if updater.skips and not (self.scores and dropout is None and same_shapes(self.scored_by, self.state.params)):
            name = f"read {sizes}, to measure"
            yield Program.of(name, read_some, reading, 0, count=count, backward=False, shards=shards)
        read = Program.of(f"read {sizes}", read_some, reading, 0, count=count, backward=True, shards=shards)
        yield read
        (_, kept), (grads, read_grads) = _placed(_results(read), None, self.state.params), self.zeros
        back = (grads, kept, read_grads, self.minibatch.read, reading, 0)
        yield Program.of(f"backward {sizes}", add_prompts, *back, count=count, shards=shards)
        _, sums = _placed(_results(self.update(self.shapes[0])), None, self.state.params)
        keywords = {"optimizer": updater.optimizer, "config": updater.config, "mesh": None}
        yield Program("apply the gradient", apply_sums, (self.state, grads, sums), keywords)


def _results(program: Program) -> Any:
    """The shapes of what a program returns."""
    return jax.eval_shape(lambda arguments: dataclasses.replace(program, arguments=arguments)(), program.arguments)


def kept_bytes(updater: Updater, state: TrainState, batch: Batch, *, tokens: int | None = None) -> int:
    """Bytes that an update holds on a device beside its largest program: activations of prompts, at most.

    Those of all prompts that may have completions in one packed sequence (`prompts.count_neighbours`).
    """
    if isinstance(updater, PaddedUpdater):  # all is one program
        return 0
    shards = updater.shards(batch.prompts)
    size = updater.shapes(state.params, batch.mask.shape, tokens)[0].size
    count = count_reads(batch.prompts, size, shards)
    read = functools.partial(read_some, count=count, backward=True, shards=shards)
    dropout = jax.eval_shape(lambda state: dropout_key(updater.model, state), state)
    _, kept = jax.eval_shape(read, Reading(state.params, batch.prompts, dropout, updater.model), 0)
    together = count * count_neighbours(batch.prompts, size, shards) * shards.devices // len(batch.prompts.lengths)
    return together * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)) // shards.devices


def update_bytes(updater: Updater, state: TrainState, batch: Batch, *, tokens: int | None = None) -> int:
    """Bytes that wait for the way back in an update, on a device: gradients, and the activations of prompts and of the
    packed sequences that are at work.

    Counted without a compiler, from what a traced forward pass hands on: a lower bound, without what comes and goes.
    """
    if isinstance(updater, PaddedUpdater):  # made of whatever the model is
        return 0
    shards, shape = updater.shards(batch.prompts), updater.shapes(state.params, batch.mask.shape, tokens)[0]
    params, model, lengths = abstract((state.params, updater.model, batch.prompts.lengths))
    read = _shape_read(updater.model, params, batch.prompts, shape.size, shards)
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


def _shape_read(model: Model, params: Params, prompts: Prompts, size: int, shards: Shards) -> ReadPrompts:
    """The shapes of `ReadPrompts`."""
    count = count_reads(prompts, size, shards)
    some = functools.partial(read_some, count=count, backward=False, shards=shards)
    assert is_cached(model)
    part, _ = jax.eval_shape(some, Reading(params, prompts, None, model), 0)
    return jax.eval_shape(functools.partial(zero_reads, count=count, shards=shards), part)


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
    sharding = getattr(x, "sharding", None) or sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))
