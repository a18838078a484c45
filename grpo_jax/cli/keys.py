"""The keys of a RUN.yaml: keys that describe the run, and the fields of `GRPOConfig`, with their groups."""

import dataclasses
import re
from pathlib import Path

from grpo_jax.config import config, settings
from grpo_jax.config.config import GRPOConfig

RUN_KEYS = {
    "model": "a name on the hub, a directory, or `module:function` that returns one of these or a Policy",
    "data": "a file (.jsonl, .csv, .parquet), the name of a dataset on the hub, `module:name` for a list of rows or a "
    "function that returns one, a mapping with `path` or `name` and optionally `config`, `split` and `rows` (the "
    "number of leading rows to use), or a suite of tasks such as `{reasoning_gym: chain_sum, size: 2000, seed: 1}`",
    "eval_data": "data for evaluations before the first step, every `eval_steps` steps, and at the end; see `data`",
    "columns": "a mapping that renames columns: `{answer: solution}` renames `solution` to `answer`, and "
    "`{answer: reward_model.ground_truth}` extracts a nested column",
    "prompt": "a template for the prompts: a string or a list of messages, in which `{question}` is replaced with the "
    "row's column `question`",
    "rewards": "a list of reward functions: `module:function`, `file.py:function` or the name of a built-in function; "
    "`{number_reward: answer}` calls a function with arguments and uses the reward function that it returns; `suite`, "
    "the default for a suite of tasks, is replaced with the suite's reward functions",
    "stages": "`[sft, grpo]` for SFT followed by GRPO, or `[sft]` alone (default `[grpo]`)",
    "sft": "a mapping for the SFT stage: fields of `SFTConfig`, and its `data`, `eval_data`, `columns` and `prompt`",
    "tools": "a list of functions that the policy can call, as `module:function`",
    "environment_factory": "`module:name` for a factory that creates an environment for each completion",
    "sampler": "an engine that replaces the built-in sampler: `{vllm: {base_url: http://HOST:8000}}` with any "
    "arguments of `engines.vllm`, or `module:name`; `evaluate` uses it only if `--sampler` is passed",
    "advantage_fn": "`module:function` that computes advantages from rewards; replaces `advantage_estimator`",
    "surrogate": "`module:function` that computes the loss per token; replaces `loss_type`",
    "teacher": "a teacher for distillation, weighted with `distillation_coef`: a name on the hub, a directory, "
    "`module:name` for a Policy or a scorer, or a server `{vllm: {base_url: http://HOST:8000}}` with any arguments of "
    "`engines.vllm_scorer`; `rewards` may then be []",
    "lora": "trains adapters instead of all weights: a rank or a mapping with `rank`, `alpha`, `targets` and `dropout`",
    "quantize": "quantizes the base model for `lora`: `nf4` or `int8` (default: none)",
    "param_dtype": "dtype of the loaded params: `float32` (the default) or `bfloat16`",
    "run_dir": "the run directory (default: `runs/` plus the name of the file); if null, no files are written",
    "folder": "the directory that files and modules are relative to (default: the directory of RUN.yaml)",
}
"""Descriptions of the keys that are not config fields."""

RENAMED = {
    "model_name_or_path": "use model",
    "dataset_name": "use data",
    "train_dataset": "use data",
    "reward_fns": "use rewards",
    "reward_funcs": "use rewards",
    "output_dir": "use run_dir",
    "use_peft": "use lora",
    "config": "write the config's fields as top-level keys, like model, data and rewards",
}
"""Mapping from names in the Python API and other libraries to advice on which key to use."""

FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}


def _read_groups() -> dict[str, str]:
    """Return the group of each config field: the nearest heading comment above the field in the config's source."""
    groups: dict[str, str] = {}
    for module in (config, settings):
        title = ""
        for line in Path(str(module.__file__)).read_text(encoding="utf-8").splitlines():
            if comment := re.match(r"    # ([A-Z][^(]*?)(?: \(.*\))?\.$", line):
                title = comment[1]
            elif (field := re.match(r"    (\w+): ", line)) and field[1] in FIELDS:
                groups.setdefault(field[1], title)
    return groups


GROUPS = dict.fromkeys(RUN_KEYS, "The run") | _read_groups()
"""Mapping from each key to the title of its group."""
