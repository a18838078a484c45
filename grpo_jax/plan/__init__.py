"""What a run will need, on devices that may not be there: `estimate` asks the compiler, `bounds` the arithmetic."""

from typing import Any

from grpo_jax.plan.estimate import plan, programs
from grpo_jax.plan.report import Plan

# `grpo_jax.plan` is this package to an import, and the function to whoever takes it from `grpo_jax`: both have it.
_both: Any = plan
_both.programs = programs

__all__ = ["Plan", "plan", "programs"]
