"""Which tensor of a checkpoint is which part of which parameter, and the tensors that gpt-oss stores in MXFP4."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from grpo_jax.hub.families import family_of
from grpo_jax.hub.keys import sees
from grpo_jax.models.layers import TransformerConfig
from grpo_jax.models.transformer import Transformer
from grpo_jax.types import Json, Params

_SUFFIXES = {"kernel": ".weight", "scale": ".weight", "embedding": ".weight", "conv1d": ".conv1d.weight"}
_SUFFIXES |= {"input_scale": ".scale"}
"""Suffix of a parameter's name in the file, behind its module's; its own name where it is not listed."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One parameter, or one expert's part of it, as rows of a stored tensor, or as every other column of it.

    Attributes:
      path: keys of the parameter in the tree.
      shape: of the part as it lies in the tree; a matrix [in, out] is stored as [out, in].
      expert: index on the parameter's first axis, or None for all of it.
      column: 0 or 1 for the even or the odd ones of the stored tensor's last axis; None for all.
      half: 0 or 1 for the first or the last rows of each expert of a stored tensor [experts, out, in], if both halves
        are there; None for none of it.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    expert: int | None = None
    column: int | None = None
    half: int | None = None

    @property
    def stacked(self) -> bool:
        """Whether the stored tensor has all experts, and others than this part's weights."""
        return self.column is not None or self.half is not None

    @property
    def transposed(self) -> bool:
        matrix = self.path[-1] != "embedding" and not self.path[-1].endswith("_bias")
        return matrix and len(self.shape) == 2

    @property
    def rows(self) -> int:
        """Rows of the stored tensor that this part fills."""
        return self.shape[-1] if self.transposed else self.shape[0]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: its name there, its shape there, and the parameters that it holds, in order."""

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
"""Of `Family.stacked`, the stored tensor of each parameter of the experts, and its columns or its half there."""

_HALVES = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}
"""Of experts that a checkpoint stores stacked, the same; the rows of an expert's gate are followed by those of its up.
"""


def abstract_params(config: TransformerConfig) -> Params:
    """The tree of parameters as shapes and dtypes, without memory for any."""
    return jax.tree.map(lambda shape: shape, _traced_params(config))  # a tree of the caller's own


@functools.lru_cache(maxsize=8)
def _traced_params(config: TransformerConfig) -> Params:
    """Traced once: a checkpoint that is opened asks three times, and thirty layers take half a second each time."""
    model = Transformer(config)
    return jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32))["params"], jax.random.key(0))


LAYOUTS = (("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head."))
"""Where the language model of a model that sees may stand in a checkpoint: in its modules' own names, or in older ones.
"""


def layout_of(names: Iterable[str]) -> int:
    """Index into `LAYOUTS` of the naming these tensors use; 0 if none matches."""
    return int(any(name.startswith(("language_model.", "vision_tower.", "multi_modal_projector.")) for name in names))


def stacked_experts(names: Iterable[str]) -> bool:
    """Whether a checkpoint has the experts of a layer in one tensor of each kind, and not in one of each expert."""
    own = (name for name in names if name.startswith(("model.", "language_model.")))
    return any(name.endswith(".mlp.experts.down_proj") for name in own)


def tensor_plan(raw: Json, config: TransformerConfig, layout: int = 0, *, stacked: bool = False) -> tuple[Tensor, ...]:
    """Return the tensors of a Hugging Face checkpoint, each with the parameters that it holds, and at which rows.

    Together they cover every parameter once. `layout` is an index into `LAYOUTS`, for a model that sees; `stacked` says
    that the experts of a layer are stored as one tensor of each kind.
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
        if len(leaf.shape) == 3:  # All experts of a layer in one array here; in the file in one, or one tensor each.
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
        first = parts[0].shape
        if parts[0].column is not None:
            plan.append(Tensor(name, (*first[:-1], 2 * first[-1]), parts))
            continue
        if parts[0].half is not None:
            plan.append(Tensor(name, (first[0], len(parts) * first[2], first[1]), parts))
            continue
        columns = (first[0],) if parts[0].transposed else first[1:]
        if parts[0].path[-1] == "conv1d":  # a filter for each channel, of one channel
            columns = (1, *columns)
        rows, highest = sum(part.rows for part in parts), parts[-1].expert
        lead = (highest + 1, rows // (highest + 1)) if stacked and highest is not None else (rows,)
        plan.append(Tensor(name, (*lead, *columns), parts))
    return tuple(_moved(tensor, *LAYOUTS[layout]) for tensor in plan) if sees(raw) else tuple(plan)


def _moved(tensor: Tensor, model: str, head: str) -> Tensor:
    """A tensor of a language model, by its name inside of a model that sees."""
    first, rest = tensor.name.split(".", 1)
    return dataclasses.replace(tensor, name=(model if first == "model" else head) + rest)


def _hf_modules(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Module names as Hugging Face writes them: model.layers.0.self_attn… for layers_0/self_attn/…"""
    first = re.sub(r"^layers_(\d+)$", r"layers.\1", modules[0])
    return (first, *modules[1:]) if first == "lm_head" else ("model", first, *modules[1:])
