"""A RUN.yaml: read, with what the command line sets, and checked before anything expensive; all faults together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_jax.cli.data import rows_of, template_fault
from grpo_jax.cli.keys import ELSEWHERE, OWN, fields
from grpo_jax.cli.named import find, is_reference, reward_function
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import read, unknown_field
from grpo_jax.config.settings import hints
from grpo_jax.devices.sharding import parse_mesh
from grpo_jax.hub.huggingface import find_checkpoint
from grpo_jax.hub.quantize import check_method
from grpo_jax.messages import problems_of, raise_all, show
from grpo_jax.rewards.contract import EXTRAS, check_reward_fns
from grpo_jax.types import Row

NAME = "run.yaml"
"""Under this name a run directory keeps what its run was started with."""

_LORA = {"rank": int, "alpha": float, "targets": str, "dropout": float}
_PATHS = ("model", "data", "eval_data", "rewards", "tools", "environment_factory")


@dataclasses.dataclass(frozen=True)
class RunFile:
    """A run as it was asked for, in the arguments of `train`; that one exists means that it was checked.

    Attributes:
      values: key → value, as in the file and on the command line.
      folder: what files and modules are named from.
      config: the settings.
      run_dir: of the run, None for none.
      rows: to train on; empty where they were not asked for, and so are the others.
      eval_rows: to evaluate on, None for none.
      rewards: reward functions.
      tools: functions that the policy may call, None for none.
      environment_factory: what makes environments, None for none.
    """

    values: Mapping[str, Any]
    folder: Path
    config: GRPOConfig
    run_dir: Path | None
    rows: list[Row] = dataclasses.field(default_factory=list)
    eval_rows: list[Row] | None = None
    rewards: list[Callable[..., Any]] = dataclasses.field(default_factory=list)
    tools: list[Callable[..., Any]] | None = None
    environment_factory: Any = None

    @property
    def turns(self) -> dict[str, Any]:
        """What answers the policy, as keywords."""
        return {"tools": self.tools, "environment_factory": self.environment_factory}

    @property
    def lora(self) -> dict[str, Any] | None:
        """Keywords of `add_lora`, None for no adapters."""
        return lora_arguments(self.values.get("lora"))

    @property
    def param_dtype(self) -> str:
        """The dtype that params are loaded in."""
        return self.values.get("param_dtype") or "float32"

    @property
    def quantize(self) -> str | None:
        """How the base is held, as in `from_pretrained`."""
        return self.values.get("quantize")

    @property
    def quantize_embeddings(self) -> bool:
        """Whether its embedding and head are quantized too."""
        return self.values.get("quantize_embeddings") or False

    def text(self) -> str:
        """The file that starts the same run from anywhere."""
        return dump_yaml({**self.values, "folder": str(self.folder)})


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of its version 1.2: 1e-6 is a number, and yes, no, on and off are text. None is null."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


class _Dumper(yaml.SafeDumper):
    """What `_Loader` reads back as it was: text that looks like one of its scalars is quoted."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Keys and values as a text that `parse_yaml` reads back.

    Example:
      >>> print(dump_yaml({"run_name": "1e-6", "learning_rate": 1e-6}), end="")
      run_name: '1e-6'
      learning_rate: 1.0e-06
    """
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True) if values else ""


def parse_yaml(text: str) -> Any:
    """The value of a text in YAML.

    Example:
      >>> parse_yaml("{learning_rate: 1e-6, eval_steps: None, run_name: off}")
      {'learning_rate': 1e-06, 'eval_steps': None, 'run_name': 'off'}
    """
    return yaml.load(text, _Loader)


def value_of(name: str, text: str) -> Any:
    """The value of a key as the command line has it: YAML, or the text itself where only that can be meant.

    Example:
      >>> value_of("learning_rate", "1e-6"), value_of("run_name", "7"), value_of("mesh", "data=2,fsdp=4")
      (1e-06, '7', {'data': 2, 'fsdp': 4})
    """
    if name == "mesh" and "=" in text:
        return parse_mesh(text)
    if name == "prompt" and not text.startswith("["):  # a colon in a template makes no mapping
        return text
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        return text
    kind = {field.name: field.type for field in dataclasses.fields(GRPOConfig)}.get(name)
    if isinstance(kind, str) or name not in fields():
        return value
    return text if read(kind, value)[1] and not read(kind, text)[1] else value


def read_file(path: Path) -> dict[str, Any]:
    """The keys and values of a file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no YAML, or no mapping.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; give a RUN.yaml")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {show(values)}, and not keys with values, such as model: Qwen/Qwen3-0.6B")
    return {str(name): value for name, value in values.items()}


class _Reading(list[str]):
    """The error lines of a run that is being read."""

    def __init__(self, values: Mapping[str, Any], folder: Path):
        super().__init__()
        self.values, self.folder = values, folder

    def of(self, name: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """What the function returns; None, and its fault noted under the name of a key, if it refuses."""
        try:
            return function(*args, **keywords)
        except (ValueError, OSError) as error:
            self.extend(_lines(name, self.values.get(name), error))
            return None

    def check_loading(self) -> None:
        """What is done to the model as it is loaded is known."""
        self.of("lora", lora_arguments, self.values.get("lora"))
        self.of("param_dtype", _check_dtype, self.values.get("param_dtype"))
        self.of("", _check_quantize, self.values)

    def functions(self) -> dict[str, Any]:
        """Reward functions, tools and environments."""
        values, folder = self.values, self.folder
        entries = _listed(values.get("rewards"))
        parts = {"rewards": [self.of(f"rewards[{i}]", _of_entry, entry, folder) for i, entry in enumerate(entries)]}
        if values.get("tools") is not None:
            parts["tools"] = [self.of("tools", find, tool, folder) for tool in _listed(values["tools"])]
        if (given := values.get("environment_factory")) is not None:
            parts["environment_factory"] = self.of("environment_factory", _environments, given, folder)
        return parts

    def rows(self) -> dict[str, Any]:
        """Rows to train on and to evaluate on."""
        how = {"columns": self.values.get("columns"), "prompt": self.values.get("prompt")}
        if self.of("", _check_templates, self.values) is None:
            how = {"prompt": "any"}  # what is wrong with the data itself is said at the same time
        names = {"data": "rows", "eval_data": "eval_rows"}
        given = {key: self.values[key] for key in names if self.values.get(key) is not None}
        return {names[key]: self.of("", rows_of, source, self.folder, key=key, **how) for key, source in given.items()}


def read_run(
    path: str | Path | None, overrides: Mapping[str, str] | None = None, *, wanted: Sequence[str] = ()
) -> RunFile:
    """Read a run and check what can be checked without its model's weights.

    Args:
      path: of the file; None: the command line says all, and files are named from the current directory.
      overrides: keys and values, as texts, that the command line sets; files are named from the current directory.
      wanted: what the caller needs of "model", "data" and "rewards"; what is not wanted is not read.

    Returns:
      A `RunFile`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: with one line per fault: the key, what came, and what to do.
    """
    values: dict[str, Any] = {} if path is None else read_file(Path(path).expanduser())
    path = Path("command line" if path is None else path).expanduser()
    folder = (path.parent / str(values.get("folder") or "")).expanduser().resolve()
    values |= {name: _from_here(name, value_of(name, text)) for name, text in (overrides or {}).items()}
    problems = _Reading(values, folder)
    problems += list(_key_problems(values, wanted))
    problems.check_loading()
    config = problems.of("", _config, values)
    parts: dict[str, Any] = {}
    if "model" in wanted and values.get("model") is not None:
        problems.of("model", _check_model, values["model"], folder)
    if "rewards" in wanted:
        parts |= problems.functions()
    if "data" in wanted:
        parts |= problems.rows()
    if not problems and parts.get("rows") and not (parts.get("tools") or parts.get("environment_factory")):
        rows = parts["rows"]
        problems.of("", check_reward_fns, parts["rewards"], rows[0], extras=EXTRAS, argument="data", rows=rows)
    raise_all(str(path), problems)
    run_dir = values.get("run_dir", f"runs/{path.stem}")
    return RunFile(values, folder, config, None if run_dir is None else Path(run_dir).expanduser(), **parts)


def _listed(given: Any) -> list[Any]:
    """One or several as a list."""
    return given if isinstance(given, list) else [] if given is None else [given]


def _key_problems(values: Mapping[str, Any], wanted: Sequence[str]) -> Iterator[str]:
    """The error lines of keys that do not exist, and of those that are missing."""
    known = {*OWN, *fields()}
    for name in values:
        if name not in known:
            yield unknown_field(name, known, hints() | ELSEWHERE).replace("no such field", "no such key", 1)
    for name in wanted:
        other = values.get("environment_factory") if name == "rewards" else None
        if values.get(name) in (None, []) and other is None:
            yield f"{name}: is missing; give {OWN[name]}"


def _config(values: Mapping[str, Any]) -> GRPOConfig:
    """The config of a file's fields."""
    given = {name: value for name, value in values.items() if name in fields()}
    if isinstance(given.get("mesh"), str):
        given["mesh"] = parse_mesh(given["mesh"])
    return GRPOConfig(**given)


def _lines(name: str, value: Any, error: Exception) -> list[str]:
    """The lines of a fault, each with the key that it is of."""
    lines = problems_of(error)
    if not name or all(line.startswith(name) for line in lines):
        return lines
    head = name if value is None else f"{name} = {show(value)}"
    return [f"{head}: {line}" for line in lines]


def _of_entry(entry: Any, folder: Path) -> Any:
    """The function of an entry of `rewards`, which the message names."""
    try:
        return reward_function(entry, folder)
    except ValueError as error:
        raise ValueError(f"{show(entry)} {error}") from error


def _environments(given: Any, folder: Path) -> Any:
    """One factory, or several by name."""
    if isinstance(given, dict):
        return {name: find(one, folder) for name, one in given.items()}
    return find(given, folder)


def _check_templates(values: Mapping[str, Any]) -> bool:
    """Raise for columns or a template that are none; else return True."""
    columns, fault = values.get("columns"), template_fault(values.get("prompt"))
    if fault:
        raise ValueError(f"prompt = {show(values['prompt'])}: {fault}")
    if columns is not None and not (
        isinstance(columns, dict) and all(isinstance(name, str) for pair in columns.items() for name in pair)
    ):
        raise ValueError(f"columns = {show(columns)}: give new names with the present ones, as {{answer: solution}}")
    return True


def _check_dtype(name: Any) -> None:
    if name not in (None, "float32", "bfloat16"):
        raise ValueError("use float32 or bfloat16")


def _check_quantize(values: Mapping[str, Any]) -> None:
    """Raise unless it is known how the base is held, and it is one that is loaded."""
    method, embeddings = values.get("quantize"), values.get("quantize_embeddings")
    if embeddings not in (None, True, False):
        raise ValueError(f"quantize_embeddings = {show(embeddings)}: use true or false")
    check_method(method, bool(embeddings))
    if method is not None and isinstance(values.get("model"), Mapping):
        raise ValueError(
            f"quantize = {method!r}: model makes new weights, and none that could be held so; leave it out"
        )


def lora_arguments(given: Any) -> dict[str, Any] | None:
    """Keywords of `add_lora`, None for no adapters; alpha is twice the rank where only that is given.

    Example:
      >>> lora_arguments(8), lora_arguments({"rank": 8, "alpha": 8.0})
      ({'rank': 8, 'alpha': 16.0}, {'rank': 8, 'alpha': 8.0})
    """
    if given is None:
        return None
    asked = {"rank": given} if isinstance(given, int) else given
    if not isinstance(asked, dict) or not asked.keys() <= _LORA.keys():
        raise ValueError(f"give a rank, or a mapping of {', '.join(_LORA)}")
    for name, value in asked.items():
        kind = (int, float) if _LORA[name] is float else _LORA[name]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{name} = {show(value)} is no {_LORA[name].__name__}")
    return {**asked, "alpha": asked.get("alpha", 2.0 * asked["rank"])} if "rank" in asked else dict(asked)


def _check_model(given: Any, folder: Path) -> None:
    """Raise for a model that is not there, or that is asked for in no form that there is."""
    if isinstance(given, dict):
        unknown = sorted(set(given) - {"config", "tokenizer", "seed"}, key=str)
        if unknown or not {"config", "tokenizer"} <= given.keys():
            raise ValueError("new weights take config, tokenizer and seed (default 0), and nothing else")
        if not isinstance(given["config"], dict) and not (folder / str(given["config"])).is_file():
            raise ValueError(f"config = {show(given['config'])} is no file; give a config.json, or what one holds")
    elif is_reference(given):
        find(given, folder)
    elif isinstance(given, str):
        find_checkpoint(in_folder(given, folder), weights=False)
    else:
        raise ValueError("give a name on the hub, a directory, module:function, or a mapping with config and tokenizer")


def in_folder(name: str, folder: Path) -> str:
    """A path in the folder, if there is such a one; else the name as it stands, which is the hub's."""
    path = folder / Path(name).expanduser()
    return str(path) if path.exists() else name


def _from_here(name: str, value: Any) -> Any:
    """A value of the command line, in which files are named from the current directory."""
    if name not in _PATHS:
        return value
    if isinstance(value, list):
        return [_from_here(name, item) for item in value]
    if not isinstance(value, str):
        return value
    file, colon, rest = value.partition(".py:")
    here = Path(file + ".py" if colon else value).expanduser()
    return str(here.resolve()) + (f":{rest}" if colon else "") if here.exists() else value
