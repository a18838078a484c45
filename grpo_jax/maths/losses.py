"""The GRPO objective: ratio, per-token surrogate, masks and weights, KL, reduction.

Variants are entries in `surrogates.RATIOS`, `surrogates.LOSS_TYPES` (surrogate and reduction) and `kl.KL_ESTIMATORS`.
Arrays may have any leading axes, such as [B, G, T] or [R, T]. A row of T tokens is one completion.
"""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import (
    MAX_LOG_RATIO,
    Scalar,
    as_float,
    as_mask,
    bound_log_probs,
    cast_like,
    is_static_zero,
    sg,
    with_token_axis,
)
from grpo_jax.maths.kl import k3
from grpo_jax.maths.metrics import MetricSums, finalize_metrics, token_totals, top_entropy_mask
from grpo_jax.maths.surrogates import (
    RATIOS,
    Counts,
    LossSettings,
    Surrogate,
    SurrogateInputs,
    clip_events,
    kl_term,
    off_policy_mask,
    vespo,
    weights_and_log_sums,
)


def _check_terms(
    settings: LossSettings, ref_log_probs: jax.Array | None, entropies: jax.Array | None, entropy_coef: Scalar
) -> None:
    """Raise ValueError if a term is enabled without the array it needs."""
    if ref_log_probs is None and not is_static_zero(settings.beta):
        raise ValueError(
            f"beta={settings.beta} needs ref_log_probs (log-probs under the reference); pass them or set beta=0.0."
        )
    if entropies is None and not (is_static_zero(entropy_coef) and is_static_zero(1 - settings.top_entropy_quantile)):
        raise ValueError(
            f"entropy_coef={entropy_coef} with top_entropy_quantile={settings.top_entropy_quantile} needs entropies "
            "([..., T] in nats); pass them or set entropy_coef=0.0 and top_entropy_quantile=1.0."
        )


def grpo_loss_terms(
    log_probs: jax.Array,
    old_log_probs: jax.Array | None,
    ref_log_probs: jax.Array | None,
    advantages: jax.Array,
    mask: jax.Array,
    settings: LossSettings,
    *,
    entropies: jax.Array | None = None,
    entropy_coef: Scalar = 0.0,
    sampling_log_probs: jax.Array | None = None,
    importance_weights: jax.Array | None = None,
    normalizer: Scalar | None = None,
    num_rows: Scalar | None = None,
    num_tokens: Scalar | None = None,
    num_selected_tokens: Scalar | None = None,
    selected: jax.Array | None = None,
) -> tuple[jax.Array, MetricSums]:
    """Compute the contribution of a part of a minibatch to `grpo_loss`, and the part's metric sums.

    If counts over the whole minibatch are passed, the parts' losses and gradients sum to the minibatch's loss and
    gradient, for any split along the leading axes:

        totals = batch_totals(mask)  # from maths.metrics
        loss = Σ_parts grpo_loss_terms(..., settings, **totals)[0]
        metrics = finalize_metrics(merge_metrics(...))

    Args:
      settings: replaces the arguments to `grpo_loss` that are fields of `LossSettings`. All other arguments that are
        not listed here are the same as in `grpo_loss`.
      num_rows: number of rows (completions) in the minibatch. If None, the rows in this call are counted.
      num_tokens: tokens with mask 1 in the minibatch; default of `normalizer`. If None, this call's tokens are counted.
      num_selected_tokens: number of selected tokens in the minibatch. If None, those in this call are counted.
      selected: [..., T] bool or 0/1, this part's slice of the minibatch's `top_entropy_mask`. If None, the mask is
        computed from the tokens in this call.

    Returns:
      The loss, [] float32 (float64 for float64 log_probs), and the `MetricSums` of this call.
    """
    _check_terms(settings, ref_log_probs, entropies, entropy_coef)
    surrogate, reduction = settings.surrogate_and_reduction
    log_probs = as_float("log_probs", log_probs)
    mask = as_mask(log_probs, mask)
    l = bound_log_probs(log_probs, mask)
    l_old = sg(l) if old_log_probs is None else bound_log_probs(sg(cast_like("old_log_probs", old_log_probs, l)), mask)
    A = jnp.where(mask, with_token_axis("advantages", advantages, l), 0)
    count, longest = jnp.sum(mask), settings.max_completion_length
    num_tokens = count if num_tokens is None else num_tokens
    counts = Counts(
        rows=math.prod(mask.shape[:-1]) if num_rows is None else num_rows,
        tokens=num_tokens,
        normalizer=num_tokens if normalizer is None else normalizer,
        max_completion_length=mask.shape[-1] if longest is None else longest,
    )

    # Policy term. The masks and weights for this term do not apply to the KL term.
    log_ratio = l - l_old
    w = RATIOS[settings.importance_sampling_level](l, log_ratio, mask)
    weights, log_weights = weights_and_log_sums(importance_weights, l, mask)
    chex.assert_equal_shape([l, log_ratio, w, mask])
    chex.assert_shape(log_weights, mask.shape[:-1])
    inputs = SurrogateInputs(l, log_ratio, w, A, mask, log_weights)
    p = cast_like("the result of surrogate", surrogate(inputs, settings), l)
    per_token: dict[str, jax.Array] = {}
    if settings.off_policy_mask_threshold is not None:
        keep = off_policy_mask(inputs, l_old, sampling_log_probs, settings.off_policy_mask_threshold)
        p = jnp.where(keep, p, 0)
        per_token["off_policy_fraction"] = ~keep
    if entropies is not None:
        entropies = cast_like("entropies", entropies, l)
        if selected is None and not is_static_zero(1 - settings.top_entropy_quantile):
            selected = top_entropy_mask(entropies, mask, settings.top_entropy_quantile)
    if selected is not None:
        selected = mask & as_mask(log_probs, selected, "selected")
        p = jnp.where(selected, p, 0)
    if weights is not None and surrogate is not vespo:  # vespo already applies them
        p = p * jnp.where(mask, weights, 1)
    loss = reduction(p, mask, counts)
    sums = {"policy_loss": loss, "kl_bounded_tokens": jnp.zeros_like(count), "kl_in_loss": jnp.zeros_like(loss)}

    # KL term.
    per_token["kl"] = jnp.zeros_like(l)
    if ref_log_probs is not None:
        d = l - bound_log_probs(sg(cast_like("ref_log_probs", ref_log_probs, l)), mask)
        per_token["kl"], sums["kl_bounded_tokens"] = k3(d), jnp.sum(d < -MAX_LOG_RATIO)
        if not is_static_zero(settings.beta):
            sums["kl_in_loss"] = reduction(settings.beta * kl_term(inputs, d, settings), mask, counts)
            loss = loss + sums["kl_in_loss"]

    # Entropy term.
    if entropies is not None:
        kept, total = (mask, num_tokens) if selected is None else (selected, jnp.sum(selected))
        sums |= {"selected_tokens": jnp.sum(kept), "selected_entropy_sum": jnp.sum(entropies, where=kept)}
        num_selected_tokens = total if num_selected_tokens is None else num_selected_tokens
        sums["entropy_bonus"] = entropy_coef * sums["selected_entropy_sum"] / jnp.maximum(num_selected_tokens, 1)
        loss = loss - sums["entropy_bonus"]
        per_token["entropy"] = entropies

    return loss, _gather_metrics(loss, surrogate, inputs, settings, sums, per_token)


def _gather_metrics(
    loss: jax.Array,
    surrogate: Surrogate,
    inputs: SurrogateInputs,
    settings: LossSettings,
    sums: dict[str, jax.Array],
    per_token: dict[str, jax.Array],
) -> MetricSums:
    """Collect the metrics from one call. Arrays [..., T] are summed over tokens with mask 1."""
    w, mask = inputs.ratio, inputs.mask
    clips = clip_events(surrogate, inputs, settings)
    per_token = {**per_token, "ratio_mean": w, "approx_kl_old": k3(-inputs.log_ratio), **clips}
    sums = sums | {name + "_sum": total for name, total in token_totals(per_token, mask).items()}
    sums |= {"loss": loss, "tokens": jnp.sum(mask), "rows": jnp.asarray(math.prod(mask.shape[:-1]))}
    maxes = {"ratio_max": jnp.max(w, initial=0, where=mask)}
    # Counts are also converted to float, so that metrics can be averaged over steps and devices.
    sums, maxes = jax.tree.map(lambda x: sg(x.astype(loss.dtype)), (sums, maxes))
    return MetricSums(sums, maxes)


def grpo_loss(
    log_probs: jax.Array,
    old_log_probs: jax.Array | None,
    ref_log_probs: jax.Array | None,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    loss_type: str = "dapo",
    beta: Scalar = 0.0,
    epsilon: Scalar = 0.2,
    epsilon_high: Scalar | None = None,
    delta: Scalar | None = None,
    importance_sampling_level: str = "token",
    kl_estimator: str = "k3",
    use_bias_correction_kl: bool = True,
    kl_placement: str = "loss",
    max_completion_length: Scalar | None = None,
    normalizer: Scalar | None = None,
    sapo_temperature_neg: Scalar = 1.05,
    sapo_temperature_pos: Scalar = 1.0,
    vespo_k_pos: Scalar = 2.0,
    vespo_lambda_pos: Scalar = 3.0,
    vespo_k_neg: Scalar = 3.0,
    vespo_lambda_neg: Scalar = 2.0,
    entropies: jax.Array | None = None,
    entropy_coef: Scalar = 0.0,
    top_entropy_quantile: Scalar = 1.0,
    sampling_log_probs: jax.Array | None = None,
    off_policy_mask_threshold: Scalar | None = None,
    kl_correction_level: str = "token",
    importance_weights: jax.Array | None = None,
    surrogate: Surrogate | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the GRPO objective and its metrics.

        d = l − l_ref,   w = importance ratio of l to l_old (see `level` below),   p = surrogate(w, A) for `loss_type`
        loss = reduce(p · masks and weights) + reduce(beta · k) − entropy_coef · Σ m' H / max(Σ m', 1)

    | loss_type | p | reduce |
    |---|---|---|
    | grpo | −min(min(w, delta)·A, clip(w, 1−ε, 1+ε_high)·A) | mean over rows of Σ m p / max(Σ m, 1) |
    | bnpo | same | Σ m p / max(Σ m, 1) |
    | dr_grpo | same | Σ m p / (rows · max_completion_length) |
    | dapo | same | Σ m p / max(normalizer, 1) |
    | luspo | same, for use with importance_sampling_level="sequence" | mean over rows of Σ m p |
    | cispo | −sg(min(w, ε_high))·A·l | as dapo |
    | sapo | −A·(4/τ)·σ(τ(w−1)), τ depends on the sign of A | as grpo |
    | vespo | −sg(φ)·A·l, φ = exp(λ + k·s − λ·eˢ) | as dapo |

    sg is `stop_gradient` and σ the sigmoid. In vespo, (k, λ) depend on the sign of A, and the log-weight is
    s = clip(Σ m·clip(l − l_old, ±20) + Σ m·log(importance_weights), log 1e-8, 20).

    | level | w |
    |---|---|
    | token | exp(l − l_old) |
    | sequence | exp(Σ m (l − l_old) / Σ m), gradient through the mean |
    | trajectory | sg(exp(Σ m (l − l_old)))·exp(l − sg(l)): unbiased, high variance |

    Half-precision inputs are converted to float32. Values where `mask` is 0 are ignored, including NaN and inf.
    Log-probs below −1e4 are treated as −1e4, and log-ratios above 20 as 20 in exponentials. Gradients do
    not vanish beyond these bounds.

    Args:
      log_probs: [..., T] float, log-probs l under the trained params, in nats. A row of T tokens is one completion.
      old_log_probs: [..., T] float, log-probs l_old under the old policy, in nats. If None, sg(l) is used: the ratio is
        1 and has the gradient of l.
      ref_log_probs: [..., T] float, log-probs l_ref under the reference, in nats. May be None if beta is 0; the metric
        `kl` is then 0.
      advantages: [...] or [..., T] float, advantages A per completion or per token.
      mask: [..., T] bool or 0/1, the mask m of tokens that contribute to the loss.
      loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo".
      beta: weight ≥ 0 of the KL term. The Python number 0 omits the term.
      epsilon: lower clip range ε ≥ 0.
      epsilon_high: upper clip range ≥ 0; defaults to epsilon. In cispo, it is the cap on the ratio itself (ScaleRL:
        5.0). If None, the cap is epsilon, which also scales down on-policy gradients.
      delta: cap on the ratio in the unclipped term; should exceed 1 + epsilon_high. None disables the cap.
      importance_sampling_level: "token", "sequence" or "trajectory".
      kl_estimator: estimator k of the KL from d: "k1", "k2" or "k3".
      use_bias_correction_kl: whether to multiply k by w (k1, k3) or sg(w) (k2); used by placement "loss" only.
      kl_placement: "loss" adds beta·k to p. "reward" adds beta·w·sg(Σ_{s≥t} m_s d_s) instead. If p is
        unclipped, p plus this term has the gradient of p with the advantages A − beta·Σ_{s≥t} m_s d_s.
      max_completion_length: length in tokens for the denominator in dr_grpo. Defaults to T.
      normalizer: denominator in dapo, cispo and vespo, the number of tokens with mask 1 in the whole minibatch. If
        None, the tokens in this call are counted.
      sapo_temperature_neg: temperature τ > 0 where A ≤ 0.
      sapo_temperature_pos: temperature τ > 0 where A > 0.
      vespo_k_pos: k where A ≥ 0.
      vespo_lambda_pos: λ where A ≥ 0.
      vespo_k_neg: k where A < 0.
      vespo_lambda_neg: λ where A < 0.
      entropies: [..., T] float, entropies H of the next-token distributions, in nats. Differentiable.
      entropy_coef: weight of the entropy bonus; may be traced.
      top_entropy_quantile: ρ in [0, 1]. If ρ is 1, m' = m. Otherwise, p is kept only where m' = 1: at tokens with an
        entropy of at least the linearly interpolated (1−ρ)-quantile.
      sampling_log_probs: [..., T] float, log-probs l_sampling under the sampler, for the off-policy mask, in nats. NaN
        marks tokens that the sampler did not score. Defaults to old_log_probs.
      off_policy_mask_threshold: threshold in nats. p is kept where A ≥ 0 or the mean of l_sampling − l over
        the completion's tokens with mask 1 is ≤ threshold. None keeps all tokens.
      kl_correction_level: w for the KL correction at importance sampling level "sequence": "token" uses exp(l − l_old),
        and "importance_sampling_level" uses the ratio from the policy term, as in TRL. Not used at other levels.
      importance_weights: [...] or [..., T] float ≥ 0, weights π_old / π_sampler that multiply p (vespo adds their logs
        to s instead). Defaults to 1.
      surrogate: function of `SurrogateInputs` and `LossSettings` that returns p [..., T]. It replaces `loss_type`'s p,
        but not the reduction. Metrics do not count its clipping.

    Returns:
      loss: [] float32 (float64 for float64 log_probs), to be minimized.
      metrics: dict of [] floats without gradient. `loss` = `policy_loss` + `kl_in_loss` − `entropy_bonus`. Means over
        tokens with mask 1: `kl` (k3 for any `kl_estimator`; 0 without ref_log_probs), `entropy`, `ratio_mean`,
        `approx_kl_old` (k3 estimate of KL(old‖new) from token log-ratios), `clip_fraction` = `clip_fraction_low`
        (w < 1−ε, A < 0) + `clip_fraction_high` (w > 1+ε_high, A > 0; in cispo w > ε_high), `clip_fraction_delta`
        (w > delta, A < 0), and `off_policy_fraction` (masked out) if its threshold is set. Other metrics: `ratio_max`,
        `kl_bounded_tokens` (number with d < −20), `tokens`, `rows`; with entropies also `selected_tokens` (Σ m') and
        `selected_entropy` (mean over m'). For parts of a minibatch, use `grpo_loss_terms`.

    Raises:
      ValueError: if a shape or dtype is wrong, a name is unknown, or an array that a term requires is missing.

    Gradient:
      With respect to `log_probs` and `entropies` only. For one token sampled from π_old in a given state, the expected
      gradient of the KL term is:

      | KL term | expected gradient |
      |---|---|
      | k1 | 0 on-policy |
      | k2 | ∇KL(π‖π_ref) on-policy; biased off-policy |
      | k3 | ∇KL(π_ref‖π) on-policy, the other direction; biased off-policy |
      | w·k3, w·k1, sg(w)·k2 (`use_bias_correction_kl=True`, the default) | ∇KL(π‖π_ref), also off-policy |
      | placement "reward", level "trajectory" | ∇KL(π‖π_ref) for whole completions, also off-policy |

      Only the last row holds for whole completions. Even on-policy, the other terms omit the effect of a token on later
      states, which is 4% to 47% of the gradient norm in the four two-token problems that
      tests/maths/test_enumeration.py enumerates. The last row is exact there, but has a higher variance. At level
      "sequence", `kl_correction_level="importance_sampling_level"` is biased if completions have several tokens.

    References:
      DeepSeekMath (arXiv:2402.03300) equation 3; DAPO (arXiv:2503.14476); Dr. GRPO (arXiv:2503.20783); GSPO
      (arXiv:2507.18071); CISPO (arXiv:2506.13585); SAPO (arXiv:2511.20347); LUSPO (arXiv:2602.05261); VESPO
      (arXiv:2602.10693); the two-sided clip from INTELLECT-2 (arXiv:2505.07291); the KL correction and the off-policy
      mask from DeepSeek-V3.2 (arXiv:2512.02556); top-entropy tokens (arXiv:2506.01939).

    Example:
      >>> import jax.numpy as jnp
      >>> log_probs, old_log_probs = jnp.log(jnp.array([[0.5, 0.3], [0.4, 0.9]])), jnp.log(jnp.full((2, 2), 0.4))
      >>> mask = jnp.array([[1, 1], [1, 0]])
      >>> loss, metrics = grpo_loss(log_probs, old_log_probs, None, jnp.array([1.0, -1.0]), mask)
      >>> round(float(loss), 4)  # −(min(1.25, 1.2) + 0.75 − 1) / 3
      -0.3167
      >>> round(float(metrics["clip_fraction_high"]), 4), float(metrics["ratio_max"])
      (0.3333, 1.25)
    """
    arguments = locals()
    settings = LossSettings(**{field.name: arguments[field.name] for field in dataclasses.fields(LossSettings)})
    loss, metrics = grpo_loss_terms(
        log_probs,
        old_log_probs,
        ref_log_probs,
        advantages,
        mask,
        settings,
        entropies=entropies,
        entropy_coef=entropy_coef,
        sampling_log_probs=sampling_log_probs,
        importance_weights=importance_weights,
        normalizer=normalizer,
    )
    return loss, finalize_metrics(metrics)
