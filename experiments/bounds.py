"""Lower bounds of a device's work, for `experiments.benchmark`: bytes of a decode, operations of an update, and peaks.

The bound of decoding is the memory's bandwidth, and the bound of an update the peak of the matrix units. Both count the
shared prompt once.
"""

from __future__ import annotations

import dataclasses

from grpo_jax.models.config import DecodeStep, TransformerConfig, count_weights, state_bytes

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
    """Operations and bytes per second of a kind of device; None for one that is not in the table."""
    words = device_kind.replace("-", " ").split()
    return PEAKS.get(device_kind) or next((peaks for name, peaks in PEAKS.items() if name in words), None)


@dataclasses.dataclass(frozen=True)
class Work:
    """Counts of one iteration of B prompts of P tokens with G completions of T tokens each."""

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

        queries = sum(c.num_heads * c.heads_of(kind)[1] for kind in c.layer_kinds if kind.mixer == "attention")
        memory = state_bytes(c, 0) / 4

        def scores(keys: float) -> float:  # a memory is read twice and written once per token
            return 2 * queries * keys + 3 * memory

        prompts = p * (count_weights(c, head=False) + scores((p + 1) / 2))
        completions = self.group * t * (count_weights(c) + scores(p + (t + 1) / 2))
        return 6 * self.prompts * (prompts + completions)
