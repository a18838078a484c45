"""One Flax decoder, by configuration.

Rows stand for themselves, or continue a prompt whose keys and values they share (`attention.Prefix`). Layers are
separate subtrees and unrolled: their names map one to one to Hugging Face's, and no step has to slice weights out of a
stack. Softmax, norms and logits are float32 whatever the compute dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from grpo_jax.models.attention import Cache, Lane, Prefix, group_attention, lane_attention
from grpo_jax.models.matmul import matmul, matmul_by_columns, matmul_transposed, scale_columns


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: frequencies θ_i = theta^(−2i/d), by `kind` scaled for longer contexts.

    Attributes:
      theta: base of the frequencies.
      kind: "default", or a scaling named as in Hugging Face's `rope_type`; one of `ROPE_KINDS`.
      scaling: the numbers that the kind needs, as (name, value) pairs so that the config stays hashable.
      fraction: of the head's width that is rotated, the first part of it.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()
    fraction: float = 1.0


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder. Frozen and hashable, so it can be a static argument of `jit`.

    Attributes:
      vocab_size: V.
      hidden_size: D.
      intermediate_size: width of the gated MLP.
      num_layers: decoder layers.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides `num_heads`.
      head_dim: width of one head.
      rms_norm_eps: added to the mean square.
      tie_word_embeddings: the output head is the embedding.
      max_position_embeddings: context length the checkpoint was made for.
      rope: rotary embedding of full-attention layers.
      local_rope: that of sliding-window layers, where it differs.
      rotary_layers: one bool a layer, False for a layer without rotary embedding; None means all.
      windows: one entry a layer, the sliding window in tokens or None; None means full attention everywhere.
      qkv_bias, o_bias, mlp_bias: biases of the projections.
      qk_norm: "none", "head" (RMS norm of each head) or "flat" (of the whole projection).
      norms: "pre" (before attention and MLP), "sandwich" (before and after) or "post" (after).
      norm_offset: added to every norm's weight (1.0 where weights are stored around zero).
      activation: "silu", "gelu" or "gelu_tanh".
      query_scale: factor on the attention scores; None means head_dim^(−1/2).
      attention_soft_cap: c in c·tanh(score/c), or None.
      logit_soft_cap: the same on the logits.
      embedding_scale: factor on the embeddings.
      num_experts: experts of a mixture-of-experts layer; 0 for none anywhere.
      num_experts_per_token: experts that a token is sent to.
      expert_size: width of one expert's gated MLP.
      expert_layers: one bool a layer, True for a mixture of experts in place of the MLP.
      normalize_expert_weights: the weights of a token's experts sum to one.
      router_loss_coef: the checkpoint's own factor on `router_loss`, for the objective to use.
      initializer_range: standard deviation of freshly made weights.
      dtype: compute dtype of the matrix products, "float32" or "bfloat16".
      remat: recompute each layer in the backward pass instead of keeping its activations.
      remat_policy: what of a layer is kept even so, a name of `jax.checkpoint_policies`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 32768
    rope: Rope = Rope()
    local_rope: Rope | None = None
    rotary_layers: tuple[bool, ...] | None = None
    windows: tuple[int | None, ...] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"
    norms: str = "pre"
    norm_offset: float = 0.0
    activation: str = "silu"
    query_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_size: int = 0
    expert_layers: tuple[bool, ...] = ()
    normalize_expert_weights: bool = False
    router_loss_coef: float = 0.0
    initializer_range: float = 0.02
    dtype: str = "float32"
    remat: bool = False
    remat_policy: str = "nothing_saveable"


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


def _linear(inverse: np.ndarray, n: dict[str, Any], rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """Positions divided by `factor` (position interpolation)."""
    return inverse / n["factor"], 1.0


def _dynamic(inverse: np.ndarray, n: dict[str, Any], rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """NTK-aware: a larger base once the sequence is longer than the context that the model was made for."""
    longest, d = n["max_position_embeddings"], 2 * len(inverse)
    growth = n["factor"] * max(length, longest) / longest - (n["factor"] - 1)
    return inverse * (growth ** (d / (d - 2))) ** -(np.arange(0, d, 2) / d), 1.0


def _llama3(inverse: np.ndarray, n: dict[str, Any], rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """Long wavelengths interpolated, short ones kept, a linear passage between the two."""
    turns = n["original_max_position_embeddings"] * inverse / (2 * math.pi)
    kept = np.clip((turns - n["low_freq_factor"]) / (n["high_freq_factor"] - n["low_freq_factor"]), 0, 1)
    return inverse * (kept + (1 - kept) / n["factor"]), 1.0


def _yarn(inverse: np.ndarray, n: dict[str, Any], rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """As llama3 with the passage counted in dimensions, and a temperature (Peng et al. 2023, eq. 22 to 25)."""
    d, original = 2 * len(inverse), n["original_max_position_embeddings"]
    factor = n["factor"] or n["max_position_embeddings"] / original

    def dimension(turns):
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    def temperature(mscale):
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = dimension(n["beta_fast"]), dimension(n["beta_slow"])
    if n["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    interpolated = np.clip((np.arange(d // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    attention = n["attention_factor"]
    if attention is None and n["mscale"] and n["mscale_all_dim"]:
        attention = temperature(n["mscale"]) / temperature(n["mscale_all_dim"])
    elif attention is None:
        attention = temperature(1.0)
    return inverse * (1 - interpolated + interpolated / factor), attention


def _longrope(inverse: np.ndarray, n: dict[str, Any], rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """A factor for each frequency, of two sets: one up to the original context, one beyond (Ding et al. 2024)."""
    original = n["original_max_position_embeddings"]
    factor = n["factor"] or n["max_position_embeddings"] / original
    attention = n["attention_factor"]
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inverse / np.asarray(n["long_factor" if length > original else "short_factor"]), attention


ROPE_KINDS: dict[str, Callable[[np.ndarray, dict[str, Any], Rope, int], tuple[np.ndarray, float]]] = {
    "default": lambda inverse, numbers, rope, length: (inverse, 1.0),
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""Scalings: from frequencies, the numbers of the scaling, and the length of the sequence, to frequencies and factor."""

ROPE_LIMITS = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Scalings that change for the whole sequence when it grows beyond this number."""


def rope_frequencies(rope: Rope, head_dim: int, length: int = 0) -> tuple[np.ndarray, float]:
    """Angular frequencies of a rotary embedding.

    Args:
      rope: the embedding.
      head_dim: width d of a head, of which the first `rope.fraction` is rotated.
      length: tokens of the sequence; only "dynamic" and "longrope" depend on it.

    Returns:
      Frequencies [r/2] float32 in radians a position, r the rotated width; and the factor on cosines and sines.

    Example:
      >>> rope_frequencies(Rope(theta=100.0, kind="linear", scaling=(("factor", 2.0),)), 4)
      (array([0.5 , 0.05], dtype=float32), 1.0)
    """
    if rope.kind not in ROPE_KINDS:
        raise ValueError(f"rope kind {rope.kind!r} is not supported; one of {list(ROPE_KINDS)} is.")
    rotated = int(head_dim * rope.fraction)
    inverse = rope.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    frequencies, factor = ROPE_KINDS[rope.kind](inverse, dict(rope.scaling), rope, length)
    return frequencies.astype(np.float32), factor


def rope_table(positions: jax.Array, rope: Rope, head_dim: int, length: int = 0) -> tuple[jax.Array, jax.Array]:
    """Factors [B, 1, T, 2, r/2] float32 at [B, T] positions, for each half: on itself, and on the other half.

    The axis of one is G: rows of a prompt agree.
    """
    frequencies, factor = rope_frequencies(rope, head_dim, length)
    angles = positions[:, None, :, None].astype(jnp.float32) * frequencies.reshape(1, 1, 1, -1)
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def check_rope_length(rope: Rope, length: int) -> None:
    """Refuse cached keys where a longer sequence would change the frequencies that they were already rotated by."""
    limit = dict(rope.scaling).get(ROPE_LIMITS.get(rope.kind, ""))
    if limit is not None and length > limit:
        raise ValueError(
            f"prompts and completions together take up to {length} tokens, but beyond {limit} rope_type {rope.kind!r} "
            "turns with the length of the whole sequence, so keys cannot be kept; use shorter prompts or completions."
        )


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [B, G, T, heads, d] by a `rope_table`; by halves, not pairs, as Hugging Face stores the weights."""
    own, other = (t[:, :, :, None] for t in table)
    half = own.shape[-1]
    halves, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    halves = halves.reshape(*x.shape[:-1], 2, half)
    # The halves change places by index: to put them together anew takes XLA's CPU backend three times as long.
    turned = halves * own + jax.lax.rev(halves, (halves.ndim - 2,)) * other
    turned = turned.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


class Linear(nn.Module):
    """x W (+ b), with W stored [in, out]; plus (x A) B where the collection "lora" has an adapter for it.

    Where the collection "columns" has Wᵀ (`kernels_by_columns`), that is what is read, for decoding on a CPU. Products
    of operands in `dtype` are returned in `result_dtype` without being rounded to `dtype` before; None: in `dtype`.
    """

    features: int
    use_bias: bool
    dtype: Any
    stddev: float
    result_dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        out = self.dtype if self.result_dtype is None else self.result_dtype
        kernel = self.param("kernel", nn.initializers.normal(self.stddev), (x.shape[-1], self.features))
        # As one plain matrix product: the backward pass of [B, G, T, in] takes XLA's CPU backend three times as long.
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        if self.has_variable("columns", "kernel"):
            turned: jax.Array = self.get_variable("columns", "kernel")
            y = matmul_by_columns(x.astype(self.dtype), turned.astype(self.dtype), out)
        else:
            y = matmul(x.astype(self.dtype), kernel.astype(self.dtype), out)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + bias.astype(out)[None]
        if self.has_variable("lora", "a"):
            if self.has_variable("lora", "rate") and self.has_rng("dropout"):
                keep = jnp.asarray(1 - self.get_variable("lora", "rate"))
                kept = jax.random.bernoulli(self.make_rng("dropout"), keep, x.shape)
                x = jnp.where(kept, x / keep.astype(x.dtype), jnp.zeros((), x.dtype))
            a: jax.Array = self.get_variable("lora", "a").astype(self.dtype)
            b: jax.Array = self.get_variable("lora", "b").astype(self.dtype)
            y = y + matmul(x.astype(self.dtype) @ a, b, out)
        return y.reshape(*shape[:-1], self.features)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · (scale + offset), in float32 (Zhang & Sennrich 2019, eq. 4)."""

    eps: float
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        scale = self.param("scale", init, (x.shape[-1],)).astype(jnp.float32) + self.offset
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return scale_columns(y.reshape(-1, x.shape[-1]), scale).reshape(x.shape).astype(x.dtype)


class Attention(nn.Module):
    """Projections, rotary embedding and `group_attention` of one layer."""

    config: TransformerConfig
    layer: int

    @nn.compact
    def __call__(self, x, tables, prefix, cache, index, start, lane, last):
        c = self.config
        b, g, t, _ = x.shape
        n = t if last is None else 1
        h, r, d = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim
        window = c.windows[self.layer] if c.windows else None

        def linear(name, features, bias):
            return Linear(features, bias, jnp.dtype(c.dtype), c.initializer_range, name=name)

        def norm(name):
            return RMSNorm(c.rms_norm_eps, c.norm_offset, name=name)

        q = linear("q_proj", h * r * d, c.qkv_bias)(_pick(x, last))
        k = linear("k_proj", h * d, c.qkv_bias)(x)
        v = linear("v_proj", h * d, c.qkv_bias)(x).reshape(b, g, t, h, d)
        if c.qk_norm == "flat":
            q, k = norm("q_norm")(q), norm("k_norm")(k)
        q, k = q.reshape(b, g, n, h * r, d), k.reshape(b, g, t, h, d)
        if c.qk_norm == "head":
            q, k = norm("q_norm")(q), norm("k_norm")(k)
        if c.rotary_layers is None or c.rotary_layers[self.layer]:
            table = tables[1] if window is not None and c.local_rope is not None else tables[0]
            q, k = rotate(q, (_pick(table[0], last), _pick(table[1], last))), rotate(k, table)
        # Heads before rows: both score products below are then plain batched matrix products, without a transpose.
        q = q.reshape(b, g, n, h, r, d).transpose(0, 3, 1, 2, 4, 5)
        k, v = k.transpose(0, 3, 1, 2, 4), v.transpose(0, 3, 1, 2, 4)
        keys = k.swapaxes(-1, -2)
        if cache is not None:
            like = cache[0].shape[:-2]
            keys = keys.reshape(*like, d, t).astype(cache[0].dtype)
            k = keys = jax.lax.dynamic_update_slice_in_dim(cache[0], keys, index, axis=-1)
            v = v.reshape(*like, t, d).astype(cache[1].dtype)
            v = jax.lax.dynamic_update_slice_in_dim(cache[1], v, index, axis=-2)
        scale = d**-0.5 if c.query_scale is None else c.query_scale
        how: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": c.attention_soft_cap}
        if lane is None:
            y = group_attention(q, keys, v, prefix, index=index if last is None else index + last, start=start, **how)
        else:
            y = lane_attention(q, k, v, prefix, lane, **how)
        y = y.transpose(0, 2, 3, 1, 4, 5).reshape(b, g, n, h * r * d)
        return linear("o_proj", c.hidden_size, c.o_bias)(y), (k, v)


class MLP(nn.Module):
    """down(act(gate x) · up x) (Shazeer 2020, GLU variants)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x):
        c = self.config

        def linear(name, features):
            return Linear(features, c.mlp_bias, jnp.dtype(c.dtype), c.initializer_range, name=name)

        gate, up = (linear(name, c.intermediate_size)(x) for name in ("gate_proj", "up_proj"))
        gated = lambda gate, up: ACTIVATIONS[c.activation](gate) * up
        # What lies between the products is cheaper to make again in the backward pass than to write and to keep.
        return linear("down_proj", c.hidden_size)(jax.checkpoint(gated)(gate, up))


class Experts(nn.Module):
    """Gated MLPs, of which each token uses a few: Σ_e weight_e · expert_e(x) over its chosen experts.

    Rows are sorted by expert, so that each expert is one block of a ragged matrix product: no expert has a capacity, no
    token is dropped, and a row does not depend on its neighbours.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """x [N, D], weights and chosen [N, k] to [N, D]."""
        c = self.config
        dtype = jnp.dtype(c.dtype)

        def kernel(name, fan_in, fan_out):
            init = nn.initializers.normal(c.initializer_range)
            return self.param(name, init, (c.num_experts, fan_in, fan_out)).astype(dtype)

        gate, up = (kernel(name, c.hidden_size, c.expert_size) for name in ("gate_proj", "up_proj"))
        down = kernel("down_proj", c.expert_size, c.hidden_size)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts).astype(jnp.int32)
        row = order // chosen.shape[1]
        y = jnp.take(x.astype(dtype), row, axis=0)
        y = ACTIVATIONS[c.activation](jax.lax.ragged_dot(y, gate, sizes)) * jax.lax.ragged_dot(y, up, sizes)
        y = jax.lax.ragged_dot(y, down, sizes) * jnp.take(weights.reshape(-1), order)[:, None].astype(dtype)
        return jnp.zeros(x.shape, y.dtype).at[row].add(y)


class MixtureOfExperts(nn.Module):
    """A router and its `Experts`. Router logits are sown as "router"/"logits", for `router_loss`."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        logits = Linear(c.num_experts, False, jnp.dtype(c.dtype), c.initializer_range, name="gate")(x)
        logits = logits.astype(jnp.float32)
        self.sow("router", "logits", logits)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), c.num_experts_per_token)
        if c.normalize_expert_weights:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        flat = [a.reshape(-1, a.shape[-1]) for a in (x, weights, chosen)]
        return Experts(c, name="experts")(*flat).reshape(x.shape)


class Layer(nn.Module):
    """x + attention, x + MLP, with the norms where `config.norms` puts them. Norms carry Hugging Face's names.

    With `last` [B], only the state of that token of each row is made, beside the keys and values of all.
    """

    config: TransformerConfig
    layer: int

    @nn.compact
    def __call__(self, x, tables, prefix, cache, index, start, lane, last):
        c = self.config

        def norm(name):
            return RMSNorm(c.rms_norm_eps, c.norm_offset, name=name)

        attention = Attention(c, self.layer, name="self_attn")
        sparse = bool(c.expert_layers) and c.expert_layers[self.layer]
        mlp = MixtureOfExperts(c, name="mlp") if sparse else MLP(c, name="mlp")
        if c.norms == "pre":
            y, kv = attention(norm("input_layernorm")(x), tables, prefix, cache, index, start, lane, last)
            x = _pick(x, last) + y
            return x + mlp(norm("post_attention_layernorm")(x)), kv
        if c.norms == "sandwich":
            y, kv = attention(norm("input_layernorm")(x), tables, prefix, cache, index, start, lane, last)
            x = _pick(x, last) + norm("post_attention_layernorm")(y)
            y = mlp(norm("pre_feedforward_layernorm")(x))
            return x + norm("post_feedforward_layernorm")(y), kv
        y, kv = attention(x, tables, prefix, cache, index, start, lane, last)
        x = _pick(x, last) + norm("post_attention_layernorm")(y)
        return x + norm("post_feedforward_layernorm")(mlp(x)), kv


def _pick(x: jax.Array, last: jax.Array | None) -> jax.Array:
    """Token last [B] of x [B, G, T, ...], as [B, G, 1, ...]; None: all tokens."""
    if last is None:
        return x
    return jnp.take_along_axis(x, last.reshape(-1, *[1] * (x.ndim - 1)), axis=2)


@functools.partial(jax.jit, static_argnums=0)
def _apply_layer(layer, variables, *args):
    return layer.apply(variables, *args)


class Embedding(nn.Module):
    """Rows of a table, and by the same table the output head where the two are tied."""

    config: TransformerConfig

    def setup(self):
        c = self.config
        self.embedding = self.param(
            "embedding", nn.initializers.normal(c.initializer_range), (c.vocab_size, c.hidden_size)
        )

    def __call__(self, tokens):
        c = self.config
        x = jnp.take(self.embedding, tokens, axis=0).astype(c.dtype)
        return x if c.embedding_scale == 1.0 else x * jnp.asarray(c.embedding_scale, x.dtype)

    def attend(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        return matmul_transposed(x, self.embedding.astype(x.dtype), jnp.float32).reshape(*shape[:-1], -1)


class Transformer(nn.Module):
    """A decoder-only language model.

    `apply({"params": params}, tokens)` is the whole of it for most uses: [B, T] int32 right-padded tokens to [B, T, V]
    float32 logits, position t seeing tokens 0..t. `hidden`, `prefill` and `unembed` are its parts, for those who share
    a prompt among rows or want logits only where they need them; call them by `apply(..., method="prefill")`.

    Example:
      >>> import jax
      >>> model = Transformer(TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> tokens = jax.numpy.zeros((2, 5), "int32")
      >>> params = model.init(jax.random.key(0), tokens)["params"]
      >>> model.apply({"params": params}, tokens).shape
      (2, 5, 32)
    """

    config: TransformerConfig

    def setup(self):
        c = self.config
        layer = nn.remat(Layer, policy=getattr(jax.checkpoint_policies, c.remat_policy)) if c.remat else Layer
        self.embed_tokens = Embedding(c)
        self.layers = [layer(c, i) for i in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps, c.norm_offset)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.vocab_size, False, jnp.dtype(c.dtype), c.initializer_range, jnp.float32)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [B, T, V] float32 of tokens [B, T]."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T]; got shape {tokens.shape}.")
        hidden, _ = self.hidden(tokens[:, None])
        return self.unembed(hidden[:, 0])

    def hidden(
        self,
        tokens: jax.Array,
        prefix: Prefix | None = None,
        cache: Cache | None = None,
        index: jax.Array | int = 0,
        start: jax.Array | None = None,
        lane: Lane | None = None,
        last: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Last hidden states of G rows a prompt.

        Args:
          tokens: [B, G, T] int32.
          prefix: the prompts' keys and values; None where the rows stand for themselves.
          cache: own keys and values with S slots, of which 0..index-1 are filled; None where tokens are all there is.
          index: slot of the first token.
          start: [B] int32, the slot in which the rows of each prompt begin; None: the first.
          lane: with tokens [1, 1, N], rows of any of the prefix's prompts laid end to end; None: rows side by side.
          last: [B] int32, the one token of each row whose hidden state is wanted, without a lane; None: all.

        Returns:
          Hidden states [B, G, T, D], or [B, G, 1, D], after the last norm, and the own keys and values: the cache with
          the new ones written, or both [B, H_kv, G, T, d] where there was none.
        """
        c = self.config
        b, _, t = tokens.shape
        positions = jnp.broadcast_to(index + jnp.arange(t)[None], (b, t))
        if lane is not None and prefix is not None:
            lengths = jnp.repeat(prefix.lengths[lane.prompt], t // lane.prompt.shape[0])
            positions = (lengths + lane.position)[None]
        elif prefix is not None:
            positions = positions + prefix.lengths[:, None]
        if start is not None:
            positions = positions - start[:, None]
        longest = cache[0][1].shape[-2] if cache is not None else t if lane is None else lane.longest
        ropes = [rope for rope in (c.rope, c.local_rope) if rope is not None]
        if prefix is not None or cache is not None:
            longest += 0 if prefix is None else prefix.layers[0][1].shape[2]
            for rope in ropes:
                check_rope_length(rope, longest)
        tables = tuple(rope_table(positions, rope, c.head_dim, longest) for rope in ropes)
        x = self.embed_tokens(tokens)
        own = []
        for i in range(c.num_layers):
            shared = None if prefix is None else (*prefix.layers[i], prefix.lengths)
            # Nothing comes after the last layer: there the other tokens give keys and values, and no more.
            only = last if i == c.num_layers - 1 else None
            x, kv = self._layer(i)(x, tables, shared, None if cache is None else cache[i], index, start, lane, only)
            own.append(kv)
        return self.norm(x), tuple(own)

    def _layer(self, i: int) -> Callable[..., Any]:
        """Layer i, as a function that JAX traces once for all layers of its kind: most of the time of a start.

        Only what reads its variables and does no more is such a function; initializing, dropout, and collections that
        are written are left to the layer itself.
        """
        c, layer = self.config, self.layers[i]
        writes = self.is_initializing() or any(map(self.is_mutable_collection, ("params", "router", "intermediates")))
        if writes or self.has_rng("dropout"):
            return layer
        kinds = [
            tuple(of[j] if of else None for of in (c.windows, c.rotary_layers, c.expert_layers)) for j in range(i + 1)
        ]
        alike = layer.clone(parent=None, name=None, layer=kinds.index(kinds[i]))
        return functools.partial(_apply_layer, alike, layer.variables)

    def prefill(self, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Prefix]:
        """Read the prompts once: hidden state [B, D] of each prompt's last token, and the `Prefix` for its rows."""
        hidden, own = self.hidden(tokens[:, None], last=lengths - 1)
        return hidden[:, 0, 0], Prefix(tuple((k[:, :, 0].swapaxes(-1, -2), v[:, :, 0]) for k, v in own), lengths)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of hidden states [..., D]."""
        return self._cap(self.embed_tokens.attend(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden))

    def unembed_columns(self, hidden: jax.Array) -> jax.Array:
        """Logits [V, N] float32 of hidden states [N, D], where the head is the embedding."""
        table = self.embed_tokens.embedding.astype(hidden.dtype)
        return self._cap(jnp.matmul(table, hidden.T, preferred_element_type=jnp.float32))

    def _cap(self, logits: jax.Array) -> jax.Array:
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def router_loss(router: Any, mask: jax.Array, *, num_experts_per_token: int) -> jax.Array:
    """Load-balancing loss of a mixture of experts: E Σ_e f_e p_e.

    f_e is the number of tokens sent to expert e, and p_e the mean probability that the router gave it, both over the
    masked-in tokens of all sparse layers; a router without preferences has the least loss, `num_experts_per_token`.

    Args:
      router: the "router" collection, from `model.apply(variables, ..., mutable=["router"])`.
      mask: [B, T] or [B, G, T], as the tokens were; the tokens that count.
      num_experts_per_token: k of the config.

    Returns:
      [] float32; minimise, times `config.router_loss_coef`.

    Gradient:
      Through p only; f counts.

    References:
      Fedus et al. 2021, Switch Transformers, eq. 4 to 6, as transformers' `load_balancing_loss_func` has it.

    Example:
      >>> import jax.numpy as jnp
      >>> router = {"layers_0": {"mlp": {"logits": (jnp.zeros((1, 1, 2, 4)),)}}}
      >>> float(router_loss(router, jnp.ones((1, 2)), num_experts_per_token=1))
      1.0
    """
    layers = jax.tree.leaves(router)
    used = given = jnp.zeros(layers[0].shape[-1:])
    count = jnp.zeros(())
    flat = mask.reshape(-1, 1).astype(jnp.float32)
    for logits in layers:
        probs = jax.nn.softmax(logits.astype(jnp.float32).reshape(-1, logits.shape[-1]))
        _, chosen = jax.lax.top_k(probs, num_experts_per_token)
        used += (jax.nn.one_hot(chosen, probs.shape[-1]).sum(axis=1) * flat).sum(axis=0)
        given += (probs * flat).sum(axis=0)
        count += flat.sum()
    count = jnp.maximum(count, 1.0)
    return len(used) * jnp.sum(jax.lax.stop_gradient(used / count) * (given / count))


def empty_cache(config: TransformerConfig, batch: int, group: int, slots: int, dtype: Any = None) -> Cache:
    """Own keys and values for `slots` decode steps of [batch, group] rows, zeros."""
    heads, d = (batch, config.num_kv_heads, group), config.head_dim
    dtype = jnp.dtype(dtype or config.dtype)
    pair = lambda: (jnp.zeros((*heads, d, slots), dtype), jnp.zeros((*heads, slots, d), dtype))
    return tuple(pair() for _ in range(config.num_layers))


def projections(params: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, kernel) of every matrix product of a tree of parameters."""
    for name, node in params.items():
        if name == "kernel":
            yield path, node
        elif isinstance(node, dict):
            yield from projections(node, (*path, name))


def kernels_by_columns(params: Any) -> Any:
    """The collection "columns" of a tree of parameters: each projection's kernel [in, out] as [out, in]."""
    return unflatten_dict({(*path, "kernel"): kernel.T for path, kernel in projections(params)})


def count_parameters(params: Any) -> int:
    """Number of scalars in a tree of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


__all__: Sequence[str] = [
    "ROPE_KINDS",
    "Rope",
    "Transformer",
    "TransformerConfig",
    "count_parameters",
    "empty_cache",
    "kernels_by_columns",
    "projections",
    "rope_frequencies",
    "router_loss",
]
