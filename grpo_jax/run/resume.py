"""Checks that a run can resume from a checkpoint, by comparing its description with the saved one."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import re
import textwrap
import types
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
from grpo_jax.messages import shorten, show
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import fetch
from grpo_jax.models.threads import count_cores, devices_of
from grpo_jax.models.transformer import Transformer
from grpo_jax.rewards.contract import function_name, reward_names
from grpo_jax.run.run import BaseRun, Run, SFTRun
from grpo_jax.text.calls import tool_message
from grpo_jax.text.images import image_bytes
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.text.templates import ChatTemplate
from grpo_jax.types import Json, Model, Params, as_argument
from grpo_jax.update.state import TrainState
from grpo_jax.watch.writer import package_versions, read_settings

if TYPE_CHECKING:
    from grpo_jax.rollout.interaction import Interaction

_FIELDS = [*dataclasses.fields(GRPOConfig), *dataclasses.fields(SFTConfig)]

_DERIVED = {"dtype", "remat", "remat_on_cpu", "initializer_range", "attention", "mesh", "float32_sums", "loop_layers"}
"""Fields of a `TransformerConfig` that are derived from the settings and the devices."""

FORMAT = 3
"""Version of a checkpoint's contents. Increase it if checkpoints of earlier versions cannot be resumed."""

_RESUME_RULES: dict[str, Resume | None] = {field.name: field.metadata.get("resume") for field in _FIELDS}


def run_identity(run: Run | SFTRun, state: TrainState) -> dict[str, Any]:
    """Describe everything that affects a run's results, as a JSON object that is stored in each checkpoint.

    Datasets are hashed per column, frozen arrays by their first elements, and the caller's functions by their source.
    """
    eval_data = [*run.eval_data.values()] if isinstance(run, SFTRun) else [x for x in [run.eval_data] if x is not None]
    eos_token_ids = () if isinstance(run, SFTRun) else run.policy.eos_token_ids  # used only to sample completions
    config, data, model, sizes = run.config, run.data, run.policy.model, run.config.sizes()
    custom_optimizer, devices = run.schedule is None, devices_of(state)
    warm_up_is_fixed = config.warmup_steps >= 1 or config.warmup_steps == 0 or config.lr_scheduler_type == "constant"
    return {
        "format": FORMAT,
        "config": json.loads(json.dumps(config.to_dict())),
        "sizes": [sizes.prompts, sizes.prompts_per_update, sizes.updates],
        "dataset": _hash_rows([data]),
        "evaluation": {
            **_hash_rows(eval_data),
            "num_generations_eval": config.eval_generations,
            "temperature_eval": config.eval_temperature,
        },
        "policy": {**_model_settings(model), "eos_token_ids": list(eos_token_ids)},
        "functions": _hash_functions(run),
        "observations": _observations(run.interaction),
        "frozen": fingerprint((as_argument(model), getattr(data.image_encoder, "params", None))),
        "optimizer": "the caller's" if custom_optimizer else "the config's",
        "update_rule": _update_rule(run.optimizer) if custom_optimizer else None,
        "sampler": "generate" if run.sampler is None else "the caller's",
        "teacher": _describe_teacher(run),
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


def with_saved_gradient_checkpointing(config: GRPOConfig, run_dir: str | Path | None) -> GRPOConfig:
    """Replace `gradient_checkpointing=None` with the value used by the run in the directory, if there is one."""
    # The `getattr` default covers an argument that is not a config, which `prepare` rejects.
    if run_dir is None or getattr(config, "gradient_checkpointing", False) is not None:
        return config
    with contextlib.suppress(OSError):  # reported later, when the directory is written to
        saved = read_settings(run_dir).get("config", {}).get("gradient_checkpointing")
        return dataclasses.replace(config, gradient_checkpointing=saved)
    return config


def differences(saved: Json, current: Json, step: int) -> list[str]:
    """Compare two results of `run_identity` and return one line per difference that prevents resuming from `step`."""
    if incomparable := _incomparable(saved, current):
        return [incomparable]
    lines = [*_config_differences(saved, current, step)]
    for argument in saved["functions"] | current["functions"]:
        names, other = (", ".join(which["functions"].get(argument, ())) or "none" for which in (current, saved))
        if names != other:
            lines.append(f"{argument}: {names}, but the run has {other}")
    rows, now = saved["dataset"]["rows"], current["dataset"]["rows"]
    if rows != now:
        lines.append(f"dataset: {now} rows, but the run has {rows}")
    elif saved["dataset"]["prompts"] != current["dataset"]["prompts"]:
        lines.append(f"dataset: the prompts or their order differ from the saved run's ({now} rows in both)")
    lines += _evaluation_differences(saved, current)
    for name in ("optimizer", "sampler", "teacher"):
        if saved[name] != current[name]:
            lines.append(f"{name}: {current[name]}, but the run has {saved[name]}")
    if saved["frozen"] != current["frozen"]:
        lines.append("policy: the frozen base model or vision tower differs from the run's")
    old, new = saved["policy"], current["policy"]
    for name in (name for name in _changed(old, new) if name in old and name in new):  # a field may be new or removed
        lines.append(f"policy: {name} = {show(new[name])}, but the run has {show(old[name])}")
    # The state's arrays are determined by the above, so they are compared only if nothing else differs.
    return lines or _state_differences(saved["state"], current["state"])


def _incomparable(saved: Json, current: Json) -> str | None:
    """Return why two descriptions do not have the same keys, or None if they do."""
    if saved.get("format") != current["format"]:
        fix = "resume the run with the version that wrote it, or extract its params with grpo-jax export"
        return f"checkpoint: format {saved.get('format', 1)} of another version of grpo_jax; {fix}"
    kind, other = (config_class(which["config"]).__name__ for which in (current, saved))
    return None if kind == other else f"config: {kind}, but the run has {other}"


def changed_functions(saved: Json, current: Json, *, accept: bool = False) -> list[str]:
    """Return one line per function, tool or environment whose source changed. If `accept`, warn instead."""
    names = [
        f"{argument}: the source of {name}"
        for argument, sources in current["functions"].items()
        for name, source in sources.items()
        if saved["functions"].get(argument, {}).get(name, source) != source
    ]
    if accept and names:
        warnings.warn(f"the run continues with changed functions ({'; '.join(names)})", stacklevel=2)
    fix = 'has changed; restore it, or accept the new one with resume="changed" (grpo-jax train --resume changed)'
    return [] if accept else [f"{name} {fix}" for name in names]


def warn_of_changes(saved: Json, current: Json) -> None:
    """Warn about changes that may affect a resumed run's results: columns, versions, machine, batch sizes."""
    for argument, part in (("dataset", "dataset"), ("eval_dataset", "evaluation")):
        names = _changed(saved[part]["columns"], current[part]["columns"])
        if names and saved[part]["prompts"] == current[part]["prompts"]:
            warnings.warn(
                f"{argument}: the prompts match the run's, but the values of {', '.join(names)} differ. Rewards that"
                " use them may change from this step on",
                stacklevel=2,
            )
    if saved["versions"] == current["versions"] and saved["update_rule"] != current["update_rule"]:
        warnings.warn("optimizer: it differs from the run's, for example in its learning rate", stacklevel=2)
    rounding = [name for name, rule in _RESUME_RULES.items() if rule == "rounding"]
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
        rule, line = _RESUME_RULES.get(name), f"{name} = {show(new[name])}, but the run has {show(old[name])}"
        if rule == "free" or (rule == "to none" and new[name] == "none"):
            continue
        if name == "chat_template_kwargs" and saved.get("observations") == current["observations"]:
            continue  # such as a date, set when the run is resumed; the prompts are compared separately
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
    if old["rows"] != new["rows"]:
        yield f"eval_dataset: {new['rows']} rows, but the run has {old['rows']}{compared}"
    elif old["prompts"] != new["prompts"]:
        yield f"eval_dataset: its {new['rows']} prompts differ from the run's{compared}"


def _state_differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Describe up to three changed arrays of the state, params first. Returns [] if none changed."""
    paths = sorted(_changed(old, new), key=lambda path: not path.startswith(".params"))
    arrays = [f"{x.lstrip('.')} {new.get(x, '(none)')} instead of {old.get(x, '(none)')}" for x in paths]
    return [f"state: its arrays differ from the run's: {shorten(arrays, 3)}"] if arrays else []


def _hash_rows(datasets: Sequence[EncodedPrompts]) -> Json:
    """Return the number of prompts in the datasets, a hash of their tokens and images, and a hash of each column.

    Values of columns that are neither JSON nor arrays are hashed by their types. The columns of `Examples` are not
    hashed, because no function reads them.
    """
    tokens = hashlib.sha256()
    columns: dict[str, hashlib._Hash] = {}

    def plain(value: object) -> object:
        return value.tolist() if hasattr(value, "tolist") else type(value).__name__

    for data in datasets:
        for ids in data.token_ids:
            tokens.update(array("q", [len(ids), *ids]).tobytes())
        for mask in data.masks or ():
            tokens.update(bytes(mask))
        for block in data.blocks or ():
            tokens.update(array("q", block).tobytes())
        for image in itertools.chain(*(data.images or ())):
            tokens.update(image_bytes(image))
        for i, row in enumerate(data.rows if data.masks is None else ()):
            for name in row.keys() - {"prompt"}:
                text = json.dumps([i, row[name]], default=plain, skipkeys=True)
                columns.setdefault(name, hashlib.sha256()).update(text.encode())
    hashes = {name: found.hexdigest() for name, found in columns.items()}
    return {"rows": sum(len(data.token_ids) for data in datasets), "prompts": tokens.hexdigest(), "columns": hashes}


def _model_settings(model: Model) -> Json:
    """Return a model's settings except `_DERIVED`. The dict is empty for a custom model."""
    if not isinstance(model, Transformer | LoraModel):
        return {}
    lora = {"scale": model.scale, "dropout": model.dropout} if isinstance(model, LoraModel) else {}
    shape = dataclasses.asdict(dataclasses.replace(model.config, mesh=None))
    return json.loads(json.dumps({name: x for name, x in shape.items() if name not in _DERIVED} | lora))


def _describe_teacher(run: BaseRun) -> str:
    """Identify the teacher by its params or, for a scorer, by its class."""
    if run.distillation is None:
        return "none"
    if run.distillation.teacher is None:
        return f"a scorer ({type(run.distillation.scorer).__name__})"
    return f"a policy (params {fingerprint(run.distillation.teacher)[:8]})"


def fingerprint(tree: Params) -> str:
    """Return a hash of each array's first elements."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(fetch(leaf[(0,) * (leaf.ndim - 1)][:64] if leaf.ndim else leaf).tobytes())
    return digest.hexdigest()


# The caller's functions -----------------------------------------------------------------------------------------------


def _hash_functions(run: BaseRun) -> dict[str, dict[str, str]]:
    """Hash the sources of the caller's functions, keyed by the argument to `train` and by name."""
    names, interaction = reward_names(run.reward_fns), run.interaction
    hashes = {"reward_fns": {name: hash_source(fn) for name, fn in zip(names, run.reward_fns, strict=True)}}
    advantage_fn = None if run.advantage_fn is None else run.advantage_fn.function
    for argument, fn in (("advantage_fn", advantage_fn), ("surrogate", run.updater.surrogate)):
        hashes[argument] = {} if fn is None else {function_name(fn): hash_source(fn)}
    if interaction is not None:
        hashes["tools"] = {name: hash_source(tool.function) for name, tool in interaction.tools.items()}
        hashes["environment_factory"] = {
            kind.__name__ if key is None else f"{key}: {kind.__name__}": hash_source(kind)
            + hash_source(interaction.factories[key])
            for key, kind in interaction.kinds.items()
        }
    return hashes


def _observations(interaction: Interaction | None) -> dict[str, list[int] | None]:
    """Return the token ids that the chat template writes between two turns, for each environment and role.

    They are None if the template does not support the role, and {} without tools and environments.
    """
    found: dict[str, list[int] | None] = {}
    if interaction is None:
        return found
    from grpo_jax.rollout.interaction import schemas_of

    kwargs, eos = interaction.config.chat_template_kwargs, interaction.eos_token_ids
    for key in interaction.kinds or (None,):
        tools = schemas_of({**interaction.tools, **interaction.own_tools.get(key, {})})
        template = ChatTemplate(interaction.tokenizer, kwargs, tools, eos)
        for message in (tool_message("tool", "1"), {"role": "user", "content": "1"}):
            found[f"{key}: {message['role']}"] = None
            with contextlib.suppress(ValueError):
                found[f"{key}: {message['role']}"] = template.observation_ids([message])
    return found


def hash_source(function: Any, seen: set[int] | None = None) -> str:
    """Hash the source of a function, class or callable object without comments, and of the functions that it uses.

    The latter are found in partials, attributes, closures and globals from the same module. Values are hashed only if
    they are arguments of a partial or fields of a dataclass. Base classes are not hashed. For this package's functions,
    the name replaces the source, which differs between versions.
    """
    seen = set() if seen is None else seen
    seen.add(id(function))
    partial, named = isinstance(function, functools.partial), hasattr(function, "__qualname__")
    kind = function if named else type(function)
    shipped = partial or _is_from_package(kind)
    used: list[object] = [] if named else [*getattr(function, "__dict__", {}).values()]
    if partial:
        used = [function.func, *function.args, *function.keywords.values()]
    elif hasattr(function, "__code__"):
        used = [*map(function.__globals__.get, _names_in(function.__code__))]
        used = [one for one in used if getattr(one, "__module__", None) == function.__module__]
        with contextlib.suppress(ValueError):  # empty closure cell
            used += [cell.cell_contents for cell in function.__closure__ or ()]
    elif isinstance(kind, type) and not shipped:
        used += vars(kind).values()
    has_settings = partial or (not named and dataclasses.is_dataclass(function))
    found = [kind.__qualname__ if shipped else _source(kind)]
    for one in used:
        if isinstance(one, types.FunctionType | types.MethodType | functools.partial) or _is_from_package(type(one)):
            found += [] if id(one) in seen else [hash_source(one, seen)]
        elif has_settings and isinstance(one, str | int | float | re.Pattern):
            found.append(repr(one))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _source(function: Any) -> str:
    """Return the source of a function or class without comments, or its name if the source is not available."""
    try:
        source = inspect.getsource(function)
        with contextlib.suppress(SyntaxError):  # a lambda's source may be part of an expression
            source = ast.unparse(ast.parse(textwrap.dedent(source)))
    except (OSError, TypeError):
        return str(function.__qualname__)
    return source


def _names_in(code: types.CodeType) -> list[str]:
    """Return the names of the globals and attributes that a code object uses, in code order."""
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _names_in(one)]
    return [*code.co_names, *inner]


def _is_from_package(kind: object) -> bool:
    """Return whether a function or class is defined in this package."""
    return str(getattr(kind, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
