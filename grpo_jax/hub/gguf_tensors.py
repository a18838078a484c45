"""Tensors of a GGUF file under the names that Hugging Face gives them: read by rows, and written out in float32 then.

llama.cpp turns some of them when it writes them: rows of queries and keys where rotary dimensions lie in pairs, heads
of values of a delta net, norms around zero. Here they are turned back as their rows are read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from grpo_jax.hub.files import Stored
from grpo_jax.hub.gguf_config import Architecture
from grpo_jax.hub.tensors import Tensor
from grpo_jax.messages import some
from grpo_jax.models.layers import DeltaShape, TransformerConfig

Rows = Callable[[int, int], np.ndarray]
"""Reads rows first..first+count-1."""

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor as it lies in the file.

    Attributes:
      file: the GGUF file.
      shape: the last axis is that of the blocks.
      kind: its quantization type, a `gguf.GGMLQuantizationType`.
      offset: bytes before it.
      block: weights of a block, and its bytes.
    """

    file: Path
    shape: tuple[int, ...]
    kind: int
    offset: int
    block: tuple[int, int]
    dtype: np.dtype = _FLOAT32

    def rows(self, first: int, count: int) -> np.ndarray:
        """Rows first..first+count-1, float32."""
        from gguf.quants import GGMLQuantizationType, dequantize

        if len(self.shape) == 1:
            whole = dataclasses.replace(self, shape=(1, *self.shape))
            return whole.rows(0, 1)[0, first : first + count]
        inner, (weights, nbytes) = math.prod(self.shape[1:-1]), self.block
        width = self.shape[-1] // weights * nbytes
        size = count * inner * width
        data = np.fromfile(self.file, np.uint8, size, offset=self.offset + first * inner * width)
        rows = dequantize(data.reshape(count * inner, width), GGMLQuantizationType(self.kind))
        return rows.astype(np.float32, copy=False).reshape(count, *self.shape[1:])


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor whose rows are made of those of others."""

    file: Path
    shape: tuple[int, ...]
    rows: Rows
    dtype: np.dtype = _FLOAT32


def find_tensors(
    plan: tuple[Tensor, ...], files: Mapping[str, FileTensor], row: Architecture, config: TransformerConfig, name: str
) -> dict[str, Stored]:
    """The tensors of a plan, by their names in it.

    Args:
      plan: what `tensor_plan` says of the config.json that the file means, with each expert on its own.
      files: the tensors of the file.
      row: of `ARCHITECTURES`.
      config: the decoder.
      name: `general.architecture`.

    Raises:
      ValueError: tensors that the file lacks, that are not known, or that have another shape; by their names in it.
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
        stored = _turned(tensor, [files[each] for each in wanted], row, config)
        if stored.shape != tensor.shape:
            shapes = ", ".join(f"{each} {list(files[each].shape)}" for each in wanted)
            problems.append(f"{shapes} where the header says {list(tensor.shape)}")
            continue
        found[tensor.name] = stored
    unknown = [each for each in files if each not in used and not _is_spare(each, config)]
    problems += [f"{each} is not known" for each in unknown]
    if problems:
        raise ValueError(f"the tensors of the GGUF file are not those of {name!r}: {some(problems)}.")
    return found


FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are of the config."""


def _is_spare(name: str, config: TransformerConfig) -> bool:
    """Whether a file may have a tensor that the decoder does without: of heads that guess several tokens at once, and
    of layers over the keys and values of others."""
    block = re.fullmatch(r"blk\.(\d+)\.(.+)\.weight", name)
    if block is None:
        return False
    layer, rest = int(block[1]), block[2]
    guesses = config.delta is not None and layer >= config.num_layers
    over = config.num_layers - config.shared_kv_layers <= layer < config.num_layers
    return guesses or (over and rest in ("attn_k", "attn_v", "attn_k_norm"))


def _names_of(name: str, find: Callable[[str], str | None]) -> list[str]:
    """The file's tensors that one of Hugging Face's is made of."""
    if name.endswith(".in_proj_qkvz.weight"):
        layer = name.split(".")[2]
        return [f"blk.{layer}.attn_qkv.weight", f"blk.{layer}.attn_gate.weight"]
    module, suffix = re.sub(r"\.experts\.\d+\.", ".experts.", name), ""
    for ending, at in _ENDINGS.items():
        if module.endswith(ending):
            module, suffix = module.removesuffix(ending) + at[0], at[1]
            break
    if "router.per_expert" in module:
        module = module.replace("router.per_expert", "experts.down_proj")
    modules = [module]
    if module.endswith("experts.gate_up_proj") and find(module) is None:
        modules = [module.replace("gate_up_proj", each) for each in ("gate_proj", "up_proj")]
    return [f"{find(each) or each}{suffix}" for each in modules]


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
"""Endings of Hugging Face's names: what a module is looked up by in their place, and the ending in the file."""


def _turned(tensor: Tensor, files: list[FileTensor], row: Architecture, config: TransformerConfig) -> Stored:
    """A tensor as Hugging Face has it, from those of the file."""
    name, shape, (file, *others) = tensor.name, tensor.shape, files
    if ".experts." in name:
        return _of_experts(name, file, others, shape)
    if math.prod(file.shape) == math.prod(shape) and file.shape[-1] in shape[-1:]:  # axes of length 1
        file = dataclasses.replace(file, shape=shape)
    if row.pairs and re.search(r"\.(q|k)_proj\.", name):
        heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
        return _reordered(file, _halves(shape[0], heads))
    if row.shifted and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return Made(file.file, file.shape, lambda first, count: file.rows(first, count) - np.float32(1))
    if config.delta is not None and "linear_attn" in name:
        return _delta(name, file, others, config.delta)
    return file


def _of_experts(name: str, file: FileTensor, others: list[FileTensor], shape: tuple[int, ...]) -> Stored:
    """A tensor of experts: that of one of them, from those of all; or gpt-oss's, whose matrices go the other way."""
    if (found := re.search(r"\.experts\.(\d+)\.", name)) and len(file.shape) == 3:
        (experts, height, width), expert = file.shape, int(found[1])
        whole = dataclasses.replace(file, shape=(experts * height, width))
        return Made(file.file, (height, width), lambda first, rows: whole.rows(expert * height + first, rows))
    if others:
        return _interleaved(file, others[0], shape)
    if name.endswith(".mlp.experts.down_proj"):
        experts, height, width = file.shape
        turned = (experts, width, height)
        return Made(file.file, turned, lambda first, count: file.rows(first, count).swapaxes(1, 2))
    return file


def _interleaved(gate: FileTensor, up: FileTensor, shape: tuple[int, ...]) -> Stored:
    """Gate and up of every expert, in turns on the last axis."""

    def rows(first: int, count: int) -> np.ndarray:
        both = [part.rows(first, count) for part in (gate, up)]
        both = [part.swapaxes(1, 2) if part.ndim == 3 else part for part in both]
        return np.stack(both, axis=-1).reshape(count, *shape[1:])

    return Made(gate.file, shape, rows)


def _halves(rows: int, heads: int) -> np.ndarray:
    """The row in the file of each of Hugging Face's, whose heads have the first of all pairs before the second."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _reordered(stored: Stored, order: np.ndarray) -> Made:
    """A tensor whose rows stand in another order in the file."""

    def rows(first: int, count: int) -> np.ndarray:
        wanted = order[first : first + count]
        low = int(wanted.min())
        return stored.rows(low, int(wanted.max()) + 1 - low)[wanted - low]

    return Made(stored.file, stored.shape, rows)


def _delta(name: str, file: Stored, others: list[FileTensor], shape: DeltaShape) -> Stored:
    """A tensor of a delta net. Of the heads of values that share keys, Qwen3.5's files have the first of each group
    before the second; of Qwen3-Next's, queries, keys, values and gates were split."""
    if name.endswith(".A_log"):
        logs = file
        file = Made(logs.file, logs.shape, lambda first, count: np.log(-logs.rows(first, count)))
    if shape.by_key_heads:
        return _by_key_heads(file, others[0], shape) if others else file
    if name.endswith(".out_proj.weight"):
        order, plain = _grouped(shape, shape.value_dim), file
        return Made(plain.file, plain.shape, lambda first, count: plain.rows(first, count)[:, order])
    if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
        before = 2 * shape.key_width
        return _reordered(file, np.append(np.arange(before), before + _grouped(shape, shape.value_dim)))
    if name.endswith((".A_log", ".dt_bias", ".in_proj_a.weight", ".in_proj_b.weight")):
        return _reordered(file, _grouped(shape, 1))
    return _reordered(file, _grouped(shape, shape.value_dim)) if name.endswith(".in_proj_z.weight") else file


def _grouped(shape: DeltaShape, width: int) -> np.ndarray:
    """The row in the file of each of Hugging Face's, where each head of values has `width` of them."""
    each = np.arange(shape.value_heads * width).reshape(-1, shape.key_heads, width)
    return each.swapaxes(0, 1).ravel()


def _by_key_heads(mixed: Stored, gates: Stored, shape: DeltaShape) -> Stored:
    """Queries, keys, values and gates of each key head together, from all queries, keys and values, and all gates."""
    heads, columns = shape.key_heads, (shape.key_width, shape.key_width, shape.value_width, shape.value_width)
    starts = np.cumsum((0, *columns))
    blocks = [np.arange(width).reshape(heads, -1) + start for width, start in zip(columns, starts, strict=False)]
    split = mixed.shape[0]

    def rows(first: int, count: int) -> np.ndarray:
        parts = [mixed.rows(first, min(count, split - first))] if first < split else []
        if first + count > split:
            begin = max(first - split, 0)
            parts.append(gates.rows(begin, first + count - split - begin))
        return np.concatenate(parts)

    both = Made(mixed.file, (split + gates.shape[0], *mixed.shape[1:]), rows)
    return _reordered(both, np.concatenate(blocks, axis=1).ravel())
