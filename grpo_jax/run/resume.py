"""Checks that a run can resume from a checkpoint, by comparing its description with the saved one."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
import warnings
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import Resume
from grpo_jax.config.sft import SFTConfig, config_class
from grpo_jax.messages import show, some
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.streams import count_cores, devices_of
from grpo_jax.models.transformer import Transformer
from grpo_jax.rewards.contract import reward_names
from grpo_jax.run.function_sources import fingerprint, reward_sources, source_of
from grpo_jax.run.run import BaseRun
from grpo_jax.text.images import image_bytes
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.types import Json, Model, as_argument
from grpo_jax.update.state import TrainState
from grpo_jax.watch.writer import package_versions, read_settings

if TYPE_CHECKING:
    from grpo_jax.rollout.interaction import Interaction

_FIELDS = [*dataclasses.fields(GRPOConfig), *dataclasses.fields(SFTConfig)]

_DERIVED = {"dtype", "remat", "remat_on_cpu", "initializer_range", "attention", "mesh", "float32_sums", "loop_layers"}
"""Fields of a `TransformerConfig` that are derived from the settings and the devices."""

_RULES: dict[str, Resume | None] = {field.name: field.metadata.get("resume") for field in _FIELDS}


def run_identity(
    run: BaseRun, state: TrainState, *, eos_token_ids: Sequence[int] = (), eval_data: Sequence[EncodedPrompts] = ()
) -> dict[str, Any]:
    """Describe everything that affects a run's results, as a JSON object that is stored in each checkpoint.

    Datasets are hashed per column, frozen arrays by their first elements, and the caller's functions by their source.
    `eos_token_ids` are the tokens that end sampled completions.
    """
    config, data, model, sizes = run.config, run.data, run.policy.model, run.config.sizes()
    custom_optimizer, advantage_fn, devices = run.schedule is None, run.advantage_fn, devices_of(state)
    functions = {
        "advantage_fn": None if advantage_fn is None else advantage_fn.function,
        "surrogate": run.updater.surrogate,
    }
    warm_up_is_fixed = config.warmup_steps >= 1 or config.warmup_steps == 0 or config.lr_scheduler_type == "constant"
    return {
        "config": json.loads(json.dumps(config.to_dict())),
        "sizes": [sizes.prompts, sizes.prompts_per_update, sizes.updates],
        "dataset": _prompts([data]),
        "columns": _columns(data),
        "evaluation": {
            **(_prompts(eval_data) if eval_data else {}),
            "num_generations_eval": config.eval_generations,
            "temperature_eval": config.eval_temperature,
        },
        "eval_columns": _columns(eval_data[0]) if eval_data else {},
        **_turns(run.interaction),
        "policy": {**_settings(model), "eos_token_ids": list(eos_token_ids)},
        "reward_fns": reward_names(run.reward_fns),
        "sources": reward_sources(run.reward_fns, run.interaction),
        "frozen": fingerprint((as_argument(model), getattr(data.image_encoder, "params", None))),
        "optimizer": "the caller's" if custom_optimizer else "the config's",
        "update_rule": _update_rule(run.optimizer) if custom_optimizer else None,
        "sampler": "generate" if run.sampler is None else "the caller's",
        "functions": {name: source_of(function) for name, function in functions.items() if function is not None},
        "teacher": None if run.teaching is None else run.teaching.identity,
        "state": {
            jax.tree_util.keystr(path): f"{leaf.dtype.name}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        },
        "total_steps": run.total_steps,
        "length_is_free": custom_optimizer or (config.lr_scheduler_type.startswith("constant") and warm_up_is_fixed),
        "versions": package_versions(),
        "machine": {  # the device kind and, for a single CPU device, its core count may affect the last bits of results
            "device": ", ".join(sorted({device.device_kind for device in devices})),
            "cores": count_cores() if [x.platform for x in devices] == ["cpu"] else None,
        },
    }


def _update_rule(optimizer: optax.GradientTransformation) -> str | None:
    """Hash an optimizer's jaxpr, which contains its constants. Returns None if it requires the policy's own params."""
    params = {"w": np.zeros((2, 2), np.float32)}
    with contextlib.suppress(Exception):
        jaxpr = str(jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params))
        return hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", jaxpr).encode()).hexdigest()
    return None


def with_saved_recomputation(config: GRPOConfig, run_dir: str | Path | None) -> GRPOConfig:
    """Replace `gradient_checkpointing=None` with the value used by the run in the directory, if there is one."""
    # The `getattr` default covers an argument that is not a config, which `prepare` rejects.
    if run_dir is None or getattr(config, "gradient_checkpointing", False) is not None:
        return config
    with contextlib.suppress(OSError):  # reported later, when the directory is written to
        begun = read_settings(run_dir).get("config", {}).get("gradient_checkpointing")
        return dataclasses.replace(config, gradient_checkpointing=begun)
    return config


def differences(saved: Json, current: Json, step: int) -> list[str]:
    """Compare two results of `run_identity` and return one line per difference that prevents resuming from `step`."""
    kinds = [config_class(which["config"]).__name__ for which in (current, saved)]
    if kinds[0] != kinds[1]:
        return [f"config: {kinds[0]}, but the run has {kinds[1]}"]
    turns = list(_turn_differences(saved, current))
    lines = [*_config_differences(saved, current, step), *turns]
    rows, now = saved["dataset"]["rows"], current["dataset"]["rows"]
    if rows != now:
        lines.append(f"dataset: {now} rows, but the run has {rows}")
    elif saved["dataset"] != current["dataset"] and not turns:  # prompts contain the tools' schemas
        lines.append(f"dataset: the prompts or their order differ from the saved run's ({now} rows in both)")
    lines += _evaluation_differences(saved, current)
    for name in ("reward_fns", "optimizer", "sampler"):
        if saved[name] != current[name]:
            lines.append(f"{name}: {show(current[name])}, but the run has {show(saved[name])}")
    if saved["frozen"] != current["frozen"]:
        lines.append("policy: the frozen base model or vision tower differs from the run's")
    old, new = saved["policy"], current["policy"]
    for name in (name for name in _changed(old, new) if name in old and name in new):  # a field may be new or removed
        lines.append(f"policy: {name} = {show(new[name])}, but the run has {show(old[name])}")
    old, new = saved["functions"], current["functions"]
    for name in _changed(old, new):
        ours, theirs = (functions[name]["name"] if name in functions else "None" for functions in (new, old))
        source = "; its source or bound arguments have changed" if ours == theirs else ""
        lines.append(f"{name}: {ours}, but the run has {theirs}{source}")
    lines += _teacher_differences(saved["teacher"] or {}, current["teacher"] or {})
    # The state's arrays are determined by the above, so they are compared only if nothing else differs.
    return lines or _state_differences(saved["state"], current["state"])


def changed_functions(saved: Json, current: Json, *, accept: bool = False) -> list[str]:
    """Return one line per reward function, tool or environment whose source changed. If `accept`, warn instead."""
    names = [
        f"{argument}: the source of {name}"
        for argument, sources in current["sources"].items()
        for name, source in sources.items()
        if saved["sources"].get(argument, {}).get(name, source) != source
    ]
    if accept and names:
        warnings.warn(f"the run continues with changed functions ({'; '.join(names)})", stacklevel=2)
    fix = 'has changed; restore it, or accept the new one with resume="changed" (grpo-jax train --resume changed)'
    return [] if accept else [f"{name} {fix}" for name in names]


def warn_of_changes(saved: Json, current: Json) -> None:
    """Warn about changes that may affect a resumed run's results: columns, versions, machine, batch sizes."""
    for argument, prompts, columns in (
        ("dataset", "dataset", "columns"),
        ("eval_dataset", "evaluation", "eval_columns"),
    ):
        names = _changed(saved[columns], current[columns])
        if names and saved[prompts].get("prompts") == current[prompts].get("prompts"):
            warnings.warn(
                f"{argument}: the prompts match the run's, but the values of {', '.join(names)} differ. Rewards that"
                " use them may change from this step on",
                stacklevel=2,
            )
    if saved["versions"] == current["versions"] and saved["update_rule"] != current["update_rule"]:
        warnings.warn("optimizer: it differs from the run's, for example in its learning rate", stacklevel=2)
    rounding = [name for name, rule in _RULES.items() if rule == "rounding"]
    old, new = (
        which["versions"] | which["machine"] | {name: which["config"].get(name) for name in rounding}
        for which in (saved, current)
    )
    shown = {name: [x if isinstance(x, str) else show(x) for x in (old.get(name), new.get(name))] for name in old | new}
    lines = [f"{name} {' → '.join(shown[name])}" for name in _changed(old, new)]
    if lines:
        warnings.warn(
            f"the run resumes with a different setup ({', '.join(lines)}): results may differ in the last bits from an"
            " uninterrupted run's",
            stacklevel=2,
        )


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ or that only one of the dicts contains, sorted."""
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def _config_differences(saved: Json, current: Json, step: int) -> Iterator[str]:
    """Yield a line for each changed setting that must not change. Settings unknown to either version are skipped."""
    old, new = saved["config"], current["config"]
    same_steps = saved["total_steps"] == current["total_steps"]
    for name in (name for name in _changed(old, new) if name in old and name in new):
        rule, line = _RULES.get(name), f"{name} = {show(new[name])}, but the run has {show(old[name])}"
        if rule == "free" or (rule == "to none" and new[name] == "none"):
            continue
        if name == "chat_template_kwargs" and not (current["tools"] or current["environments"]):
            continue  # prompts are compared, so a date that the template writes can be set after the start
        if rule == "rounding" and saved["sizes"] == current["sizes"]:
            continue
        if rule != "length":
            yield line
        elif not same_steps and not (saved["length_is_free"] and current["length_is_free"]):
            yield (
                f"{line}; the learning rates depend on the number of steps unless they are constant from the first step"
                f" on (lr_scheduler_type = {show(new['lr_scheduler_type'])})"
            )
        elif current["total_steps"] < step:
            yield f"{line} and is already at step {step}"


def _teacher_differences(old: Json, new: Json) -> Iterator[str]:
    """Yield a line for the first difference between two teachers' identities, which are empty without a teacher."""
    for name in ("kind", "scorer"):
        if old.get(name) != new.get(name):
            yield f"teacher: {show(new.get(name))}, but the run has {show(old.get(name))}"
            return
    if old.get("params") != new.get("params"):
        yield "teacher: its params differ from the run's"


def _turn_differences(saved: Json, current: Json) -> Iterator[str]:
    """Yield a line for each difference in tools, environments and the environments' methods."""
    for kind, argument in (("tools", "tools"), ("environments", "environment_factory"), ("methods", "environments")):
        old, new = saved[kind], current[kind]
        if old.keys() != new.keys():
            yield f"{argument}: {some(sorted(new), 9) or 'none'}, but the run has {some(sorted(old), 9) or 'none'}"
        elif names := _changed(old, new):
            yield f"{argument}: the schema of {', '.join(names)} differs from the run's"


def _evaluation_differences(saved: Json, current: Json) -> Iterator[str]:
    """Yield a line for each difference in the evaluations that select the best checkpoint."""
    name = current["config"]["metric_for_best_model"]
    if name is None or not name.startswith("eval/") or saved["config"].get("metric_for_best_model") != name:
        return
    old, new = saved["evaluation"], current["evaluation"]
    compared = f"; metric_for_best_model = {show(name)} requires all evaluations of the run to be comparable"
    for setting in ("num_generations_eval", "temperature_eval"):
        if old[setting] != new[setting]:
            yield f"{setting} = {show(new[setting])}, but the run has {show(old[setting])}{compared}"
    if old.get("rows") != new.get("rows"):
        yield f"eval_dataset: {new.get('rows')} rows, but the run has {old.get('rows')}{compared}"
    elif old.get("prompts") != new.get("prompts"):
        yield f"eval_dataset: its {new['rows']} prompts differ from the run's{compared}"


def _state_differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Describe up to three changed arrays from the first part of the state with changes. Returns [] if none changed."""
    parts = {
        ".params": "policy: its params differ",
        ".opt_state": "optimizer: its state differs",
        "": "state: its arrays differ",
    }
    for prefix, part in parts.items():
        paths = [path for path in _changed(old, new) if path.startswith(prefix)]
        if paths:
            arrays = [f"{x.lstrip('.')} {new.get(x, '(none)')} instead of {old.get(x, '(none)')}" for x in paths]
            return [f"{part} from the run's: {some(arrays, 3)}"]
    return []


def _prompts(datasets: Sequence[EncodedPrompts]) -> Json:
    """Return the number of prompts in the datasets and a hash of their tokens and images."""
    tokens = hashlib.sha256()
    for data in datasets:
        for ids in data.token_ids:
            tokens.update(array("q", [len(ids), *ids]).tobytes())
        for mask in data.masks or ():
            tokens.update(bytes(mask))
        for block in data.blocks or ():
            tokens.update(array("q", block).tobytes())
        for image in itertools.chain(*(data.images or ())):
            tokens.update(image_bytes(image))
    return {"rows": sum(len(data.token_ids) for data in datasets), "prompts": tokens.hexdigest()}


def _turns(interaction: Interaction | None) -> dict[str, Json]:
    """Return the schemas of the tools and the environments' methods, and the environments' names."""
    if interaction is None:
        return {"tools": {}, "environments": {}, "methods": {}}
    kinds = interaction.kinds
    schemas = {
        "tools": {name: tool.schema for name, tool in interaction.tools.items()},
        "environments": {
            kind.__name__ if name is None else f"{name}: {kind.__name__}": None for name, kind in kinds.items()
        },
        "methods": {
            f"{kinds[name].__name__}.{method}": tool.schema
            for name, methods in interaction.own_tools.items()
            for method, tool in methods.items()
        },
    }
    return json.loads(json.dumps(schemas, default=str))


def _columns(data: EncodedPrompts) -> dict[str, str]:
    """Hash each column's values (or their types, if they are neither JSON nor arrays), keyed by column name.

    The dict is empty for `Examples`, because no function reads their columns.
    """
    hashes: dict[str, hashlib._Hash] = {}

    def plain(value: object) -> object:
        return value.tolist() if hasattr(value, "tolist") else type(value).__name__

    for i, row in enumerate(data.rows if data.masks is None else ()):
        for name in row.keys() - {"prompt"}:
            text = json.dumps([i, row[name]], default=plain, skipkeys=True)
            hashes.setdefault(name, hashlib.sha256()).update(text.encode())
    return {name: found.hexdigest() for name, found in hashes.items()}


def _settings(model: Model) -> Json:
    """Return a model's settings except `_DERIVED`. The dict is empty for a custom model."""
    if not isinstance(model, Transformer | LoraModel):
        return {}
    lora = {"scale": model.scale, "dropout": model.dropout} if isinstance(model, LoraModel) else {}
    shape = dataclasses.asdict(dataclasses.replace(model.config, mesh=None))
    return json.loads(json.dumps({name: x for name, x in shape.items() if name not in _DERIVED} | lora))
