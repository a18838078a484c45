"""Conversion of params for decoding, and a rollout's largest compiled function with abstract arguments.

On a CPU, multiplying 8 to 32 rows by column-major kernels takes only 60% to 80% as long as with row-major kernels, so
`convert_weights` adds column-major copies. An accelerator would cast float32 kernels to the compute dtype at each
step and write and read an additional 2 bytes per weight. The kernels are therefore cast once; the values are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.models.layers import Quantized
from grpo_jax.models.sharding import abstract, constrained_sharding, mesh_of, shape_structs, shard_count
from grpo_jax.models.threads import devices_of
from grpo_jax.models.transformer import Transformer, kernels_by_columns, projections
from grpo_jax.rollout.decode import DecodeState, decode, place_state, prefill
from grpo_jax.rollout.decode_plan import groups_at_once, plan_decode
from grpo_jax.rollout.draw import DecodeSettings, Variables, completion_keys
from grpo_jax.types import BuiltinModel, Model, Params, Prompts, as_jit_argument, is_builtin

Tree = TypeVar("Tree")

MATRICES = ("kernel", "embedding", "gate_proj", "up_proj", "down_proj")
"""Names of the weights that a decoder casts to its dtype. The last three are expert weights."""

_jit_kernels_by_columns = jax.jit(kernels_by_columns, static_argnums=1)
_jit_cast = jax.jit(lambda arrays, dtype: {path: x.astype(dtype) for path, x in arrays.items()}, static_argnums=1)


def convert_weights(model: BuiltinModel, params: Params) -> Variables:
    """Convert params to variables for `decode`.

    On a single CPU, column-major kernels are added. Otherwise, float32 matrices are cast to the compute dtype."""
    params = _without_tower(params)
    if _uses_columns(params):
        return {"params": params, "columns": _jit_kernels_by_columns(getattr(model, "base", params), _dtype(model))}
    wide = _wide_kernels(model, params)
    return {"params": _with_leaves(params, _jit_cast(wide, _dtype(model))) if wide else params}


def variables_shape(model: BuiltinModel, params: Params) -> Variables:
    """Return the result of `convert_weights` as `ShapeDtypeStruct`s."""
    params = _without_tower(params)
    if _uses_columns(params):
        columns, base = functools.partial(kernels_by_columns, dtype=_dtype(model)), getattr(model, "base", params)
        return {"params": jax.eval_shape(lambda x: x, params), "columns": jax.eval_shape(columns, base)}
    shapes = abstract(params)
    wide = _wide_kernels(model, shapes)
    cast = {path: jax.ShapeDtypeStruct(x.shape, _dtype(model), sharding=x.sharding) for path, x in wide.items()}
    return {"params": _with_leaves(shapes, cast) if cast else shapes}


def copies(model: BuiltinModel, params: Params) -> tuple[Params, Params]:
    """Return the params that `convert_weights` copies for decoding, and their copies, as abstract arrays."""
    variables = variables_shape(model, params)
    if "columns" in variables:
        base = abstract(getattr(model, "base", params))
        return {path: x for path, x in projections(base) if not isinstance(x, Quantized)}, variables["columns"]
    wide, cast = _wide_kernels(model, abstract(_without_tower(params))), flatten_dict(variables["params"])
    return wide, {path: cast[path] for path in wide}


def _without_tower(params: Params) -> Params:
    """Remove a trainable vision tower, which only prefill needs."""
    if not isinstance(params, dict) or "tower" not in params:
        return params
    return {name: x for name, x in params.items() if name != "tower"}


def _uses_columns(params: Params) -> bool:
    """Return whether decoding uses column-major kernels, that is, whether `params` are on a single CPU."""
    devices = devices_of(params)
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


def _dtype(model: BuiltinModel) -> jnp.dtype:
    return jnp.dtype(model.config.dtype)


def _wide_kernels(model: BuiltinModel, params: Params) -> dict[tuple[str, ...], jax.Array]:
    """Return the float32 matrices and embedding that a decoder casts to a narrower dtype, keyed by path."""
    if not isinstance(getattr(model, "model", model), Transformer) or not isinstance(params, dict):
        return {}  # custom models may need float32, and adapters are small
    return {
        path: x
        for path, x in flatten_dict(params).items()
        if path[-1] in MATRICES and getattr(x, "dtype", None) == jnp.float32 and _dtype(model) != x.dtype
    }


def _with_leaves(params: Params, leaves: Mapping[tuple[str, ...], object]) -> Params:
    return unflatten_dict(flatten_dict(params) | leaves)


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
    """Return `decode` with abstract arguments, for the largest number of completions and the largest cache.

    `generate` documents the arguments. Returns None for a model without a cache.
    """
    if not is_builtin(model):
        return None
    argument, shapes = abstract((as_jit_argument(model), params))
    variables, mesh = variables_shape(model, params), mesh_of(params)
    if "columns" in variables:
        variables["columns"] = shape_structs(variables["columns"], placed_like=(shapes, argument))
    at_once = groups_at_once(groups, num_generations, batch_size, shard_count(mesh))
    plan = plan_decode(argument, shapes, prompt_length, at_once, num_generations, max_completion_length, mesh=mesh)
    settings = settings._replace(mesh=mesh)

    def prefilled(model: BuiltinModel, params: Params) -> DecodeState:
        indices, tokens = jnp.arange(at_once), jnp.zeros((at_once, prompt_length), jnp.int32)
        prompts, keys = Prompts(tokens, indices), completion_keys(jax.random.key(0), indices, num_generations)
        return prefill(model, params, prompts, keys, settings=settings, slots=plan.cache_sizes[-1])[0]

    state: DecodeState = jax.eval_shape(prefilled, argument, shapes)
    if mesh is None:
        state = shape_structs(state, placed_like=(shapes, argument))
    else:
        state = place_state(state, mesh, _constrained_shape)
    burst = functools.partial(decode, settings=settings, steps=plan.burst_steps, all_steps=plan.all_steps)
    return functools.partial(burst, argument, variables, state, 0, 0)


def _constrained_shape(x: jax.ShapeDtypeStruct, mesh: Mesh, *axes: str) -> jax.ShapeDtypeStruct:
    """Return a `ShapeDtypeStruct` with the sharding that `constrain` would apply."""
    sharding = constrained_sharding(x.shape, mesh, *axes)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # the spec of typed keys must list all dimensions
        spec = [*sharding.spec, *[None] * (len(x.shape) - len(sharding.spec))]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
