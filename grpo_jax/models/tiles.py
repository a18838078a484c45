"""Parts of fused attention: ids of tokens, lists of tiles with visible keys, and the computation of one tile.

```
                     keys of the prompts │ own keys, in the order of the queries
                        p0   p1   p2     │  c0   c1   c2   c3
    queries of p0, c0   ■    ·    ·      │  ■    ·    ·    ·       ■ a tile with visible keys
               p0, c1   ■    ·    ·      │  ■    ■    ·    ·       · a tile that is skipped
               p2, c3   ·    ·    ■      │  ·    ·    ·    ■
```

A query attends to the keys of its own segment up to its position and to the keys of its prompt. `SegmentIds` replace a
mask [queries, keys], so that no prompt is copied for its completions and memory is linear in the length.
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
"""Smallest side of a kernel's tile: tensor cores multiply 16 × 16."""

NO_SEGMENT = -1
"""Id of padding, which attends to nothing and is not attended to."""

MASKED = -1e30
"""Score of an invisible key, finite so that a query without visible keys stays finite."""

Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Running sums of queries [rows, d]: Σ weight · value [rows, d], largest score [rows], Σ weight [rows]."""


def implementation(name: str, devices: Sequence[jax.Device] = ()) -> str:
    """Return the implementation of attention for whole sequences; "auto" selects the fastest one on the devices.

    It selects "triton" on NVIDIA GPUs from Ampere on (compute capability 8.0), "tiles" on older ones and on TPUs, and
    "einsum" on CPUs. Without `devices`, the default device decides.
    """
    if name != "auto":
        return name
    platform, capability = platform_of(devices)
    if platform == "cpu":
        return "einsum"
    # Pallas's Triton backend is deprecated since jax 0.11.
    has_triton = importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    return "triton" if platform in ("gpu", "cuda") and capability >= 8 and has_triton else "tiles"


def compiler_params(implementation: str, *, warps: int, stages: int) -> pl.CompilerParams | None:
    """Return Triton's settings of a kernel, or None for an interpreted one."""
    if implementation == "interpreted":
        return None
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


Ref = Any
"""An argument of a Pallas kernel."""


class SegmentIds(flax.struct.PyTreeNode):
    """Segment, prompt and position of N tokens of completions and prompts; arrays [A, N] int32."""

    number: jax.Array  # a completion's segment; −2 − i for tokens of prompt i; `NO_SEGMENT` for padding
    prompt: jax.Array  # −2 − i for a completion of prompt i; unused in keys
    position: jax.Array  # from the first token of the prompt
    index: jax.Array  # among the tokens of completions; −1 in a prompt


class Tiles(flax.struct.PyTreeNode):
    """Which of Y tiles of keys each of X tiles of queries reads, and the reverse; arrays of int32."""

    keys: jax.Array  # [A, X, Y], the tiles of keys, visible ones first
    key_count: jax.Array  # [A, X], number of visible ones
    queries: jax.Array  # [A, Y, X], the tiles of queries, those that read the tile of keys first
    query_count: jax.Array  # [A, Y], number of tiles that read it


class TileMask(flax.struct.PyTreeNode):
    """Ids of the tokens of a forward pass, and the tiles of the layers with each window."""

    queries: SegmentIds  # [A, N]
    keys: SegmentIds  # [A, S], the prompts' keys first
    tiles: dict[str, Tiles]  # by str(window)


class Kernel(NamedTuple):
    """Static arguments of fused attention; scale, window and soft cap as in `attention.group_attention`."""

    implementation: str  # "tiles", "triton", or "interpreted" for the kernels of "triton" on any platform
    rows: int  # queries of a tile; the R heads that share a key head count as R queries
    columns: int  # keys of a tile
    scale: float = 1.0
    window: int | None = None
    soft_cap: float | None = None
    shared: int = 0  # number of prompt keys, which come first

    @classmethod
    def of(cls, implementation: str, head_dim: int, dtype: str = "float32") -> Kernel:
        """Return a kernel with suitable tiles; on a GPU they fit the registers of a program."""
        if implementation == "tiles":
            return cls(implementation, 1024, 512)
        if jnp.dtype(dtype).itemsize > 2:  # no tensor cores: larger tiles take long to compile
            rows, columns = (64, 32) if head_dim <= 64 else (32, 32) if head_dim <= 128 else (32, 16)
        else:
            rows, columns = (128, 64) if head_dim <= 128 else (64, 32) if head_dim <= 256 else (32, 16)
        return cls(implementation, rows, columns)


def find_tiles(queries: SegmentIds, keys: SegmentIds, kernel: Kernel, window: int | None) -> Tiles:
    """Return the tiles that may have visible keys, a superset; scores inside of a tile are masked too."""
    rows, columns = kernel.rows, kernel.columns
    far = jnp.iinfo(jnp.int32).max

    def ends(x: jax.Array, where: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Return the smallest and the largest x of each tile."""
        tiles = (x.shape[0], -1, size)
        low = jnp.where(where, x, far).reshape(tiles).min(axis=-1)
        return low, jnp.where(where, x, -far).reshape(tiles).max(axis=-1)

    def meet(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (a[0][:, :, None] <= b[1][:, None]) & (b[0][:, None] <= a[1][:, :, None])

    there, own, shared = queries.number != NO_SEGMENT, keys.number >= 0, keys.number < NO_SEGMENT
    at, slots = ends(queries.index, there, rows), ends(keys.index, own, columns)
    same_segment = meet(ends(queries.number, there, rows), ends(keys.number, own, columns))
    same_segment &= slots[0][:, None] <= at[1][:, :, None]
    same_prompt = meet(ends(queries.prompt, there, rows), ends(keys.number, shared, columns))
    if window is not None:
        first = ends(queries.position, there, rows)[0][:, :, None] - window
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
    """Return the mask [queries, keys] for queries (segment, prompt, position) and keys (segment, position)."""
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
    """Return the initial sums of queries [..., rows, d]."""
    return jnp.zeros(shape), jnp.full(shape[:-1], MASKED), jnp.zeros(shape[:-1])


def add_tile(
    sums: Sums, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, kernel: Kernel, keys_axis: int = 1
) -> Sums:
    """Add a tile of keys [columns, d], or [d, columns] if `keys_axis` is 0, to the sums of queries."""
    values, top, total = sums
    scores = _scores(q, k, seen, kernel, keys_axis)
    higher = jnp.maximum(top, scores.max(axis=1))
    fade = jnp.exp(top - higher)
    weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0)
    values = values * fade[:, None] + tile_product(weights.astype(v.dtype), v, (1, 0))
    return values, higher, total * fade + weights.sum(axis=1)


def finish(sums: Sums, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return outputs and log-sum-exps; without visible keys zeros, and a log-sum-exp that makes all weights zero."""
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
    """Return the weights of a tile and the gradient of its products q kᵀ, both in float32."""
    scores = _scores(q, k, seen, kernel)
    weights = jnp.where(seen, jnp.exp(scores - lse[:, None]), 0.0)
    slope = weights * (tile_product(g, v, (1, 1)) - delta[:, None])
    if kernel.soft_cap is not None:
        slope = jnp.where(seen, slope * (1 - (scores / kernel.soft_cap) ** 2), 0.0)
    return weights, slope * kernel.scale
