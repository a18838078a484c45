"""Which completions stand where on the device, and the moves from one layout to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.models.bounds import DecodeStep
from grpo_jax.models.fused_step import has_step_kernel
from grpo_jax.models.sharding import fetch, shard_count
from grpo_jax.models.sight import implementation
from grpo_jax.models.streams import count_streams, run_in_streams
from grpo_jax.rollout.decode import Drawn, Stream, grow, on_cpu
from grpo_jax.rollout.ladder import Ladder, whole_cache
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.types import CachedModel, Completions, Params

STREAM_COMPLETIONS = 16
"""Completions of one stream at least: fewer leave the matrix products too thin."""


def decode_step(model: CachedModel, params: Params, prompt_length: int, slots: int, *, cpu: bool) -> DecodeStep:
    """Cost of a decode step; a CPU multiplies eight times in the time of one byte, a GPU a hundred times."""
    held = jax.tree.leaves((model, params))
    return DecodeStep.of(
        model.config,
        prompt_length=prompt_length,
        completion_length=slots,
        itemsize=jnp.dtype(model.config.dtype).itemsize,
        weight_itemsize=sum(x.size * x.dtype.itemsize for x in held) / sum(x.size for x in held),
        bytes_per_operation=0.13 if cpu else 0.01,
    )


def stream_count(params: Params, groups: int, width: int, *, each: int = 1) -> int:
    """How many streams [groups, width] completions are decoded in: a divisor of `groups`.

    `each`: streams for each that works at a time; of several turns some wait for answers.
    """
    parts = min(groups, groups * width // STREAM_COMPLETIONS)
    most = max(1, min(parts, each * count_streams(params, groups)))
    return max(n for n in range(1, most + 1) if groups % n == 0)


def places(groups: int, num_generations: int, batch_size: int | None, shards: int) -> int:
    """How many groups stand on the devices at a time: at most `batch_size` completions, as many on each device.

    Args:
      batch_size: completions at a time over all devices; None: all.
      shards: devices that prompts are cut over.

    Example:
      >>> places(30, 4, None, 8), places(30, 4, 70, 8), places(30, 4, 70, 1)
      (32, 16, 17)
    """
    most = groups if batch_size is None else min(groups, batch_size // num_generations // shards * shards)
    return -(-most // shards) * shards


def choose_ladder(
    model: CachedModel,
    params: Params,
    prompt_length: int,
    groups: int,
    width: int,
    length: int,
    *,
    mesh: Mesh | None,
    waits: bool,
) -> Ladder:
    """The `Ladder` of [groups, width] completions of a model; of `params` only shapes and places are looked at."""
    cpu, shards = on_cpu(params, mesh), shard_count(mesh)
    slots = whole_cache(length, fixed=not cpu)
    step = decode_step(model, params, prompt_length, slots, cpu=cpu)
    grows = not _goes_through_tiles(model, groups * width, (slots, prompt_length), 1 if mesh is None else mesh.size)
    return Ladder.of(groups, width, length, step, shards=shards, waits=waits, fixed=not cpu, grows=grows)


def _goes_through_tiles(model: CachedModel, completions: int, keys: tuple[int, int], devices: int) -> bool:
    """Whether a kernel computes a step's attention in all layers that have some: it reads the slots that are full."""
    shape = model.config
    heads = {shape.heads_of(kind) for kind in shape.layer_kinds if kind.mixer == "attention"}
    chosen = implementation(shape.attention)
    return bool(heads) and all(
        has_step_kernel(chosen, head_dim=width, keys=keys, programs=completions * count // devices)
        for count, width in heads
    )


class _Pending(NamedTuple):
    """Tokens that were asked for and that the host has not looked at yet."""

    completions: np.ndarray  # [B', G'] those that may get some, or −1
    drawn: Sequence[Drawn]  # of each stream


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which completions stand where on the device, between two bursts; each move returns the next layout.

    Attributes:
      rollout: what does not change.
      ladder: the layouts that there may be.
      at: which of them this is.
      streams: the completions [B' / streams, G'] of each stream.
      completions: [B', G'] which completion stands where; −1 if it has ended or only fills the shape.
      drawn: [B'] tokens drawn of each group's completions.
      slot: the next slot, counted on where the cache begins anew.
      slots: of the cache.
      entered: prompts that stand here or have stood here; the others wait.
      pending: what was drawn last, if nobody has looked at it yet.
    """

    rollout: Rollout
    ladder: Ladder
    at: int
    streams: tuple[Stream, ...]
    completions: np.ndarray
    drawn: np.ndarray
    slot: int
    slots: int
    entered: int
    pending: tuple[_Pending, ...] = ()

    @classmethod
    def of(cls, rollout: Rollout, groups: int) -> Layout:
        """The first `groups` prompts, with one token of each completion; fillers after the last."""
        (b, g), p, numbers = rollout.keys.shape, rollout.prompts.tokens.shape[1], np.arange(groups)
        sizes = (p, groups, g, rollout.table.length)
        ladder = choose_ladder(rollout.model, rollout.params, *sizes, mesh=rollout.mesh, waits=groups < b)

        def read(part: np.ndarray) -> tuple[Stream, Drawn]:
            return rollout.waited(rollout.prefill(part, 0, slots=ladder.slots[0]))

        rollout.interrupt()
        parts = np.split(numbers, stream_count(rollout.params, groups, g))
        streams, drawn = zip(*run_in_streams(read, parts), strict=True)
        completions = rollout.numbers(numbers)
        layout = cls(rollout, ladder, 0, streams, completions, np.ones(groups, int), 0, ladder.slots[0], groups)
        return layout._note(_Pending(completions, drawn))

    @property
    def alive(self) -> np.ndarray:
        """[B', G'] completions that have not ended, as far as anybody has looked."""
        return self.completions >= 0

    @property
    def empty(self) -> np.ndarray:
        """[B'] groups all of whose completions have ended."""
        return np.logical_not(self.alive.any(axis=1))

    @property
    def prompts_wait(self) -> bool:
        """Whether some prompts have not been read yet."""
        return self.entered < len(self.rollout.keys)

    @property
    def _some(self) -> int:
        """Prompts that enter a stream at a time."""
        return max(1, len(self.completions) // len(self.streams) // 4)

    @property
    def has_places(self) -> bool:
        """Whether some prompts can enter a stream."""
        return bool(max(part.sum() for part in np.split(self.empty, len(self.streams))) >= self._some)

    def refill(self) -> Layout:
        """Some of the next prompts in the places of groups that have ended, in each stream that has them."""
        rollout, some, entered = self.rollout, self._some, self.entered
        size = len(self.completions) // len(self.streams)
        completions, drawn = self.completions.copy(), self.drawn.copy()
        entering = []
        for i, empty in enumerate(np.split(self.empty, len(self.streams))):
            if empty.sum() >= some and entered < len(rollout.keys):
                groups, places = np.arange(entered, entered + some), np.flatnonzero(empty)[:some]
                completions[i * size + places] = rollout.numbers(groups)
                drawn[i * size + places], entered = 1, entered + some
                entering.append((i, groups, places))

        def enter(entry: tuple[int, np.ndarray, np.ndarray]) -> tuple[Stream, Drawn]:
            i, groups, places = entry
            return rollout.waited(rollout.refill(self.streams[i], groups, places, self.slot))

        rollout.interrupt()
        results = run_in_streams(enter, entering)
        streams = list(self.streams)
        for (i, _, _), (stream, _) in zip(entering, results, strict=True):
            streams[i] = stream
        layout = dataclasses.replace(
            self, streams=tuple(streams), completions=completions, drawn=drawn, entered=entered
        )
        new = np.concatenate([i * size + places for i, _, places in entering])
        return layout._note(_Pending(completions[new], [first for _, first in results]))

    def compact(self) -> Layout:
        """The living completions in the next smaller layout, if it has room for them and they gain enough by it."""
        slots = self.ladder.slots_below(self.at, self.slots)
        kept = None if slots is None else self.ladder.choose(self.at, self.alive)
        if slots is None or kept is None:
            return self
        groups, order = kept
        completions = self.completions[groups[:, None], order]
        parts = stream_count(self.rollout.params, *completions.shape)
        streams = self.rollout.move(self.streams, groups, order, slots=slots, parts=parts)
        return dataclasses.replace(
            self, at=self.at + 1, streams=streams, completions=completions, drawn=self.drawn[groups], slots=slots
        )

    def make_room(self) -> Layout:
        """At least one free slot: the cache of the first layout grows; a whole one begins anew."""
        if self.slot < self.slots or self.slots == self.ladder.slots[-1]:
            return self
        slots = self.ladder.slots[self.ladder.slots.index(self.slots) + 1]
        streams = tuple(grow(own, slots=slots, mesh=self.rollout.mesh) for own in self.streams)
        return dataclasses.replace(self, streams=streams, slots=slots)

    def decode(self) -> Layout:
        """One burst more of each completion, or less where there are no more slots or tokens to draw."""
        rollout, ladder = self.rollout, self.ladder
        count, whole = ladder.steps, self.slots == ladder.slots[-1]
        if not ladder.fixed:
            left = rollout.table.length - int(self.drawn[~self.empty].min())
            count = min(count, left if whole else min(left, self.slots - self.slot))

        def draw_some(own: Stream) -> tuple[Stream, Drawn]:
            burst = rollout.decode(own, self.slot, count, steps=ladder.steps, fixed=ladder.fixed)
            return rollout.waited(burst)

        streams, drawn = zip(*run_in_streams(draw_some, self.streams), strict=True)
        after = self.drawn + count
        layout = dataclasses.replace(
            self,
            streams=streams,
            completions=np.where(after[:, None] < rollout.table.length, self.completions, -1),
            drawn=after,
            slot=self.slot + count,
        )
        return layout._note(_Pending(self.completions, drawn))

    def all_completions(self) -> Completions:
        """All of them, in NumPy's arrays, once they have ended."""
        return self._look().rollout.table.completions(len(self.rollout.keys))

    def _note(self, new: _Pending) -> Layout:
        """Keep a burst until its tokens are looked at: on an accelerator, until the next burst is under way."""
        for x in jax.tree.leaves(new.drawn):
            if x.is_fully_addressable:
                x.copy_to_host_async()
        return dataclasses.replace(self, pending=(*self.pending, new))._look(self.rollout.in_flight)

    def _look(self, in_flight: int = 0) -> Layout:
        """Take the tokens of all bursts but the last `in_flight` into the table."""
        table, waiting, completions = self.rollout.table, list(self.pending), self.completions
        while len(waiting) > in_flight:
            old = waiting.pop(0)
            drawn = jax.tree.map(lambda *x: np.concatenate(x), *map(fetch, old.drawn))
            settings = self.rollout.settings
            ended = table.record(old.completions, drawn, settings.eos_token_ids, settings.stops)
            table.ended[old.completions[ended]] = True
            over = old.completions[ended | (table.lengths[old.completions] == table.length)]
            completions = np.where(np.isin(completions, over), -1, completions)
        return dataclasses.replace(self, completions=completions, pending=tuple(waiting))
