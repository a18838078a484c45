"""Training updates: `objective` computes the loss, `step` updates any model on any mesh, `packed` avoids padding for
this package's models, `state` and `optimizer` define the training state, and `not_finite` explains skipped updates.
"""

from grpo_jax.update.state import TrainState, create_state
from grpo_jax.update.step import train_step

__all__ = ["TrainState", "create_state", "train_step"]
