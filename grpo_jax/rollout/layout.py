"""Which completions stand where on the device, and the moves from one layout to the next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.devices.sharding import fetch, mesh_of, shard_count, split
from grpo_jax.devices.streams import count_streams, run_in_streams
from grpo_jax.models.bounds import DecodeStep
from grpo_jax.rollout.decode import Drawn, Stream, decode, decode_variables, grow, move, on_cpu, prefill, refill
from grpo_jax.rollout.draw import DecodeSettings, Variables
from grpo_jax.rollout.ladder import Ladder, whole_cache
from grpo_jax.types import CachedModel, Completions, Params, Prompts, as_argument

Result = TypeVar("Result")

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
    """All tokens of a call, on the host.

    Attributes:
      tokens: [B·G, T] drawn and observed; the pad id after the end.
      mask: [B·G, T] which of them were drawn.
      log_probs: [B·G, T] that they were drawn with, 0 elsewhere.
      lengths: [B·G] tokens of each completion so far, drawn or observed.
      ended: [B·G] whether a completion ended by itself.
    """

    def __init__(self, count: int, length: int, pad_token_id: int):
        self.tokens = np.full((count, length), pad_token_id, np.int32)
        self.log_probs = np.zeros((count, length), np.float32)
        self.mask = np.zeros((count, length), bool)
        self.lengths = np.zeros(count, int)
        self.ended = np.zeros(count, bool)

    @property
    def length(self) -> int:
        """T, the most tokens of a completion."""
        return self.tokens.shape[1]

    def draw(self, completions: np.ndarray, drawn: Drawn, eos_token_ids: tuple[int, ...]) -> np.ndarray:
        """Take in what was drawn of completions [B', G'], −1 for nobody's; return who drew an EOS [B', G']."""
        chex.assert_equal_shape_prefix((completions, *drawn), 2)
        tokens, log_probs, mask = map(np.asarray, drawn)
        at = self.lengths[completions][:, :, None] + np.arange(tokens.shape[2])
        here = mask & (completions >= 0)[:, :, None] & (at < self.length)
        where = np.broadcast_to(completions[:, :, None], here.shape)[here], at[here]
        self.tokens[where], self.log_probs[where], self.mask[where] = tokens[here], log_probs[here], True
        np.add.at(self.lengths, where[0], 1)
        return (np.isin(tokens, eos_token_ids) & here).any(axis=-1)

    def observe(self, completion: int, tokens: Sequence[int]) -> None:
        """Take in an observation."""
        begin, end = self.lengths[completion], self.lengths[completion] + len(tokens)
        self.tokens[completion, begin:end], self.lengths[completion] = tokens, end

    def completions(self, groups: int, *, turns: bool = False) -> Completions:
        """All completions of B = `groups` prompts, in NumPy's arrays; of several `turns`, or of one."""
        there = np.arange(self.length) < self.lengths[:, None]
        arrays = (self.tokens, self.mask, self.log_probs, self.ended, there if turns else None)
        return Completions(*jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), arrays))


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of a rollout, and the table of what has been drawn.

    Attributes:
      model: as an argument of a compiled function.
      params: of the model.
      variables: collections that it is applied to while it decodes.
      prompts: B of them.
      keys: [B, G] typed keys.
      settings: of all programs.
      table: of all completions.
      interrupt: called before prompts are read, before each burst, and while answers are waited for.
    """

    model: CachedModel
    params: Params
    variables: Variables
    prompts: Prompts
    keys: jax.Array
    settings: DecodeSettings
    table: Table
    interrupt: Callable[[], None]

    @classmethod
    def of(
        cls,
        model: CachedModel,
        params: Params,
        prompts: Prompts,
        keys: jax.Array,
        settings: DecodeSettings,
        length: int,
        interrupt: Callable[[], None],
    ) -> Call:
        """The call of completions of at most `length` tokens, of which none has been drawn."""
        given, table = as_argument(model), Table(keys.size, length, settings.pad_token_id)
        return cls(given, params, decode_variables(given, params), prompts, keys, settings, table, interrupt)

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """Of the params; None on one device."""
        return mesh_of(self.params)

    @functools.cached_property
    def ahead(self) -> int:
        """Bursts that are begun before the host looks at what came of the one before them."""
        return 0 if on_cpu(self.params, self.mesh) else 1

    def inputs(self, groups: np.ndarray) -> tuple[Prompts, jax.Array]:
        """Prompts and keys of groups [B']; those of the last one for the fillers after it."""
        at = np.minimum(groups, len(self.keys) - 1)
        return jax.tree.map(lambda x: x[at], (self.prompts, self.keys))

    def numbers(self, groups: np.ndarray) -> np.ndarray:
        """[B', G] numbers of the completions of groups [B'] in the table; −1 for the fillers after the last."""
        b, g = self.keys.shape
        return np.where(groups[:, None] < b, groups[:, None] * g + np.arange(g), -1)

    def ladder(self, groups: int) -> Ladder:
        """The layouts that so many groups at a time may pass through."""
        (b, g), p, t = self.keys.shape, self.prompts.tokens.shape[1], self.table.length
        return choose_ladder(self.model, self.params, p, groups, g, t, mesh=self.mesh, waits=groups < b)

    def waited(self, results: Result) -> Result:
        """Results of a stream's program; a CPU's threads wait for theirs."""
        return results if self.ahead else jax.block_until_ready(results)


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
    cpu = on_cpu(params, mesh)
    step = decode_step(model, params, prompt_length, whole_cache(length, fixed=not cpu), cpu=cpu)
    return Ladder.of(groups, width, length, step, shards=shard_count(mesh), waits=waits, fixed=not cpu)


class _Pending(NamedTuple):
    """Tokens that were asked for and that the host has not looked at yet."""

    completions: np.ndarray  # [B', G'] those that may get some, or −1
    drawn: Sequence[Drawn]  # of each stream


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
        ladder, numbers = call.ladder(groups), np.arange(groups)
        parts = np.split(numbers, stream_count(call.params, groups, call.keys.shape[1]))

        def read(part: np.ndarray) -> tuple[Stream, Drawn]:
            prompts, keys = split(call.inputs(part), call.mesh)
            return call.waited(
                prefill(
                    *(call.model, call.params, prompts, keys, 0),
                    settings=call.settings,
                    slots=ladder.slots[0],
                    mesh=call.mesh,
                )
            )

        call.interrupt()
        streams, drawn = zip(*run_in_streams(read, parts), strict=True)
        completions = call.numbers(numbers)
        layout = cls(call, ladder, 0, streams, completions, np.ones(groups, int), 0, ladder.slots[0], groups)
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
        call, some, entered = self.call, self._some, self.entered
        size = len(self.completions) // len(self.streams)
        completions, drawn = self.completions.copy(), self.drawn.copy()
        entering = []
        for i, empty in enumerate(np.split(self.empty, len(self.streams))):
            if empty.sum() >= some and entered < len(call.keys):
                groups, places = np.arange(entered, entered + some), np.flatnonzero(empty)[:some]
                completions[i * size + places] = call.numbers(groups)
                drawn[i * size + places], entered = 1, entered + some
                entering.append((i, groups, places))

        def enter(entry: tuple[int, np.ndarray, np.ndarray]) -> tuple[Stream, Drawn]:
            i, groups, places = entry
            prompts, keys = call.inputs(groups)
            stream, first = refill(
                *(call.model, call.params, self.streams[i].replace(cache=()), prompts, keys, places, self.slot),
                settings=call.settings,
            )
            return call.waited((stream.replace(cache=self.streams[i].cache), first))

        call.interrupt()
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
        mesh, parts = self.call.mesh, stream_count(self.call.params, *completions.shape)
        streams = move(self.streams, groups if mesh is None else None, order, slots=slots, parts=parts, mesh=mesh)
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

        def draw_some(own: Stream) -> tuple[Stream, Drawn]:
            (cache, token, ended), drawn = decode(
                *(call.model, call.variables, own.cache, own.replace(cache=()), self.slot, count),
                settings=call.settings,
                steps=ladder.steps,
                fixed=ladder.fixed,
                mesh=call.mesh,
            )
            return call.waited((own.replace(cache=cache, token=token, ended=ended), drawn))

        streams, drawn = zip(*run_in_streams(draw_some, self.streams), strict=True)
        after = self.drawn + count
        layout = dataclasses.replace(
            self,
            streams=streams,
            completions=np.where(after[:, None] < call.table.length, self.completions, -1),
            drawn=after,
            slot=self.slot + count,
        )
        return layout._note(_Pending(self.completions, drawn))

    def all_completions(self) -> Completions:
        """Those of the call, in NumPy's arrays, when all of them have ended."""
        return self._look().call.table.completions(len(self.call.keys))

    def _note(self, new: _Pending) -> Layout:
        """What is being drawn, to be looked at; on an accelerator after the next tokens have been asked for."""
        for x in jax.tree.leaves(new.drawn):
            if x.is_fully_addressable:
                x.copy_to_host_async()
        return dataclasses.replace(self, pending=(*self.pending, new))._look(self.call.ahead)

    def _look(self, ahead: int = 0) -> Layout:
        """What was drawn, looked at, but for the last `ahead` bursts."""
        table, waiting, completions = self.call.table, list(self.pending), self.completions
        while len(waiting) > ahead:
            old = waiting.pop(0)
            drawn = jax.tree.map(lambda *x: np.concatenate(x), *map(fetch, old.drawn))
            ended = table.draw(old.completions, drawn, self.call.settings.eos_token_ids)
            table.ended[old.completions[ended]] = True
            over = old.completions[ended | (table.lengths[old.completions] == table.length)]
            completions = np.where(np.isin(completions, over), -1, completions)
        return dataclasses.replace(self, completions=completions, pending=tuple(waiting))
