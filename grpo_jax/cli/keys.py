"""The keys of a RUN.yaml: its own, and the fields of `GRPOConfig` by their groups."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import textwrap
from typing import Annotated, Literal, get_args, get_origin

from grpo_jax.config.config import GRPOConfig

OWN = {
    "model": "a name on the hub, a directory, `module:function` that returns one or a Policy, or for new weights a "
    "mapping of `config` (a mapping or a config.json), `tokenizer` (a name or a directory) and `seed`",
    "data": "a file (.jsonl, .csv, .parquet), the name of a dataset on the hub, `module:name` of rows or of a function "
    "that returns them, a mapping of `path` or `name`, and `config`, `split`, `rows` (only the first), or a suite of "
    "tasks, as `{reasoning_gym: chain_sum, size: 2000, seed: 1}`",
    "eval_data": "likewise, to evaluate on before the first step, every `eval_steps` and after the last",
    "columns": "new names of columns, as `{answer: solution}`: the column `solution` is called `answer` here; "
    "`{answer: reward_model.ground_truth}` takes it out of a nested column",
    "prompt": "a template in the place of a column `prompt`: text, or a list of messages, in which `{question}` is the "
    "row's column `question`",
    "rewards": "a list of reward functions: `module:function`, `file.py:function` or the name of one that comes with "
    "the package; `{number_reward: answer}` calls it with what follows, and its result is the reward function; `suite` "
    "stands for those of the suite of tasks under `data`, and need not be said if there are no others",
    "stages": "`[sft, grpo]` to learn given completions first and begin GRPO with what comes out, or `[sft]` alone "
    "(default `[grpo]`)",
    "sft": "a mapping of the settings of that stage, which are those of `SFTConfig`, and of its `data`, `eval_data`, "
    "`columns` and `prompt`",
    "tools": "a list of functions, as `module:function`, that the policy may call between its turns",
    "environment_factory": "what makes an environment for each completion, as `module:name`",
    "sampler": "an engine in the place of the built-in one: `{vllm: {base_url: http://HOST:8000}}`, with any arguments "
    "of `engines.vllm`, or `module:name`; evaluations take one from the command line alone",
    "advantage_fn": "a function of your own that makes advantages of rewards, as `module:function`, in the place of "
    "`advantage_estimator`",
    "surrogate": "a function of your own that makes the loss of each token, as `module:function`, in the place of that "
    "of `loss_type`",
    "teacher": "who the policy learns from beside its rewards, by `distillation_coef`: a name on the hub, a directory, "
    "`module:name` of a Policy or a scorer, a mapping of one of these as `model` and of `quantize`, a server as "
    "`{vllm: {base_url: http://HOST:8000}}` with any arguments of `engines.vllm_scorer`, or `self`; with it `rewards` "
    "may be []",
    "teacher_prompt": "what the teacher reads in the place of the prompt: a column, or `module:function`",
    "lora": "train adapters and not all weights: their rank, or a mapping of `rank`, `alpha`, `targets` and `dropout`",
    "quantize": "how the base under `lora` is held: `nf4` or `int8` (default plain)",
    "quantize_embeddings": "whether its embedding and head are quantized too",
    "param_dtype": "of the params as they are loaded: `float32` (the default) or `bfloat16`",
    "run_dir": "where the run is written (default `runs/` and the name of the file); null: nowhere",
    "folder": "what files and modules are named from (default: the folder of RUN.yaml)",
}
"""Key of a run that is no field of its config → its meaning."""

ELSEWHERE = {
    "model_name_or_path": "use model",
    "dataset_name": "use data",
    "dataset": "use data",
    "train_dataset": "use data",
    "eval_dataset": "use eval_data",
    "reward_fns": "use rewards",
    "reward_funcs": "use rewards",
    "output_dir": "use run_dir",
    "use_peft": "use lora",
    "config": "its fields stand beside model, data and rewards",
}
"""Name that people bring from elsewhere → what to do."""


FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}
"""The fields of `GRPOConfig` by name, in their order."""

_FIRST = {
    "num_generations": "Sampling",
    "per_device_train_batch_size": "Batches",
    "reward_weights": "Rewards and advantages",
    "loss_type": "The policy loss",
    "entropy_coef": "Entropy, KL and the reference",
    "distillation_coef": "A teacher",
    "learning_rate": "Optimizer, memory and devices",
    "eval_steps": "Evaluation, logging, checkpoints",
    "report_to": "Trackers and the hub",
}
# The first field of each group, and its title.

_TITLES = itertools.accumulate(FIELDS, lambda title, name: _FIRST.get(name, title), initial="")
GROUPS = dict.fromkeys(OWN, "The run") | dict(zip(FIELDS, itertools.islice(_TITLES, 1, None), strict=True))
"""Every key → the title of its group, in their order."""


def choices(kind: object) -> tuple[str, ...]:
    """Return the values that an annotation names.

    Example:
      >>> choices(Literal["a", "b"] | None), choices(bool), choices(int)
      (('a', 'b'), ('true', 'false'), ())
    """
    if kind is bool:
        return ("true", "false")
    if get_origin(kind) is Literal:
        return tuple(str(value) for value in get_args(kind))
    if get_origin(kind) is Annotated:
        return choices(get_args(kind)[0])
    return tuple(value for option in get_args(kind) for value in choices(option))


def explain(name: str) -> str:
    """Return the help of one key: its default, its choices and its doc.

    Example:
      >>> print(explain("beta"))
      beta (default 0.0)
        Weight of the KL to the reference; 0: no reference is kept.
    """
    if name in OWN:
        return f"{name}\n{textwrap.indent(textwrap.fill(OWN[name], 90), '  ')}"
    import docstring_parser  # the fields' docs are docstrings, which are no attributes of anything at run time

    docs = {param.arg_name: param.description for param in docstring_parser.parse_from_object(GRPOConfig).params}
    named = choices(FIELDS[name].type)
    one_of = f", one of {', '.join(named)}" if named else ""
    doc = inspect.cleandoc(docs[name] or "")
    return f"{name} (default {FIELDS[name].default!r}{one_of})\n{textwrap.indent(doc, '  ')}"
