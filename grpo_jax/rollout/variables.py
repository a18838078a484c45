"""The params as they suit a decode step: in the compute dtype, and on a CPU once more, by columns.

A CPU multiplies 8 to 32 rows by kernels that stand by columns in three to four fifths of the time. An accelerator that
is given kernels in float32 rounds them at each step: for 4 bytes that it reads of each weight it writes 2 and reads 2
again, where 2 would do. So they are rounded once, before the first step, to the values that each step would make.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.models.quantized import Quantized
from grpo_jax.models.sharding import abstract
from grpo_jax.models.streams import devices_of
from grpo_jax.models.transformer import Transformer, kernels_by_columns, projections
from grpo_jax.rollout.draw import Variables
from grpo_jax.types import CachedModel, Params

MATRICES = ("kernel", "embedding", "gate_proj", "up_proj", "down_proj")
"""Names of the arrays that a decoder multiplies by in its dtype; the last three are those of experts."""

_jit_kernels_by_columns = jax.jit(kernels_by_columns, static_argnums=1)
_jit_rounded = jax.jit(lambda arrays, dtype: {at: x.astype(dtype) for at, x in arrays.items()}, static_argnums=1)


def decode_variables(model: CachedModel, params: Params) -> Variables:
    """Return the params for `decode` to apply the model to, with kernels by columns or in the compute dtype."""
    if _by_columns(params):
        return {"params": params, "columns": _jit_kernels_by_columns(getattr(model, "base", params), _dtype(model))}
    wide = _wide_kernels(model, params)
    return {"params": _with(params, _jit_rounded(wide, _dtype(model))) if wide else params}


def variables_shape(model: CachedModel, params: Params) -> Variables:
    """The shapes of `decode_variables`, of a model and params that are there."""
    if _by_columns(params):
        columns = functools.partial(kernels_by_columns, dtype=_dtype(model))
        return {
            "params": jax.eval_shape(lambda x: x, params),
            "columns": jax.eval_shape(columns, getattr(model, "base", params)),
        }
    shapes = abstract(params)
    wide = _wide_kernels(model, shapes)
    rounded = {at: jax.ShapeDtypeStruct(x.shape, _dtype(model), sharding=x.sharding) for at, x in wide.items()}
    return {"params": _with(shapes, rounded) if rounded else shapes}


def copies(model: CachedModel, params: Params) -> tuple[Params, Params]:
    """The shapes of the params that `decode` does not look at, and of what it is given in their place."""
    variables = variables_shape(model, params)
    if "columns" in variables:
        base = abstract(getattr(model, "base", params))
        return {at: x for at, x in projections(base) if not isinstance(x, Quantized)}, variables["columns"]
    wide, rounded = _wide_kernels(model, abstract(params)), flatten_dict(variables["params"])
    return wide, {at: rounded[at] for at in wide}


def _by_columns(params: Params) -> bool:
    devices = devices_of(params)
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


def _dtype(model: CachedModel) -> jnp.dtype:
    return jnp.dtype(model.config.dtype)


def _wide_kernels(model: CachedModel, params: Params) -> dict[tuple[str, ...], jax.Array]:
    """The matrices, by their paths, that a decoder rounds to its dtype at each product, the embedding among them."""
    if not isinstance(getattr(model, "model", model), Transformer) or not isinstance(params, dict):
        return {}  # of a model of the user's own nobody knows; adapters are small
    return {
        at: x
        for at, x in flatten_dict(params).items()
        if at[-1] in MATRICES and getattr(x, "dtype", None) == jnp.float32 and _dtype(model) != x.dtype
    }


def _with(params: Params, some: Mapping[tuple[str, ...], object]) -> Params:
    return unflatten_dict(flatten_dict(params) | some)
