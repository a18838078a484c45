"""Products whose gradients are fast on CPUs too."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["matmul", "matmul_by_columns", "matmul_transposed", "scale_columns"]


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x w, for x [N, I] and w [I, O]."""
    return x @ w


@jax.custom_vjp
def matmul_transposed(x: jax.Array, w: jax.Array) -> jax.Array:
    """x wᵀ, for x [N, I] and w [O, I]."""
    return x @ w.T


def matmul_by_columns(x: jax.Array, turned: jax.Array) -> jax.Array:
    """x w, for x [N, I] and turned = wᵀ [O, I], as (wᵀ xᵀ)ᵀ: for few rows, on one CPU.

    XLA would make one product of this one and its transposes, x by the rows of wᵀ, which takes about as long as x w;
    the barriers keep them apart.
    """
    apart = jax.lax.optimization_barrier
    return apart(turned @ apart(x.T)).T


@jax.custom_vjp
def scale_columns(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x · scale, for x [N, I] and scale [I]."""
    return x * scale[None]


def _product_over_rows(x, g):
    """xᵀ g.

    XLA's CPU backend multiplies a transposed left side at half its speed, and at full speed once the transpose is
    written out, which a batch axis makes it do: here the columns of g in two halves. That pays where x is at least as
    wide as g.
    """
    if x.shape[1] < g.shape[1]:
        return x.T @ g
    return jax.lax.platform_dependent(x, g, cpu=_in_two_halves, default=lambda x, g: x.T @ g)


def _in_two_halves(x, g):
    n, wide = g.shape
    if wide % 2:
        return x.T @ g
    return jnp.einsum("ni,nbo->bio", x, g.reshape(n, 2, wide // 2)).swapaxes(0, 1).reshape(-1, wide)


def _keep(product):
    return lambda x, w: (product(x, w), (x, w))


matmul.defvjp(
    _keep(lambda x, w: x @ w),
    lambda kept, g: (g @ kept[1].T, _product_over_rows(kept[0], g)),
)
matmul_transposed.defvjp(
    _keep(lambda x, w: x @ w.T),
    lambda kept, g: (g @ kept[1], _product_over_rows(g, kept[0])),
)
scale_columns.defvjp(
    _keep(lambda x, scale: x * scale[None]),
    # The sum over rows as a product with ones: a plain sum of columns takes a CPU ten times as long.
    lambda kept, g: (g * kept[1][None], jnp.ones(g.shape[0], g.dtype) @ (g * kept[0])),
)
