"""Attention kernel for decode steps: each new token attends to its prompt and to its completion so far.

XLA runs more than a dozen programs per layer, stores scores, maxima, weights and sums in memory, and reads all slots of
the cache. Here, one program per completion and key head normalizes and rotates the token's queries and key, writes its
key and value to the cache, and iterates over the tiles of filled slots:

```
    keys of the prompt    keys of the completion (ring buffer)
    │ ■ │ ■ │ ■ │ · │     │ · │ ■ │ ■ │ ■ │ · │ · │       ■ read   · skipped
                 length      start     slot
```

The token's own score starts the sums, so that no program reads what it has just written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from grpo_jax.models.attention import PromptKeys, dividing_axes
from grpo_jax.models.context import KeysValues
from grpo_jax.models.tiles import (
    LEAST_SIDE,
    Kernel,
    Ref,
    Sums,
    add_tile,
    cap_scores,
    compiler_params,
    has_triton,
    start_of_sums,
)

TILE_BYTES = 8192
"""Bytes per tile of keys. Four programs with prefetched tiles fit on a multiprocessor."""

FEWEST_PROGRAMS = 96
"""Minimum number of programs (completions times key heads) per device. Fewer programs would leave a GPU idle."""


class Preparation(NamedTuple):
    """Norm and rotation of queries and keys, which the kernel applies to projections."""

    scales: tuple[jax.Array, jax.Array] | None = None  # [d], of the norms of queries and keys; None: no norms
    table: tuple[jax.Array, jax.Array] | None = None  # a `rope_table` for one token; None: no rotation
    eps: float = 0.0  # see `layers.RMSNorm`, also for `offset`
    offset: float = 0.0
    pairs: bool = False  # see `rope.rotate`


def has_step_kernel(implementation: str, *, head_dim: int, keys: tuple[int, ...], programs: int) -> bool:
    """Return whether a kernel supports the decode step. `keys` contains the slot counts of cache and prompts."""
    if not has_triton(implementation) or min(keys) < LEAST_SIDE:
        return False
    whole = LEAST_SIDE <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    return whole and (programs >= FEWEST_PROGRAMS or implementation == "interpreted")


def step_attention(
    q: jax.Array,
    new: KeysValues | None,
    cache: KeysValues,
    prefix: PromptKeys,
    preparation: Preparation,
    *,
    index: jax.Array | int,
    start: jax.Array | None,
    write: jax.Array | None = None,
    kernel: Kernel,
    mesh: Mesh | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KeysValues]:
    """Write one token per completion to the cache, and compute its `attention.group_attention`.

    Differentiation is not supported.

    Args:
      q: the token's queries [B, G, H_kv, R, d].
      new: its key and value [B, G, H_kv, d], or None if the cache already contains them.
      cache: keys [B, H_kv, G, d, S] and values [B, H_kv, G, S, d].
      prefix: see `attention.group_attention`, also for `index`, `start` and `sinks`.
      preparation: norm and rotation to apply to q and the new key.
      write: [B, G] bool, False for completions whose cache does not change. Their outputs are not used.
      kernel: implementation, scale, window and soft cap, but not the tile sizes.
      mesh: B and H_kv are sharded over its devices, as in `attention.tiled_attention`.

    Returns:
      (outputs [B, G, H_kv, R, d], cache).
    """
    (b, g, h, _, d), (pk, pv, lengths) = q.shape, prefix
    slots, p = cache[1].shape[3], pv.shape[2]
    chex.assert_shape(cache, [(b, h, g, d, slots), (b, h, g, slots, d)])
    chex.assert_shape([pk, pv, lengths], [(b, h, d, p), (b, h, p, d), (b,)])
    slot = jnp.broadcast_to(jnp.reshape(index, (-1, 1)), (b, g))
    first = jnp.zeros((b, g), jnp.int32) if start is None else jnp.broadcast_to(start.reshape(b, -1), (b, g))
    places = slot, first, jnp.ones((b, g), bool) if write is None else write
    half = 0 if preparation.table is None else preparation.table[0].shape[-1]
    static = preparation._replace(scales=None, table=None)
    one = functools.partial(_of_device, preparation=static, half=half, kernel=kernel)
    given = q, new, cache, prefix, places, _factors_by_channel(preparation, b, d), preparation.scales, sinks
    if mesh is not None:
        by_prompt, by_head = dividing_axes(b, mesh, "data", "fsdp"), dividing_axes(h, mesh, "tensor")
        rows, each = PartitionSpec(by_prompt), PartitionSpec(by_prompt, by_head)
        token = PartitionSpec(by_prompt, None, by_head)
        specs = token, token, each, (each, each, rows), rows, rows, PartitionSpec(), PartitionSpec(by_head)
        one = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=(token, each), check_vma=False)
    return one(*given)


def _factors_by_channel(preparation: Preparation, b: int, d: int) -> tuple[jax.Array, jax.Array] | None:
    """Return factors [B, G or 1, d] on a head's channels and on their partners, which is 0 without a rotation."""
    if preparation.table is None:
        return None
    tables = (x.swapaxes(-1, -2) if preparation.pairs else x for x in preparation.table)
    own, other = (jnp.broadcast_to(x.reshape((*x.shape[:2], -1)), (b, x.shape[1], x[0, 0].size)) for x in tables)
    rest = ((0, 0), (0, 0), (0, d - own.shape[-1]))
    return jnp.pad(own, rest, constant_values=1), jnp.pad(other, rest)


def _of_device(
    q: jax.Array,
    new: KeysValues | None,
    cache: KeysValues,
    prefix: PromptKeys,
    places: tuple[jax.Array, jax.Array, jax.Array],
    factors: tuple[jax.Array, jax.Array] | None,
    scales: tuple[jax.Array, jax.Array] | None,
    sinks: jax.Array | None,
    *,
    preparation: Preparation,
    half: int,
    kernel: Kernel,
) -> tuple[jax.Array, KeysValues]:
    """Compute `step_attention` on one device. `places` are slot, first and write, each [B, G].

    `factors` replace the table in `preparation`, which rotates `half` pairs of channels, and `scales` its scales.
    """
    (b, g, h, r, d), (pk, pv, lengths), (slot, first, write) = q.shape, prefix, places
    slots, p = cache[1].shape[3], pv.shape[2]
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
    place = jnp.stack([slot % slots, position, length, oldest, newest, prompt, ends, write], axis=-1).astype(jnp.int32)

    # XLA computes queries, key and value with one product. As blocks of its result, they are not copied.
    token = jnp.concatenate([q.reshape(b, g, h * r, d), *(new or ())], axis=2)
    inputs = {"place": place, "q": token, "prompt_keys": pk, "prompt_values": pv}
    at = {
        "place": pl.BlockSpec((None, None, 8), lambda j, i: (i // h, j, 0)),
        "q": pl.BlockSpec((None, None, r, d), lambda j, i: (i // h, j, i % h, 0)),
        "prompt_keys": pl.BlockSpec((None, None, d, p), lambda j, i: (i // h, i % h, 0, 0)),
        "prompt_values": pl.BlockSpec((None, None, p, d), lambda j, i: (i // h, i % h, 0, 0)),
    }
    if new is not None:
        inputs |= {"key": token, "value": token}
        at["key"] = pl.BlockSpec((None, None, None, d), lambda j, i: (i // h, j, h * r + i % h, 0))
        at["value"] = pl.BlockSpec((None, None, None, d), lambda j, i: (i // h, j, h * r + h + i % h, 0))
    if factors is not None:
        inputs |= {"own": factors[0], "other": factors[1]}
        last = factors[0].shape[1] - 1  # G − 1, or 0 if the completions of a prompt share the factors
        of_token = pl.BlockSpec((None, None, d), lambda j, i: (i // h, jnp.minimum(j, last), 0))
        at |= {"own": of_token, "other": of_token}
    if scales is not None:
        inputs |= {"q_scale": scales[0], "k_scale": scales[1]}
        at |= dict.fromkeys(("q_scale", "k_scale"), pl.BlockSpec((d,), lambda j, i: (0,)))
    if sinks is not None:
        inputs["sinks"] = jnp.pad(sinks.astype(jnp.float32), ((0, 0), (0, _rows(r) - r)))
        at["sinks"] = pl.BlockSpec((None, _rows(r)), lambda j, i: (i % h, 0))
    of_cache = [pl.BlockSpec((None, None, None, *x.shape[3:]), lambda j, i: (i // h, i % h, j, 0, 0)) for x in cache]
    # In the order of the output projection's input, so that the result is not transposed.
    of_out = pl.BlockSpec((None, None, None, r, d), lambda j, i: (i // h, j, i % h, 0, 0))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *(() if new is None else cache))]
    out, *written = pl.pallas_call(
        functools.partial(_step_kernel, preparation=preparation, half=half, kernel=kernel, sizes=sizes),
        # In this order, a group's programs run at about the same time, so the keys of their prompt stay in the cache.
        grid=(g, b * h),
        in_specs=[*of_cache, at],
        out_specs=[of_out, *of_cache][: len(shapes)],
        out_shape=shapes,
        input_output_aliases={} if new is None else {0: 1, 1: 2},
        interpret=kernel.implementation == "interpreted",
        name="step_attention",
        compiler_params=compiler_params(kernel.implementation, warps=4, stages=3),
    )(cache[0], cache[1], inputs)
    return out, cache if new is None else (written[0], written[1])


def _rows(r: int) -> int:
    """Return the number of rows for R queries in a kernel, a power of two."""
    return max(LEAST_SIDE, 1 << (r - 1).bit_length())


def _step_kernel(
    keys: Ref,
    values: Ref,
    given: dict[str, Ref],
    out: Ref,
    *written: Ref,
    preparation: Preparation,
    half: int,
    kernel: Kernel,
    sizes: tuple[int, int],
) -> None:
    from jax.experimental.pallas.triton import load, store  # may be missing, see `tiles.implementation`

    place, (r, d), slots = given["place"], out.shape, values.shape[0]
    slot, position, length, write = place[0], place[1], place[2], place[7]
    shape = rows, d = _rows(r), d
    row, column = jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    real, channel = row < r, jnp.arange(d)  # rows from R on are padding
    prepare = functools.partial(_prepare, given=given, preparation=preparation, half=half)

    def queries(channel: jax.Array) -> jax.Array:
        return load(given["q"].at[row, jnp.broadcast_to(channel[None], shape)], mask=real, other=0.0)

    q = prepare(queries, scale="q_scale")

    def add(sums: Sums, keys: Ref, values: Ref, at: jax.Array, length: int, seen: jax.Array) -> Sums:
        visible = jnp.broadcast_to(seen[None], (rows, length))
        span = pl.ds(at, length)
        return add_tile(sums, q, keys[:, span], values[span, :], visible, kernel, keys_axis=0)

    def add_prompt(j: jax.Array, sums: Sums) -> Sums:
        at, number = _begin(j, sizes[1], given["prompt_values"].shape[0])
        seen = (number < length) & (number >= j * sizes[1])
        if kernel.window is not None:
            seen &= length + position - number < kernel.window
        return add(sums, given["prompt_keys"], given["prompt_values"], at, sizes[1], seen)

    def add_own(j: jax.Array, sums: Sums) -> Sums:
        at, number = _begin(j, sizes[0], slots)
        distance = slot - number
        distance = jnp.where(distance < 0, distance + slots, distance)
        first = 1 if written else 0  # the sums already contain a new token
        seen = (distance >= first) & (distance <= position) & (number >= j * sizes[0])
        if kernel.window is not None:
            seen &= distance < kernel.window
        return add(sums, keys, values, at, sizes[0], seen)

    sums = start_of_sums(shape)
    if written:
        key = prepare(lambda channel: load(given["key"].at[channel]), scale="k_scale").astype(keys.dtype)
        value = given["value"][...].astype(values.dtype)
        at, kept = jnp.full((d,), slot), jnp.broadcast_to(write > 0, (d,))
        store(written[0].at[channel, at], key, mask=kept)
        store(written[1].at[at, channel], value, mask=kept)
        product = (q.astype(jnp.float32) * key[None].astype(jnp.float32)).sum(axis=1)
        whole = jnp.broadcast_to(value[None].astype(jnp.float32), shape)
        sums = whole, cap_scores(product, kernel), jnp.ones(rows)
    sums = jax.lax.fori_loop(place[5], place[6], add_prompt, sums)
    summed, top, total = jax.lax.fori_loop(place[3], place[4], add_own, sums)
    if "sinks" in given:
        sinks = given["sinks"][...]
        higher = jnp.maximum(top, sinks)
        summed, total = summed * jnp.exp(top - higher)[:, None], total * jnp.exp(top - higher)
        total += jnp.exp(sinks - higher)
    store(out.at[row, column], (summed / total[:, None]).astype(out.dtype), mask=real)


def _prepare(
    read: Callable[[jax.Array], jax.Array], *, given: dict[str, Ref], preparation: Preparation, half: int, scale: str
) -> jax.Array:
    """Normalize and rotate [..., d], of which `read` returns the given channels, with a norm's scale by its name."""
    from jax.experimental.pallas.triton import load

    channel = jnp.arange(given["q"].shape[-1])
    x = read(channel)
    dtype, square = x.dtype, jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)

    def normalized(x: jax.Array, channel: jax.Array) -> jax.Array:
        if scale not in given:
            return x.astype(jnp.float32)
        factor = load(given[scale].at[channel]).astype(jnp.float32) + preparation.offset
        x = x.astype(jnp.float32) * jax.lax.rsqrt(square + preparation.eps)
        return (x * factor.reshape((*(1,) * (x.ndim - 1), -1))).astype(dtype).astype(jnp.float32)

    if "own" not in given:
        return normalized(x, channel).astype(dtype)
    partner = channel + 1 - 2 * (channel % 2) if preparation.pairs else (channel + half) % (2 * half)
    partner = jnp.where(channel < 2 * half, partner, channel)
    own, other = (given[name][...].reshape((*(1,) * (x.ndim - 1), -1)) for name in ("own", "other"))
    return (normalized(x, channel) * own + normalized(read(partner), partner) * other).astype(dtype)


def _begin(j: jax.Array, size: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """Return the first slot and all slots of tile j. The last tile ends at the last slot."""
    at = j * size if slots % size == 0 else jnp.minimum(j * size, slots - size)
    return at, at + jnp.arange(size)


def _tile(slots: int, most: int) -> int:
    """Return the number of keys per tile, a power of two that divides the number of slots if possible."""
    divisor = min(most, slots & -slots)
    return divisor if divisor >= 32 else min(most, 1 << slots.bit_length() - 1)
