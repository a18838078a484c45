"""Which tensor of a checkpoint holds which parameters: their names, shapes and rows."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from grpo_jax.hub.families import family_of
from grpo_jax.hub.keys import has_vision
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.transformer import Transformer
from grpo_jax.types import Json, Params

_SUFFIXES = {
    "kernel": ".weight", "scale": ".weight", "embedding": ".weight", "conv1d": ".conv1d.weight",
    "input_scale": ".scale",
}  # fmt: skip
"""Suffix of a tensor's name after its module's, by the parameter's name; the parameter's own if not listed."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A parameter, or one expert's part of it, as rows or columns of a stored tensor.

    Attributes:
      path: keys of the parameter in the tree.
      shape: of the part in the tree; a matrix [in, out] is stored as [out, in].
      expert: index on the parameter's first axis; None for the whole parameter.
      column: 0 or 1 for the even or odd columns of the stored tensor; None for all.
      half: 0 or 1 for the first or second half of each expert's rows in a stored tensor [experts, out, in]; None if it
        is not stored so.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    expert: int | None = None
    column: int | None = None
    half: int | None = None

    @property
    def stacked(self) -> bool:
        """Whether the stored tensor holds all experts of several parameters."""
        return self.column is not None or self.half is not None

    @property
    def transposed(self) -> bool:
        matrix = self.path[-1] != "embedding" and not self.path[-1].endswith("_bias")
        return matrix and len(self.shape) == 2

    @property
    def rows(self) -> int:
        """Number of rows of the stored tensor that this part takes."""
        return self.shape[-1] if self.transposed else self.shape[0]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint: its name and shape there, and the parameters that it holds, in order."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


_STACKED = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
    "gate_bias": ("gate_up_proj_bias", 0),
    "up_bias": ("gate_up_proj_bias", 1),
    "down_bias": ("down_proj_bias", None),
}
"""With `Family.stacked`: the stored tensor of each parameter of the experts, and its columns or half there."""

_HALVES = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}
"""The same for experts that a checkpoint stores stacked: an expert's rows of gate, then its rows of up."""


def abstract_params(config: TransformerConfig) -> Params:
    """Return the tree of parameters as shapes and dtypes."""
    return jax.tree.map(lambda shape: shape, _traced_params(config))  # a new tree for each caller


@functools.lru_cache(maxsize=8)  # tracing thirty layers takes half a second, and opening a checkpoint needs it thrice
def _traced_params(config: TransformerConfig) -> Params:
    model = Transformer(config)
    return jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32))["params"], jax.random.key(0))


LAYOUTS = (("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head."))
"""Prefixes of the decoder and of the head in a vision-language checkpoint: the present names, and older ones."""


def layout_of(names: Iterable[str]) -> int:
    """Return the index into `LAYOUTS` of the prefixes that these tensors have; 0 if neither."""
    return int(any(name.startswith(("language_model.", "vision_tower.", "multi_modal_projector.")) for name in names))


def stacked_experts(names: Iterable[str]) -> bool:
    """Whether a checkpoint stores all experts of a layer in one tensor of each kind."""
    return any(re.match(r"(language_)?model\..*\.mlp\.experts\.down_proj$", name) for name in names)


def tensor_plan(raw: Json, config: TransformerConfig, layout: int = 0, *, stacked: bool = False) -> tuple[Tensor, ...]:
    """Return the tensors of a Hugging Face checkpoint with the parameters that they hold; each parameter occurs once.

    Args:
      raw: the content of config.json.
      config: the decoder's shape, from `read_config`.
      layout: index into `LAYOUTS`, for a vision-language model.
      stacked: whether all experts of a layer are stored in one tensor of each kind.
    """
    family = family_of(raw)
    fused = {member: (name, i) for name, members in family.fused for i, member in enumerate(members)}
    groups: dict[str, dict[int, Part]] = {}
    for path, leaf in flatten_dict(abstract_params(config)).items():
        *modules, last = (family.renamed.get(name, name) for name in path)
        if modules[-1] == "experts" and family.stacked:
            name, at = _STACKED[last]
            halves = family.stacked == "halves"
            part = Part(path, leaf.shape, column=None if halves else at, half=(at or 0) if halves else None)
            groups.setdefault(".".join(_hf_modules((*modules, name))), {})[at or 0] = part
            continue
        if len(leaf.shape) == 3:  # all experts of a layer; in the file together, or one tensor each
            for e in range(leaf.shape[0]):
                name, half = _HALVES[last] if stacked else (f"{e}.{last}.weight", 0)
                members = groups.setdefault(".".join(_hf_modules((*modules, name))), {})
                members[2 * e + half] = Part(path, leaf.shape[1:], e)
            continue
        module, order = fused.get(modules[-1], (modules[-1], 0))
        suffix = _SUFFIXES.get(last, f".{last}")
        name = ".".join(_hf_modules((*modules[:-1], module))) + suffix
        groups.setdefault(name, {})[order] = Part(path, leaf.shape)
    plan = []
    for name, members in groups.items():
        parts = tuple(members[i] for i in sorted(members))
        plan.append(Tensor(name, _stored_shape(parts, stacked=stacked), parts))
    if not has_vision(raw):
        return tuple(plan)
    model, head = LAYOUTS[layout]
    for i, tensor in enumerate(plan):
        first, rest = tensor.name.split(".", 1)
        plan[i] = dataclasses.replace(tensor, name=(model if first == "model" else head) + rest)
    return tuple(plan)


def _stored_shape(parts: tuple[Part, ...], *, stacked: bool) -> tuple[int, ...]:
    """Return the shape of the stored tensor that holds some parts."""
    first = parts[0].shape
    if parts[0].column is not None:
        return *first[:-1], 2 * first[-1]
    if parts[0].half is not None:
        return first[0], len(parts) * first[2], first[1]
    columns = (first[0],) if parts[0].transposed else first[1:]
    if parts[0].path[-1] == "conv1d":  # one filter for each channel, over one channel
        columns = (1, *columns)
    rows, highest = sum(part.rows for part in parts), parts[-1].expert
    lead = (highest + 1, rows // (highest + 1)) if stacked and highest is not None else (rows,)
    return *lead, *columns


def _hf_modules(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return module names as in Hugging Face's files: model.layers.0.self_attn… for layers_0/self_attn/…"""
    first = re.sub(r"^layers_(\d+)$", r"layers.\1", modules[0])
    return (first, *modules[1:]) if first == "lm_head" else ("model", first, *modules[1:])
