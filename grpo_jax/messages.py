"""Helpers for error messages: shortened values and lists, suggestions for misspelled names, combined errors."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TypeVar, TypeVarTuple

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

foreign_names: list[Callable[[], Mapping[str, str]]] = []
"""Functions that return advice, keyed by names from other libraries, for errors about unknown names."""


def show(value: object, limit: int = 100) -> str:
    """Return the repr of a value, in which all characters after the first `limit` are replaced with "…"."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def one_line(error: BaseException, limit: int | None = 200) -> str:
    """Format an exception as its type and the first line of its message, truncated to `limit` characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:limit]


def shorten(items: Sequence[str], limit: int = 5) -> str:
    """Join the first `limit` items and count the rest, as in "a, b and 1 more"."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name closest to a misspelled `name`, or None if there is no similar name."""
    found = difflib.get_close_matches(str(name)[:100], sorted(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def raise_all(what: str, problems: Sequence[str]) -> None:
    """Raise one ValueError with a line for each problem. Does nothing if there are no problems.

    A problem that is itself a message from this function is split into lines, each prefixed with its heading.

    Example:
      >>> raise_all("this run", ["the template has 2 errors:\\n  a\\n  b", "c"])
      Traceback (most recent call last):
      ValueError: this run has 3 errors:
        the template: a
        the template: b
        c
    """
    lines = [line for problem in problems for line in _flat(problem)]
    if lines:
        count = f"{len(lines)} error{'s' * (len(lines) > 1)}"
        raise ValueError("\n  ".join([f"{what} has {count}:", *lines]))


def _flat(problem: str) -> list[str]:
    """Return a problem as lines. Splits a message from `raise_all` and prepends its heading to each line."""
    heading = re.match(r"(.*) has \d+ errors?:\n  ", problem)
    return [problem] if heading is None else [f"{heading[1]}: {x}" for x in problem[heading.end() :].split("\n  ")]


def problems_of(error: BaseException) -> list[str]:
    """Return the problems listed in an error from `raise_all`, or the message of any other error."""
    return str(error).split("\n  ")[1:] or [str(error)]


class ErrorList(list[Exception]):
    """Errors collected from several checks, to be raised together."""

    def check(self, function: Callable[[*_Arguments], _Result], *args: *_Arguments) -> _Result | None:
        """Call a check and return its result. If it raises ValueError or OSError, store the error and return None."""
        try:
            return function(*args)
        except (ValueError, OSError) as error:
            self.append(error)
            return None

    def raise_together(self, problems: Sequence[str] = ()) -> None:
        """Raise a ValueError with all errors and `problems`, or a lone error unchanged. Does nothing without errors."""
        if len(self) == 1 and not problems:
            raise self[0]
        raise_all("this run", [*(line for error in self for line in problems_of(error)), *problems])


def import_extra(module: str, package: str) -> ModuleType:
    """Import a module from an optional dependency. Raises ValueError with the install command if the import fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{package} is required but cannot be imported ({type(error).__name__}: {error}); run pip install {package}"
        ) from error
