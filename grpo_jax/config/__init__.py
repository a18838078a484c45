"""Settings: `GRPOConfig`, the sizes that follow from it, how its fields are read and checked."""

from grpo_jax.config.checks import run_problems
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.settings import Sizes

__all__ = ["GRPOConfig", "Sizes", "run_problems"]
