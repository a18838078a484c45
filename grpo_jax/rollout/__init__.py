"""Sampling of completions: the loop (`generate`), its compiled functions (`decode`) and the layouts (`ladder`)."""

from grpo_jax.rollout.generate import generate

__all__ = ["generate"]
