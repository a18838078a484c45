"""TRL's trainer over `train`, and a translation of its settings."""

from grpo_jax.compat.migrate import from_trl
from grpo_jax.compat.trainer import GRPOConfig, GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "from_trl"]
