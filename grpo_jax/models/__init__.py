"""One Flax decoder by configuration, and the log-probs of completions under it. Pure: jax and flax alone.

`transformer` is made of the layers in `block`, `attention`, `recurrent`, `experts`, `layers` and `rope`;
`config` has the shapes, `context` what layers keep of earlier tokens. `lora` adds adapters, `packing` packs sequences,
`scoring` computes the log-probs of completions, and `sharding` has the mesh and the table of shardings.
"""

from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.rope import Rope
from grpo_jax.models.scoring import completion_log_probs
from grpo_jax.models.transformer import Transformer

__all__ = ["LoraModel", "Rope", "Transformer", "TransformerConfig", "completion_log_probs"]
