"""Hashes of the caller's functions and of frozen arrays, used to detect changes when a run is resumed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import textwrap
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from grpo_jax.models.sharding import fetch
from grpo_jax.rewards.contract import reward_names
from grpo_jax.types import Params, RewardFn

if TYPE_CHECKING:
    from grpo_jax.rollout.interaction import Interaction


def fingerprint(tree: Params) -> str:
    """Return a hash of each array's first elements."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(fetch(leaf[(0,) * (leaf.ndim - 1)][:64] if leaf.ndim else leaf).tobytes())
    return digest.hexdigest()


def reward_sources(reward_fns: Sequence[RewardFn], interaction: Interaction | None) -> dict[str, dict[str, str]]:
    """Hash the sources of all functions that affect rewards, keyed by the argument to `train` and by name."""
    names = reward_names(reward_fns)
    found = {"reward_fns": {name: sources_of(fn) for name, fn in zip(names, reward_fns, strict=True)}}
    if interaction is not None:
        found["tools"] = {name: sources_of(tool.function) for name, tool in interaction.tools.items()}
        found["environment_factory"] = {
            kind.__name__: sources_of(kind) + sources_of(interaction.factories[name])
            for name, kind in interaction.kinds.items()
        }
    return found


def source_of(function: Callable[..., object]) -> dict[str, str | None]:
    """Return the name of a function and the hash of its source without comments (None if the source is unavailable).

    The hash includes the reprs of a partial's arguments and a dataclass's fields, but not closures or globals.
    """
    bound = ""
    while isinstance(function, functools.partial):
        bound, function = f"{bound}{function.args}{sorted(function.keywords.items())}", function.func
    if not hasattr(function, "__qualname__"):
        bound, function = bound + (repr(function) if dataclasses.is_dataclass(function) else ""), type(function)
    try:
        source = inspect.getsource(function)
        with contextlib.suppress(SyntaxError):  # a lambda's source may be part of an expression
            source = ast.unparse(ast.parse(textwrap.dedent(source)))
        bound = re.sub(r" at 0x[0-9a-f]+", "", bound)  # addresses differ between processes
        found = hashlib.sha256((source + bound).encode()).hexdigest()
    except (OSError, TypeError):
        found = None
    return {"name": f"{function.__module__}.{function.__qualname__}", "source": found}


def sources_of(function: Any, seen: set[int] | None = None) -> str:
    """Hash the source of a reward function, tool or environment, including the functions that it uses.

    The latter are found in partials, attributes, closures and globals from the same module. Values and base classes
    are not hashed. For this package's functions, only name and settings are hashed, because versions differ in source.
    """
    seen = set() if seen is None else seen
    seen.add(id(function))
    partial, named = isinstance(function, functools.partial), hasattr(function, "__qualname__")
    kind = function if named else type(function)
    shipped = partial or _is_shipped(kind)
    valued = partial or (shipped and dataclasses.is_dataclass(function))
    used: list[object] = [] if named else [*getattr(function, "__dict__", {}).values()]
    if partial:
        used = [function.func, *function.args, *function.keywords.values()]
    elif hasattr(function, "__code__"):
        used = [*map(function.__globals__.get, _names_in(function.__code__))]
        used = [one for one in used if getattr(one, "__module__", None) == function.__module__]
        with contextlib.suppress(ValueError):  # empty closure cell
            used += [cell.cell_contents for cell in function.__closure__ or ()]
    elif isinstance(kind, type) and not shipped:
        used += vars(kind).values()
    found = [kind.__qualname__ if shipped else str(source_of(kind)["source"])]
    for one in used:
        if isinstance(one, types.FunctionType | types.MethodType | functools.partial) or _is_shipped(type(one)):
            found += [] if id(one) in seen else [sources_of(one, seen)]
        elif valued and isinstance(one, str | int | float | re.Pattern):
            found.append(repr(one))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _names_in(code: types.CodeType) -> list[str]:
    """Return the names of the globals and attributes that a code object uses, in code order."""
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _names_in(one)]
    return [*code.co_names, *inner]


def _is_shipped(kind: Any) -> bool:
    """Return whether a function or class is defined in this package."""
    return str(kind.__module__).partition(".")[0] == __name__.partition(".")[0]
