"""Quantize a frozen base model to NF4 or int8, and dequantize NF4 and MXFP4 checkpoints.

Only the projections in decoder layers are quantized, as in QLoRA (arXiv:2305.14314).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from grpo_jax.hub.files import StoredTensor, computed
from grpo_jax.hub.tensors import ParamSlice
from grpo_jax.models.layers import NESTED_BLOCK, NF4, Quantized
from grpo_jax.types import Json

METHODS = ("nf4", "int8")
"""Supported values of `quantize` in addition to None."""

BLOCK = 64
"""Number of weights that share a scale in NF4."""

CHUNK = 1 << 20
"""Number of weights to quantize at a time, rounded down to whole rows."""

_MIDPOINTS = (NF4[1:] + NF4[:-1]) / 2

Leaf = TypeVar("Leaf")


class Source(NamedTuple):
    """A part of a parameter, the tensor that stores it, and the index of its first row in that tensor."""

    tensor: StoredTensor
    first: int
    part: ParamSlice


def check_method(method: str | None) -> None:
    """Raise ValueError if `method` is not supported."""
    if method is not None and method not in METHODS:
        raise ValueError(f"quantize must be {', '.join(map(repr, METHODS))} or None; got {method!r}.")


def check_quantizable(
    path: Sequence[str], shape: Sequence[int], parts: Iterable[ParamSlice], method: str | None
) -> None:
    """Raise ValueError if a parameter is a projection that cannot be quantized with `method`."""
    if method is None or not is_projection(path, shape):
        return
    if any(part.columns is not None for part in parts):
        raise ValueError(
            f"quantize={method!r} is not supported for {'/'.join(path)}, since the checkpoint stores it together with"
            " another projection (as in gpt-oss and Gemma 4); use quantize=None."
        )
    if method == "nf4" and shape[-2] % BLOCK:
        raise ValueError(
            f"quantize='nf4' requires rows with a multiple of {BLOCK} weights, but the rows of {'/'.join(path)} have"
            f" {shape[-2]}; use quantize='int8'."
        )


def is_projection(path: Sequence[str], shape: Sequence[int]) -> bool:
    """Return whether a parameter is a projection in a decoder layer."""
    named = any("proj" in name or name == "per_layer_input_gate" for name in path[-2:])
    return path[0].startswith("layers_") and len(shape) > 1 and named and "router" not in path


def quantized_shape(shape: Sequence[int], method: str, dtype: str, leaf: Callable[..., Leaf]) -> Quantized:
    """Return a `Quantized` like the result of `read_quantized`, with leaves created by `leaf(shape, dtype)`."""
    *lead, fan_in, fan_out = shape
    rows = (*lead, fan_out)
    if method == "int8":
        codes, scales = leaf((*rows, fan_in), np.int8), leaf((*rows, 1), np.float32)
        return Quantized(codes, scales, shape=tuple(shape), block=fan_in, dtype=dtype)
    outer = -(-math.prod(shape) // (BLOCK * NESTED_BLOCK))
    nested = tuple(leaf((n,), np.float32) for n in (256, outer, 1))
    codes, scales = leaf((*rows, fan_in // 2), np.uint8), leaf((*rows, fan_in // BLOCK), np.uint8)
    return Quantized(codes, scales, nested, shape=tuple(shape), block=BLOCK, dtype=dtype)


def read_quantized(shape: Sequence[int], sources: Sequence[Source], method: str, dtype: str) -> Quantized:
    """Read and quantize a parameter [..., in, out], a few rows at a time. Returns a `Quantized` with NumPy arrays.

    "nf4" uses blocks of 64 weights, whose scales are quantized to 8 bits. "int8" uses one scale per output feature.
    """
    quantized = quantized_shape(shape, method, dtype, np.empty)
    absmax = quantized.scales if method == "int8" else np.empty(quantized.scales.shape, np.float32)
    for source in sources:
        part = source.part
        codes, scales = (x if part.expert is None else x[part.expert] for x in (quantized.codes, absmax))
        step = max(1, CHUNK // part.shape[0])
        for start in range(0, part.rows, step):
            x = source.tensor.rows(source.first + start, min(step, part.rows - start)).astype(np.float32)
            chunk = slice(start, start + step)
            arrays = _int8_codes(x) if method == "int8" else _nf4_codes(x.ravel())
            codes[chunk], scales[chunk] = (array.reshape(len(x), -1) for array in arrays)
    if method == "int8":
        return quantized
    quantized.scales[...], nested = _nest(absmax)
    return dataclasses.replace(quantized, nested=nested)


def _int8_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize each row to int8: the codes are round(127 x / max |x|), and the scale is max |x| / 127."""
    scales = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(scales > 0, scales, 1)).astype(np.int8), scales


def _nf4_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize weights [n] as bitsandbytes does on a CPU. Returns NF4 codes, two per byte, and scales."""
    blocks = x.reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(axis=1)
    scaled = blocks * (np.float32(1) / np.maximum(absmax, np.float32(1e-38)))[:, None]
    codes = np.zeros(scaled.shape, np.uint8)
    for midpoint in _MIDPOINTS:  # rounds to the nearest level; several times faster than `np.searchsorted`
        codes += scaled > midpoint
    return codes[:, ::2] << 4 | codes[:, 1::2], absmax


def _nest(absmax: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Quantize scales to 8-bit codes. Returns the codes and a tuple (levels, outer scales, offset)."""
    levels = dynamic_levels()
    offset = absmax.mean(dtype=np.float64).astype(np.float32)
    flat = absmax.ravel() - offset
    blocks = np.pad(flat, (0, -len(flat) % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    outer = np.abs(blocks).max(axis=1)
    scaled = blocks / np.where(outer > 0, outer, 1)[:, None]
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, scaled).astype(np.uint8)
    return codes.ravel()[: len(flat)].reshape(absmax.shape), (levels, outer, offset[None])


def dynamic_levels() -> np.ndarray:
    """Return the 256 values of the signed 8-bit dynamic-exponent format (arXiv:1511.04561), in ascending order.

    They are 0, 1, and ±10^(i − 6) times the 2^i midpoints of 2^i + 1 evenly spaced points from 0.1 to 1, for i = 0…6.
    """
    values = [np.float32(0), np.float32(1)]
    for i in range(7):
        steps = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        values += [sign * np.float32(10.0 ** (i - 6)) * x for x in (steps[1:] + steps[:-1]) / 2 for sign in (1, -1)]
    return np.sort(np.array(values, np.float32))


# 4-bit checkpoints ----------------------------------------------------------------------------------------------------


def without_quantization(raw: Json) -> Json:
    """Return a config.json without its `quantization_config` if the method is bitsandbytes NF4, otherwise unchanged."""
    stored = raw.get("quantization_config") or {}
    supported = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    if any(stored.get(key) != value for key, value in supported.items()):
        return raw
    return {key: value for key, value in raw.items() if key != "quantization_config"}


def dequantize_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors. NF4 (bitsandbytes) and MXFP4 (gpt-oss) tensors are dequantized when read."""
    tensors = dict(stored)
    for key in stored:
        if (name := key.removesuffix(".quant_state.bitsandbytes__nf4")) != key:
            state = json.loads(_values(tensors.pop(key)).tobytes())
            nested = [".nested_absmax", ".nested_quant_map"] if "nested_offset" in state else []
            parts = {part: tensors.pop(name + part) for part in ("", ".absmax", ".quant_map", *nested)}
            tensors[name] = _dequantized_nf4(name, state, parts)
        elif (name := key.removesuffix("_blocks")) != key and f"{name}_scales" in stored:
            tensors[name] = _dequantized_mxfp4(tensors.pop(key), tensors.pop(f"{name}_scales"))
    return tensors


def _values(stored: StoredTensor) -> np.ndarray:
    return stored.read(0, math.prod(stored.shape))


def _dequantized_nf4(name: str, state: Json, parts: Mapping[str, StoredTensor]) -> StoredTensor:
    """Return an NF4 tensor as float32: quant_map[code] · block scale. A block may span several rows.

    Nested scales are nested_quant_map[code] · outer scale + offset; `nested_blocksize` codes share an outer scale.
    """
    codes, absmax, shape, block = parts[""], parts[".absmax"], tuple(state["shape"]), state["blocksize"]
    width = math.prod(shape[1:])
    if codes.dtype != np.uint8 or 2 * math.prod(codes.shape) != math.prod(shape) or width % 2:
        raise ValueError(
            f"NF4 tensor {name!r} of shape {list(shape)} must be stored with two weights per byte"
            f" (bnb_4bit_quant_storage='uint8'); got {codes.dtype.name}{list(codes.shape)}."
        )

    def scales(first: int, count: int) -> np.ndarray:
        stored_scales = absmax.read(first, count)
        if "nested_offset" not in state:
            return stored_scales
        outer = _values(parts[".nested_absmax"])[np.arange(first, first + count) // state["nested_blocksize"]]
        return _values(parts[".nested_quant_map"])[stored_scales] * outer + np.float32(state["nested_offset"])

    def rows(first: int, count: int) -> np.ndarray:
        start, size = first * width, count * width
        low, high = start // block, -(-(start + size) // block)
        pairs = _values(parts[".quant_map"])[np.arange(256)[:, None] >> np.array([[4, 0]]) & 15]  # two values per byte
        values = pairs[codes.read(start // 2, size // 2).ravel()].ravel()
        return values * np.repeat(scales(low, high - low), block)[start - low * block :][:size]

    return computed(codes.file, shape, rows)


_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# FP4 values (1 sign bit, 2 exponent bits, 1 mantissa bit) of the low and high halves of each byte, [256, 2].
_PAIRS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])[np.arange(256)[:, None] >> np.array([[0, 4]]) & 15]


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize blocks [..., n, 16] with scales [..., n], both uint8, to bfloat16 weights [..., 32 n].

    weight = FP4 value · 2^(scale − 127), which is exact in bfloat16 (OCP Microscaling Formats 1.0).
    """
    pairs = _PAIRS[blocks].reshape((*scales.shape, -1))
    weights = np.ldexp(pairs, scales.astype(np.int32)[..., None] - 127)
    return weights.astype(jnp.bfloat16).reshape((*scales.shape[:-1], -1))


def _dequantized_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """Return weights [experts, in, out] from blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32]."""
    experts, out, count, half = blocks.shape

    def rows(first: int, count: int) -> np.ndarray:
        return dequantize_mxfp4(blocks.rows(first, count), scales.rows(first, count)).swapaxes(1, 2)

    return computed(blocks.file, (experts, count * half * 2, out), rows, np.dtype(jnp.bfloat16))
