"""Quantized weights: NF4 and int8 of a frozen base, and checkpoints that are stored in NF4 or MXFP4.

Only the projections of layers are quantized, as in QLoRA (arXiv:2305.14314).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from grpo_jax.hub.files import StoredTensor, computed
from grpo_jax.hub.tensors import Part
from grpo_jax.messages import some
from grpo_jax.models.layers import NESTED_BLOCK, NF4, Quantized
from grpo_jax.types import Json

METHODS = ("nf4", "int8")
"""Values of `quantize`."""

BLOCK = 64
"""Weights of one scale in NF4."""

CHUNK = 1 << 20
"""Weights that are quantized at a time."""

_STATE = ".quant_state.bitsandbytes__nf4"
_BETWEEN = (NF4[1:] + NF4[:-1]) / 2

Leaf = TypeVar("Leaf")


class Source(NamedTuple):
    """Where a part of a parameter is stored: a tensor, the first row of the part in it, and the part."""

    tensor: StoredTensor | Nf4Tensor
    first: int
    part: Part


def check_method(method: str | None) -> None:
    """Raise ValueError for an unknown method."""
    if method is not None and method not in METHODS:
        raise ValueError(f"quantize is {method!r}; use {' or '.join(map(repr, METHODS))}, or None for plain weights.")


def check_nf4_rows(path: Sequence[str], shape: Sequence[int], method: str | None) -> None:
    """Raise ValueError for a projection whose rows are not whole blocks of NF4."""
    if method == "nf4" and is_projection(path, shape) and shape[-2] % BLOCK:
        raise ValueError(
            f"quantize is 'nf4': the rows of {'/'.join(path)} have {shape[-2]} weights, which {BLOCK} does not divide;"
            " use quantize='int8'."
        )


def is_projection(path: Sequence[str], shape: Sequence[int]) -> bool:
    """Whether a parameter is a projection of a layer."""
    named = any("proj" in name or name == "per_layer_input_gate" for name in path[-2:])
    return path[0].startswith("layers_") and len(shape) > 1 and named and "router" not in path


def quantized_shape(shape: Sequence[int], method: str, dtype: str, leaf: Callable[..., Leaf]) -> Quantized:
    """Return the `Quantized` that `read_quantized` fills, with leaves `leaf(shape, dtype)`."""
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
    """Return a parameter [..., in, out] as a `Quantized` of NumPy arrays, quantized a few rows at a time.

    "nf4" has blocks of 64 weights, whose scales are quantized to 8 bits; "int8" has one scale for each row.
    """
    held = quantized_shape(shape, method, dtype, np.empty)
    absmax = held.scales if method == "int8" else np.empty(held.scales.shape, np.float32)
    for source in sources:
        part = source.part
        codes, scales = (x if part.expert is None else x[part.expert] for x in (held.codes, absmax))
        step = max(1, CHUNK // part.shape[0])
        for start in range(0, part.rows, step):
            x, at = _rows(source, start, min(step, part.rows - start)), slice(start, start + step)
            made = _int8_codes(x) if method == "int8" else _nf4_codes(x.ravel())
            codes[at], scales[at] = (values.reshape(len(x), -1) for values in made)
    if method == "int8":
        return held
    held.scales[...], nested = _nest(absmax)
    return dataclasses.replace(held, nested=nested)


def _rows(source: Source, start: int, count: int) -> np.ndarray:
    """Return some rows of a part of a parameter, float32."""
    assert not isinstance(source.tensor, Nf4Tensor), "refused by check_sources"
    return source.tensor.rows(source.first + start, count).astype(np.float32)


def _int8_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of rows."""
    scales = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(scales > 0, scales, 1)).astype(np.int8), scales


def _nf4_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return packed codes and scales of weights [n], as bitsandbytes computes them on a CPU."""
    blocks = x.reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(axis=1)
    scaled = blocks * (np.float32(1) / np.maximum(absmax, np.float32(1e-38)))[:, None]
    codes = np.zeros(scaled.shape, np.uint8)
    for between in _BETWEEN:  # the nearest value; several times faster than `np.searchsorted`
        codes += scaled > between
    return codes[:, ::2] << 4 | codes[:, 1::2], absmax


def _nest(absmax: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Quantize scales to 8 bits; also return their levels, outer scales and offset."""
    levels = dynamic_levels()
    offset = absmax.mean(dtype=np.float64).astype(np.float32)
    flat = absmax.ravel() - offset
    blocks = np.pad(flat, (0, -len(flat) % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    outer = np.abs(blocks).max(axis=1)
    scaled = blocks / np.where(outer > 0, outer, 1)[:, None]
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, scaled).astype(np.uint8)
    return codes.ravel()[: len(flat)].reshape(absmax.shape), (levels, outer, offset[None])


def dynamic_levels() -> np.ndarray:
    """Return the 256 values of a signed 8-bit number with a dynamic exponent (arXiv:1511.04561), ascending.

    ±10^(i − 6) times the 2^i midpoints between 2^i + 1 steps from 0.1 to 1, for i = 0…6; and 0 and 1.
    """
    values = [np.float32(0), np.float32(1)]
    for i in range(7):
        steps = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        values += [sign * np.float32(10.0 ** (i - 6)) * x for x in (steps[1:] + steps[:-1]) / 2 for sign in (1, -1)]
    return np.sort(np.array(values, np.float32))


@dataclasses.dataclass(frozen=True)
class Nf4Tensor:
    """A tensor that bitsandbytes stored in NF4: its plain shape, and its stored parts by suffix."""

    name: str
    shape: tuple[int, ...]
    state: Json
    parts: Mapping[str, StoredTensor]

    def scales(self) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Return the scales [blocks]; if they are 8-bit codes, also their levels, outer scales and offset."""
        scales = _all(self.parts[".absmax"])
        if ".nested_absmax" not in self.parts:
            return scales.astype(np.float32), None
        levels, outer = (_all(self.parts[name]).astype(np.float32) for name in (".nested_quant_map", ".nested_absmax"))
        return scales, (levels, outer, np.array([self.state["nested_offset"]], np.float32))

    def plain_scales(self) -> np.ndarray:
        """Return the scales [blocks], float32."""
        scales, nested = self.scales()
        if nested is None:
            return scales
        levels, outer, offset = nested
        return levels[scales] * np.repeat(outer, NESTED_BLOCK)[: len(scales)] + offset


def _all(stored: StoredTensor) -> np.ndarray:
    """Return all numbers of a tensor, [n]."""
    return stored.read(0, math.prod(stored.shape))


def without_quantization(raw: Json) -> Json:
    """Return a config.json without a `quantization_config` of bitsandbytes' NF4; another one stays, to be refused."""
    stored = raw.get("quantization_config") or {}
    wanted = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    if not stored or any(stored.get(key) != value for key, value in wanted.items()):
        return raw
    if stored.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise ValueError(
            f"config key 'bnb_4bit_quant_storage' is {stored['bnb_4bit_quant_storage']!r}, which is not supported;"
            " supported: 'uint8'."
        )
    return {key: value for key, value in raw.items() if key != "quantization_config"}


def find_nf4(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | Nf4Tensor]:
    """Return the tensors of a checkpoint, with the parts of each tensor in NF4 as one `Nf4Tensor`."""
    found: dict[str, StoredTensor | Nf4Tensor] = dict(stored)
    for name in [key.removesuffix(_STATE) for key in stored if key.endswith(_STATE)]:
        state = json.loads(_all(stored[name + _STATE]).tobytes())
        names = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
        parts = {part: stored[name + part] for part in names if name + part in stored}
        for part in (*parts, _STATE):
            del found[name + part]
        _check_nf4(name, state, parts)
        found[name] = Nf4Tensor(name, tuple(state["shape"]), state, parts)
    return found


def _check_nf4(name: str, state: Json, parts: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError for a tensor in NF4 that `Quantized` does not represent."""
    nested, size = "nested_offset" in state, math.prod(state["shape"])
    wanted = {"", ".absmax", ".quant_map"} | ({".nested_absmax", ".nested_quant_map"} if nested else set())
    if missing := sorted(part or "its codes" for part in wanted - set(parts)):
        reason = f"without {some(missing)}"
    elif parts[""].dtype != np.uint8 or math.prod(parts[""].shape) != -(-size // 2):
        reason = f"with codes of {parts[''].dtype.name}{list(parts[''].shape)}; {-(-size // 2)} of uint8 are supported"
    elif not np.array_equal(_all(parts[".quant_map"]), NF4):
        reason = "with another table of the 16 codes; only the table of NF4 is supported"
    elif nested and state.get("nested_blocksize") != NESTED_BLOCK:
        reason = f"with nested_blocksize {state.get('nested_blocksize')}; {NESTED_BLOCK} is supported"
    elif math.prod(parts[".absmax"].shape) != -(-size // state["blocksize"]):
        reason = f"with {math.prod(parts['.absmax'].shape)} scales for {-(-size // state['blocksize'])} blocks"
    else:
        return
    raise ValueError(f"tensor {name!r} is stored in NF4 {reason}.")


def check_sources(path: Sequence[str], shape: Sequence[int], sources: Sequence[Source], method: str | None) -> None:
    """Raise ValueError for a parameter that cannot be read from the tensors that store it."""
    stored = [tensor for tensor, _, _ in sources if isinstance(tensor, Nf4Tensor)]
    if method is not None and any(part.stacked for _, _, part in sources) and is_projection(path, shape):
        raise ValueError(
            f"quantize is {method!r}: {'/'.join(path)} shares a stored tensor with another projection (as in gpt-oss"
            " and Gemma 4), which is not supported; leave quantize out."
        )
    for tensor, _, _ in sources:
        if not isinstance(tensor, Nf4Tensor) and tensor.dtype == np.uint8:
            raise ValueError(f"{'/'.join(path)} is stored as U8, and not as bitsandbytes stores NF4.")
    if not stored:
        check_nf4_rows(path, shape, method)
        return
    where = f"tensor {stored[0].name!r} is stored in NF4"
    if method not in (None, "nf4"):
        raise ValueError(f"quantize is {method!r}: {where}, and would be rounded twice; leave quantize out.")
    if not is_projection(path, shape):
        raise ValueError(f"{where}; only projections of layers may be, and {'/'.join(path)} is not one.")
    blocks = {tensor.state["blocksize"] for tensor in stored}
    if len(stored) < len(sources) or len(blocks) > 1 or shape[-2] % min(blocks):
        raise ValueError(
            f"{where} in blocks of {some(sorted(map(str, blocks)))} weights; blocks of one size that divides the rows"
            f" of {'/'.join(path)} ({shape[-2]} weights) are supported; store these projections plain."
        )


def _is_one(sources: Sequence[Source]) -> bool:
    """Whether a parameter is the whole of one tensor."""
    tensor, _, part = sources[0]
    return len(sources) == 1 and part.rows == tensor.shape[0] and part.expert is None


def read_nf4(shape: Sequence[int], sources: Sequence[Source], dtype: str) -> Quantized:
    """Return a parameter [..., in, out] from tensors in NF4 that `check_sources` accepted.

    Nested scales stay nested if the parameter is one whole tensor; else they are dequantized to float32.
    """
    stored = [(source, source.tensor) for source in sources if isinstance(source.tensor, Nf4Tensor)]
    block = stored[0][1].state["blocksize"]
    *lead, fan_in, fan_out = shape
    if _is_one(sources):
        codes, (scales, nested) = _all(stored[0][1].parts[""]).reshape(fan_out, -1), stored[0][1].scales()
        return Quantized(codes, scales.reshape(fan_out, -1), nested, shape=tuple(shape), block=block, dtype=dtype)
    codes = np.empty((*lead, fan_out, fan_in // 2), np.uint8)
    scales = np.empty((*lead, fan_out, fan_in // block), np.float32)
    for (_, first, part), tensor in stored:
        at = ... if part.expert is None else part.expert
        rows = slice(first, first + part.rows)
        codes[at] = _all(tensor.parts[""]).reshape(tensor.shape[0], -1)[rows]
        scales[at] = tensor.plain_scales().reshape(tensor.shape[0], -1)[rows]
    return Quantized(codes, scales, None, shape=tuple(shape), block=block, dtype=dtype)


# MXFP4 ----------------------------------------------------------------------------------------------------------------

# gpt-oss stores its experts so, as "…_blocks" and "…_scales": a block of 32 weights shares one scale, a power of two,
# and a weight is one of 16 values (OCP Microscaling Formats 1.0). Every product is a bfloat16 number.
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# The sixteen numbers of four bits (a sign, two bits of exponent, one of mantissa), for both halves of a byte.
_PAIRS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])[np.arange(256)[:, None] >> np.array([[0, 4]]) & 15]


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the weights [..., 32 n], bfloat16, of blocks [..., n, 16] and scales [..., n], both uint8.

    weight = value(four bits) · 2^(scale − 127)
    """
    pairs = _PAIRS[blocks].reshape((*scales.shape, -1))
    weights = np.ldexp(pairs, scales.astype(np.int32)[..., None] - 127)
    return weights.astype(jnp.bfloat16).reshape((*scales.shape[:-1], -1))


def without_mxfp4(raw: Json) -> Json:
    """Return a config.json without a `quantization_config` of MXFP4, whose weights are plain once they are read."""
    quantized = (raw.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    return {key: value for key, value in raw.items() if not (quantized and key == "quantization_config")}


def find_mxfp4(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with each pair of blocks and scales as the plain tensor that they encode."""
    tensors = dict(stored)
    for name in stored:
        stem = name.removesuffix("_blocks")
        if stem != name and f"{stem}_scales" in stored:
            tensors[stem] = _plain_mxfp4(tensors.pop(name), tensors.pop(f"{stem}_scales"))
    return tensors


def _plain_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """Return [experts, in, out], bfloat16, of blocks [experts, out, in / 32, 16], two weights a byte, and scales."""
    experts, out, count, half = blocks.shape

    def rows(first: int, count: int) -> np.ndarray:
        return dequantize_mxfp4(blocks.rows(first, count), scales.rows(first, count)).swapaxes(1, 2)

    return computed(blocks.file, (experts, count * half * 2, out), rows, np.dtype(jnp.bfloat16))
