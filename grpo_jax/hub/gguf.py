"""GGUF files, as llama.cpp writes them, read as a `Checkpoint` by the package `gguf`.

`gguf_header` makes config.json and the tokenizer from the header. This module finds a file by name, and gives its
tensors the names and the order of Hugging Face: llama.cpp reorders rows of some, which is undone while reading.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_jax.hub.families import read_config
from grpo_jax.hub.files import POINTER, Checkpoint, StoredTensor, computed, is_fault, is_pointer
from grpo_jax.hub.gguf_header import NEEDS, Architecture, Header, read_header, read_tokenizer
from grpo_jax.hub.policy import tokenizer_files
from grpo_jax.hub.tensors import Tensor, tensor_plan
from grpo_jax.messages import one_line, some
from grpo_jax.models.config import DeltaShape, TransformerConfig
from grpo_jax.types import Json

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the config."""

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>", "<turn|>", "<|tool_response>",
)  # fmt: skip
"""Tokens at which llama.cpp ends a completion, in addition to the ones that a file names."""


def find_gguf(name_or_path: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file at a path, in a directory or in an installed package of that name; else None.

    A package is not imported. ValueError: a part of a split file, or several GGUF files without other weights.
    """
    name, path = os.fspath(name_or_path), Path(name_or_path).expanduser()
    if path.is_file() and (part := re.search(r"\.gguf[.-]?(part-?\d+(of\d+)?|split-?[a-z]+)$", path.name, re.I)):
        whole = path.name[: part.start()] + ".gguf"
        raise ValueError(
            f"name_or_directory {name!r} is one piece of a GGUF file; join them in order, `cat {whole}.* > {whole}`,"
            f" and name {whole}."
        )
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
        names = some([file.name for file in files])
        raise ValueError(f"name_or_directory {name!r} has several GGUF files: {names}; name one.")
    return files[0] if files else None


def read_gguf(path: Path) -> Checkpoint:
    """Return a GGUF file as a checkpoint, before any weight is read.

    Raises:
      ImportError: the package `gguf`, or a transformers that supports these tokenizers, is missing.
      ValueError: naming the file and what is not supported in it: architecture, key, tensor, quantization, tokenizer.
    """
    with _parsed(path) as (reader, header):
        row, raw = read_header(header)
        config = read_config(raw)
        stored = _find_tensors(tensor_plan(raw, config), _tensors(path, reader), row, config, header.architecture)
        tokenizer = read_tokenizer(header.fields)
        ends = _end_ids(header.fields)
    ids = {key: value for key, value in raw.items() if key in ("bos_token_id", "pad_token_id")}
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    return Checkpoint(raw, {**ids, "eos_token_id": ends}, stored, tokenizer, files)


def gguf_config(path: Path) -> Json:
    """Return the config.json that describes the model of a GGUF file."""
    with _parsed(path) as (_, header):
        return read_header(header)[1]


@contextlib.contextmanager
def _parsed(path: Path) -> Iterator[tuple[GGUFReader, Header]]:
    """Yield a file's reader and header; a fault in the file, here or in the block, is a ValueError that names it."""
    try:
        reader = _open(path)
        yield reader, _header(reader)
    except BaseException as error:
        if isinstance(error, ImportError) or not is_fault(error):
            raise
        reason = error if isinstance(error, ValueError) else _damaged(path, error)
        raise ValueError(f"name_or_directory {str(path)!r}: {reason}") from error


def _damaged(path: Path, error: BaseException) -> str:
    """Return why a file cannot be parsed, and the fix."""
    if is_pointer(path):
        return f"it is {POINTER}."
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        return f"it is not a GGUF file: it begins with {start!r}, not with b'GGUF'."
    return f"it is cut off or damaged; download it again (it has {path.stat().st_size:,} bytes; {one_line(error)})."


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"{str(path)!r} is a GGUF file, which the package gguf reads: {NEEDS}") from error

    class PlainReader(GGUFReader):
        """Reads from a plain array: slices of an `np.memmap` take four times as long, 150 thousand of them."""

        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", np.asarray(mapped)))

    try:
        reader = PlainReader(path)
    except Exception as error:
        raise ValueError(_damaged(path, error)) from error
    if (parts := reader.get_field("split.count")) is not None and parts.contents() > 1:
        raise ValueError(f"it is one of {parts.contents()} parts (split.count); merge them: llama-gguf-split --merge.")
    return reader


def _header(reader: GGUFReader) -> Header:
    """Return the header, with each float32 as its shortest decimal, as in a config.json."""
    from gguf import GGUFValueType

    fields = {}
    for key, field in reader.fields.items():
        value = field.contents()
        fields[key] = float(str(np.float32(value))) if field.types == [GGUFValueType.FLOAT32] else value
    shapes = {each.name: tuple(reversed(each.shape.tolist())) for each in reader.tensors}
    return Header(fields, shapes, {each.name: np.array(each.data) for each in reader.tensors if each.name in _FACTORS})


def _end_ids(fields: Json) -> list[int]:
    """Return the ids of the tokens that end a completion; the ones that the file names come first."""
    tokens, kinds = fields.get("tokenizer.ggml.tokens", []), fields.get("tokenizer.ggml.token_type", [])
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = [i for i, kind in enumerate(kinds) if kind == 3 and tokens[i] in _ENDS]
    if any(tokens[i] == "<|return|>" for i in control):  # gpt-oss: <|end|> ends a channel, not the completion
        control = [i for i in control if tokens[i] != "<|end|>"]
    return list(dict.fromkeys(i for i in (*named, *control) if i is not None))


# Tensors --------------------------------------------------------------------------------------------------------------


def _tensors(path: Path, reader: GGUFReader) -> dict[str, StoredTensor]:
    """Return the tensors of a file by its names; ValueError for a quantization that the package gguf does not read."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    for kind, name in {tensor.tensor_type: tensor.name for tensor in reversed(reader.tensors)}.items():
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise ValueError(f"the package gguf does not read the quantization {kind.name} of {name}.") from error
    return {tensor.name: file_tensor(path, tensor) for tensor in reader.tensors}


def file_tensor(path: Path, tensor: ReaderTensor) -> StoredTensor:
    """Return a tensor of a file, float32; only the blocks that a read needs are dequantized."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    shape, kind, offset = tuple(reversed(tensor.shape.tolist())), tensor.tensor_type, int(tensor.data_offset)
    weights, nbytes = GGML_QUANT_SIZES[kind]

    def read(start: int, count: int) -> np.ndarray:
        first, last = start // weights, -(-(start + count) // weights)
        # Not by a memory map, whose pages would count as memory in use.
        data = np.fromfile(path, np.uint8, (last - first) * nbytes, offset=offset + first * nbytes)
        lines = data.reshape(count // shape[-1], -1) if count % shape[-1] == 0 else data[None]
        numbers = dequantize(lines, kind).astype(np.float32, copy=False).ravel()
        return numbers[start - first * weights :][:count]

    return StoredTensor(path, shape, np.dtype(np.float32), read)


def _find_tensors(
    plan: tuple[Tensor, ...], files: Mapping[str, StoredTensor], row: Architecture, config: TransformerConfig, name: str
) -> dict[str, StoredTensor]:
    """Return the tensors of a plan (with a tensor for each expert) by their names in it, from the tensors of the file.

    A ValueError lists tensors that are missing, unknown, or of another shape, by their names in the file.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (architecture,) = (key for key, known in MODEL_ARCH_NAMES.items() if known == name)
    names = get_tensor_name_map(architecture, config.num_layers)
    found: dict[str, StoredTensor] = {}
    used, problems = set(_FACTORS), []
    for tensor in plan:
        wanted = _names_of(tensor.name, names.get_name)
        used |= {*wanted}
        if absent := [each for each in wanted if each not in files]:
            problems += [f"{each} is missing" for each in absent]
            continue
        stored = _in_order(tensor, [files[each] for each in wanted], row, config)
        if stored.shape != tensor.shape:
            shapes = ", ".join(f"{each} {list(files[each].shape)}" for each in wanted)
            problems.append(f"{shapes} where the header says {list(tensor.shape)}")
        found[tensor.name] = stored
    problems += [f"{each} is not known" for each in files if each not in used and not _is_spare(each, config)]
    if problems:
        raise ValueError(f"the tensors of the GGUF file do not fit {name!r}: {some(problems)}.")
    return found


def _is_spare(name: str, config: TransformerConfig) -> bool:
    """Whether the decoder ignores a tensor: of multi-token prediction heads, and key and value projections of layers
    that use another layer's."""
    if (block := re.fullmatch(r"blk\.(\d+)\.(.+)\.weight", name)) is None:
        return False
    layer, over = int(block[1]), int(block[1]) >= config.num_layers - config.shared_kv_layers
    if layer >= config.num_layers:
        return config.delta is not None
    return over and block[2] in ("attn_k", "attn_v", "attn_k_norm")


_ENDINGS = {
    ".dt_bias": (".dt_proj", ".bias"), ".A_log": (".A_log", ""), "_proj_bias": ("_proj", ".bias"),
    ".bias": ("", ".bias"), ".router.scale": (".router.proj", ".scale"), "_scale": ("", ".scale"),
    ".weight": ("", ".weight"), "": ("", ".weight"),
}  # fmt: skip
"""Endings of Hugging Face's names: the ending of the module to look up, and of the tensor in the file."""


def _names_of(name: str, find: Callable[[str], str | None]) -> list[str]:
    """Return the file's tensors that hold a tensor of Hugging Face's."""
    module = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    ending = next(each for each in _ENDINGS if module.endswith(each))
    end, suffix = _ENDINGS[ending]
    module = (module.removesuffix(ending) + end).replace("router.per_expert", "experts.down_proj")
    modules = [module]
    if module.endswith("experts.gate_up_proj") and find(module) is None:
        modules = [module.replace("gate_up_proj", each) for each in ("gate_proj", "up_proj")]
    return [f"{find(each) or each}{suffix}" for each in modules]


def _in_order(tensor: Tensor, files: list[StoredTensor], row: Architecture, config: TransformerConfig) -> StoredTensor:
    """Return a tensor in Hugging Face's order, from the tensors of the file."""
    name, shape, file, delta = tensor.name, tensor.shape, files[0], config.delta
    if ".experts." in name:
        return _of_experts(name, files)
    if math.prod(file.shape) == math.prod(shape) and file.shape[-1] in shape[-1:]:  # axes of length 1
        file = file.reshaped(shape)
    if row.pairs and (found := re.search(r"\.(q|k)_proj\.", name)):
        heads = config.num_heads if found[1] == "q" else config.num_kv_heads
        # Hugging Face's heads have the first of every pair of rotary dimensions before the second.
        return _reordered(file, np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel())
    if row.shifted and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return computed(file.file, file.shape, lambda first, count: file.rows(first, count) - np.float32(1))
    if delta is not None and "linear_attn" in name:
        return _of_delta(name, file, delta)
    return file


def _of_experts(name: str, files: list[StoredTensor]) -> StoredTensor:
    """Return one expert's tensor from the tensor of all experts, or gpt-oss's, which is stored transposed."""
    file = files[0]
    if (found := re.search(r"\.experts\.(\d+)\.", name)) and len(file.shape) == 3:
        (experts, height, width), expert = file.shape, int(found[1])
        whole = file.reshaped((experts * height, width))
        return computed(file.file, (height, width), lambda first, count: whole.rows(expert * height + first, count))
    if len(files) == 1 and not name.endswith(".mlp.experts.down_proj"):  # of gpt-oss
        return file
    *before, last = (file.shape[0], *reversed(file.shape[1:]))
    turned = (*before, last * len(files))

    def rows(first: int, count: int) -> np.ndarray:
        parts = [part.rows(first, count) for part in files]
        parts = [part.swapaxes(1, 2) if part.ndim == 3 else part for part in parts]
        return np.stack(parts, axis=-1).reshape((count, *turned[1:]))  # gate and up alternate on the last axis

    return computed(file.file, turned, rows)


def _reordered(stored: StoredTensor, order: np.ndarray) -> StoredTensor:
    """Return a tensor whose row i is row `order[i]` of the stored one."""

    def rows(first: int, count: int) -> np.ndarray:
        wanted = order[first : first + count]
        low = int(wanted.min())
        return stored.rows(low, int(wanted.max()) + 1 - low)[wanted - low]

    return computed(stored.file, stored.shape, rows)


def _of_delta(name: str, file: StoredTensor, shape: DeltaShape) -> StoredTensor:
    """Return a tensor of a delta net: files have the first value head of every key head before the second heads."""
    end, value = name.split("linear_attn.")[1].removesuffix(".weight"), shape.value_dim
    if end == "out_proj":
        columns = _grouped(shape, value)
        return computed(file.file, file.shape, lambda first, count: file.rows(first, count)[:, columns])
    if end in ("in_proj_qkv", "conv1d"):
        before = 2 * shape.key_width
        return _reordered(file, np.append(np.arange(before), before + _grouped(shape, value)))
    if end == "A_log":
        log = computed(file.file, file.shape, lambda first, count: np.log(-file.rows(first, count)))
        return _reordered(log, _grouped(shape, 1))
    if end in ("dt_bias", "in_proj_a", "in_proj_b", "in_proj_z"):
        return _reordered(file, _grouped(shape, value if end == "in_proj_z" else 1))
    return file


def _grouped(shape: DeltaShape, width: int) -> np.ndarray:
    """Return the row in the file of each of Hugging Face's rows; a value head has `width` of them."""
    return np.arange(shape.value_heads * width).reshape(-1, shape.key_heads, width).swapaxes(0, 1).ravel()
