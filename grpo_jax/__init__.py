"""GRPO (Group Relative Policy Optimization) as pure functions in JAX and Flax."""

from grpo_jax.types import Batch, Completions, Prompts

__all__ = ["Batch", "Completions", "Prompts"]
