"""Configuration: `GRPOConfig`, the batch sizes derived from it, and the validation of its fields."""

from grpo_jax.config.checks import run_problems
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.settings import Sizes

__all__ = ["GRPOConfig", "Sizes", "run_problems"]
