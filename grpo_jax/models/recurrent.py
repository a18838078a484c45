"""Layers with a fixed-size state: gated short convolutions and gated delta nets.

The state consists of the tail, which contains the last inputs to the convolution, and, for delta nets, a memory. A
completion's first token reads the prompt's state from the `Prefix`. Padding does not change the state.

Each head of a gated delta net has a memory S [d_k, d_v]. Each token decays the memory and moves the value stored at its
key towards its own value, at rate β (Yang et al. 2024, Gated Delta Networks, eq. 10):

S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.models.config import ConvShape, DeltaShape, TransformerConfig
from grpo_jax.models.context import Context, LayerCache, RecurrentState, Segments
from grpo_jax.models.layers import RMSNorm, linear

CHUNK = 64
"""Maximum tokens per chunk, a power of two that fills an accelerator's matrix units. Larger chunks need more FLOPs."""


class Positions(NamedTuple):
    """Positions of a layer's tokens [B, G, T] among a call's tokens, or in the segments of a packed sequence."""

    position: jax.Array  # [B, G or 1, T] int32, relative to the segment's first token, or the first non-padding token
    length: jax.Array | None = None  # [B, G or 1] int32, number of tokens; None without padding
    fresh: jax.Array | None = None  # [B, G or 1] bool, whether a completion starts in this call; None without a cache
    segments: Segments | None = None  # segments of a packed sequence; None for completions

    @classmethod
    def of(cls, context: Context, shape: tuple[int, int, int]) -> Positions:
        """Compute the `Positions` for tokens of shape [B, G, T]."""
        b, _, t = shape
        if context.segments is not None:
            return cls(context.segments.position[:, None], segments=context.segments)
        before, length = jnp.zeros((b, 1), jnp.int32), None
        if context.present is not None:  # True for contiguous tokens, with padding before and after
            before = jnp.argmax(context.present, axis=-1).astype(jnp.int32)
            length = jnp.sum(context.present, axis=-1, dtype=jnp.int32)
        position = jnp.arange(t)[None, None] - before[..., None]
        if context.cache is None:
            return cls(position, length)
        fresh = context.index + before == (0 if context.start is None else context.start)
        return cls(position, length, fresh if length is None else fresh & (length > 0))


def convolve(x: jax.Array, kernel: jax.Array, tail: jax.Array, positions: Positions) -> jax.Array:
    """Compute the causal convolution y_t = Σ_j w_j x_{t−j} for each channel of x [B, G, T, C] and each completion.

    The last row of the kernel [K, C] is w_0. `tail` contains the K − 1 inputs before the first token: [B, G or 1,
    K − 1, C], or [A, M, K − 1, C] for the blocks of a packed sequence.
    """
    width, (b, g, t, c) = kernel.shape[0], x.shape

    def weigh(x: jax.Array, j: int) -> jax.Array:
        return x * jnp.expand_dims(kernel[width - 1 - j], tuple(range(x.ndim - 1)))

    y = weigh(x, 0)
    for j in range(1, min(width, t)):
        shifted = jnp.pad(x, ((0, 0), (0, 0), (j, 0), (0, 0)))[:, :, :t]
        y += weigh(jnp.where((positions.position >= j)[..., None], shifted, 0.0), j)
    # Add the tail's contribution to the first K − 1 tokens. A packed sequence's blocks are on the completion axis.
    tail = tail.astype(jnp.float32)
    size = t if positions.segments is None else t // tail.shape[1]
    y = y.reshape(b, -1, size, c)
    position = jnp.broadcast_to(positions.position, (b, positions.position.shape[1], t)).reshape(b, -1, size)
    for p in range(min(width - 1, t)):
        terms = [weigh(tail[:, :, width - 1 + p - j], j) for j in range(p + 1, width)]
        contribution = functools.reduce(jnp.add, terms)
        y += jnp.where((position == p)[..., None], contribution[:, :, None], 0.0)
    return y.reshape(b, g, t, c)


def last_tokens(x: jax.Array, tail: jax.Array, positions: Positions) -> jax.Array:
    """Return the last K − 1 non-padding inputs [B, G, K − 1, C] from the tail [B, G or 1, …] and x [B, G, T, C]."""
    (b, g, t, c), width = x.shape, tail.shape[2]
    tail = jnp.broadcast_to(tail, (b, g, width, c)).astype(x.dtype)
    if positions.length is None:
        return jnp.concatenate([tail, x], axis=2)[:, :, t:]

    def take(x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[2] - 1)[..., None], axis=2)

    # `index` contains indices into the concatenation of the tail and the tokens that are not padding.
    index = jnp.broadcast_to(positions.length[..., None] + jnp.arange(width)[None, None], (b, g, width))
    from_tokens = take(x, index - width - jnp.broadcast_to(positions.position[..., :1], index.shape))
    return jnp.where((index < width)[..., None], take(tail, index), from_tokens)


def _state_before(
    context: Context, shape: DeltaShape | ConvShape, mixed: jax.Array
) -> tuple[Positions, jax.Array | None, jax.Array]:
    """Return positions of inputs [B, G, T, C], and the memory ([B, H, G or 1, …] or [A, M, …]) and tail before them."""
    b, g, t, _ = mixed.shape
    positions = Positions.of(context, (b, g, t))
    memory, tail = shape.state
    if context.prefix is not None:
        prompt = cast(RecurrentState, context.prefix)
    else:
        zeros = None if memory is None else jnp.zeros((b, *memory), jnp.float32)
        prompt = RecurrentState(zeros, jnp.zeros((b, *tail), mixed.dtype))
    if positions.segments is not None:
        index = positions.segments.prompt

        def of_blocks(x: jax.Array) -> jax.Array:
            x = x.reshape((len(index), -1, *x.shape[1:]))
            return jax.vmap(lambda x, index: jnp.take(x, index, axis=0))(x, index)

        state = jax.tree.map(of_blocks, prompt)
        return positions, state.memory, state.tail[:, :, 0]

    def select(prompt: jax.Array, cached: jax.Array) -> jax.Array:
        """Return the initial state [B, X, G, …]: `prompt` [B, X, …] where a completion starts, else `cached`."""
        assert positions.fresh is not None
        cached = cached.reshape((b, prompt.shape[1], g, *prompt.shape[2:]))
        fresh = jnp.expand_dims(positions.fresh, (1, *range(3, cached.ndim)))
        return jnp.where(fresh, prompt[:, :, None], cached)

    if context.cache is None:
        state = jax.tree.map(lambda x: x[:, :, None], prompt)
    else:
        state = jax.tree.map(select, prompt, context.cache)
    return positions, state.memory, state.tail[:, 0]


def _state_after(
    context: Context, positions: Positions, memory: jax.Array | None, mixed: jax.Array, tail: jax.Array
) -> LayerCache:
    """Return the layer's state after the last token, or () for a packed sequence."""
    if positions.segments is not None:
        return ()
    state = RecurrentState(memory, last_tokens(mixed, tail, positions)[:, None])
    return state if context.cache is None else jax.tree.map(lambda x, old: x.reshape(old.shape), state, context.cache)


def _kernel(module: nn.Module, shape: DeltaShape | ConvShape, channels: int) -> jax.Array:
    """Return the module's convolution kernel [K, C], initialized uniformly in ±1/√K."""
    init = functools.partial(jax.random.uniform, minval=-(shape.kernel**-0.5), maxval=shape.kernel**-0.5)
    return module.param("conv1d", init, (shape.kernel, channels)).astype(jnp.float32)


class ShortConvolution(nn.Module):
    """Gated short convolution W (c ⊙ conv(b ⊙ x)) of LFM2, where b, c and x are projections of the layer's input."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
        c, shape = self.config, self.config.conv
        assert shape is not None
        first, second, x = jnp.split(linear(c, "in_proj", 3 * shape.width, shape.bias)(x), 3, axis=-1)
        mixed = first * x
        positions, _, tail = _state_before(context, shape, mixed)
        y = convolve(mixed.astype(jnp.float32), _kernel(self, shape, shape.width), tail, positions)
        if shape.bias:
            bias = self.param("conv1d_bias", nn.initializers.zeros, (shape.width,))
            y = y + bias.astype(jnp.float32).reshape(1, 1, 1, -1)
        y = linear(c, "out_proj", c.hidden_size, shape.bias)(context.pick(second * y.astype(c.dtype)))
        return y, _state_after(context, positions, None, mixed, tail)


class GatedDeltaNet(nn.Module):
    """Gated delta net: projections, short convolution, delta rule and gated norm. Params have Hugging Face's names."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
        c, shape = self.config, self.config.delta
        b, g, t, _ = x.shape
        assert shape is not None
        h = shape.value_heads
        mixed, z, beta, a = self._project(x, shape)

        def log_uniform(key: jax.Array, size: tuple[int, ...]) -> jax.Array:
            return jnp.log(jax.random.uniform(key, size, minval=0.01, maxval=16.0))

        rate, bias = self.param("A_log", log_uniform, (h,)), self.param("dt_bias", nn.initializers.ones, (h,))
        rate, bias = (x.astype(jnp.float32).reshape(1, 1, 1, h) for x in (rate, bias))
        decay = -jnp.exp(rate) * jax.nn.softplus(a.astype(jnp.float32) + bias)
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        if context.present is not None:
            decay, beta = (jnp.where(context.present[..., None], x, 0.0) for x in (decay, beta))

        positions, memory, tail = _state_before(context, shape, mixed)
        assert memory is not None
        kernel = _kernel(self, shape, mixed.shape[-1])
        y = nn.silu(convolve(mixed.astype(jnp.float32), kernel, tail, positions))
        q, k, v = jnp.split(y, [shape.key_width, 2 * shape.key_width], axis=-1)

        def heads(x: jax.Array, d: int) -> jax.Array:
            return x.reshape(b, g, t, -1, d).transpose(0, 3, 1, 2, 4)  # [B, H, G, T, d]

        def unit(x: jax.Array) -> jax.Array:
            return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

        q, k = (jnp.repeat(unit(heads(x, shape.key_dim)), h // shape.key_heads, axis=1) for x in (q, k))
        decay, beta = (x.transpose(0, 3, 1, 2) for x in (decay, beta))
        inputs = (q * shape.key_dim**-0.5, k, heads(v, shape.value_dim), decay, beta)
        y, memory = self._apply_rule(inputs, positions, memory)
        y = RMSNorm(c.rms_norm_eps, name="norm")(context.pick(y.transpose(0, 2, 3, 1, 4)))
        y = y * nn.silu(context.pick(z).reshape(y.shape).astype(jnp.float32))
        y = linear(c, "out_proj", c.hidden_size)(y.reshape((*y.shape[:3], -1)).astype(c.dtype))
        return y, _state_after(context, positions, memory, mixed, tail)

    def _project(self, x: jax.Array, shape: DeltaShape) -> tuple[jax.Array, ...]:
        """Compute queries, keys and values [B, G, T, C], gates [B, G, T, H d_v], and raw β and decay [B, G, T, H]."""
        c = self.config
        wide, narrow = (shape.mixed_width, shape.value_width), (shape.value_heads,) * 2
        if not shape.by_key_heads:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            return tuple(linear(c, name, n)(x) for name, n in zip(names, wide + narrow, strict=True))

        def project(name: str, features: int, ends: list[int]) -> list[jax.Array]:
            """Apply a projection with columns grouped by key head, and split each group at the indices `ends`."""
            y = linear(c, name, features)(x)
            parts = jnp.split(y.reshape((*y.shape[:-1], shape.key_heads, -1)), ends, axis=-1)
            return [part.reshape((*y.shape[:-1], -1)) for part in parts]

        d, per_head = shape.key_dim, shape.value_width // shape.key_heads
        q, k, v, z = project("in_proj_qkvz", sum(wide), [d, 2 * d, 2 * d + per_head])
        beta, a = project("in_proj_ba", sum(narrow), [shape.value_heads // shape.key_heads])
        return jnp.concatenate([q, k, v], axis=-1), z, beta, a

    def _apply_rule(
        self, inputs: Sequence[jax.Array], positions: Positions, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Apply the delta rule. Returns outputs [B, H, G, T, d_v] and the final memory [B, H, G, d_k, d_v]."""
        q, k, v, decay, beta = inputs
        b, h, g, t, _ = q.shape
        precision = "highest" if self.config.dtype == "float32" else None
        if positions.segments is None:
            memory = jnp.broadcast_to(memory, (b, h, g, *memory.shape[3:]))
            if t > 1:
                return delta_rule(q, k, v, decay, beta, memory, precision=precision)
            q, k, v, decay, beta = (x[:, :, :, 0] for x in inputs)
            out, memory = delta_step(q, k, v, decay, beta, memory)
            return out[:, :, :, None], memory
        block = t // memory.shape[1]
        chunk = math.gcd(block, CHUNK)
        begins = jnp.repeat(memory, block // chunk, axis=1).swapaxes(1, 2)[:, :, None]
        position, memory = positions.position[:, None], jnp.zeros_like(begins[:, :, :, 0])
        return delta_rule(
            q, k, v, decay, beta, memory, position=position, begins=begins, chunk=chunk, precision=precision
        )


def delta_step(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Apply `delta_rule` to a single token. The inputs have no N axis."""
    alpha = jnp.exp(decay)[..., None]
    # Reading the memory accounts for most of the cost of a step, so both reads share one pass.
    reads = jnp.einsum("...xk,...kv->...xv", jnp.stack([k, q], axis=-2), memory)
    stored, out = reads[..., 0, :] * alpha, reads[..., 1, :] * alpha
    new = (v - stored) * beta[..., None]
    memory = memory * alpha[..., None] + k[..., :, None] * new[..., None, :]
    return out + jnp.sum(q * k, axis=-1, keepdims=True) * new, memory


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    memory: jax.Array,
    *,
    position: jax.Array | None = None,
    begins: jax.Array | None = None,
    chunk: int = CHUNK,
    precision: str | None = "highest",
) -> tuple[jax.Array, jax.Array]:
    """Compute the outputs [..., N, d_v] of the gated delta rule in chunks, and the memory after the last token.

    See Yang et al. 2024, Gated Delta Networks, section 3.3. Log-decays are only added, never subtracted, so a token
    with a log-decay of −∞ does not reduce the precision of later tokens.

    Args:
      q, k, v: [..., N, d] float32 queries, keys and values.
      decay, beta: [..., N] float32 log α ≤ 0 and β in [0, 1]. Tokens for which both are 0 do not change the memory.
      memory: [..., d_k, d_v] float32 memory before the first token.
      position: [..., N] int32 position of each token in its segment, broadcastable to the leading axes of q. N must be
        a multiple of `chunk`. If None, there is one segment, which continues from `memory`, and `begins` is not used.
      begins: [..., N / chunk, d_k, d_v] float32 initial memory for segments that start in each chunk.
      chunk: maximum number of tokens per chunk, a power of two.
      precision: precision of the matrix products (see `jax.lax.Precision`).
    """
    *leading, n, _ = k.shape
    chunk = min(chunk, 1 << max(0, n - 1).bit_length())
    pad = -n % chunk

    def split_chunks(x: jax.Array, axes: int) -> jax.Array:
        x = jnp.pad(x, [(0, 0)] * len(leading) + [(0, pad)] + [(0, 0)] * axes)
        return x.reshape((*x.shape[: len(leading)], -1, chunk, *x.shape[len(leading) + 1 :]))

    (q, k, v), (decay, beta) = (split_chunks(x, 1) for x in (q, k, v)), (split_chunks(x, 0) for x in (decay, beta))
    index = jnp.expand_dims(jnp.arange(chunk), tuple(range(len(leading) + 1)))
    i, j = index[..., :, None], index[..., None, :]
    visible, first = i >= j, None
    if position is not None:
        first = index - split_chunks(position, 0)  # the segment's first token, relative to the chunk's first token
        visible = visible & (j >= first[..., None])
    product = functools.partial(jnp.einsum, precision=precision)
    # d[i, j]: decay between token j's write and token i's read. inward: decay from the start of the chunk or segment.
    log_decay = jnp.where(i > j, decay[..., None], 0.0)
    d = jnp.where(visible, jnp.exp(jnp.cumsum(log_decay, axis=-2)), 0.0)
    inward = jnp.exp(jnp.sum(jnp.where(visible, decay[..., None, :], 0.0), axis=-1))[..., None]
    lower = jnp.where(i > j, product("...id,...jd->...ij", k, k) * d * beta[..., None], 0.0)
    solve = inverse_of_unit_lower(lower, precision)
    new = product("...ij,...jd->...id", solve, v * beta[..., None])
    stored = product("...ij,...jd->...id", solve, k * beta[..., None] * inward)
    scores, reads = product("...id,...jd->...ij", q, k) * d, q * inward
    write, keep = k * d[..., -1, :, None], inward[..., -1:, :]
    from_begins = added = None
    if first is not None:
        assert begins is not None
        begun = (first >= 0)[..., None]  # whether a token's segment starts in its chunk
        new = new - product("...ik,...kv->...iv", jnp.where(begun, stored, 0.0), begins)
        from_begins = product("...ik,...kv->...iv", jnp.where(begun, reads, 0.0), begins)
        stored, reads = jnp.where(begun, 0.0, stored), jnp.where(begun, 0.0, reads)
        added, keep = jnp.where(begun[..., -1:, :], keep * begins, 0.0), jnp.where(begun[..., -1:, :], 0.0, keep)

    def add_chunk(memory: jax.Array, chunk: Sequence[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        new, stored, reads, write, keep, added = chunk
        new = new - product("...ik,...kv->...iv", stored, memory)
        from_memory = product("...ik,...kv->...iv", reads, memory)
        memory = memory * keep + product("...ik,...iv->...kv", write, new)
        return memory if added is None else memory + added, (new, from_memory)

    axis = len(leading)
    chunks = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (new, stored, reads, write, keep, added))
    memory, results = jax.lax.scan(add_chunk, memory, chunks)
    new, from_memory = (jnp.moveaxis(x, 0, axis) for x in results)
    out = from_memory + product("...ij,...jd->...id", scores, new)
    out = out if from_begins is None else out + from_begins
    return out.reshape((*leading, n + pad, -1))[..., :n, :], memory


def inverse_of_unit_lower(x: jax.Array, precision: str | None = "highest") -> jax.Array:
    """Compute (I + x)⁻¹ for strictly lower triangular matrices x [..., n, n], where n is a power of two.

    Inverts blocks of doubling size, as accurately as substitution: [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [−C⁻¹ B A⁻¹, C⁻¹]].
    """
    *leading, n, _ = x.shape
    inverse, size = jnp.ones((*leading, n, 1, 1), x.dtype), 1
    while size < n:
        pairs = n // (2 * size)
        blocks = x.reshape((*leading, pairs, 2 * size, pairs, 2 * size))
        diagonal_blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        below, inverses = diagonal_blocks[..., size:, :size], inverse.reshape((*leading, pairs, 2, size, size))
        a, c = inverses[..., 0, :, :], inverses[..., 1, :, :]
        low = -jnp.einsum("...ij,...jk,...kl->...il", c, below, a, precision=precision)
        upper = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([low, c], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]
