"""The math of GRPO: pure functions on arrays that depend only on jax and chex.

Suggested reading order: `advantages` (rewards to advantages), `credit` (turn and token rewards to advantages),
`sampling` (logits to tokens), `log_probs`, `kl`, `surrogates` (ratios, per-token losses, reductions), `losses` (the
objective), `supervised` (SFT and distillation), `reference` (the reference policy), `stops` (stop strings).
"""

from grpo_jax.maths.advantages import compute_advantages, zero_signal_groups
from grpo_jax.maths.credit import turn_advantages
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.log_probs import token_log_probs
from grpo_jax.maths.losses import grpo_loss
from grpo_jax.maths.metrics import update_entropy_coef
from grpo_jax.maths.reference import mixup, sync_reference
from grpo_jax.maths.sampling import sample_tokens
from grpo_jax.maths.surrogates import sampler_weights

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
