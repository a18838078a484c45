"""Fused attention, with memory use linear in the length: scores are computed for one tile at a time.

For each tile of queries, a loop over the visible tiles of keys updates the maximum score and the sums of weights and
weighted values (Milakov & Gimelshein 2018; Dao et al. 2022). The backward pass recomputes the weights from the
log-sum-exp. "tiles" uses plain JAX on any platform, "triton" uses kernels for NVIDIA GPUs (Ampere and later), and
"mosaic" uses the kernels in `mosaic` for Hopper GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.models.attention_tiles import (
    MIN_TILE_SIDE,
    Inputs,
    Kernel,
    Ref,
    Sums,
    TileMask,
    add_tile,
    compiler_params,
    finish,
    initial_sums,
    over_key_tiles,
    repeated,
    tile_gradients,
    visible,
)
from grpo_jax.models.matmul import tile_product


def fused_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, tile_mask: TileMask, kernel: Kernel, sinks: jax.Array | None = None
) -> jax.Array:
    """Compute attention over visible keys, [A, H_kv, N, R, d]. Outputs are 0 for queries without visible keys.

    q is [A, H_kv, N, R, d], where R query heads share a key head. k and v are [A, H_kv, S, d] and start with
    S − N slots for prompts. `sinks` [H_kv, R] float32 are the query heads' scores for an additional key without a
    value. Supports only reverse-mode gradients.
    """
    a, h, n, r, d = q.shape
    tiles = tile_mask.tiles[str(kernel.window)]
    chex.assert_shape(tiles.bounds, (a, 4, n))
    kernel = kernel._replace(num_prompt_slots=k.shape[2] - n)
    # The kernels require head sizes that are powers of two and at least the side of a tensor core's matrices.
    least = 64 if kernel.implementation == "mosaic" else MIN_TILE_SIDE
    width = d if kernel.implementation == "tiles" else max(least, 1 << (d - 1).bit_length())

    def pad_to_tiles(x: jax.Array, size: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % size), (0, width - d)))

    q = pad_to_tiles(q.reshape(a, h, n * r, d), kernel.rows)
    k, v = pad_to_tiles(k, kernel.columns), pad_to_tiles(v, kernel.columns)
    # Lay out the sinks like the queries: [H_kv, N R].
    sinks = None if sinks is None else jnp.pad(jnp.tile(sinks, (1, n)), ((0, 0), (0, -n * r % kernel.rows)))
    out = _attend(kernel, Inputs(q, k, v, tiles.replace(bounds=repeated(tiles.bounds, r, kernel.rows))), sinks)
    return out[:, :, : n * r, :d].reshape(a, h, n, r, d)


# The "tiles" implementation. Functions for one tile and head are mapped over A and H.


def _over_heads(function: Callable[..., Any], last_is_shared: bool = False) -> Callable[..., Any]:
    """Map a function for one tile and head over axes A and H. If `last_is_shared`, the last argument lacks axis H."""

    def mapped(*arrays: Any) -> Any:
        axes = (0,) * (len(arrays) - 1) + (None if last_is_shared else 0,)
        return jax.vmap(jax.vmap(function, in_axes=axes))(*arrays)

    return mapped


def _take(x: jax.Array, tile: jax.Array, size: int) -> jax.Array:
    """Select tile `tile` [A], which has `size` entries along N, from an array [A, H, N, ...]."""
    return jax.vmap(lambda x, tile: jax.lax.dynamic_slice_in_dim(x, tile * size, size, axis=1))(x, tile)


def _tile_visibility(kernel: Kernel, x: Inputs, row: jax.Array, column: jax.Array, valid: jax.Array) -> jax.Array:
    """Compute the mask [A, rows, columns] for query tiles `row` [A] and key tiles `column` [A]."""
    keys = column[:, None] * kernel.columns + jnp.arange(kernel.columns)[None]
    return jax.vmap(visible)(_take(x.tiles.bounds, row, kernel.rows), keys) & valid[:, None, None]


def _tiled_forward(kernel: Kernel, x: Inputs) -> tuple[jax.Array, jax.Array]:
    a, h, _, d = x.q.shape
    add_key_tile = _over_heads(functools.partial(add_tile, kernel=kernel), last_is_shared=True)

    def query_tile(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, count = jnp.full(a, i), x.tiles.key_count[:, i]
        q = _take(x.q, row, kernel.rows)

        def add(j: jax.Array, sums: Sums) -> Sums:
            column = x.tiles.keys[:, i, j]
            k, v = (_take(y, column, kernel.columns) for y in (x.k, x.v))
            return add_key_tile(sums, q, k, v, _tile_visibility(kernel, x, row, column, j < count))

        sums = jax.lax.fori_loop(0, count.max(), add, initial_sums((a, h, kernel.rows, d)))
        return _over_heads(lambda sums: finish(sums, x.v.dtype))(sums)

    out, lse = jax.lax.map(query_tile, jnp.arange(x.tiles.keys.shape[1]))
    return jnp.moveaxis(out, 0, 2).reshape(x.q.shape), jnp.moveaxis(lse, 0, 2).reshape(x.q.shape[:3])


def _tiled_backward(
    kernel: Kernel, x: Inputs, g: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    a, h, _, d = x.q.shape
    gradients = _over_heads(functools.partial(tile_gradients, kernel=kernel), last_is_shared=True)

    def product(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
        return _over_heads(functools.partial(tile_product, contract=contract))(x, y)

    def query_tile(i: jax.Array) -> jax.Array:
        row, count = jnp.full(a, i), x.tiles.key_count[:, i]
        own_q, own_g, own_lse, own_delta = (_take(y, row, kernel.rows) for y in (x.q, g, lse, delta))

        def add(j: jax.Array, dq: jax.Array) -> jax.Array:
            column = x.tiles.keys[:, i, j]
            k, v = (_take(y, column, kernel.columns) for y in (x.k, x.v))
            is_visible = _tile_visibility(kernel, x, row, column, j < count)
            _, d_scores = gradients(own_q, k, v, own_g, own_lse, own_delta, is_visible)
            return dq + product(d_scores.astype(k.dtype), k, (1, 0))

        return jax.lax.fori_loop(0, count.max(), add, jnp.zeros((a, h, kernel.rows, d)))

    def key_tile(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        column, count = jnp.full(a, i), x.tiles.query_count[:, i]
        k, v = (_take(y, column, kernel.columns) for y in (x.k, x.v))

        def add(j: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row = x.tiles.queries[:, i, j]
            own_q, own_g, own_lse, own_delta = (_take(y, row, kernel.rows) for y in (x.q, g, lse, delta))
            is_visible = _tile_visibility(kernel, x, row, column, j < count)
            weights, d_scores = gradients(own_q, k, v, own_g, own_lse, own_delta, is_visible)
            dk = product(d_scores.astype(own_q.dtype), own_q, (0, 0))
            return sums[0] + dk, sums[1] + product(weights.astype(g.dtype), own_g, (0, 0))

        return jax.lax.fori_loop(0, count.max(), add, (jnp.zeros((a, h, kernel.columns, d)),) * 2)

    def merge(y: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.moveaxis(y, 0, 2).reshape(x.shape)

    dq = jax.lax.map(query_tile, jnp.arange(x.tiles.keys.shape[1]))
    dk, dv = jax.lax.map(key_tile, jnp.arange(x.tiles.queries.shape[1]))
    return merge(dq, x.q), merge(dk, x.k), merge(dv, x.v)


# Kernels for NVIDIA GPUs. Each program has one tile of queries (or keys) and iterates over tiles of keys (or queries).
# The kernels' first arguments come from `_kernel_inputs`.


def _forward_kernel(*refs: Ref, kernel: Kernel) -> None:
    q, k, v, *bounds, key_positions, tile_indices, count, out, lse = refs
    own_q, own_bounds = q[...], [x[...] for x in bounds]

    def add(j: jax.Array, sums: Sums) -> Sums:
        span = pl.ds(tile_indices[j] * kernel.columns, kernel.columns)
        is_visible = visible(own_bounds, key_positions[span])
        return add_tile(sums, own_q, k[span, :], v[span, :], is_visible, kernel)

    sums = jax.lax.fori_loop(0, count[...], add, initial_sums(own_q.shape))
    out[...], lse[...] = finish(sums, out.dtype)


def _query_kernel(*refs: Ref, kernel: Kernel) -> None:
    q, k, v, *bounds, key_positions, tile_indices, count, g, lse, delta, dq = refs
    own_q, own_g, own_lse, own_delta = q[...], g[...], lse[...], delta[...]
    own_bounds = [x[...] for x in bounds]

    def add(j: jax.Array, total: jax.Array) -> jax.Array:
        span = pl.ds(tile_indices[j] * kernel.columns, kernel.columns)
        tile = k[span, :]
        is_visible = visible(own_bounds, key_positions[span])
        _, d_scores = tile_gradients(own_q, tile, v[span, :], own_g, own_lse, own_delta, is_visible, kernel=kernel)
        return total + tile_product(d_scores.astype(tile.dtype), tile, (1, 0))

    dq[...] = jax.lax.fori_loop(0, count[...], add, jnp.zeros(own_q.shape)).astype(dq.dtype)


def _key_kernel(*refs: Ref, kernel: Kernel, parts: int = 1) -> None:
    q, k, v, *bounds, key_positions, tile_indices, count, g, lse, delta, dk, dv = refs
    own_k, own_v, own_positions = k[...], v[...], key_positions[...]
    begin: jax.Array | int = 0
    end = count[...]
    if parts > 1:
        part = pl.program_id(2)
        begin, end = end * part // parts, end * (part + 1) // parts

    def add(j: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        span = pl.ds(tile_indices[j] * kernel.rows, kernel.rows)
        queries, upstream = q[span, :], g[span, :]
        is_visible = visible([x[span] for x in bounds], own_positions)
        weights, d_scores = tile_gradients(
            queries, own_k, own_v, upstream, lse[span], delta[span], is_visible, kernel=kernel
        )
        dk_tile = tile_product(d_scores.astype(queries.dtype), queries, (0, 0))
        return sums[0] + dk_tile, sums[1] + tile_product(weights.astype(upstream.dtype), upstream, (0, 0))

    sums = jax.lax.fori_loop(begin, end, add, (jnp.zeros(own_k.shape),) * 2)
    dk[...], dv[...] = sums[0].astype(dk.dtype), sums[1].astype(dv.dtype)


KernelInput = tuple[jax.Array, str, bool]
"""An array, its tiled axis ("rows" or "columns") or "tile_list", and whether all heads share the array."""


def _call(
    body: Callable[..., None],
    kernel: Kernel,
    inputs: Sequence[KernelInput],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, str]],
    *,
    over_queries: bool,
    first: int = 0,
    count: int | None = None,
    parts: int = 1,
) -> list[jax.Array]:
    """Run a kernel on `count` tiles (default: all) of queries (`over_queries`) or keys, starting at tile `first`.

    If `parts` > 1, `parts` programs share each tile, and outputs have a leading axis [parts, ...].
    """
    a, h, m, _ = inputs[0][0].shape
    num_tiles = m // kernel.rows if over_queries else inputs[1][0].shape[2] // kernel.columns
    count = num_tiles if count is None else count
    size = {"rows": kernel.rows, "columns": kernel.columns}

    def spec(shape: tuple[int, ...], axis: str, shared: bool) -> pl.BlockSpec:
        # A program reads a tile of each array that the grid divides, a row of each tile list, and all other arrays.
        is_tiled = axis in ("rows" if over_queries else "columns", "tile_list")
        num_leading = 1 if shared else 2
        length, rest = shape[num_leading], shape[num_leading + 1 :]
        block = (None,) * num_leading + (None if axis == "tile_list" else size[axis] if is_tiled else length, *rest)
        zeros = (0,) * len(rest)
        return pl.BlockSpec(
            block, lambda i, j, *_: (*(i // h, i % h)[:num_leading], first + j if is_tiled else 0, *zeros)
        )

    def result(output: jax.ShapeDtypeStruct, axis: str) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        shape = (*output.shape[:2], count * size[axis], *output.shape[3:])
        block, zeros = (None, None, size[axis], *shape[3:]), (0,) * len(shape[3:])
        if parts == 1:
            tile_spec = pl.BlockSpec(block, lambda i, j: (i // h, i % h, j, *zeros))
            return jax.ShapeDtypeStruct(shape, output.dtype), tile_spec
        part_spec = pl.BlockSpec((None, *block), lambda i, j, part: (part, i // h, i % h, j, *zeros))
        return jax.ShapeDtypeStruct((parts, *shape), output.dtype), part_spec

    results = [result(output, axis) for output, axis in outputs]
    call = pl.pallas_call(
        functools.partial(body, kernel=kernel, parts=parts) if parts > 1 else functools.partial(body, kernel=kernel),
        grid=(a * h, count, parts) if parts > 1 else (a * h, count),
        in_specs=[spec(x.shape, axis, shared) for x, axis, shared in inputs],
        out_specs=[out_spec for _, out_spec in results],
        out_shape=[shape for shape, _ in results],
        interpret=kernel.implementation == "interpreted",
        name=body.__name__.strip("_"),
        compiler_params=compiler_params(kernel.implementation, warps=4, stages=2),
    )
    return call(*(x for x, *_ in inputs))


def _kernel_inputs(x: Inputs, *, over_queries: bool) -> list[KernelInput]:
    tile_lists = (x.tiles.keys, x.tiles.key_count) if over_queries else (x.tiles.queries, x.tiles.query_count)
    key_positions = jnp.broadcast_to(jnp.arange(x.k.shape[2]), (len(x.k), x.k.shape[2]))
    return [
        (x.q, "rows", False),
        (x.k, "columns", False),
        (x.v, "columns", False),
        *((x.tiles.bounds[:, i], "rows", True) for i in range(4)),
        (key_positions, "columns", True),
        *((x, "tile_list", True) for x in tile_lists),
    ]


def _kernel_forward(kernel: Kernel, x: Inputs) -> tuple[jax.Array, jax.Array]:
    outputs = [
        (jax.ShapeDtypeStruct(x.q.shape, x.v.dtype), "rows"),
        (jax.ShapeDtypeStruct(x.q.shape[:3], jnp.float32), "rows"),
    ]
    out, lse = _call(_forward_kernel, kernel, _kernel_inputs(x, over_queries=True), outputs, over_queries=True)
    return out, lse


def _kernel_backward(
    kernel: Kernel, x: Inputs, g: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    row_inputs = [(y, "rows", False) for y in (g, lse, delta)]
    output = jax.ShapeDtypeStruct(x.q.shape, x.q.dtype), "rows"
    (dq,) = _call(_query_kernel, kernel, _kernel_inputs(x, over_queries=True) + row_inputs, [output], over_queries=True)
    inputs = _kernel_inputs(x, over_queries=False) + row_inputs

    def key_gradients(first: int, number: int, parts: int) -> list[jax.Array]:
        dtypes = [y.dtype if parts == 1 else jnp.float32 for y in (x.k, x.v)]
        outputs = [(jax.ShapeDtypeStruct(x.k.shape, dtype), "columns") for dtype in dtypes]
        return _call(_key_kernel, kernel, inputs, outputs, over_queries=False, first=first, count=number, parts=parts)

    dk, dv = over_key_tiles(key_gradients, kernel, x)
    return dq, dk, dv


def _passes(kernel: Kernel) -> tuple[Callable[..., Any], ...]:
    """Return the functions for the forward and the backward pass."""
    if kernel.implementation == "mosaic":
        from grpo_jax.models import mosaic  # older versions of JAX lack the module that it imports

        return mosaic.forward, mosaic.backward
    if kernel.implementation == "tiles":
        return _tiled_forward, _tiled_backward
    return _kernel_forward, _kernel_backward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: Kernel, x: Inputs, sinks: jax.Array | None) -> jax.Array:
    return _attend_forward(kernel, x, sinks)[0]


Residuals = tuple[Inputs, jax.Array | None, jax.Array, jax.Array]


def _attend_forward(kernel: Kernel, x: Inputs, sinks: jax.Array | None) -> tuple[jax.Array, Residuals]:
    out, lse = _passes(kernel)[0](kernel, x)
    if sinks is not None:
        # Since the log-sum-exp includes the sink, the backward pass accounts for the additional key.
        non_sink_weight = jax.nn.sigmoid(lse - sinks[None])
        out, lse = (out * non_sink_weight[..., None]).astype(out.dtype), jnp.logaddexp(lse, sinks[None])
    return out, (x, sinks, out, lse)


def _attend_backward(kernel: Kernel, residuals: Residuals, g: jax.Array) -> tuple[Inputs, jax.Array | None]:
    x, sinks, out, lse = residuals
    delta = (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(axis=-1)
    dq, dk, dv = _passes(kernel)[1](kernel, x, g, lse, delta)
    d_sinks = None if sinks is None else -(jnp.exp(sinks[None] - lse) * delta).sum(axis=0)
    dq, dk, dv = dq.astype(x.q.dtype), dk.astype(x.k.dtype), dv.astype(x.v.dtype)
    return Inputs(dq, dk, dv, None), d_sinks  # type: ignore[arg-type]  # integers have no gradient


_attend.defvjp(_attend_forward, _attend_backward)
