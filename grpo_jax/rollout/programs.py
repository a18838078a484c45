"""All programs of a rollout, so that none has to be compiled while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.devices.sharding import abstract, mesh_of, place_of, shard_count, split_sharding
from grpo_jax.rollout.decode import (
    abstract_stream,
    completion_keys,
    decode,
    gather,
    grow,
    narrow,
    prefill,
    refill,
    variables_shape,
)
from grpo_jax.rollout.layout import choose_ladder, places, stream_count
from grpo_jax.types import Model, Params, Prompts, as_argument, is_cached


def rollout_programs(
    model: Model,
    params: Params,
    groups: int,
    prompt_length: int,
    *,
    num_generations: int,
    max_completion_length: int,
    batch_size: int | None = None,
    **settings: Any,
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The programs that `generate` may need for a batch, by what they do and for which layout; each to be lowered.

    Args:
      model: a model of this package; any other has none of these.
      params: its parameters, or their shapes.
      groups: B, prompts of the batch.
      prompt_length: P.
      num_generations, max_completion_length, batch_size: as in `generate`.
      settings: further settings of `generate`: eos_token_ids, pad_token_id, sampling.

    Yields:
      A name such as "decode 8×8, 64 slots", and a function that returns the program, lowered.
    """
    if not is_cached(model):
        return
    mesh, shapes = mesh_of(params), abstract(params)
    given = _Given(abstract(as_argument(model)), shapes, prompt_length, mesh, settings)
    shards, g = shard_count(mesh), num_generations
    at_once = places(groups, g, batch_size, shards)
    # On a mesh those that wait come as a batch of their own, and the last of these may be smaller.
    waits = at_once < groups and mesh is None
    of_each: dict[str, Any] = {"mesh": mesh, "waits": waits}
    ladder = choose_ladder(given.model, shapes, prompt_length, at_once, g, max_completion_length, **of_each)
    columns = variables_shape(model, params).get("columns")
    variables = {"params": shapes} | ({} if columns is None else {"columns": jax.tree.map(given.committed, columns)})
    how = {"steps": ladder.steps, "fixed": ladder.fixed, "mesh": mesh, **settings}
    name = lambda what, shape, slots: f"{what} {shape[0]}×{shape[1]}, {slots} slots"
    parts = [stream_count(params, *shape) for shape in ladder.shapes]
    first = given.stream(ladder.shapes[0], parts[0], ladder.slots[0])
    yield name("prefill", ladder.shapes[0], ladder.slots[0]), given.prefill(ladder.shapes[0], parts[0], ladder.slots[0])
    if waits:
        yield name("refill", ladder.shapes[0], ladder.slots[0]), given.refill(first)
    for at, shape in enumerate(ladder.shapes):
        for slots in ladder.slots_of(at):
            stream = given.stream(shape, parts[at], slots)
            part = (stream.cache, stream.replace(cache=()), 0, 0)
            yield name("decode", shape, slots), functools.partial(decode.lower, given.model, variables, *part, **how)
            larger = next((n for n in ladder.slots_of(at) if n > slots), None)
            if larger is not None:
                yield name("grow", shape, larger), functools.partial(grow.lower, stream, slots=larger, mesh=mesh)
            below = ladder.slots_below(at, slots)
            if below is None:
                continue
            there = ladder.shapes[at + 1]
            order = jax.ShapeDtypeStruct(there, jnp.int32)
            if mesh is None:
                streams, chosen = (stream,) * parts[at], jax.ShapeDtypeStruct(there[:1], jnp.int32)
                move = functools.partial(gather.lower, streams, chosen, order, slots=below, parts=parts[at + 1])
            else:
                move = functools.partial(narrow.lower, stream, order, slots=below, mesh=mesh)
            yield f"{name('move', shape, slots)} → {name('to', there, below)[3:]}", move


class _Given:
    """Shapes of what the programs are called with."""

    def __init__(self, model: Any, params: Params, prompt_length: int, mesh: Any, settings: Mapping[str, Any]):
        self.model, self.params, self.length, self.mesh, self.settings = model, params, prompt_length, mesh, settings
        self.device = place_of((params, model)) if mesh is None else None

    def committed(self, x: Any) -> jax.ShapeDtypeStruct:
        """A result of a program that was given the params."""
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.device)

    def prompts(self, shape: tuple[int, int]) -> tuple[Prompts, Any]:
        """Prompts and keys of [groups, width] completions."""
        numbers: Any = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((shape[0], self.length), shape[:1])]
        shapes = Prompts(*numbers)
        keys = jax.eval_shape(lambda: completion_keys(jax.random.key(0), jnp.arange(shape[0]), shape[1]))
        if self.mesh is None:
            return shapes, keys
        place = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
        return jax.tree.map(place, (shapes, keys), split_sharding((shapes, keys), self.mesh))

    def prefill(self, shape: tuple[int, int], parts: int, slots: int) -> Any:
        """The program that reads the prompts of a stream."""
        own = (shape[0] // parts, shape[1])
        how = {"slots": slots, "mesh": self.mesh, **self.settings}
        return functools.partial(prefill.lower, self.model, self.params, *self.prompts(own), 0, **how)

    def refill(self, stream: Any) -> Any:
        """The program by which prompts enter a stream."""
        b, g = stream.token.shape
        some = max(1, b // 4)
        places = jax.ShapeDtypeStruct((some,), jnp.int32)
        part = (stream.replace(cache=()), *self.prompts((some, g)), places, 0)
        return functools.partial(refill.lower, self.model, self.params, *part, **self.settings)

    def stream(self, shape: tuple[int, int], parts: int, slots: int) -> Any:
        """One of the streams of a layout."""
        own = (shape[0] // parts, shape[1])
        how = {"slots": slots, "mesh": self.mesh, **self.settings}
        made, _ = jax.eval_shape(functools.partial(prefill, **how), self.model, self.params, *self.prompts(own), 0)
        return abstract_stream(made, self.mesh) if self.mesh is not None else jax.tree.map(self.committed, made)
