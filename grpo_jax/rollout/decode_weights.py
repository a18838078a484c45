"""Conversion of params to the weights that `decode` reads.

On a CPU, multiplying 8 to 32 rows by column-major kernels takes only 60% to 80% as long as with row-major kernels, so
`convert_weights` adds column-major copies. On an accelerator, it casts float32 kernels to the compute dtype once.
Casting them at each step would give the same values, but write and read an additional 2 bytes per weight.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.models.layers import Quantized
from grpo_jax.models.sharding import abstract
from grpo_jax.models.threads import devices_of
from grpo_jax.models.transformer import Transformer, kernels_by_columns, projections
from grpo_jax.rollout.draw import Variables
from grpo_jax.types import BuiltinModel, Params

Tree = TypeVar("Tree")

MATRICES = ("kernel", "embedding", "gate_proj", "up_proj", "down_proj")
"""Names of the weights that a decoder casts to its dtype. The last three are expert weights."""

_jit_kernels_by_columns = jax.jit(kernels_by_columns, static_argnums=1)
_jit_cast = jax.jit(lambda arrays, dtype: {path: x.astype(dtype) for path, x in arrays.items()}, static_argnums=1)


def convert_weights(model: BuiltinModel, params: Params) -> Variables:
    """Convert params to variables for `decode`.

    On a single CPU, column-major kernels are added. Otherwise, float32 matrices are cast to the compute dtype.
    """
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
