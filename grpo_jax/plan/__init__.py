"""What a run will need, on devices that may not be there: `estimate` asks the compiler, `bounds` the arithmetic."""

from grpo_jax.plan.estimate import Plan, plan

__all__ = ["Plan", "plan"]
