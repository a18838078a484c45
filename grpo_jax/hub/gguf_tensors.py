"""Tensors of a GGUF file under their Hugging Face names: rows are read from the file and dequantized on request.

llama.cpp reorders some tensors when it writes them; they are put back in Hugging Face's order as their rows are read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from grpo_jax.hub.files import FLOAT32, Made, Stored
from grpo_jax.hub.gguf_config import Architecture
from grpo_jax.hub.tensors import Tensor
from grpo_jax.messages import some
from grpo_jax.models.layers import DeltaShape, TransformerConfig

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the config."""


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor of a GGUF file: from the byte `offset` on, in blocks of the type `kind` along the last axis."""

    file: Path
    shape: tuple[int, ...]
    kind: int
    offset: int
    dtype: np.dtype = FLOAT32

    def rows(self, first: int, count: int) -> np.ndarray:
        """Rows first..first+count-1, float32. Read without a memory map, whose pages would count as memory in use."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        if len(self.shape) == 1:
            return self.reshaped(1, *self.shape).rows(0, 1)[0, first : first + count]
        kind, inner = GGMLQuantizationType(self.kind), math.prod(self.shape[1:-1])
        weights, nbytes = GGML_QUANT_SIZES[kind]
        width = self.shape[-1] // weights * nbytes
        data = np.fromfile(self.file, np.uint8, count * inner * width, offset=self.offset + first * inner * width)
        rows = dequantize(data.reshape(count * inner, width), kind)
        return rows.astype(np.float32, copy=False).reshape(count, *self.shape[1:])

    def reshaped(self, *shape: int) -> FileTensor:
        """The same blocks in another shape with the same last axis."""
        return dataclasses.replace(self, shape=shape)


def find_tensors(
    plan: tuple[Tensor, ...], files: Mapping[str, FileTensor], row: Architecture, config: TransformerConfig, name: str
) -> dict[str, Stored]:
    """Return the tensors of a plan (with a tensor for each expert) by their names in it, from the tensors of the file.

    A ValueError lists tensors that are missing, not known, or of another shape, by their names in the file.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (architecture,) = (key for key, known in MODEL_ARCH_NAMES.items() if known == name)
    names = get_tensor_name_map(architecture, config.num_layers)
    found: dict[str, Stored] = {}
    used, problems = set(FACTORS), []
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
        raise ValueError(f"the tensors of the GGUF file are not those of {name!r}: {some(problems)}.")
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
    ".dt_bias": (".dt_proj", ".bias"),
    ".A_log": (".A_log", ""),
    "_proj_bias": ("_proj", ".bias"),
    ".bias": ("", ".bias"),
    ".router.scale": (".router.proj", ".scale"),
    "_scale": ("", ".scale"),
    ".weight": ("", ".weight"),
    "": ("", ".weight"),
}
"""Endings of Hugging Face's names: the ending of the module to look up, and of the tensor in the file."""


def _names_of(name: str, find: Callable[[str], str | None]) -> list[str]:
    """The file's tensors that hold a tensor of Hugging Face's."""
    if name.endswith(".in_proj_qkvz.weight"):
        layer = name.split(".")[2]
        return [f"blk.{layer}.attn_qkv.weight", f"blk.{layer}.attn_gate.weight"]
    module = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    ending = next(each for each in _ENDINGS if module.endswith(each))
    end, suffix = _ENDINGS[ending]
    module = (module.removesuffix(ending) + end).replace("router.per_expert", "experts.down_proj")
    modules = [module]
    if module.endswith("experts.gate_up_proj") and find(module) is None:
        modules = [module.replace("gate_up_proj", each) for each in ("gate_proj", "up_proj")]
    return [f"{find(each) or each}{suffix}" for each in modules]


def _in_order(tensor: Tensor, files: list[FileTensor], row: Architecture, config: TransformerConfig) -> Stored:
    """A tensor in Hugging Face's order, from those of the file."""
    name, shape, file, delta = tensor.name, tensor.shape, files[0], config.delta
    if ".experts." in name:
        return _of_experts(name, files)
    if math.prod(file.shape) == math.prod(shape) and file.shape[-1] in shape[-1:]:  # axes of length 1
        file = file.reshaped(*shape)
    if row.pairs and (found := re.search(r"\.(q|k)_proj\.", name)):
        heads = config.num_heads if found[1] == "q" else config.num_kv_heads
        # Hugging Face's heads have the first of every pair of rotary dimensions before the second.
        return _reordered(file, np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel())
    if row.shifted and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return Made(file.file, file.shape, lambda first, count: file.rows(first, count) - np.float32(1))
    if delta is not None and "linear_attn" in name:
        return _of_delta(name, [file, *files[1:]], delta)
    return file


def _of_experts(name: str, files: list[FileTensor]) -> Stored:
    """One expert's tensor from that of all experts; or gpt-oss's, whose matrices are stored transposed."""
    file = files[0]
    if (found := re.search(r"\.experts\.(\d+)\.", name)) and len(file.shape) == 3:
        (experts, height, width), expert = file.shape, int(found[1])
        whole = file.reshaped(experts * height, width)
        return Made(file.file, (height, width), lambda first, rows: whole.rows(expert * height + first, rows))
    if len(files) == 1 and not name.endswith(".mlp.experts.down_proj"):  # of gpt-oss
        return file
    *before, last = (file.shape[0], *reversed(file.shape[1:]))
    turned = (*before, last * len(files))

    def rows(first: int, count: int) -> np.ndarray:
        parts = [part.rows(first, count) for part in files]
        parts = [part.swapaxes(1, 2) if part.ndim == 3 else part for part in parts]
        return np.stack(parts, axis=-1).reshape(count, *turned[1:])  # gate and up alternate on the last axis

    return Made(file.file, turned, rows)


def _reordered(stored: Stored, order: np.ndarray) -> Made:
    """A tensor whose row i is row `order[i]` of the file."""

    def rows(first: int, count: int) -> np.ndarray:
        wanted = order[first : first + count]
        low = int(wanted.min())
        return stored.rows(low, int(wanted.max()) + 1 - low)[wanted - low]

    return Made(stored.file, stored.shape, rows)


def _of_delta(name: str, files: list[FileTensor], shape: DeltaShape) -> Stored:
    """A tensor of a delta net. Qwen3.5's files have the first value head of every key head before the second heads;
    Qwen3-Next's have one matrix of queries, keys and values and one of gates, where Hugging Face has one per key head.
    """
    file: Stored = files[0]
    plain, end, value = file, name.split("linear_attn.")[1].removesuffix(".weight"), shape.value_dim
    if end == "A_log":
        file = Made(plain.file, plain.shape, lambda first, count: np.log(-plain.rows(first, count)))
    if shape.by_key_heads:
        return _by_key_heads(files, shape) if len(files) > 1 else file
    if end == "out_proj":
        order = _grouped(shape, value)
        return Made(plain.file, plain.shape, lambda first, count: plain.rows(first, count)[:, order])
    if end in ("in_proj_qkv", "conv1d"):
        before = 2 * shape.key_width
        return _reordered(file, np.append(np.arange(before), before + _grouped(shape, value)))
    if end in ("A_log", "dt_bias", "in_proj_a", "in_proj_b", "in_proj_z"):
        return _reordered(file, _grouped(shape, value if end == "in_proj_z" else 1))
    return file


def _grouped(shape: DeltaShape, width: int) -> np.ndarray:
    """The row in the file of each of Hugging Face's, given the rows of a value head."""
    return np.arange(shape.value_heads * width).reshape(-1, shape.key_heads, width).swapaxes(0, 1).ravel()


def _by_key_heads(files: list[FileTensor], shape: DeltaShape) -> Stored:
    """Queries, keys, values and gates of each key head together, from the matrices of all of them."""
    widths = np.array((shape.key_width, shape.key_width, shape.value_width, shape.value_width))
    starts, split = np.cumsum(widths) - widths, files[0].shape[0]
    blocks = [
        start + np.arange(width).reshape(shape.key_heads, -1) for start, width in zip(starts, widths, strict=True)
    ]

    def rows(first: int, count: int) -> np.ndarray:
        begin, end = max(first - split, 0), max(first + count - split, 0)
        mixed = files[0].rows(min(first, split), count - (end - begin))
        return np.concatenate([mixed, files[1].rows(begin, end - begin)])

    both = Made(files[0].file, (split + files[1].shape[0], *files[0].shape[1:]), rows)
    return _reordered(both, np.concatenate(blocks, axis=1).ravel())
