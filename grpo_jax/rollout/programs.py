"""The programs of a rollout by the shapes of their arguments: prefill, decode, and what moves streams between them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.devices.program import Program
from grpo_jax.devices.sharding import abstract, constrained_sharding, mesh_of, place_of, shard_count, split_sharding
from grpo_jax.rollout.decode import Stream, decode, grow, move, place_stream, prefill, refill
from grpo_jax.rollout.draw import DecodeSettings, Variables, completion_keys
from grpo_jax.rollout.ladder import Ladder
from grpo_jax.rollout.layout import choose_ladder, places, stream_count
from grpo_jax.rollout.variables import copies, variables_shape
from grpo_jax.types import CachedModel, Model, Params, Prompts, as_argument, is_cached

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class RolloutShapes:
    """The arguments of a rollout's programs by their shapes, each with its place.

    Attributes:
      model: as an argument of a compiled function.
      params: of the model.
      variables: that it is applied to while it decodes.
      prompt_length: P.
      settings: of all programs.
      ladder: the layouts that there may be, each of (groups, width) completions.
      parts: streams that each layout is cut into.
      waits: whether further prompts wait for a place.
      mesh: of the params; None on one device.
    """

    model: CachedModel
    params: Params
    variables: Variables
    prompt_length: int
    settings: DecodeSettings
    ladder: Ladder
    parts: tuple[int, ...]
    waits: bool
    mesh: Mesh | None

    @classmethod
    def of(
        cls,
        model: Model,
        params: Params,
        groups: int,
        prompt_length: int,
        *,
        num_generations: int,
        max_completion_length: int,
        batch_size: int | None = None,
        settings: DecodeSettings,
    ) -> RolloutShapes | None:
        """Those of `generate` for a batch; None for a model without a cache, which has none of these programs.

        Args:
          model, params: as they are, or their shapes.
        """
        if not is_cached(model):
            return None
        argument, shapes = abstract((as_argument(model), params))
        variables, mesh = variables_shape(model, params), mesh_of(params)
        if "columns" in variables:
            variables["columns"] = _placed(variables["columns"], (shapes, argument))
        at_once = places(groups, num_generations, batch_size, shard_count(mesh))
        # On a mesh those that wait come as a batch of their own, and the last of these may be smaller.
        waits = at_once < groups and mesh is None
        sizes = (prompt_length, at_once, num_generations, max_completion_length)
        ladder = choose_ladder(argument, shapes, *sizes, mesh=mesh, waits=waits)
        parts = tuple(stream_count(params, *shape) for shape in ladder.shapes)
        return cls(argument, shapes, variables, prompt_length, settings, ladder, parts, waits, mesh)

    def programs(self) -> Iterator[Program]:
        """All that the rollout may need, named by what they do and for which layout."""
        first = self.ladder.slots[0]
        yield self.prefill(first)
        if self.waits:
            yield self.refill(first)
        for at, shape in enumerate(self.ladder.shapes):
            for slots in self.ladder.slots_of(at):
                yield self.decode(at, slots)
                larger = next((n for n in self.ladder.slots_of(at) if n > slots), None)
                if larger is not None:
                    stream, name = self.stream(shape, self.parts[at], slots), _name("grow", shape, larger)
                    yield Program.of(name, grow, stream, slots=larger, mesh=self.mesh)
                below = self.ladder.slots_below(at, slots)
                if below is not None:
                    yield self.move(at, slots, below)

    def copied(self) -> tuple[Params, Params]:
        """Shapes of the params that a decode does not look at, and of what it is given in their place."""
        return copies(self.model, self.params)

    def largest(self) -> Program:
        """The decode of all completions that stand on the devices at a time, in one stream, with a whole cache."""
        return dataclasses.replace(self, parts=(1,)).decode(0, self.ladder.slots[-1])

    def inputs(self, groups: int, width: int) -> tuple[Prompts, jax.Array]:
        """Prompts and keys of [groups, width] completions."""

        def make() -> tuple[Prompts, jax.Array]:
            numbers = jnp.arange(groups)
            tokens = jnp.zeros((groups, self.prompt_length), jnp.int32)
            return Prompts(tokens, numbers), completion_keys(jax.random.key(0), numbers, width)

        made = jax.eval_shape(make)
        if self.mesh is None:
            return made
        return jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), made, split_sharding(made, self.mesh)
        )

    def stream(self, shape: tuple[int, int], parts: int, slots: int) -> Stream:
        """One of the streams of a layout, where `place_stream` puts it."""
        inputs = self.inputs(shape[0] // parts, shape[1])
        read = functools.partial(prefill, settings=self.settings, slots=slots, mesh=self.mesh)
        made, _ = jax.eval_shape(read, self.model, self.params, *inputs, 0)
        return _placed(made, (self.params, self.model)) if self.mesh is None else place_stream(made, self.mesh, _at)

    def prefill(self, slots: int) -> Program:
        """Reads the prompts of a stream."""
        (groups, width), parts = self.ladder.shapes[0], self.parts[0]
        return Program.of(
            *(_name("prefill", (groups, width), slots), prefill),
            *(self.model, self.params, *self.inputs(groups // parts, width), 0),
            settings=self.settings,
            slots=slots,
            turns=False,  # said, as by `Rollout.prefill`: a call with fewer arguments would be compiled once more
            mesh=self.mesh,
        )

    def refill(self, slots: int) -> Program:
        """Reads prompts that enter a stream."""
        shape, parts = self.ladder.shapes[0], self.parts[0]
        some = max(1, shape[0] // parts // 4)
        stream, at = self.stream(shape, parts, slots), jax.ShapeDtypeStruct((some,), jnp.int32)
        return Program.of(
            *(_name("refill", shape, slots), refill),
            *(self.model, self.params, stream.replace(cache=()), *self.inputs(some, shape[1]), at, 0),
            settings=self.settings,
        )

    def decode(self, at: int, slots: int) -> Program:
        """A burst of a stream of the `at`-th layout."""
        shape = self.ladder.shapes[at]
        stream = self.stream(shape, self.parts[at], slots)
        return Program.of(
            *(_name("decode", shape, slots), decode),
            *(self.model, self.variables, stream.cache, stream.replace(cache=()), 0, 0),
            settings=self.settings,
            steps=self.ladder.steps,
            fixed=self.ladder.fixed,
            mesh=self.mesh,
        )

    def move(self, at: int, slots: int, below: int) -> Program:
        """The move from the `at`-th layout to the next, which has `below` slots."""
        (shape, smaller), (parts, fewer) = self.ladder.shapes[at : at + 2], self.parts[at : at + 2]
        groups = jax.ShapeDtypeStruct(smaller[:1], jnp.int32) if self.mesh is None else None
        # `start` is there as in `Rollout.move`, for the same reason as `turns` in `prefill`.
        return Program.of(
            *(f"{_name('move', shape, slots)} → {_name('to', smaller, below)[3:]}", move),
            *((self.stream(shape, parts, slots),) * parts, groups, jax.ShapeDtypeStruct(smaller, jnp.int32), None),
            slots=below,
            parts=fewer,
            mesh=self.mesh,
        )


def _name(action: str, shape: tuple[int, int], slots: int) -> str:
    return f"{action} {shape[0]}×{shape[1]}, {slots} slots"


def _placed(tree: Tree, source: object) -> Tree:
    """Shapes of what a program computes on one device from shapes that are there."""
    at = place_of(source)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree)


def _at(x: jax.ShapeDtypeStruct, mesh: Mesh, *axes: str) -> jax.ShapeDtypeStruct:
    """A shape where `constrain` puts an array of it."""
    at = constrained_sharding(x.shape, mesh, *axes)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # of typed keys, all dimensions are named
        at = NamedSharding(mesh, PartitionSpec(*at.spec, *[None] * (len(x.shape) - len(at.spec))))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
