"""Conversion of TRL configs: `GRPOConfig` (`from_trl`) and the YAML config for TRL's script (`from_trl_script`)."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from grpo_jax.compat.trl_fields import TRL_ONLY, TRL_VERSION
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import unknown_field
from grpo_jax.config.settings import OTHER_NAMES
from grpo_jax.messages import raise_all
from grpo_jax.types import Json

_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16", "auto": "auto"}
# Arguments to transformers' `from_pretrained` that affect only PyTorch.
_PYTORCH_KWARGS = "attn_implementation device_map use_cache low_cpu_mem_usage use_safetensors max_memory"
_STRATEGIES = ("eval_strategy", "save_strategy", "logging_strategy")
_CORRECTION = "vllm_importance_sampling_correction"
_SERVER = ("vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")


@dataclasses.dataclass
class Migration:
    """A converted TRL config: the equivalent settings, and notes on translated, omitted and unsupported fields.

    Attributes:
      values: dict that maps fields of `GRPOConfig` to their values.
      run_dir: `run_dir` argument to `train`, from `output_dir`.
      translated: dict that maps TRL's fields to the settings that replace them.
      left_out: dict that maps omitted TRL fields to a note on why they are not needed or where to set them instead.
      missing: dict that maps unsupported TRL fields to advice. If it is empty, the conversion is complete.
      dtype: dtype of the params for `from_pretrained`, from `model_init_kwargs`; see `policies.load_policy` for "auto".
      sampler: arguments to `engines.vllm` with `use_vllm=True, vllm_mode="server"`; None for the built-in sampler.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    run_dir: str | None = None
    translated: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    dtype: str | None = None
    sampler: dict[str, Any] | None = None

    def config(self) -> GRPOConfig:
        """Build a `GRPOConfig` from `values`. Raises ValueError if a value is invalid."""
        return GRPOConfig.from_dict(self.values)

    def notes(self) -> list[str]:
        """Return the notes on translated, omitted and unsupported fields, one per line."""
        lines: list[str] = []
        for title, notes in (
            ("translated", self.translated),
            ("left out", self.left_out),
            ("NOT SUPPORTED", self.missing),
        ):
            lines += [f"{title}:"] * bool(notes) + [f"  {name}: {note}" for name, note in notes.items()]
        return lines

    def set_field(self, trl_name: str, name: str, value: object, note: str = "") -> None:
        """Set the `GRPOConfig` field `name`, and add a note on TRL's field `trl_name`."""
        self.values[name] = value
        self.translated[trl_name] = note or f"{name}={value!r}"


def from_trl(values: Json) -> Migration:
    """Convert the fields of TRL's `GRPOConfig`, as passed to its constructor or returned by its `to_dict()`.

    Fields that both configs have are copied. Other fields that differ from TRL's default are translated or listed
    in the notes. Raises ValueError if a name is a field of neither TRL's `GRPOConfig` nor `grpo_jax.GRPOConfig`.

    Example:
      >>> moved = from_trl({"output_dir": "out", "beta": 0.04, "bf16": True, "use_vllm": True, "hub_token": "hf_"})
      >>> moved.values, moved.run_dir, list(moved.left_out), list(moved.missing)
      ({'beta': 0.04, 'compute_dtype': 'bfloat16'}, 'out', ['use_vllm'], ['hub_token'])
    """
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    known = {*fields, *TRL_ONLY, "warmup_ratio"}  # transformers 4 has this field
    unknown = [unknown_field(name, known, OTHER_NAMES) for name in values if name not in known]
    raise_all(f"GRPOConfig (TRL {TRL_VERSION} or grpo_jax)", unknown)
    migration = Migration({name: value for name, value in values.items() if name in fields})
    for name, value in values.items():
        if name in TRL_ONLY:
            _translate(migration, name, value, values)
    if values.get("warmup_ratio"):
        migration.set_field("warmup_ratio", "warmup_steps", values["warmup_ratio"])
    _translate_evaluation(migration, values)
    _translate_server(migration, values)
    if values.get(_CORRECTION, True) is False and "sampler_correction" not in values:
        migration.set_field(_CORRECTION, "sampler_correction", None)
    if None not in (values.get("generation_batch_size"), values.get("steps_per_generation")):
        del migration.values["generation_batch_size"]  # `to_dict()` returns both; one is derived from the other
    return migration


def _translate(migration: Migration, name: str, value: Any, values: Json) -> None:
    """Translate a TRL field that `grpo_jax.GRPOConfig` does not have, or add a note on it."""
    default, kind, advice, field = TRL_ONLY[name]
    if value and _translate_value(migration, name, value):
        return
    if value in (default, "<HUB_TOKEN>") or name in _SERVER or name == _CORRECTION:
        return  # `to_dict()` writes <HUB_TOKEN> for the token; `from_trl` translates _SERVER and _CORRECTION
    if field:
        if field not in values:
            migration.set_field(name, field, value)
    elif value or default:  # all empty values, such as None and {}, are equivalent
        notes = migration.left_out if kind in ("not needed", "set outside") else migration.missing
        notes[name] = advice


def _translate_value(migration: Migration, name: str, value: Any) -> bool:
    """Translate a field whose replacement depends on its value. Returns False for other fields."""
    match name:
        case "output_dir":
            migration.run_dir = str(value)
            migration.translated[name] = f"run_dir={str(value)!r} in train"
        case "bf16":
            migration.set_field(name, "compute_dtype", "bfloat16", 'compute_dtype="bfloat16"')
        case "fp16":
            migration.translated[name] = 'compute_dtype="auto", since float16 is not supported'
        case "optim":
            if value not in ("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw"):
                migration.missing[name] = f"{value!r}: pass an optax transformation to train as optimizer"
        case "model_init_kwargs":
            _translate_model(migration, name, json.loads(value) if isinstance(value, str) else value)
        case name if name in _STRATEGIES:
            _translate_strategy(migration, name, value)
        case _:
            return False
    return True


def _translate_strategy(migration: Migration, name: str, value: object) -> None:
    steps = name.replace("strategy", "steps")
    if value == "steps":
        return
    if value != "no":
        migration.missing[name] = f'{value!r}: only "steps" is supported; set {steps} to a number of steps'
    elif name == "logging_strategy":
        migration.missing[name] = "logging cannot be disabled; set logging_steps to a larger number to log less often"
    elif name == "save_strategy":
        migration.set_field(name, steps, None, f"{steps}=None: only the last checkpoint is kept")
    elif migration.values.get(steps) is not None:  # "no" is TRL's default, and disables eval_steps
        migration.set_field(name, steps, None)


def _translate_model(migration: Migration, name: str, value: Json) -> None:
    kwargs = {key: x for key, x in value.items() if x not in (None, False)}
    dtype_name = str(kwargs.pop("dtype", kwargs.pop("torch_dtype", None))).removeprefix("torch.")
    migration.dtype = _DTYPES.get(dtype_name)
    if migration.dtype is not None:
        migration.translated[name] = f'dtype="{migration.dtype}" in from_pretrained'
    elif dtype_name != "None":
        migration.missing[name] = f"dtype {dtype_name!r}: use float32, bfloat16 or auto"
    if dtype_name == "bfloat16":  # PyTorch computes in the dtype of the params, regardless of the bf16 field
        migration.values["compute_dtype"] = "bfloat16"
    if unknown := sorted(kwargs.keys() - _PYTORCH_KWARGS.split()):
        migration.missing[name] = f"{', '.join(unknown)}: only dtype is supported; pass a policy from from_pretrained"


def _translate_evaluation(migration: Migration, values: Json) -> None:
    evaluates = values.get("eval_strategy") == "steps"
    if evaluates and migration.values.get("eval_steps") is None:
        steps = migration.values.get("logging_steps", GRPOConfig.logging_steps)
        migration.set_field("eval_strategy", "eval_steps", steps, f"eval_steps={steps}, from logging_steps")
    field = "metric_for_best_model"
    name = migration.values.get(field)
    # If `metric_for_best_model` and `greater_is_better` are unset, `to_dict()` returns "loss" and False for them.
    unset = name is None or (name == "loss" and migration.values.get("greater_is_better") is False)
    if values.get("load_best_model_at_end") and unset:
        migration.values.pop("greater_is_better", None)
        migration.set_field(field, field, "eval/reward", '"eval/reward", instead of the evaluation loss')
    elif isinstance(name, str) and (name.startswith("eval_") or evaluates):
        # With several evaluation datasets, the dataset's name is a prefix.
        pattern = r"(?:eval_)?(?:(.+?)_)?(?:rewards/(.+)/mean|completions/(mean_length|clipped_ratio)|(reward))"
        if match := re.fullmatch(pattern, name):
            metric = "/".join(["eval", *filter(None, match.groups())])
            migration.set_field(field, field, metric, f'"{metric}"')
        elif name.startswith("eval_") or name == "loss":
            migration.missing[field] = f"{name!r} is not logged here; use eval_reward or eval_rewards/<function>/mean"


def _translate_server(migration: Migration, values: Json) -> None:
    """Translate the settings of a vLLM server. As in TRL, they have no effect without `use_vllm`."""
    mode, url, host, port, seconds = (values.get(name) or TRL_ONLY[name].default for name in _SERVER)
    if values.get("use_vllm") and mode == "server":
        url = url or f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        migration.sampler = {"base_url": url, "patience": float(str(seconds))}
        del migration.left_out["use_vllm"]
        migration.translated["use_vllm"] = f"sampler=engines.vllm({url!r}, patience={float(str(seconds)):g}) in train"


# TRL's script ---------------------------------------------------------------------------------------------------------

# Arguments to TRL's script and fields of its `ModelConfig` that are translated below, and notes on all others.
_TRANSLATED = (
    "reward_funcs dataset_name dataset_config dataset_train_split dataset_test_split model_name_or_path torch_dtype"
    " dtype use_peft lora_r lora_alpha lora_dropout lora_target_modules load_in_8bit load_in_4bit bnb_4bit_quant_type"
)
_NOT_NEEDED = {
    "attn_implementation": "the attention implementation is selected for the device",
    "trust_remote_code": "model architectures are implemented in this library",
    "lora_task_type": "only causal language models are supported",
    "use_bnb_nested_quant": "NF4 always uses double quantization",
    "bnb_4bit_quant_storage": "4-bit weights are always packed",
    "ignore_bias_buffers": "models do not have buffers",
    "env": "set the environment variables before the run",
}
_MISSING = {
    "reward_model_name_or_path": "use a reward function that calls the reward model; see docs/rewards.md",
    "lora_modules_to_save": "only adapters are trained; remove it",
    "use_rslora": "multiply lora_alpha by the square root of lora_r",
    "use_dora": "DoRA is not supported",
    "lora_target_parameters": "only projections can have adapters; list them in lora_target_modules",
    "model_revision": "download the revision and pass its directory",
    "dataset_streaming": "streaming is not supported; all rows are read before the run",
    "datasets": "write a function that returns the rows from all datasets, and set data to module:function",
}
_REWARDS: dict[str, Json] = {
    "think_format_reward": {"format_reward": r"<think>(?!.*<think>).*?</think>.*"},
    # TRL's script calls the function with these arguments.
    "get_soft_overlong_punishment": {
        "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}
    },
    "accuracy_reward": {"formula_reward": "solution"},
}


def from_trl_script(values: Json) -> tuple[dict[str, object], Migration]:
    """Convert the YAML config of TRL's GRPO script. Returns the content of a RUN.yaml and a `Migration`.

    `values` may contain arguments to the script and fields of `ModelConfig` and `GRPOConfig`. The `Migration` has notes
    on the ones that are omitted or unsupported. Raises ValueError if a name is unknown or a value is invalid.
    """
    # PyYAML, which TRL uses, parses an unquoted yes, no, on or off as a bool.
    words = {"yes": True, "on": True, "no": False, "off": False}
    values = {name: words.get(str(value).lower(), value) for name, value in values.items()}
    values |= {name: "no" for name in _STRATEGIES if values.get(name) is False}
    names = {*_TRANSLATED.split(), *_NOT_NEEDED, *_MISSING}
    script = {name: values.pop(name) for name in list(values) if name in names}
    migration = from_trl(values)
    present = {name for name, value in script.items() if value not in (None, False, "", [])}
    migration.missing |= {name: note for name, note in _MISSING.items() if name in present}
    migration.left_out |= {name: note for name, note in _NOT_NEEDED.items() if name in present}
    dtype = str(script.get("dtype") or script.get("torch_dtype") or migration.dtype or "float32").removeprefix("torch.")
    run: dict[str, object] = {
        "model": script.get("model_name_or_path"),
        **_data(script, evaluates=values.get("eval_strategy", "no") != "no"),
        "rewards": _rewards(script["reward_funcs"], migration.missing) if script.get("reward_funcs") else None,
        "lora": _lora(script, migration.missing) if script.get("use_peft") else None,
        "quantize": _quantize(script, migration.missing),
        "param_dtype": "bfloat16" if dtype in ("bfloat16", "float16") else None,
        "run_dir": migration.run_dir,
        "sampler": migration.sampler and {"vllm": migration.sampler},
    }
    config = migration.config().to_dict()
    run = {name: x for name, x in run.items() if x is not None}
    return run | {name: config[name] for name in migration.values}, migration


def _data(script: Json, *, evaluates: bool) -> dict[str, object]:
    """Return `data`, and `eval_data` if `evaluates`. As in TRL, the default split for evaluation is "test"."""
    name = script.get("dataset_name")
    if name is None:
        return {}
    config = {"config": script["dataset_config"]} if script.get("dataset_config") else {}
    data: dict[str, object] = {"data": {"name": name, **config, "split": script.get("dataset_train_split", "train")}}
    if evaluates:
        data["eval_data"] = {"name": name, **config, "split": script.get("dataset_test_split", "test")}
    return data


def _rewards(names: str | list[str], missing: dict[str, str]) -> list[str | Json]:
    """Convert names of TRL's reward functions and dotted function paths to entries for `rewards`."""
    entries: list[str | Json] = []
    for name in [names] if isinstance(names, str) else names:
        if name in _REWARDS:
            entries.append(_REWARDS[name])
        elif "." in name:
            entries.append(":".join(name.rsplit(".", 1)))
        else:
            missing[f"reward_funcs, {name}"] = "add a reward function as module:function"
    return entries


def _quantize(script: Json, missing: dict[str, str]) -> str | None:
    for bits, method in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if script.get(bits):
            if not script.get("use_peft"):
                missing[bits] = "quantized weights cannot be trained; set use_peft to train adapters"
                return None
            if method == "nf4" and script.get("bnb_4bit_quant_type", "nf4") != "nf4":
                missing["bnb_4bit_quant_type"] = f"{script['bnb_4bit_quant_type']!r}: only nf4 is supported"
            return method
    return None


def _lora(script: Json, missing: dict[str, str]) -> dict[str, object]:
    lora: dict[str, object] = {"rank": script.get("lora_r", 16), "alpha": float(script.get("lora_alpha", 32))}
    lora["dropout"] = float(script.get("lora_dropout", 0.05))
    targets = script.get("lora_target_modules")
    targets = [targets] if isinstance(targets, str) else targets
    if targets and any(re.search(r"[^\w.-]", name) for name in targets):
        missing["lora_target_modules"] = (
            f"{targets} is a regular expression for PyTorch's names; set lora.targets to a regular expression for"
            " full paths such as layers_0/self_attn/q_proj"
        )
    elif targets and [name.lower() for name in targets] != ["all-linear"]:
        lora["targets"] = rf"(.*/)?({'|'.join(targets).replace('.', '/')})"
    elif targets is None:
        note = "by default, all projections get adapters, but PEFT selects them by model family; list the projections"
        missing["lora_target_modules"] = note
    return lora
