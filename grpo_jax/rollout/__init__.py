"""Completions of prompts: `generate` is the loop, `decode` its compiled parts, `layout` says which one stands where."""

from grpo_jax.rollout.generate import generate

__all__ = ["generate"]
