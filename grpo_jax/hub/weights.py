"""Parameters from the tensors of a checkpoint, each read straight into its place; and what does not fit, by name."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.hub.files import Stored, StoredTensor, check_read
from grpo_jax.hub.quantize import Nf4Tensor, Quantization, Source, check_sources, held_shape, read_nf4, read_quantized
from grpo_jax.hub.tensors import LAYOUTS, Part, Tensor, layout_of
from grpo_jax.messages import some
from grpo_jax.models.quantized import Quantized
from grpo_jax.models.sharding import parameter_sharding
from grpo_jax.types import Json, Params

BLOCK = 1 << 24
"""Bytes read at a time, so that a tensor on its way into its parameter costs no second tensor."""


def check_sizes(config: Json, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the sizes in a config.json with the tensors, before anything of these sizes is made.

    `shapes` are those of the tensors by name, in a checkpoint of Hugging Face's or in a GGUF file.
    """
    layer = re.compile(r"(?:(?:language_model\.)?model\.(?:language_model\.)?layers|blk)\.(\d+)\.")
    layers = max((int(found[1]) + 1 for name in shapes if (found := layer.match(name))), default=0)
    longest = max((axis for shape in shapes.values() for axis in shape), default=0)
    for key, value in config.items():
        most, what = longest, "numbers on the longest axis of a tensor"
        if key == "num_hidden_layers":
            most, what = layers, "layers"
        elif "intermediate" in key:  # of an MLP that no layer may have
            most, what = max(map(math.prod, shapes.values()), default=0), "weights in the largest tensor"
        sized = key.endswith(("_size", "_dim", "_heads", "_hidden_layers", "_experts"))
        if sized and isinstance(value, int) and value > most:
            raise ValueError(f"config key {key!r} is {value:,}, and the weights have {most:,} {what}.")


def check_tensors(
    directory: Path,
    plan: tuple[Tensor, ...],
    stored: Mapping[str, Stored | Nf4Tensor],
    *,
    tied: bool,
    seeing: bool,
    spare: tuple[str, ...] = (),
) -> list[str]:
    """Compare the names and shapes of a checkpoint with those of its config; the names beside the language model."""
    wanted = {tensor.name: tensor.shape for tensor in plan}
    # A tied head may be stored a second time (`same_weights`), and old files keep the frequencies of the config.
    heads = [re.escape(head + "weight") for _, head in LAYOUTS] if tied else []
    unread = re.compile("|".join((r".*rotary_emb\.inv_freq", *heads)))
    model, head = LAYOUTS[layout_of(stored)]
    # Beside the language model of one that sees, what its family leaves in a checkpoint goes with the pictures.

    def inside(name: str) -> bool:
        return not seeing or name.startswith((model, head))

    def left(name: str) -> bool:
        return inside(name) and any(re.fullmatch(pattern, name) for pattern in spare)

    others = [name for name in stored if name not in wanted and not unread.fullmatch(name) and not left(name)]
    problems = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": list(filter(inside, others)),
        "of another shape": [
            f"{name} {list(stored[name].shape)} where config.json says {list(shape)}"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    told = [f"{what}: {some(names)}" for what, names in problems.items() if names]
    if told:
        raise ValueError(f"name_or_directory {str(directory)!r}: config.json and weights disagree; {'; '.join(told)}.")
    check_read({name: x for name in wanted if not isinstance(x := stored[name], Nf4Tensor)})
    return others


def same_weights(a: Stored | Nf4Tensor, b: Stored | Nf4Tensor) -> bool:
    """Whether two plain tensors of a checkpoint hold the same numbers."""
    if isinstance(a, Nf4Tensor) or isinstance(b, Nf4Tensor) or a.shape != b.shape:
        return False
    step = max(1, BLOCK // max(1, math.prod(a.shape[1:]) * a.dtype.itemsize))
    spans = [(start, min(step, a.shape[0] - start)) for start in range(0, a.shape[0], step)]
    return all(np.array_equal(a.rows(*span), b.rows(*span)) for span in spans)


def check_params(plan: tuple[Tensor, ...], leaves: Mapping[tuple[str, ...], jax.Array]) -> None:
    """Compare a tree of parameters with the config that it is saved beside."""
    wanted = {part.path: part.shape for tensor in plan for part in tensor.parts}
    problems = [f"{'/'.join(path)} is missing" for path in wanted if path not in leaves]
    problems += [f"{'/'.join(path)} is unexpected" for path in leaves if path not in wanted]
    problems += [
        f"{'/'.join(path)} has shape {leaves[path].shape}, not {shape}"
        for path, shape in wanted.items()
        if path in leaves and leaves[path].shape[-len(shape) :] != shape
    ]
    if problems:
        raise ValueError(f"policy.params are not those of policy.config: {some(problems)}.")


def read_params(
    plan: tuple[Tensor, ...],
    stored: Mapping[str, Stored | Nf4Tensor],
    abstract: Params,
    dtype: np.dtype,
    mesh: jax.sharding.Mesh | None,
    quantize: Quantization,
) -> Params:
    """Read every parameter, the largest first: the peak is then all of them, and little beside the largest."""
    sources: dict[tuple[str, ...], list[Source]] = {}
    for tensor in plan:
        first, source = 0, stored[tensor.name]
        if tensor.parts[0].expert is not None and len(tensor.shape) == 3:  # experts below each other
            assert isinstance(source, StoredTensor | Nf4Tensor), "a tensor of blocks has a layout of its own"
            source = dataclasses.replace(source, shape=(math.prod(tensor.shape[:2]), tensor.shape[2]))
        for part in tensor.parts:
            sources.setdefault(part.path, []).append(Source(source, first, part))
            first += 0 if part.stacked else part.rows
    shapes = {path: leaf.shape for path, leaf in flatten_dict(abstract).items()}
    for path, shape in shapes.items():
        check_sources(path, shape, sources[path], quantize.method)
    arrays = {}
    for path in sorted(shapes, key=lambda path: -math.prod(shapes[path])):
        shape, found = shapes[path], sources[path]
        if isinstance(found[0].tensor, Nf4Tensor):
            arrays[path] = _place(path, read_nf4(shape, found, dtype.name), mesh)
        elif (method := quantize.of(path, shape)) is not None:
            kernels = [source._replace(part=_as_kernel(source.part)) for source in found]
            arrays[path] = _place(path, read_quantized(held_shape(path, shape), kernels, method, dtype.name), mesh)
        else:
            arrays[path] = _place(path, _read_plain(shape, found, dtype), mesh)
    return unflatten_dict({path: arrays[path] for path in shapes})


def _as_kernel(part: Part) -> Part:
    """The same rows of a stored tensor, as those of a kernel [in, out]."""
    path = (*part.path[:-1], "kernel") if part.path[-1] == "embedding" else part.path
    return dataclasses.replace(part, path=path, shape=held_shape(part.path, part.shape))


def _read_plain(shape: tuple[int, ...], sources: list[Source], dtype: np.dtype) -> np.ndarray:
    """One parameter as it is stored, in another dtype."""
    array = np.empty(shape, dtype)
    for source in sources:
        _copy_rows(source, array if source.part.expert is None else array[source.part.expert])
    return array


def _copy_rows(source: Source, out: np.ndarray) -> None:
    """Copy rows of a stored tensor into a parameter, a block at a time."""
    tensor, first, part = source
    assert not isinstance(tensor, Nf4Tensor), "read by read_nf4"
    width = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    step = max(1, BLOCK // max(width, 1))
    for start in range(0, part.rows, step):
        count = min(step, part.rows - start)
        block = tensor.rows(first + start, count)
        block = block if part.column is None else block[..., part.column :: 2]
        if part.half is not None:
            size = part.shape[-1]
            block = block[:, part.half * size : (part.half + 1) * size].swapaxes(-1, -2)
        if part.transposed:
            out[:, start : start + count] = block.reshape(count, -1).T
        else:
            out[start : start + count] = block


def _place(path: tuple[str, ...], array: np.ndarray | Quantized, mesh: jax.sharding.Mesh | None) -> Params:
    """Put one parameter on its devices, each shard on its own."""
    if isinstance(array, Quantized):
        return jax.tree_util.tree_map_with_path(lambda at, x: _place((*path, at[0].name), x, mesh), array)
    if mesh is None:
        return jnp.array(array, copy=True)
    sharding = parameter_sharding(path, array.shape, mesh)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
