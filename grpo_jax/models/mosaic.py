"""Fused attention on NVIDIA's Hopper GPUs (H100, H200), with Pallas Mosaic GPU kernels.

A block of threads has one tile of queries and iterates over tiles of keys (or the other way round). Two warpgroups
compute, each for half of its rows. A third warpgroup copies the tiles that they read into a ring of shared memory:

```
copies     0     1     2 (when 0 is free)     3 (when 1 is free)    …        `ready`: the slot's copies have arrived
computes         0     1                      2                     …        `free`: both warpgroups have read the slot
```

The prompts' keys fill whole tiles, so each tile of keys is compared with one of the two ranges in `Tiles.bounds`.
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

from grpo_jax.models.tiles import MASKED, Inputs, Kernel, Ref, over_key_tiles

HALF = 64
"""Rows of a tile that a warpgroup computes; the tensor cores of Hopper multiply matrices of 64 rows."""

SLOTS = 2
"""Tiles in shared memory that are copied or read at the same time."""

REGISTERS = {"copies": 24, "computes": 240}
"""Registers per thread in the warpgroup that copies and in the two that compute, of 512 in all."""

LOG2_E = math.log2(math.e)
"""Weights are powers of two, for which the hardware has an instruction: exp(x) = 2^(x · log₂ e)."""

WIDE, ROWS, COLUMNS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""How registers hold a matrix that was multiplied, and vectors with an element for each of its rows or columns."""


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


def _indices(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WIDE)


def _vector(x: Ref, axis: int) -> jax.Array:
    """Load a vector with an element for each row (axis 0) or column (axis 1) of a matrix."""
    return _in_layout(x[...], COLUMNS if axis else ROWS)


def _visible(begin: Ref, end: Ref, first: jax.Array, shape: tuple[int, int], queries_axis: int) -> jax.Array:
    """Return whether queries attend to the keys from index `first` on, for bounds [queries] in shared memory."""
    begins, ends = (_along(_vector(x, queries_axis) - first, shape, queries_axis) for x in (begin, end))
    key = _indices(shape, 1 - queries_axis)
    return (key >= begins) & (key < ends)


def _along(x: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [axis])


def _copy(sources: Sequence[Ref], buffers: Sequence[Ref], barrier: Ref) -> None:
    for source, buffer in zip(sources, buffers, strict=True):
        plgpu.copy_gmem_to_smem(source, buffer, barrier)


def _write(x: jax.Array, buffer: Ref, target: Ref) -> None:
    """Write x to an array, through a buffer if it has the array's dtype."""
    if target.dtype != buffer.dtype:
        target[...] = x.astype(target.dtype)
        return
    buffer[...] = x.astype(target.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)


Loop = Callable[[Callable[..., Any], Any], Any]
"""Compute sums over tiles: `loop(add, sums)` with `sums = add(step, slot, sums)`."""


def _pipeline(
    steps: jax.Array,
    sources: Callable[[jax.Array], Sequence[Ref]],
    ring: Sequence[Ref],
    barriers: tuple[Ref, Ref],
    compute: Callable[[jax.Array, Loop], None],
) -> None:
    """Copy the `sources` of each step into a slot of `ring`, while two warpgroups run `compute(warpgroup, loop)`."""
    ready, free = barriers
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS["copies"], action="decrease")

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            slot = lax.rem(step, SLOTS)

            @pl.when(step >= SLOTS)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

            _copy(sources(step), [buffer.at[slot] for buffer in ring], ready.at[slot])

        @pl.loop(lax.max(steps - SLOTS, 0), steps)
        def _(step: jax.Array) -> None:
            plgpu.barrier_wait(free.at[lax.rem(step, SLOTS)])

    def loop(add: Callable[..., Any], sums: Any) -> Any:
        def one(step: jax.Array, sums: Any) -> Any:
            slot = lax.rem(step, SLOTS)
            plgpu.barrier_wait(ready.at[slot])
            sums = add(step, slot, sums)
            plgpu.barrier_arrive(free.at[slot])
            return sums

        return lax.fori_loop(0, steps, one, sums)

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS["computes"], action="increase")
        compute(warpgroup, loop)


def _place() -> tuple[jax.Array, ...]:
    return tuple(lax.axis_index(name) for name in ("sequence", "head", "tile"))


def _range_of(first: jax.Array, kernel: Kernel) -> jax.Array:
    """Return the index in `Tiles.bounds` of the range for the tile of keys that starts with key `first`."""
    return jnp.where(first < kernel.shared, 0, 2)


def _half(tile: jax.Array, warpgroup: jax.Array) -> Any:
    return pl.ds(tile * (2 * HALF) + warpgroup * HALF, HALF)


def _forward_kernel(*refs: Ref, kernel: Kernel) -> None:
    q, k, v, bounds, tiles, count, out, lse, q_own, bounds_own, k_ring, v_ring, own, *barriers = refs
    a, h, i = _place()
    steps, d, shape = count[a, i], q.shape[-1], (HALF, kernel.columns)

    def sources(step: jax.Array) -> Sequence[Ref]:
        at = pl.ds(tiles[a, i, step] * kernel.columns, kernel.columns)
        return k.at[a, h, at], v.at[a, h, at]

    def compute(warpgroup: jax.Array, loop: Loop) -> None:
        rows, q_half, bounds_half = _half(i, warpgroup), q_own.at[warpgroup], bounds_own.at[warpgroup]
        _copy([q.at[a, h, rows], bounds.at[a, :, rows]], [q_half, bounds_half], own.at[warpgroup])
        plgpu.barrier_wait(own.at[warpgroup])

        def add(step: jax.Array, slot: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            values, top, total = sums
            first = tiles[a, i, step] * kernel.columns
            at = _range_of(first, kernel)
            seen = _visible(bounds_half.at[at], bounds_half.at[at + 1], first, shape, 0)
            scores = jnp.where(seen, _product(q_half, k_ring.at[slot]) * (kernel.scale * LOG2_E), MASKED)
            higher = jnp.maximum(top, scores.max(axis=1))
            weights, rescale = jnp.exp2(scores - _along(higher, shape, 0)), jnp.exp2(top - higher)
            total = total * rescale + weights.sum(axis=1)
            return _add_product(values * _along(rescale, values.shape, 0), weights, v_ring.at[slot]), higher, total

        # The first `top` is larger than masked scores, so that the weights of keys that are not visible are 0.
        start = ((HALF, d), 0.0, WIDE), ((HALF,), MASKED / 2, ROWS), ((HALF,), 0.0, ROWS)
        values, top, total = loop(add, tuple(_in_layout(jnp.full(*x), layout) for *x, layout in start))
        some = total > 0
        total = jnp.where(some, total, 1.0)
        lse[a, h, rows] = jnp.where(some, (top + jnp.log2(total)) / LOG2_E, -MASKED)
        _write(values / _along(total, values.shape, 0), q_half, out.at[a, h, rows])

    _pipeline(steps, sources, (k_ring, v_ring), tuple(barriers), compute)


def _query_kernel(*refs: Ref, kernel: Kernel) -> None:
    q, k, v, bounds, tiles, count, g, lse, delta, dq, *refs = refs
    q_own, g_own, bounds_own, lse_own, delta_own, k_ring, v_ring, own, *barriers = refs
    a, h, i = _place()
    parts, shape = kernel.columns // HALF, (HALF, HALF)

    def first_key(step: jax.Array) -> jax.Array:
        return tiles[a, i, lax.div(step, parts)] * kernel.columns + lax.rem(step, parts) * HALF

    def sources(step: jax.Array) -> Sequence[Ref]:
        at = pl.ds(first_key(step), HALF)
        return k.at[a, h, at], v.at[a, h, at]

    def compute(warpgroup: jax.Array, loop: Loop) -> None:
        rows = _half(i, warpgroup)
        buffers = [x.at[warpgroup] for x in (q_own, g_own, bounds_own, lse_own, delta_own)]
        _copy(
            [*(x.at[a, h, rows] for x in (q, g)), bounds.at[a, :, rows], lse.at[a, h, rows], delta.at[a, h, rows]],
            buffers,
            own.at[warpgroup],
        )
        plgpu.barrier_wait(own.at[warpgroup])
        q_half, g_half, bounds_half, lse_half, delta_half = buffers

        def add(step: jax.Array, slot: jax.Array, total: jax.Array) -> jax.Array:
            first = first_key(step)
            at = _range_of(first, kernel)
            seen = _visible(bounds_half.at[at], bounds_half.at[at + 1], first, shape, 0)
            weights = _weights(_product(q_half, k_ring.at[slot]), lse_half, seen, kernel, 0)
            slope = _slope(weights, _product(g_half, v_ring.at[slot]), delta_half, 0)
            return _add_product(total, slope, k_ring.at[slot])

        total = loop(add, _zeros(q.shape[-1]))
        _write(total * kernel.scale, q_half, dq.at[a, h, rows])

    _pipeline(count[a, i] * parts, sources, (k_ring, v_ring), tuple(barriers), compute)


def _zeros(d: int) -> jax.Array:
    return _in_layout(jnp.zeros((HALF, d)), WIDE)


def _weights(scores: jax.Array, lse: Ref, seen: jax.Array, kernel: Kernel, queries_axis: int) -> jax.Array:
    shift = _vector(lse, queries_axis) * LOG2_E
    return jnp.where(seen, jnp.exp2(scores * (kernel.scale * LOG2_E) - _along(shift, scores.shape, queries_axis)), 0.0)


def _slope(weights: jax.Array, upstream: jax.Array, delta: Ref, queries_axis: int) -> jax.Array:
    """Compute the gradient with respect to the scores, from the gradient with respect to the weights."""
    return weights * (upstream - _along(_vector(delta, queries_axis), weights.shape, queries_axis))


def _key_kernel(*refs: Ref, kernel: Kernel, first: int, number: int, parts: int) -> None:
    q, k, v, bounds, tiles, count, g, lse, delta, dk, dv, *refs = refs
    k_own, v_own, q_ring, g_ring, lse_ring, delta_ring, bounds_ring, own, *barriers = refs
    a, h, place = _place()
    part, local = lax.div(place, number), lax.rem(place, number)
    i, halves, shape = first + local, kernel.rows // HALF, (HALF, HALF)
    begin, end = (lax.div(count[a, i] * x, parts) for x in (part, part + 1))
    pair = pl.ds(_range_of(i * kernel.columns, kernel), 2)

    def sources(step: jax.Array) -> Sequence[Ref]:
        at = pl.ds(tiles[a, i, begin + lax.div(step, halves)] * kernel.rows + lax.rem(step, halves) * HALF, HALF)
        return *(x.at[a, h, at] for x in (q, g, lse, delta)), bounds.at[a, pair, at]

    def compute(warpgroup: jax.Array, loop: Loop) -> None:
        columns, k_half, v_half = _half(i, warpgroup), k_own.at[warpgroup], v_own.at[warpgroup]
        _copy([x.at[a, h, columns] for x in (k, v)], [k_half, v_half], own.at[warpgroup])
        plgpu.barrier_wait(own.at[warpgroup])
        first_key = i * kernel.columns + warpgroup * HALF

        def add(step: jax.Array, slot: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            queries, upstream = q_ring.at[slot], g_ring.at[slot]
            seen = _visible(bounds_ring.at[slot, 0], bounds_ring.at[slot, 1], first_key, shape, 1)
            weights = _weights(_product(k_half, queries), lse_ring.at[slot], seen, kernel, 1)
            total_v = _add_product(sums[1], weights, upstream)
            slope = _slope(weights, _product(v_half, upstream), delta_ring.at[slot], 1)
            return _add_product(sums[0], slope, queries), total_v

        total_k, total_v = loop(add, (_zeros(k.shape[-1]),) * 2)
        rows = _half(local, warpgroup)
        _write(total_k * kernel.scale, k_half, dk.at[part, a, h, rows])
        _write(total_v, v_half, dv.at[part, a, h, rows])

    _pipeline(
        (end - begin) * halves, sources, (q_ring, g_ring, lse_ring, delta_ring, bounds_ring), tuple(barriers), compute
    )


def _call(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    own: Sequence[jax.ShapeDtypeStruct],
    ring: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, int, int],
) -> Sequence[jax.Array]:
    """Run a kernel for each sequence, head and tile, with `own` buffers per warpgroup and a `ring` of buffers."""

    def buffer(x: jax.ShapeDtypeStruct, count: int) -> Any:
        # Matrices are laid out for the tensor cores: in rows of 128 bytes, whose parts are permuted.
        matrix = (plgpu.TilingTransform((8, 128 // x.dtype.itemsize)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((count, *x.shape), x.dtype, transforms=matrix if x.dtype.itemsize == 2 else ())

    barriers = (
        plgpu.Barrier(num_arrivals=len(own), num_barriers=2),
        plgpu.Barrier(num_arrivals=len(ring), num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
    )
    return plgpu.kernel(
        body,
        out_type=list(outputs),
        scratch_types=[*(buffer(x, 2) for x in own), *(buffer(x, SLOTS) for x in ring), *barriers],
        grid=grid,
        grid_names=("sequence", "head", "tile"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs)


def _buffers(rows: int, like: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of a tile of a matrix [rows, d], of bounds and of a float32 vector."""
    matrix = jax.ShapeDtypeStruct((rows, like.shape[-1]), like.dtype)
    return matrix, jax.ShapeDtypeStruct((4, rows), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)


def forward(kernel: Kernel, x: Inputs) -> tuple[jax.Array, jax.Array]:
    """Compute outputs [A, H, N, d] and log-sum-exps [A, H, N]."""
    half, bounds, _ = _buffers(HALF, x.q)
    keys = _buffers(kernel.columns, x.k)[0]
    outputs = [jax.ShapeDtypeStruct(x.q.shape, x.v.dtype), jax.ShapeDtypeStruct(x.q.shape[:3], jnp.float32)]
    inputs = x.q, x.k, x.v, x.tiles.bounds, x.tiles.keys, x.tiles.key_count
    body, grid = functools.partial(_forward_kernel, kernel=kernel), (*x.q.shape[:2], x.tiles.keys.shape[1])
    out, lse = _call(body, inputs, outputs, [half, bounds], [keys, keys], grid)
    return out, lse


def backward(
    kernel: Kernel, x: Inputs, g: jax.Array, lse: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of q, k and v."""
    half, bounds, vector = _buffers(HALF, x.q)
    arrays, more = (x.q, x.k, x.v, x.tiles.bounds), (g, lse, delta)
    body, grid = functools.partial(_query_kernel, kernel=kernel), (*x.q.shape[:2], x.tiles.keys.shape[1])
    inputs = *arrays, x.tiles.keys, x.tiles.key_count, *more
    outputs = [jax.ShapeDtypeStruct(x.q.shape, x.q.dtype)]
    (dq,) = _call(body, inputs, outputs, [half, half, bounds, vector, vector], [half, half], grid)

    def of_keys(first: int, number: int, parts: int) -> Sequence[jax.Array]:
        body = functools.partial(_key_kernel, kernel=kernel, first=first, number=number, parts=parts)
        inputs = *arrays, x.tiles.queries, x.tiles.query_count, *more
        shape = (parts, *x.k.shape[:2], number * kernel.columns, x.k.shape[3])
        outputs = [jax.ShapeDtypeStruct(shape, x.k.dtype if parts == 1 else jnp.float32)] * 2
        pair = jax.ShapeDtypeStruct((2, HALF), jnp.int32)
        grid = (*x.k.shape[:2], number * parts)
        sums = _call(body, inputs, outputs, [half, half], [half, half, vector, vector, pair], grid)
        return [x[0] for x in sums] if parts == 1 else sums

    dk, dv = over_key_tiles(of_keys, kernel, x)
    return dq, dk, dv
