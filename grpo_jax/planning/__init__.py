"""The needs of a run on devices that may not be there: memory by the compiler, seconds at least by arithmetic."""

from grpo_jax.planning.estimate import plan, programs
from grpo_jax.planning.report import Plan

__all__ = ["Plan", "plan", "programs"]
