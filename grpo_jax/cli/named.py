"""What a RUN.yaml names: functions and classes by `module:name` or `file.py:name`, and the shipped reward functions."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_jax import rewards
from grpo_jax.messages import nearest

SHIPPED = (
    "accuracy_reward",
    "number_reward",
    "format_reward",
    "tag_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
)
"""Factories of `grpo_jax.rewards`, which make a reward function of their arguments."""

_FORM = "write module:name or file.py:name"


def is_reference(text: Any) -> bool:
    """Whether a text names something in a module or in a file of Python.

    Example:
      >>> [is_reference(text) for text in ("my.rewards:right", "src/judge.py:score", "data.jsonl", "C:/data.jsonl")]
      [True, True, False, False]
    """
    return isinstance(text, str) and re.fullmatch(r"(?:[\w.]+|.+\.py):[A-Za-z_][\w.]*", text) is not None


def find(text: Any, folder: Path) -> Any:
    """The object that `module:name` or `file.py:name` names.

    Args:
      text: the reference.
      folder: what files are named from, and where modules are looked for behind those that are installed.

    Raises:
      ValueError: no such form, file, module or name; or the module fails when it is imported.
    """
    if not is_reference(text):
        raise ValueError(f"names nothing in a module: {_FORM}")
    where, _, name = text.rpartition(":")
    try:
        module = _of_file(folder / where) if where.endswith(".py") else _of_name(where, folder)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        names = [other for other in vars(module) if not other.startswith("_")]
        close = nearest(name, names)
        hint = f"did you mean {close}?" if close else "name one that it defines"
        raise ValueError(f"{where} has no {name}; {hint}") from None
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ValueError(f"{where} cannot be imported ({type(error).__name__}: {error}); {_FORM}") from error
    return found


def _of_name(module: str, folder: Path) -> ModuleType:
    """A module, installed or in the folder."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(module)


def _of_file(path: Path) -> ModuleType:
    """The module of a file: by its name, so that worker processes find it too, unless another module has that name."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = sys.modules.get(path.stem)
    if found is None and (spec := importlib.util.find_spec(path.stem)) is not None and spec.origin == str(path):
        return importlib.import_module(path.stem)
    if found is not None and getattr(found, "__file__", None) == str(path):
        return found
    name = f"_of_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "it is a file of Python"
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reward_function(entry: Any, folder: Path) -> Any:
    """The reward function of an entry of `rewards`.

    Args:
      entry: a reference or a shipped name; or `{either: arguments}`, which calls it: a mapping is keywords, a list
        arguments in their order, anything else the one argument.
      folder: as in `find`.

    Raises:
      ValueError: what is wrong with the entry.

    Example:
      >>> reward_function({"number_reward": "solution"}, Path())(completions=["4", "5"], solution=["4", "4"])
      [1.0, 0.0]
    """
    if isinstance(entry, dict):
        if len(entry) != 1:
            raise ValueError("names more than one function; write each as an entry of its own, behind a dash")
        ((name, given),) = entry.items()
        factory = _function(name, folder)
        keywords = given if isinstance(given, dict) else {}
        arguments = [] if isinstance(given, dict) else given if isinstance(given, list) else [given]
        try:
            made = factory(*arguments, **keywords)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} refuses its arguments ({error})") from error
    else:
        made = _function(entry, folder)
        if entry in SHIPPED:
            try:
                made = made()
            except TypeError as error:
                raise ValueError(f"{error}; write its arguments behind it, as {{{entry}: ...}}") from error
    if not callable(made):
        raise ValueError(f"is a {type(made).__name__}, and no function")
    return made


def _function(name: Any, folder: Path) -> Any:
    if name in SHIPPED:
        return getattr(rewards, name)
    if not is_reference(name):
        close = nearest(name, SHIPPED)
        hint = f"did you mean {close}?" if close else f"{_FORM}, or one of {', '.join(SHIPPED)}"
        raise ValueError(f"no such reward function; {hint}")
    return find(name, folder)
