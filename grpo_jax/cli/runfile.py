"""Read and validate a run file and the command line. All errors are reported together, before weights are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, TypeVarTuple

from grpo_jax.cli.keys import FIELDS, GROUPS, RENAMED, RUN_KEYS
from grpo_jax.cli.named import (
    find,
    from_current_directory,
    in_folder,
    is_reference,
    resolve_source,
    reward_function,
    server_of,
)
from grpo_jax.cli.yaml12 import parse_value, read_file
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import Count, In, Positive, read, unknown_field
from grpo_jax.config.settings import hints
from grpo_jax.config.sft import SFTConfig
from grpo_jax.engines import vllm, vllm_scorer
from grpo_jax.hub.huggingface import find_checkpoint
from grpo_jax.hub.quantize import METHODS
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.messages import problems_of, raise_all, show
from grpo_jax.models.sharding import parse_mesh
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import check_reward_fns
from grpo_jax.run.sampler import Sampler
from grpo_jax.suites import Suite, is_suite, suite_of
from grpo_jax.text import examples
from grpo_jax.text.rows import load_rows
from grpo_jax.types import AdvantageFn, Environments, Json, RewardFn, Row
from grpo_jax.watch.writer import absolute_run_dir

NAME = "run.yaml"
"""Name of the run file that `grpo-jax train` writes to the run directory."""

SUITE = "suite"
"""Entry of `rewards` that is replaced with the reward functions of the suite in `data`."""

_KINDS = {"run_dir": str, "param_dtype": Literal["float32", "bfloat16"], "quantize": Literal[METHODS]}
# Types of keys with scalar values, as annotations for `config.fields.read`.
_LORA = {
    "rank": Count,
    "alpha": Positive,
    "targets": str,
    "dropout": Annotated[float, In("[0, 1)", "0.0 disables dropout")],
}
# Types of the keys in the mapping `lora`, which are arguments to `add_lora`.
_Arguments = TypeVarTuple("_Arguments")
_R = TypeVar("_R")
Part = Literal["model", "data", "rewards"]


class SFTStage(NamedTuple):
    """Arguments to `sft` for the SFT stage, which runs in the run directory's subdirectory `sft`."""

    config: SFTConfig
    rows: list[Row]
    eval_rows: list[Row] | None


@dataclasses.dataclass(kw_only=True)
class RunFile:
    """A validated run file, converted to arguments for `train`. Parts that were not requested are not loaded.

    `values` contains the keys from the file and the command line, `folder` is the directory that files and modules are
    relative to, and `lora` contains arguments to `add_lora`. `stages` lists "sft" and "grpo" in execution order.
    """

    values: Json
    folder: Path
    config: GRPOConfig
    run_dir: Path | None
    model: str | Policy | None
    lora: dict[str, Any] | None
    param_dtype: str
    quantize: str | None
    teacher: str | Json | None
    stages: tuple[str, ...]
    sft: SFTStage | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    eval_rows: list[Row] | None = None
    rewards: list[RewardFn] = dataclasses.field(default_factory=list)
    tools: list[Callable[..., Any]] | None = None
    environment_factory: Environments | None = None
    sampler: Sampler | None = None
    advantage_fn: AdvantageFn | None = None
    surrogate: Surrogate | None = None


class _Problems(list[str]):  # error messages of a run file
    def call(self, key: str, function: Callable[[*_Arguments], _R], *args: *_Arguments) -> _R | None:
        """Call a function and return its result, or None if the function raises ValueError or OSError.

        The error is appended as "key = value: message", where the value is the function's first argument, or as
        "message" if `key` is empty. Values of samplers and teachers are omitted: a server's URL may contain a password.
        """
        try:
            return function(*args)
        except (ValueError, OSError) as error:
            prefix = f"{key}: " if key else ""
            if key not in ("", "sampler", "teacher"):
                prefix = f"{key} = {show(next(iter(args)))}: "
            self.extend(prefix + line for line in problems_of(error))
            return None


def read_run(
    path: str | Path | None, overrides: Mapping[str, str] | None = None, *, load: Sequence[Part] = ()
) -> RunFile:
    """Read a run file and check it as far as possible without loading weights.

    Args:
      path: path of the file. If None, the run is described by `overrides` alone.
      overrides: mapping from keys on the command line to their values as strings.
      load: parts to load. A model is checked but not loaded.

    Raises:
      FileNotFoundError: if the file does not exist.
      ValueError: if the run is invalid. The message has one line per error, with the key, its value and the fix.
    """
    values: dict[str, Any] = {} if path is None else read_file(Path(path).expanduser())
    path = Path("command line" if path is None else path).expanduser()
    for name, text in (overrides or {}).items():
        value = parse_value(name, text)
        if name == "folder" and value is not None:
            value = str(Path(text).expanduser().absolute())
        values[name] = from_current_directory(value) if name in RUN_KEYS and name != "run_dir" else value
    folder = (path.parent / Path(str(values.get("folder") or "")).expanduser()).resolve()
    specified = {name: value for name, value in values.items() if value is not None}
    problems = _Problems()
    stages = problems.call("", _read_stages, specified) or ("grpo",)
    load_examples = "data" in load
    load = load if "grpo" in stages else [part for part in load if part == "model"]
    problems += _key_problems(values, load)
    specified_dir = values.get("run_dir", f"runs/{path.stem}")
    run_dir = None if specified_dir is None else Path(str(specified_dir)).expanduser()
    problems.call("", absolute_run_dir, run_dir)
    run = RunFile(
        values=values,
        folder=folder,
        config=problems.call("", lambda: GRPOConfig.from_dict(_pick(values, FIELDS))) or GRPOConfig(),
        run_dir=run_dir,
        model=specified.get("model"),
        teacher=specified.get("teacher"),
        lora=problems.call("lora", read_lora, specified.get("lora")),
        param_dtype=specified.get("param_dtype", "float32"),
        quantize=specified.get("quantize"),
        stages=stages,
        sft=problems.call("", _read_sft, specified, folder, load_examples) if "sft" in stages else None,
    )
    if "model" in load:
        for name, check in (("model", _check_model), ("teacher", _check_teacher)):
            if name in specified:
                problems.call(name, check, specified[name], folder)
    data = {key: specified[key] for key in ("data", "eval_data") if is_suite(specified.get(key))}
    suites = {key: problems.call("", suite_of, source, key) for key, source in data.items() if {*load} - {"model"}}
    if "rewards" in load:
        _load_functions(run, specified, suites.get("data") or Suite(rows=[]), problems)
    if "data" in load:
        _load_rows(run, specified, suites, problems)
    only_teacher = not run.rewards and run.teacher is not None
    if not problems and run.rows and not (run.tools or run.environment_factory or only_teacher):
        problems.call("", lambda: check_reward_fns(run.rewards, run.rows[0], argument="data", rows=run.rows))
    raise_all(str(path), list(dict.fromkeys(problems)))  # errors in templates occur once for each dataset
    return run


def _key_problems(values: Json, load: Sequence[Part]) -> Iterator[str]:
    """Yield an error message for each unknown or missing key, and for each invalid value of a key in `_KINDS`."""
    for name in values:
        if name not in GROUPS:
            yield unknown_field(name, set(GROUPS), hints() | RENAMED).replace("no such field", "no such key", 1)
    for name, kind in _KINDS.items():
        if values.get(name) is not None and (fault := read(kind, values[name])[1]):
            yield f"{name} = {show(values[name])}: {fault}"
    optional = is_suite(values.get("data")) or any(
        values.get(key) is not None for key in ("environment_factory", "teacher")
    )
    for name in load:
        if values.get(name) in (None, []) and not (name == "rewards" and optional):
            yield f"{name} is missing; set it to {RUN_KEYS[name]}"


def _read_stages(specified: Json) -> tuple[str, ...]:
    stages = specified.get("stages", ["grpo"])
    if stages not in (["sft"], ["grpo"], ["sft", "grpo"]):
        raise ValueError(f"stages must be [sft, grpo], [sft] or [grpo]; got {show(stages)}")
    if "sft" in stages and not isinstance(sft := specified.get("sft"), dict):
        raise ValueError(f"stages includes sft: sft must be a mapping with data and SFTConfig fields; got {show(sft)}")
    if "sft" not in stages and "sft" in specified:
        raise ValueError("sft is set, but stages does not include it; set stages: [sft, grpo], or remove sft")
    return tuple(stages)


def _read_sft(specified: Json, folder: Path, load: bool) -> SFTStage:
    """Build the SFT stage from a run's keys. Raises ValueError, with one line per error, if it is invalid."""
    values, problems = specified["sft"], _Problems()
    fields = {field.name for field in dataclasses.fields(SFTConfig)}
    known = {*fields, "data", "eval_data", "columns", "prompt"}
    shared = _pick(specified, ("seed", "mesh", "compute_dtype", "chat_template_kwargs"))  # also the defaults for SFT
    problems += [unknown_field(name, known, {}) for name in values if name not in known]
    config = problems.call("", SFTConfig.from_dict, shared | _pick(values, fields)) or SFTConfig()
    problems[:] = [f"sft.{line}" for line in problems]
    if load and values.get("data") is None:
        problems.append("sft.data is missing; set it to a file, the name of a dataset, or module:name")

    def read_examples(key: str) -> list[Row]:
        return examples.load_examples(
            resolve_source(values[key], folder, f"sft.{key}"),
            text_field=config.dataset_text_field,
            columns=values.get("columns"),
            prompt=values.get("prompt"),
            argument=f"sft.{key}",
        )

    keys = [key for key in ("data", "eval_data") if load and values.get(key) is not None]
    rows = {key: problems.call("", read_examples, key) for key in keys}
    raise_all("sft", problems)
    return SFTStage(config, rows.get("data") or [], rows.get("eval_data"))


def _load_functions(run: RunFile, specified: Json, suite: Suite, problems: _Problems) -> None:
    for i, entry in enumerate(_as_list(specified.get("rewards", SUITE if suite.rows else None))):
        if entry == SUITE and suite.rows:
            run.rewards += suite.reward_fns
        elif (function := problems.call(f"rewards[{i}]", reward_function, entry, run.folder)) is not None:
            run.rewards.append(function)
    tools = [problems.call("tools", find, tool, run.folder) for tool in _as_list(specified.get("tools"))]
    run.tools = [tool for tool in tools if tool is not None] if "tools" in specified else suite.tools
    run.environment_factory = suite.environment_factory
    readers = {"environment_factory": find, "sampler": _sampler, "advantage_fn": find, "surrogate": find}
    for name in readers.keys() & specified.keys():
        setattr(run, name, problems.call(name, readers[name], specified[name], run.folder))
    if suite.reward_weights is not None and not {"rewards", "reward_weights"} & specified.keys():
        run.config = dataclasses.replace(run.config, reward_weights=suite.reward_weights)


def _load_rows(run: RunFile, specified: Json, suites: Mapping[str, Suite | None], problems: _Problems) -> None:
    columns, prompt = specified.get("columns"), specified.get("prompt")

    def read_rows(source: object, key: str) -> list[Row]:
        return load_rows(resolve_source(source, run.folder, key), columns=columns, prompt=prompt, argument=key)

    sources = {key: specified[key] for key in ("data", "eval_data") if key in specified and key not in suites}
    sources |= {key: suite.rows for key, suite in suites.items() if suite is not None}
    rows = {key: problems.call("", read_rows, source, key) for key, source in sources.items()}
    run.rows, run.eval_rows = rows.get("data") or [], rows.get("eval_data")


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _pick(values: Json, names: Sequence[str] | Mapping[str, object] | set[str]) -> dict[str, Any]:
    """Select the given names from a mapping. A mesh such as "data=2,fsdp=4" is converted to a mapping."""
    picked = {name: value for name, value in values.items() if name in names}
    if isinstance(picked.get("mesh"), str):
        picked["mesh"] = parse_mesh(picked["mesh"])
    return picked


def _sampler(entry: object, folder: Path) -> Sampler:
    return find(entry, folder) if is_reference(entry) else server_of(entry, vllm)


def read_lora(entry: object) -> dict[str, Any] | None:
    """Convert a rank or a mapping to arguments for `add_lora`. Defaults: rank 16, alpha twice the rank."""
    if entry is None:
        return None
    specified = {"rank": entry} if isinstance(entry, int) else entry
    if not isinstance(specified, dict) or not specified.keys() <= _LORA.keys():
        raise ValueError(f"must be a rank, or a mapping with some of the keys {', '.join(_LORA)}")
    errors = {name: read(_LORA[name], value)[1] for name, value in specified.items()}
    raise_all("lora", [f"{name} = {show(specified[name])}: {fault}" for name, fault in errors.items() if fault])
    return {"rank": 16, "alpha": 2.0 * specified.get("rank", 16), **specified}


def _check_model(entry: object, folder: Path) -> None:
    if is_reference(entry):
        find(entry, folder)
    elif isinstance(entry, str):
        find_checkpoint(in_folder(entry, folder), weights=False)
    else:
        raise ValueError("use a name on the hub, a directory, or module:function")


def _check_teacher(entry: object, folder: Path) -> None:
    if isinstance(entry, dict):
        server_of(entry, vllm_scorer)
    else:
        _check_model(entry, folder)
