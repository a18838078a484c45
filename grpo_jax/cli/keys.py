"""The keys of a RUN.yaml: its own, and the fields of `GRPOConfig` with their groups and docs, read from its source."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from typing import Annotated, Any, Literal, get_args, get_origin

from grpo_jax.config.config import GRPOConfig

OWN = {
    "model": "a name on the hub, a directory, `module:function` that returns one or a Policy, or for new weights a "
    "mapping of `config` (a mapping or a config.json), `tokenizer` (a name or a directory) and `seed`",
    "data": "a file (.jsonl, .csv, .parquet), the name of a dataset on the hub, `module:name` of rows or of a function "
    "that returns them, or a mapping of `path` or `name`, and `config`, `split`, `rows` (only the first)",
    "eval_data": "likewise, to evaluate on before the first step, every `eval_steps` and after the last",
    "columns": "new names of columns, as `{answer: solution}`: the column `solution` is called `answer` here; "
    "`{answer: reward_model.ground_truth}` takes it out of a nested column",
    "prompt": "a template in the place of a column `prompt`: text, or a list of messages, in which `{question}` is the "
    "row's column `question`",
    "rewards": "a list of reward functions: `module:function`, `file.py:function` or the name of one that comes with "
    "the package; `{number_reward: answer}` calls it with what follows, and its result is the reward function",
    "tools": "a list of functions, as `module:function`, that the policy may call between its turns",
    "environment_factory": "what makes an environment for each completion, as `module:name`",
    "lora": "train adapters and not all weights: their rank, or a mapping of `rank`, `alpha`, `targets` and `dropout`",
    "quantize": "how the base under `lora` is held: `nf4` or `int8` (default plain)",
    "quantize_embeddings": "whether its embedding and head are quantized too",
    "param_dtype": "of the params as they are loaded: `float32` (the default) or `bfloat16`",
    "run_dir": "where the run is written (default `runs/` and the name of the file); null: nowhere",
    "folder": "what files and modules are named from (default: the folder of RUN.yaml)",
}
"""The keys of a run that are not fields of its config, and what each is."""

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
"""Names that people bring, and what to do."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of the config: its group, what it is, and the values that it takes where they are few."""

    name: str
    group: str
    doc: str
    default: Any
    choices: tuple[str, ...]


@functools.cache
def fields() -> dict[str, Field]:
    """The fields of `GRPOConfig` by name, in their order and with the groups of the source."""
    source = textwrap.dedent(inspect.getsource(GRPOConfig))
    titles = {n: line for n, line in enumerate(source.splitlines(), 1) if re.match(r"    # [A-Z].*\.$", line)}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    of_class = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    found: dict[str, Field] = {}
    after: Any
    for node, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        title = titles[max(n for n in titles if n < node.lineno)]
        group = re.sub(r" \(.*\)", "", title.strip("# ."))
        field, doc = of_class[node.target.id], inspect.cleandoc(str(ast.literal_eval(after.value)))
        found[field.name] = Field(field.name, group, doc, field.default, choices(field.type))
    return found


def choices(kind: Any) -> tuple[str, ...]:
    """The values that an annotation names.

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
    """What a key is, for `--help KEY`.

    Example:
      >>> print(explain("beta"))
      beta (default 0.0)
        Weight of the KL to the reference; 0: no reference is kept.
    """
    if name in OWN:
        return f"{name}\n{textwrap.indent(textwrap.fill(OWN[name], 90), '  ')}"
    field = fields()[name]
    of = f", one of {', '.join(field.choices)}" if field.choices else ""
    return f"{name} (default {field.default!r}{of})\n{textwrap.indent(field.doc, '  ')}"
