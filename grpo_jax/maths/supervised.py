"""Supervised losses: negative log-likelihood of target tokens (SFT) and divergence from a teacher (distillation).

```
full distributions       ── divergence ────────────┐
k tokens per position    ── top_k_divergence ──────┼──► [..., T] ── reduction of `loss_type` ──► loss
sampled tokens           ── sampled_divergence ────┘
```

In distillation, completions are sampled from the policy, and only the policy has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import (
    MIN_LOG_PROB,
    Scalar,
    as_float,
    as_mask,
    bound_log_probs,
    cast_like,
    one_of,
    sg,
    ste_clip,
)
from grpo_jax.maths.metrics import MetricSums, token_totals
from grpo_jax.maths.surrogates import LOSS_TYPES, Counts, token_ratio


def likelihood_loss(
    log_probs: jax.Array, mask: jax.Array, *, loss_type: str = "nll", num_tokens: Scalar | None = None
) -> jax.Array:
    """Compute the SFT loss, the negative log-likelihood of the target tokens.

        nll:  Σ m · (−l) / max(Σ m, 1)
        dft:  Σ m · (−sg(p) · l) / max(Σ m, 1),   p = exp(l),   sg = stop_gradient

    "nll" has the gradient of `grpo_loss(..., loss_type="bnpo")` with advantages 1, ratio 1 and beta 0.

    Args:
      log_probs: [..., T] float, log-probs l of the target tokens, in nats.
      mask: [..., T] bool or 0/1, the mask m, which is 1 at the target tokens.
      loss_type: "nll" or "dft".
      num_tokens: [] number, Σ m over the whole minibatch if this call computes the loss for a part of it. If None, the
        tokens in this call are counted.

    Returns:
      [] float32 (float64 for float64 log_probs), nats per token.

    References:
      Dynamic Fine-Tuning (arXiv:2508.05629), equation 9; TRL's `SFTTrainer.compute_loss`.
    """
    one_of("loss_type", loss_type, ("nll", "dft"))
    log_probs = as_float("log_probs", log_probs)
    mask = as_mask(log_probs, mask)
    l = bound_log_probs(log_probs, mask)
    per_token = jnp.where(mask, -l if loss_type == "nll" else -sg(jnp.exp(l)) * l, 0)
    return per_token.sum() / jnp.maximum(mask.sum() if num_tokens is None else num_tokens, 1)


def likelihood_loss_terms(
    log_probs: jax.Array,
    entropies: jax.Array,
    likeliest: jax.Array,
    mask: jax.Array,
    *,
    loss_type: str,
    num_tokens: Scalar,
) -> tuple[jax.Array, MetricSums]:
    """Compute the contribution of a part of a minibatch to `likelihood_loss`, and the part's metric sums.

    All arrays are [..., T]. `entropies` (nats) and `likeliest` are used for metrics only: `likeliest` is 1 where the
    target token has the largest probability, and its mean is the metric `mean_token_accuracy`.
    """
    chex.assert_equal_shape([log_probs, entropies, likeliest, mask])
    loss = likelihood_loss(log_probs, mask, loss_type=loss_type, num_tokens=num_tokens)
    values = {"entropy": entropies, "mean_token_accuracy": likeliest}
    totals = token_totals({name: jnp.where(mask, x, 0) for name, x in values.items()}, mask)
    sums = {"loss": loss, "tokens": mask.sum(), "rows": jnp.asarray(math.prod(mask.shape[:-1]))}
    sums |= {f"{name}_sum": total for name, total in totals.items()}
    return loss, MetricSums(sums={name: sg(x.astype(loss.dtype)) for name, x in sums.items()}, maxes={})


FULL = -1e-7
"""Upper bound on the log of the mass of k tokens. The other tokens keep about 1e-7, the resolution of float32."""


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Return Σ p (log p − log q) over the last axis."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _jsd(log_p: jax.Array, log_q: jax.Array, alpha: Scalar) -> jax.Array:
    log_m = jnp.logaddexp(log_p + jnp.log1p(-alpha), log_q + jnp.log(alpha))
    return alpha * _kl(log_q, log_m) + (1 - alpha) * _kl(log_p, log_m)


DIVERGENCES: dict[str, Callable[[jax.Array, jax.Array, Scalar], jax.Array]] = {
    "reverse_kl": lambda log_p, log_q, alpha: _kl(log_p, log_q),
    "forward_kl": lambda log_p, log_q, alpha: _kl(log_q, log_p),
    "jsd": _jsd,
}


def divergence(
    log_probs: jax.Array, teacher_log_probs: jax.Array, *, kind: str = "reverse_kl", alpha: Scalar = 0.5
) -> jax.Array:
    """Compute a divergence between the policy's distribution p and the teacher's distribution q.

        reverse_kl: KL(p‖q) = Σ p (log p − log q)          forward_kl: KL(q‖p)
        jsd: alpha·KL(q‖m) + (1 − alpha)·KL(p‖m),  m = (1 − alpha)·p + alpha·q

    As alpha → 0, jsd / alpha approaches the forward KL. As alpha → 1, jsd / (1 − alpha) approaches the reverse KL.
    Log-probs below −1e4 are treated as −1e4.

    Args:
      log_probs: [..., V] float, normalized policy log-probs, in nats.
      teacher_log_probs: [..., V] float, normalized teacher log-probs, in nats.
      kind: "reverse_kl", "forward_kl" or "jsd".
      alpha: teacher weight in jsd, in (0, 1); not used by the other kinds.

    Returns:
      [...] float32 (float64 for float64 input), nats ≥ 0.

    Gradient:
      With respect to `log_probs`, for a given state. It does not include the effect of a token on later states.

    References:
      GKD (arXiv:2306.13649), equation 1, where alpha is called beta.
    """
    one_of("kind", kind, DIVERGENCES)
    log_probs = as_float("log_probs", log_probs)
    teacher = sg(cast_like("teacher_log_probs", teacher_log_probs, log_probs))
    log_p, log_q = (ste_clip(x, MIN_LOG_PROB, jnp.inf) for x in (log_probs, teacher))
    return DIVERGENCES[kind](log_p, log_q, alpha)


def with_rest(log_probs: jax.Array) -> jax.Array:
    """Append the log of the other tokens' mass, 1 − Σ exp(log_probs): [..., k] → [..., k + 1].

    A mass below 1e-7 is replaced with 1e-7.
    """
    mass = jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1, keepdims=True), FULL)
    return jnp.concatenate([log_probs, jnp.log(-jnp.expm1(mass))], axis=-1)


def top_k_divergence(
    log_probs: jax.Array, teacher_log_probs: jax.Array, *, kind: str = "reverse_kl", alpha: Scalar = 0.5
) -> jax.Array:
    """Compute `divergence` from the log-probs of k tokens, with all other tokens merged into one.

    Let r and s be the masses of the merged tokens ("rest") under the policy p and the teacher q. The result is smaller
    than the divergence between the full distributions by

        reverse_kl: r · KL(p given the rest ‖ q given the rest)
        forward_kl: s · KL(q given the rest ‖ p given the rest)
        jsd: at most ((1 − alpha)·r + alpha·s) · log 2

    Args:
      log_probs: [..., k] float, policy log-probs of k distinct tokens, usually the teacher's most likely, in nats.
      teacher_log_probs: [..., k] float, teacher log-probs of the same tokens, in nats.
      kind: as in `divergence`.
      alpha: as in `divergence`.

    Returns:
      [...] float32 (float64 for float64 input), nats ≥ 0.

    References:
      SDPO (arXiv:2601.20802), top-K distillation with a tail; TRL 1.16's `add_tail_bucket`.
    """
    log_probs = as_float("log_probs", log_probs)
    teacher = cast_like("teacher_log_probs", teacher_log_probs, log_probs)
    log_p, log_q = (ste_clip(x, MIN_LOG_PROB, jnp.inf) for x in (log_probs, teacher))
    return divergence(with_rest(log_p), with_rest(log_q), kind=kind, alpha=alpha)


def sampled_divergence(
    log_probs: jax.Array, old_log_probs: jax.Array | None, teacher_log_probs: jax.Array, mask: jax.Array
) -> jax.Array:
    """Estimate the reverse KL from sampled tokens: w · sg(l − l_teacher), w = exp(l − l_old).

    sg is `stop_gradient`. The gradient is that of the unclipped policy loss with the advantages −sg(l − l_teacher).

    Args:
      log_probs: [..., T] float, log-probs l under the policy, in nats.
      old_log_probs: [..., T] float, log-probs l_old under the policy that sampled the tokens, in nats. If None, sg(l)
        is used, so that w = 1.
      teacher_log_probs: [..., T] float, log-probs l_teacher under the teacher, in nats.
      mask: [..., T] bool or 0/1.

    Returns:
      [..., T] float, nats of either sign; 0 where the mask is 0.

    Gradient:
      Over tokens sampled from the old policy in a given state, the expected value is KL(policy‖teacher) and the
      expected gradient is ∇KL(policy‖teacher), even far from the old policy. `divergence` has a smaller variance.

    References:
      Thinking Machines, "On-Policy Distillation" (2025), with the advantage −(l_old − l_teacher), which equals the
      advantage used here in the first update after a rollout. SDPO (arXiv:2601.20802); TRL 1.16's
      `distillation_mode="sampled_token"`.
    """
    log_probs = as_float("log_probs", log_probs)
    mask = as_mask(log_probs, mask)
    l = bound_log_probs(log_probs, mask)
    l_old = sg(l) if old_log_probs is None else bound_log_probs(sg(cast_like("old_log_probs", old_log_probs, l)), mask)
    l_teacher = bound_log_probs(sg(cast_like("teacher_log_probs", teacher_log_probs, l)), mask)
    return jnp.where(mask, token_ratio(l, l - l_old, mask) * sg(l - l_teacher), 0)


def distillation_loss_terms(
    per_token: jax.Array,
    mask: jax.Array,
    *,
    coef: Scalar = 1.0,
    loss_type: str = "dapo",
    max_completion_length: Scalar | None = None,
    num_rows: Scalar | None = None,
    num_tokens: Scalar | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the loss coef · reduce(per_token), with the reduction for `loss_type`, and the sums for its metrics.

    `per_token`, [..., T] in nats, is a divergence returned by a function in this module. If counts over the whole
    minibatch are passed, the parts' losses sum to the minibatch's loss, as in `losses.grpo_loss_terms`.
    """
    _, reduction = LOSS_TYPES[one_of("loss_type", loss_type, LOSS_TYPES)]
    per_token = as_float("per_token", per_token)
    mask = as_mask(per_token, mask)
    per_token = jnp.where(mask, per_token, 0)
    tokens = jnp.sum(mask) if num_tokens is None else num_tokens
    rows = math.prod(mask.shape[:-1]) if num_rows is None else num_rows
    longest = mask.shape[-1] if max_completion_length is None else max_completion_length
    chex.assert_equal_shape([per_token, mask])
    loss = coef * reduction(per_token, mask, Counts(rows, tokens, tokens, longest))
    total = token_totals({"distillation": per_token}, mask)["distillation"]
    return loss, {"distillation_loss": sg(loss), "distillation_sum": sg(total)}
