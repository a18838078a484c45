"""Resolution of names in a RUN.yaml, such as `module:name`, to reward functions, servers, datasets and files."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, TypeVar

from grpo_jax import rewards
from grpo_jax.messages import nearest
from grpo_jax.suites import is_suite, suite_of
from grpo_jax.text.sources import is_hub_name
from grpo_jax.types import RewardFn

BUILT_IN: dict[str, Callable[..., RewardFn]] = {
    name: getattr(rewards, name) for name in rewards.__all__ if name.endswith(("_reward", "_punishment"))
}
"""Built-in functions that return a reward function, by name."""

_Server = TypeVar("_Server")
_FORM = "module:name or file.py:name"


def is_reference(text: object) -> TypeGuard[str]:
    """Return whether a value is a string of the form `module:name` or `file.py:name`.

    Example:
      >>> [is_reference(text) for text in ("my.rewards:correct", "src/judge.py:score", "data.jsonl", "C:/data.jsonl")]
      [True, True, False, False]
    """
    return isinstance(text, str) and re.fullmatch(r"(?:[\w.]+|.+\.py):[A-Za-z_][\w.]*", text) is not None


def find(text: object, folder: Path) -> Any:
    """Return the object that `module:name` or `file.py:name` refers to.

    Paths of files are relative to `folder`. Modules in `folder` can be imported, but installed modules take precedence.
    Raises ValueError if the module or name does not exist, or if importing the module fails.
    """
    if not is_reference(text):
        raise ValueError(f"must have the form {_FORM}")
    module_name, _, name = text.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(folder / module_name) if is_file else _import_module(module_name, folder)
    except (Exception, SystemExit) as error:  # the module may raise anything
        raise ValueError(f"{module_name} cannot be imported ({type(error).__name__}: {error})") from error
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        close = nearest(name, [other for other in vars(module) if not other.startswith("_")])
        hint = f"did you mean {close}?" if close else "use a name defined in it"
        raise ValueError(f"{module_name} does not define {name}; {hint}") from None


def _import_module(name: str, folder: Path) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Import a file as the module `path.stem` or, if that name is taken, under a name that workers cannot import."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.find_spec(path.stem) if path.stem not in sys.modules else sys.modules[path.stem].__spec__
    if spec is not None and spec.origin == str(path):
        return importlib.import_module(path.stem)
    name = f"_of_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reward_function(entry: object, folder: Path) -> RewardFn:
    """Return the reward function for an entry of `rewards`. Files are relative to `folder`.

    An entry is a reference, the name of a built-in function, or `{name: arguments}`, where `arguments` is a mapping of
    keyword arguments, a list of positional arguments, or one argument. Raises ValueError for other entries.
    """
    if isinstance(entry, dict) and len(entry) != 1:
        raise ValueError("must name exactly one function; write each function as a separate list entry")
    name, arguments = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
    built_in = BUILT_IN.get(str(name))
    if built_in is None and not is_reference(name):
        close = nearest(name, BUILT_IN)
        hint = f"did you mean {close}?" if close else f"use {_FORM}, or one of {', '.join(BUILT_IN)}"
        raise ValueError(f"unknown reward function; {hint}")
    function: Any = built_in or find(name, folder)
    if built_in or isinstance(entry, dict):
        function = _call(function, name, arguments)
    if not callable(function):
        raise ValueError(f"must be a function; got {type(function).__name__}")
    return function


def _call(factory: Callable[..., _Server], name: object, arguments: object) -> _Server:
    try:
        if isinstance(arguments, dict):
            return factory(**arguments)
        return factory(*arguments) if isinstance(arguments, list) else factory(arguments)
    except TypeError as error:
        raise ValueError(f"{name} cannot be called with these arguments ({error}); see its signature") from error


def server_of(entry: object, factory: Callable[..., _Server]) -> _Server:
    """Return `factory`'s result for the arguments in an entry `{vllm: {base_url: ..., ...}}` or `{vllm: ADDRESS}`."""
    if not isinstance(entry, dict) or [*entry] != ["vllm"]:
        raise ValueError("use {vllm: {base_url: http://HOST:PORT}}, or module:name")
    arguments = entry["vllm"] if isinstance(entry["vllm"], dict) else {"base_url": entry["vllm"]}
    if "api_key" in arguments:
        raise ValueError(
            "api_key must not be stored in a file; set the environment variable VLLM_API_KEY, or set api_key_env to the"
            " name of a different variable"
        )
    return _call(factory, factory.__name__, arguments)


def resolve_source(source: object, folder: Path, argument: str) -> Any:
    """Convert the value of a key such as `data` to an argument for `load_rows`, with absolute paths."""
    if is_suite(source):
        return suite_of(source, argument).rows
    if isinstance(source, Mapping) and "path" in source:
        return {**source, "path": _resolve_path(source["path"], folder, argument)}
    if isinstance(source, str) and is_hub_name(source) and not (folder / source).exists():
        return {"name": source}
    return _resolve_path(source, folder, argument)


def _resolve_path(source: object, folder: Path, argument: str) -> object:
    """Return the rows that a reference names, or a file's absolute path. Other values are returned unchanged."""
    if is_reference(source):
        try:
            rows = find(source, folder)
            return rows() if callable(rows) else rows
        except ValueError as error:
            raise ValueError(f"{argument} = {source!r}: {error}") from error
    return folder / Path(source).expanduser() if isinstance(source, str) else source


def in_folder(name: str, folder: Path) -> str:
    """Return the path of `name` in `folder` if it exists. Otherwise, return `name`, which may be a model on the Hub."""
    path = folder / Path(name).expanduser()
    return str(path) if path.exists() else name


def from_current_directory(value: object) -> object:
    """Make paths in a command-line value absolute if they exist relative to the current directory.

    Only strings that contain a slash or end in a file suffix are treated as paths.
    """
    if isinstance(value, list):
        return [from_current_directory(item) for item in value]
    if isinstance(value, dict):
        return {key: from_current_directory(item) for key, item in value.items()}
    file, colon, name = value.rpartition(":") if is_reference(value) else (value, "", "")
    if not isinstance(file, str) or not ("/" in file or Path(file).suffix):
        return value
    if not os.path.exists(os.path.expanduser(file)):  # unlike Path.exists, also accepts strings too long for a path
        return value
    return f"{Path(file).expanduser().resolve()}{colon}{name}"
