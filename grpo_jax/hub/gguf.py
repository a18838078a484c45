"""Read GGUF files (llama.cpp's format) with the `gguf` package.

`gguf_header` builds the config.json and the tokenizer. This module finds the file and converts its tensors to Hugging
Face names, row order and values. For some architectures, llama.cpp reorders the rows of the query and key projections
or adds 1 to the norm weights.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_jax.hub.families import read_config
from grpo_jax.hub.files import POINTER, Checkpoint, StoredTensor, computed, is_pointer
from grpo_jax.hub.gguf_header import Architecture, Header, read_header, read_tokenizer
from grpo_jax.hub.policy import tokenizer_files
from grpo_jax.hub.tensors import Tensor, tensor_plan
from grpo_jax.hub.weights import shape_differences
from grpo_jax.messages import one_line, shorten
from grpo_jax.models.config import TransformerConfig
from grpo_jax.types import Json

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor that contains divisors of the RoPE frequencies, not weights."""

_END_TOKENS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
)  # fmt: skip
"""Tokens that end a completion in llama.cpp, in addition to a file's EOS, EOT and EOM tokens."""


def find_gguf(name_or_path: str | os.PathLike[str]) -> Path | None:
    """Find a GGUF file by its path, its directory, or the name of an installed package that contains it.

    The package is located without importing it. Returns None if there is no GGUF file, or if the directory also
    contains safetensors files. Raises ValueError if the directory or package contains several GGUF files.
    """
    name, path = os.fspath(name_or_path), Path(name_or_path).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if not path.is_dir():
        module = name.replace("-", "_")
        spec = importlib.util.find_spec(module) if re.fullmatch(r"[A-Za-z]\w*", module) else None
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(next(iter(spec.submodule_search_locations)))
    elif any(path.glob("*.safetensors")):
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        names = shorten([file.name for file in files])
        raise ValueError(f"name_or_directory {name!r} contains several GGUF files: {names}; pass the path of one.")
    return files[0] if files else None


def read_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file as a checkpoint, without reading its weights.

    Raises ImportError if `gguf` is missing or transformers is too old, and ValueError for damaged or unsupported files.
    """
    with _parsed(path) as (reader, header):
        conventions, raw = read_header(header)
        config = read_config(raw)
        tensors = {tensor.name: file_tensor(path, tensor) for tensor in reader.tensors}
        stored = _find_tensors(tensor_plan(raw, config), tensors, conventions, config, header.architecture)
        tokenizer = read_tokenizer(header.fields)
        ends = _end_ids(header.fields)
    ids = {key: value for key, value in raw.items() if key in ("bos_token_id", "pad_token_id")}
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    return Checkpoint(raw, {**ids, "eos_token_id": ends}, stored, tokenizer, files)


def gguf_config(path: Path) -> Json:
    """Return a config.json for the model in a GGUF file."""
    with _parsed(path) as (_, header):
        return read_header(header)[1]


@contextlib.contextmanager
def _parsed(path: Path) -> Iterator[tuple[GGUFReader, Header]]:
    """Yield a reader and a header. Converts exceptions except ImportError to ValueErrors that contain the path."""
    try:
        reader = _open(path)
        yield reader, _header(reader)
    except ImportError:
        raise
    except Exception as error:
        reason = error if isinstance(error, ValueError) else _damaged(path, error)
        raise ValueError(f"name_or_directory {str(path)!r}: {reason}") from error


def _damaged(path: Path, error: Exception) -> str:
    if is_pointer(path):
        return f"the file is {POINTER}."
    return f"the file is truncated or damaged ({path.stat().st_size:,} bytes; {one_line(error)}); download it again."


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"reading {str(path)!r} requires gguf; run `pip install 'grpo_jax[gguf]'`") from error

    class PlainReader(GGUFReader):
        """A reader that slices an `ndarray`. For 150,000 slices per file, a `memmap` would take four times as long."""

        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", np.asarray(mapped)))

    try:
        reader = PlainReader(path)
    except Exception as error:
        raise ValueError(_damaged(path, error)) from error
    if (parts := reader.get_field("split.count")) is not None and parts.contents() > 1:
        raise ValueError(f"the file is one of {parts.contents()} parts; merge them with `llama-gguf-split --merge`.")
    return reader


def _header(reader: GGUFReader) -> Header:
    """Return the header. Each float32 is converted to the shortest decimal that rounds to it, such as 0.1."""
    from gguf import GGUFValueType

    fields = {}
    for key, field in reader.fields.items():
        value = field.contents()
        fields[key] = float(str(np.float32(value))) if field.types == [GGUFValueType.FLOAT32] else value
    shapes = {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    factors = next((np.array(tensor.data) for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    return Header(fields, shapes, factors)


def _end_ids(fields: Json) -> list[int]:
    """Return the ids of the tokens that end a completion, starting with the file's EOS, EOT and EOM ids."""
    tokens, kinds = fields.get("tokenizer.ggml.tokens", []), fields.get("tokenizer.ggml.token_type", [])
    declared = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = [i for i, kind in enumerate(kinds) if kind == 3 and tokens[i] in _END_TOKENS]
    return list(dict.fromkeys(i for i in (*declared, *control) if i is not None))


# Tensors --------------------------------------------------------------------------------------------------------------


def file_tensor(path: Path, tensor: ReaderTensor) -> StoredTensor:
    """Return a GGUF tensor as float32. Only the blocks that contain requested rows are dequantized."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    kind, offset = tensor.tensor_type, int(tensor.data_offset)
    weights, nbytes = GGML_QUANT_SIZES[kind]  # per block

    def read(start: int, count: int) -> np.ndarray:
        first, last = start // weights, -(-(start + count) // weights)
        # Pages of a memory map would count as memory in use.
        data = np.fromfile(path, np.uint8, (last - first) * nbytes, offset=offset + first * nbytes)
        values = dequantize(data[None], kind)[0].astype(np.float32, copy=False)
        return values[start - first * weights :][:count]

    return StoredTensor(path, tuple(reversed(tensor.shape.tolist())), np.dtype(np.float32), read)


def _find_tensors(
    plan: tuple[Tensor, ...],
    in_file: Mapping[str, StoredTensor],
    conventions: Architecture,
    config: TransformerConfig,
    name: str,
) -> dict[str, StoredTensor]:
    """Return a plan's tensors, keyed by Hugging Face name. Raises ValueError if the file's names or shapes differ."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (architecture,) = (key for key, value in MODEL_ARCH_NAMES.items() if value == name)
    names = get_tensor_name_map(architecture, config.num_layers)
    planned: dict[str, Tensor] = {}
    for tensor in plan:
        module, suffix = tensor.name.rsplit(".", 1)
        planned[f"{names.get_name(module) or module}.{suffix}"] = tensor
    shapes = {key: stored.shape for key, stored in in_file.items() if key != _ROPE_FACTORS}
    if problems := shape_differences({key: tensor.shape for key, tensor in planned.items()}, shapes):
        raise ValueError(f"the tensors do not match architecture {name!r}: {problems}.")
    return {tensor.name: _converted(tensor.name, in_file[key], conventions, config) for key, tensor in planned.items()}


def _converted(name: str, stored: StoredTensor, conventions: Architecture, config: TransformerConfig) -> StoredTensor:
    """Convert a tensor to the row order and values of Hugging Face's tensor `name`."""
    if conventions.interleaved and (projection := re.search(r"\.(q|k)_proj\.", name)):
        heads = config.num_heads if projection[1] == "q" else config.num_kv_heads
        # In each head, Hugging Face stores the first dimensions of all rotary pairs, then the second dimensions.
        order = np.arange(stored.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
        return computed(stored.file, stored.shape, lambda first, count: _take(stored, order[first : first + count]))
    if conventions.norms_plus_one and name.endswith("norm.weight"):
        return computed(stored.file, stored.shape, lambda first, count: stored.rows(first, count) - np.float32(1))
    return stored


def _take(stored: StoredTensor, indices: np.ndarray) -> np.ndarray:
    """Return a tensor's rows at the given indices, using a single read that spans all of them."""
    low = int(indices.min())
    return stored.rows(low, int(indices.max()) + 1 - low)[indices - low]
