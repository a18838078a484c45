"""Stages of a run: `prepare`, `collect` (rollout, rewards, advantages), `train` and `evaluate`. Dry run: `rehearse`."""

from grpo_jax.run.evaluate import evaluate, pass_at_k
from grpo_jax.run.rehearse import rehearse
from grpo_jax.run.train import train

__all__ = ["evaluate", "pass_at_k", "rehearse", "train"]
