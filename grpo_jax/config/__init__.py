"""Settings: `GRPOConfig`, the sizes that follow from it, how its fields are read and checked, and TRL's fields."""

from grpo_jax.config.checks import check_run, run_problems
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sizes import Sizes

__all__ = ["GRPOConfig", "Sizes", "check_run", "run_problems"]
