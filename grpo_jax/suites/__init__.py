"""Adapters for task suites from other packages. RUN.yaml example: `data: {reasoning_gym: chain_sum, size: 2000}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeGuard

from grpo_jax.suites.openenv import openenv
from grpo_jax.suites.reasoning_gym import reasoning_gym
from grpo_jax.suites.verifiers import verifiers
from grpo_jax.types import Json, Suite

__all__ = ["SUITES", "Suite", "is_suite", "openenv", "reasoning_gym", "suite_of", "verifiers"]

SUITES: dict[str, Callable[..., Suite]] = {"openenv": openenv, "reasoning_gym": reasoning_gym, "verifiers": verifiers}
"""Suite functions by name. `data` maps a name to the function's first argument; other keys are keyword arguments."""


def is_suite(source: object) -> TypeGuard[Json]:
    """Return whether a value for `data` is a mapping that describes a suite."""
    return isinstance(source, Mapping) and bool(SUITES.keys() & source.keys())


def suite_of(source: Json, argument: str = "data") -> Suite:
    """Build the suite that a mapping describes. Raises ValueError, prefixed with `argument`, if that fails."""
    names = sorted(SUITES.keys() & source.keys())
    if len(names) != 1:
        raise ValueError(f"{argument} must name exactly one suite; got {' and '.join(names)}")
    function, keywords = SUITES[names[0]], {name: value for name, value in source.items() if name != names[0]}
    try:
        return function(source[names[0]], **keywords)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument}: {names[0]}: {error}") from error
