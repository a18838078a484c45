"""What survives a run: checkpoints, what may differ on resume, and the run directory with its lock."""

from grpo_jax.keep.checkpoint import Checkpoints

__all__ = ["Checkpoints"]
