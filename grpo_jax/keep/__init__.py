"""The files that a run goes on from: checkpoints, the description that a resumed run is compared with, the lock."""

from grpo_jax.keep.checkpoint import Checkpoints

__all__ = ["Checkpoints"]
