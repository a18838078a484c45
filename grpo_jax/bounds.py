"""What a device cannot go below: bytes of a decode, operations of an update, and the peaks that they are shares of.

Decoding reads all weights and every row's keys once a token, whatever the batch: its bound is the memory's bandwidth.
An update multiplies: its bound is the peak of the matrix units. Both counts are those of the shared prompt.
"""

from __future__ import annotations

import dataclasses

from grpo_jax.models.transformer import TransformerConfig

__all__ = ["PEAKS", "Work", "peaks_of"]

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
}
"""Dense 16-bit operations a second and bytes a second, from the vendors' data sheets."""


def peaks_of(device_kind: str) -> tuple[float, float] | None:
    """Operations and bytes a second of a kind of device; None for one that is not in the table.

    Example:
      >>> peaks_of("NVIDIA H100 80GB HBM3")
      (989000000000000.0, 3350000000000.0)
      >>> peaks_of("cpu")
    """
    words = device_kind.replace("-", " ").split()
    return next((peaks for name, peaks in PEAKS.items() if name in words), None)


@dataclasses.dataclass(frozen=True)
class Work:
    """Counts of one iteration of B prompts of P tokens with G completions of T tokens each.

    Example:
      >>> shape = TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
      >>> work = Work(shape, prompts=1, group=2, prompt_length=4, completion_length=3, itemsize=2)
      >>> work.weights  # 16·16 + 2·16·8 + 16·16 + 3·16·32, and the head's 16·32
      2816
    """

    shape: TransformerConfig
    prompts: int
    group: int
    prompt_length: float
    completion_length: float
    itemsize: int

    @property
    def layer_weights(self) -> int:
        """Weights of the layers, of which each token uses all."""
        c = self.shape
        attention = 2 * c.num_heads * c.head_dim + 2 * c.num_kv_heads * c.head_dim
        return c.num_layers * c.hidden_size * (attention + 3 * c.intermediate_size)

    @property
    def weights(self) -> int:
        """Weights that a decode step reads: the layers' and the head's."""
        return self.layer_weights + self.shape.hidden_size * self.shape.vocab_size

    @property
    def decode_bytes(self) -> float:
        """Bytes that decoding reads: the weights once a step, and every prompt's and row's keys and values."""
        c, steps = self.shape, self.completion_length
        token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * self.itemsize
        keys = self.prompts * (self.prompt_length + self.group * (steps + 1) / 2) * token
        return steps * (self.weights * self.itemsize + keys)

    @property
    def update_operations(self) -> float:
        """Operations of forward and backward pass, 2 and 4 a weight and token; the head on completions only."""
        c, p, t = self.shape, self.prompt_length, self.completion_length
        scores = lambda keys: 2 * c.num_layers * c.num_heads * c.head_dim * keys
        prompts = p * (self.layer_weights + scores((p + 1) / 2))
        completions = self.group * t * (self.weights + scores(p + (t + 1) / 2))
        return 6 * self.prompts * (prompts + completions)
