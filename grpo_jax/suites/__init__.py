"""Suites of tasks that others have made, each by a thin adapter whose package is an extra.

A RUN.yaml names a suite as `{reasoning_gym: chain_sum, size: 2000, seed: 1}`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeGuard

from grpo_jax.messages import nearest
from grpo_jax.suites.openenv import openenv
from grpo_jax.suites.reasoning_gym import reasoning_gym
from grpo_jax.suites.suite import Suite
from grpo_jax.suites.verifiers import verifiers
from grpo_jax.types import Json

__all__ = ["SUITES", "Suite", "is_suite", "openenv", "reasoning_gym", "suite_of", "verifiers"]

SUITES: dict[str, Callable[..., Suite]] = {"openenv": openenv, "reasoning_gym": reasoning_gym, "verifiers": verifiers}
"""The key of a suite → the function whose first argument stands behind it, and the others beside it."""


def is_suite(source: object) -> TypeGuard[Json]:
    """Return whether a value under `data` names a suite.

    Example:
      >>> is_suite({"reasoning_gym": "chain_sum"}), is_suite({"path": "rows.jsonl"}), is_suite("rows.jsonl")
      (True, False, False)
    """
    return isinstance(source, Mapping) and bool(SUITES.keys() & source.keys())


def suite_of(source: Json, argument: str = "data") -> Suite:
    """Return the suite that a mapping names, or raise ValueError, which begins with `argument`.

    The mapping has one key of `SUITES` with the first argument of its function, and the function's other arguments.
    """
    names = sorted(SUITES.keys() & source.keys())
    if len(names) != 1:
        raise ValueError(f"{argument} names {' and '.join(names)}: give one suite")
    function, keywords = SUITES[names[0]], {name: value for name, value in source.items() if name != names[0]}
    (first, _), *others = inspect.signature(function).parameters.items()
    known = dict(others)
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for name in keywords:
        if not isinstance(name, str) or name == first or not (anything or name in known):
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"beside {names[0]} there are {', '.join(known)}"
            raise ValueError(f"{argument}.{name}: no such key; {hint}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY and name not in keywords:
            raise ValueError(f"{argument}.{name}: is missing, and {names[0]} needs it")
    try:
        return function(source[names[0]], **keywords)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error
