"""Compatibility with TRL: its `GRPOTrainer` on top of `train`, and conversion of its configs."""

from grpo_jax.compat.migrate import from_trl
from grpo_jax.compat.trainer import GRPOConfig, GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "from_trl"]
