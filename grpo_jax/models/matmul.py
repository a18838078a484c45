"""Products whose gradients are fast on CPUs too.

Each is written as a value and its tangent, from which JAX makes the gradient by transposing: so they can be
differentiated forwards, backwards and both, and mapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def matmul(x: jax.Array, w: jax.Array, dtype: DTypeLike | None = None, wide: bool = False) -> jax.Array:
    """x w, for x [N, I] and w [I, O].

    The sums are returned in `dtype`, without being rounded to that of x and w before; None: in that of x and w.
    Gradients are made, and come back, in the dtype of x and w. With `wide` XLA gives all sums in float32, those of the
    gradients too, and they are rounded then: see `wide_sums`.
    """
    return wide_sums(x, w, (1, 0)).astype(dtype or x.dtype) if wide else jnp.matmul(x, w, preferred_element_type=dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def matmul_transposed(x: jax.Array, w: jax.Array, dtype: DTypeLike | None = None, wide: bool = False) -> jax.Array:
    """x wᵀ, for x [N, I] and w [O, I]; `dtype` and `wide` as in `matmul`."""
    if wide:
        return wide_sums(x, w, (1, 1)).astype(dtype or x.dtype)
    return jnp.matmul(x, w.T, preferred_element_type=dtype)


def tile_product(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Σ over one axis of each of two matrices, in float32: a tile's product, in a kernel or without one."""
    return wide_sums(x, y, contract, jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


def matmul_by_columns(x: jax.Array, turned: jax.Array, dtype: DTypeLike | None = None, wide: bool = False) -> jax.Array:
    """x w, for x [N, I] and turned = wᵀ [O, I], as (wᵀ xᵀ)ᵀ: for few rows, on one CPU; the rest as in `matmul`.

    XLA would make one product of this one and its transposes, x by the rows of wᵀ, which takes about as long as x w;
    the barriers keep them apart.
    """
    apart = jax.lax.optimization_barrier
    if wide:
        return apart(wide_sums(turned, x, (1, 1))).T.astype(dtype or x.dtype)
    return apart(jnp.matmul(turned, apart(x.T), preferred_element_type=dtype)).T


@jax.custom_jvp
def scale_columns(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x · scale, for x [N, I] and scale [I]."""
    return x * scale[None]


def _apart(w: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Return the identity on [N, M] that writes the transpose to memory on a CPU, where that pays: for wide inputs.

    It goes around both sides of the part of a tangent that is linear in the weights: XLA's CPU backend multiplies a
    transposed left side, xᵀ g, at half its speed, and (gᵀ x)ᵀ at full speed once both transposes are written out.
    """
    return _written_out_p.bind if w.shape[0] >= w.shape[1] else lambda x: x


def _through_memory(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x.swapaxes(-1, -2)).swapaxes(-1, -2)


# A primitive of its own, because it stands twice at every product of a model: `jax.lax.platform_dependent` would be a
# conditional each time, which is traced, linearized and transposed.
_written_out_p = Primitive("written_out")
_written_out_p.def_impl(lambda x: x)
_written_out_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_written_out_p, lambda cotangent, _: [_written_out_p.bind(cotangent)])
batching.defvectorized(_written_out_p)
mlir.register_lowering(_written_out_p, mlir.lower_fun(lambda x: x, multiple_results=False))
mlir.register_lowering(_written_out_p, mlir.lower_fun(_through_memory, multiple_results=False), platform="cpu")


def _tangent(y: jax.Array, *terms: tuple[Callable[[jax.Array], jax.Array], jax.Array | SymbolicZero]) -> jax.Array:
    """Return the sum of the terms (linear function, tangent), as the tangent of y."""
    parts = [linear(tangent) for linear, tangent in terms if not isinstance(tangent, SymbolicZero)]
    return sum(parts[1:], parts[0]).astype(y.dtype) if parts else jnp.zeros_like(y)


def _wide_jvp(x, w, dx, dw, contract: Axes, dtype: DTypeLike | None) -> tuple[jax.Array, jax.Array]:
    y = wide_sums(x, w, contract).astype(dtype or x.dtype)
    terms = (lambda dx: wide_product(dx, w, contract), dx), (lambda dw: wide_product(x, dw, contract), dw)
    return y, _tangent(y, *terms)


@functools.partial(matmul.defjvp, symbolic_zeros=True)
def _matmul_jvp(dtype, wide, primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    if wide:
        return _wide_jvp(x, w, dx, dw, (1, 0), dtype)
    y = jnp.matmul(x, w, preferred_element_type=dtype)  # itself, so that policies of `jax.checkpoint` see a product
    apart = _apart(w)
    return y, _tangent(y, (lambda dx: dx @ w, dx), (lambda dw: apart(x @ apart(dw)), dw))


@functools.partial(matmul_transposed.defjvp, symbolic_zeros=True)
def _matmul_transposed_jvp(dtype, wide, primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    if wide:
        return _wide_jvp(x, w, dx, dw, (1, 1), dtype)
    y = jnp.matmul(x, w.T, preferred_element_type=dtype)
    apart = _apart(w)
    return y, _tangent(y, (lambda dx: dx @ w.T, dx), (lambda dw: apart(x) @ apart(dw).T, dw))


@functools.partial(scale_columns.defjvp, symbolic_zeros=True)
def _scale_columns_jvp(primals, tangents):
    (x, scale), (dx, ds) = primals, tangents
    y = x * scale[None]

    def spread(ds: jax.Array) -> jax.Array:
        # Over the rows by a product with ones, so that its gradient is one too: a plain sum of columns takes a CPU
        # ten times as long.
        return jax.lax.dot_general(jnp.ones(x.shape[0], ds.dtype), ds, (((), ()), ((), ())))

    return y, _tangent(y, (lambda dx: dx * scale[None], dx), (lambda ds: x * spread(ds), ds))


Axes = tuple[int, int]


def wide_sums(x: jax.Array, y: jax.Array, contract: Axes, precision: jax.lax.Precision | None = None) -> jax.Array:
    """Σ over one axis of each of two matrices, in float32; `precision` as in `jax.lax.dot_general`.

    XLA's backend for CPUs multiplies bfloat16 matrices with the processor's matrix units (Intel's AMX) if three things
    hold: the result is float32, no operand is a transpose, and the left one is summed over its last axis. Otherwise it
    converts both operands to float32 and multiplies those.
    """
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
