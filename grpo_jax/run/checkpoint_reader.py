"""Helpers for reading a checkpoint: load only its params, describe its arrays as JSON, and catch read errors."""

from __future__ import annotations

import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from grpo_jax.messages import one_line
from grpo_jax.models.sharding import gather_objects
from grpo_jax.types import ImageTiles, Params, PromptImages, Prompts

_Result = TypeVar("_Result")

Shapes = dict[str, Any] | list[Any] | None
"""JSON description of a tree of arrays: a dict of `Shapes` keyed by field, or a list [shape, dtype]."""


def load_params(run_dir: str | Path, like: Params, step: int | None = None) -> tuple[int, Params]:
    """Load the params in the checkpoint at `step`, with the structure and shardings of `like`. Returns (step, params).

    If `step` is None, the latest is used. Raises ValueError if it is missing, unreadable, or does not match `like`.
    """
    from orbax.checkpoint import v1 as ocp

    directory = Path(run_dir).expanduser().absolute() / "checkpoints"
    steps = sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())
    selected = max(steps, default=None) if step is None else step
    if selected is None or selected not in steps:
        missing = "no checkpoint" if step is None else f"no checkpoint at step {step}"
        hint = f"; available steps: {', '.join(map(str, steps))}" if steps else "; check that run_dir is correct"
        raise ValueError(f"run_dir = {str(run_dir)!r} contains {missing}{hint}")
    wanted = {"params": jax.tree.map(as_target, like)}
    checkpoint, reason = try_read(functools.partial(ocp.load_checkpointables, directory / str(selected), wanted))
    if checkpoint is None:
        raise ValueError(
            f"run_dir = {str(run_dir)!r}: the params at step {selected} cannot be read ({reason}); check that the run"
            " trained this model"
        )
    return selected, checkpoint["params"]


def try_read(read: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Call `read`, which may fail on truncated or invalid files. Returns (result, "") or (None, error message)."""
    with warnings.catch_warnings():
        # After a failed load in orbax, some coroutines are never awaited. Python warns when it collects them.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
        try:
            return read(), ""
        except Exception as error:
            reason = one_line(error)
        gc.collect()
    return None, reason


def try_read_in_all_processes(read: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Call `try_read` in all processes. If a read fails, all processes return None and the first error message."""
    result, error = try_read(read)
    reason = next(filter(None, gather_objects(error)), "")
    return (None, reason) if reason else (result, "")


def as_target(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return an abstract array with the shape, dtype and sharding of `x`, into which orbax restores."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def shapes_of(tree: Params) -> Shapes:
    """Return the shapes and dtypes of a tree as JSON."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {name: shapes_of(x) for name, x in tree.items()}
    if dataclasses.is_dataclass(tree):
        return {field.name: shapes_of(getattr(tree, field.name)) for field in dataclasses.fields(tree)}
    return [list(tree.shape), tree.dtype.name]


_FIELDS = {"prompts": Prompts, "images": PromptImages, "features": ImageTiles}  # all other nested fields are dicts


def abstract_of(kind: type, shapes: Shapes, sharding: jax.sharding.Sharding) -> Params:
    """Rebuild an instance of `kind` from the result of `shapes_of`, with abstract arrays as leaves."""
    if shapes is None:
        return None
    if isinstance(shapes, dict):
        return kind(**{name: abstract_of(_FIELDS.get(name, dict), x, sharding) for name, x in shapes.items()})
    shape, dtype = shapes
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
