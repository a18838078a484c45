"""Bytes per decode, operations per update, and device peaks, from which `experiments.benchmark` computes lower bounds.

Decoding is bounded by memory bandwidth, and an update by the peak of the matrix units. Both count the shared prompt
once.
"""

from __future__ import annotations

import dataclasses

from grpo_jax.models.config import StepCost, TransformerConfig, count_weights, state_bytes

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
"""Dense 16-bit operations per second and memory bytes per second by device, from the vendors' data sheets.

Keys are JAX's device names: v5e is "TPU v5 lite", v5p is "TPU v5", and v6e is "TPU v6 lite"."""


def peaks_of(device_kind: str) -> tuple[float, float] | None:
    """Return the peak operations and bytes per second of a device kind, or None if it is not in `PEAKS`."""
    words = device_kind.replace("-", " ").split()
    return PEAKS.get(device_kind) or next((peaks for name, peaks in PEAKS.items() if name in words), None)


@dataclasses.dataclass(frozen=True)
class Work:
    """Work in one iteration with B prompts of P tokens, and G completions of T tokens for each."""

    shape: TransformerConfig
    prompts: int
    group: int
    prompt_length: float
    completion_length: float
    itemsize: int

    @property
    def decode_bytes(self) -> float:
        """Bytes read while decoding: per step, the weights and the keys and values of all prompts and completions."""
        steps, p = self.completion_length, self.prompt_length
        # At step t a completion has t cached slots, (T + 1) / 2 on average.
        mean = StepCost.of(self.shape, prompt_length=p, completion_length=(steps + 1) / 2, itemsize=self.itemsize)
        return steps * mean.cost(self.prompts, self.group)

    @property
    def update_operations(self) -> float:
        """Operations in the forward (2 per weight and token) and backward pass (4). The head runs on completions."""
        c, p, t = self.shape, self.prompt_length, self.completion_length

        queries = sum(c.num_heads * c.heads_of(kind)[1] for kind in c.layer_kinds if kind.mixer == "attention")
        memory = state_bytes(c, 0) / 4

        def scores(keys: float) -> float:  # a recurrent state is read twice and written once per token
            return 2 * queries * keys + 3 * memory

        prompts = p * (count_weights(c, head=False) + scores((p + 1) / 2))
        completions = self.group * t * (count_weights(c) + scores(p + (t + 1) / 2))
        return 6 * self.prompts * (prompts + completions)
