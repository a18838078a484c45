"""Comparison of a run's description with a checkpoint's, to check that the run can resume from the checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import Resume
from grpo_jax.config.sft import SFTConfig, config_class
from grpo_jax.messages import shorten, show
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import fetch
from grpo_jax.models.transformer import Transformer
from grpo_jax.rewards.contract import function_name, reward_names
from grpo_jax.run.run import BaseRun, Run, SFTRun
from grpo_jax.text.images import image_bytes
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.types import Json, Model, Params, as_jit_argument
from grpo_jax.update.state import TrainState
from grpo_jax.watch.writer import read_settings

_RULES: dict[str, Resume | None] = {
    field.name: field.metadata.get("resume") for kind in (GRPOConfig, SFTConfig) for field in dataclasses.fields(kind)
}

_DERIVED = {"dtype", "remat", "remat_on_cpu", "initializer_range", "attention", "mesh", "float32_sums", "loop_layers"}
"""Fields of `TransformerConfig` that depend on the run's config and devices, or affect only initial weights."""


def with_saved_gradient_checkpointing(config: GRPOConfig, run_dir: str | Path | None) -> GRPOConfig:
    """Return the config, with `gradient_checkpointing=None` replaced by the value of the run in `run_dir`, if any."""
    # The `getattr` default covers an argument that is not a config, which `prepare` rejects.
    if run_dir is None or getattr(config, "gradient_checkpointing", False) is not None:
        return config
    with contextlib.suppress(OSError):  # reported later, when the directory is written to
        saved = read_settings(run_dir).get("config", {}).get("gradient_checkpointing")
        return dataclasses.replace(config, gradient_checkpointing=saved)
    return config


# The description of a run ---------------------------------------------------------------------------------------------


def run_identity(run: Run | SFTRun, state: TrainState) -> dict[str, Any]:
    """Return a run's description as a JSON object, to be compared on resume. Functions are listed by name."""
    config, sizes, custom_optimizer = run.config, run.config.sizes(), run.schedule is None
    warm_up_is_fixed = config.warmup_steps >= 1 or config.warmup_steps == 0 or config.lr_scheduler_type == "constant"
    return {
        "config": json.loads(json.dumps(config.to_dict())),
        "sizes": [sizes.prompts_per_iteration, sizes.prompts_per_update, sizes.updates_per_iteration],
        "total_steps": run.total_steps,
        "length_is_free": custom_optimizer or (config.lr_scheduler_type.startswith("constant") and warm_up_is_fixed),
        "dataset": _hash_prompts([run.data]),
        "evaluation": {
            **_hash_prompts(run.eval_datasets),
            "num_generations_eval": config.eval_generations,
            "temperature_eval": config.eval_temperature,
        },
        "functions": _function_names(run),
        "policy": {**_model_settings(run.policy.model), "eos_token_ids": list(run.eos_token_ids)},
        "frozen": fingerprint((as_jit_argument(run.policy.model), getattr(run.data.image_encoder, "params", None))),
        "optimizer": "the caller's" if custom_optimizer else "the config's",
        "sampler": "generate" if run.sampler is None else "the caller's",
        "teacher": _describe_teacher(run),
        "state": {
            jax.tree_util.keystr(path): f"{leaf.dtype.name}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        },
    }


def _hash_prompts(datasets: Iterable[EncodedPrompts]) -> Json:
    """Return the number of prompts in the datasets and a hash of their tokens, masks, blocks and images."""
    rows, tokens = 0, hashlib.sha256()
    for data in datasets:
        rows += len(data.token_ids)
        for ids in data.token_ids:
            tokens.update(array("q", [len(ids), *ids]).tobytes())
        for mask in data.masks or ():
            tokens.update(bytes(mask))
        for block in data.blocks or ():
            tokens.update(array("q", block).tobytes())
        for image in itertools.chain(*(data.images or ())):
            tokens.update(image_bytes(image))
    return {"rows": rows, "prompts": tokens.hexdigest()}


def _function_names(run: BaseRun) -> dict[str, list[str]]:
    """Return the names of the caller's functions, tools and environments for each argument to `train`."""
    advantage_fn = None if run.custom_advantages is None else run.custom_advantages.function
    kinds = {} if run.episode_setup is None else run.episode_setup.environment_classes
    return {
        "reward_fns": reward_names(run.reward_fns),
        "advantage_fn": [] if advantage_fn is None else [function_name(advantage_fn)],
        "surrogate": [] if run.updater.surrogate is None else [function_name(run.updater.surrogate)],
        "tools": [] if run.episode_setup is None else [*run.episode_setup.tools],
        "environment_factory": [x.__name__ if key is None else f"{key}: {x.__name__}" for key, x in kinds.items()],
    }


def _model_settings(model: Model) -> Json:
    """Return a model's settings except `_DERIVED`. The dict is empty for a custom model."""
    if not isinstance(model, Transformer | LoraModel):
        return {}
    lora = {"scale": model.scale, "dropout": model.dropout} if isinstance(model, LoraModel) else {}
    shape = dataclasses.asdict(dataclasses.replace(model.config, mesh=None))
    return json.loads(json.dumps({name: x for name, x in shape.items() if name not in _DERIVED} | lora))


def _describe_teacher(run: BaseRun) -> str:
    """Return a string that identifies the teacher: by its params, or by its class if it is a scorer."""
    if run.teacher_scoring is None:
        return "none"
    if run.teacher_scoring.local is None:
        return f"a scorer ({type(run.teacher_scoring.scorer).__name__})"
    return f"a policy (params {fingerprint(run.teacher_scoring.local)[:8]})"


def fingerprint(tree: Params) -> str:
    """Return one hash of up to 64 elements from the start of each array in the tree."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(fetch(leaf[(0,) * (leaf.ndim - 1)][:64] if leaf.ndim else leaf).tobytes())
    return digest.hexdigest()


# The comparison of two descriptions -----------------------------------------------------------------------------------


def differences(saved: Json, current: Json, step: int) -> list[str]:
    """Return a line per difference that prevents resuming from `step`. Settings in only one description are ignored."""
    current_class, saved_class = (config_class(identity["config"]).__name__ for identity in (current, saved))
    if current_class != saved_class:
        return [f"config: {current_class}, but the run has {saved_class}"]
    lines = [
        *_config_differences(saved, current, step),
        *(line for _, line in _changed_in_both(saved["functions"], current["functions"])),
        *_prompt_differences("dataset", saved["dataset"], current["dataset"]),
        *_evaluation_differences(saved, current),
        *_policy_differences(saved, current),
    ]
    # The settings above determine the state's arrays, so the arrays are compared only if nothing else differs.
    return lines or _state_differences(saved["state"], current["state"])


def _changed_in_both(old: Json, new: Json) -> Iterator[tuple[str, str]]:
    """Yield (name, line) for each name whose values differ. Names in only one dict are ignored."""
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield name, f"{name} = {show(new[name])}, but the run has {show(old[name])}"


def _config_differences(saved: Json, current: Json, step: int) -> Iterator[str]:
    """Yield a line for each changed setting that must not change."""
    config = current["config"]
    same_steps = saved["total_steps"] == current["total_steps"]
    for name, line in _changed_in_both(saved["config"], config):
        rule = _RULES.get(name)
        if rule == "free" or (rule == "to none" and config[name] == "none"):
            continue
        if rule == "rounding" and saved["sizes"] == current["sizes"]:
            continue
        if rule != "length":
            yield line
        elif not same_steps and not (saved["length_is_free"] and current["length_is_free"]):
            yield (
                f"{line}; the learning rates depend on the number of steps, unless they are constant after a warm-up of"
                f" a fixed number of steps (lr_scheduler_type = {show(config['lr_scheduler_type'])})"
            )
        elif current["total_steps"] < step:
            yield f"{line} and is already at step {step}"


def _prompt_differences(argument: str, old: Json, new: Json) -> Iterator[str]:
    """Yield a line if the prompts of a dataset differ."""
    if old["rows"] != new["rows"]:
        yield f"{argument}: {new['rows']} row{'s' * (new['rows'] != 1)}, but the run has {old['rows']}"
    elif old["prompts"] != new["prompts"]:
        yield f"{argument}: the prompts or their order differ from the saved run's (rows in both: {new['rows']})"


def _evaluation_differences(saved: Json, current: Json) -> Iterator[str]:
    """Yield a line for each difference in the evaluations that select the best checkpoint."""
    name = current["config"]["metric_for_best_model"]
    if name is None or not name.startswith("eval/") or saved["config"].get("metric_for_best_model") != name:
        return
    old, new = saved["evaluation"], current["evaluation"]
    settings = [line for name, line in _changed_in_both(old, new) if name not in ("rows", "prompts")]
    for line in (*_prompt_differences("eval_dataset", old, new), *settings):
        yield f"{line}; metric_for_best_model = {show(name)} requires all evaluations of the run to be comparable"


def _policy_differences(saved: Json, current: Json) -> Iterator[str]:
    """Yield a line for each difference in the optimizer, the sampler, the teacher and the policy."""
    for name in ("optimizer", "sampler", "teacher"):
        if (saved[name] or "none") != current[name]:
            yield f"{name}: {current[name]}, but the run has {saved[name] or 'none'}"
    if saved["frozen"] != current["frozen"]:
        yield "policy: the frozen base model or vision tower differs from the saved run's"
    old, new = (flatten_dict(identity["policy"], sep=".") for identity in (saved, current))
    for _, line in _changed_in_both(old, new):
        yield f"policy: {line}"


def _state_differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Describe up to three changed arrays of the state, params first. Returns [] if none changed."""
    paths = [path for path in sorted({*old, *new}) if old.get(path) != new.get(path)]
    paths.sort(key=lambda path: not path.startswith(".params"))
    arrays = [f"{x.lstrip('.')} {new.get(x, '(none)')} instead of {old.get(x, '(none)')}" for x in paths]
    return [f"state: its arrays differ from the run's: {shorten(arrays, 3)}"] if arrays else []
