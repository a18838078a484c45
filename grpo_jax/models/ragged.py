"""Grouped matrix multiplication for mixtures of experts: each row is multiplied by the matrix of its group.

`jax.lax.ragged_dot` is efficient on TPUs. On GPUs and CPUs, XLA multiplies every row by every group's matrix and stores
a masked copy of all rows for each group. This module provides kernels for GPUs.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from grpo_jax.models.attention_tiles import MIN_TILE_SIDE, Ref, compiler_params, has_triton
from grpo_jax.models.matmul import tile_product


def ragged_dot(
    x: jax.Array, w: jax.Array, sizes: jax.Array, implementation: str = "xla", dtype: jnp.dtype | None = None
) -> jax.Array:
    """Multiply each row of x [N, I] by its group's matrix in w [E, I, O], with float32 accumulation.

    Returns [N, O] in `dtype`, by default x.dtype. Rows must be sorted by group. `sizes` [E] int32 are the group sizes.

    The kernels do not support forward-mode differentiation. `jax.lax.ragged_dot` is used for implementations without
    kernels (see `has_triton`), and also if I or O is not a multiple of 16 or an array has 2³¹ or more elements.
    """
    e, inner, outer = w.shape
    chex.assert_shape([x, sizes], [(None, inner), (e,)])
    # Kernels use 32-bit offsets.
    large = max(w.size, len(x) * max(inner, outer)) >= 2**31
    if large or not has_kernel(implementation, inner, outer):
        return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=dtype)
    return _ragged_dot(implementation, jnp.dtype(dtype or x.dtype), x, w, sizes)


def has_kernel(implementation: str, *sides: int) -> bool:
    """Return whether the `ragged_dot` kernels can be used for matrices with these side lengths."""
    return has_triton(implementation) and not any(side % MIN_TILE_SIDE for side in sides)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ragged_dot(implementation: str, dtype: jnp.dtype, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return _by_rows(implementation, x, w, sizes, dtype, transposed=False)


def _forward(
    implementation: str, dtype: jnp.dtype, x: jax.Array, w: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _ragged_dot(implementation, dtype, x, w, sizes), (x, w, sizes)


def _backward(
    implementation: str, _: jnp.dtype, residuals: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = residuals
    g = g.astype(x.dtype)
    dx = _by_rows(implementation, g, w, sizes, x.dtype, transposed=True)
    return dx, _by_groups(implementation, x, g, sizes), None


_ragged_dot.defvjp(_forward, _backward)


def _by_rows(
    implementation: str, x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: DTypeLike, *, transposed: bool
) -> jax.Array:
    """Multiply rows [N, I] by w [E, I, O], or rows [N, O] by w's transposes if `transposed`. One tile per program."""
    n, inner = x.shape
    outer = w.shape[1 if transposed else 2]
    most = _longest_side(x)
    rows, columns, part = _row_tile(n, len(sizes), most), _tile(outer, most), _tile(inner, most // 2)
    count = -(-n // rows)
    x = jnp.pad(x, ((0, -n % rows), (0, 0)))
    ends, begins = jnp.cumsum(sizes), jnp.arange(count) * rows

    def group_of(row: jax.Array) -> jax.Array:
        return jnp.searchsorted(ends, row, side="right").astype(jnp.int32)

    first, last = group_of(begins), group_of(jnp.minimum(begins + rows, n) - 1)
    # Skip the matrices of empty groups.
    parts = jnp.where(sizes > 0, inner // part, 0).astype(jnp.int32)

    def kernel(first: Ref, last: Ref, starts: Ref, parts: Ref, x: Ref, w: Ref, out: Ref) -> None:
        number = pl.program_id(0) * rows + jnp.arange(rows)

        def of_group(e: jax.Array, total: jax.Array) -> jax.Array:
            in_group = ((number >= starts[e]) & (number < starts[e + 1]))[:, None]

            def of_part(i: jax.Array, total: jax.Array) -> jax.Array:
                span = pl.ds(i * part, part)
                group_rows, matrix = jnp.where(in_group, x[:, span], 0), w[e, :, span] if transposed else w[e, span, :]
                return total + tile_product(group_rows, matrix, (1, 1) if transposed else (1, 0))

            return jax.lax.fori_loop(0, parts[e], of_part, total)

        total = jax.lax.fori_loop(first[...], last[...] + 1, of_group, jnp.zeros((rows, columns), jnp.float32))
        out[...] = total.astype(out.dtype)

    matrices = (len(sizes), columns, inner) if transposed else (len(sizes), inner, columns)
    call = pl.pallas_call(
        kernel,
        grid=(count, outer // columns),
        in_specs=[
            pl.BlockSpec((None,), lambda i, j: (i,)),
            pl.BlockSpec((None,), lambda i, j: (i,)),
            pl.BlockSpec((len(sizes) + 1,), lambda i, j: (0,)),
            pl.BlockSpec((len(sizes),), lambda i, j: (0,)),
            pl.BlockSpec((rows, inner), lambda i, j: (i, 0)),
            pl.BlockSpec(matrices, lambda i, j: (0, j, 0) if transposed else (0, 0, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((count * rows, outer), dtype),
        name="ragged_rows_transposed" if transposed else "ragged_rows",
        interpret=implementation == "interpreted",
        compiler_params=compiler_params(implementation, warps=8 if rows == 128 else 4, stages=2),
    )
    return call(first, last, _starts(sizes), parts, x, w)[:n]


def _by_groups(implementation: str, x: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sum x_n g_nᵀ over the rows n in each group, [E, I, O]. A program computes a tile of a matrix."""
    (n, inner), outer = x.shape, g.shape[1]
    most = _longest_side(x)
    rows, height, width = _row_tile(n, len(sizes), most), _tile(inner, most), _tile(outer, most)
    x, g = (jnp.pad(y, ((0, -n % rows), (0, 0))) for y in (x, g))

    starts = _starts(sizes)
    first = starts[:-1] // rows
    last = jnp.where(sizes > 0, (starts[1:] - 1) // rows, first - 1)

    def kernel(first: Ref, last: Ref, start: Ref, end: Ref, x: Ref, g: Ref, out: Ref) -> None:
        def of_tile(i: jax.Array, total: jax.Array) -> jax.Array:
            number, span = i * rows + jnp.arange(rows), pl.ds(i * rows, rows)
            in_group = ((number >= start[...]) & (number < end[...]))[:, None]
            return total + tile_product(jnp.where(in_group, x[span, :], 0), g[span, :], (0, 0))

        zeros = jnp.zeros((height, width), jnp.float32)
        out[...] = jax.lax.fori_loop(first[...], last[...] + 1, of_tile, zeros).astype(out.dtype)

    of_group = pl.BlockSpec((None,), lambda e, i, j: (e,))
    call = pl.pallas_call(
        kernel,
        grid=(len(sizes), inner // height, outer // width),
        in_specs=[
            *[of_group] * 4,
            pl.BlockSpec((len(x), height), lambda e, i, j: (0, i)),
            pl.BlockSpec((len(x), width), lambda e, i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((None, height, width), lambda e, i, j: (e, i, j)),
        out_shape=jax.ShapeDtypeStruct((len(sizes), inner, outer), x.dtype),
        name="ragged_groups",
        interpret=implementation == "interpreted",
        compiler_params=compiler_params(implementation, warps=8 if height == 128 else 4, stages=2),
    )
    return call(first, last, starts[:-1], starts[1:], x, g)


def _starts(sizes: jax.Array) -> jax.Array:
    """Return the first row of each group, followed by the number of rows, [E + 1] int32."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes).astype(jnp.int32)])


def _longest_side(x: jax.Array) -> int:
    """Return the largest tile side that fits in shared memory: 128 for bfloat16, 64 for float32."""
    return 256 // x.dtype.itemsize


def _tile(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`."""
    return min(most, size & -size)


def _row_tile(n: int, groups: int, most: int) -> int:
    """Return the number of rows per tile: the mean group size, rounded down to a power of two, from 16 to `most`."""
    return min(most, 1 << max(MIN_TILE_SIDE, n // groups).bit_length() - 1)
