"""Completions of prompts: `generate` is the loop, `decode` has its compiled parts, `ladder` chooses their shapes."""

from grpo_jax.rollout.generate import generate

__all__ = ["generate"]
