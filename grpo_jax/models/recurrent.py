"""Layers that keep a state of fixed size: gated short convolutions, and the gated delta net.

```
              tokens read together               one token, decoding
tail      k−2 k−1 │ c0 c1 c2 c3 ·             c2 c3 │ c4
                  └── convolution ──┘               └─ new tail c3 c4
memory    of the prompt ──► of c3                of c3 ──► of c4
```

Where the first token of a completion is read, its state is the prompt's: that is looked at in the `Prefix`, and not
copied to the completions before. Tokens that are not there (`Context.present`) leave a state as it is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.models.attention import Segments
from grpo_jax.models.cache import State
from grpo_jax.models.context import Context
from grpo_jax.models.delta import CHUNK, delta_rule, delta_step
from grpo_jax.models.layers import ConvShape, DeltaShape, RMSNorm, TransformerConfig, linear


class Positions(NamedTuple):
    """Positions of a layer's tokens [B, G, T] in their completions, or in the segments of a packed sequence.

    Attributes:
      position: [B, G or 1, T] int32 of each token, counted from the first one of its completion that is read here; of
        a packed sequence from its segment's first.
      there: [B, G or 1] int32, tokens that are there; None: all.
      fresh: [B, G or 1] bool, the first of them is the first of its completion; None where there is no cache.
      segments: of a packed sequence, or None.
    """

    position: jax.Array
    there: jax.Array | None = None
    fresh: jax.Array | None = None
    segments: Segments | None = None

    @classmethod
    def of(cls, context: Context, shape: tuple[int, int, int]) -> Positions:
        """Return the positions of tokens [B, G, T] of that shape in a `Context`."""
        b, _, t = shape
        if context.segments is not None:
            return cls(context.segments.position[:, None], segments=context.segments)
        before, count = jnp.zeros((b, 1), jnp.int32), None
        if context.present is not None:  # side by side, with nothing or something before and after them
            before = jnp.argmax(context.present, axis=-1).astype(jnp.int32)
            count = jnp.sum(context.present, axis=-1, dtype=jnp.int32)
        fresh = None
        if context.cache is not None:
            start = 0 if context.start is None else context.start.reshape(b, -1)
            fresh = context.index + before == start
            fresh = fresh if count is None else fresh & (count > 0)
        return cls(jnp.arange(t)[None, None] - before[..., None], count, fresh)

    def begin(self, prompt: jax.Array, kept: jax.Array | None) -> jax.Array:
        """Return the state before the first token [B, X, G or 1, …]: `kept`, or the prompt's [B, X, …] if it is
        fresh."""
        prompt = prompt[:, :, None]
        if kept is None or self.fresh is None:
            return prompt
        fresh = self.fresh.reshape(self.fresh.shape[0], 1, -1, *[1] * (kept.ndim - 3))
        return jnp.where(fresh, prompt, kept)

    def of_blocks(self, of_prompts: jax.Array) -> jax.Array:
        """Return the states that the segments of each block of a packed sequence begin with [A, M, …], given those of
        the prompts [B, …]."""
        assert self.segments is not None
        prompt = self.segments.prompt
        own = of_prompts.reshape(prompt.shape[0], -1, *of_prompts.shape[1:])
        return jax.vmap(lambda own, at: jnp.take(own, at, axis=0))(own, prompt)


def convolve(x: jax.Array, kernel: jax.Array, tail: jax.Array, positions: Positions) -> jax.Array:
    """y_t = Σ_j w_j x_{t−j} over the last K tokens of each completion, channel by channel.

    Args:
      x: [B, G, T, C] float32.
      kernel: [K, C]; its last row weighs the token itself.
      tail: [R, S, K − 1, C] of what was before: R, S are B, G or 1, or of a packed sequence A, M.

    Returns:
      [B, G, T, C] float32.
    """
    width, (b, g, t, c) = kernel.shape[0], x.shape

    def weigh(x, j):
        return x * kernel[width - 1 - j].reshape(*[1] * (x.ndim - 1), c)

    y = weigh(x, 0)
    for j in range(1, min(width, t)):
        before = jnp.pad(x, ((0, 0), (0, 0), (j, 0), (0, 0)))[:, :, :t]
        y += weigh(jnp.where((positions.position >= j)[..., None], before, 0.0), j)
    # The tail's part of each of the first K − 1 tokens; blocks of a packed sequence stand where completions do.
    tail = tail.astype(jnp.float32)
    size = t if positions.segments is None else t // tail.shape[1]
    y = y.reshape(b, -1, size, c)
    at = jnp.broadcast_to(positions.position, (b, positions.position.shape[1], t)).reshape(b, -1, size)
    for p in range(min(width - 1, t)):
        more = sum(weigh(tail[:, :, width - 1 + p - j], j) for j in range(p + 1, width))
        y += jnp.where((at == p)[..., None], more[:, :, None], 0.0)
    return y.reshape(b, g, t, c)


def last_tokens(x: jax.Array, tail: jax.Array, positions: Positions) -> jax.Array:
    """The last K − 1 tokens [B, G, K − 1, C] of those that are there, x [B, G, T, C] after the tail [B, G or 1, …]."""
    (b, g, t, c), width = x.shape, tail.shape[2]
    tail = jnp.broadcast_to(tail, (b, g, width, c)).astype(x.dtype)
    if positions.there is None:
        return jnp.concatenate([tail, x], axis=2)[:, :, t:]

    def take(x: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, jnp.clip(at, 0, x.shape[2] - 1)[..., None], axis=2)

    # Of the tail and the tokens that are there, end to end.
    at = jnp.broadcast_to(positions.there[..., None] + jnp.arange(width)[None, None], (b, g, width))
    of_tokens = take(x, at - width - jnp.broadcast_to(positions.position[..., :1], at.shape))
    return jnp.where((at < width)[..., None], take(tail, at), of_tokens)


def _before(
    context: Context, shape: DeltaShape | ConvShape, mixed: jax.Array
) -> tuple[Positions, State, tuple[jax.Array | None, jax.Array | None]]:
    """Return the positions of tokens [B, G, T, C], the state after their prompts (zeros without), and the cached
    (memory, tail)."""
    b, g, t, _ = mixed.shape
    memory, tail = shape.state
    if context.prefix is not None:
        prompt = State(*context.prefix[:2])
    else:
        none_yet = None if memory is None else jnp.zeros((b, *memory), jnp.float32)
        prompt = State(none_yet, jnp.zeros((b, *tail), mixed.dtype))
    kept: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if context.cache is not None:
        kept = jax.tree.map(lambda x, like: x.reshape(b, like.shape[1], g, *like.shape[2:]), context.cache, prompt)
    return Positions.of(context, (b, g, t)), prompt, kept


def _tail(positions: Positions, prompt: State, kept: jax.Array | None) -> jax.Array:
    """Return the tail before the first token, as `convolve` takes it; `kept` is the cache's."""
    if positions.segments is not None:
        return positions.of_blocks(prompt.tail[:, 0])
    return positions.begin(prompt.tail, kept)[:, 0]


def _after(
    context: Context, positions: Positions, memory: jax.Array | None, mixed: jax.Array, tail: jax.Array
) -> State | None:
    """Return the state after the tokens; None for a packed sequence."""
    if positions.segments is not None:
        return None
    after = State(memory, last_tokens(mixed, tail, positions)[:, None])
    return after if context.cache is None else jax.tree.map(lambda x, old: x.reshape(old.shape), after, context.cache)


def _kernel(module: nn.Module, shape: DeltaShape | ConvShape, channels: int) -> jax.Array:
    """Return a convolution's kernel [K, C] of a module, uniform over ±1/√K at first."""
    bound = shape.kernel**-0.5

    def init(key: jax.Array, size: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, size, minval=-bound, maxval=bound)

    return module.param("conv1d", init, (shape.kernel, channels)).astype(jnp.float32)


class ShortConvolution(nn.Module):
    """W (c ⊙ conv(b ⊙ x)), where b, c and x are three projections of the input; with Hugging Face's names.

    Two gates and a convolution over the last K tokens, channel by channel, in the place of attention (LFM2).
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x, context):
        c, shape = self.config, self.config.conv
        assert shape is not None
        first, second, x = jnp.split(linear(c, "in_proj", 3 * shape.width, shape.bias)(x), 3, axis=-1)
        mixed = first * x
        positions, prompt, (_, kept) = _before(context, shape, mixed)
        tail = _tail(positions, prompt, kept)
        kernel = _kernel(self, shape, shape.width)
        y = convolve(mixed.astype(jnp.float32), kernel, tail, positions)
        if shape.bias:
            bias = self.param("conv1d_bias", nn.initializers.zeros, (shape.width,))
            y = y + bias.astype(jnp.float32).reshape(1, 1, 1, -1)
        y = linear(c, "out_proj", c.hidden_size, shape.bias)(context.pick(second * y.astype(c.dtype)))
        return y, _after(context, positions, None, mixed, tail)


class GatedDeltaNet(nn.Module):
    """Projections, short convolution, gated delta rule and gated norm of one layer, with Hugging Face's names."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x, context):
        c, shape = self.config, self.config.delta
        b, g, t, _ = x.shape
        assert shape is not None
        h = shape.value_heads
        mixed, z, beta, a = self._project(x, shape)

        def log_uniform(key, size):
            return jnp.log(jax.random.uniform(key, size, minval=0.01, maxval=16.0))

        rate, bias = self.param("A_log", log_uniform, (h,)), self.param("dt_bias", nn.initializers.ones, (h,))
        rate, bias = (x.astype(jnp.float32).reshape(1, 1, 1, h) for x in (rate, bias))
        decay = -jnp.exp(rate) * jax.nn.softplus(a.astype(jnp.float32) + bias)
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        if context.present is not None:
            decay, beta = (jnp.where(context.present[..., None], x, 0.0) for x in (decay, beta))

        positions, prompt, (memory, kept) = _before(context, shape, mixed)
        assert prompt.memory is not None
        tail = _tail(positions, prompt, kept)
        kernel = _kernel(self, shape, mixed.shape[-1])
        y = nn.silu(convolve(mixed.astype(jnp.float32), kernel, tail, positions))
        q, k, v = jnp.split(y, [shape.key_width, 2 * shape.key_width], axis=-1)

        def heads(x, d):
            return x.reshape(b, g, t, -1, d).transpose(0, 3, 1, 2, 4)  # [B, H, G, T, d]

        def unit(x):
            return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

        q, k = (jnp.repeat(unit(heads(x, shape.key_dim)), h // shape.key_heads, axis=1) for x in (q, k))
        decay, beta = (x.transpose(0, 3, 1, 2) for x in (decay, beta))
        rows = (q * shape.key_dim**-0.5, k, heads(v, shape.value_dim), decay, beta)
        y, memory = self._read(rows, positions, prompt.memory, memory)

        y = RMSNorm(c.rms_norm_eps, name="norm")(context.pick(y.transpose(0, 2, 3, 1, 4)))
        y = y * nn.silu(context.pick(z).reshape(y.shape).astype(jnp.float32))
        y = linear(c, "out_proj", c.hidden_size)(y.reshape(*y.shape[:3], -1).astype(c.dtype))
        return y, _after(context, positions, memory, mixed, tail)

    def _project(self, x: jax.Array, shape: DeltaShape) -> tuple[jax.Array, ...]:
        """Return queries, keys, values side by side [B, G, T, C], gates [B, G, T, H d_v], β and decay [B, G, T, H]."""
        c = self.config
        wide, narrow = (shape.mixed_width, shape.value_width), (shape.value_heads,) * 2
        if not shape.by_key_heads:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            return tuple(linear(c, name, n)(x) for name, n in zip(names, wide + narrow, strict=True))

        def project(name: str, features: int, ends: list[int]) -> list[jax.Array]:
            """One product, whose columns are in the order of the key heads, cut at these ends inside each head."""
            y = linear(c, name, features)(x)
            parts = jnp.split(y.reshape(*y.shape[:-1], shape.key_heads, -1), ends, axis=-1)
            return [part.reshape(*y.shape[:-1], -1) for part in parts]

        d, per_head = shape.key_dim, shape.value_width // shape.key_heads
        q, k, v, z = project("in_proj_qkvz", sum(wide), [d, 2 * d, 2 * d + per_head])
        beta, a = project("in_proj_ba", sum(narrow), [shape.value_heads // shape.key_heads])
        return jnp.concatenate([q, k, v], axis=-1), z, beta, a

    def _read(
        self, rows: tuple[jax.Array, ...], positions: Positions, prompt: jax.Array, kept: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return what the queries read [B, H, G, T, d_v], and the memory after them [B, H, G, d_k, d_v]."""
        q, k, v, decay, beta = rows
        b, h, g, t, _ = q.shape
        precision = "highest" if self.config.dtype == "float32" else None
        if positions.segments is None:
            memory = jnp.broadcast_to(positions.begin(prompt, kept), (b, h, g, *prompt.shape[2:]))
            if t > 1:
                return delta_rule(q, k, v, decay, beta, memory, precision=precision)
            q, k, v, decay, beta = (x[:, :, :, 0] for x in rows)
            out, memory = delta_step(q, k, v, decay, beta, memory)
            return out[:, :, :, None], memory
        begins = positions.of_blocks(prompt)
        block = t // begins.shape[1]
        chunk = math.gcd(block, CHUNK)
        begins = jnp.repeat(begins, block // chunk, axis=1).swapaxes(1, 2)[:, :, None]
        position, memory = positions.position[:, None], jnp.zeros_like(begins[:, :, :, 0])
        return delta_rule(
            q, k, v, decay, beta, memory, position=position, begins=begins, chunk=chunk, precision=precision
        )
