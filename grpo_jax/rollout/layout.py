"""Which completions stand where on the device, what each layout costs, and the moves from one to the next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.devices.sharding import fetch, mesh_of, shard_count, split
from grpo_jax.devices.streams import count_streams, devices_of, run_in_streams
from grpo_jax.models.bounds import DecodeStep
from grpo_jax.rollout.decode import (
    BURST,
    FEWEST_SLOTS,
    Drawn,
    Stream,
    decode,
    decode_variables,
    grow,
    narrow,
    prefill,
    rearrange,
)
from grpo_jax.types import Completions, Params, Prompts

STREAM_COMPLETIONS = 16
"""Completions of one stream at least: fewer leave the matrix products too thin."""

FEWEST = 8
"""Completions that are left in a batch at least: a product with fewer takes a CPU as long."""

WORTH_A_MOVE = 0.8
"""Share of the present layout's cost that another may have at most: a move costs a copy of the cache, and a program."""


def _bucket(n: int, largest: int, *, smallest: int = 1, factor: int = 2) -> int:
    """The smallest of smallest, factor·smallest, factor²·smallest, … that holds n, at most `largest`."""
    while smallest < n:
        smallest *= factor
    return min(smallest, largest)


def survivors(alive: np.ndarray, step: DecodeStep) -> tuple[np.ndarray, np.ndarray] | None:
    """Which completions of alive [B', G'] to keep, as groups [B''] and order [B'', G'']; None: the layout stays.

    One of three layouts: the present one, unless another saves a fifth; every completion alone with its own prompt;
    the groups that live, as wide as the widest of them has to be, where that is cheaper by a quarter. So, and by sizes
    that are far apart, there are few layouts, and few programs are compiled.
    """
    b, g = alive.shape
    if alive.size <= FEWEST:
        return None
    counts = alive.sum(axis=1)
    living = np.flatnonzero(counts)
    width = _bucket(int(counts.max()), g)
    groups = _bucket(len(living), b, smallest=min(b, max(1, FEWEST // width)))
    single = _bucket(int(counts.sum()), b * g, smallest=FEWEST, factor=4)
    grouped, apart = step.cost(groups, width), step.cost(single, 1)
    if min(grouped, apart) > WORTH_A_MOVE * step.cost(b, g):
        return None
    if grouped <= 0.75 * apart:
        chosen = np.argsort(counts == 0, kind="stable")[:groups]
        return chosen, np.argsort(~alive[chosen], axis=1, kind="stable")[:, :width]
    # Fillers are completions that have ended: they draw nothing.
    flat = np.argsort(~alive.reshape(-1), kind="stable")[:single]
    return flat // g, (flat % g)[:, None]


def narrower(alive: np.ndarray, step: DecodeStep, shards: int) -> np.ndarray | None:
    """Which completions of each group of alive [B', G'] to keep, as order [B', G'']; None: the layout stays.

    For a mesh, where no group leaves its device, of which each has its share: all are as wide as the widest has to be.
    """
    b, g = alive.shape
    width = _bucket(int(alive.sum(axis=1).max()), g)
    if step.cost(b // shards, width) > WORTH_A_MOVE * step.cost(b // shards, g):
        return None
    return np.argsort(~alive, axis=1, kind="stable")[:, :width]


def decode_step(model: Any, params: Params, stream: Stream) -> DecodeStep:
    """What a decode step costs; a CPU multiplies eight times in the time of one byte, a GPU a hundred times."""
    values, cache = stream.prefix.layers[0][1], stream.cache[0][1]
    held = jax.tree.leaves((model, params))
    on_cpu = all(device.platform == "cpu" for device in devices_of(params))
    return DecodeStep.of(
        model.config,
        prompt_length=values.shape[2],
        completion_length=cache.shape[-2],
        itemsize=values.dtype.itemsize,
        weight_itemsize=sum(x.nbytes for x in held) / sum(x.size for x in held),
        bytes_per_operation=0.13 if on_cpu else 0.01,
    )


def stream_count(params: Params, groups: int, width: int) -> int:
    """How many streams [groups, width] completions are decoded in: a divisor of `groups`."""
    most = count_streams(params, min(groups, groups * width // STREAM_COMPLETIONS))
    return max(n for n in range(1, most + 1) if groups % n == 0)


def places(groups: int, num_generations: int, batch_size: int | None, shards: int) -> int:
    """How many groups stand on the devices at a time: at most `batch_size` completions, as many on each device.

    Args:
      groups: B, all that there are.
      num_generations: G.
      batch_size: completions at a time over all devices; None: all.
      shards: devices that prompts are cut over.

    Example:
      >>> places(30, 4, None, 8), places(30, 4, 70, 8), places(30, 4, 70, 1)
      (32, 16, 17)
    """
    most = groups if batch_size is None else min(groups, batch_size // num_generations // shards * shards)
    return -(-most // shards) * shards


class Table:
    """The whole call's tokens, log-probs and mask, on the host.

    Attributes:
      tokens: [B·G, T], likewise log_probs and mask.
      finished: [B·G] whether a completion has drawn an EOS.
    """

    def __init__(self, count: int, length: int, pad_token_id: int, eos_token_ids: tuple[int, ...]):
        self.tokens = np.full((count, length), pad_token_id, np.int32)
        self.log_probs = np.zeros((count, length), np.float32)
        self.mask = np.zeros((count, length), bool)
        self.finished = np.zeros(count, bool)
        self._eos = eos_token_ids

    @property
    def length(self) -> int:
        """T, the most tokens of a completion."""
        return self.tokens.shape[1]

    def note(self, completions: np.ndarray, before: np.ndarray, drawn: Drawn, count: int) -> np.ndarray:
        """Take in `count` tokens more of completions [B', G'] that had `before` [B']; return which go on [B', G']."""
        chex.assert_shape(before, completions.shape[:1])
        chex.assert_equal_shape_prefix((completions, *drawn), 2)
        tokens, log_probs, mask = (np.asarray(x)[:, :, :count] for x in drawn)
        at = before[:, None, None] + np.arange(count)
        here = (completions >= 0)[:, :, None] & (at < self.length)
        where = np.broadcast_to(completions[:, :, None], here.shape)[here], np.broadcast_to(at, here.shape)[here]
        for whole, part in ((self.tokens, tokens), (self.log_probs, log_probs), (self.mask, mask)):
            whole[where] = part[here]
        ended = (np.isin(tokens, self._eos) & mask & here).any(axis=-1)
        self.finished[completions[ended]] = True
        return (completions >= 0) & ~ended & (before[:, None] + count < self.length)

    def completions(self, groups: int) -> Completions:
        """All completions as `Completions` of B = `groups` prompts."""
        arrays = (self.tokens, self.mask, self.log_probs)
        tokens, mask, log_probs = (jnp.asarray(x.reshape(groups, -1, self.length)) for x in arrays)
        return Completions(tokens, mask, log_probs, jnp.asarray(self.finished.reshape(groups, -1)))


@dataclasses.dataclass(frozen=True)
class Call:
    """What all layouts of one call of `generate` share.

    Attributes:
      model: as an argument of a compiled function.
      params: of the model.
      prompts: B of them.
      keys: [B, G] typed keys.
      settings: of `prefill` and `decode`: eos_token_ids, pad_token_id, sampling.
      table: what has been drawn.
      interrupt: called before prompts are read.
    """

    model: Any
    params: Params
    prompts: Prompts
    keys: jax.Array
    settings: Mapping[str, Any]
    table: Table
    interrupt: Callable[[], None]

    @functools.cached_property
    def mesh(self) -> Any:
        """Of the params; None on one device."""
        return mesh_of(self.params)

    @functools.cached_property
    def variables(self) -> dict[str, Any]:
        """What `decode` applies the model to."""
        return decode_variables(self.model, self.params)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which completions stand where on the device, between two bursts; each move returns the next layout.

    Attributes:
      call: what does not change.
      streams: the completions [B' / streams, G'] of each stream.
      completions: [B', G'] which completion of the call stands where; −1 if it has ended or only fills the shape.
      drawn: [B'] tokens drawn of each group's completions.
      slot: the next slot of the cache.
      slots: of the cache.
      entered: prompts of the call that stand here or have stood here; the others wait.
    """

    call: Call
    streams: tuple[Stream, ...]
    completions: np.ndarray
    drawn: np.ndarray
    slot: int
    slots: int
    entered: int

    @classmethod
    def of(cls, call: Call, count: int) -> Layout:
        """The first `count` prompts, with one token of each completion."""
        length, width = call.table.length, call.keys.shape[1]
        # Attention looks at all slots, so they grow with the completions, by few sizes.
        slots = min(max(FEWEST_SLOTS, -(-length // 4)), max(1, length - 1))
        nothing = cls(call, (), np.zeros((0, width), int), np.zeros(0, int), slot=0, slots=slots, entered=0)
        return nothing._enter(count)

    @property
    def alive(self) -> np.ndarray:
        """[B', G'] completions that have not ended."""
        return self.completions >= 0

    @property
    def empty(self) -> np.ndarray:
        """[B'] groups all of whose completions have ended."""
        return np.logical_not(self.alive.any(axis=1))

    @property
    def prompts_wait(self) -> bool:
        """Whether prompts of the call have not been read yet."""
        return self.entered < len(self.call.keys)

    def _enter(self, count: int) -> Layout:
        """The next `count` prompts beside those here, with one token of each completion; fillers after the last."""
        call, (b, g) = self.call, self.call.keys.shape
        call.interrupt()
        numbers = np.arange(self.entered, self.entered + count)
        parts = stream_count(call.params, count, g)

        def read(at: np.ndarray) -> tuple[Stream, Drawn]:
            own = split(jax.tree.map(lambda x: x[at], (call.prompts, call.keys)), call.mesh)
            how: dict[str, Any] = {"slots": self.slots, "mesh": call.mesh, **call.settings}
            return jax.block_until_ready(prefill(call.model, call.params, *own, self.slot, **how))

        some = [np.minimum(part, b - 1) for part in np.split(numbers, parts)]
        results = run_in_streams(read, some)
        completions = np.where(numbers < b, numbers, -b)[:, None] * g + np.arange(g)
        alive = call.table.note(np.maximum(completions, -1), np.zeros(count, int), _on_host(results), 1)
        return dataclasses.replace(
            self,
            streams=(*self.streams, *(own for own, _ in results)),
            completions=np.concatenate([self.completions, np.where(alive, completions, -1)]),
            drawn=np.concatenate([self.drawn, np.ones(count, int)]),
            entered=self.entered + count,
        )

    def refill(self, count: int) -> Layout:
        """The next `count` prompts in the places of as many groups that have ended."""
        more = self._enter(count)
        stay = np.append(self.empty, np.zeros(count, bool))
        return more._select(np.argsort(stay, kind="stable")[: len(self.completions)])

    def compact(self) -> Layout:
        """The living completions moved together, if that saves enough; on a mesh each group stays on its device."""
        call = self.call
        step = decode_step(call.model, call.params, self.streams[0])
        if call.mesh is None:
            kept = survivors(self.alive, step)
            return self if kept is None else self._select(*kept)
        order = narrower(self.alive, step, shard_count(call.mesh))
        if order is None:
            return self
        streams = tuple(narrow(own, order, mesh=call.mesh) for own in self.streams)
        return dataclasses.replace(
            self, streams=streams, completions=np.take_along_axis(self.completions, order, axis=1)
        )

    def make_room(self) -> Layout:
        """At least one free slot: those that no living completion uses are given up, or the cache grows."""
        if self.slot < self.slots:
            return self
        if self.call.mesh is None:
            return self._select(np.arange(len(self.completions)))
        slots = self._more_slots()
        return dataclasses.replace(self, streams=tuple(grow(own, slots=slots) for own in self.streams), slots=slots)

    def decode(self) -> Layout:
        """One burst more: at most `BURST` tokens of each completion, as many as there are slots."""
        call = self.call
        count = min(BURST, self.slots - self.slot, call.table.length - int(self.drawn[~self.empty].min()))

        def draw_some(own: Stream) -> tuple[Stream, Drawn]:
            part = (own.cache, own.replace(cache=None), self.slot, count)
            return jax.block_until_ready(decode(call.model, call.variables, *part, steps=BURST, **call.settings))

        results = run_in_streams(draw_some, self.streams)
        alive = call.table.note(self.completions, self.drawn, _on_host(results), count)
        return dataclasses.replace(
            self,
            streams=tuple(own for own, _ in results),
            completions=np.where(alive, self.completions, -1),
            drawn=self.drawn + count,
            slot=self.slot + count,
        )

    def _select(self, groups: np.ndarray, order: np.ndarray | None = None) -> Layout:
        """Completions order [B', G'] of groups [B'], by default all, without the slots that no living one uses."""
        if order is None:
            order = np.broadcast_to(np.arange(self.completions.shape[1]), (len(groups), self.completions.shape[1]))
        completions, drawn = self.completions[groups[:, None], order], self.drawn[groups]
        shift = self.slot + 1 - int(drawn[(completions >= 0).any(axis=1)].max(initial=1))
        slot = self.slot - shift
        slots = self.slots if slot < self.slots else self._more_slots()
        parts = stream_count(self.call.params, *completions.shape)
        streams = rearrange(self.streams, groups, order, shift, slots=slots, parts=parts)
        return dataclasses.replace(self, streams=streams, completions=completions, drawn=drawn, slot=slot, slots=slots)

    def _more_slots(self) -> int:
        return min(2 * self.slots, self.call.table.length - 1)


def _on_host(results: Sequence[tuple[Stream, Drawn]]) -> Any:
    """What the streams drew, [B', G', steps]."""
    drawn = zip(*(fetch(x) for _, x in results), strict=True)
    return tuple(np.concatenate(parts) for parts in drawn)
