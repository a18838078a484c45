"""Attention kernel for decode steps: each new token attends to its prompt and to its completion so far.

One program per completion and key head normalizes and rotates the token's queries and key, writes the key and value to
the cache, and iterates over the tiles of filled slots. The sums start with the token's own score, so that no program
reads what it has just written.
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
from grpo_jax.models.attention_tiles import (
    MIN_TILE_SIDE,
    Kernel,
    Ref,
    Sums,
    add_tile,
    cap_scores,
    compiler_params,
    has_triton,
    initial_sums,
)
from grpo_jax.models.context import KeysValues

TILE_BYTES = 8192
"""Size of a tile of keys in bytes. At this size, four programs and their prefetched tiles fit on a multiprocessor."""

MIN_PROGRAMS = 96
"""Minimum number of programs (completions times key heads) per device. Fewer would leave part of a GPU idle."""


class NormAndRope(NamedTuple):
    """Norm and rotation that the kernel applies to the projected queries and keys."""

    scales: tuple[jax.Array, jax.Array] | None = None  # scales [d] of the query and key norms; None disables them
    table: tuple[jax.Array, jax.Array] | None = None  # `rope_table` for one token; None disables the rotation
    eps: float = 0.0  # see `layers.RMSNorm`
    offset: float = 0.0  # see `layers.RMSNorm`
    pairs: bool = False  # see `rope.rotate`


def has_step_kernel(implementation: str, *, head_dim: int, keys: tuple[int, ...], programs: int) -> bool:
    """Return whether to use the kernel for a decode step.

    `keys` contains the numbers of slots in the cache and in the prompts. `programs` is the number of programs per
    device, one for each completion and key head.
    """
    if not has_triton(implementation) or min(keys) < MIN_TILE_SIDE:
        return False
    supported = MIN_TILE_SIDE <= head_dim <= 256 and head_dim & (head_dim - 1) == 0
    return supported and (programs >= MIN_PROGRAMS or implementation == "interpreted")


def step_attention(
    q: jax.Array,
    new: KeysValues | None,
    cache: KeysValues,
    prefix: PromptKeys,
    norm_and_rope: NormAndRope,
    *,
    index: jax.Array | int,
    start: jax.Array | None,
    write: jax.Array | None = None,
    kernel: Kernel,
    mesh: Mesh | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KeysValues]:
    """Compute `attention.group_attention` for one token per completion, after writing its key and value to the cache.

    Returns the outputs [B, G, H_kv, R, d] and the updated cache. Differentiation is not supported.

    Args:
      q: the tokens' queries [B, G, H_kv, R, d]. R query heads share a key head.
      new: the tokens' keys and values [B, G, H_kv, d], or None if the cache already contains them.
      cache: keys [B, H_kv, G, d, S] and values [B, H_kv, G, S, d].
      prefix: see `attention.group_attention`, also for `index`, `start` and `sinks`.
      norm_and_rope: norm and rotation to apply to queries and new keys.
      write: [B, G] bool, False where the cache must not change and the output is not used. Defaults to True.
      kernel: settings with the implementation, scale, window and soft cap. The tile sizes are not used.
      mesh: mesh that B and H_kv are sharded over, as in `attention.tiled_attention`, or None.
    """
    (b, g, h, _, d), (pk, pv, lengths) = q.shape, prefix
    slots, p = cache[1].shape[3], pv.shape[2]
    chex.assert_shape(cache, [(b, h, g, d, slots), (b, h, g, slots, d)])
    chex.assert_shape([pk, pv, lengths], [(b, h, d, p), (b, h, p, d), (b,)])
    slot = jnp.broadcast_to(jnp.reshape(index, (-1, 1)), (b, g))
    first = jnp.zeros((b, g), jnp.int32) if start is None else jnp.broadcast_to(start, (b, g))
    ring = slot, first, jnp.ones((b, g), bool) if write is None else write
    half = 0 if norm_and_rope.table is None else norm_and_rope.table[0].shape[-1]
    static = norm_and_rope._replace(scales=None, table=None)
    local = functools.partial(_step_attention_on_device, norm_and_rope=static, half=half, kernel=kernel)
    arguments = q, new, cache, prefix, ring, _rope_by_channel(norm_and_rope, b, d), norm_and_rope.scales, sinks
    if mesh is not None:
        by_prompt, by_head = dividing_axes(b, mesh, "data", "fsdp"), dividing_axes(h, mesh, "tensor")
        rows, each = PartitionSpec(by_prompt), PartitionSpec(by_prompt, by_head)
        token = PartitionSpec(by_prompt, None, by_head)
        specs = token, token, each, (each, each, rows), rows, rows, PartitionSpec(), PartitionSpec(by_head)
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(token, each), check_vma=False)
    return local(*arguments)


def _rope_by_channel(norm_and_rope: NormAndRope, b: int, d: int) -> tuple[jax.Array, jax.Array] | None:
    """Expand the table to cos and ±sin per channel, each [B, G or 1, d], with 1 and 0 for channels without rotation."""
    if norm_and_rope.table is None:
        return None
    tables = (x.swapaxes(-1, -2) if norm_and_rope.pairs else x for x in norm_and_rope.table)
    cos, sin = (jnp.broadcast_to(x.reshape((*x.shape[:2], -1)), (b, x.shape[1], x[0, 0].size)) for x in tables)
    rest = ((0, 0), (0, 0), (0, d - cos.shape[-1]))
    return jnp.pad(cos, rest, constant_values=1), jnp.pad(sin, rest)


def _step_attention_on_device(
    q: jax.Array,
    new: KeysValues | None,
    cache: KeysValues,
    prefix: PromptKeys,
    ring: tuple[jax.Array, jax.Array, jax.Array],
    factors: tuple[jax.Array, jax.Array] | None,
    scales: tuple[jax.Array, jax.Array] | None,
    sinks: jax.Array | None,
    *,
    norm_and_rope: NormAndRope,
    half: int,
    kernel: Kernel,
) -> tuple[jax.Array, KeysValues]:
    """Compute `step_attention` on one device. `ring` contains slot, first and write, each [B, G].

    `factors` and `scales` replace the table and scales of `norm_and_rope`. `half` is the number of rotated pairs.
    """
    (b, g, h, r, d), (pk, pv, lengths), (slot, first, write) = q.shape, prefix, ring
    slots, p = cache[1].shape[3], pv.shape[2]
    max_keys = max(MIN_TILE_SIDE, TILE_BYTES // (d * q.dtype.itemsize))
    sizes = _tile_size(slots, max_keys), _tile_size(p, max_keys)

    position = slot - first
    window = 2**30 if kernel.window is None else kernel.window
    # Completion tiles [first_tile, end_tile) and prompt tiles [first_prompt_tile, end_prompt_tile) have visible keys.
    full = slot >= slots  # whether the ring buffer is full, in which case all slots are read
    first_tile = jnp.where(full, 0, jnp.maximum(first, slot - window + 1)) // sizes[0]
    end_tile = jnp.where(full, -(-slots // sizes[0]), slot // sizes[0] + 1)
    length = jnp.broadcast_to(lengths[:, None], (b, g))
    first_prompt_tile = jnp.maximum(0, length + position - window + 1) // sizes[1]
    end_prompt_tile = -(-length // sizes[1])
    scalars = [slot % slots, position, length, first_tile, end_tile, first_prompt_tile, end_prompt_tile, write]

    # XLA computes queries, key and value with one product. The kernel reads blocks of the product without a copy.
    token = jnp.concatenate([q.reshape(b, g, h * r, d), *(new or ())], axis=2)
    inputs = {"scalars": jnp.stack(scalars, -1).astype(jnp.int32), "q": token, "prompt_keys": pk, "prompt_values": pv}
    in_specs = {
        "scalars": pl.BlockSpec((None, None, 8), lambda j, i: (i // h, j, 0)),
        "q": pl.BlockSpec((None, None, r, d), lambda j, i: (i // h, j, i % h, 0)),
        "prompt_keys": pl.BlockSpec((None, None, d, p), lambda j, i: (i // h, i % h, 0, 0)),
        "prompt_values": pl.BlockSpec((None, None, p, d), lambda j, i: (i // h, i % h, 0, 0)),
    }
    if new is not None:
        inputs |= {"key": token, "value": token}
        in_specs["key"] = pl.BlockSpec((None, None, None, d), lambda j, i: (i // h, j, h * r + i % h, 0))
        in_specs["value"] = pl.BlockSpec((None, None, None, d), lambda j, i: (i // h, j, h * r + h + i % h, 0))
    if factors is not None:
        inputs |= {"cos": factors[0], "sin": factors[1]}
        last = factors[0].shape[1] - 1  # G − 1, or 0 if the completions of a prompt share the factors
        factor_spec = pl.BlockSpec((None, None, d), lambda j, i: (i // h, jnp.minimum(j, last), 0))
        in_specs |= {"cos": factor_spec, "sin": factor_spec}
    if scales is not None:
        inputs |= {"q_scale": scales[0], "k_scale": scales[1]}
        in_specs |= dict.fromkeys(("q_scale", "k_scale"), pl.BlockSpec((d,), lambda j, i: (0,)))
    if sinks is not None:
        inputs["sinks"] = jnp.pad(sinks.astype(jnp.float32), ((0, 0), (0, _padded_rows(r) - r)))
        in_specs["sinks"] = pl.BlockSpec((None, _padded_rows(r)), lambda j, i: (i % h, 0))
    cache_specs = [pl.BlockSpec((None, None, None, *x.shape[3:]), lambda j, i: (i // h, i % h, j, 0, 0)) for x in cache]
    # The result has the axis order of the output projection's input, so no transpose is needed.
    out_spec = pl.BlockSpec((None, None, None, r, d), lambda j, i: (i // h, j, i % h, 0, 0))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *(() if new is None else cache))]
    out, *new_cache = pl.pallas_call(
        functools.partial(_step_kernel, norm_and_rope=norm_and_rope, half=half, kernel=kernel, sizes=sizes),
        # In this order, a group's programs run at about the same time, so their prompt's keys stay in the GPU's cache.
        grid=(g, b * h),
        in_specs=[*cache_specs, in_specs],
        out_specs=[out_spec, *cache_specs][: len(shapes)],
        out_shape=shapes,
        input_output_aliases={} if new is None else {0: 1, 1: 2},
        interpret=kernel.implementation == "interpreted",
        name="step_attention",
        compiler_params=compiler_params(kernel.implementation, warps=4, stages=3),
    )(cache[0], cache[1], inputs)
    return out, cache if new is None else (new_cache[0], new_cache[1])


def _padded_rows(r: int) -> int:
    """Return the number of rows for R queries in a kernel, a power of two."""
    return max(MIN_TILE_SIDE, 1 << (r - 1).bit_length())


def _step_kernel(
    keys: Ref,
    values: Ref,
    inputs: dict[str, Ref],
    out: Ref,
    *new_cache: Ref,
    norm_and_rope: NormAndRope,
    half: int,
    kernel: Kernel,
    sizes: tuple[int, int],
) -> None:
    from jax.experimental.pallas.triton import load, store  # not in all versions of JAX; see `has_triton`

    scalars, (r, d), slots = inputs["scalars"], out.shape, values.shape[0]
    slot, position, length, write = scalars[0], scalars[1], scalars[2], scalars[7]
    shape = rows, d = _padded_rows(r), d
    row, column = jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    valid, channel = row < r, jnp.arange(d)  # rows from R on are padding
    prepare = functools.partial(_normalize_and_rotate, inputs=inputs, norm_and_rope=norm_and_rope, half=half)

    def queries(channel: jax.Array) -> jax.Array:
        return load(inputs["q"].at[row, jnp.broadcast_to(channel[None], shape)], mask=valid, other=0.0)

    q = prepare(queries, scale="q_scale")

    def add(sums: Sums, keys: Ref, values: Ref, at: jax.Array, length: int, visible: jax.Array) -> Sums:
        mask, span = jnp.broadcast_to(visible[None], (rows, length)), pl.ds(at, length)
        return add_tile(sums, q, keys[:, span], values[span, :], mask, kernel, keys_axis=0)

    def add_prompt_tile(j: jax.Array, sums: Sums) -> Sums:
        at, index = _tile_slots(j, sizes[1], inputs["prompt_values"].shape[0])
        visible = (index < length) & (index >= j * sizes[1])
        if kernel.window is not None:
            visible &= length + position - index < kernel.window
        return add(sums, inputs["prompt_keys"], inputs["prompt_values"], at, sizes[1], visible)

    def add_completion_tile(j: jax.Array, sums: Sums) -> Sums:
        at, index = _tile_slots(j, sizes[0], slots)
        distance = slot - index
        distance = jnp.where(distance < 0, distance + slots, distance)
        least = 1 if new_cache else 0  # the sums already contain the new token
        visible = (distance >= least) & (distance <= position) & (index >= j * sizes[0])
        if kernel.window is not None:
            visible &= distance < kernel.window
        return add(sums, keys, values, at, sizes[0], visible)

    sums = initial_sums(shape)
    if new_cache:
        key = prepare(lambda channel: load(inputs["key"].at[channel]), scale="k_scale").astype(keys.dtype)
        value = inputs["value"][...].astype(values.dtype)
        at, write_mask = jnp.full((d,), slot), jnp.broadcast_to(write > 0, (d,))
        store(new_cache[0].at[channel, at], key, mask=write_mask)
        store(new_cache[1].at[at, channel], value, mask=write_mask)
        product = (q.astype(jnp.float32) * key[None].astype(jnp.float32)).sum(axis=1)
        value = jnp.broadcast_to(value[None].astype(jnp.float32), shape)
        sums = value, cap_scores(product, kernel), jnp.ones(rows)
    sums = jax.lax.fori_loop(scalars[5], scalars[6], add_prompt_tile, sums)
    acc, maximum, total = jax.lax.fori_loop(scalars[3], scalars[4], add_completion_tile, sums)
    if "sinks" in inputs:
        sinks = inputs["sinks"][...]
        new_maximum = jnp.maximum(maximum, sinks)
        rescale = jnp.exp(maximum - new_maximum)
        acc, total = acc * rescale[:, None], total * rescale + jnp.exp(sinks - new_maximum)
    store(out.at[row, column], (acc / total[:, None]).astype(out.dtype), mask=valid)


def _normalize_and_rotate(
    read: Callable[[jax.Array], jax.Array], *, inputs: dict[str, Ref], norm_and_rope: NormAndRope, half: int, scale: str
) -> jax.Array:
    """Normalize and rotate the array [..., d] that `read` loads by channel. `inputs[scale]` is the norm's scale."""
    from jax.experimental.pallas.triton import load

    channel = jnp.arange(inputs["q"].shape[-1])
    x = read(channel)
    dtype, square = x.dtype, jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)

    def normalized(x: jax.Array, channel: jax.Array) -> jax.Array:
        if scale not in inputs:
            return x.astype(jnp.float32)
        factor = load(inputs[scale].at[channel]).astype(jnp.float32) + norm_and_rope.offset
        x = x.astype(jnp.float32) * jax.lax.rsqrt(square + norm_and_rope.eps)
        return (x * factor.reshape((*(1,) * (x.ndim - 1), -1))).astype(dtype).astype(jnp.float32)

    if "cos" not in inputs:
        return normalized(x, channel).astype(dtype)
    partner = channel + 1 - 2 * (channel % 2) if norm_and_rope.pairs else (channel + half) % (2 * half)
    partner = jnp.where(channel < 2 * half, partner, channel)
    cos, sin = (inputs[name][...].reshape((*(1,) * (x.ndim - 1), -1)) for name in ("cos", "sin"))
    return (normalized(x, channel) * cos + normalized(read(partner), partner) * sin).astype(dtype)


def _tile_slots(j: jax.Array, size: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """Return the first slot and all slots of tile j. The last tile ends at the last slot, and may overlap another."""
    at = j * size if slots % size == 0 else jnp.minimum(j * size, slots - size)
    return at, at + jnp.arange(size)


def _tile_size(slots: int, max_keys: int) -> int:
    """Return the number of keys per tile, a power of two. It divides `slots` if this allows 32 or more keys."""
    divisor = min(max_keys, slots & -slots)
    return divisor if divisor >= 32 else min(max_keys, 1 << slots.bit_length() - 1)
