"""Which completions stand where on the device, and the moves from one layout to the next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.devices.sharding import fetch, mesh_of, shard_count, split
from grpo_jax.devices.streams import count_streams, run_in_streams
from grpo_jax.models.bounds import DecodeStep
from grpo_jax.rollout.decode import (
    Drawn,
    Stream,
    decode,
    decode_variables,
    gather,
    grow,
    narrow,
    on_cpu,
    prefill,
    refill,
)
from grpo_jax.rollout.ladder import Ladder, whole_cache
from grpo_jax.types import Completions, Params, Prompts

STREAM_COMPLETIONS = 16
"""Completions of one stream at least: fewer leave the matrix products too thin."""


def decode_step(model: Any, params: Params, prompt_length: int, slots: int, *, cpu: bool) -> DecodeStep:
    """What a decode step costs; a CPU multiplies eight times in the time of one byte, a GPU a hundred times."""
    held = jax.tree.leaves((model, params))
    return DecodeStep.of(
        model.config,
        prompt_length=prompt_length,
        completion_length=slots,
        itemsize=jnp.dtype(model.config.dtype).itemsize,
        weight_itemsize=sum(x.size * x.dtype.itemsize for x in held) / sum(x.size for x in held),
        bytes_per_operation=0.13 if cpu else 0.01,
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

    @functools.cached_property
    def ahead(self) -> int:
        """Bursts that are begun before the host looks at what came of the one before them."""
        return 0 if on_cpu(self.params, self.mesh) else 1

    def ladder(self, groups: int) -> Ladder:
        """The layouts that so many groups at a time may pass through."""
        (b, g), p = self.keys.shape, self.prompts.tokens.shape[1]
        how: dict[str, Any] = {"mesh": self.mesh, "waits": groups < b}
        return choose_ladder(self.model, self.params, p, groups, g, self.table.length, **how)


def choose_ladder(
    model: Any, params: Params, prompt_length: int, groups: int, width: int, length: int, *, mesh: Any, waits: bool
) -> Ladder:
    """The `Ladder` of [groups, width] completions of a model; of `params` only shapes and places are looked at."""
    cpu = on_cpu(params, mesh)
    step = decode_step(model, params, prompt_length, whole_cache(length, fixed=not cpu), cpu=cpu)
    return Ladder.of(groups, width, length, step, shards=shard_count(mesh), waits=waits, fixed=not cpu)


class _Pending(NamedTuple):
    """Tokens that were asked for and that the host has not looked at yet."""

    completions: np.ndarray  # [B', G'] those that may get some, or −1
    before: np.ndarray  # [B'] tokens that they had
    drawn: Sequence[Drawn]  # of each stream
    steps: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which completions stand where on the device, between two bursts; each move returns the next layout.

    Attributes:
      call: what does not change.
      ladder: the layouts that there may be.
      at: which of them this is.
      streams: the completions [B' / streams, G'] of each stream.
      completions: [B', G'] which completion of the call stands where; −1 if it has ended or only fills the shape.
      drawn: [B'] tokens drawn of each group's completions.
      slot: the next slot, counted on where the cache begins anew.
      slots: of the cache.
      entered: prompts of the call that stand here or have stood here; the others wait.
      pending: what was drawn last, if nobody has looked at it yet.
    """

    call: Call
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
    def of(cls, call: Call, groups: int) -> Layout:
        """The first `groups` prompts, with one token of each completion; fillers after the last."""
        ladder, (b, g) = call.ladder(groups), call.keys.shape
        numbers = np.arange(groups)

        def read(part: np.ndarray) -> tuple[Stream, Drawn]:
            how: dict[str, Any] = {"slots": ladder.slots[0], "mesh": call.mesh, **call.settings}
            own = split(jax.tree.map(lambda x: x[np.minimum(part, b - 1)], (call.prompts, call.keys)), call.mesh)
            return _waited(call, prefill(call.model, call.params, *own, 0, **how))

        call.interrupt()
        results = run_in_streams(read, np.split(numbers, stream_count(call.params, groups, g)))
        streams, drawn = zip(*results, strict=True)
        completions = np.where(numbers[:, None] < b, numbers[:, None] * g + np.arange(g), -1)
        layout = cls(call, ladder, 0, streams, completions, np.ones(groups, int), 0, ladder.slots[0], groups)
        return layout._note(_Pending(completions, np.zeros(groups, int), drawn, 1))

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
        """Whether prompts of the call have not been read yet."""
        return self.entered < len(self.call.keys)

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
        call, (b, g), some = self.call, self.call.keys.shape, self._some
        size, entered = len(self.completions) // len(self.streams), self.entered
        completions, drawn = self.completions.copy(), self.drawn.copy()
        entering = []
        for i, empty in enumerate(np.split(self.empty, len(self.streams))):
            if empty.sum() >= some and entered < b:
                numbers, places = np.arange(entered, entered + some), np.flatnonzero(empty)[:some]
                completions[i * size + places] = np.where(numbers[:, None] < b, numbers[:, None] * g + np.arange(g), -1)
                drawn[i * size + places], entered = 1, entered + some
                entering.append((i, numbers, places))

        def enter(given: tuple[int, np.ndarray, np.ndarray]) -> tuple[Stream, Drawn]:
            i, numbers, places = given
            own = jax.tree.map(lambda x: x[np.minimum(numbers, b - 1)], (call.prompts, call.keys))
            stream = self.streams[i]
            part = (stream.replace(cache=()), *own, places, self.slot)
            new, drawn = refill(call.model, call.params, *part, **call.settings)
            return _waited(call, (new.replace(cache=stream.cache), drawn))

        call.interrupt()
        results = run_in_streams(enter, entering)
        streams = list(self.streams)
        for (i, _, _), (stream, _) in zip(entering, results, strict=True):
            streams[i] = stream
        layout = dataclasses.replace(
            self, streams=tuple(streams), completions=completions, drawn=drawn, entered=entered
        )
        new = np.concatenate([i * size + places for i, _, places in entering])
        first = _Pending(completions[new], np.zeros(len(new), int), [drawn for _, drawn in results], 1)
        return layout._note(first)

    def compact(self) -> Layout:
        """The living completions in the next smaller layout, if it has room for them and they gain enough by it."""
        slots = self.ladder.slots_below(self.at, self.slots)
        kept = None if slots is None else self.ladder.choose(self.at, self.alive)
        if slots is None or kept is None:
            return self
        groups, order = kept
        completions = self.completions[groups[:, None], order]
        if self.call.mesh is None:
            parts = stream_count(self.call.params, *completions.shape)
            streams = gather(self.streams, groups, order, slots=slots, parts=parts)
        else:
            streams = tuple(narrow(own, order, slots=slots, mesh=self.call.mesh) for own in self.streams)
        return dataclasses.replace(
            self, at=self.at + 1, streams=streams, completions=completions, drawn=self.drawn[groups], slots=slots
        )

    def make_room(self) -> Layout:
        """At least one free slot: the cache of the first layout grows; a whole one begins anew."""
        if self.slot < self.slots or self.slots == self.ladder.slots[-1]:
            return self
        slots = self.ladder.slots[self.ladder.slots.index(self.slots) + 1]
        streams = tuple(grow(own, slots=slots, mesh=self.call.mesh) for own in self.streams)
        return dataclasses.replace(self, streams=streams, slots=slots)

    def decode(self) -> Layout:
        """One burst more of each completion, or less where there are no more slots or tokens to draw."""
        call, ladder = self.call, self.ladder
        count, whole = ladder.steps, self.slots == ladder.slots[-1]
        if not ladder.fixed:
            left = call.table.length - int(self.drawn[~self.empty].min())
            count = min(count, left if whole else min(left, self.slots - self.slot))
        how = {"steps": ladder.steps, "fixed": ladder.fixed, "mesh": call.mesh, **call.settings}

        def draw_some(own: Stream) -> tuple[Stream, Drawn]:
            part = (own.cache, own.replace(cache=()), self.slot, count)
            (cache, token, ended), drawn = decode(call.model, call.variables, *part, **how)
            return _waited(call, (own.replace(cache=cache, token=token, ended=ended), drawn))

        streams, drawn = zip(*run_in_streams(draw_some, self.streams), strict=True)
        after = self.drawn + count
        layout = dataclasses.replace(
            self,
            streams=streams,
            completions=np.where(after[:, None] < call.table.length, self.completions, -1),
            drawn=after,
            slot=self.slot + count,
        )
        return layout._note(_Pending(self.completions, self.drawn, drawn, count))

    def all_completions(self) -> Completions:
        """Of the call, when all of them have ended."""
        return self._look().call.table.completions(len(self.call.keys))

    def _note(self, new: _Pending) -> Layout:
        """What is being drawn, to be looked at; on an accelerator after the next tokens have been asked for."""
        for x in jax.tree.leaves(new.drawn):
            if x.is_fully_addressable:
                x.copy_to_host_async()
        return dataclasses.replace(self, pending=(*self.pending, new))._look(self.call.ahead)

    def _look(self, ahead: int = 0) -> Layout:
        """What was drawn, looked at, but for the last `ahead` bursts."""
        waiting, completions = list(self.pending), self.completions
        while len(waiting) > ahead:
            old = waiting.pop(0)
            parts = zip(*(fetch(drawn) for drawn in old.drawn), strict=True)
            given: Any = tuple(np.concatenate(part) for part in parts)
            alive = self.call.table.note(old.completions, old.before, given, old.steps)
            ended = old.completions[~alive]
            completions = np.where(np.isin(completions, ended), -1, completions)
        return dataclasses.replace(self, completions=completions, pending=tuple(waiting))


def _waited(call: Call, results: Any) -> Any:
    """What a stream's program returns; a CPU's threads wait for theirs."""
    return results if call.ahead else jax.block_until_ready(results)
