"""Checkpoints of a run: one atomic directory with everything that decides what comes next.

Orbax writes each checkpoint under a temporary name and renames it when it is whole; what a kill leaves behind is
ignored. Beside the state stands the batch in hand, if the run was between two updates of one rollout.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.config import GRPOConfig
from grpo_jax.progress import Progress
from grpo_jax.state import TrainState
from grpo_jax.types import Batch, Prompts

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of a run directory; without a directory, nothing is written and nothing found.

    A context manager: leaving it waits for a save that is still being written.
    """

    def __init__(self, run_dir: str | Path | None, config: GRPOConfig):
        self._checkpointer = None
        if run_dir is not None:
            from orbax.checkpoint import v1 as ocp  # here: importing grpo_jax must stay light

            keep = config.save_total_limit
            policy = ocp.training.preservation_policies.LatestN(keep) if keep else None
            directory = Path(run_dir).expanduser().absolute() / "checkpoints"
            directory.mkdir(parents=True, exist_ok=True)
            self._checkpointer = ocp.training.Checkpointer(directory, preservation_policy=policy)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()

    def save(self, state: TrainState, progress: Progress, batch: Batch | None) -> None:
        """Write a checkpoint of this moment; a step that has one already is left alone."""
        if self._checkpointer is None or self.latest() == progress.step:
            return
        arrays = {"state": state} if batch is None else {"state": state, "batch": batch}
        about = {"progress": json.dumps(progress.to_json()), "batch": json.dumps(_shapes(batch))}
        self._checkpointer.save_checkpointables(progress.step, arrays, custom_metadata=about)

    def latest(self) -> int | None:
        """The step of the newest checkpoint, None if there is none."""
        found = None if self._checkpointer is None else self._checkpointer.latest
        return None if found is None else found.step

    def restore(self, state: TrainState) -> tuple[TrainState, Progress, Batch | None]:
        """The newest checkpoint, shaped and placed like `state`; `state` itself at the start of a new run."""
        step = self.latest()
        if self._checkpointer is None or step is None:
            return state, Progress(), None
        about = self._checkpointer.checkpointables_metadata(step).custom_metadata
        wanted: dict[str, Any] = {"state": jax.tree.map(_abstract, state)}
        shapes = json.loads(about["batch"])
        if shapes is not None:
            wanted["batch"] = _abstract_batch(shapes, state.step.sharding)
        loaded = self._checkpointer.load_checkpointables(step, wanted)
        return loaded["state"], Progress(**json.loads(about["progress"])), loaded.get("batch")


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=x.sharding)


def _shapes(tree: Any) -> Any:
    """Shapes and dtypes of a `Batch` as JSON, None where it has None."""
    if tree is None:
        return None
    if dataclasses.is_dataclass(tree):
        return {field.name: _shapes(getattr(tree, field.name)) for field in dataclasses.fields(tree)}
    return [list(tree.shape), tree.dtype.name]


def _abstract_batch(shapes: dict[str, Any], sharding: jax.sharding.Sharding) -> Batch:
    """The `Batch` that `_shapes` described, of abstract arrays."""

    def leaf(at: Any) -> Any:
        return None if at is None else jax.ShapeDtypeStruct(tuple(at[0]), jnp.dtype(at[1]), sharding=sharding)

    fields = {name: leaf(at) for name, at in shapes.items() if name != "prompts"}
    return Batch(prompts=Prompts(**{name: leaf(at) for name, at in shapes["prompts"].items()}), **fields)
