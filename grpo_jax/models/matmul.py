"""Matrix products whose gradients are also fast on CPUs, in forward and reverse mode and under `jax.vmap`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

Tangents = tuple[jax.Array | SymbolicZero, jax.Array | SymbolicZero]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def matmul(
    x: jax.Array, w: jax.Array, dtype: DTypeLike | None = None, float32_sums: bool = False, transposed: bool = False
) -> jax.Array:
    """Compute x w for x [N, I] and w [I, O], or x wᵀ for w [O, I] if `transposed`.

    The result is accumulated and returned in `dtype`, by default the dtype of x. Gradients are accumulated in the dtype
    of x. With `float32_sums`, all sums, including the sums in gradients, are computed in float32 and then rounded. If w
    has a wider dtype than x, w is rounded to the dtype of x, but its gradient is summed in float32 and not rounded.
    """
    w = w.astype(x.dtype)
    if float32_sums:
        return dot_float32(x, w, (1, int(transposed))).astype(dtype or x.dtype)
    return _contract(x, w, transposed, dtype)


def _contract(x: jax.Array, w: jax.Array, transposed: bool, dtype: DTypeLike | None = None) -> jax.Array:
    """Return x w or x wᵀ without an explicit transpose, which XLA would store as a copy inside loops."""
    return jax.lax.dot_general(x, w, (((1,), (int(transposed),)), ((), ())), preferred_element_type=dtype)


def tile_product(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Contract one axis of x with one axis of y in float32 at full precision. Also works inside Pallas kernels."""
    return dot_float32(x, y, contract, jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


def matmul_by_columns(
    x: jax.Array, columns: jax.Array, dtype: DTypeLike | None = None, float32_sums: bool = False
) -> jax.Array:
    """Compute x w as (wᵀ xᵀ)ᵀ for x [N, I] and columns = wᵀ [O, I], which is faster on CPUs for few rows."""
    barrier = jax.lax.optimization_barrier  # otherwise, XLA would merge the product with the transposes
    if float32_sums:
        return barrier(dot_float32(columns, x, (1, 1))).T.astype(dtype or x.dtype)
    return barrier(jnp.matmul(columns, barrier(x.T), preferred_element_type=dtype)).T


@jax.custom_jvp
def scale_columns(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply each column of x [N, I] by its entry in scale [I]."""
    return x * scale[None]


def _store_transpose(w: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Return an identity function for x [N, M]. On CPU, it changes x's layout to column-major if w [I, O] has I ≥ O."""
    # XLA's CPU backend computes xᵀ g, with a transposed left operand, at half the speed of an explicit (gᵀ x)ᵀ.
    return _stored_p.bind if w.shape[0] >= w.shape[1] else lambda x: x


def _stored(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x.swapaxes(-1, -2)).swapaxes(-1, -2)


# Use a primitive instead of `jax.lax.platform_dependent`, which would add a conditional that is traced, linearized and
# transposed twice for each product in a model.
_stored_p = Primitive("store_transpose")
_stored_p.def_impl(lambda x: x)
_stored_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_stored_p, lambda cotangent, _: [_stored_p.bind(cotangent)])
batching.defvectorized(_stored_p)
mlir.register_lowering(_stored_p, mlir.lower_fun(lambda x: x, multiple_results=False))
mlir.register_lowering(_stored_p, mlir.lower_fun(_stored, multiple_results=False), platform="cpu")


def _tangent(y: jax.Array, *terms: tuple[Callable[[jax.Array], jax.Array], jax.Array | SymbolicZero]) -> jax.Array:
    """Return the tangent of y: the sum of linear(tangent) over the pairs (linear, tangent) in `terms`."""
    parts = [linear(tangent) for linear, tangent in terms if not isinstance(tangent, SymbolicZero)]
    return sum(parts[1:], parts[0]).astype(y.dtype) if parts else jnp.zeros_like(y)


@functools.partial(matmul.defjvp, symbolic_zeros=True)
def _matmul_jvp(
    dtype: DTypeLike | None,
    float32_sums: bool,
    transposed: bool,
    primals: tuple[jax.Array, jax.Array],
    tangents: Tangents,
) -> tuple[jax.Array, jax.Array]:
    (x, w), (dx, dw) = primals, tangents
    wide, w, axes = w.dtype != x.dtype, w.astype(x.dtype), (1, int(transposed))
    if float32_sums:
        y = dot_float32(x, w, axes).astype(dtype or x.dtype)
        return y, _tangent(y, (lambda dx: dot_rounded(dx, w, axes), dx), (lambda dw: dot_rounded(x, dw, axes), dw))
    y = _contract(x, w, transposed, dtype)  # `jax.checkpoint` policies recognize this operation
    store = _store_transpose(w)

    def by_weights(dw: jax.Array) -> jax.Array:
        if wide:
            return dot_rounded(x, dw, axes, y.dtype)
        return store(x) @ store(dw).T if transposed else store(x @ store(dw))

    return y, _tangent(y, (lambda dx: _contract(dx, w, transposed), dx), (by_weights, dw))


@functools.partial(scale_columns.defjvp, symbolic_zeros=True)
def _scale_columns_jvp(primals: tuple[jax.Array, jax.Array], tangents: Tangents) -> tuple[jax.Array, jax.Array]:
    (x, scale), (dx, ds) = primals, tangents
    y = x * scale[None]
    return y, _tangent(y, (lambda dx: dx * scale[None], dx), (lambda ds: x * _repeat_p.bind(ds, rows=len(x)), ds))


def _sum_by_product(x: jax.Array) -> jax.Array:
    return jax.lax.dot_general(jnp.ones(x.shape[0], x.dtype), x, (((0,), (0,)), ((), ())))


# `_repeat_p` repeats a row, and `_sum_p` sums rows. They are transposes of each other. On CPUs, `_sum_p`
# is a product with ones, which is ten times faster. On GPUs, XLA would store the operands of all such products at once.
_repeat_p, _sum_p = Primitive("repeat_row"), Primitive("sum_rows")
_repeat_p.def_abstract_eval(lambda x, *, rows: ShapedArray((rows, *x.shape), x.dtype))
_sum_p.def_abstract_eval(lambda x: ShapedArray(x.shape[1:], x.dtype))
ad.deflinear2(_repeat_p, lambda cotangent, _, *, rows: [_sum_p.bind(cotangent)])
ad.deflinear2(_sum_p, lambda cotangent, x: [_repeat_p.bind(cotangent, rows=x.aval.shape[0])])
_repeat_p.def_impl(jax.jit(_repeat_p.bind, static_argnames="rows"))
_sum_p.def_impl(jax.jit(_sum_p.bind))
mlir.register_lowering(
    _repeat_p, mlir.lower_fun(lambda x, *, rows: jnp.broadcast_to(x, (rows, *x.shape)), multiple_results=False)
)
mlir.register_lowering(_sum_p, mlir.lower_fun(lambda x: x.sum(axis=0), multiple_results=False))
mlir.register_lowering(_sum_p, mlir.lower_fun(_sum_by_product, multiple_results=False), platform="cpu")
batching.primitive_batchers[_repeat_p] = lambda xs, axes, *, rows: (_repeat_p.bind(*xs, rows=rows), axes[0] + 1)
batching.primitive_batchers[_sum_p] = lambda xs, axes: (jnp.moveaxis(xs[0], axes[0], 0).sum(axis=1), 0)


Axes = tuple[int, int]


def dot_float32(x: jax.Array, y: jax.Array, contract: Axes, precision: jax.lax.Precision | None = None) -> jax.Array:
    """Contract one axis of matrix x with one axis of matrix y in float32.

    XLA's CPU backend uses matrix units (Intel AMX) for bfloat16 matrices if the result is float32, neither operand is
    transposed, and the left operand is contracted over its last axis. Otherwise, it converts both operands to float32.
    """
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def dot_rounded(x: jax.Array, y: jax.Array, contract: Axes, dtype: DTypeLike | None = None) -> jax.Array:
    """Contract one axis of matrix x with one axis of matrix y in float32. The result has `dtype` (default: x.dtype).

    `contract` = (1, 0) computes x y, (1, 1) computes x yᵀ, and (0, 0) computes xᵀ y. Both operands are rounded to the
    narrower of their dtypes, also in the backward pass, which would use float32 if `dot_float32` and a conversion were
    differentiated instead. The cotangents of x and y have the dtypes of x and y.
    """
    return _dot_p.bind(x, y, contract=contract, dtype=jnp.dtype(dtype or x.dtype))


def _dot(x: jax.Array, y: jax.Array, *, contract: Axes, dtype: jnp.dtype, on_cpu: bool = False) -> jax.Array:
    x, y = _rounded(x, y)
    if contract == (0, 0) and on_cpu:
        # The reshape and the barrier keep XLA from undoing the transpose.
        x, contract = jax.lax.optimization_barrier(x.T.reshape(-1)).reshape(x.shape[::-1]), (1, 0)
    return dot_float32(x, y, contract).astype(dtype)


def _rounded(*operands: jax.Array) -> list[jax.Array]:
    """Round operands to the narrowest of their dtypes."""
    dtype = min((x.dtype for x in operands), key=lambda dtype: dtype.itemsize)
    return [x.astype(dtype) for x in operands]


def _batched_dot(
    operands: Sequence[jax.Array], axes: Sequence[int | None], *, contract: Axes, dtype: jnp.dtype
) -> tuple[jax.Array, int]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    x, y = _rounded(*(batching.bdim_at_front(x, axis, size) for x, axis in zip(operands, axes, strict=True)))
    summed = (((contract[0] + 1,), (contract[1] + 1,)), ((0,), (0,)))
    return jax.lax.dot_general(x, y, summed, preferred_element_type=jnp.float32).astype(dtype), 0


def _transpose_left(
    g: jax.Array, x: ad.UndefinedPrimal, y: jax.Array, *, contract: Axes, dtype: jnp.dtype
) -> jax.Array:
    del dtype
    first, second, axes = {(1, 0): (g, y, (1, 1)), (1, 1): (g, y, (1, 0)), (0, 0): (y, g, (1, 1))}[contract]
    return dot_rounded(first, second, axes, x.aval.dtype)


def _transpose_right(
    g: jax.Array, x: jax.Array, y: ad.UndefinedPrimal, *, contract: Axes, dtype: jnp.dtype
) -> jax.Array:
    del dtype
    first, second, axes = {(1, 0): (x, g, (0, 0)), (1, 1): (g, x, (0, 0)), (0, 0): (x, g, (1, 0))}[contract]
    return dot_rounded(first, second, axes, y.aval.dtype)


def _dot_shape(x: ShapedArray, y: ShapedArray, *, contract: Axes, dtype: jnp.dtype) -> ShapedArray:
    return x.update(shape=(x.shape[1 - contract[0]], y.shape[1 - contract[1]]), dtype=dtype, weak_type=False)


_dot_p = Primitive("dot_float32")
_dot_p.def_impl(jax.jit(_dot, static_argnames=("contract", "dtype")))
_dot_p.def_abstract_eval(_dot_shape)
ad.defbilinear(_dot_p, _transpose_left, _transpose_right)
batching.primitive_batchers[_dot_p] = _batched_dot
mlir.register_lowering(_dot_p, mlir.lower_fun(_dot, multiple_results=False))
mlir.register_lowering(
    _dot_p, mlir.lower_fun(functools.partial(_dot, on_cpu=True), multiple_results=False), platform="cpu"
)
