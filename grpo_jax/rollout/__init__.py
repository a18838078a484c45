"""Sampling of completions: the loop (`generate`), its compiled functions (`decode`) and their shapes (`ladder`)."""

from grpo_jax.rollout.generate import generate

__all__ = ["generate"]
