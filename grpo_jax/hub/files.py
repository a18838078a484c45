"""The files of a checkpoint: JSON, tensors by rows, MXFP4, and directories that appear when they are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from grpo_jax.messages import one_line, show, some
from grpo_jax.types import Json, Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that a tokenizer may consist of; they are kept byte for byte."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files beside them of a model that sees; likewise."""

STORED = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F32": np.float32,
        "F16": np.float16,
        "BF16": jnp.bfloat16,
        "F64": np.float64,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
"""Dtypes of stored tensors, as a safetensors header names them."""

FLOAT32 = STORED["F32"]

READ = ("F32", "F16", "BF16")
"""Those that parameters may be stored in."""


def is_fault(error: BaseException) -> bool:
    """Whether a parser has failed: an exception, or a panic of the Rust code of `tokenizers`, which is not one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Turn what a parser raises into a ValueError that names `what`: a file, or a part of a file."""
    try:
        yield
    except BaseException as error:
        known = isinstance(error, ImportError | OSError) or (isinstance(error, ValueError) and str(what) in str(error))
        if known or not is_fault(error):
            raise
        missing = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        raise ValueError(f"{what}: {error if isinstance(error, ValueError) else missing}") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        pointer = f"; it is {POINTER}" if is_pointer(path) else ""
        raise ValueError(f"{path} is not JSON: {error}{pointer}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {show(content)}, not a JSON object.")
    return content


POINTER = "a Git LFS pointer, not the file; fetch the file with `git lfs pull`"


def is_pointer(path: Path) -> bool:
    """Whether a file only says where Git LFS has its content."""
    with path.open("rb") as file:
        return file.read(64).startswith(b"version https://git-lfs")


def check_ids(path: Path, values: Json) -> None:
    """Raise ValueError unless the ids in a config are ids: each a whole number, a list of them, or None."""
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(key)
        ids = value if isinstance(value, list) and key != "pad_token_id" else [0 if value is None else value]
        if not all(type(token) is int for token in ids):
            raise ValueError(f"{path}: {key!r} is {show(value)}; use the id of a token, or null for none.")


def write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: plain reads, since the pages of a memory map would count beside the parameters."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def rows(self, first: int, count: int) -> np.ndarray:
        """Rows first..first+count-1."""
        width = math.prod(self.shape[1:])
        nbytes = self.dtype.itemsize
        data = np.fromfile(self.file, np.uint8, count * width * nbytes, offset=self.offset + first * width * nbytes)
        return data.view(self.dtype).reshape(count, *self.shape[1:])

    def mapped(self) -> np.ndarray:
        """All of it as a memory map: no memory until it is read, and there also when its file has been replaced."""
        size = math.prod(self.shape) * self.dtype.itemsize
        data = np.memmap(self.file, np.uint8, "r", self.offset, size) if size else np.empty(0, np.uint8)
        return data.view(self.dtype).reshape(self.shape)


class Stored(Protocol):
    """A tensor of a checkpoint whose rows can be read: a `StoredTensor`, or several that stand for one."""

    @property
    def file(self) -> Path: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, first: int, count: int) -> np.ndarray:
        """Rows first..first+count-1."""
        ...


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor whose rows are computed from other rows of a file."""

    file: Path
    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]
    dtype: np.dtype = FLOAT32


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint before a weight is read; `raw` is its config.json, `files` the tokenizer's files, name to bytes."""

    raw: Json
    generation_config: Json
    stored: Mapping[str, Stored]
    tokenizer: Tokenizer | None
    files: Mapping[str, bytes]


def stored_tensors(directory: Path, stem: str = "model") -> dict[str, StoredTensor]:
    """Every tensor of a directory by name, from the headers of its safetensors files, in supported dtypes."""
    index_path = directory / f"{stem}.safetensors.index.json"
    index, files = read_json(index_path), [f"{stem}.safetensors"]
    if index is not None:
        with reading(index_path):
            files = sorted(set(index["weight_map"].values()))
    absent = [name for name in files if not (directory / name).is_file()]
    if absent:
        others = sorted(path.name for path in directory.glob("*.bin"))
        advice = f"; {some(others)} are PyTorch's own format: save them as safetensors" if others else ""
        if index is None and (shards := sorted(path.name for path in directory.glob(f"{stem}-*-of-*.safetensors"))):
            advice = f"; {some(shards)} are parts of the weights, which {index_path.name} lists: it is missing"
        raise FileNotFoundError(f"name_or_directory {str(directory)!r} has no weights: {some(absent)}{advice}.")
    return {name: tensor for path in files for name, tensor in _tensors_of(directory / path).items()}


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, from its header; a fault of it names the file and the tensor."""
    size, tensors = path.stat().st_size, {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if is_pointer(path):
            raise ValueError(f"{path} is {POINTER}.")
        if not 0 < length <= size - 8:
            raise ValueError(f"{path} is not a safetensors file, or it was cut off.")
        with reading(f"{path}: its header"):
            header = dict(json.loads(file.read(length)))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        with reading(f"{path}: tensor {name!r}"):
            (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
            if entry["dtype"] not in STORED:
                raise ValueError(
                    f"stored as {show(entry['dtype'])}, which is not supported; supported: {', '.join(STORED)}."
                )
            dtype = STORED[entry["dtype"]]
            if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
                raise ValueError(f"its shape is {show(entry['shape'])} and its data_offsets are [{begin}, {end}].")
            if end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"its {end - begin} bytes do not hold {list(shape)} of {entry['dtype']}.")
        if 8 + length + end > size:
            raise ValueError(f"{path} was cut off: it ends before tensor {name!r} does.")
        tensors[name] = StoredTensor(path, dtype, shape, 8 + length + begin)
    return tensors


def _name_of(dtype: np.dtype) -> str:
    return next(name for name, known in STORED.items() if known == dtype)


def check_read(stored: Mapping[str, Stored]) -> None:
    """Raise ValueError if one of the tensors is stored in a dtype that is not read as a parameter."""
    for name, tensor in stored.items():
        if tensor.dtype not in [STORED[dtype] for dtype in READ]:
            raise ValueError(
                f"{tensor.file}: tensor {name!r} is stored as {_name_of(tensor.dtype)}, which is not supported; "
                f"supported: {', '.join(READ)}."
            )


def check_replaceable(target: Path) -> None:
    """A checkpoint may be replaced by a checkpoint; nothing else is ever removed."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise FileExistsError(f"directory {str(target)!r} exists and is no directory; give another name.")
    if not target.exists():
        return
    known = {
        "config.json",
        "adapter_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        *TOKENIZER_FILES,
        *PROCESSOR_FILES,
    }
    others = [p.name for p in target.iterdir() if p.name not in known and not p.match("*.safetensors")]
    if others:
        raise FileExistsError(
            f"directory {str(target)!r} holds files that are no checkpoint's ({some(sorted(others))}); "
            "give a directory of its own."
        )


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A scratch directory beside `target` that takes its name at the end, or is removed if anything fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield scratch
        for file in scratch.iterdir():  # safetensors makes its files readable by their owner only
            file.chmod(0o644)
        scratch.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
            target.rename(old / target.name)
            try:
                scratch.rename(target)
            except BaseException:
                (old / target.name).rename(target)
                raise
            finally:
                shutil.rmtree(old)
        else:
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# MXFP4 ----------------------------------------------------------------------------------------------------------------

# gpt-oss stores its experts so, as "…_blocks" and "…_scales": a block of 32 weights shares one scale, a power of two,
# and a weight is one of 16 values (OCP Microscaling Formats 1.0). Every product is a bfloat16 number.
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""The sixteen numbers of four bits: a sign, two bits of exponent, one of mantissa."""

_PAIRS = _VALUES[np.arange(256)[:, None] >> np.array([[0, 4]]) & 15]


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
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
        return dequantize_mxfp4(blocks.rows(first, count), scales.rows(first, count)).swapaxes(1, 2)

    experts, out, count, half = blocks.shape
    return Made(blocks.file, (experts, count * half * 2, out), rows, np.dtype(jnp.bfloat16))
