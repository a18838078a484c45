"""Products of 16-bit matrices whose sums XLA gives in 32 bits: processors with matrix units are fast at these.

XLA's backend for CPUs hands a product of bfloat16 matrices to such units (Intel's AMX) if three things hold: its result
is float32, its operands are no transposes, and the left one is summed over its last axis. Else it writes both operands
out in float32 and multiplies those.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Axes = tuple[int, int]


def wide_sums(x: jax.Array, y: jax.Array, contract: Axes, precision: jax.lax.Precision | None = None) -> jax.Array:
    """Σ over one axis of each of two matrices, in float32; `precision` as in `jax.lax.dot_general`."""
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def wide_product(x: jax.Array, y: jax.Array, contract: Axes) -> jax.Array:
    """Σ over one axis of each of two matrices of one dtype, made in float32 and rounded to that dtype.

    So are its derivatives: a cotangent, which is in that dtype too, is multiplied as it is. Of `wide_sums` and a
    conversion JAX would convert the cotangent first, and multiply it in float32.
    The axes `contract`: (1, 0) is x y, (1, 1) is x yᵀ, (0, 0) is xᵀ y.
    """
    return _product_p.bind(x, y, contract=contract)


def _product(x: jax.Array, y: jax.Array, *, contract: Axes) -> jax.Array:
    dtype = x.dtype
    if contract == (0, 0):
        # By way of a vector and a barrier: XLA looks through a transpose alone.
        x, contract = jax.lax.optimization_barrier(x.T.reshape(-1)).reshape(x.shape[::-1]), (1, 0)
    return wide_sums(x, y, contract).astype(dtype)


def _mapped(operands: Sequence[jax.Array], axes: Sequence[int | None], *, contract: Axes) -> tuple[jax.Array, int]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    x, y = (batching.bdim_at_front(x, axis, size) for x, axis in zip(operands, axes, strict=True))
    summed = (((contract[0] + 1,), (contract[1] + 1,)), ((0,), (0,)))
    return jax.lax.dot_general(x, y, summed, preferred_element_type=jnp.float32).astype(x.dtype), 0


def _to_left(g: jax.Array, _: object, y: jax.Array, *, contract: Axes) -> jax.Array:
    return {
        (1, 0): lambda: wide_product(g, y, (1, 1)),
        (1, 1): lambda: wide_product(g, y, (1, 0)),
        (0, 0): lambda: wide_product(y, g, (1, 1)),
    }[contract]()


def _to_right(g: jax.Array, x: jax.Array, _: object, *, contract: Axes) -> jax.Array:
    return {
        (1, 0): lambda: wide_product(x, g, (0, 0)),
        (1, 1): lambda: wide_product(g, x, (0, 0)),
        (0, 0): lambda: wide_product(x, g, (1, 0)),
    }[contract]()


_product_p = Primitive("wide_product")
_product_p.def_impl(jax.jit(_product, static_argnames="contract"))
_product_p.def_abstract_eval(
    lambda x, y, *, contract: x.update(shape=(x.shape[1 - contract[0]], y.shape[1 - contract[1]]), weak_type=False)
)
ad.defbilinear(_product_p, _to_left, _to_right)
batching.primitive_batchers[_product_p] = _mapped
mlir.register_lowering(_product_p, mlir.lower_fun(_product, multiple_results=False))
