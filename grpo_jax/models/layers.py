"""The shape of a decoder, and the parts that every layer is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax.models.matmul import matmul, matmul_by_columns, scale_columns
from grpo_jax.models.platform import has_wide_sums
from grpo_jax.models.quantized import Quantized, matmul_quantized, quantized_kernel
from grpo_jax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """In what the layers of a decoder differ; layers of one kind share what is traced of them.

    Attributes:
      window: the sliding window in tokens; None for full attention.
      rotary: whether queries and keys are rotated.
      sparse: a mixture of experts in place of the MLP.
      mixer: what mixes tokens: "attention", "delta" for a gated delta net, or "conv" for a gated short convolution.
      shared_kv: attention without keys and values of its own, over those of an earlier layer.
    """

    window: int | None = None
    rotary: bool = True
    sparse: bool = False
    mixer: str = "attention"
    shared_kv: bool = False


@dataclasses.dataclass(frozen=True)
class DeltaShape:
    """The shape of a decoder's gated delta nets.

    Attributes:
      key_heads: heads of queries and keys.
      value_heads: H, heads of values, of the memory and of its gates; a multiple of `key_heads`.
      key_dim: d_k, width of a key.
      value_dim: d_v, width of a value.
      kernel: K, tokens that the convolution looks at.
      by_key_heads: projections are two, with the columns of each key head side by side, and not four.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    by_key_heads: bool = False

    @property
    def key_width(self) -> int:
        """Width of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def mixed_width(self) -> int:
        """C, width of what the convolution goes over: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of what is kept of one completion: (H, d_k, d_v) of the memory, (1, K − 1, C) of the tail."""
        return (self.value_heads, self.key_dim, self.value_dim), (1, self.kernel - 1, self.mixed_width)

    @property
    def projected_width(self) -> int:
        """Widths of all projections of a layer together, beside D."""
        return self.mixed_width + 2 * self.value_width + 2 * self.value_heads


@dataclasses.dataclass(frozen=True)
class ConvShape:
    """The shape of a decoder's gated short convolutions.

    Attributes:
      width: C, channels of the convolution: D.
      kernel: K, tokens that it looks at.
      bias: of the projections and the convolution.
    """

    width: int
    kernel: int = 3
    bias: bool = False

    @property
    def state(self) -> tuple[None, tuple[int, int, int]]:
        """Shapes of one completion's state: no memory, and (1, K − 1, C) of the tail."""
        return None, (1, self.kernel - 1, self.width)

    @property
    def projected_width(self) -> int:
        """Widths of all projections of a layer together, beside D."""
        return 4 * self.width


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
      rotary_layers: one bool per layer, False for a layer without rotary embedding; None means all.
      windows: one entry per layer, the sliding window in tokens or None; None means full attention everywhere.
      mixers: one entry per layer, what mixes its tokens, as in `LayerKind`; None means attention everywhere.
      delta: shape of the gated delta nets.
      conv: shape of the gated short convolutions.
      full_heads: (key and value heads, width of a head) of the layers without a window, where those differ.
      shared_kv_layers: number of layers, the last ones, without keys and values of their own: they use those of the
        last layer before them with the same window.
      shared_kv_mlp: width of the gated MLP of those layers, where it differs; 0 where it does not.
      layer_input_size: width of the per-layer embedding (Gemma 4); 0 for none.
      qkv_bias, o_bias, mlp_bias: biases of the projections.
      attention_gate: attention's output is multiplied by a gate per channel, which `q_proj` gives beside the query.
      qk_norm: "none", "head" (RMS norm of each head) or "flat" (of the whole projection).
      v_norm: RMS norm, without weights, of each head's values.
      values_are_keys: layers without a window have no `v_proj`: their values are the output of `k_proj`.
      norms: "pre" (before attention and MLP), "sandwich" (before and after) or "post" (after).
      norm_offset: added to every norm's weight (1.0 where weights are stored around zero).
      activation: "silu", "gelu" or "gelu_tanh".
      query_scale: factor on the attention scores; None means head_dim^(−1/2).
      attention_sinks: each head has a score that takes a share of the softmax and gives no value.
      attention_soft_cap: c in c·tanh(score/c), or None.
      logit_soft_cap: the same on the logits.
      embedding_scale: factor on the embeddings.
      residual_scale: factor on the outputs of attention and MLP, before they are added.
      logit_scale: factor on the logits.
      layer_scalar: a factor on a layer's output, which comes with the checkpoint and is not trained.
      num_experts: experts of a mixture-of-experts layer; 0 for none anywhere.
      num_experts_per_token: experts that a token is sent to.
      expert_size: width of one expert's gated MLP.
      shared_expert_size: width of the gated MLP of all tokens beside the experts, by a gate of its own; 0 for none.
      expert_layers: one bool per layer, True for a mixture of experts in place of the MLP.
      experts_beside_mlp: that mixture is beside the MLP, and its router a `ScaledRouter`.
      expert_bias: biases of the experts and of their router.
      expert_swiglu: (α, c) of experts with (min(g, c) σ(α min(g, c))) · (clip(u, ±c) + 1) in the place of act(g) · u.
      normalize_expert_weights: the weights of a token's experts sum to one.
      router_loss_coef: the checkpoint's own factor on `router_loss`, where `router_aux_loss_coef` is None.
      initializer_range: standard deviation of freshly made weights.
      dtype: compute dtype of the matrix products, "float32" or "bfloat16".
      remat: recompute each layer in the backward pass instead of keeping its activations.
      remat_on_cpu: recompute in a way that holds on CPUs (`recompute.recomputed`): nothing is kept whatever the policy,
        and layers can be differentiated backwards alone.
      attention: implementation for whole sequences. "einsum" writes the scores out; "tiles" and "triton" are those of
        `fused`, which cannot be differentiated forwards; "auto" is the fastest on the devices. With
        "triton" the products of experts are kernels of `ragged`, and so is attention in a decode step of many
        completions (`fused_step`); other steps with a cache write the scores out: they are small.
      mesh: of the devices whose parts of a batch a fused attention computes each for itself; None: of one device.
      wide_sums: ask XLA for the products of bfloat16 matrices in float32 (`models.matmul`); None: if that is fastest.
      loop_layers: run layers of one kind, or of a repeated pattern, as one loop where there is no cache: compiled once
        for all of them, at the cost of a copy of their weights at run time.
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
    rope: Rope = dataclasses.field(default_factory=Rope)
    local_rope: Rope | None = None
    rotary_layers: tuple[bool, ...] | None = None
    windows: tuple[int | None, ...] | None = None
    mixers: tuple[str, ...] | None = None
    delta: DeltaShape | None = None
    conv: ConvShape | None = None
    full_heads: tuple[int, int] | None = None
    shared_kv_layers: int = 0
    shared_kv_mlp: int = 0
    layer_input_size: int = 0
    attention_gate: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"
    v_norm: bool = False
    values_are_keys: bool = False
    norms: str = "pre"
    norm_offset: float = 0.0
    activation: str = "silu"
    query_scale: float | None = None
    attention_sinks: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    layer_scalar: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    expert_layers: tuple[bool, ...] = ()
    experts_beside_mlp: bool = False
    expert_bias: bool = False
    expert_swiglu: tuple[float, float] | None = None
    normalize_expert_weights: bool = False
    router_loss_coef: float = 0.0
    initializer_range: float = 0.02
    dtype: str = "float32"
    remat: bool = False
    remat_on_cpu: bool = False
    attention: str = "auto"
    mesh: Mesh | None = None
    wide_sums: bool | None = None
    loop_layers: bool = False

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, from the first on."""
        n = self.num_layers
        windows, rotary = self.windows or (None,) * n, self.rotary_layers or (True,) * n
        sparse, mixers = self.expert_layers or (False,) * n, self.mixers or ("attention",) * n
        shared = (False,) * (n - self.shared_kv_layers) + (True,) * self.shared_kv_layers
        return tuple(map(LayerKind, windows, rotary, sparse, mixers, shared))

    @property
    def asks_for_wide_sums(self) -> bool:
        """Whether products are asked for in float32, where their operands are not.

        On a mesh they are not: in the gradient of weights XLA would put the tokens of all devices in one vector.
        """
        if self.dtype != "bfloat16" or self.mesh is not None:
            return False
        return has_wide_sums() if self.wide_sums is None else self.wide_sums

    def heads_of(self, kind: LayerKind) -> tuple[int, int]:
        """Key and value heads of a layer of attention, and the width of one."""
        full = self.full_heads is not None and kind.window is None
        return self.full_heads if full and self.full_heads else (self.num_kv_heads, self.head_dim)

    def kv_source(self, i: int) -> int:
        """The layer whose keys and values layer i is over: itself, if it has its own."""
        kinds = self.layer_kinds
        if not kinds[i].shared_kv:
            return i
        own = range(self.num_layers - self.shared_kv_layers)
        return max(j for j in own if kinds[j].window == kinds[i].window)

    @property
    def recurrent(self) -> tuple[DeltaShape | ConvShape, ...]:
        """The shape of each layer that keeps a state of fixed size, from the first on."""
        kinds = {"delta": self.delta, "conv": self.conv}
        return tuple(shape for kind in self.layer_kinds if (shape := kinds.get(kind.mixer)) is not None)


UNTRAINED = ("layer_scalar",)
"""Parameters that come with a checkpoint and stay as they are: no gradient and no weight decay reaches them."""


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


class Linear(nn.Module):
    """x W (+ b), with W stored [in, out]; plus (x A) B where the collection "lora" has an adapter for it.

    Where the collection "columns" has Wᵀ (`kernels_by_columns`), that is what is read, for decoding on a CPU; a kernel
    may be `Quantized`. Products of operands in `dtype` are returned in `result_dtype` without being rounded to `dtype`
    before; None: in `dtype`. `wide` as in `matmul`.
    """

    features: int
    use_bias: bool
    dtype: Any
    stddev: float
    result_dtype: Any = None
    wide: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        out = self.dtype if self.result_dtype is None else self.result_dtype
        kernel: Any = quantized_kernel(self)
        if kernel is None:
            kernel = self.param("kernel", nn.initializers.normal(self.stddev), (x.shape[-1], self.features))
        # As one plain matrix product: the backward pass of [B, G, T, in] takes XLA's CPU backend three times as long.
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        if isinstance(kernel, Quantized):
            y = matmul_quantized(x.astype(self.dtype), kernel, out, self.wide)
        elif self.has_variable("columns", "kernel"):
            turned: jax.Array = self.get_variable("columns", "kernel")
            y = matmul_by_columns(x.astype(self.dtype), turned.astype(self.dtype), out, self.wide)
        else:
            y = matmul(x.astype(self.dtype), kernel.astype(self.dtype), out, self.wide)
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
            y = y + matmul(matmul(x.astype(self.dtype), a, None, self.wide), b, out, self.wide)
        return y.reshape(*shape[:-1], self.features)


def linear(config: TransformerConfig, name: str, features: int, use_bias: bool = False) -> Linear:
    """Return a `Linear` of that name, as a part of the module that calls this, in the config's dtype."""
    wide = config.asks_for_wide_sums
    return Linear(features, use_bias, jnp.dtype(config.dtype), config.initializer_range, wide=wide, name=name)


def tokens_of(x: jax.Array) -> jax.Array:
    """Return x [..., D] as [N, D], a row for each token."""
    return x.reshape(-1, x.shape[-1])


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · (scale + offset), in float32 (Zhang & Sennrich 2019, eq. 4)."""

    eps: float
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        scale = self.param("scale", init, (x.shape[-1],)).astype(jnp.float32) + self.offset
        y = unit_rms(x, self.eps)
        return scale_columns(y.reshape(-1, x.shape[-1]), scale).reshape(x.shape).astype(x.dtype)


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) in float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
