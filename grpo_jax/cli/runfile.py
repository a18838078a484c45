"""A RUN.yaml: read, with what the command line sets, and checked before anything expensive; all faults together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from grpo_jax.cli.keys import ELSEWHERE, FIELDS, GROUPS, OWN
from grpo_jax.cli.named import find, is_reference, reward_function, rows_of, sampler_of, scorer_of, teacher_model
from grpo_jax.cli.stages import SFTStage, read_sft, read_stages
from grpo_jax.cli.yaml12 import dump_yaml, parse_value, read_file
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import unknown_field
from grpo_jax.config.settings import hints
from grpo_jax.devices.sharding import parse_mesh
from grpo_jax.hub.huggingface import find_checkpoint
from grpo_jax.hub.quantize import check_method
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.messages import one_line, problems_of, raise_all, show
from grpo_jax.models.lora import TARGETS
from grpo_jax.rewards.contract import EXTRAS, check_reward_fns
from grpo_jax.run.sampler import Sampler
from grpo_jax.suites import Suite, is_suite, suite_of
from grpo_jax.text.columns import check_templates
from grpo_jax.types import AdvantageFn, EnvironmentFactory, Environments, Json, RewardFn, Row
from grpo_jax.watch.writer import refuse_bucket

NAME = "run.yaml"
"""Under this name a run directory keeps what its run was started with."""

SUITE = "suite"
"""The entry of `rewards` that stands for those of the suite under `data`."""

_FILES_IN = {
    "model": ("config", "tokenizer"),
    "data": ("path",),
    "eval_data": ("path",),
    "rewards": (),
    "tools": (),
    "environment_factory": (),
    "advantage_fn": (),
    "surrogate": (),
    "teacher": ("model",),
}
# Keys whose value may name a file, and where in a mapping it stands; () for everywhere.
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Lora(NamedTuple):
    """Adapters, in the arguments of `add_lora`."""

    rank: int = 16
    alpha: float = 32.0
    targets: str = TARGETS
    dropout: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFile:
    """A run as it was asked for, in the arguments of `train`; that one exists means that it was checked.

    Attributes:
      values: key → value, as in the file and on the command line.
      folder: what files and modules are named from.
      config: the settings.
      run_dir: of the run, None for none.
      model: the value of that key, None where it is missing.
      lora: adapters to train, None for all weights.
      param_dtype: dtype that params are loaded in.
      quantize: how the base under the adapters is held, as in `from_pretrained`.
      quantize_embeddings: whether its embedding and head are quantized too.
      rows: to train on; empty where they were not asked for, and so are the others.
      eval_rows: to evaluate on, None for none.
      rewards: reward functions.
      tools: functions that the policy may call, None for none.
      environment_factory: what makes environments, None for none.
      sampler: the engine that samples, None for the built-in one.
      advantage_fn, surrogate: functions in the place of the config's, None for those.
      teacher: the value of that key, None for none.
      stages: what is done, in this order: "sft", "grpo".
      sft: the first of them, None where it is none or was not asked for.
    """

    values: Json
    folder: Path
    config: GRPOConfig
    run_dir: Path | None
    model: str | Json | None
    lora: Lora | None
    param_dtype: str
    quantize: str | None
    quantize_embeddings: bool
    rows: list[Row] = dataclasses.field(default_factory=list)
    eval_rows: list[Row] | None = None
    rewards: list[RewardFn] = dataclasses.field(default_factory=list)
    tools: list[Callable[..., Any]] | None = None
    environment_factory: Environments | None = None
    sampler: Sampler | None = None
    advantage_fn: AdvantageFn | None = None
    surrogate: Surrogate | None = None
    teacher: str | Json | None = None
    stages: tuple[str, ...] = ("grpo",)
    sft: SFTStage | None = None

    def text(self) -> str:
        """Return the file that starts the same run from anywhere."""
        return dump_yaml({**self.values, "folder": str(self.folder)})


class _Problems(list[str]):
    """The error lines of a run that is being read."""

    def of(self, key: str, function: Callable[_P, _R], *args: _P.args, **keywords: _P.kwargs) -> _R | None:
        """Return a function's result; None, and its fault noted, with the key and value in front, if it refuses.

        The value is the first argument; without a key the message names its own. That of a server is not
        repeated, since somebody may have written a password into it.
        """
        try:
            return function(*args, **keywords)
        except (ValueError, OSError) as error:
            server = key == "sampler" or (key == "teacher" and isinstance(args[0], dict) and "vllm" in args[0])
            head = "" if not key else f"{key}: " if server else f"{key} = {show(args[0])}: "
            self.extend(head + line for line in problems_of(error))
            return None


Wanted = Literal["model", "data", "rewards"]


def read_run(
    path: str | Path | None, overrides: Mapping[str, str] | None = None, *, wanted: Sequence[Wanted] = ()
) -> RunFile:
    """Read a run and check what can be checked without its model's weights.

    Args:
      path: of the file; None: the command line says all, and files are named from the current directory.
      overrides: keys and values, as texts, that the command line sets; files are named from the current directory.
      wanted: what the caller needs; what is not wanted is not read.

    Returns:
      A `RunFile`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: with one line per fault: the key, what came, and what to do.
    """
    values: dict[str, Any] = {} if path is None else read_file(Path(path).expanduser())
    path = Path("command line" if path is None else path).expanduser()
    folder = (path.parent / str(values.get("folder") or "")).expanduser().resolve()
    set_here = {name: parse_value(name, text) for name, text in (overrides or {}).items()}
    values |= {name: _from_here(name, value) if name in _FILES_IN else value for name, value in set_here.items()}
    stated = {name: value for name, value in values.items() if value is not None}
    problems = _Problems()
    stages = problems.of("", read_stages, stated) or ("grpo",)
    with_data = "data" in wanted
    wanted = wanted if "grpo" in stages else [name for name in wanted if name == "model"]
    problems += _key_problems(values, wanted)
    run = RunFile(
        values=values,
        folder=folder,
        config=problems.of("", _config, values) or GRPOConfig(),
        run_dir=problems.of("", _run_dir, values.get("run_dir", f"runs/{path.stem}")),
        model=stated.get("model"),
        teacher=stated.get("teacher"),
        lora=problems.of("lora", read_lora, stated.get("lora")),
        param_dtype=problems.of("param_dtype", _param_dtype, stated.get("param_dtype", "float32")) or "",
        quantize=stated.get("quantize"),
        quantize_embeddings=stated.get("quantize_embeddings", False),
        stages=stages,
        sft=problems.of("", read_sft, stated, folder) if with_data and "sft" in stages and "sft" in stated else None,
    )
    problems.of("", _check_quantize, run.quantize, run.quantize_embeddings, run.model)
    if "model" in wanted and "model" in stated:
        problems.of("model", _check_model, stated["model"], folder)
    suites = _suites(stated, problems) if {*wanted} & {"data", "rewards"} else {}
    if "model" in wanted and "teacher" in stated:
        problems.of("teacher", _check_teacher, stated["teacher"], folder)
    if "rewards" in wanted:
        run = _with_functions(run, stated, suites.get("data"), problems)
    if "data" in wanted:
        run = _with_rows(run, stated, suites, problems)
    alone = not run.rewards and run.teacher is not None
    if not problems and run.rows and not (run.tools or run.environment_factory or alone):
        problems.of("", check_reward_fns, run.rewards, run.rows[0], extras=EXTRAS, argument="data", rows=run.rows)
    flags = " ".join(f"--{name}" for name in overrides or ())
    raise_all(f"{path} with {flags}" if flags and path.suffix else str(path), problems)
    return run


def _suites(stated: Json, problems: _Problems) -> dict[str, Suite | None]:
    """Return the suites of tasks under `data` and `eval_data`; None for one that is refused."""
    data = {key: stated[key] for key in ("data", "eval_data") if is_suite(stated.get(key))}
    return {key: problems.of("", suite_of, source, key) for key, source in data.items()}


def _with_functions(run: RunFile, stated: Json, suite: Suite | None, problems: _Problems) -> RunFile:
    """Find the reward functions, the tools and the environments; what is not stated is the suite's own."""
    suite = suite or Suite(rows=[])
    tools = [problems.of("tools", find, tool, run.folder) for tool in _listed(stated.get("tools"))]
    rewards: list[RewardFn | None] = []
    for i, entry in enumerate(_listed(stated.get("rewards", SUITE if suite.rows else None))):
        of_suite = entry == SUITE and suite.rows
        rewards += suite.reward_fns if of_suite else [problems.of(f"rewards[{i}]", reward_function, entry, run.folder)]
    environments: Environments | None = suite.environment_factory
    if "environment_factory" in stated:
        environments = problems.of("environment_factory", _environments, stated["environment_factory"], run.folder)
    sampler = problems.of("sampler", sampler_of, stated["sampler"], run.folder) if "sampler" in stated else None
    own = {
        name: problems.of(name, find, stated[name], run.folder)
        for name in ("advantage_fn", "surrogate")
        if name in stated
    }
    if suite.reward_weights is not None and not {"rewards", "reward_weights"} & stated.keys():
        run = dataclasses.replace(run, config=dataclasses.replace(run.config, reward_weights=suite.reward_weights))
    return dataclasses.replace(
        run,
        sampler=sampler,
        advantage_fn=own.get("advantage_fn"),
        surrogate=own.get("surrogate"),
        rewards=[function for function in rewards if function is not None],
        tools=[tool for tool in tools if tool is not None] if "tools" in stated else suite.tools,
        environment_factory=environments,
    )


def _with_rows(run: RunFile, stated: Json, suites: Mapping[str, Suite | None], problems: _Problems) -> RunFile:
    """Read the rows to train on and to evaluate on."""
    columns, prompt = stated.get("columns"), stated.get("prompt")
    before = len(problems)
    problems.of("", check_templates, columns, prompt)
    if len(problems) > before:
        columns, prompt = None, "any"  # what is wrong with the data itself is said at the same time
    sources = {key: stated[key] for key in ("data", "eval_data") if key in stated and key not in suites}
    sources |= {key: suite.rows for key, suite in suites.items() if suite is not None}
    rows = {
        key: problems.of("", rows_of, source, run.folder, argument=key, columns=columns, prompt=prompt)
        for key, source in sources.items()
    }
    return dataclasses.replace(run, rows=rows.get("data") or [], eval_rows=rows.get("eval_data"))


def _listed(given: Any) -> list[Any]:
    """Return one or several as a list."""
    return given if isinstance(given, list) else [] if given is None else [given]


def _key_problems(values: Json, wanted: Sequence[Wanted]) -> Iterator[str]:
    """Yield the error lines of keys that do not exist, and of those that are missing."""
    for name in values:
        if name not in GROUPS:
            yield unknown_field(name, set(GROUPS), hints() | ELSEWHERE).replace("no such field", "no such key", 1)
    for name in wanted:
        others = [values.get(other) is not None for other in ("environment_factory", "teacher")]
        if values.get(name) in (None, []) and not (name == "rewards" and any([*others, is_suite(values.get("data"))])):
            yield f"{name}: is missing; give {OWN[name]}"


def _config(values: Json) -> GRPOConfig:
    """Return the config of a file's fields."""
    fields = {name: value for name, value in values.items() if name in FIELDS}
    if isinstance(fields.get("mesh"), str):
        fields["mesh"] = parse_mesh(fields["mesh"])
    return GRPOConfig(**fields)


def _environments(given: Any, folder: Path) -> Environments:
    """Return one factory, or several by name."""
    if isinstance(given, dict):
        return {name: find(one, folder) for name, one in given.items()}
    found: EnvironmentFactory = find(given, folder)
    return found


def _run_dir(name: object) -> Path | None:
    if name is None or isinstance(name, str):
        refuse_bucket(name)
        return None if name is None else Path(name).expanduser()
    raise ValueError(f"run_dir = {show(name)}: give the path of a directory, or null for none")


def _param_dtype(name: object) -> str:
    if isinstance(name, str) and name in ("float32", "bfloat16"):
        return name
    raise ValueError("use float32 or bfloat16")


def _check_quantize(method: str | None, embeddings: object, model: object) -> None:
    """Refuse a base that is held in no way that is known, or that is not loaded."""
    if embeddings not in (True, False):
        raise ValueError(f"quantize_embeddings = {show(embeddings)}: use true or false")
    check_method(method, bool(embeddings))
    if method is not None and isinstance(model, Mapping):
        raise ValueError(
            f"quantize = {method!r}: model makes new weights, and none that could be held so; leave it out"
        )


def read_lora(given: object) -> Lora | None:
    """Return the adapters of a rank or a mapping, None for none; alpha is twice the rank if it is not given.

    Example:
      >>> read_lora(8)[:2], read_lora({"rank": 8, "alpha": 8.0})[:2]
      ((8, 16.0), (8, 8.0))
    """
    if given is None:
        return None
    asked = {"rank": given} if isinstance(given, int) else given
    if not isinstance(asked, dict) or not asked.keys() <= set(Lora._fields):
        raise ValueError(f"give a rank, or a mapping of {', '.join(Lora._fields)}")
    default = Lora()
    for name, kind in (("rank", int), ("alpha", float), ("targets", str), ("dropout", float)):
        value = asked.get(name)
        if name in asked and (
            isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind)
        ):
            raise ValueError(f"{name} = {show(value)} is no {kind.__name__}")
    rank = asked.get("rank", default.rank)
    return Lora(
        rank=rank,
        alpha=asked.get("alpha", 2.0 * rank),
        targets=asked.get("targets", default.targets),
        dropout=asked.get("dropout", default.dropout),
    )


def _check_model(given: object, folder: Path) -> None:
    """Refuse a model that is not there, or that is asked for in no form that there is."""
    if isinstance(given, dict):
        unknown = sorted(set(given) - {"config", "tokenizer", "seed"}, key=str)
        if unknown or not {"config", "tokenizer"} <= given.keys():
            raise ValueError("new weights take config, tokenizer and seed (default 0), and nothing else")
        config_of(given, folder)
        if not isinstance(given["tokenizer"], str) or not isinstance(given.get("seed") or 0, int):
            raise ValueError("the tokenizer of new weights is a name or a directory, and their seed a whole number")
    elif is_reference(given):
        find(given, folder)
    elif isinstance(given, str):
        find_checkpoint(in_folder(given, folder), weights=False)
    else:
        raise ValueError("give a name on the hub, a directory, module:function, or a mapping with config and tokenizer")


def _check_teacher(given: object, folder: Path) -> None:
    """Refuse a teacher that is asked for in no form that there is."""
    if scorer_of(given) is None:
        model, method = teacher_model(given)
        check_method(method)
        _check_model(model, folder)


def config_of(model: Json, folder: Path) -> Json:
    """Return the config of new weights, which stands in the file itself or in a config.json."""
    stated = model.get("config")
    if isinstance(stated, Mapping):
        return stated
    try:
        config: Json = json.loads((folder / str(stated)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"config = {show(stated)} is no file of JSON ({one_line(error)}); give a config.json, or what one holds"
        ) from error
    return config


def in_folder(name: str, folder: Path) -> str:
    """Return a path in the folder, if there is such a one; else the name as it stands, which is the hub's."""
    path = folder / Path(name).expanduser()
    return str(path) if path.exists() else name


def _from_here(name: str, value: Any) -> Any:
    """Return a value of the command line, in which files are named from the current directory."""
    if isinstance(value, list):
        return [_from_here(name, item) for item in value]
    if isinstance(value, dict) and name == "rewards":
        return {_here(function): arguments for function, arguments in value.items()}
    if isinstance(value, dict):
        named = _FILES_IN[name] or value
        return {key: _here(inner) if key in named else inner for key, inner in value.items()}
    return _here(value)


def _here(text: object) -> object:
    """Return the path of a file or directory of the current one, `file.py:name` too; anything else as it is."""
    if not isinstance(text, str):
        return text
    file, colon, rest = text.partition(".py:")
    path = Path(file + ".py" if colon else text).expanduser()
    return str(path.resolve()) + (f":{rest}" if colon else "") if path.exists() else text
