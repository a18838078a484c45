"""Reading of one checkpoint: its arrays by their shapes, its params alone, and errors of files that cannot be read."""

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
import numpy as np

from grpo_jax.messages import one_line
from grpo_jax.models.sharding import gather_objects
from grpo_jax.types import Batch, Completions, Params, Prompts

_Result = TypeVar("_Result")

Shapes = dict[str, Any] | list[Any] | None
"""JSON of a tree of arrays: field → `Shapes`, or shape and dtype."""


def load_params(run_dir: str | Path, like: Params, step: int | None = None) -> tuple[int, Params]:
    """Return the step and the params of one checkpoint, to evaluate, to chat or to export.

    `like` are the params that the run began with; the arrays get their shapes, dtypes and devices. A `step` of None
    reads the newest checkpoint. Raises a `ValueError` if it does not exist or belongs to another model.
    """
    from orbax.checkpoint import v1 as ocp

    directory = Path(run_dir).expanduser().absolute() / "checkpoints"
    steps = sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())
    chosen = max(steps, default=None) if step is None else step
    if chosen is None or chosen not in steps:
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"; its checkpoints are {', '.join(map(str, steps))}" if steps else "; is it the right directory?"
        raise ValueError(f"run_dir = {str(run_dir)!r} holds {missing}{there}")
    wanted = {"params": jax.tree.map(as_target, like)}
    found, reason = tried(functools.partial(ocp.load_checkpointables, directory / str(chosen), wanted))
    if found is None:
        raise ValueError(
            f"run_dir = {str(run_dir)!r}: the params of step {chosen} cannot be read ({reason}); is it the same model"
            " as in the run?"
        )
    return chosen, found["params"]


def tried(read: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Return a result and "", or None and the error, for files that may be torn or foreign."""
    with warnings.catch_warnings():
        # Orbax leaves the other parts of a load that fails to the garbage collector.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
        try:
            return read(), ""
        except Exception as error:
            reason = one_line(error)
        gc.collect()
    return None, reason


def tried_by_all(read: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Return as `tried` does: a result if every process has one, else None and the first error."""
    found, own = tried(read)
    reason = next(filter(None, gather_objects(own)), "")
    return (None, reason) if reason else (found, "")


def as_target(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def shapes_of(tree: Batch | Completions | Prompts | jax.Array | np.ndarray | None) -> Shapes:
    """Return shapes and dtypes of a tree as JSON."""
    if tree is None:
        return None
    if isinstance(tree, Batch | Completions | Prompts):
        return {field.name: shapes_of(getattr(tree, field.name)) for field in dataclasses.fields(tree)}
    return [list(tree.shape), tree.dtype.name]


def abstract_of(kind: type, shapes: Shapes, sharding: jax.sharding.Sharding) -> Params:
    """Return the abstract arrays of a `kind` with these shapes."""
    if shapes is None:
        return None
    if isinstance(shapes, dict):
        return kind(**{name: abstract_of(Prompts, some, sharding) for name, some in shapes.items()})
    shape, dtype = shapes
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
