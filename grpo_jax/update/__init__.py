"""From a batch to the next training state: `objective` (the loss of some rows), `step` (any model, any mesh), `packed`
(the same without the padding), `state`, `optimizer`; `not_finite` names the cause of a skipped update.
"""

from grpo_jax.update.state import TrainState, create_state
from grpo_jax.update.step import train_step

__all__ = ["TrainState", "create_state", "train_step"]
