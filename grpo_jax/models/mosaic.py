"""Fused attention on NVIDIA's Hopper GPUs (H100, H200), with Pallas Mosaic GPU kernels.

A block of threads has one tile of queries and iterates over tiles of keys, or vice versa. Each of two warpgroups of
128 threads computes the results for half of the block's own tile. A third warpgroup loads the other tiles into a ring
of two slots in shared memory. The barrier `ready` signals that a slot is filled, and `free` that the first two have
read it. Prompt keys are padded to whole tiles, so only one of the ranges in `Tiles.bounds` applies to a key tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from grpo_jax.models.attention_tiles import MASKED, Inputs, Kernel, Ref, over_key_tiles

HALF = 64
"""Number of rows in half a tile, which one warpgroup computes. Hopper's tensor cores multiply matrices with 64 rows."""

SLOTS = 2
"""Number of slots in the ring."""

REGISTERS = {"copies": 24, "computes": 240}
"""Registers per thread in the copying warpgroup and in each of the two computing warpgroups. The sum over the three
warpgroups must not exceed 3 · 168, the number allocated when a block starts. Otherwise, the block deadlocks."""

LOG2_E = math.log2(math.e)
"""Weights are computed as powers of two, exp(x) = 2^(x · log₂ e), for which the hardware has an instruction."""

WIDE, ROWS, COLUMNS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Register layouts of a product's result, and of vectors with an element for each row or column of the result."""

Arrays = tuple[jax.Array, ...]
RowSlice = pl.Slice | slice


def _product(x: Ref, y: Ref) -> jax.Array:
    """Compute x yᵀ in float32 for matrices in shared memory."""

    def multiply(total: Ref) -> jax.Array:
        plgpu.wgmma(total, x, plgpu.transpose_ref(y, (1, 0)))
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((x.shape[0], y.shape[0]), jnp.float32))


def _add_product(total: jax.Array, x: jax.Array, y: Ref) -> jax.Array:
    """Compute total + x y in float32 for x in registers and y in shared memory."""
    return pl.run_state(lambda total: plgpu.wgmma(total, x.astype(y.dtype), y))(plgpu.ACC.init(total))


def _in_layout(x: jax.Array, layout: Any) -> jax.Array:
    return plgpu.layout_cast(x, layout)


def _indices(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WIDE)


def _zeros(d: int) -> jax.Array:
    return _in_layout(jnp.zeros((HALF, d)), WIDE)


def _vector(x: Ref, axis: int) -> jax.Array:
    """Load a vector with an element for each row (axis 0) or column (axis 1) of a matrix."""
    return _in_layout(x[...], COLUMNS if axis else ROWS)


def _along(x: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """Broadcast a vector, with an element for each row (axis 0) or column (axis 1), to the shape of matrix `like`."""
    return lax.broadcast_in_dim(x, like.shape, [axis])


def _masked(x: jax.Array, value: float, bounds: Sequence[Ref], first: jax.Array, queries_axis: int) -> jax.Array:
    """Replace elements of x with `value` where the key is not visible. The first key has index `first`."""
    key = _indices(x.shape, 1 - queries_axis)
    begin, end = (_along(_vector(bound, queries_axis) - first, x, queries_axis) for bound in bounds)
    return jnp.where((key >= begin) & (key < end), x, value)


def _weights(scores: jax.Array, lse: Ref, kernel: Kernel, queries_axis: int) -> jax.Array:
    shift = _along(_vector(lse, queries_axis) * LOG2_E, scores, queries_axis)
    return jnp.exp2(scores * (kernel.scale * LOG2_E) - shift)


def _d_scores(weights: jax.Array, upstream: jax.Array, delta: Ref, queries_axis: int) -> jax.Array:
    """Compute the gradient with respect to the scores from the gradient with respect to the weights."""
    return weights * (upstream - _along(_vector(delta, queries_axis), weights, queries_axis))


def _range_of(first: jax.Array, kernel: Kernel) -> jax.Array:
    """Return the index in `Tiles.bounds` of the first of the two bounds for the tile whose first key is `first`."""
    return jnp.where(first < kernel.num_prompt_slots, 0, 2)


def _write(x: jax.Array, buffer: Ref, target: Ref) -> None:
    """Write x to the array `target`, through `buffer` in shared memory if buffer and target have the same dtype."""
    if target.dtype != buffer.dtype:
        target[...] = x.astype(target.dtype)
        return
    buffer[...] = x.astype(target.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)


Add = Callable[[jax.Array, jax.Array, Arrays], Arrays]
Loop = Callable[[Add, Arrays], Arrays]
"""Function `loop(add, sums)` that computes `sums = add(step, slot, sums)` for each step and returns the sums."""


def _pipeline(
    tile: jax.Array,
    own: Sequence[Ref],
    own_sources: Callable[[RowSlice], Sequence[Ref]],
    steps: jax.Array,
    ring: Sequence[Ref],
    sources: Callable[[jax.Array], Sequence[Ref]],
    barriers: Sequence[Ref],
    compute: Callable[[jax.Array, Sequence[Ref], Loop], None],
) -> None:
    """Copy `sources(step)` for each step to the ring's slots while two warpgroups run `compute(warpgroup, own, loop)`.

    First, each of the two warpgroups copies `own_sources(rows)`, for the rows in its half of the tile, to `own`.
    """
    arrived, ready, free = barriers
    warpgroup = lax.axis_index("warpgroup")

    def copy(sources: Sequence[Ref], buffers: Sequence[Ref], i: jax.Array, barrier: Ref) -> None:
        for source, buffer in zip(sources, buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[i], barrier.at[i])

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS["copies"], action="decrease")

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            slot, arrays = lax.rem(step, SLOTS), sources(step)  # computed while the slot is in use

            @pl.when(step >= SLOTS)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            copy(arrays, ring, slot, ready)

        @pl.loop(lax.max(steps - SLOTS, 0), steps)
        def _(step: jax.Array) -> None:
            plgpu.barrier_wait(free.at[lax.rem(step, SLOTS)])

    def loop(add: Add, sums: Arrays) -> Arrays:
        def one(step: jax.Array, sums: Arrays) -> Arrays:
            slot = lax.rem(step, SLOTS)
            plgpu.barrier_wait(ready.at[slot])
            sums = add(step, slot, sums)
            plgpu.barrier_arrive(free.at[slot])
            return sums

        return lax.fori_loop(0, steps, one, sums)

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS["computes"], action="increase")
        copy(own_sources(_half(tile, warpgroup)), own, warpgroup, arrived)
        plgpu.barrier_wait(arrived.at[warpgroup])
        compute(warpgroup, [x.at[warpgroup] for x in own], loop)


def _half(tile: jax.Array, warpgroup: jax.Array) -> RowSlice:
    return pl.ds(tile * (2 * HALF) + warpgroup * HALF, HALF)


def _program_indices() -> Arrays:
    return tuple(lax.axis_index(name) for name in ("sequence", "head", "tile"))


def _forward_kernel(*refs: Ref, kernel: Kernel) -> None:
    (q, k, v, bounds, tile_indices, count), (out, lse), own, ring, barriers = (
        refs[:6],
        refs[6:8],
        refs[8:10],
        refs[10:12],
        refs[12:],
    )
    a, h, i = _program_indices()

    def sources(step: jax.Array) -> Sequence[Ref]:
        span = pl.ds(tile_indices[a, i, step] * kernel.columns, kernel.columns)
        return k.at[a, h, span], v.at[a, h, span]

    def compute(warpgroup: jax.Array, own: Sequence[Ref], loop: Loop) -> None:
        (q_half, bounds_half), (k_ring, v_ring), rows = own, ring, _half(i, warpgroup)

        def add(step: jax.Array, slot: jax.Array, sums: Arrays) -> Arrays:
            values, top, total = sums
            first = tile_indices[a, i, step] * kernel.columns
            pair = _range_of(first, kernel)
            scores = _product(q_half, k_ring.at[slot]) * (kernel.scale * LOG2_E)
            scores = _masked(scores, MASKED, (bounds_half.at[pair], bounds_half.at[pair + 1]), first, 0)
            higher = jnp.maximum(top, scores.max(axis=1))
            weights, rescale = jnp.exp2(scores - _along(higher, scores, 0)), jnp.exp2(top - higher)
            values = _add_product(values * _along(rescale, values, 0), weights, v_ring.at[slot])
            return values, higher, total * rescale + weights.sum(axis=1)

        # The initial `top` is larger than masked scores, so the weights of keys that are not visible are 0.
        top, total = (_in_layout(jnp.full((HALF,), x, jnp.float32), ROWS) for x in (MASKED / 2, 0.0))
        values, top, total = loop(add, (_zeros(q.shape[-1]), top, total))
        nonempty = total > 0
        total = jnp.where(nonempty, total, 1.0)
        lse[a, h, rows] = jnp.where(nonempty, (top + jnp.log2(total)) / LOG2_E, -MASKED)
        _write(values / _along(total, values, 0), q_half, out.at[a, h, rows])

    def own_sources(rows: RowSlice) -> Sequence[Ref]:
        return q.at[a, h, rows], bounds.at[a, :, rows]

    _pipeline(i, own, own_sources, count[a, i], ring, sources, barriers, compute)


def _query_kernel(*refs: Ref, kernel: Kernel) -> None:
    (q, k, v, bounds, tile_indices, count, g, lse, delta), dq = refs[:9], refs[9]
    own, ring, barriers = refs[10:15], refs[15:17], refs[17:]
    a, h, i = _program_indices()

    def first_key(step: jax.Array) -> jax.Array:
        return tile_indices[a, i, lax.div(step, 2)] * kernel.columns + lax.rem(step, 2) * HALF

    def own_sources(rows: RowSlice) -> Sequence[Ref]:
        return q.at[a, h, rows], g.at[a, h, rows], bounds.at[a, :, rows], lse.at[a, h, rows], delta.at[a, h, rows]

    def sources(step: jax.Array) -> Sequence[Ref]:
        span = pl.ds(first_key(step), HALF)
        return k.at[a, h, span], v.at[a, h, span]

    def compute(warpgroup: jax.Array, own: Sequence[Ref], loop: Loop) -> None:
        (q_half, g_half, bounds_half, lse_half, delta_half), (k_ring, v_ring) = own, ring

        def add(step: jax.Array, slot: jax.Array, sums: Arrays) -> Arrays:
            first = first_key(step)
            pair = _range_of(first, kernel)
            weights = _weights(_product(q_half, k_ring.at[slot]), lse_half, kernel, 0)
            weights = _masked(weights, 0.0, (bounds_half.at[pair], bounds_half.at[pair + 1]), first, 0)
            d_scores = _d_scores(weights, _product(g_half, v_ring.at[slot]), delta_half, 0)
            return (_add_product(sums[0], d_scores, k_ring.at[slot]),)

        (total,) = loop(add, (_zeros(q.shape[-1]),))
        _write(total * kernel.scale, q_half, dq.at[a, h, _half(i, warpgroup)])

    _pipeline(i, own, own_sources, count[a, i] * 2, ring, sources, barriers, compute)


def _key_kernel(*refs: Ref, kernel: Kernel, first: int, number: int, parts: int) -> None:
    (q, k, v, bounds, tile_indices, count, g, lse, delta), (dk, dv) = refs[:9], refs[9:11]
    own, ring, barriers = refs[11:13], refs[13:18], refs[18:]
    a, h, program = _program_indices()
    part, local = lax.div(program, number), lax.rem(program, number)
    i = first + local
    begin, end = (lax.div(count[a, i] * x, parts) for x in (part, part + 1))

    def sources(step: jax.Array) -> Sequence[Ref]:
        span = pl.ds(tile_indices[a, i, begin + lax.div(step, 2)] * kernel.rows + lax.rem(step, 2) * HALF, HALF)
        pair = pl.ds(_range_of(i * kernel.columns, kernel), 2)
        return q.at[a, h, span], g.at[a, h, span], bounds.at[a, pair, span], lse.at[a, h, span], delta.at[a, h, span]

    def compute(warpgroup: jax.Array, own: Sequence[Ref], loop: Loop) -> None:
        (k_half, v_half), rows = own, _half(local, warpgroup)

        def add(step: jax.Array, slot: jax.Array, sums: Arrays) -> Arrays:
            queries, upstream, pair, own_lse, own_delta = (x.at[slot] for x in ring)
            weights = _weights(_product(k_half, queries), own_lse, kernel, 1)
            first_key = i * kernel.columns + warpgroup * HALF
            weights = _masked(weights, 0.0, (pair.at[0], pair.at[1]), first_key, 1)
            total_v = _add_product(sums[1], weights, upstream)
            d_scores = _d_scores(weights, _product(v_half, upstream), own_delta, 1)
            plgpu.commit_smem()  # vectors must be loaded before the slot is overwritten
            return _add_product(sums[0], d_scores, queries), total_v

        total_k, total_v = loop(add, (_zeros(k.shape[-1]),) * 2)
        _write(total_k * kernel.scale, k_half, dk.at[part, a, h, rows])
        _write(total_v, v_half, dv.at[part, a, h, rows])

    def own_sources(rows: RowSlice) -> Sequence[Ref]:
        return k.at[a, h, rows], v.at[a, h, rows]

    _pipeline(i, own, own_sources, (end - begin) * 2, ring, sources, barriers, compute)


def _call(
    name: str,
    body: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    own: Sequence[jax.ShapeDtypeStruct],
    ring: Sequence[jax.ShapeDtypeStruct],
) -> Sequence[jax.Array]:
    """Run a kernel for each sequence, head and tile, with buffers `own` per computing warpgroup and `ring` per slot."""

    def buffer(x: jax.ShapeDtypeStruct, count: int) -> Ref:
        # Tensor cores read matrices in swizzled tiles of 8 rows of 128 bytes.
        matrix = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM((count, *x.shape), x.dtype, transforms=matrix if x.dtype.itemsize == 2 else ())

    buffers = [buffer(x, 2) for x in own] + [buffer(x, SLOTS) for x in ring]
    arrivals = (len(own), 2), (len(ring), SLOTS), (2, SLOTS)
    call = plgpu.kernel(
        body,
        out_type=list(outputs),
        scratch_types=[*buffers, *(plgpu.Barrier(num_arrivals=n, num_barriers=count) for n, count in arrivals)],
        grid=grid,
        grid_names=("sequence", "head", "tile"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return call(*inputs)


def _buffers(rows: int, like: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of buffers for a matrix [rows, d], bounds and a float32 vector."""
    shapes = ((rows, like.shape[-1]), like.dtype), ((4, rows), jnp.int32), ((rows,), jnp.float32)
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)


def forward(kernel: Kernel, x: Inputs) -> tuple[jax.Array, jax.Array]:
    """Compute outputs [A, H, N, d] and log-sum-exps [A, H, N] float32."""
    half, bounds, _ = _buffers(HALF, x.q)
    keys, *_ = _buffers(kernel.columns, x.k)
    inputs = x.q, x.k, x.v, x.tiles.bounds, x.tiles.keys, x.tiles.key_count
    outputs = jax.ShapeDtypeStruct(x.q.shape, x.v.dtype), jax.ShapeDtypeStruct(x.q.shape[:3], jnp.float32)
    body, grid = functools.partial(_forward_kernel, kernel=kernel), (*x.q.shape[:2], x.tiles.keys.shape[1])
    out, lse = _call("forward", body, grid, inputs, outputs, (half, bounds), (keys, keys))
    return out, lse


def backward(
    kernel: Kernel, x: Inputs, g: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of q, k and v from the outputs' gradient g, the log-sum-exps, and delta = Σ_d g · out."""
    half, bounds, vector = _buffers(HALF, x.q)
    inputs = x.q, x.k, x.v, x.tiles.bounds, x.tiles.keys, x.tiles.key_count, g, lse, delta
    body, grid = functools.partial(_query_kernel, kernel=kernel), (*x.q.shape[:2], x.tiles.keys.shape[1])
    outputs = [jax.ShapeDtypeStruct(x.q.shape, x.q.dtype)]
    (dq,) = _call("query_gradients", body, grid, inputs, outputs, (half, half, bounds, vector, vector), (half, half))

    def key_gradients(first: int, number: int, parts: int) -> Sequence[jax.Array]:
        inputs = x.q, x.k, x.v, x.tiles.bounds, x.tiles.queries, x.tiles.query_count, g, lse, delta
        body = functools.partial(_key_kernel, kernel=kernel, first=first, number=number, parts=parts)
        shape = (parts, *x.k.shape[:2], number * kernel.columns, x.k.shape[3])
        outputs = [jax.ShapeDtypeStruct(shape, x.k.dtype if parts == 1 else jnp.float32)] * 2
        pair = jax.ShapeDtypeStruct((2, HALF), jnp.int32)
        grid = (*x.k.shape[:2], number * parts)
        sums = _call("key_gradients", body, grid, inputs, outputs, (half, half), (half, half, pair, vector, vector))
        return [x[0] for x in sums] if parts == 1 else sums

    dk, dv = over_key_tiles(key_gradients, kernel, x)
    return dq, dk, dv
