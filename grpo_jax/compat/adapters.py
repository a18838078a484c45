"""PEFT's `LoraConfig` as adapters of a policy: obeyed to the letter, or refused by name."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Collection
from typing import Any, Literal

import jax

from grpo_jax.hub.peft import add_lora
from grpo_jax.hub.tensors import tensor_plan
from grpo_jax.models.transformer import projections
from grpo_jax.policy import Policy

_OBEYED = {
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
}
# These say where a config came from, how PyTorch runs it, or what counts beside fields that are refused.
_ASIDE = {
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "runtime_config",
    "fan_in_fan_out",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
}
_DEFAULT_TARGETS = ("q_proj", "v_proj")  # PEFT's choice for all families of ours that it knows
_INITS: dict[bool | str, Literal["uniform", "gaussian"]] = {True: "uniform", "gaussian": "gaussian"}

Module = tuple[tuple[str, ...], ...]
"""Paths of the projections that one module of the checkpoint is here; none where it takes no adapter."""


def with_adapters(policy: Policy, peft: Any, *, seed: int, dropout: bool = True) -> Policy:
    """Return the policy with fresh adapters as a `LoraConfig` asks for them.

    Names and regular expressions are matched as by PEFT, against the names of the checkpoint's modules
    (`model.layers.0.self_attn.q_proj`). A module that is several projections here (Phi-3's `qkv_proj`) gets an adapter
    for each of them.

    Args:
      policy: the base.
      peft: a `peft.LoraConfig`, or any object with some of its attributes, `r` and `lora_alpha` at least.
      seed: of the draw of A.
      dropout: False: `lora_dropout` does not count, as with TRL's `disable_dropout`.

    Raises:
      ValueError: a field with a value that means something in PEFT and cannot be had here; modules that take no
        adapters here; none that match.
    """
    _check_fields(peft)
    modules = _modules(policy)
    chosen = _chosen(peft, modules)
    rank = peft.r
    return add_lora(
        policy,
        jax.random.key(seed),
        rank=rank,
        # Rank-stabilized: alpha / √rank in the place of alpha / rank.
        alpha=peft.lora_alpha * (math.sqrt(rank) if getattr(peft, "use_rslora", False) else 1.0),
        targets="|".join(re.escape("/".join(path)) for name in chosen for path in modules[name]),
        dropout=float(getattr(peft, "lora_dropout", 0.0)) if dropout else 0.0,
        init=_INITS[getattr(peft, "init_lora_weights", True)],
    )


def _check_fields(peft: Any) -> None:
    """Raise ValueError for what is no `LoraConfig`, and for all fields that ask for what is not here."""
    kind = getattr(peft, "peft_type", "LORA")
    if getattr(kind, "value", kind) != "LORA":
        raise ValueError(f"peft_config is a {type(peft).__name__}: there is LoRA here, give a LoraConfig.")
    plain: dict[str, Any] = {"bias": "none"}
    if dataclasses.is_dataclass(peft):
        plain |= {field.name: field.default for field in dataclasses.fields(peft)}
    asked = {name: value for name, value in vars(peft).items() if not name.startswith("_")}
    unknown = [name for name in asked.keys() - _OBEYED - _ASIDE if asked[name] and asked[name] != plain.get(name)]
    if asked.get("init_lora_weights", True) not in (*_INITS,):
        unknown.append("init_lora_weights")
    if unknown:
        found = ", ".join(f"{name} = {asked[name]!r}" for name in sorted(unknown))
        raise ValueError(f"peft_config has {found}: there is no such thing here, leave it out.")


def _modules(policy: Policy) -> dict[str, Module]:
    """The modules of the policy's checkpoint that have a weight, by name."""
    routers = re.compile(r"mlp/gate")
    kernels = {path for path, _ in projections(policy.params) if not routers.fullmatch("/".join(path[1:]))}
    modules: dict[str, Module] = {"lm_head": ()}
    for tensor in tensor_plan(policy.config, policy.model.config):
        module, _, kind = tensor.name.rpartition(".")
        if kind == "weight":
            paths = tuple(part.path[:-1] for part in tensor.parts)
            adaptable = kernels.issuperset(paths) and tensor.parts[0].path[-1] == "kernel"
            modules[module] = paths if adaptable else ()
    return modules


def _chosen(peft: Any, modules: dict[str, Module]) -> list[str]:
    """The modules that a config chooses."""
    targets = getattr(peft, "target_modules", None)
    if targets is None:
        targets = _DEFAULT_TARGETS
    if isinstance(targets, str) and targets.lower() == "all-linear":
        named = [name for name, paths in modules.items() if paths and name != "lm_head"]
    else:
        named = [name for name in modules if _matches(targets, name)]
    excluded = getattr(peft, "exclude_modules", None)
    layers, lists = getattr(peft, "layers_to_transform", None), getattr(peft, "layers_pattern", None)
    chosen = [name for name in named if _in_layers(name, layers, lists) and not (excluded and _matches(excluded, name))]
    refused = [name for name in chosen if not modules[name]]
    last = sorted({name.rsplit(".", 1)[-1] for name, paths in modules.items() if paths})
    if refused or not chosen:
        narrowed = ("exclude_modules", "layers_to_transform", "layers_pattern")
        others = [f", {name} = {getattr(peft, name)!r}" for name in narrowed if getattr(peft, name, None)]
        what = f"takes {refused[0]}, which has no adapter here" if refused else "matches no projection of the policy"
        raise ValueError(f"peft_config.target_modules = {targets!r}{''.join(others)} {what}: choose of {last}.")
    spare = [] if isinstance(targets, str) else [one for one in targets if not any(_matches([one], n) for n in modules)]
    if spare:
        warnings.warn(
            f"peft_config.target_modules has {sorted(spare)}, and the policy no such projection: there are {last}",
            stacklevel=4,
        )
    return chosen


def _matches(names: str | Collection[str], module: str) -> bool:
    """Whether a regular expression is a module's whole name, or one of several names is its end."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)


def _in_layers(module: str, layers: int | Collection[int] | None, lists: str | Collection[str] | None) -> bool:
    """Whether a module belongs to one of some layers, by the first number in its name; `lists`: behind these names."""
    wanted = [layers] if isinstance(layers, int) else layers
    if wanted is None or len(wanted) == 0:
        return True
    before = [lists] if isinstance(lists, str) else lists
    found = re.match(rf"(?:.*?\.)?(?:{'|'.join(before) if before else '[^.]*'})\.(\d+)\.", module)
    return found is not None and int(found[1]) in wanted
