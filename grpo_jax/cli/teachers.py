"""The teacher that a RUN.yaml names, loaded."""

from __future__ import annotations

from typing import Literal

from grpo_jax.cli.named import find, is_reference, teacher_model
from grpo_jax.cli.runfile import RunFile, in_folder
from grpo_jax.devices.platform import compute_dtype
from grpo_jax.devices.sharding import make_mesh
from grpo_jax.hub.huggingface import from_pretrained
from grpo_jax.policy import Policy
from grpo_jax.run.teacher import Scorer


def load_teacher(run: RunFile) -> Policy | Scorer | Literal["self"] | None:
    """Load the teacher of a run: a policy, a scorer, "self", or None."""
    if run.teacher is None:
        return None
    if run.teacher == "self":
        return "self"
    model, quantize = teacher_model(run.teacher)
    if is_reference(model):
        found = find(model, run.folder)
        made: Policy | Scorer = found() if callable(found) else found
        return made
    config = run.config
    return from_pretrained(
        in_folder(str(model), run.folder),
        dtype=compute_dtype(config.compute_dtype),
        param_dtype=run.param_dtype,
        mesh=make_mesh(config.mesh) if config.mesh else None,
        quantize=quantize,
    )
