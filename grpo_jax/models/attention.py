"""Attention of completions over their own tokens and over a shared prompt.

The G completions of a prompt share the prompt's keys and values, which are computed and stored only once. Completions
are arrays [B, G, T] or `Segments` of a packed sequence. Without a prompt, this is ordinary causal attention. Softmax
and all sums are computed in float32 regardless of the compute dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from grpo_jax.messages import one_line
from grpo_jax.models.attention_tiles import MASKED, NO_PROMPT, Kernel, TileMask, cap_scores, find_tiles
from grpo_jax.models.context import Prefix, Segments, num_slots
from grpo_jax.models.fused import fused_attention
from grpo_jax.models.sharding import dividing_axes
from grpo_jax.models.splash import splash_attention

PromptKeys = tuple[jax.Array, jax.Array, jax.Array]
"""Prompt keys [B, H_kv, d, P], values [B, H_kv, P, d] and lengths [B]."""


def group_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: PromptKeys | None,
    *,
    index: jax.Array | int,
    start: jax.Array | None = None,
    last_visible: jax.Array | None = None,
    kernel: Kernel,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute the attention [B, H_kv, G, T, R, d] of G completions over their own keys and their prompt's keys.

    One softmax covers the prompt's keys (p), the completion's own keys (o) and the sink (s):
    out = (e_p V_p + e_o V_o) / (Σ e_p + Σ e_o + e_s), with e = exp(score − max).

    Args:
      q: queries [B, H_kv, G, T, R, d]. R query heads share a key head. Query t is at slot `index + t` and attends to
        slots start..index+t, and also to later slots up to `last_visible`.
      k: keys [B, H_kv, G, d, S]. The first three axes may be merged. Slots form a ring: slot S + 2 is slot 2.
      v: values [B, H_kv, G, S, d]. The first three axes may be merged.
      prefix: the prompts' keys, values and lengths, or None.
      index: slot of the first query, a scalar or [B].
      start: [B, G] slot of each completion's first token. Defaults to 0.
      last_visible: [B, T] int32 slot of the last key that a query attends to, used if later than the query's own slot.
      kernel: settings with the scale, window and soft cap. The tile sizes are not used.
      sinks: [H_kv, R] float32 score of each query head for an additional key without a value, or None.
    """
    chex.assert_rank(q, 6)
    t, s = q.shape[3], v.shape[-2]
    position = slot = jnp.reshape(index, (-1, 1, 1)) + jnp.arange(t)[None, None]
    # In a full ring, the slot after the query's slot contains the oldest key.
    distance = (slot[..., None] - jnp.arange(s)[None, None, None]) % s
    if start is not None:
        position = slot - start[..., None]
    visible = distance <= position[..., None]
    if kernel.window is not None:
        visible &= distance < kernel.window
    if last_visible is not None:
        key_slot = jnp.arange(s)[None, None, None]
        visible |= (key_slot > slot[..., None]) & (key_slot <= last_visible[:, None, :, None])
    return _attend(q, k, v, prefix, visible, position, kernel, sinks)


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: PromptKeys,
    segments: Segments,
    kernel: Kernel,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute the attention [A, H_kv, 1, N, R, d] of packed segments over their own keys and their prompts' keys.

    Scores are computed for prompt keys, and for keys in the query's block and the `segments.reach` blocks before it.
    Keys from other segments are masked out. q is [A, H_kv, 1, N, R, d], k and v are [A, H_kv, 1, N, d], and `prefix`
    has B / A prompts for each sequence. See `group_attention` for `kernel` and `sinks`.
    """
    a, h, _, n, r, d = q.shape
    chex.assert_shape([k, v], (a, h, 1, n, d))
    chex.assert_shape([segments.number, segments.position], (a, n))
    m = segments.prompt.shape[1]
    size = n // m

    def attend_sequence(q: jax.Array, k: jax.Array, v: jax.Array, prefix: PromptKeys, segments: Segments) -> jax.Array:
        """Compute attention [H, N, R, d] for one sequence from q [H, N, R, d] and k and v [H, N, d]."""

        def blocks(x: jax.Array, axis: int, padding: int = 0) -> jax.Array:
            """Return, for each of M blocks, the part of x in that block and the `reach` blocks before it, [M, ...]."""
            widths = [(0, 0)] * x.ndim
            widths[axis] = (segments.reach * size, 0)
            x = jnp.moveaxis(jnp.pad(x, widths, constant_values=padding), axis, 0)
            x = x.reshape((m + segments.reach, size, *x.shape[1:]))
            return jnp.concatenate([x[i : i + m] for i in range(segments.reach + 1)], axis=1)

        keys, values = (jnp.moveaxis(blocks(x, 1), 2, 1)[:, :, None] for x in (k, v))
        number, position = segments.number.reshape(m, size), segments.position.reshape(m, size)
        distance = position[:, :, None] - blocks(segments.position, 0)[:, None]
        visible = (number[:, :, None] == blocks(segments.number, 0, padding=-2)[:, None]) & (distance >= 0)
        if kernel.window is not None:
            visible &= distance < kernel.window
        q = q.reshape(h, m, size, r, d).swapaxes(0, 1)[:, :, None]
        block_prefix = jax.tree.map(lambda x: jnp.take(x, segments.prompt, axis=0), prefix)
        keys, visible, position = keys.swapaxes(-1, -2), visible[:, None], position[:, None]
        out = _attend(q, keys, values, block_prefix, visible, position, kernel, sinks)
        return out[:, :, 0].swapaxes(0, 1).reshape(h, n, r, d)

    prefix = jax.tree.map(lambda x: x.reshape((a, -1, *x.shape[1:])), prefix)
    if a == 1:  # on CPUs, batched gathers are slower, even with a batch of one
        prefix, segments = jax.tree.map(lambda x: x[0], (prefix, segments))
        return attend_sequence(q[0, :, 0], k[0, :, 0], v[0, :, 0], prefix, segments)[None, :, None]
    return jax.vmap(attend_sequence)(q[:, :, 0], k[:, :, 0], v[:, :, 0], prefix, segments)[:, :, None]


def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute an einsum in at least float32, since bfloat16 sums would have only 8 significant bits."""
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: PromptKeys | None,
    visible: jax.Array,
    position: jax.Array,
    kernel: Kernel,
    sinks: jax.Array | None,
) -> jax.Array:
    """Compute `group_attention` from a mask for own keys [B or 1, G or 1, T, S] and positions [B or 1, G or 1, T]."""
    b, h, g, t, r, d = q.shape
    s = v.shape[-2]
    rows = k.shape[:-2]

    def score(products: jax.Array) -> jax.Array:
        return cap_scores(products.astype(jnp.float32), kernel)

    own_scores = score(_product("...qd,...ds->...qs", q.reshape((*rows, t * r, d)), k)).reshape(b, h, g, t, r, s)
    own_scores = jnp.where(visible[:, None, :, :, None], own_scores, MASKED)
    top = own_scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.reshape(1, h, 1, 1, r, 1)
        top = jnp.maximum(top, sinks)
    if prefix is not None:
        pk, pv, lengths = prefix
        p = pv.shape[2]
        chex.assert_shape([pk, pv, lengths], [(b, h, d, p), (b, h, p, d), (b,)])
        prompt_scores = score(_product("bhqd,bhdp->bhqp", q.reshape(b, h, g * t * r, d), pk)).reshape(b, h, g, t, r, p)
        slot, length = jnp.arange(p).reshape(1, 1, 1, p), lengths.reshape(b, 1, 1, 1)
        in_prompt = slot < length
        if kernel.window is not None:
            in_prompt = in_prompt & (length + position[..., None] - slot < kernel.window)
        prompt_scores = jnp.where(in_prompt[:, None, :, :, None], prompt_scores, MASKED)
        top = jnp.maximum(top, prompt_scores.max(axis=-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    e_own = jnp.exp(own_scores - top)
    total = e_own.sum(axis=-1, keepdims=True)
    out = _product("...qs,...sd->...qd", e_own.astype(v.dtype).reshape((*rows, t * r, s)), v).reshape(q.shape)
    if prefix is not None:
        e_prompt = jnp.exp(prompt_scores - top)
        total += e_prompt.sum(axis=-1, keepdims=True)
        out += _product("bhqp,bhpd->bhqd", e_prompt.astype(v.dtype).reshape(b, h, g * t * r, p), pv).reshape(q.shape)
    if sinks is not None:
        total += jnp.exp(sinks - top)
    return (out / total.astype(out.dtype)).astype(v.dtype)


def make_tile_mask(
    tokens: tuple[int, int, int],
    prefix: Prefix | None,
    segments: Segments | None,
    kernel: Kernel,
    *,
    windows: Iterable[int | None],
    queries_per_kv: int,
) -> TileMask:
    """Build the `TileMask` for completions or packed sequences of shape `tokens`, (B, G, T) or (A, 1, N).

    `windows` contains the attention windows of the decoder's layers, and `queries_per_kv` is R, the number of query
    heads that share a key head. "splash" needs a prefix and segments.
    """
    splash = kernel.implementation == "splash"
    b, g, t = tokens
    n = g * t
    index = jnp.arange(n)[None]
    # Lengths are [b, prompts per row]. A row of completions has one prompt, and a packed sequence may have several.
    lengths = jnp.zeros((b, 1), jnp.int32) if prefix is None else prefix.lengths.reshape(b, -1)
    size = 0 if prefix is None else num_slots(prefix.layers)
    shared = lengths.shape[1] * size + kernel.gap(lengths.shape[1] * size)
    if segments is None:
        prompt, position, valid = jnp.zeros((1, 1), jnp.int32), index % t, jnp.ones((1, 1), bool)
    else:
        prompt = jnp.repeat(segments.prompt, n // segments.prompt.shape[1], axis=1)
        position, valid = segments.position, segments.number >= 0
    length = jnp.take_along_axis(lengths, prompt, axis=1)
    first = prompt * size + (size - length if splash else 0)  # "splash" right-aligns prompts

    def bounds(window: int | None) -> jax.Array:
        """Compute `Tiles.bounds`: a query attends to itself and the `window - 1` tokens before it."""
        before = position if window is None else jnp.minimum(position, window - 1)
        hidden = 0 if window is None else jnp.clip(length + position - window + 1, 0, length)
        ends = first + hidden, first + length, shared + index - before, shared + index + 1
        return jnp.stack([jnp.broadcast_to(jnp.where(valid, x, 0), (b, n)) for x in ends], axis=1).astype(jnp.int32)

    heads = 1 if splash else queries_per_kv
    tiles = {str(window): find_tiles(bounds(window), shared + n, kernel, heads) for window in windows}
    if not (splash and segments is not None):
        return TileMask(tiles, None, kernel.implementation)
    # Upper bound on the number of visible key tiles. The kernels take this many steps for every tile of queries.
    most = sum((keys - 2) // kernel.columns + 2 for keys in (kernel.rows + segments.max_segment_length, shared))
    tiles = {window: x.replace(keys=x.keys[..., :most]) for window, x in tiles.items()}
    slot, query_prompt = jnp.arange(shared)[None], jnp.broadcast_to(prompt, (b, n))
    slot_prompt = jnp.where(slot % size >= size - jnp.repeat(lengths, size, axis=1), slot // size, NO_PROMPT)
    return TileMask(tiles, (query_prompt, jnp.concatenate([slot_prompt, query_prompt], axis=1)), kernel.implementation)


def tiled_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: PromptKeys | None,
    tile_mask: TileMask,
    kernel: Kernel,
    mesh: Mesh | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute `group_attention` for whole completions, or `packed_attention`, tile by tile.

    q is [B, H_kv, G, T, R, d], and k and v are [B, H_kv, G, T, d]. For packed sequences, they are [A, H_kv, 1, N, ...].
    On a mesh, the first two axes are sharded as in `models.sharding`.
    """
    b, h, g, t, r, d = q.shape
    k, v = (x.reshape(b, h, g * t, d) for x in (k, v))
    splash = kernel.implementation == "splash"
    if prefix is not None:

        def merge_prompts(x: jax.Array) -> jax.Array:
            """Merge the prompts of each packed sequence: [B, H, P, d] → [A, H, B / A · P + gap, d]."""
            if splash:  # right-align the prompts
                index = (jnp.arange(x.shape[2])[None] + prefix[2][:, None]) % x.shape[2]
                x = jnp.take_along_axis(x, index[:, None, :, None], axis=2)
            x = x.reshape((b, -1, *x.shape[1:])).swapaxes(1, 2).reshape(b, h, -1, d)
            return jnp.pad(x, ((0, 0), (0, 0), (0, kernel.gap(x.shape[2])), (0, 0)))

        k = jnp.concatenate([merge_prompts(prefix[0].swapaxes(-1, -2)), k], axis=2)
        v = jnp.concatenate([merge_prompts(prefix[1]), v], axis=2)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, tile_mask: TileMask, sinks: jax.Array | None) -> jax.Array:
        if splash and prefix is not None:
            return splash_attention(q, k, v, tile_mask, kernel, prefix[1].shape[2])
        return fused_attention(q, k, v, tile_mask, kernel, sinks)

    merged = q.reshape(b, h, g * t, r, d)
    if mesh is None:
        return attend(merged, k, v, tile_mask, sinks).reshape(q.shape)

    # Use `shard_map`, since XLA's partitioner would gather the arrays that the loops over tiles read.
    prompts, heads = dividing_axes(b, mesh, "data", "fsdp"), dividing_axes(h, mesh, "tensor")
    spec = PartitionSpec(prompts, heads)
    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(spec, spec, spec, PartitionSpec(prompts), PartitionSpec(heads)),
        out_specs=spec,
        check_vma=False,
    )
    return sharded(merged, k, v, tile_mask, sinks).reshape(q.shape)


@functools.cache
def mosaic_error(device: jax.Device, head_dim: int) -> str | None:
    """Compare the values and gradients of "mosaic" and "tiles" on a device.

    Returns None if they agree to within 2% of each array's largest value, otherwise a message that describes the
    difference or the exception. Some versions of CUDA's assembler, such as 12.8.0 to 12.9.0, miscompile attention
    masks. The packed sequences in this test are long enough that several programs share the prompts' keys.
    """
    a, heads, r, size, t = 2, 2, 8, 100, 96  # two sequences, each with 11 completions of each of two prompts
    n, lengths = 22 * t, jnp.array([37, size, 1, 64])
    index = jnp.broadcast_to(jnp.arange(n)[None], (a, n))
    segments = Segments(index // t, index % t, jnp.broadcast_to(jnp.arange(2)[None], (a, 2)), t, 1)
    wide, narrow = (a, heads, 1, n, r, head_dim), (a, heads, 1, n, head_dim)
    prompts = (2 * a, heads, head_dim, size), (2 * a, heads, size, head_dim)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(name: str, arrays: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        kernel = Kernel.of(name, head_dim, "bfloat16")._replace(scale=head_dim**-0.5)

        def loss(arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            q, k, v, prompt_k, prompt_v, weights = arrays
            prefix = Prefix(((prompt_k, prompt_v),), lengths)
            tile_mask = make_tile_mask((a, 1, n), prefix, segments, kernel, windows={None}, queries_per_kv=r)
            out = tiled_attention(q, k, v, (prompt_k, prompt_v, lengths), tile_mask, kernel)
            return (out * weights).sum().astype(jnp.float32), out

        return jax.grad(loss, has_aux=True)(arrays)

    try:
        with jax.default_device(device):
            shapes: tuple[tuple[int, ...], ...] = (wide, narrow, narrow, *prompts, wide)
            keys = jax.random.split(jax.random.key(0), len(shapes))
            arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
            actual, expected = (jax.tree.leaves(gradients(name, arrays)) for name in ("mosaic", "tiles"))
            errors = [jnp.abs(x - y).max() / jnp.abs(y).max() for x, y in zip(actual, expected, strict=True)]
            largest = float(jnp.stack(errors).max())  # NaN if any error is NaN
    except Exception as error:
        return one_line(error)
    return None if largest <= 0.02 else f"values or gradients of 'mosaic' and 'tiles' differ by {largest:.1%}"
