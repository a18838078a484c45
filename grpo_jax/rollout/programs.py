"""The largest program of a rollout for the shapes of its arguments: the dry run and the plan compile it."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.models.sharding import abstract, constrained_sharding, mesh_of, place_of, shard_count, split_sharding
from grpo_jax.rollout.decode import Stream, decode, place_stream, prefill
from grpo_jax.rollout.draw import DecodeSettings, completion_keys
from grpo_jax.rollout.layout import choose_ladder, places
from grpo_jax.rollout.variables import variables_shape
from grpo_jax.types import Model, Params, Prompts, as_argument, is_cached

Tree = TypeVar("Tree")


def decode_call(
    model: Model,
    params: Params,
    groups: int,
    prompt_length: int,
    *,
    num_generations: int,
    max_completion_length: int,
    batch_size: int | None = None,
    settings: DecodeSettings,
) -> functools.partial[Any] | None:
    """The decode of all completions that are on the devices at a time, in one stream with a whole cache.

    A call of shapes, by the arguments of `generate`; None for a model without a cache.
    """
    if not is_cached(model):
        return None
    argument, shapes = abstract((as_argument(model), params))
    variables, mesh = variables_shape(model, params), mesh_of(params)
    if "columns" in variables:
        variables["columns"] = _placed(variables["columns"], (shapes, argument))
    at_once = places(groups, num_generations, batch_size, shard_count(mesh))
    # On a mesh the prompts that wait are a batch of their own.
    waits = at_once < groups and mesh is None
    sizes = (prompt_length, at_once, num_generations, max_completion_length)
    ladder = choose_ladder(argument, shapes, *sizes, mesh=mesh, waits=waits)
    read = functools.partial(prefill, settings=settings, slots=ladder.slots[-1], mesh=mesh)
    stream: Stream = jax.eval_shape(read, argument, shapes, *_inputs(at_once, num_generations, prompt_length, mesh), 0)[
        0
    ]
    stream = _placed(stream, (shapes, argument)) if mesh is None else place_stream(stream, mesh, _at)
    return functools.partial(
        decode,
        *(argument, variables, stream.cache, stream.replace(cache=()), 0, 0),
        settings=settings,
        steps=ladder.steps,
        fixed=ladder.fixed,
        mesh=mesh,
    )


def _inputs(groups: int, width: int, prompt_length: int, mesh: Mesh | None) -> tuple[Prompts, jax.Array]:
    """Prompts and keys of [groups, width] completions."""

    def make() -> tuple[Prompts, jax.Array]:
        numbers, tokens = jnp.arange(groups), jnp.zeros((groups, prompt_length), jnp.int32)
        return Prompts(tokens, numbers), completion_keys(jax.random.key(0), numbers, width)

    made = jax.eval_shape(make)
    if mesh is None:
        return made
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), made, split_sharding(made, mesh)
    )


def _placed(tree: Tree, source: object) -> Tree:
    """Shapes of arrays that are computed on one device from arrays of other shapes."""
    at = place_of(source)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree)


def _at(x: jax.ShapeDtypeStruct, mesh: Mesh, *axes: str) -> jax.ShapeDtypeStruct:
    """A shape with the sharding that `constrain` gives an array of it."""
    at = constrained_sharding(x.shape, mesh, *axes)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # of typed keys, all dimensions are named
        at = NamedSharding(mesh, PartitionSpec(*at.spec, *[None] * (len(x.shape) - len(at.spec))))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
