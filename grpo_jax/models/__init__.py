"""One Flax decoder by configuration, and the log-probs of completions under it. Pure: jax and flax alone.

`transformer` is put together from `layers`, `rope`, `attention`, `experts`, `matmul` and `wide`; `lora` adds adapters;
`packing` lays rows end to end; `scoring` asks a model for the log-probs of completions.
"""

from grpo_jax.models.layers import TransformerConfig
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.rope import Rope
from grpo_jax.models.scoring import completion_log_probs
from grpo_jax.models.transformer import Transformer

__all__ = ["LoraModel", "Rope", "Transformer", "TransformerConfig", "completion_log_probs"]
