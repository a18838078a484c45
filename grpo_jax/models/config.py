"""The shape of a decoder, the number of its weights, and what a decode step reads."""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import Mesh

from grpo_jax.models.devices import has_fast_float32_sums
from grpo_jax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Differences between the layers of a decoder; layers of one kind are traced once."""

    window: int | None = None  # the sliding window in tokens; None for full attention
    rotary: bool = True  # whether queries and keys are rotated
    sparse: bool = False  # a mixture of experts instead of the MLP
    mixer: str = "attention"  # or "delta" for a gated delta net, "conv" for a gated short convolution
    shared_kv: bool = False  # attention over the keys and values of an earlier layer


@dataclasses.dataclass(frozen=True)
class DeltaShape:
    """The shape of a decoder's gated delta nets."""

    key_heads: int  # heads of queries and keys
    value_heads: int  # H, heads of values, of the memory and of its gates; a multiple of `key_heads`
    key_dim: int  # d_k, width of a key
    value_dim: int  # d_v, width of a value
    kernel: int = 4  # K, width of the convolution in tokens
    by_key_heads: bool = False  # two projections with columns ordered by key head, instead of four

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed_width(self) -> int:
        """C, channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of one completion's state: (H, d_k, d_v) of the memory, (1, K − 1, C) of the tail."""
        return (self.value_heads, self.key_dim, self.value_dim), (1, self.kernel - 1, self.mixed_width)

    @property
    def projected_width(self) -> int:
        """Sum of the widths of a layer's projections from or to D."""
        return self.mixed_width + 2 * self.value_width + 2 * self.value_heads


@dataclasses.dataclass(frozen=True)
class ConvShape:
    """The shape of a decoder's gated short convolutions."""

    width: int  # C, channels of the convolution: D
    kernel: int = 3  # K, its width in tokens
    bias: bool = False  # of the projections and the convolution

    @property
    def state(self) -> tuple[None, tuple[int, int, int]]:
        """Shapes of one completion's state: no memory, and (1, K − 1, C) of the tail."""
        return None, (1, self.kernel - 1, self.width)

    @property
    def projected_width(self) -> int:
        """Sum of the widths of a layer's projections from or to D."""
        return 4 * self.width


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder. Frozen and hashable, so it can be a static argument of `jit`.

    `rotary_layers`, `windows`, `mixers` and `expert_layers` have one entry per layer. If they are unset, the default of
    `LayerKind` applies to all layers.
    """

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # width of the gated MLP
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; divides num_heads
    head_dim: int
    rms_norm_eps: float = 1e-6  # added to the mean square
    tie_word_embeddings: bool = True  # the output head is the embedding
    max_position_embeddings: int = 32768  # context length of the checkpoint
    rope: Rope = dataclasses.field(default_factory=Rope)  # of layers with full attention
    local_rope: Rope | None = None  # of layers with a sliding window; None: the same
    rotary_layers: tuple[bool, ...] | None = None  # as `LayerKind.rotary`
    windows: tuple[int | None, ...] | None = None  # as `LayerKind.window`
    mixers: tuple[str, ...] | None = None  # as `LayerKind.mixer`
    delta: DeltaShape | None = None
    conv: ConvShape | None = None
    full_heads: tuple[int, int] | None = None  # (num_kv_heads, head_dim) of layers without a window; None: the same
    # The last layers, which use the keys and values of the last layer before them with the same window.
    shared_kv_layers: int = 0
    shared_kv_mlp: int = 0  # width of the gated MLP of those layers; 0: the same
    layer_input_size: int = 0  # width of the per-layer embedding (Gemma 4); 0 for none
    attention_gate: bool = False  # attention is multiplied by a gate per channel, a second output of `q_proj`
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"  # or RMS norms: "head" of each head, "flat" of the whole projection
    v_norm: bool = False  # RMS norm, without weights, of each head's values
    values_are_keys: bool = False  # layers without a window have no `v_proj`: values are the output of `k_proj`
    norms: str = "pre"  # before attention and MLP; or "sandwich", before and after; or "post", after
    norm_offset: float = 0.0  # added to every norm's weight (1.0 if weights are stored around zero)
    activation: str = "silu"  # or "gelu", "gelu_tanh"
    query_scale: float | None = None  # factor on the attention scores; None: head_dim^(−1/2)
    attention_sinks: bool = False  # each head has a learned score of a key without a value
    attention_soft_cap: float | None = None  # c in c·tanh(score/c)
    logit_soft_cap: float | None = None  # the same on the logits
    embedding_scale: float = 1.0  # factor on the embeddings
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP, before they are added
    logit_scale: float = 1.0  # factor on the logits
    layer_scalar: bool = False  # a factor on a layer's output, stored in the checkpoint and not trained
    num_experts: int = 0  # of a mixture-of-experts layer
    num_experts_per_token: int = 0
    expert_size: int = 0  # width of one expert's gated MLP
    shared_expert_size: int = 0  # width of a gated MLP for all tokens, whose output is gated and added; 0 for none
    expert_layers: tuple[bool, ...] = ()  # as `LayerKind.sparse`
    parallel_experts: bool = False  # the mixture is added to the MLP, and its router is a `ScaledRouter`
    expert_bias: bool = False  # biases of the experts and of their router
    # (α, c) of experts with (min(g, c) σ(α min(g, c))) · (clip(u, ±c) + 1) instead of act(g) · u.
    expert_swiglu: tuple[float, float] | None = None
    normalize_expert_weights: bool = False  # the weights of a token's experts sum to one
    router_loss_coef: float = 0.0  # factor on `router_loss` if the run's `router_aux_loss_coef` is None
    initializer_range: float = 0.02  # standard deviation of initial weights
    dtype: str = "float32"  # compute dtype of the matrix products, or "bfloat16"
    remat: bool = False  # recompute each layer in the backward pass instead of keeping its activations
    remat_on_cpu: bool = False  # recompute by `block.recomputed`; layers then only have reverse-mode gradients
    # Implementation for whole sequences. "einsum" stores all scores. "tiles" and "triton" (`fused`) only have
    # reverse-mode gradients; with "triton", experts (`ragged`) and large decode steps (`fused_step`) are kernels too.
    # "auto" is the fastest on the devices.
    attention: str = "auto"
    mesh: Mesh | None = None  # devices over which a batch is cut, for fused attention and experts; None: one device
    float32_sums: bool | None = None  # compute bfloat16 products in float32 (`matmul`); None: if that is fastest
    # Without a cache, run layers of one kind or of a repeated pattern as one loop. It is compiled once, but needs a
    # copy of the layers' weights at run time.
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
    def uses_float32_sums(self) -> bool:
        """Whether products of bfloat16 matrices are requested in float32 (`models.matmul`).

        Not on a mesh: in the gradient of weights XLA would gather the tokens of all devices.
        """
        if self.dtype != "bfloat16" or self.mesh is not None:
            return False
        return has_fast_float32_sums() if self.float32_sums is None else self.float32_sums

    def heads_of(self, kind: LayerKind) -> tuple[int, int]:
        """Return the number of key and value heads of an attention layer, and the width of a head."""
        return self.full_heads if self.full_heads and kind.window is None else (self.num_kv_heads, self.head_dim)

    def kv_source(self, i: int) -> int:
        """Return the layer whose keys and values layer i uses: i, or an earlier layer if they are shared."""
        kinds = self.layer_kinds
        if not kinds[i].shared_kv:
            return i
        own = range(self.num_layers - self.shared_kv_layers)
        return max(j for j in own if kinds[j].window == kinds[i].window)

    @property
    def recurrent(self) -> tuple[DeltaShape | ConvShape, ...]:
        """The shape of each recurrent layer."""
        kinds = {"delta": self.delta, "conv": self.conv}
        return tuple(shape for kind in self.layer_kinds if (shape := kinds.get(kind.mixer)) is not None)


def count_weights(shape: TransformerConfig, *, head: bool = True, experts: int | None = None) -> int:
    """Return the number of weights in a decoder's matrix products, with or without the output head.

    `experts` is the number of experts to count in each layer; None counts the experts of one token.
    """
    c = shape
    sparse = sum(c.expert_layers)
    chosen = c.num_experts_per_token if experts is None else experts
    widths = sum(_attention_width(c, kind) for kind in c.layer_kinds) + 3 * c.layer_input_size * c.num_layers
    dense = c.num_layers - (0 if c.parallel_experts else sparse)
    wider = c.shared_kv_layers * (c.shared_kv_mlp - c.intermediate_size) if c.shared_kv_mlp else 0
    widths += 3 * (dense * c.intermediate_size + wider)
    widths += sparse * (3 * c.expert_size * chosen + c.num_experts)
    widths += sparse * (3 * c.shared_expert_size + (c.shared_expert_size > 0))
    widths += sum(layer.projected_width for layer in c.recurrent)
    return c.hidden_size * (widths + head * c.vocab_size)


def _attention_width(shape: TransformerConfig, kind: LayerKind) -> int:
    """Return the sum of the widths of an attention layer's projections; 0 for a recurrent layer."""
    if kind.mixer != "attention":
        return 0
    heads, width = shape.heads_of(kind)
    own = 0 if kind.shared_kv else 1 if shape.values_are_keys and kind.window is None else 2
    return (shape.num_heads * (2 + shape.attention_gate) + own * heads) * width


def state_bytes(shape: TransformerConfig, itemsize: float) -> float:
    """Return the bytes of one completion's (or prompt's) states in the recurrent layers."""
    memories = sum(math.prod(layer.state[0]) for layer in shape.recurrent if layer.state[0] is not None)
    return 4 * memories + itemsize * sum(math.prod(layer.state[1]) for layer in shape.recurrent)


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """Cost model of a decode step for a layout [groups, width] of completions, in bytes read.

    cost = weights + groups · (prompt + width · (own + state + products))

    All weights are read once per step, so a small batch costs nearly as much as one of twice its size.
    """

    weights: float
    prompt: float  # one prompt's keys and values, read once per group
    own: float  # one completion's own keys and values
    products: float = 0.0  # bytes read in the time of one completion's products with the weights; 0 ignores them
    state: float = 0.0  # one completion's states, read and written

    @classmethod
    def of(
        cls,
        shape: TransformerConfig,
        *,
        prompt_length: float,
        completion_length: float,
        itemsize: float,
        weight_itemsize: float | None = None,
        bytes_per_operation: float = 0.0,
    ) -> DecodeStep:
        """Return the step of a decoder; `weight_itemsize` is `itemsize` if None."""
        attention = [shape.heads_of(kind) for kind in shape.layer_kinds if kind.mixer == "attention"]
        token = itemsize * sum(2 * heads * width for heads, width in attention)  # keys and values that layers read
        return cls(
            weights=count_weights(shape, experts=shape.num_experts) * (weight_itemsize or itemsize),
            prompt=prompt_length * token,
            own=completion_length * token,
            products=2 * count_weights(shape) * bytes_per_operation,
            state=2 * state_bytes(shape, itemsize),
        )

    def with_slots(self, slots: int, *, of: int) -> DecodeStep:
        """Return the step that reads `slots` slots of a completion, given that this one reads `of`."""
        return dataclasses.replace(self, own=self.own * slots / of)

    def cost(self, groups: int, width: int) -> float:
        """Return the cost for a layout [groups, width]."""
        return self.weights + groups * (self.prompt + width * (self.own + self.state + self.products))
