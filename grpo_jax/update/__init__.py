"""Training updates: `objective` computes the loss, `step` updates any model on any mesh, `packed` does so without
padding, `state` and `optimizer` define the training state, and `not_finite` finds the cause of a skipped update.
"""

from grpo_jax.update.state import TrainState, create_state
from grpo_jax.update.step import train_step

__all__ = ["TrainState", "create_state", "train_step"]
