"""Matrices in four and eight bits: made from a checkpoint's tensors a few rows at a time, or read from bitsandbytes.

Quantized are the projections of layers, and by choice the embedding and the output head. Norms, biases and routers stay
as they are, as in QLoRA (arXiv:2305.14314), and so does every weight that is trained.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from grpo_jax.hub.files import Stored
from grpo_jax.hub.tensors import Part
from grpo_jax.messages import some
from grpo_jax.models.quantized import NESTED_BLOCK, NF4, Quantized
from grpo_jax.types import Json

METHODS = ("nf4", "int8")
"""Values of `quantize`."""

BLOCK = 64
"""Weights of one scale in NF4."""

CHUNK = 1 << 20
"""Weights that are quantized at a time: little beside any model."""

_STATE = ".quant_state.bitsandbytes__nf4"
_BETWEEN = (NF4[1:] + NF4[:-1]) / 2

Leaf = TypeVar("Leaf")


class Source(NamedTuple):
    """Where a part of a parameter is stored: a tensor, the row in it where the part begins, and the part."""

    tensor: Stored | Nf4Tensor
    first: int
    part: Part


class Quantization(NamedTuple):
    """How a base is held: the `method` of the layers' projections, one of `METHODS` or None (plain).

    `embeddings` quantizes the embedding and the output head too; `tied` means that these are one.
    """

    method: str | None = None
    embeddings: bool = False
    tied: bool = False

    def of(self, path: Sequence[str], shape: Sequence[int]) -> str | None:
        """The method of one parameter; None: plain.

        A head is in eight bits, since what it rounds goes straight into the logits, and so is an embedding that is the
        head too, or one whose rows are no whole blocks of four bits.

        Example:
          >>> Quantization("nf4").of(("lm_head", "kernel"), (64, 96))
          >>> Quantization("nf4", embeddings=True).of(("lm_head", "kernel"), (64, 96))
          'int8'
        """
        if self.method is None or is_projection(path, shape):
            return self.method
        if not self.embeddings or path[-1] not in ("embedding", "kernel") or path[0] not in ("embed_tokens", "lm_head"):
            return None
        return "int8" if path[0] == "lm_head" or self.tied or shape[-1] % BLOCK else self.method


def check_method(method: str | None, embeddings: bool = False) -> None:
    """Raise ValueError unless `method` is one of `METHODS` or None, and embeddings are quantized only with the rest."""
    if method is not None and method not in METHODS:
        raise ValueError(f"quantize is {method!r}; use {' or '.join(map(repr, METHODS))}, or None for plain weights.")
    if embeddings and method is None:
        raise ValueError("quantize_embeddings is True, and quantize is None: say how by quantize='nf4' or 'int8'.")


def held_shape(path: Sequence[str], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape [in, out] that a parameter is quantized by: an embedding is held as the head that is tied to it."""
    return shape[::-1] if path[-1] == "embedding" else shape


def is_projection(path: Sequence[str], shape: Sequence[int]) -> bool:
    """Whether a parameter is one of those that are quantized.

    Example:
      >>> is_projection(("layers_0", "mlp", "up_proj", "kernel"), (8, 8)), is_projection(("lm_head", "kernel"), (8, 8))
      (True, False)
    """
    named = any("proj" in name or name == "per_layer_input_gate" for name in path[-2:])
    return path[0].startswith("layers_") and len(shape) > 1 and named and "router" not in path


def quantized_shape(shape: Sequence[int], method: str, dtype: str, leaf: Callable[..., Leaf]) -> Quantized:
    """A `Quantized` like that of `read_quantized`, of leaves `leaf(shape, dtype)`, such as `jax.ShapeDtypeStruct`."""
    *lead, fan_in, fan_out = shape
    rows = (*lead, fan_out)
    if method == "int8":
        codes, scales = leaf((*rows, fan_in), np.int8), leaf((*rows, 1), np.float32)
        return Quantized(codes, scales, shape=tuple(shape), block=fan_in, dtype=dtype)
    size = math.prod(shape)
    whole = fan_in % BLOCK == 0
    packed = (*rows, fan_in // 2) if whole else (-(-size // 2),)
    blocks = (*rows, fan_in // BLOCK) if whole else (-(-size // BLOCK),)
    outer = -(-math.prod(blocks) // NESTED_BLOCK)
    nested = tuple(leaf((n,), np.float32) for n in (256, outer, 1))
    codes, scales = leaf(packed, np.uint8), leaf(blocks, np.uint8)
    return Quantized(codes, scales, nested, shape=tuple(shape), block=BLOCK, dtype=dtype)


def read_quantized(shape: Sequence[int], sources: Sequence[Source], method: str, dtype: str) -> Quantized:
    """Return a parameter [..., in, out] as a `Quantized` of NumPy's arrays, read a few rows at a time.

    "nf4" has blocks of 64 weights, whose scales are quantized once more; "int8" has a scale a row. `dtype` is the dtype
    of the plain parameter.
    """
    held = quantized_shape(shape, method, dtype, np.empty)
    if method == "nf4" and held.scales.ndim == 1:
        whole = np.concatenate([_rows(source, 0, source.part.rows).ravel() for source in sources])
        held.codes[:], absmax = _nf4_codes(whole)
    else:
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
    """Some rows of a parameter's part, float32."""
    assert not isinstance(source.tensor, Nf4Tensor), "refused by check_sources"
    return source.tensor.rows(source.first + start, count).astype(np.float32)


def _int8_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of rows."""
    scales = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(scales > 0, scales, 1)).astype(np.int8), scales


def _nf4_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales of weights in a row, as bitsandbytes makes them on a CPU."""
    blocks = np.pad(x, (0, -len(x) % BLOCK)).reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(axis=1)
    scaled = blocks * (np.float32(1) / np.maximum(absmax, np.float32(1e-38)))[:, None]
    codes = np.zeros(scaled.shape, np.uint8)
    for between in _BETWEEN:  # the nearest value: several times faster than a search
        codes += scaled > between
    packed = (codes[:, ::2] << 4 | codes[:, 1::2]).ravel()
    return packed[: -(-len(x) // 2)], absmax


def _nest(absmax: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Scales in 8 bits, and what they are scaled by: the second of the two quantizations."""
    levels = dynamic_levels()
    offset = absmax.mean(dtype=np.float64).astype(np.float32)
    flat = absmax.ravel() - offset
    blocks = np.pad(flat, (0, -len(flat) % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    outer = np.abs(blocks).max(axis=1)
    scaled = blocks / np.where(outer > 0, outer, 1)[:, None]
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, scaled).astype(np.uint8)
    return codes.ravel()[: len(flat)].reshape(absmax.shape), (levels, outer, offset[None])


def dynamic_levels() -> np.ndarray:
    """The 256 values of a signed 8-bit number with a dynamic exponent (arXiv:1511.04561), float32, ascending.

    ±10^(i − 6) times the 2^i midpoints between 2^i + 1 steps from 0.1 to 1, for i = 0…6; and 0 and 1.
    """
    values = [np.float32(0), np.float32(1)]
    for i in range(7):
        steps = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        values += [sign * np.float32(10.0 ** (i - 6)) * x for x in (steps[1:] + steps[:-1]) / 2 for sign in (1, -1)]
    return np.sort(np.array(values, np.float32))


@dataclasses.dataclass(frozen=True)
class Nf4Tensor:
    """A tensor that bitsandbytes has stored in NF4: of the shape that it stands for, with its parts by their names."""

    name: str
    shape: tuple[int, ...]
    state: Json
    parts: Mapping[str, Stored]

    def scales(self) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Scales in one row, and what they are nested in."""
        scales = _all(self.parts[".absmax"])
        if ".nested_absmax" not in self.parts:
            return scales.astype(np.float32), None
        levels, outer = (_all(self.parts[name]).astype(np.float32) for name in (".nested_quant_map", ".nested_absmax"))
        return scales, (levels, outer, np.array([self.state["nested_offset"]], np.float32))

    def plain_scales(self) -> np.ndarray:
        """Scales in one row, float32."""
        scales, nested = self.scales()
        if nested is None:
            return scales
        levels, outer, offset = nested
        return levels[scales] * np.repeat(outer, NESTED_BLOCK)[: len(scales)] + offset


def _all(stored: Stored) -> np.ndarray:
    """All numbers of a tensor, in one row."""
    return stored.rows(0, stored.shape[0]).ravel()


def without_quantization(raw: Json) -> Json:
    """A config.json without its `quantization_config`, if that is NF4 of bitsandbytes; else as it is, to be refused."""
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


def find_nf4(stored: Mapping[str, Stored]) -> dict[str, Stored | Nf4Tensor]:
    """Return the tensors of a checkpoint, with each tensor in NF4 as one `Nf4Tensor` instead of its stored parts.

    A ValueError names a tensor in NF4 with parts missing, or of another table, block or storage.
    """
    found: dict[str, Stored | Nf4Tensor] = dict(stored)
    for name in [key.removesuffix(_STATE) for key in stored if key.endswith(_STATE)]:
        state = json.loads(_all(stored[name + _STATE]).tobytes())
        names = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
        parts = {part: stored[name + part] for part in names if name + part in stored}
        for part in (*parts, _STATE):
            del found[name + part]
        tensor = Nf4Tensor(name, tuple(state["shape"]), state, parts)
        _check_nf4(tensor)
        found[name] = tensor
    return found


def _check_nf4(tensor: Nf4Tensor) -> None:
    """Raise ValueError for a tensor in NF4 that is not as `Quantized` holds it."""
    parts, state = tensor.parts, tensor.state
    nested = "nested_offset" in state
    wanted = {"", ".absmax", ".quant_map"} | ({".nested_absmax", ".nested_quant_map"} if nested else set())
    size = math.prod(tensor.shape)
    if missing := sorted(name or "its codes" for name in wanted - set(parts)):
        reason = f"without {some(missing)}"
    elif parts[""].dtype != np.uint8 or math.prod(parts[""].shape) != -(-size // 2):
        reason = f"with codes of {parts[''].dtype.name}{list(parts[''].shape)}; {-(-size // 2)} of uint8 are supported"
    elif not np.array_equal(_all(parts[".quant_map"]), NF4):
        reason = "with values of its own for the 16 codes; those of NF4 are supported"
    elif nested and state.get("nested_blocksize") != NESTED_BLOCK:
        reason = f"with nested_blocksize {state.get('nested_blocksize')}; {NESTED_BLOCK} is supported"
    elif math.prod(parts[".absmax"].shape) != -(-size // state["blocksize"]):
        reason = (
            f"with {math.prod(parts['.absmax'].shape)} scales; {-(-size // state['blocksize'])} blocks need as many"
        )
    else:
        return
    raise ValueError(f"tensor {tensor.name!r} is stored in NF4 {reason}.")


def check_sources(path: Sequence[str], shape: Sequence[int], sources: Sequence[Source], method: str | None) -> None:
    """Raise ValueError for a parameter that cannot be made of the tensors it is stored in."""
    stored = [tensor for tensor, _, _ in sources if isinstance(tensor, Nf4Tensor)]
    if method is not None and any(part.stacked for _, _, part in sources) and is_projection(path, shape):
        raise ValueError(
            f"quantize is {method!r}: {'/'.join(path)} is stored in every other column of a tensor (as gpt-oss has it),"
            " or with other weights of each expert (as Gemma 4 has it), which is not supported; leave quantize out."
        )
    for tensor, _, _ in sources:
        if not isinstance(tensor, Nf4Tensor) and tensor.dtype == np.uint8:
            raise ValueError(f"{'/'.join(path)} is stored as U8, and not as bitsandbytes stores NF4.")
    if not stored:
        return
    where = f"tensor {stored[0].name!r} is stored in NF4"
    if method not in (None, "nf4"):
        raise ValueError(f"quantize is {method!r}: {where}, and would be rounded twice; leave quantize out.")
    if not is_projection(path, shape):
        raise ValueError(f"{where}; that is supported for projections of layers, and {'/'.join(path)} is none.")
    blocks = {tensor.state["blocksize"] for tensor in stored}
    if not _is_one(sources) and (len(stored) < len(sources) or len(blocks) > 1 or shape[-2] % min(blocks)):
        raise ValueError(
            f"{where}, and {'/'.join(path)} is a part of it or made of several: blocks then have to be whole in each"
            " row and of one size in all of them; store these projections plain."
        )


def _is_one(sources: Sequence[Source]) -> bool:
    """Whether a parameter is all of one tensor."""
    tensor, _, part = sources[0]
    return len(sources) == 1 and part.rows == tensor.shape[0] and part.expert is None


def read_nf4(shape: Sequence[int], sources: Sequence[Source], dtype: str) -> Quantized:
    """A parameter [..., in, out] whose tensors are stored in NF4, as `check_sources` has found them.

    Scales of a tensor that holds one parameter stay nested; those of a part of one are written out in float32.
    """
    stored = [(source, source.tensor) for source in sources if isinstance(source.tensor, Nf4Tensor)]
    block = stored[0][1].state["blocksize"]
    *lead, fan_in, fan_out = shape
    if _is_one(sources):
        codes, (scales, nested) = _all(stored[0][1].parts[""]), stored[0][1].scales()
        if fan_in % block == 0:
            codes, scales = codes.reshape(fan_out, -1), scales.reshape(fan_out, -1)
        return Quantized(codes, scales, nested, shape=tuple(shape), block=block, dtype=dtype)
    codes = np.empty((*lead, fan_out, fan_in // 2), np.uint8)
    scales = np.empty((*lead, fan_out, fan_in // block), np.float32)
    for (_, first, part), tensor in stored:
        at = ... if part.expert is None else part.expert
        rows = slice(first, first + part.rows)
        codes[at] = _all(tensor.parts[""]).reshape(tensor.shape[0], -1)[rows]
        scales[at] = tensor.plain_scales().reshape(tensor.shape[0], -1)[rows]
    return Quantized(codes, scales, None, shape=tuple(shape), block=block, dtype=dtype)
