"""Weights stored in MXFP4, read as bfloat16.

A block of 32 weights shares one scale, a power of two; a weight is one of 16 values in four bits (OCP Microscaling
Formats 1.0). gpt-oss stores its experts so, as "…_blocks" and "…_scales" in the place of one tensor. Every such product
is a bfloat16 number, so nothing is lost in reading.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from grpo_jax.hub.files import Made, StoredTensor
from grpo_jax.types import Json

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""The sixteen numbers of four bits: a sign, two bits of exponent, one of mantissa."""

_PAIRS = VALUES[np.arange(256)[:, None] >> np.array([[0, 4]]) & 15]


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Weights [..., 32 n] bfloat16 of blocks [..., n, 16] and scales [..., n], both uint8.

    weight = value(four bits) · 2^(scale − 127)
    """
    pairs = _PAIRS[blocks].reshape(*scales.shape, -1)
    weights = np.ldexp(pairs, scales.astype(np.int32)[..., None] - 127)
    return weights.astype(jnp.bfloat16).reshape(*scales.shape[:-1], -1)


def without_mxfp4(raw: Json) -> Json:
    """A config.json without its `quantization_config`, if that is MXFP4: once read, the weights are not quantized."""
    quantized = (raw.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    return {key: value for key, value in raw.items() if not (quantized and key == "quantization_config")}


def unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | Made]:
    """The tensors of a checkpoint, each pair of blocks and scales as the one tensor that it stands for."""
    tensors: dict[str, StoredTensor | Made] = dict(stored)
    for name in stored:
        stem = name.removesuffix("_blocks")
        if stem != name and f"{stem}_scales" in stored:
            tensors[stem] = _made(stored[name], stored[f"{stem}_scales"])
            del tensors[name], tensors[f"{stem}_scales"]
    return tensors


def _made(blocks: StoredTensor, scales: StoredTensor) -> Made:
    """A tensor [E, in, out] in bfloat16, from blocks [E, out, in / 32, 16] of two weights a byte and their scales."""

    def rows(first: int, count: int) -> np.ndarray:
        return dequantize(blocks.rows(first, count), scales.rows(first, count)).swapaxes(1, 2)

    experts, out, count, half = blocks.shape
    return Made(blocks.file, (experts, count * half * 2, out), rows, np.dtype(jnp.bfloat16))
