"""Checkpoint files: JSON, tensors that are read a few rows at a time, and replacement of whole directories."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from grpo_jax.messages import one_line, shorten, show
from grpo_jax.types import Json, Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Names of tokenizer files in a checkpoint."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Names of processor files in a vision-language checkpoint. These files are copied unchanged."""

STORAGE_DTYPES = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16),
    "F64": np.dtype(np.float64), "F8_E4M3": np.dtype(jnp.float8_e4m3fn), "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
"""Mapping from dtype names in a safetensors header to NumPy dtypes."""

PARAM_DTYPES = ("F32", "F16", "BF16")
"""Supported dtypes of stored parameters, by their names in `STORAGE_DTYPES`."""


@contextlib.contextmanager
def parsing(source: Path | str) -> Iterator[None]:
    """Convert exceptions to ValueErrors whose messages start with `source`, such as a path.

    ImportErrors, OSErrors and exceptions whose messages already contain `source` are not converted.
    """
    try:
        yield
    except Exception as error:  # parsers can raise any exception for damaged files
        if isinstance(error, ImportError | OSError) or str(source) in str(error):
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        raise ValueError(f"{source}: {error if isinstance(error, ValueError) else reason}") from error


def read_json(path: Path) -> Json | None:
    """Return the JSON object in a file, or None if the file does not exist. Raises ValueError for other content."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains {show(content)}, not a JSON object.")
    return content


POINTER = "a Git LFS pointer, not the file itself; download the file with `git lfs pull`"


def is_pointer(path: Path) -> bool:
    """Return whether a file is a Git LFS pointer."""
    with path.open("rb") as file:
        return file.read(64).startswith(b"version https://git-lfs")


def write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A checkpoint tensor whose elements are read from a file on demand, in slices along the first axis (rows).

    `read(start, count)` returns `count` elements from index `start` on, in C order. `start` and `count` are multiples
    of the number of elements per row. `offset` is the byte offset of the elements in `file`, or None if `read` converts
    stored elements (dequantizes or reorders them).
    """

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], np.ndarray]
    offset: int | None = None

    def rows(self, first: int, count: int) -> np.ndarray:
        """Return rows first..first+count-1."""
        width = math.prod(self.shape[1:])
        return self.read(first * width, count * width).reshape((count, *self.shape[1:]))

    def to_numpy(self) -> np.ndarray:
        """Return the whole tensor, memory-mapped if it has an `offset`. The map stays valid if the file is replaced."""
        if self.offset is None:
            return self.rows(0, self.shape[0])
        size = math.prod(self.shape) * self.dtype.itemsize
        data = np.memmap(self.file, np.uint8, "r", self.offset, size) if size else np.empty(0, np.uint8)
        return data.view(self.dtype).reshape(self.shape)


def computed(
    file: Path, shape: tuple[int, ...], rows: Callable[[int, int], np.ndarray], dtype: np.dtype = STORAGE_DTYPES["F32"]
) -> StoredTensor:
    """Return a tensor whose rows are computed on demand by `rows(first, count)`."""
    width = math.prod(shape[1:])
    return StoredTensor(file, shape, dtype, lambda start, count: rows(start // width, count // width).ravel())


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. `raw` is its config.json, and `files` contains its tokenizer and processor files as bytes."""

    raw: Json
    generation_config: Json
    stored: Mapping[str, StoredTensor]
    tokenizer: Tokenizer | None
    files: Mapping[str, bytes]


def stored_tensors(directory: Path, stem: str = "model") -> dict[str, StoredTensor]:
    """Return the tensors in a directory's `stem`.safetensors files, keyed by name. Only the headers are read."""
    index_path = directory / f"{stem}.safetensors.index.json"
    index, files = read_json(index_path), [f"{stem}.safetensors"]
    if index is not None:
        with parsing(index_path):
            files = sorted(set(index["weight_map"].values()))
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        others = sorted(path.name for path in directory.glob("*.bin"))
        advice = f"convert PyTorch weights ({shorten(others)}) to safetensors" if others else "add the missing files"
        raise FileNotFoundError(f"name_or_directory {str(directory)!r} lacks {shorten(missing)}; {advice}.")
    return {name: tensor for path in files for name, tensor in _tensors_of(directory / path).items()}


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a safetensors file, keyed by name. Raises ValueError if the file is not valid."""
    from safetensors import safe_open

    if is_pointer(path):
        raise ValueError(f"{path} is {POINTER}.")
    with parsing(path), safe_open(path, "numpy"):  # checks that the header is valid and that the file is complete
        pass
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in STORAGE_DTYPES:
            names = ", ".join(STORAGE_DTYPES)
            raise ValueError(f"{path}: tensor {name!r} must have one of the dtypes {names}; got {entry['dtype']}.")
        offset = start + entry["data_offsets"][0]
        tensors[name] = _in_file(path, tuple(entry["shape"]), STORAGE_DTYPES[entry["dtype"]], offset)
    return tensors


def _in_file(path: Path, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> StoredTensor:
    """Return a tensor that is read with `np.fromfile`, since pages of a memory map would count as memory in use."""

    def read(start: int, count: int) -> np.ndarray:
        size = dtype.itemsize
        return np.fromfile(path, np.uint8, count * size, offset=offset + start * size).view(dtype)

    return StoredTensor(path, shape, dtype, read, offset)


def check_dtypes(stored: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError if a tensor's dtype is not in `PARAM_DTYPES`."""
    supported = [STORAGE_DTYPES[name] for name in PARAM_DTYPES]
    for name, tensor in stored.items():
        if tensor.dtype not in supported:
            names = ", ".join(PARAM_DTYPES)
            raise ValueError(f"{tensor.file}: tensor {name!r} must have one of the dtypes {names}; got {tensor.dtype}.")


def check_replaceable(target: Path) -> None:
    """Raise FileExistsError if `target` is a file or symbolic link, or contains files that are not checkpoint files."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise FileExistsError(f"directory={str(target)!r} is a file or symbolic link; pass a different path.")
    if not target.exists():
        return
    known = {"config.json", "adapter_config.json", "generation_config.json", "model.safetensors.index.json"}
    known.update(TOKENIZER_FILES, PROCESSOR_FILES)
    others = [p.name for p in target.iterdir() if p.name not in known and not p.match("*.safetensors")]
    if others:
        raise FileExistsError(
            f"directory {str(target)!r} contains files that do not belong to a checkpoint ({shorten(sorted(others))}); "
            "pass a different directory."
        )


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory. It replaces `target` after the `with` block, or is removed if the block raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent) as parent:
        scratch, old = Path(parent, "new"), Path(parent, "old")
        scratch.mkdir()
        yield scratch
        for file in scratch.iterdir():  # safetensors creates files that only their owner can read
            file.chmod(0o644)
        scratch.chmod(0o755)
        if target.exists():
            target.rename(old)
        try:
            scratch.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
