"""Components of fused attention: visible keys, lists of tiles that contain them, and the computation for one tile.

A query attends to its segment's keys up to its position, and to its prompt's keys. The bounds of these two ranges
replace a mask [queries, keys], so prompts are not copied for their completions and memory use is linear in the length.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.models.devices import platform_of
from grpo_jax.models.matmul import tile_product

MIN_TILE_SIDE = 16
"""Minimum side of a kernel tile, since tensor cores multiply 16 × 16 matrices."""

MAX_PARTS, MIN_PART = 8, 64
"""Maximum number of programs that share a tile of prompt keys, and minimum number of query tiles per program."""

NO_PROMPT = -1
"""Prompt id of slots without a prompt token, for "splash"."""

MASKED = -1e30
"""Score for masked-out keys. It is finite so that queries without visible keys do not produce NaN."""

Sums = tuple[jax.Array, jax.Array, jax.Array]
"""Running sums for queries [rows, d]: Σ weight · value [rows, d], largest score [rows], Σ weight [rows]."""


def attention_implementation(name: str, devices: Sequence[jax.Device] = ()) -> str:
    """Return the attention implementation for whole sequences on `devices`, by default JAX's default device.

    "auto" is "mosaic" on Hopper GPUs (compute capability 9.0) from jax 0.10.2 on, otherwise "triton" on GPUs with
    compute capability 8.0 or higher (Ampere and later), "tiles" on older GPUs, "splash" on TPUs, and "einsum" on CPUs.
    "tiles" replaces "triton" and "splash" if JAX lacks their modules. Names other than "auto" are returned unchanged.
    """
    if name != "auto":
        return name
    platform, capability = platform_of(devices)
    if platform == "cpu":
        return "einsum"
    if platform == "tpu":
        return "splash" if _has_module("ops.tpu.splash_attention") else "tiles"
    if platform not in ("gpu", "cuda") or capability < 8:
        return "tiles"
    return "mosaic" if capability == 9 and jax.__version_info__ >= (0, 10, 2) else triton_or_tiles()


def triton_or_tiles() -> str:
    """Return "triton", or "tiles" if JAX does not have the Triton backend (deprecated since jax 0.11)."""
    return "triton" if _has_module("triton") else "tiles"


def has_triton(implementation: str) -> bool:
    """Return whether Triton kernels for other operations can be used along with an attention implementation."""
    return implementation == "interpreted" or (implementation in ("triton", "mosaic") and _has_module("triton"))


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(f"jax.experimental.pallas.{name}") is not None


def compiler_params(implementation: str, *, warps: int, stages: int) -> pl.CompilerParams | None:
    """Return Triton compiler parameters for a kernel, or None for interpreted kernels."""
    if implementation == "interpreted":
        return None
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


Ref = Any
"""Reference to an array, as passed to a Pallas kernel."""


class Tiles(flax.struct.PyTreeNode):
    """Visible keys of each query in A sequences, and lists of the tiles that contain them.

    X is the number of query tiles, and Y the number of key tiles.

    All arrays are int32. A query attends to two ranges of keys [first, end), one in its prompt and one in its
    completion. `bounds` contains the two pairs in this order. Either range may be empty.
    """

    bounds: jax.Array  # [A, 4, N]
    keys: jax.Array  # [A, X, Y], indices of key tiles, starting with the visible tiles; for "splash" [A, X, at most Y]
    key_count: jax.Array  # [A, X], number of visible key tiles
    queries: jax.Array  # [A, Y, X], indices of query tiles, starting with the tiles that read the key tile
    query_count: jax.Array  # [A, Y], number of query tiles that read the key tile


class Inputs(NamedTuple):
    """Queries [A, H, N · R, d], keys and values [A, H, S, d], and tiles. N · R and S are padded to whole tiles."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    tiles: Tiles


class TileMask(flax.struct.PyTreeNode):
    """Visible keys and tiles for a forward pass, for each attention window."""

    tiles: dict[str, Tiles]  # keyed by str(window)
    prompts: tuple[jax.Array, jax.Array] | None  # prompt ids of queries [A, N] and keys [A, S], for "splash"
    implementation: str = flax.struct.field(pytree_node=False)


class Kernel(NamedTuple):
    """Static settings for attention functions (argument `kernel`). "einsum" uses only scale, window and soft cap."""

    implementation: str  # see `TransformerConfig.attention`; "interpreted" runs the "triton" kernels on any platform
    rows: int  # queries per tile, where a token has R queries for each key head
    columns: int  # keys per tile
    scale: float = 1.0  # factor applied to the scores
    window: int | None = None  # number of positions that a query attends to, including its own; None for all
    soft_cap: float | None = None  # c in c·tanh(scale·score/c); None disables the cap
    num_prompt_slots: int = 0  # number of slots for prompt keys, which come before the slots for completion keys

    def gap(self, slots: int) -> int:
        """Return the number of slots that pad `slots` prompt slots to whole tiles for "mosaic", or 0 otherwise."""
        return -slots % self.columns if self.implementation == "mosaic" else 0

    @classmethod
    def of(cls, implementation: str, head_dim: int, dtype: str = "float32") -> Kernel:
        """Return settings with tile sizes that fit in a GPU's registers or a TPU's vector memory."""
        if implementation == "tiles":
            return cls(implementation, 1024, 512)
        if implementation == "mosaic":
            return cls(implementation, 128, 128)
        if implementation == "splash":  # large tiles, since a skipped tile takes about 300 cycles
            side = 1024 if (width := head_dim * jnp.dtype(dtype).itemsize) <= 512 else 512 if width <= 1024 else 256
            return cls(implementation, side, side)
        if jnp.dtype(dtype).itemsize > 2:  # tensor cores are not used, and larger tiles are slow to compile
            rows, columns = (64, 32) if head_dim <= 64 else (32, 32) if head_dim <= 128 else (32, 16)
        else:
            rows, columns = (128, 64) if head_dim <= 128 else (64, 32) if head_dim <= 256 else (32, 16)
        return cls(implementation, rows, columns)


def find_tiles(bounds: jax.Array, num_keys: int, kernel: Kernel, queries_per_kv: int) -> Tiles:
    """Find the tiles that may contain visible keys. Extra tiles are harmless, since `visible` masks each score."""
    query_bounds = repeated(bounds, queries_per_kv, kernel.rows)
    begins, ends = (query_bounds[:, i::2].reshape(len(bounds), 2, -1, kernel.rows) for i in range(2))
    nonempty, first = begins < ends, jnp.arange(0, num_keys, kernel.columns).reshape(1, 1, 1, -1)
    low = jnp.where(nonempty, begins, num_keys).min(axis=-1)[..., None]
    high = jnp.where(nonempty, ends, 0).max(axis=-1)[..., None]

    def in_order(is_visible: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(~is_visible, axis=-1, stable=True).astype(jnp.int32)
        return order, is_visible.sum(axis=-1, dtype=jnp.int32)

    is_visible = ((low < first + kernel.columns) & (high > first)).any(axis=1)
    (keys, key_count), (queries, query_count) = in_order(is_visible), in_order(is_visible.swapaxes(1, 2))
    return Tiles(bounds, keys, key_count, queries, query_count)


def repeated(bounds: jax.Array, queries_per_kv: int, rows: int) -> jax.Array:
    """Repeat each token's bounds for the query heads that share a key head, and pad to a multiple of `rows`."""
    bounds = jnp.repeat(bounds, queries_per_kv, axis=2)
    return jnp.pad(bounds, ((0, 0), (0, 0), (0, -bounds.shape[2] % rows)))


def over_key_tiles(
    gradients: Callable[[int, int, int], Sequence[jax.Array]], kernel: Kernel, x: Inputs
) -> Sequence[jax.Array]:
    """Compute gradients with respect to keys and values by calling `gradients(first, number, parts)` for tile ranges.

    `parts` programs share each tile of prompt keys, which all queries of a group read. With one program each, these
    tiles would finish last. If `parts` > 1, `gradients` returns a float32 sum for each program, [parts, ...].
    """
    num_tiles, num_prompt_tiles = x.k.shape[2] // kernel.columns, -(-kernel.num_prompt_slots // kernel.columns)
    parts = min(MAX_PARTS, x.q.shape[2] // kernel.rows // MIN_PART)
    if parts < 2 or not num_prompt_tiles:
        return gradients(0, num_tiles, 1)
    prompt_sums = zip(gradients(0, num_prompt_tiles, parts), (x.k, x.v), strict=True)
    sums = [y.sum(axis=0).astype(keys_or_values.dtype) for y, keys_or_values in prompt_sums]
    if num_prompt_tiles == num_tiles:
        return sums
    rest = gradients(num_prompt_tiles, num_tiles - num_prompt_tiles, 1)
    return [jnp.concatenate(y, axis=2) for y in zip(sums, rest, strict=True)]


def visible(bounds: jax.Array | Sequence[jax.Array], keys: jax.Array) -> jax.Array:
    """Return whether queries with the given `Tiles.bounds` attend to keys with these indices, [queries, keys] bool."""
    keys, (first, end, own_first, own_end) = keys[None], (x[:, None] for x in bounds)
    return ((keys >= first) & (keys < end)) | ((keys >= own_first) & (keys < own_end))


def _scores(q: jax.Array, k: jax.Array, is_visible: jax.Array, kernel: Kernel, keys_axis: int = 1) -> jax.Array:
    return jnp.where(is_visible, cap_scores(tile_product(q, k, (1, keys_axis)), kernel), MASKED)


def cap_scores(products: jax.Array, kernel: Kernel) -> jax.Array:
    """Scale products of queries and keys, and apply the soft cap, if any."""
    scores = products * kernel.scale
    return scores if kernel.soft_cap is None else kernel.soft_cap * jnp.tanh(scores / kernel.soft_cap)


def initial_sums(shape: tuple[int, ...]) -> Sums:
    """Return initial sums for queries [..., rows, d]."""
    return jnp.zeros(shape), jnp.full(shape[:-1], MASKED), jnp.zeros(shape[:-1])


def add_tile(
    sums: Sums, q: jax.Array, k: jax.Array, v: jax.Array, is_visible: jax.Array, kernel: Kernel, keys_axis: int = 1
) -> Sums:
    """Update the sums for queries with a tile of keys [columns, d], or [d, columns] if `keys_axis` is 0."""
    values, top, total = sums
    scores = _scores(q, k, is_visible, kernel, keys_axis)
    higher = jnp.maximum(top, scores.max(axis=1))
    rescale = jnp.exp(top - higher)
    weights = jnp.where(is_visible, jnp.exp(scores - higher[:, None]), 0.0)
    values = values * rescale[:, None] + tile_product(weights.astype(v.dtype), v, (1, 0))
    return values, higher, total * rescale + weights.sum(axis=1)


def finish(sums: Sums, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Convert sums to outputs and log-sum-exps, which are 0 and `-MASKED` for queries without visible keys."""
    values, top, total = sums
    nonempty = total > 0
    lse = jnp.where(nonempty, top + jnp.log(jnp.where(nonempty, total, 1.0)), -MASKED)
    return (values / jnp.where(nonempty, total, 1.0)[:, None]).astype(dtype), lse


def tile_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    is_visible: jax.Array,
    *,
    kernel: Kernel,
) -> tuple[jax.Array, jax.Array]:
    """Compute a tile's attention weights and the gradient with respect to q kᵀ, both in float32.

    g is the gradient with respect to the outputs, and delta = Σ_d g · out.
    """
    scores = _scores(q, k, is_visible, kernel)
    weights = jnp.where(is_visible, jnp.exp(scores - lse[:, None]), 0.0)
    d_scores = weights * (tile_product(g, v, (1, 1)) - delta[:, None])
    if kernel.soft_cap is not None:
        d_scores = jnp.where(is_visible, d_scores * (1 - (scores / kernel.soft_cap) ** 2), 0.0)
    return weights, d_scores * kernel.scale
