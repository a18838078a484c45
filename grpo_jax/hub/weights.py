"""Read a checkpoint's parameters, and check its tensors against its config."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.hub.families import family_of, read_config
from grpo_jax.hub.files import StoredTensor, check_dtypes
from grpo_jax.hub.keys import has_vision
from grpo_jax.hub.quantize import (
    Source,
    check_method,
    check_quantizable,
    is_projection,
    quantized_shape,
    read_quantized,
    without_quantization,
)
from grpo_jax.hub.tensors import Tensor, abstract_params, layout_of, prefixes_of, tensor_plan
from grpo_jax.messages import shorten
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.layers import Quantized
from grpo_jax.models.lora import TARGETS, init_adapters
from grpo_jax.models.sharding import parameter_sharding
from grpo_jax.types import Json, Params

BLOCK = 1 << 24
"""Number of bytes to read at a time, which limits the memory needed in addition to the parameters."""


@dataclasses.dataclass(frozen=True)
class Loading:
    """Settings that determine the shapes and dtypes of a run's params."""

    param_dtype: str = "float32"
    lora: int | Json | None = None  # rank, or a dict with `rank` and `targets` for `add_lora`; None trains all params
    quantize: str | None = None  # quantization of the frozen base; see `from_pretrained`

    def check(self, raw: Json) -> None:
        """Raise ValueError if the model or `quantize` is not supported, or if `quantize` is set without adapters."""
        check_method(self.quantize)
        config = read_config(without_quantization(raw))
        if self.lora is None and self.quantize is not None:
            raise ValueError(f"quantize={self.quantize!r} requires adapters; set lora to a rank or omit quantize.")
        for tensor in () if self.quantize is None else tensor_plan(raw, config):
            for part in tensor.parts:
                check_quantizable(part.path, part.shape, tensor.parts, self.quantize)

    def params(self, shape: TransformerConfig) -> tuple[Params, Params | None]:
        """Return the shapes of the trainable params and of the frozen base (None if there are no adapters)."""

        def base_leaf(path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | Quantized:
            names = [entry.key for entry in path]
            if self.quantize is not None and is_projection(names, x.shape):
                return quantized_shape(x.shape, self.quantize, self.param_dtype, jax.ShapeDtypeStruct)
            return jax.ShapeDtypeStruct(x.shape, jnp.dtype(self.param_dtype))

        params = jax.tree_util.tree_map_with_path(base_leaf, abstract_params(shape))
        if self.lora is None:
            return params, None
        lora: Json = {"rank": self.lora} if isinstance(self.lora, int) else self.lora
        rank, targets = lora.get("rank", 16), lora.get("targets", TARGETS)
        init = functools.partial(init_adapters, base=params, rank=rank, targets=targets)
        return jax.eval_shape(init, jax.random.key(0)), params


def check_sizes(config: Json, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if a size in config.json exceeds the tensors' sizes. Call this before allocating parameters."""
    layer = re.compile(r"(?:(?:language_model\.)?model\.(?:(?:language|text)_model\.)?layers|blk)\.(\d+)\.")
    layers = max((int(match[1]) + 1 for name in shapes if (match := layer.match(name))), default=0)
    longest = max((axis for shape in shapes.values() for axis in shape), default=0)
    for key, value in config.items():
        limit, what = longest, "length of the longest tensor axis"
        if key == "num_hidden_layers":
            limit, what = layers, "number of layers in the weights"
        elif "intermediate" in key:  # intermediate_size may exceed every axis if all layers have experts
            limit, what = max(map(math.prod, shapes.values()), default=0), "number of elements in the largest tensor"
        is_size = key.endswith(("_size", "_dim", "_heads", "_hidden_layers", "_experts"))
        if is_size and isinstance(value, int) and value > limit:
            raise ValueError(f"config key {key!r} is {value:,}, but the {what} is {limit:,}.")


def shape_differences(expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]) -> str:
    """Return a text that lists missing, unexpected and wrongly shaped arrays, or "" if there are none."""
    problems = {
        "missing": [name for name in expected if name not in actual],
        "unexpected": [name for name in actual if name not in expected],
        "of the wrong shape": [
            f"{name} has shape {list(actual[name])}, not {list(shape)}"
            for name, shape in expected.items()
            if name in actual and actual[name] != shape
        ],
    }
    return "; ".join(f"{what}: {shorten(names)}" for what, names in problems.items() if names)


def check_tensors(
    directory: Path, plan: tuple[Tensor, ...], stored: Mapping[str, StoredTensor], raw: Json, *, tied: bool
) -> list[str]:
    """Raise ValueError if a checkpoint does not match the plan. Returns the names of tensors outside the text model."""
    expected = {tensor.name: tensor.shape for tensor in plan}
    prefixes = prefixes_of(raw, layout_of(stored))
    head = [re.escape(f"{prefixes[1]}weight")] if tied else []  # the embedding is used instead
    ignored = re.compile("|".join((r".*rotary_emb\.inv_freq", *head)))  # older files store the RoPE frequencies
    text = {name for name in stored if name.startswith(prefixes) or not has_vision(raw)}
    spare = {name for name in text if any(re.fullmatch(pattern, name) for pattern in family_of(raw).spare)}
    others = [name for name in stored if name not in expected and not ignored.fullmatch(name) and name not in spare]
    shapes = {name: x.shape for name, x in stored.items() if name in expected or (name in text and name in others)}
    if problems := shape_differences(expected, shapes):
        raise ValueError(f"name_or_directory {str(directory)!r}: config.json does not match the weights: {problems}.")
    check_dtypes({name: stored[name] for name in expected})
    return others


def same_weights(a: StoredTensor, b: StoredTensor) -> bool:
    """Compare two stored tensors a few rows at a time, and return whether they are equal."""
    if a.shape != b.shape:
        return False
    step = max(1, BLOCK // max(1, math.prod(a.shape[1:]) * a.dtype.itemsize))
    spans = [(start, min(step, a.shape[0] - start)) for start in range(0, a.shape[0], step)]
    return all(np.array_equal(a.rows(first, count), b.rows(first, count)) for first, count in spans)


def check_params(plan: tuple[Tensor, ...], leaves: Mapping[tuple[str, ...], jax.Array]) -> None:
    """Raise ValueError if params do not have the names and shapes in the plan."""
    # Parts are ordered by expert, so the last part of each path overwrites the others and has the highest index.
    parts = [part for tensor in plan for part in tensor.parts]
    expected = {part.path: part.shape if part.expert is None else (part.expert + 1, *part.shape) for part in parts}
    shapes = {"/".join(path): leaf.shape for path, leaf in leaves.items()}
    if problems := shape_differences({"/".join(path): shape for path, shape in expected.items()}, shapes):
        raise ValueError(f"policy.params does not match policy.config: {problems}.")


def read_params(
    plan: tuple[Tensor, ...],
    stored: Mapping[str, StoredTensor],
    abstract: Params,
    dtype: np.dtype,
    mesh: jax.sharding.Mesh | None,
    quantize: str | None,
) -> Params:
    """Read all parameters, the largest first, so that peak memory is only slightly above their total size."""
    sources: dict[tuple[str, ...], list[Source]] = {}
    for tensor in plan:
        first, source = 0, stored[tensor.name]
        if tensor.parts[0].expert is not None and len(tensor.shape) == 3:  # read as a matrix [experts · rows, columns]
            source = dataclasses.replace(source, shape=(math.prod(tensor.shape[:2]), tensor.shape[2]))
        for part in tensor.parts:
            sources.setdefault(part.path, []).append(Source(source, first, part))
            first += part.rows if part.columns is None else 0
    shapes = {path: leaf.shape for path, leaf in flatten_dict(abstract).items()}
    for path, shape in shapes.items():
        check_quantizable(path, shape, [source.part for source in sources[path]], quantize)
    arrays = {}
    for path in sorted(shapes, key=lambda path: -math.prod(shapes[path])):
        shape = shapes[path]
        if quantize is not None and is_projection(path, shape):
            arrays[path] = _place(path, read_quantized(shape, sources[path], quantize, dtype.name), mesh)
        else:
            arrays[path] = _place(path, _read_unquantized(shape, sources[path], dtype), mesh)
    return unflatten_dict({path: arrays[path] for path in shapes})


def _read_unquantized(shape: tuple[int, ...], sources: list[Source], dtype: np.dtype) -> np.ndarray:
    array = np.empty(shape, dtype)
    for tensor, first, part in sources:
        out = array if part.expert is None else array[part.expert]
        step = max(1, BLOCK // max(math.prod(tensor.shape[1:]) * tensor.dtype.itemsize, 1))
        for start in range(0, part.rows, step):
            count = min(step, part.rows - start)
            block = tensor.rows(first + start, count)
            block = block.swapaxes(-1, -2) if part.turned else block
            block = block if part.columns is None else block[..., part.columns]
            if part.transposed:
                out[:, start : start + count] = block.reshape(count, -1).T
            else:
                out[start : start + count] = block
    return array


def _place(path: tuple[str, ...], array: np.ndarray | Quantized, mesh: jax.sharding.Mesh | None) -> Params:
    if isinstance(array, Quantized):
        return jax.tree_util.tree_map_with_path(lambda field, x: _place((*path, field[0].name), x, mesh), array)
    if mesh is None:
        return jnp.array(array, copy=True)
    sharding = parameter_sharding(path, array.shape, mesh)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
