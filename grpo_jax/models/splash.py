"""Attention for packed sequences on TPUs, with JAX's splash attention kernels.

The kernels take lists of tiles, segment ids, and a mask function, whose arguments are an int32 for a query (`BITS`) and
a key's index. A prompt and its completions have the same segment id, and the mask function separates the completions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.models.attention_tiles import NO_PROMPT, Kernel, TileMask

MaskInfo = tuple[jax.Array | None, ...]  # the kernels' named tuple `MaskInfo`

BITS = 16
"""Bits for a query's index, and for the number of visible completion keys before it. A sequence has ≤ 2^BITS tokens."""


@functools.cache  # `jit` compares functions by identity
def _visible(num_prompt_slots: int, size: int, window: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the mask function for prompt keys in `size` slots per prompt, followed by completion keys."""

    def visible(query: jax.Array, key: jax.Array) -> jax.Array:
        index, reach = jax.lax.shift_right_logical(query, BITS), query & ((1 << BITS) - 1)
        before = index + num_prompt_slots - key
        near = window is None or size - jax.lax.rem(key, size) + reach < window
        return ((key < num_prompt_slots) & near) | ((before >= 0) & (before <= reach))

    return visible


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, tile_mask: TileMask, kernel: Kernel, size: int
) -> jax.Array:
    """Compute `fused.fused_attention` for packed sequences, without sinks. Outputs in padding are finite, but not 0.

    The first keys belong to prompts. Each prompt is right-aligned in `size` slots, so the distance between a query and
    a prompt key depends only on the query's position and the key's slot.
    """
    # The modules' type annotations assume masks known at compile time, so the modules are imported as untyped objects.
    package = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"
    splash, masks = (importlib.import_module(package + name) for name in ("kernel", "mask_info"))
    a, h, n, r, d = q.shape
    rows, columns, part = kernel.rows, kernel.columns, min(kernel.columns, 512)  # `part` keys are scored at a time
    tiles = tile_mask.tiles[str(kernel.window)]
    own_first, own_end = jnp.pad(tiles.bounds[:, 2:], ((0, 0), (0, 0), (0, -n % rows))).swapaxes(0, 1)
    index, reach = jnp.arange(own_end.shape[1], dtype=jnp.int32)[None], jnp.maximum(own_end - 1 - own_first, 0)
    assert tile_mask.prompts is not None
    ids = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % side)), constant_values=NO_PROMPT)
        for x, side in zip(tile_mask.prompts, (rows, columns), strict=True)
    )

    def steps(tile: jax.Array, count: jax.Array, axis: int) -> MaskInfo:
        """Return a `MaskInfo` for the first `count` [A, X] entries (at least one, to avoid NaN) of `tile` [A, X, Y]."""
        step, last = jnp.arange(tile.shape[2])[None, None], jnp.maximum(count - 1, 0)[..., None]
        tile = jnp.take_along_axis(tile, jnp.minimum(step, last), axis=2)  # a repeated tile is not loaded again
        tile, used = (jnp.moveaxis(x, 2, axis)[:, None] for x in (tile, (step <= last).astype(jnp.int32)))
        return masks.MaskInfo(tile, None, used, None, (index << BITS) | reach)

    forward, backward = steps(tiles.keys, tiles.key_count, 2), steps(tiles.queries, tiles.query_count, 1)
    attention = functools.partial(
        splash.SplashAttentionKernel,
        is_mqa=False,
        block_sizes=splash.BlockSizes(rows, columns, part, rows, columns, part, rows, columns),
        mask_function=_visible(k.shape[2] - n, size, kernel.window),
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=kernel.soft_cap,
        save_residuals=False,
        residual_checkpoint_name=None,
        interpret=False,
    )

    def one(
        q: jax.Array, k: jax.Array, v: jax.Array, infos: tuple[MaskInfo, ...], ids: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        return attention(*infos)(q, k, v, ids)

    q = (q * kernel.scale).swapaxes(2, 3).reshape(a, h * r, n, d)
    sides = (q, rows), (k, columns), (v, columns)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % side), (0, 0))) for x, side in sides)
    out = jax.vmap(one)(q, k, v, (forward, forward, backward), splash.SegmentIds(*ids))
    return out[:, :, :n].reshape(a, h, r, n, d).swapaxes(2, 3)
