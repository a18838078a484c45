"""Names and shapes of a checkpoint's tensors, and the parameters that each tensor stores."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from grpo_jax.hub.families import family_of
from grpo_jax.hub.keys import has_vision
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.transformer import Transformer
from grpo_jax.types import Json, Params

SUFFIXES = {
    "kernel": ".weight", "scale": ".weight", "embedding": ".weight", "conv1d": ".conv1d.weight",
    "input_scale": ".scale",
}  # fmt: skip
"""Mapping from parameter names to suffixes of tensor names. For other parameters, the suffix is a dot and the name."""


@dataclasses.dataclass(frozen=True)
class ParamSlice:
    """A parameter, or one expert's slice of it, and its location in a stored tensor."""

    path: tuple[str, ...]
    shape: tuple[int, ...]  # shape in the parameter tree; a matrix [in, out] is stored as [out, in]
    expert: int | None = None  # index along the parameter's first axis; None for the whole parameter
    columns: slice | None = None  # columns of the parameter if the stored tensor combines it with another
    turned: bool = False  # whether the stored tensor is [experts, columns, in] instead of [experts, in, columns]

    @property
    def transposed(self) -> bool:
        return len(self.shape) == 2 and self.path[-1] != "embedding" and not self.path[-1].endswith("_bias")

    @property
    def rows(self) -> int:
        """Number of rows that this slice occupies in the stored tensor."""
        return self.shape[-1] if self.transposed else self.shape[0]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A checkpoint tensor and the parameters that it stores, in order."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[ParamSlice, ...]


_STACKED = {
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None),
    "gate_bias": ("gate_up_proj_bias", 0), "up_bias": ("gate_up_proj_bias", 1), "down_bias": ("down_proj_bias", None),
}  # fmt: skip
"""Mapping from an expert parameter to its stacked tensor's name and its half of that tensor (None for the whole)."""


@functools.lru_cache(maxsize=8)  # tracing 30 layers takes 0.5 s; loading a checkpoint calls this up to three times
def abstract_params(config: TransformerConfig) -> Params:
    """Return the tree of parameters, with shapes and dtypes instead of arrays. It is cached; do not modify it."""
    model = Transformer(config)
    return jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32))["params"], jax.random.key(0))


LAYOUTS = (
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("model.", "lm_head."),
)
"""Prefixes of the decoder and the LM head in vision-language checkpoints: the current prefixes, older ones, and those
in Qwen2.5-VL's published checkpoints."""

_LAYOUT_PREFIXES = (("language_model.", "vision_tower.", "multi_modal_projector."), ("visual.",))
"""Prefixes of tensor names that occur only with layout 1 and only with layout 2 (indices into `LAYOUTS`)."""


def layout_of(names: Iterable[str]) -> int:
    """Return the index of the layout in `LAYOUTS` that matches a checkpoint's tensor names, by default 0."""
    layouts = (i for name in names for i, prefixes in enumerate(_LAYOUT_PREFIXES, 1) if name.startswith(prefixes))
    return next(layouts, 0)


def prefixes_of(raw: Json, layout: int) -> tuple[str, str]:
    """Return the prefixes of the decoder and the LM head in a checkpoint with config.json `raw`."""
    if not has_vision(raw):
        return "model.", "lm_head."
    idefics = raw["architectures"][0].startswith(("Idefics3", "SmolVLM"))
    return ("model.text_model.", "lm_head.") if idefics else LAYOUTS[layout]


def stacked_experts(names: Iterable[str]) -> bool:
    """Return whether a checkpoint stores each projection as a single tensor for all experts in a layer."""
    return any(re.match(r"(language_)?model\..*\.mlp\.experts\.down_proj$", name) for name in names)


def tensor_plan(raw: Json, config: TransformerConfig, layout: int = 0, *, stacked: bool = False) -> tuple[Tensor, ...]:
    """Return the tensors that a checkpoint with config.json `raw` contains. Together they store each parameter once.

    `layout` is an index into `LAYOUTS` for a vision-language model; `stacked` is the result of `stacked_experts`.
    """
    family = family_of(raw)
    fused = {member: (name, i) for name, members in family.fused for i, member in enumerate(members)}
    prefixes = prefixes_of(raw, layout)
    groups: dict[str, dict[int, ParamSlice]] = collections.defaultdict(dict)
    for path, leaf in flatten_dict(abstract_params(config)).items():
        *modules, last = (family.renamed.get(name, name) for name in path)
        if modules[-1] == "experts" and family.stacked:
            name, half = _STACKED[last]
            halves, size, order = family.stacked == "halves", leaf.shape[-1], half or 0
            columns = None if half is None else slice(half, None, 2)
            columns = slice(order * size, (order + 1) * size) if halves else columns
            groups[_hf_name([*modules, name], prefixes)][order] = ParamSlice(path, leaf.shape, None, columns, halves)
        elif len(leaf.shape) == 3:  # experts, stored as one tensor or as one tensor per expert
            for e in range(leaf.shape[0]):
                name, half = _STACKED[last] if stacked else (f"{e}.{last}.weight", 0)
                members = groups[_hf_name([*modules, name], prefixes)]
                members[2 * e + (half or 0)] = ParamSlice(path, leaf.shape[1:], e)  # gate rows precede up rows
        else:
            module, order = fused.get(modules[-1], (modules[-1], 0))
            name = _hf_name([*modules[:-1], module], prefixes) + SUFFIXES.get(last, f".{last}")
            groups[name][order] = ParamSlice(path, leaf.shape)
    plan = []
    for name, members in groups.items():
        parts = tuple(members[i] for i in sorted(members))
        plan.append(Tensor(name, _stored_shape(parts, stacked=stacked), parts))
    return tuple(plan)


def _hf_name(modules: Sequence[str], prefixes: tuple[str, str]) -> str:
    """Return a module's name in a Hugging Face checkpoint, such as model.layers.0.self_attn for layers_0/self_attn."""
    model, head = prefixes
    first = re.sub(r"^layers_(\d+)$", r"layers.\1", modules[0])
    return ".".join((head.rstrip(".") if first == "lm_head" else model + first, *modules[1:]))


def _stored_shape(parts: tuple[ParamSlice, ...], *, stacked: bool) -> tuple[int, ...]:
    first = parts[0].shape
    if parts[0].columns is not None:
        last = len(parts) * first[-1]
        return (first[0], last, first[1]) if parts[0].turned else (*first[:-1], last)
    columns = (first[0],) if parts[0].transposed else first[1:]
    if parts[0].path[-1] == "conv1d":  # PyTorch's depthwise filters have an additional axis of length 1
        columns = (1, *columns)
    rows, highest = sum(part.rows for part in parts), parts[-1].expert
    lead = (highest + 1, rows // (highest + 1)) if stacked and highest is not None else (rows,)
    return *lead, *columns
