"""Objects that a RUN.yaml names: `module:name` or `file.py:name`, reward functions, servers, rows and files."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from grpo_jax import rewards
from grpo_jax.engines import Engine, EngineScorer, vllm, vllm_scorer
from grpo_jax.hub.files import read_json
from grpo_jax.messages import nearest, show
from grpo_jax.run.sampler import Sampler
from grpo_jax.suites import is_suite, suite_of
from grpo_jax.text.sources import is_hub_name
from grpo_jax.types import Json, RewardFn

SHIPPED: dict[str, Callable[..., RewardFn]] = {
    name: getattr(rewards, name) for name in rewards.__all__ if name.endswith(("_reward", "_punishment"))
}
"""Functions of the package that return a reward function."""

_PATHS = ("model", "data", "eval_data", "teacher", "path", "tokenizer", "config")
# Keys, of a run or of a mapping in it, whose text may be a path.
_FORM = "write module:name or file.py:name"


def is_reference(text: object) -> TypeGuard[str]:
    """Return whether a text names an object of a module or of a Python file.

    Example:
      >>> [is_reference(text) for text in ("my.rewards:right", "src/judge.py:score", "data.jsonl", "C:/data.jsonl")]
      [True, True, False, False]
    """
    return isinstance(text, str) and re.fullmatch(r"(?:[\w.]+|.+\.py):[A-Za-z_][\w.]*", text) is not None


def find(text: object, folder: Path) -> Any:
    """Return the object that `module:name` or `file.py:name` names.

    Files are relative to the folder; modules are looked up in it after the installed ones. Raises ValueError if the
    text is not a reference, the module or the name does not exist, or the import fails.
    """
    if not is_reference(text):
        raise ValueError(f"is not a reference: {_FORM}")
    where, _, name = text.rpartition(":")
    try:
        module = _import_file(folder / where) if where.endswith(".py") else _import_module(where, folder)
    except (Exception, SystemExit) as error:  # the module's code may raise anything
        raise ValueError(f"{where} cannot be imported ({type(error).__name__}: {error}); {_FORM}") from error
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        close = nearest(name, [other for other in vars(module) if not other.startswith("_")])
        hint = f"did you mean {close}?" if close else "name one that it defines"
        raise ValueError(f"{where} has no {name}; {hint}") from None


def _import_module(name: str, folder: Path) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Import a file, as the module of its name unless another module has it, so that worker processes find it."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = sys.modules.get(path.stem)
    if found is None and (spec := importlib.util.find_spec(path.stem)) is not None and spec.origin == str(path):
        return importlib.import_module(path.stem)
    if found is not None and getattr(found, "__file__", None) == str(path):
        return found
    name = f"_of_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reward_function(entry: object, folder: Path) -> RewardFn:
    """Return the reward function of an entry of `rewards`, or raise ValueError.

    An entry is a reference, the name of a shipped function, or `{name: arguments}`, which calls it with keywords (a
    mapping), positional arguments (a list) or one argument. The folder is as in `find`.
    """
    if isinstance(entry, dict) and len(entry) != 1:
        raise ValueError("names more than one function; write each as a list entry of its own")
    name, arguments = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
    shipped = SHIPPED.get(str(name))
    if shipped is None and not is_reference(name):
        close = nearest(name, SHIPPED)
        hint = f"did you mean {close}?" if close else f"{_FORM}, or one of {', '.join(SHIPPED)}"
        raise ValueError(f"no such reward function; {hint}")
    made: Any = shipped or find(name, folder)
    if shipped or isinstance(entry, dict):
        made = _call(made, name, arguments)
    if not callable(made):
        raise ValueError(f"is a {type(made).__name__}, not a function")
    function: RewardFn = made
    return function


def _call(factory: Callable[..., object], name: object, arguments: object) -> object:
    """Call a factory with the arguments that follow its name."""
    try:
        if isinstance(arguments, dict):
            return factory(**arguments)
        return factory(*arguments) if isinstance(arguments, list) else factory(arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} refuses its arguments ({error})") from error


def sampler_of(entry: object, folder: Path) -> Sampler:
    """Return the engine of an entry of `sampler`: `{vllm: {base_url: ...}}`, or a reference."""
    if is_reference(entry):
        found: Sampler = find(entry, folder)
        return found
    if not isinstance(entry, dict) or [*entry] != ["vllm"]:
        raise ValueError("write {vllm: {base_url: http://HOST:PORT}}, or module:name")
    made = _call(vllm, "vllm", _server_arguments(entry))
    assert isinstance(made, Engine)
    return made


def scorer_of(entry: object) -> EngineScorer | None:
    """Return the server that an entry of `teacher` names; None if it names a model."""
    if not isinstance(entry, dict) or "vllm" not in entry:
        return None
    if len(entry) != 1:
        raise ValueError("vllm takes no keys next to it: the server decides how its model is stored")
    made = _call(vllm_scorer, "vllm_scorer", _server_arguments(entry))
    assert isinstance(made, EngineScorer)
    return made


def _server_arguments(entry: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments under `vllm`, which may be only the address."""
    arguments = entry["vllm"] if isinstance(entry["vllm"], dict) else {"base_url": entry["vllm"]}
    if "api_key" in arguments:
        raise ValueError(
            "api_key: keep keys out of files; set VLLM_API_KEY in the environment, or name its variable by api_key_env"
        )
    return arguments


def teacher_model(entry: object) -> tuple[object, str | None]:
    """Return the model that an entry of `teacher` names, and how it is quantized."""
    if not isinstance(entry, Mapping):
        return entry, None
    if "model" not in entry or not entry.keys() <= {"model", "quantize"}:
        raise ValueError("give a mapping of model and quantize, or of vllm alone")
    return entry["model"], entry.get("quantize")


def resolve_source(source: object, folder: Path, argument: str) -> Any:
    """Return the value of a key such as `data` for `load_rows`: paths made absolute, references and suites loaded."""
    if is_suite(source):
        return suite_of(source, argument).rows
    if isinstance(source, Mapping) and "path" in source:
        return {**source, "path": _located(source["path"], folder, argument)}
    if isinstance(source, str) and is_hub_name(source) and not (folder / source).exists():
        return {"name": source}
    return _located(source, folder, argument)


def _located(source: object, folder: Path, argument: str) -> object:
    """Return the rows that a reference names, or the path of a file; anything else unchanged."""
    if is_reference(source):
        try:
            found = find(source, folder)
            return found() if callable(found) else found
        except ValueError as error:
            raise ValueError(f"{argument} = {source!r}: {error}") from error
    return folder / Path(source).expanduser() if isinstance(source, str) else source


def config_of(model: Json, folder: Path) -> Json:
    """Return the config of new weights: a mapping, or the path of a config.json."""
    stated = model.get("config")
    if isinstance(stated, Mapping):
        return stated
    config = read_json(folder / str(stated))
    if config is None:
        raise ValueError(f"config = {show(stated)} is not a file; give a config.json")
    return config


def in_folder(name: str, folder: Path) -> str:
    """Return the path of a name in the folder if it exists, else the name, which may be one of the hub."""
    path = folder / Path(name).expanduser()
    return str(path) if path.exists() else name


def from_here(value: object, name: str = "") -> object:
    """Return the value of a key of the command line, with files of the current directory as absolute paths."""
    if isinstance(value, list):
        return [from_here(item, name) for item in value]
    if isinstance(value, dict):
        return {from_here(key): from_here(inner, str(key)) for key, inner in value.items()}
    file, reference, attribute = value.rpartition(":") if is_reference(value) else (value, "", "")
    if not isinstance(file, str) or not (file.endswith(".py") if reference else name in _PATHS):
        return value
    path = Path(file).expanduser()
    if not path.exists() or (name == "config" and path.is_dir()):  # the config of a dataset is a name
        return value
    return f"{path.resolve()}{reference}{attribute}"
