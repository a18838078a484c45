"""Attention kernel for decode steps: each new token attends to its prompt and to its completion so far.

XLA runs a dozen programs per layer, stores scores, maxima, weights and sums in memory, and reads all slots of the
cache. Here, one program per completion and key head iterates over the tiles of filled slots:

```
    keys of the prompt    keys of the completion (ring buffer)
    │ ■ │ ■ │ ■ │ · │     │ · │ ■ │ ■ │ ■ │ · │ · │       ■ read   · skipped
                 length      start     slot
```

The cache already contains the key and value of the new token.
"""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from grpo_jax.models.attention import dividing_axes
from grpo_jax.models.tiles import LEAST_SIDE, Kernel, Ref, Sums, add_tile, compiler_params, has_triton, start_of_sums

TILE_BYTES = 8192
"""Bytes per tile of keys. Four programs with prefetched tiles fit on a multiprocessor."""

FEWEST_PROGRAMS = 96
"""Minimum number of programs (completions times key heads) per device. Fewer programs would leave a GPU idle."""


def has_step_kernel(implementation: str, *, head_dim: int, keys: tuple[int, ...], programs: int) -> bool:
    """Return whether a kernel supports the decode step. `keys` contains the slot counts of cache and prompts."""
    if not has_triton(implementation) or min(keys) < LEAST_SIDE:
        return False
    whole = LEAST_SIDE <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    return whole and (programs >= FEWEST_PROGRAMS or implementation == "interpreted")


def step_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: tuple[jax.Array, jax.Array, jax.Array],
    *,
    index: jax.Array | int,
    start: jax.Array | None,
    kernel: Kernel,
    mesh: Mesh | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute `attention.group_attention` for one token per completion. Differentiation is not supported.

    q is [B, H_kv, G, 1, R, d], k [B, H_kv, G, d, S], v [B, H_kv, G, S, d], and `prefix` is keys [B, H_kv, d, P], values
    [B, H_kv, P, d] and lengths [B]. `kernel` provides the implementation, scale, window and soft cap, but not the tile
    sizes. With a mesh, the first two axes are sharded over its devices, as in `attention.tiled_attention`.
    """
    b, h, g, _, r, d = q.shape
    pk, pv, lengths = prefix
    slots, p = v.shape[3], pv.shape[2]
    chex.assert_shape([q, k, v], [(b, h, g, 1, r, d), (b, h, g, d, slots), (b, h, g, slots, d)])
    chex.assert_shape([pk, pv, lengths], [(b, h, d, p), (b, h, p, d), (b,)])
    slot = jnp.broadcast_to(jnp.reshape(index, (-1, 1)), (b, g))
    first = jnp.zeros((b, g), jnp.int32) if start is None else jnp.broadcast_to(start.reshape(b, -1), (b, g))
    one = functools.partial(_of_device, kernel=kernel)
    if mesh is None:
        return one(q, k, v, prefix, slot, first, sinks)
    by_prompt, by_head = dividing_axes(b, mesh, "data", "fsdp"), dividing_axes(h, mesh, "tensor")
    each, rows = PartitionSpec(by_prompt, by_head), PartitionSpec(by_prompt)
    specs = (each, each, each, (each, each, rows), rows, rows, PartitionSpec(by_head))
    local = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=each, check_vma=False)
    return local(q, k, v, prefix, slot, first, sinks)


def _of_device(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: tuple[jax.Array, jax.Array, jax.Array],
    slot: jax.Array,
    first: jax.Array,
    sinks: jax.Array | None,
    *,
    kernel: Kernel,
) -> jax.Array:
    """Compute `step_attention` on one device. `slot` and `first` are [B, G]."""
    (b, h, g, _, r, d), (pk, pv, lengths) = q.shape, prefix
    slots, p = v.shape[3], pv.shape[2]
    rows = max(LEAST_SIDE, 1 << (r - 1).bit_length())
    most = max(LEAST_SIDE, TILE_BYTES // (d * q.dtype.itemsize))
    sizes = _tile(slots, most), _tile(p, most)

    position = slot - first
    window = 2**30 if kernel.window is None else kernel.window
    # Tiles [oldest, newest) contain the visible completion keys, and tiles [prompt, ends) the visible prompt keys.
    whole = slot >= slots  # the ring buffer is full, and all slots are read
    oldest = jnp.where(whole, 0, jnp.maximum(first, slot - window + 1)) // sizes[0]
    newest = jnp.where(whole, -(-slots // sizes[0]), slot // sizes[0] + 1)
    length = jnp.broadcast_to(lengths[:, None], (b, g))
    prompt = jnp.maximum(0, length + position - window + 1) // sizes[1]
    ends = -(-length // sizes[1])
    # The eighth value is unused; it pads the array to a power of two, as kernels require.
    place = jnp.stack([slot % slots, position, length, oldest, newest, prompt, ends, ends], axis=-1).astype(jnp.int32)

    q = jnp.pad(q[:, :, :, 0], ((0, 0), (0, 0), (0, 0), (0, rows - r), (0, 0)))
    inputs = [q, k, v, pk, pv, place]
    own, shared = [(rows, d), (d, slots), (slots, d)], [(d, p), (p, d)]
    at = [pl.BlockSpec((None, None, None, *tile), lambda j, i: (i // h, i % h, j, 0, 0)) for tile in own]
    at += [pl.BlockSpec((None, None, *tile), lambda j, i: (i // h, i % h, 0, 0)) for tile in shared]
    at.append(pl.BlockSpec((None, None, place.shape[-1]), lambda j, i: (i // h, j, 0)))
    if sinks is not None:
        inputs.append(jnp.pad(sinks.astype(jnp.float32), ((0, 0), (0, rows - r))))
        at.append(pl.BlockSpec((None, rows), lambda j, i: (i % h, 0)))
    out = pl.pallas_call(
        functools.partial(_step_kernel, kernel=kernel, slots=slots, prompt_slots=p, sizes=sizes),
        # In this order, a group's programs run at about the same time, so the keys of their prompt stay in the cache.
        grid=(g, b * h),
        in_specs=at,
        # In the order of the output projection's input, so that the result is not transposed.
        out_specs=pl.BlockSpec((None, None, None, r, d), lambda j, i: (i // h, j, i % h, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((b, g, h, r, d), v.dtype),
        interpret=kernel.implementation == "interpreted",
        name="step_attention",
        compiler_params=compiler_params(kernel.implementation, warps=4, stages=3),
    )(*inputs)
    return out.swapaxes(1, 2)[:, :, :, None]


def _step_kernel(*refs: Ref, kernel: Kernel, slots: int, prompt_slots: int, sizes: tuple[int, int]) -> None:
    from jax.experimental.pallas.triton import store  # may be missing, see `tiles.implementation`

    q, k, v, pk, pv, place, *sinks, out = refs
    own, (slot, position, length) = q[...], (place[0], place[1], place[2])
    rows, size = own.shape[0], sizes[0]

    def add(sums: Sums, keys: Ref, values: Ref, at: jax.Array, length: int, seen: jax.Array) -> Sums:
        visible = jnp.broadcast_to(seen[None], (rows, length))
        span = pl.ds(at, length)
        return add_tile(sums, own, keys[:, span], values[span, :], visible, kernel, keys_axis=0)

    def add_prompt(j: jax.Array, sums: Sums) -> Sums:
        at, number = _begin(j, sizes[1], prompt_slots)
        seen = (number < length) & (number >= j * sizes[1])
        if kernel.window is not None:
            seen &= length + position - number < kernel.window
        return add(sums, pk, pv, at, sizes[1], seen)

    def add_own(j: jax.Array, sums: Sums) -> Sums:
        at, number = _begin(j, size, slots)
        distance = slot - number
        distance = jnp.where(distance < 0, distance + slots, distance)
        seen = (distance <= position) & (number >= j * size)
        if kernel.window is not None:
            seen &= distance < kernel.window
        return add(sums, k, v, at, size, seen)

    sums = start_of_sums(own.shape)
    sums = jax.lax.fori_loop(place[5], place[6], add_prompt, sums)
    values, top, total = jax.lax.fori_loop(place[3], place[4], add_own, sums)
    if sinks:
        higher = jnp.maximum(top, sinks[0][...])
        values, total = values * jnp.exp(top - higher)[:, None], total * jnp.exp(top - higher)
        total += jnp.exp(sinks[0][...] - higher)
    row, column = jnp.arange(rows)[:, None], jnp.arange(own.shape[1])[None]
    real = jnp.broadcast_to(row < out.shape[0], own.shape)  # the other rows are padding, and not in `out`
    store(out.at[row, column], (values / total[:, None]).astype(out.dtype), mask=real)


def _begin(j: jax.Array, size: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """Return the first slot and all slots of tile j. The last tile ends at the last slot."""
    at = j * size if slots % size == 0 else jnp.minimum(j * size, slots - size)
    return at, at + jnp.arange(size)


def _tile(slots: int, most: int) -> int:
    """Return the number of keys per tile, a power of two that divides the number of slots if possible."""
    divisor = min(most, slots & -slots)
    return divisor if divisor >= 32 else min(most, 1 << slots.bit_length() - 1)
