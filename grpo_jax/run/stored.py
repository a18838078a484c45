"""Reading of one checkpoint: its arrays by their shapes, its params alone, and errors of torn or foreign files."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.messages import one_line
from grpo_jax.models.sharding import gather_objects
from grpo_jax.types import Batch, Completions, Params, Prompts

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

Shapes = dict[str, Any] | list[Any] | None
"""JSON of a tree of arrays: field → `Shapes`, or shape and dtype."""


def load_params(run_dir: str | Path, like: Params, step: int | None = None) -> tuple[int, Params]:
    """Read the params of one checkpoint, to evaluate, to chat or to export.

    Args:
      run_dir: the directory of the run.
      like: params of the policy that the run began with; arrays get their shapes, dtypes and devices.
      step: of the checkpoint; None: the newest one.

    Returns:
      The step and the params.

    Raises:
      ValueError: the checkpoint does not exist, or belongs to another model.
    """
    from orbax.checkpoint import v1 as ocp

    directory = Path(run_dir).expanduser().absolute() / "checkpoints"
    steps = sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())
    chosen = max(steps, default=None) if step is None else step
    if chosen is None or chosen not in steps:
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"; its checkpoints are {', '.join(map(str, steps))}" if steps else "; is it the right directory?"
        raise ValueError(f"run_dir = {str(run_dir)!r} holds {missing}{there}")
    found, reason = tried(ocp.load_checkpointables, directory / str(chosen), {"params": jax.tree.map(as_target, like)})
    if found is None:
        raise ValueError(
            f"run_dir = {str(run_dir)!r}: the params of step {chosen} cannot be read ({reason}); is it the same model"
            " as in the run?"
        )
    return chosen, found["params"]


def tried(function: Callable[[*_Arguments], _Result], *args: *_Arguments) -> tuple[_Result | None, str]:
    """Return a result and "", or None and the reason, for files that may be torn or foreign."""
    with warnings.catch_warnings():
        # Orbax leaves the other parts of a load that fails to the garbage collector.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
        try:
            return function(*args), ""
        except Exception as error:
            reason = one_line(error)
        gc.collect()
    return None, reason


def tried_by_all(function: Callable[[*_Arguments], _Result], *args: *_Arguments) -> tuple[_Result | None, str]:
    """`tried` in all processes: a result if each has one, else None and the first reason."""
    found, own = tried(function, *args)
    reason = next(filter(None, gather_objects(own)), "")
    return (None, reason) if reason else (found, "")


def as_target(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def shapes_of(tree: Batch | Completions | Prompts | jax.Array | np.ndarray | None) -> Shapes:
    """Shapes and dtypes of a tree as JSON."""
    if tree is None:
        return None
    if isinstance(tree, Batch | Completions | Prompts):
        return {field.name: shapes_of(getattr(tree, field.name)) for field in dataclasses.fields(tree)}
    return [list(tree.shape), tree.dtype.name]


def abstract_of(kind: type, shapes: Shapes, sharding: jax.sharding.Sharding) -> Params:
    """The abstract arrays of a `kind` with these shapes; a field that only an earlier version had is left out."""
    if shapes is None:
        return None
    if isinstance(shapes, dict):
        known = [field.name for field in dataclasses.fields(kind) if field.name in shapes]
        return kind(**{name: abstract_of(Prompts, shapes[name], sharding) for name in known})
    shape, dtype = shapes
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
