"""Lower bounds of a device's work: bytes of a decode, operations of an update, and the peaks that they are shares of.

Decoding reads all weights and every completion's keys once per token, whatever the batch: its bound is the memory's
bandwidth. An update multiplies: its bound is the peak of the matrix units. Both counts are those of the shared prompt.
By the same account of a decode step (`DecodeStep`) `rollout` chooses how completions are laid out.
"""

from __future__ import annotations

import dataclasses
import math

from grpo_jax.models.layers import LayerKind, TransformerConfig

PEAKS = {
    "T4": (65e12, 0.32e12),
    "V100": (125e12, 0.9e12),
    "L4": (121e12, 0.3e12),
    "A10": (125e12, 0.6e12),
    "A100": (312e12, 2.0e12),
    "L40S": (362e12, 0.864e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "B200": (2250e12, 8.0e12),
    "TPU v4": (275e12, 1.2e12),
    "TPU v5 lite": (197e12, 0.819e12),
    "TPU v5": (459e12, 2.765e12),
    "TPU v6 lite": (918e12, 1.64e12),
    "TPU7x": (2307e12, 7.37e12),
}
"""Dense 16-bit operations per second and bytes per second of a device, from the vendors' data sheets.

Named as JAX names the device: v5e is "TPU v5 lite", v5p "TPU v5", v6e "TPU v6 lite"."""


def peaks_of(device_kind: str) -> tuple[float, float] | None:
    """Operations and bytes per second of a kind of device; None for one that is not in the table.

    Example:
      >>> peaks_of("NVIDIA H100 80GB HBM3"), peaks_of("TPU v5 lite")[0]
      ((989000000000000.0, 3350000000000.0), 197000000000000.0)
      >>> peaks_of("cpu")
    """
    words = device_kind.replace("-", " ").split()
    return PEAKS.get(device_kind) or next((peaks for name, peaks in PEAKS.items() if name in words), None)


def count_weights(shape: TransformerConfig, *, head: bool = True, experts: int | None = None) -> int:
    """Weights of a decoder's matrix products.

    Args:
      head: with the output head; the embedding's lookup multiplies nothing.
      experts: of a mixture-of-experts layer, how many count; None for those that one token is sent to.

    Example:
      >>> shape = TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
      >>> count_weights(shape)  # 16·16 + 2·16·8 + 16·16 + 3·16·32, and the head's 16·32
      2816
    """
    c = shape
    sparse = sum(c.expert_layers)
    chosen = c.num_experts_per_token if experts is None else experts
    widths = sum(_attention_width(c, kind) for kind in c.layer_kinds) + 3 * c.layer_input_size * c.num_layers
    dense = c.num_layers - (0 if c.experts_beside_mlp else sparse)
    wider = c.shared_kv_layers * (c.shared_kv_mlp - c.intermediate_size) if c.shared_kv_mlp else 0
    widths += 3 * (dense * c.intermediate_size + wider)
    widths += sparse * (3 * c.expert_size * chosen + c.num_experts)
    widths += sparse * (3 * c.shared_expert_size + (c.shared_expert_size > 0))
    widths += sum(layer.projected_width for layer in c.recurrent)
    return c.hidden_size * (widths + head * c.vocab_size)


def _attention_width(shape: TransformerConfig, kind: LayerKind) -> int:
    """Channels that a layer's projections of attention go to or come from; 0 for a recurrent one."""
    if kind.mixer != "attention":
        return 0
    heads, width = shape.heads_of(kind)
    own = 0 if kind.shared_kv else 1 if shape.values_are_keys and kind.window is None else 2
    return (shape.num_heads * (2 + shape.attention_gate) + own * heads) * width


def read_width(shape: TransformerConfig, *, queries: bool = False) -> int:
    """Numbers of a token's keys and values that all layers read, or channels of their queries."""
    attention = [shape.heads_of(kind) for kind in shape.layer_kinds if kind.mixer == "attention"]
    return sum((shape.num_heads if queries else 2 * heads) * width for heads, width in attention)


def state_bytes(shape: TransformerConfig, itemsize: float) -> float:
    """Bytes of what a decoder's recurrent layers keep of one completion, or of one prompt, however long it is."""
    return 4 * _memory(shape) + itemsize * sum(math.prod(layer.state[1]) for layer in shape.recurrent)


def _memory(shape: TransformerConfig) -> int:
    """Numbers of all memories of one completion."""
    return sum(math.prod(layer.state[0]) for layer in shape.recurrent if layer.state[0] is not None)


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """Cost of a decode step for a layout [groups, width] of completions, in bytes that could be read meanwhile.

    cost = weights + groups · (prompt + width · (own + state + products))

    Weights are read once, whatever the completions; the prompt's keys and values once per group, a completion's own
    once per completion, and a recurrent layer's state is read and written. So few completions cost nearly as much as
    twice as many.

    Attributes:
      weights: bytes of the weights.
      prompt: bytes of one prompt's keys and values.
      own: bytes of one completion's own keys and values.
      products: bytes that could be read while one completion is multiplied by the weights; 0 counts what is read alone.
      state: bytes of one completion's states that are read and written, whatever its length.
    """

    weights: float
    prompt: float
    own: float
    products: float = 0.0
    state: float = 0.0

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
        """Return the step of a decoder for these lengths; `weight_itemsize` is that of the weights if it differs."""
        token = read_width(shape) * itemsize
        return cls(
            weights=count_weights(shape, experts=shape.num_experts) * (weight_itemsize or itemsize),
            prompt=prompt_length * token,
            own=completion_length * token,
            products=2 * count_weights(shape) * bytes_per_operation,
            state=2 * state_bytes(shape, itemsize),
        )

    def with_slots(self, slots: int, *, of: int) -> DecodeStep:
        """Return the step that looks at `slots` slots of a completion, where this one looks at `of`."""
        return dataclasses.replace(self, own=self.own * slots / of)

    def cost(self, groups: int, width: int) -> float:
        """Return the cost for a layout [groups, width]."""
        return self.weights + groups * (self.prompt + width * (self.own + self.state + self.products))


@dataclasses.dataclass(frozen=True)
class Work:
    """Counts of one iteration of B prompts of P tokens with G completions of T tokens each.

    Example:
      >>> shape = TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
      >>> work = Work(shape, prompts=1, group=2, prompt_length=4, completion_length=3, itemsize=2)
      >>> work.decode_bytes  # 3 steps of 2816 weights, 4 prompt tokens and 2 of each completion, of 2 · 8 numbers each
      17664.0
    """

    shape: TransformerConfig
    prompts: int
    group: int
    prompt_length: float
    completion_length: float
    itemsize: int

    @property
    def decode_bytes(self) -> float:
        """Bytes that decoding reads: the weights once per step, and every prompt's and completion's keys and values."""
        steps, p = self.completion_length, self.prompt_length
        # A completion has t slots at its step t: on average (T + 1) / 2.
        mean = DecodeStep.of(self.shape, prompt_length=p, completion_length=(steps + 1) / 2, itemsize=self.itemsize)
        return steps * mean.cost(self.prompts, self.group)

    @property
    def update_operations(self) -> float:
        """Operations of forward and backward pass, 2 and 4 a weight and token; the head on completions only."""
        c, p, t = self.shape, self.prompt_length, self.completion_length

        def scores(keys: float) -> float:  # a memory is read twice and written once per token
            return 2 * read_width(c, queries=True) * keys + 3 * _memory(c)

        prompts = p * (count_weights(c, head=False) + scores((p + 1) / 2))
        completions = self.group * t * (count_weights(c) + scores(p + (t + 1) / 2))
        return 6 * self.prompts * (prompts + completions)
