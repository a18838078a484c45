"""Components of fused attention: token ids, lists of tiles with visible keys, and the computation for one tile.

```
                     prompt keys         │ completion keys
                        p0   p1   p2     │  c0   c1   c2   c3
    queries of p0, c0   ■    ·    ·      │  ■    ·    ·    ·       ■ tile with visible keys
               p0, c1   ■    ·    ·      │  ■    ■    ·    ·       · skipped tile
               p2, c3   ·    ·    ■      │  ·    ·    ·    ■
```

A query attends to its segment's keys up to its position, and to its prompt's keys. `SegmentIds` replace a mask
[queries, keys], so prompts are not copied for their completions and memory use is linear in the length.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.models.devices import platform_of
from grpo_jax.models.matmul import tile_product

LEAST_SIDE = 16
"""Minimum side of a kernel tile, since tensor cores multiply 16 × 16 matrices."""

NO_SEGMENT = -1
"""Segment id for padding tokens, which neither attend to other tokens nor are attended to."""

MASKED = -1e30
"""Score for masked-out keys. It is finite so that queries without visible keys do not produce NaN."""

Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Running sums for queries [rows, d]: Σ weight · value [rows, d], largest score [rows], Σ weight [rows]."""


def implementation(name: str, devices: Sequence[jax.Device] = ()) -> str:
    """Resolve the attention implementation for full sequences. "auto" selects the fastest for the devices.

    "auto" is "triton" on NVIDIA GPUs with compute capability 8.0 or higher (Ampere and later), "tiles" on older GPUs,
    "splash" on TPUs, and "einsum" on CPUs. If `devices` is empty, the default device is used.
    """
    if name != "auto":
        return name
    platform, capability = platform_of(devices)
    if platform == "cpu":
        return "einsum"
    name = "splash" if platform == "tpu" else "triton" if platform in ("gpu", "cuda") and capability >= 8 else "tiles"
    modules = {"splash": "jax.experimental.pallas.ops.tpu.splash_attention", "triton": "jax.experimental.pallas.triton"}
    # Pallas's Triton backend has been deprecated since jax 0.11. Later versions may lack either module.
    return name if name == "tiles" or importlib.util.find_spec(modules[name]) is not None else "tiles"


def compiler_params(implementation: str, *, warps: int, stages: int) -> pl.CompilerParams | None:
    """Return Triton compiler parameters for a kernel, or None for interpreted kernels."""
    if implementation == "interpreted":
        return None
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


Ref = Any
"""Argument of a Pallas kernel."""


class SegmentIds(flax.struct.PyTreeNode):
    """Segment, prompt and position ids for N completion or prompt tokens. Arrays are [A, N] int32."""

    number: jax.Array  # segment of completion tokens; −2 − i for tokens in prompt i; `NO_SEGMENT` for padding
    prompt: jax.Array  # −2 − i for completion tokens after prompt i; for keys, only used by "splash"
    position: jax.Array  # position relative to the first token of the prompt
    index: jax.Array  # index among the completion tokens; −1 for prompt tokens


class Tiles(flax.struct.PyTreeNode):
    """Key tiles (of Y) that each of X query tiles reads, and query tiles that read each key tile. Arrays are int32."""

    keys: jax.Array  # [A, X, Y], indices of key tiles, visible tiles first; for "splash" [A, X, at most Y]
    key_count: jax.Array  # [A, X], number of visible key tiles
    queries: jax.Array  # [A, Y, X], indices of query tiles, starting with the tiles that read the key tile
    query_count: jax.Array  # [A, Y], number of query tiles that read the key tile


class TileMask(flax.struct.PyTreeNode):
    """Token ids for a forward pass, and the tiles for each attention window."""

    queries: SegmentIds  # [A, N]
    keys: SegmentIds  # [A, S], prompt keys first
    tiles: dict[str, Tiles]  # keyed by str(window)
    implementation: str = flax.struct.field(pytree_node=False)


class Kernel(NamedTuple):
    """Static arguments to fused attention. Scale, window and soft cap are as in `attention.group_attention`."""

    implementation: str  # "tiles", "triton", "interpreted" (the "triton" kernels on any platform), or "splash"
    rows: int  # queries per tile; R query heads that share a key head are R queries
    columns: int  # keys per tile
    scale: float = 1.0
    window: int | None = None
    soft_cap: float | None = None
    shared: int = 0  # number of prompt keys, which precede completion keys

    @classmethod
    def of(cls, implementation: str, head_dim: int, dtype: str = "float32") -> Kernel:
        """Return a kernel with suitable tile sizes. They fit in a GPU's registers or a TPU's vector memory."""
        if implementation == "tiles":
            return cls(implementation, 1024, 512)
        if implementation == "splash":  # large tiles, since a skipped tile takes about 300 cycles
            side = 1024 if (width := head_dim * jnp.dtype(dtype).itemsize) <= 512 else 512 if width <= 1024 else 256
            return cls(implementation, side, side)
        if jnp.dtype(dtype).itemsize > 2:  # tensor cores are not used, and larger tiles are slow to compile
            rows, columns = (64, 32) if head_dim <= 64 else (32, 32) if head_dim <= 128 else (32, 16)
        else:
            rows, columns = (128, 64) if head_dim <= 128 else (64, 32) if head_dim <= 256 else (32, 16)
        return cls(implementation, rows, columns)


def find_tiles(queries: SegmentIds, keys: SegmentIds, kernel: Kernel, window: int | None) -> Tiles:
    """Find the tiles that may contain visible keys. Extra tiles are harmless, since `visible` masks each score."""
    rows, columns = kernel.rows, kernel.columns
    far = jnp.iinfo(jnp.int32).max

    def ends(x: jax.Array, where: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Compute the minimum and maximum of x in each tile."""
        tiles = (x.shape[0], -1, size)
        low = jnp.where(where, x, far).reshape(tiles).min(axis=-1)
        return low, jnp.where(where, x, -far).reshape(tiles).max(axis=-1)

    def overlap(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (a[0][:, :, None] <= b[1][:, None]) & (b[0][:, None] <= a[1][:, :, None])

    valid, own, shared = queries.number != NO_SEGMENT, keys.number >= 0, keys.number < NO_SEGMENT
    at, slots = ends(queries.index, valid, rows), ends(keys.index, own, columns)
    same_segment = overlap(ends(queries.number, valid, rows), ends(keys.number, own, columns))
    same_segment &= slots[0][:, None] <= at[1][:, :, None]
    same_prompt = overlap(ends(queries.prompt, valid, rows), ends(keys.number, shared, columns))
    if window is not None:
        first = ends(queries.position, valid, rows)[0][:, :, None] - window
        same_segment &= ends(keys.position, own, columns)[1][:, None] > first
        same_prompt &= ends(keys.position, shared, columns)[1][:, None] > first

    def in_order(seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(~seen, axis=-1, stable=True).astype(jnp.int32)
        return order, seen.sum(axis=-1, dtype=jnp.int32)

    seen = same_segment | same_prompt
    (key_tiles, key_count), (query_tiles, query_count) = in_order(seen), in_order(seen.swapaxes(1, 2))
    return Tiles(key_tiles, key_count, query_tiles, query_count)


def repeated(ids: SegmentIds, group: int) -> SegmentIds:
    """Repeat each token's ids for the `group` query heads that share a key head."""
    return jax.tree.map(lambda x: jnp.repeat(x, group, axis=1), ids)


def padded(ids: SegmentIds, size: int) -> SegmentIds:
    """Pad ids to a multiple of `size` tokens."""

    def pad(x: jax.Array, value: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=value)

    number, prompt = pad(ids.number, NO_SEGMENT), pad(ids.prompt, NO_SEGMENT)
    return SegmentIds(number, prompt, pad(ids.position, 0), pad(ids.index, -1))


def visible(rows: Sequence[jax.Array], keys: Sequence[jax.Array], kernel: Kernel) -> jax.Array:
    """Return whether queries (segment, prompt, position) attend to keys (segment, position), [queries, keys] bool."""
    (number, prompt, position), (key, key_position) = (tuple(x[:, None] for x in rows), tuple(x[None] for x in keys))
    distance = position - key_position
    seen = (((key == number) & (distance >= 0)) | (key == prompt)) & (key != NO_SEGMENT)
    return seen if kernel.window is None else seen & (distance < kernel.window)


def _scores(q: jax.Array, k: jax.Array, seen: jax.Array, kernel: Kernel, keys_axis: int = 1) -> jax.Array:
    scores = tile_product(q, k, (1, keys_axis)) * kernel.scale
    if kernel.soft_cap is not None:
        scores = kernel.soft_cap * jnp.tanh(scores / kernel.soft_cap)
    return jnp.where(seen, scores, MASKED)


def start_of_sums(shape: tuple[int, ...]) -> Sums:
    """Return initial sums for queries [..., rows, d]."""
    return jnp.zeros(shape), jnp.full(shape[:-1], MASKED), jnp.zeros(shape[:-1])


def add_tile(
    sums: Sums, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, kernel: Kernel, keys_axis: int = 1
) -> Sums:
    """Update the sums for queries with a tile of keys [columns, d], or [d, columns] if `keys_axis` is 0."""
    values, top, total = sums
    scores = _scores(q, k, seen, kernel, keys_axis)
    higher = jnp.maximum(top, scores.max(axis=1))
    rescale = jnp.exp(top - higher)
    weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0)
    values = values * rescale[:, None] + tile_product(weights.astype(v.dtype), v, (1, 0))
    return values, higher, total * rescale + weights.sum(axis=1)


def finish(sums: Sums, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Convert sums to outputs and log-sum-exps. Queries without visible keys get zeros and `-MASKED`."""
    values, top, total = sums
    some = total > 0
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -MASKED)
    return (values / jnp.where(some, total, 1.0)[:, None]).astype(dtype), lse


def tile_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    seen: jax.Array,
    *,
    kernel: Kernel,
) -> tuple[jax.Array, jax.Array]:
    """Compute a tile's attention weights and the gradient with respect to q kᵀ, both in float32."""
    scores = _scores(q, k, seen, kernel)
    weights = jnp.where(seen, jnp.exp(scores - lse[:, None]), 0.0)
    slope = weights * (tile_product(g, v, (1, 1)) - delta[:, None])
    if kernel.soft_cap is not None:
        slope = jnp.where(seen, slope * (1 - (scores / kernel.soft_cap) ** 2), 0.0)
    return weights, slope * kernel.scale
