"""The YAML config of TRL's GRPO script as the keys of a RUN.yaml, for `grpo-jax from-trl`."""

from __future__ import annotations

from typing import Any

from grpo_jax.compat.migrate import Migration, from_trl
from grpo_jax.types import Json

# Arguments of TRL's script and of its ModelConfig that are translated below.
_TRANSLATED = (
    "reward_funcs dataset_name dataset_config dataset_train_split dataset_test_split model_name_or_path torch_dtype"
    " dtype use_peft lora_r lora_alpha lora_dropout lora_target_modules load_in_8bit load_in_4bit bnb_4bit_quant_type"
)
_NOT_NEEDED = {
    "attn_implementation": "attention is chosen by the device",
    "trust_remote_code": "the families of checkpoints are implemented here",
    "lora_task_type": "there is one task",
    "use_bnb_nested_quant": "the scales of NF4 are quantized too",
    "bnb_4bit_quant_storage": "4 bits are stored as such",
    "ignore_bias_buffers": "params are an argument; a model has no buffers",
}
_MISSING = {
    "reward_model_name_or_path": "a reward model is a reward function that calls it; docs/recipes.md has one",
    "lora_modules_to_save": "only the adapters are trained",
    "use_rslora": "give alpha times the root of the rank",
    "use_dora": "plain low-rank adapters only",
    "lora_target_parameters": "adapters are on projections; name those in lora_target_modules",
    "model_revision": "download that revision, and give its directory",
    "dataset_streaming": "the rows are read to their end before the run",
    "datasets": "a mixture of datasets is a function that returns rows: data: module:function",
}
_NUMBERS = {"number_reward": "solution"}
_REWARDS: dict[str, dict[str, Any]] = {
    "think_format_reward": {"format_reward": r"<think>(?!.*<think>).*?</think>.*"},
    # With the values of TRL's script.
    "get_soft_overlong_punishment": {
        "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}
    },
    "accuracy_reward": _NUMBERS,
    "reasoning_accuracy_reward": _NUMBERS,
}


def from_trl_script(values: Json) -> tuple[dict[str, Any], Migration]:
    """Translate the YAML config of TRL's GRPO script into the keys of a RUN.yaml.

    Args:
      values: of the file: arguments of the script, of its `ModelConfig` and of `GRPOConfig`.

    Returns:
      The keys and values of the run, and a `Migration` whose notes cover the script's arguments too.

    Raises:
      ValueError: names that neither TRL nor this library has, all of them, or values that are not accepted.
    """
    # PyYAML, by which TRL reads files, takes an unquoted no for False.
    values = {name: "no" if name == "eval_strategy" and value is False else value for name, value in values.items()}
    of_script = {*_TRANSLATED.split(), *_NOT_NEEDED, *_MISSING}
    script = {name: value for name, value in values.items() if name in of_script}
    moved = from_trl({name: value for name, value in values.items() if name not in script})
    for name, value in script.items():
        if value not in (None, False, "", []):
            moved.missing |= {name: _MISSING[name]} if name in _MISSING else {}
            moved.left_out |= {name: _NOT_NEEDED[name]} if name in _NOT_NEEDED else {}
    run: dict[str, Any] = {}
    if "model_name_or_path" in script:
        run["model"] = script["model_name_or_path"]
    run |= _data(script, moved.left_out, evaluates=values.get("eval_strategy", "no") != "no")
    if script.get("reward_funcs"):
        run["rewards"] = _rewards(script["reward_funcs"], moved.missing)
    if script.get("use_peft"):
        run["lora"] = _lora(script, moved.missing)
    run |= _quantized(script, moved.missing)
    dtype = str(script.get("dtype") or script.get("torch_dtype") or moved.dtype or "float32").removeprefix("torch.")
    if dtype in ("bfloat16", "float16"):
        run["param_dtype"] = "bfloat16"
    if moved.run_dir is not None:
        run["run_dir"] = moved.run_dir
    run |= {} if moved.sampler is None else {"sampler": {"vllm": moved.sampler._asdict()}}
    config = moved.config().to_dict()
    return run | {name: config[name] for name in moved.values}, moved


def _data(script: Json, left_out: dict[str, str], *, evaluates: bool) -> dict[str, Any]:
    """Return the keys of the data; TRL evaluates on the split "test" of the same dataset."""
    name = script.get("dataset_name")
    if name is None:
        return {}
    config = {"config": script["dataset_config"]} if script.get("dataset_config") else {}
    train = {"name": name, **config, "split": script.get("dataset_train_split", "train")}
    data: dict[str, Any] = {"data": name if train == {"name": name, "split": "train"} else train}
    if evaluates:
        data["eval_data"] = {"name": name, **config, "split": script.get("dataset_test_split", "test")}
    elif "dataset_test_split" in script:
        left_out["dataset_test_split"] = "eval_strategy is 'no', as it is by default: nothing is evaluated"
    return data


def _rewards(names: str | list[str], missing: dict[str, str]) -> list[Any]:
    """Return entries of `rewards` for names of TRL's, and for functions by their dotted paths."""
    entries: list[Any] = []
    for name in [names] if isinstance(names, str) else names:
        if name in _REWARDS:
            entries.append(_REWARDS[name])
        elif "." in name:
            entries.append(":".join(name.rsplit(".", 1)))
        else:
            missing[f"reward_funcs, {name}"] = "name a function of your own, as module:function"
        if _REWARDS.get(name) is _NUMBERS:
            missing[f"reward_funcs, {name}"] = (
                "TRL's verifies LaTeX by math_verify; number_reward, which replaces it, compares numbers"
            )
    return entries


def _quantized(script: Json, missing: dict[str, str]) -> dict[str, Any]:
    """Return how the base under adapters is quantized."""
    bits = next((name for name in ("load_in_4bit", "load_in_8bit") if script.get(name)), None)
    if bits is None:
        return {}
    if not script.get("use_peft"):
        missing[bits] = "quantized weights are not trained: with use_peft adapters are trained on them"
        return {}
    kind = script.get("bnb_4bit_quant_type", "nf4")
    if bits == "load_in_4bit" and kind != "nf4":
        missing["bnb_4bit_quant_type"] = f"{kind!r}: 4 bits are held as nf4"
    return {"quantize": "nf4" if bits == "load_in_4bit" else "int8"}


def _lora(script: Json, missing: dict[str, str]) -> dict[str, Any]:
    """Return the adapters, with the defaults of TRL's `ModelConfig`."""
    lora: dict[str, Any] = {"rank": script.get("lora_r", 16), "alpha": float(script.get("lora_alpha", 32))}
    lora["dropout"] = float(script.get("lora_dropout", 0.05))
    targets = script.get("lora_target_modules")
    targets = [targets] if isinstance(targets, str) else targets
    if targets and targets != ["all-linear"]:
        lora["targets"] = rf"layers_\d+/\w+/({'|'.join(targets)})"
    elif targets is None:
        missing["lora_target_modules"] = (
            "PEFT chooses projections by the family of the model, and here all are adapted; name them to be sure"
        )
    return lora
