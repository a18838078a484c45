"""Translation of TRL's `GRPOConfig`: what carries over, what says the rest here, and what is missing."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, NamedTuple

from grpo_jax.compat.trl_fields import ELSEWHERE, SAME, TRL_VERSION
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import unknown_field
from grpo_jax.config.settings import OTHER_NAMES
from grpo_jax.messages import raise_all
from grpo_jax.types import Json

_STEPS = {"eval_strategy": "eval_steps", "save_strategy": "save_steps", "logging_strategy": "logging_steps"}
# Arguments that say how PyTorch lays a model out and runs it: here otherwise, or not at all.
_PYTORCH_KWARGS = {
    "attn_implementation",
    "device_map",
    "use_cache",
    "low_cpu_mem_usage",
    "use_safetensors",
    "max_memory",
}
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16", "auto": "auto"}
_VLLM = "vllm_importance_sampling_"
_CORRECTION = {
    "correction": "sampler_correction",
    "mode": "sampler_correction",
    "clip_max": "sampler_correction_max",
    "clip_min": "sampler_correction_min",
    "cap": "sampler_correction_max",
}
_SERVER = "vllm_server_"
# Arguments of transformers' and vLLM's sampling that fields here say too.
_GENERATION = {
    "stop_strings": "stop",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p")},
}
# The values beside TRL's default that ask for nothing here, such as those of a dump.
_NOTHING: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(_STEPS, ("steps",)),
    "bf16": (None, False),
    "model_init_kwargs": (None, {}),
    "generation_kwargs": (None, {}),
    "trackio_static_space_id": (None, False),
    "optim": ("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw"),
    "include_for_metrics": (None, [], ()),
    "include_num_input_tokens_seen": ("no", False, True, "all", "non_padding"),
    "fsdp": (None, False, "", []),
    "fsdp_config": (None, {}),
    "debug": ("", []),
    "hub_token": (None, "<HUB_TOKEN>"),  # what a dump shows in the place of any
    "train_sampling_strategy": ("random", None),
}


class VLLMServer(NamedTuple):
    """A server that samples: arguments of `engines.vllm`."""

    base_url: str
    patience: float


@dataclasses.dataclass
class Migration:
    """A TRL config, translated: the fields that carry over, and a note on each of the others.

    Attributes:
      values: fields for `GRPOConfig`.
      run_dir: for `train`, of `output_dir`; None where there was none.
      same: names of the fields that were taken as they are.
      translated: name → what it became.
      left_out: name → why it is not needed, or what sets it from outside.
      missing: name → why there is no such thing here, and what to do; empty where the run will be the same.
      dtype: of the params, for `from_pretrained`, of `model_init_kwargs`; "auto": that of the checkpoint; None where
        there was none.
      sampler: the server of `use_vllm` with the mode "server"; None: the built-in sampler.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    run_dir: str | None = None
    same: list[str] = dataclasses.field(default_factory=list)
    translated: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    dtype: str | None = None
    sampler: VLLMServer | None = None

    def config(self) -> GRPOConfig:
        """Return the config of the fields that carry over.

        Raises:
          ValueError: a value that `GRPOConfig` does not take, such as another scheduler.
        """
        return GRPOConfig.from_dict(self.values)

    def __str__(self) -> str:
        same = [f"taken as they are: {', '.join(self.same)}"] if self.same else []
        return "\n".join(same + self.notes()) or "nothing to carry over: every value is TRL's default"

    def notes(self) -> list[str]:
        """Return the lines on the fields that were translated, were left out, or are missing."""
        lines: list[str] = []
        for title, notes in (("translated", self.translated), ("left out", self.left_out), ("NOT HERE", self.missing)):
            lines += [f"{title}:"] * bool(notes) + [f"  {name}: {note}" for name, note in notes.items()]
        return lines


def from_trl(values: Json) -> Migration:
    """Translate the fields of a TRL GRPO config.

    Args:
      values: names and values, as they stand in a script's `GRPOConfig(...)` or in its `to_dict()`.

    Returns:
      A `Migration`; nothing is dropped without a word, but for values that are TRL's defaults.

    Raises:
      ValueError: names that neither TRL nor this library has, all of them.

    Example:
      >>> moved = from_trl({"output_dir": "out", "beta": 0.04, "bf16": True, "use_vllm": True, "hub_token": "hf_"})
      >>> moved.values, moved.run_dir, list(moved.left_out), list(moved.missing)
      ({'beta': 0.04, 'compute_dtype': 'bfloat16'}, 'out', ['use_vllm'], ['hub_token'])
    """
    ours = {field.name for field in dataclasses.fields(GRPOConfig)}
    known = {*ours, *ELSEWHERE}
    unknown = [unknown_field(name, known, OTHER_NAMES) for name in values if name not in known]
    raise_all(f"GRPOConfig (of TRL {TRL_VERSION} or grpo_jax)", unknown)
    moved = Migration({name: value for name, value in values.items() if name in ours})
    moved.same = list(moved.values)
    for name, value in values.items():
        if name in ELSEWHERE:
            _translate(moved, name, value)
    _translate_evaluation(moved, values)
    _translate_correction(moved, values)
    _translate_server(moved, values)
    if None not in (values.get("generation_batch_size"), values.get("steps_per_generation")):
        del moved.values["generation_batch_size"]  # TRL takes one of the two and derives the other: this is a dump
        moved.same.remove("generation_batch_size")
    return moved


def _translate(moved: Migration, name: str, value: Any) -> None:
    """Translate or note one field that is none here."""
    default, kind, advice = ELSEWHERE[name]
    if name == "output_dir" and value is not None:
        moved.run_dir = str(value)
        moved.translated[name] = f"run_dir={str(value)!r} of train"
    elif name in ("bf16", "fp16") and value:
        moved.values["compute_dtype"] = "bfloat16"
        moved.translated[name] = 'compute_dtype="bfloat16"' + " (there is no float16)" * (name == "fp16")
    elif name in _KEYWORDS and value:
        _KEYWORDS[name](moved, json.loads(value) if isinstance(value, str) else value)
    elif name in _STEPS and (value == "no" or value not in ("steps", default)):
        _translate_strategy(moved, name, value)
    elif name == "activation_checkpointing" and value is not None:
        moved.values["gradient_checkpointing"] = bool(value)
        moved.translated[name] = f"gradient_checkpointing={bool(value)}"
    elif name == "optim" and value not in _NOTHING["optim"]:
        moved.missing[name] = f"{value!r}: pass optimizer to train, an optax transformation; else it is AdamW"
    elif value == default or value in _NOTHING.get(name, ()) or name.removeprefix(_VLLM) in _CORRECTION:
        pass
    elif name == "vllm_mode" or name.startswith(_SERVER):
        pass  # all of them together, by _translate_server
    elif kind == "not here":
        moved.missing[name] = advice
    else:
        notes = moved.missing if kind == "other name" else moved.left_out
        notes[name] = advice.removeprefix("leave it out: ")


def _translate_strategy(moved: Migration, name: str, value: object) -> None:
    """Note when there is a line of metrics, an evaluation or a checkpoint, where it is not simply by steps."""
    steps = _STEPS[name]
    if value != "no":
        moved.missing[name] = f"{value!r} counts otherwise than by steps: give {steps} a number of them"
    elif name == "logging_strategy":
        moved.missing[name] = "metrics are logged always; logging_steps says how often"
    # TRL's default of eval_strategy: eval_steps count for nothing then. A run saves unless it is told not to.
    elif name == "save_strategy" or moved.values.get(steps) is not None:
        moved.values[steps] = None
        moved.translated[name] = f"{steps}=None" + ": one checkpoint stays, that of the end" * (name == "save_strategy")
        if steps in moved.same:
            moved.same.remove(steps)


def _translate_model(moved: Migration, kwargs: Json) -> None:
    """Translate the arguments of `from_pretrained` in transformers: the dtype, and those that only PyTorch has."""
    name, kwargs = "model_init_kwargs", {key: value for key, value in kwargs.items() if value not in (None, False)}
    asked = str(kwargs.pop("dtype", kwargs.get("torch_dtype"))).removeprefix("torch.")
    kwargs.pop("torch_dtype", None)
    moved.dtype = dtype = _DTYPES.get(asked)
    if dtype is None and asked != "None":
        moved.missing[name] = f"dtype {asked!r}: use float32, bfloat16 or auto"
    if dtype is not None:
        moved.translated[name] = f'dtype="{dtype}" of from_pretrained' + " (no float16)" * (asked == "float16")
    if dtype == "bfloat16":  # PyTorch computes in the dtype of the params, whatever bf16 says
        moved.values["compute_dtype"] = dtype
    unknown = sorted(set(kwargs) - _PYTORCH_KWARGS)
    if unknown:
        moved.missing[name] = f"{', '.join(unknown)}: from_pretrained takes dtype, param_dtype and mesh"
    elif kwargs:
        moved.left_out[name] = f"{', '.join(sorted(kwargs))}: how a model is run, PyTorch's part of it"


def _translate_generation(moved: Migration, kwargs: Json) -> None:
    """Translate further arguments of transformers' or vLLM's sampling, which override the fields of those names."""
    name, asked = "generation_kwargs", {key: value for key, value in kwargs.items() if value is not None}
    taken = {_GENERATION[key]: value for key, value in asked.items() if key in _GENERATION}
    nothing = {"do_sample": True, "repetition_penalty": 1.0}
    other = sorted(key for key, value in asked.items() if key not in _GENERATION and nothing.get(key) != value)
    moved.values |= taken
    moved.same = [field for field in moved.same if field not in taken]
    if taken:
        moved.translated[name] = ", ".join(f"{field}={value!r}" for field, value in taken.items())
    if "repetition_penalty" in other:
        moved.missing["repetition_penalty"] = ELSEWHERE["repetition_penalty"].advice
        other.remove("repetition_penalty")
    if other:
        moved.missing[name] = f"{', '.join(other)}: {ELSEWHERE[name].advice}"


_KEYWORDS = {"model_init_kwargs": _translate_model, "generation_kwargs": _translate_generation}
"""Fields that are dicts of keywords, or JSON texts of them."""


def _translate_evaluation(moved: Migration, values: Json) -> None:
    """Give evaluations the steps and the names that they have in TRL."""
    evaluates = values.get("eval_strategy") == "steps"
    if evaluates and moved.values.get("eval_steps") is None:
        moved.values["eval_steps"] = moved.values.get("logging_steps", GRPOConfig.logging_steps)
        moved.translated["eval_strategy"] = f"eval_steps={moved.values['eval_steps']}, of logging_steps"
    name = "metric_for_best_model"
    best = moved.values.get(name)
    # A dump has the loss and False, which transformers fills in where neither was set.
    unset = best is None or (best == "loss" and moved.values.get("greater_is_better") is False)
    if values.get("load_best_model_at_end") and unset:
        for one in (name, "greater_is_better"):
            if moved.values.pop(one, None) is not None:
                moved.same.remove(one)
        moved.values[name] = "eval/reward"
        moved.translated[name] = '"eval/reward", where transformers takes the loss of an evaluation'
        return
    if not isinstance(best, str) or not (best.startswith("eval_") or evaluates):
        return
    plain = best.removeprefix("eval_")
    found = re.fullmatch(r"rewards/(.+)/mean|completions/(mean_length|clipped_ratio)|(reward)", plain)
    if found is None and (plain != best or plain == "loss"):
        moved.missing[name] = f"{best!r}: evaluations measure rewards; name eval_reward or eval_rewards/<function>/mean"
    if found is None:
        return
    ours = f"eval/{next(filter(None, found.groups()))}"
    moved.values[name] = ours
    moved.translated[name] = f'"{ours}"'
    moved.same.remove(name)


def _translate_correction(moved: Migration, values: Json) -> None:
    """Give the correction for vLLM the names that the one for a `sampler` has."""
    of = {name: values.get(f"{_VLLM}{name}", ELSEWHERE[f"{_VLLM}{name}"].default) for name in _CORRECTION}
    # The cap is the older name, and where it is set it is what TRL takes.
    high = of["clip_max"] if of["cap"] is None else of["cap"]
    ours = {
        "sampler_correction": of["mode"] if of["correction"] else None,
        "sampler_correction_max": high,
        "sampler_correction_min": of["clip_min"],
    }
    for name, ours_name in _CORRECTION.items():
        if of[name] != ELSEWHERE[f"{_VLLM}{name}"].default and ours_name not in values:
            moved.values[ours_name] = ours[ours_name]
            moved.translated[f"{_VLLM}{name}"] = f"{ours_name}={ours[ours_name]!r}"


def _translate_server(moved: Migration, values: Json) -> None:
    """Make a sampler of the settings of a vLLM server; without `use_vllm` they mean nothing, as in TRL."""
    settings: Json = {name: ELSEWHERE[name].default for name in ELSEWHERE if name.startswith(("vllm_mode", _SERVER))}
    asked = {name: values[name] for name in settings if values.get(name) not in (None, settings[name])}
    settings = {**settings, **asked}
    mode = settings["vllm_mode"]
    if not values.get("use_vllm"):
        moved.left_out |= dict.fromkeys(asked, "use_vllm is False")
    elif mode == "colocate":
        moved.left_out |= dict.fromkeys(asked, f'vllm_mode is {mode!r}: "server" lets a server of vLLM sample')
    elif mode != "server":
        moved.missing["vllm_mode"] = f'{mode!r}: "server" names a server of vLLM; else the built-in sampler samples'
    else:
        host = "127.0.0.1" if settings["vllm_server_host"] == "0.0.0.0" else settings["vllm_server_host"]
        url = settings["vllm_server_base_url"] or f"http://{host}:{settings['vllm_server_port']}"
        moved.sampler = VLLMServer(url, float(settings["vllm_server_timeout"]))
        del moved.left_out["use_vllm"]
        moved.translated["use_vllm"] = f"sampler=engines.vllm({url!r}, patience={moved.sampler.patience:g}) of train"


def field_table() -> str:
    """Return the table of `docs/coming_from_trl.md`: every field of TRL's, and its place here.

    Example:
      >>> field_table().splitlines()[2]
      '| `num_generations` | same |  |'
    """
    rows = [(name, "same", note) for name, note in SAME.items()]
    rows += [(name, kind, advice.removeprefix("leave it out: ")) for name, (_, kind, advice) in ELSEWHERE.items()]
    return "\n".join(["| TRL's field | here | |", "|---|---|---|", *(f"| `{a}` | {b} | {c} |" for a, b, c in rows)])
