"""Decoder configuration, weight counts, and a cost model for decode steps."""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import Mesh

from grpo_jax.models.devices import has_fast_float32_sums
from grpo_jax.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Settings that may differ between a decoder's layers. JAX traces each kind of layer once."""

    window: int | None = None  # sliding window in tokens; None for full attention
    rotary: bool = True  # whether queries and keys are rotated
    sparse: bool = False  # whether the layer has a mixture of experts (instead of an MLP, unless `parallel_experts`)
    mixer: str = "attention"  # or "delta" for a gated delta net, "conv" for a gated short convolution
    shared_kv: bool = False  # whether attention reuses a previous layer's keys and values


@dataclasses.dataclass(frozen=True)
class DeltaShape:
    """Dimensions of a decoder's gated delta nets."""

    key_heads: int  # number of query and key heads
    value_heads: int  # H, number of value, memory and gate heads; a multiple of `key_heads`
    key_dim: int  # d_k, channels per key
    value_dim: int  # d_v, channels per value
    kernel: int = 4  # K, width of the convolution in tokens
    by_key_heads: bool = False  # whether a layer has two input projections (columns grouped by key head), not four

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed_width(self) -> int:
        """C, number of convolution channels: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of a completion's state: memory (H, d_k, d_v) and tail (1, K − 1, C)."""
        return (self.value_heads, self.key_dim, self.value_dim), (1, self.kernel - 1, self.mixed_width)

    @property
    def projected_width(self) -> int:
        """Total width of a layer's input and output projections, not counting their hidden dimension D."""
        return self.mixed_width + 2 * self.value_width + 2 * self.value_heads


@dataclasses.dataclass(frozen=True)
class ConvShape:
    """Dimensions of a decoder's gated short convolutions."""

    width: int  # C, number of convolution channels; equal to D
    kernel: int = 3  # K, width of the convolution in tokens
    bias: bool = False  # whether the projections and the convolution have biases

    @property
    def state(self) -> tuple[None, tuple[int, int, int]]:
        """Shapes of a completion's state: no memory, and tail (1, K − 1, C)."""
        return None, (1, self.kernel - 1, self.width)

    @property
    def projected_width(self) -> int:
        """Total width of a layer's projections from and to the hidden size D."""
        return 4 * self.width


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Decoder configuration. If a per-layer field is unset, all layers use the default in `LayerKind`."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # width of the gated MLP
    num_layers: int
    num_heads: int  # number of query heads
    num_kv_heads: int  # number of key and value heads; divides num_heads
    head_dim: int
    rms_norm_eps: float = 1e-6  # added to the mean square
    tie_word_embeddings: bool = True  # whether the output head shares the embedding's weights
    max_position_embeddings: int = 32768  # context length of the checkpoint
    rope: Rope = dataclasses.field(default_factory=Rope)  # rotary embedding for layers with full attention
    local_rope: Rope | None = None  # rotary embedding for layers with a sliding window; None uses `rope`
    rotary_layers: tuple[bool, ...] | None = None  # `LayerKind.rotary` per layer
    windows: tuple[int | None, ...] | None = None  # `LayerKind.window` per layer
    mixers: tuple[str, ...] | None = None  # `LayerKind.mixer` per layer
    delta: DeltaShape | None = None
    conv: ConvShape | None = None
    full_heads: tuple[int, int] | None = None  # (num_kv_heads, head_dim) for full attention; None uses the fields above
    # Number of layers at the end that reuse keys and values from the last layer before them with the same window.
    shared_kv_layers: int = 0
    shared_kv_mlp: int = 0  # width of these layers' gated MLP; 0 uses `intermediate_size`
    layer_input_size: int = 0  # width of the per-layer embedding (Gemma 4); 0 disables it
    attention_gate: bool = False  # whether `q_proj` also outputs a gate for each attention output channel
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"  # or "head" or "flat": RMS norms of queries and keys over each head or the whole projection
    v_norm: bool = False  # whether to apply an RMS norm without weights to each head's values
    values_are_keys: bool = False  # whether layers without a window use the `k_proj` output as values
    norms: str = "pre"  # norms before attention and MLP ("pre"), after them ("post"), or both ("sandwich")
    norm_offset: float = 0.0  # added to the weights of `layers.norm` (1.0 for checkpoints that store weight − 1)
    activation: str = "silu"  # or "gelu", "gelu_tanh"
    query_scale: float | None = None  # factor applied to attention scores; None uses head_dim^(−1/2)
    attention_sinks: bool = False  # whether each head has a learned score for a key without a value
    attention_soft_cap: float | None = None  # c in c·tanh(score/c); None disables the cap
    logit_soft_cap: float | None = None  # c in c·tanh(logit/c); None disables the cap
    embedding_scale: float = 1.0  # factor applied to the embeddings
    residual_scale: float = 1.0  # factor applied to attention and MLP outputs before they are added to the residual
    logit_scale: float = 1.0  # factor applied to the logits
    layer_scalar: bool = False  # whether each layer's output is scaled by a frozen scalar from the checkpoint
    num_experts: int = 0  # number of experts per mixture-of-experts layer
    num_experts_per_token: int = 0
    expert_size: int = 0  # width of an expert's gated MLP
    shared_expert_size: int = 0  # width of the gated shared expert, which processes all tokens; 0 disables it
    expert_layers: tuple[bool, ...] = ()  # `LayerKind.sparse` per layer
    parallel_experts: bool = False  # whether sparse layers also have an MLP, and route with a `ScaledRouter`
    expert_bias: bool = False  # whether experts and their router have biases
    # (α, c) for experts that compute (min(g, c) σ(α min(g, c))) · (clip(u, ±c) + 1) instead of act(g) · u.
    expert_swiglu: tuple[float, float] | None = None
    normalize_expert_weights: bool = False  # whether to normalize the weights of a token's experts to sum to one
    router_loss_coef: float = 0.0  # factor applied to `router_loss` if the run's `router_aux_loss_coef` is None
    initializer_range: float = 0.02  # standard deviation of initial weights
    image_token_id: int | None = None  # token that image features replace; its logit is `MASKED`, so it is not sampled
    bidirectional_images: bool = False  # whether an image's tokens also attend to the image's later tokens (Gemma 3)
    dtype: str = "float32"  # compute dtype for matrix products: "float32" or "bfloat16"
    remat: bool = False  # whether to recompute layers in the backward pass instead of storing activations
    remat_on_cpu: bool = False  # whether to recompute with `block.cpu_remat`, which supports only reverse mode
    # Attention implementation for whole sequences. "einsum" stores all scores. The others (`fused`) support only
    # reverse-mode gradients. "triton" also uses kernels for experts (`ragged`) and large decode steps (`fused_step`).
    # "mosaic" is like "triton", but uses attention kernels for Hopper GPUs if `fits_mosaic`. "splash" is like "tiles",
    # but uses kernels for packed sequences on TPUs (`splash`). "auto" selects the fastest one for the devices.
    attention: str = "auto"
    mesh: Mesh | None = None  # mesh that fused attention and experts are sharded over; None for one device
    float32_sums: bool | None = None  # whether bfloat16 products use float32 sums (`matmul`); None: if that is faster
    # Whether calls without a cache run consecutive layers of one kind, or of a repeating pattern of kinds, as a loop
    # whose body is compiled once. The loop needs an additional copy of the layers' weights at run time.
    loop_layers: bool = False

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The `LayerKind` for each layer, in order."""
        n = self.num_layers
        windows, rotary = self.windows or (None,) * n, self.rotary_layers or (True,) * n
        sparse, mixers = self.expert_layers or (False,) * n, self.mixers or ("attention",) * n
        shared = (False,) * (n - self.shared_kv_layers) + (True,) * self.shared_kv_layers
        return tuple(map(LayerKind, windows, rotary, sparse, mixers, shared))

    @property
    def uses_float32_sums(self) -> bool:
        """Whether bfloat16 matrix products use float32 sums (see `float32_sums` in `matmul.matmul`)."""
        # With float32 sums on a mesh, XLA would gather all devices' tokens to compute weight gradients.
        if self.dtype != "bfloat16" or self.mesh is not None:
            return False
        return has_fast_float32_sums() if self.float32_sums is None else self.float32_sums

    @property
    def attention_widths(self) -> set[int]:
        """The attention layers' head sizes."""
        return {self.heads_of(kind)[1] for kind in self.layer_kinds if kind.mixer == "attention"}

    @property
    def fits_mosaic(self) -> bool:
        """Whether the kernels of `models.mosaic` support all attention layers."""
        return (
            self.dtype == "bfloat16"
            and self.attention_soft_cap is None
            and max(self.attention_widths, default=0) <= 128
        )

    def heads_of(self, kind: LayerKind) -> tuple[int, int]:
        """Return an attention layer's number of key and value heads, and the head size."""
        return self.full_heads if self.full_heads and kind.window is None else (self.num_kv_heads, self.head_dim)

    def kv_source(self, i: int) -> int:
        """Return the index of the layer whose keys and values layer i uses: i, or a previous layer if shared."""
        kinds = self.layer_kinds
        if not kinds[i].shared_kv:
            return i
        sources = range(self.num_layers - self.shared_kv_layers)
        return max(j for j in sources if kinds[j].window == kinds[i].window)

    @property
    def recurrent(self) -> tuple[DeltaShape | ConvShape, ...]:
        """The `DeltaShape` or `ConvShape` for each recurrent layer."""
        kinds = {"delta": self.delta, "conv": self.conv}
        return tuple(shape for kind in self.layer_kinds if (shape := kinds.get(kind.mixer)) is not None)


def count_weights(shape: TransformerConfig, *, head: bool = True, experts: int | None = None) -> int:
    """Return the number of weights in a decoder's matrix products, with or without the output head.

    `experts` is the number of experts to count per layer. It defaults to the number of experts that a token uses.
    """
    c = shape
    sparse = sum(c.expert_layers)
    counted = c.num_experts_per_token if experts is None else experts
    widths = sum(_attention_width(c, kind) for kind in c.layer_kinds) + 3 * c.layer_input_size * c.num_layers
    dense = c.num_layers - (0 if c.parallel_experts else sparse)
    wider = c.shared_kv_layers * (c.shared_kv_mlp - c.intermediate_size) if c.shared_kv_mlp else 0
    widths += 3 * (dense * c.intermediate_size + wider)
    widths += sparse * (3 * c.expert_size * counted + c.num_experts)
    widths += sparse * (3 * c.shared_expert_size + (c.shared_expert_size > 0))
    widths += sum(layer.projected_width for layer in c.recurrent)
    return c.hidden_size * (widths + head * c.vocab_size)


def _attention_width(shape: TransformerConfig, kind: LayerKind) -> int:
    """Return the total width of an attention layer's projections, or 0 for a recurrent layer."""
    if kind.mixer != "attention":
        return 0
    heads, width = shape.heads_of(kind)
    projections = 0 if kind.shared_kv else 1 if shape.values_are_keys and kind.window is None else 2
    return (shape.num_heads * (2 + shape.attention_gate) + projections * heads) * width


def state_bytes(shape: TransformerConfig, itemsize: float) -> float:
    """Return the number of bytes in a completion's recurrent states: float32 memories, and tails of this `itemsize`."""
    memories = sum(math.prod(layer.state[0]) for layer in shape.recurrent if layer.state[0] is not None)
    return 4 * memories + itemsize * sum(math.prod(layer.state[1]) for layer in shape.recurrent)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Cost, in bytes transferred, of a decode step for [groups, width] completions:

    cost = weights + groups · (prompt + width · (own + state + products))
    """

    weights: float  # weights of all matrix products, read once per step
    prompt: float  # keys and values of one prompt, read once per group
    own: float  # keys and values of one completion, without its prompt
    products: float = 0.0  # time of one completion's matrix products, as equivalent bytes; 0 to ignore it
    state: float = 0.0  # recurrent states of one completion, read and written

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
    ) -> StepCost:
        """Build the cost model for a decoder.

        `itemsize` is the number of bytes per cached value, `weight_itemsize` the number of bytes per weight (by default
        `itemsize`), and `bytes_per_operation` the number of bytes read in the time of one floating-point operation.
        """
        attention = [shape.heads_of(kind) for kind in shape.layer_kinds if kind.mixer == "attention"]
        token = itemsize * sum(2 * heads * width for heads, width in attention)  # bytes of keys and values per token
        return cls(
            weights=count_weights(shape, experts=shape.num_experts) * (weight_itemsize or itemsize),
            prompt=prompt_length * token,
            own=completion_length * token,
            products=2 * count_weights(shape) * bytes_per_operation,
            state=2 * state_bytes(shape, itemsize),
        )

    def cost(self, groups: int, width: int) -> float:
        """Compute the cost of a step for `groups` groups of `width` completions."""
        return self.weights + groups * (self.prompt + width * (self.own + self.state + self.products))
