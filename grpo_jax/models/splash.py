"""Attention of packed sequences on TPUs, with JAX's splash attention kernels.

The kernels take lists of tiles, a segment id for each query and key, and a function of an int32 for each query and of
the key's index. Prompt i and all its completions have the same segment id. The function separates the completions, so
that neither prompts nor completions are copied or padded to a common length:

```
key        p0 p0  · │ p1 p1 p1 │ c0 c0 c0 c1 c1 c2 c2 c2
query c1   ■  ■   · │          │          ■  ■                own keys: index 4 and the key before it (reach 1)
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.models.context import Segments
from grpo_jax.models.tiles import Kernel, TileMask, padded

BITS = 16
"""Bits for a query's index, and for the number of own keys before it. Both are in one int32."""

PART = 512
"""Keys of a tile for which a kernel computes scores at a time, which limits the memory on the chip."""


def supports(tokens: int, *, sinks: bool) -> bool:
    """Return whether the kernels support packed sequences of `tokens` tokens, given whether a layer has sinks.

    The gradients of bfloat16 layers' sinks are not float32 before jax 0.11.
    """
    return tokens <= 1 << BITS and not sinks


def right_aligned(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Move prompts' keys or values [B, H, P, d] from the first `lengths` [B] slots to the last ones."""
    size = x.shape[2]
    at = (jnp.arange(size)[None] + lengths[:, None]) % size
    return jnp.take_along_axis(x, at[:, None, :, None], axis=2)


def most_tiles(segments: Segments, kernel: Kernel, *, prompts: int, size: int) -> int:
    """Return an upper bound on the number of key tiles that a tile of queries reads, given prompts of `size` slots.

    The kernels have as many steps for each tile of queries.
    """

    def tiles(keys: int) -> int:
        """Return the maximum number of tiles with any of `keys` consecutive keys."""
        return (keys - 2) // kernel.columns + 2

    block = segments.number.shape[1] // segments.prompt.shape[1]
    return tiles(kernel.rows + segments.longest) + min(tiles(prompts * size), (kernel.rows // block + 1) * tiles(size))


@functools.cache  # `jit` compares functions by identity
def _visible(shared: int, size: int, window: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the mask function for `shared` prompt keys in `size` slots per prompt, followed by completion keys."""

    def visible(query: jax.Array, key: jax.Array) -> jax.Array:
        index, reach = jax.lax.shift_right_logical(query, BITS), query & ((1 << BITS) - 1)
        before = index + shared - key
        of_prompt = key < shared
        if window is not None:
            of_prompt &= size - jax.lax.rem(key, size) + reach < window
        return of_prompt | ((before >= 0) & (before <= reach))

    return visible


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tile_mask: TileMask,
    kernel: Kernel,
    size: int,
    sinks: None = None,
) -> jax.Array:
    """Compute `fused.fused_attention` for packed sequences. Sinks are not supported, and outputs in padding are not 0.

    The first keys belong to prompts, each right-aligned in `size` slots, so that the distance of a query and a prompt
    key depends only on the query's position and the key's slot.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    a, h, n, r, d = q.shape
    rows, columns, part = kernel.rows, kernel.columns, min(kernel.columns, PART)
    queries, keys = padded(tile_mask.queries, rows), padded(tile_mask.keys, columns)
    index = jnp.arange(queries.number.shape[1], dtype=jnp.int32)[None]
    begins = queries.number != jnp.roll(queries.number, 1, axis=1)
    reach = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    reach = reach if kernel.window is None else jnp.minimum(reach, kernel.window - 1)
    tiles = tile_mask.tiles[str(kernel.window)]

    def steps(at: jax.Array, count: jax.Array, axis: int) -> MaskInfo:
        """Read tiles `at` [A, X, Y]. Steps after the first `count` [A, X] don't compute, and repeat a tile to load."""
        step, last = jnp.arange(at.shape[2])[None, None], jnp.maximum(count - 1, 0)[..., None]
        at = jnp.take_along_axis(at, jnp.minimum(step, last), axis=2)
        at, used = (jnp.moveaxis(x, 2, axis)[:, None] for x in (at, (step <= last).astype(jnp.int32)))
        return MaskInfo(at, None, used, None, (index << BITS) | reach)

    forward = steps(tiles.keys, tiles.key_count, 2)
    backward = steps(tiles.queries, tiles.query_count, 1)
    sizes = splash.BlockSizes(rows, columns, part, rows, columns, part, rows, columns)

    def one(q: jax.Array, k: jax.Array, v: jax.Array, infos: tuple[MaskInfo, ...], *ids: jax.Array) -> jax.Array:
        attend = splash.SplashAttentionKernel(
            *infos,
            block_sizes=sizes,
            is_mqa=False,
            save_residuals=False,
            mask_value=splash.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=kernel.soft_cap,
            residual_checkpoint_name=None,
            mask_function=_visible(k.shape[1] - n, size, kernel.window),
            interpret=False,
        )
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, -x.shape[1] % side), (0, 0))) for x, side in ((q, rows), (k, columns), (v, columns))
        )
        return attend(q, k, v, splash.SegmentIds(*ids))

    q = (q * kernel.scale).astype(q.dtype).swapaxes(2, 3).reshape(a, h * r, n, d)
    out = jax.vmap(one)(q, k, v, (forward, forward, backward), queries.prompt, keys.prompt)
    return out[:, :, :n].reshape(a, h, r, n, d).swapaxes(2, 3)
