"""Tiles of fused attention: ids of tokens, the tiles with visible keys, and the sums over one tile.

```
                     keys of the prompts │ own keys, in the order of the queries
                        p0   p1   p2     │  c0   c1   c2   c3
    queries of p0, c0   ■    ·    ·      │  ■    ·    ·    ·       ■ a tile with visible keys
               p0, c1   ■    ·    ·      │  ■    ■    ·    ·       · a tile that is skipped
               p2, c3   ·    ·    ■      │  ·    ·    ·    ■
```

A query sees the keys of its own segment up to its position, and the keys of its prompt. `SegmentIds` define that
instead of a mask [queries, keys], so no prompt is copied for its completions and memory is linear in the length.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.models.devices import platform_of
from grpo_jax.models.matmul import tile_product

LEAST_SIDE = 16
"""Smallest side of a kernel's tile, of a tensor core's product."""

NO_SEGMENT = -1
"""Id of padding, which sees nothing and is not seen."""

MASKED = -1e30
"""Score of an invisible key, finite so that a query without visible keys stays finite."""

Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Of queries [rows, d]: Σ weight · value [rows, d], largest score [rows], Σ weight [rows]."""


def implementation(name: str, devices: Sequence[jax.Device] = ()) -> str:
    """Return the implementation of attention for whole sequences; "auto" is the fastest one on the devices.

    That is "triton" on NVIDIA GPUs from Ampere on (compute capability 8.0), "tiles" on older ones and on TPUs, and
    "einsum" on CPUs. `devices` are of one kind; without any, the default device is used.
    """
    if name != "auto":
        return name
    platform, capability = platform_of(devices)
    if platform == "cpu":
        return "einsum"
    return "triton" if platform in ("gpu", "cuda") and capability >= 8 and _has_triton() else "tiles"


@functools.cache
def _has_triton() -> bool:
    """Whether this jax has Pallas's Triton backend, which is deprecated since jax 0.11."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def compiler_params(implementation: str, *, warps: int, stages: int) -> pl.CompilerParams | None:
    """Return Triton's settings of a kernel; None if it is interpreted."""
    if implementation == "interpreted":
        return None
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


class Ref(Protocol):
    """An argument of a Pallas kernel."""

    @property
    def dtype(self) -> jnp.dtype: ...

    def __getitem__(self, index: object) -> jax.Array: ...

    def __setitem__(self, index: object, value: jax.Array) -> None: ...


class SegmentIds(flax.struct.PyTreeNode):
    """Segment, prompt and position of each of N tokens of completions and prompts.

    Attributes:
      number: [A, N] int32: a completion's segment; −2 − i for tokens of prompt i; `NO_SEGMENT` for padding.
      prompt: [A, N] int32: −2 − i for a completion of prompt i; unused in keys.
      position: [A, N] int32, counted from the first token of the prompt.
      index: [A, N] int32: index among the tokens of completions; −1 in a prompt.
    """

    number: jax.Array
    prompt: jax.Array
    position: jax.Array
    index: jax.Array


class Tiles(flax.struct.PyTreeNode):
    """Lists of the tiles of keys for each tile of queries, and of the tiles of queries for each tile of keys.

    Attributes:
      keys: [A, X, Y] int32, for each tile of queries the tiles of keys, the visible ones first.
      key_count: [A, X] int32, number of visible ones.
      queries: [A, Y, X] int32, for each tile of keys the tiles of queries, those that see it first.
      query_count: [A, Y] int32, number of tiles that see it.
    """

    keys: jax.Array
    key_count: jax.Array
    queries: jax.Array
    query_count: jax.Array


class TileMask(flax.struct.PyTreeNode):
    """Ids of the tokens of a forward pass, and the tiles that its queries see in layers of each window.

    Attributes:
      queries: [A, N].
      keys: [A, S], of the prompts first.
      tiles: by window.
    """

    queries: SegmentIds
    keys: SegmentIds
    tiles: dict[str, Tiles]


class Kernel(NamedTuple):
    """Static part of a fused attention: the implementation, its tiles, and the scale, window and cap of scores.

    Attributes:
      implementation: "tiles", "triton", or "interpreted": the kernels of "triton", step by step on any platform.
      rows: queries of a tile; the R heads that share a key head are R queries.
      columns: keys of a tile.
      scale, window, soft_cap: as in `attention.group_attention`.
      shared: number of prompt keys, which come first.
    """

    implementation: str
    rows: int
    columns: int
    scale: float = 1.0
    window: int | None = None
    soft_cap: float | None = None
    shared: int = 0

    @classmethod
    def of(cls, implementation: str, head_dim: int, dtype: str = "float32") -> Kernel:
        """Return a kernel whose tiles fit the implementation, on a GPU the registers of a program."""
        if implementation == "tiles":
            return cls(implementation, 1024, 512)
        if jnp.dtype(dtype).itemsize > 2:  # no tensor cores: larger tiles take long to compile
            rows, columns = (64, 32) if head_dim <= 64 else (32, 32) if head_dim <= 128 else (32, 16)
        else:
            rows, columns = (128, 64) if head_dim <= 128 else (64, 32) if head_dim <= 256 else (32, 16)
        return cls(implementation, rows, columns)


def find_tiles(queries: SegmentIds, keys: SegmentIds, kernel: Kernel, window: int | None) -> Tiles:
    """Return a superset of the tiles in which some query sees some key; the scores are masked too."""
    rows, columns = kernel.rows, kernel.columns
    far = jnp.iinfo(jnp.int32).max

    def ends(x: jax.Array, where: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """The smallest and the largest x of each tile."""
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
    """Return each token's ids R times, for its R query heads."""
    return jax.tree.map(lambda x: jnp.repeat(x, group, axis=1), ids)


def padded(ids: SegmentIds, size: int) -> SegmentIds:
    """Return ids padded to a whole number of tiles of this size."""

    def pad(x: jax.Array, value: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=value)

    number, prompt = pad(ids.number, NO_SEGMENT), pad(ids.prompt, NO_SEGMENT)
    return SegmentIds(number, prompt, pad(ids.position, 0), pad(ids.index, -1))


def visible(rows: Sequence[jax.Array], keys: Sequence[jax.Array], kernel: Kernel) -> jax.Array:
    """Return which of some keys (segment, position) each of some queries (segment, prompt, position) sees."""
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
    """Return the sums of queries [..., rows, d] before their first tile of keys."""
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
    """Return outputs and log-sum-exps; without visible keys, zeros and a log-sum-exp that makes all weights zero."""
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
    """Return the weights of a tile, and the gradient of its products q kᵀ, both in float32."""
    scores = _scores(q, k, seen, kernel)
    weights = jnp.where(seen, jnp.exp(scores - lse[:, None]), 0.0)
    slope = weights * (tile_product(g, v, (1, 1)) - delta[:, None])
    if kernel.soft_cap is not None:
        slope = jnp.where(seen, slope * (1 - (scores / kernel.soft_cap) ** 2), 0.0)
    return weights, slope * kernel.scale
