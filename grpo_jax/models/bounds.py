"""The cost of a decode step: the bytes that it reads, by which `rollout` chooses how completions are laid out.

Decoding reads all weights and every completion's keys once per token, whatever the batch.
"""

from __future__ import annotations

import dataclasses
import math

from grpo_jax.models.layers import LayerKind, TransformerConfig


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


def read_width(shape: TransformerConfig) -> int:
    """Numbers of a token's keys and values that all layers read."""
    attention = [shape.heads_of(kind) for kind in shape.layer_kinds if kind.mixer == "attention"]
    return sum(2 * heads * width for heads, width in attention)


def state_bytes(shape: TransformerConfig, itemsize: float) -> float:
    """Bytes of what a decoder's recurrent layers keep of one completion, or of one prompt, however long it is."""
    memories = sum(math.prod(layer.state[0]) for layer in shape.recurrent if layer.state[0] is not None)
    return 4 * memories + itemsize * sum(math.prod(layer.state[1]) for layer in shape.recurrent)


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
