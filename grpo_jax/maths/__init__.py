"""The maths of GRPO: arrays in, arrays out. Pure: jax and chex alone.

Read in this order: `advantages` (rewards to advantages), `credit` (those of turns and tokens), `log_probs` and
`sampling` (logits to tokens and back), `kl`, `correction` (weights for another engine's samples), `surrogates`
(ratio, per-token loss, reduction), `losses` (the objective), `distillation` (what a teacher adds to it), `reference`
(its slow copy), `stops` (where texts end a turn).
"""

from grpo_jax.maths.advantages import compute_advantages, zero_signal_groups
from grpo_jax.maths.correction import sampler_weights
from grpo_jax.maths.credit import turn_advantages
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.log_probs import token_log_probs
from grpo_jax.maths.losses import grpo_loss
from grpo_jax.maths.metrics import update_entropy_coef
from grpo_jax.maths.reference import mixup, sync_reference
from grpo_jax.maths.sampling import sample_tokens

__all__ = [
    "compute_advantages",
    "grpo_loss",
    "kl_divergence",
    "mixup",
    "sample_tokens",
    "sampler_weights",
    "sync_reference",
    "token_log_probs",
    "turn_advantages",
    "update_entropy_coef",
    "zero_signal_groups",
]
