"""Components of the objective: tables of importance ratios, per-token policy losses and reductions.

Notation: per-token policy loss p, log-probs l, ratio w, advantage A, mask m, d = l − l_ref (the log-ratio to the
reference), clip ranges ε and ε_high, and sg = stop_gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import (
    MAX_LOG_RATIO,
    MIN_LOG_PROB,
    Scalar,
    as_float,
    cast_like,
    one_of,
    sg,
    ste_clip,
    with_token_axis,
)
from grpo_jax.maths.kl import KL_ESTIMATORS


class SurrogateInputs(NamedTuple):
    """Surrogate inputs ([..., T] except `log_weights`). Log-probs, log-ratios and advantages are 0 outside the mask."""

    log_probs: jax.Array  # l; gradients flow only through log_probs, log_ratio and ratio
    log_ratio: jax.Array  # l − l_old
    ratio: jax.Array  # w, importance ratio at the importance sampling level
    advantages: jax.Array  # A
    mask: jax.Array  # bool
    log_weights: jax.Array  # [...], sum over each row of the logs of the sampler's weights, used by vespo only


class Counts(NamedTuple):
    """Counts over the whole minibatch, used as denominators in the reductions."""

    rows: Scalar  # completions
    tokens: Scalar  # tokens with mask 1
    normalizer: Scalar  # `tokens`, unless the caller of `grpo_loss` passes another denominator
    max_completion_length: Scalar


def _exp(log_ratio: jax.Array) -> jax.Array:
    """Return exp(log_ratio) with the log-ratio bounded above. The bound does not stop the gradient."""
    return jnp.exp(ste_clip(log_ratio, -jnp.inf, MAX_LOG_RATIO))


def row_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return Σ m·x over each row, [..., T] → [..., 1]."""
    return jnp.sum(values, axis=-1, keepdims=True, where=mask)


def row_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return Σ m·x / max(Σ m, 1) over each row, [..., T] → [..., 1]."""
    return row_sum(values, mask) / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)


def token_ratio(log_probs: jax.Array, log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """Return w_t = exp(l_t − l_old_t)."""
    return _exp(log_ratio)


def sequence_ratio(log_probs: jax.Array, log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """Return w_t = exp(Σ m (l − l_old) / Σ m), equal for all tokens in a row, with gradient through the mean (GSPO)."""
    return jnp.broadcast_to(_exp(row_mean(log_ratio, mask)), log_ratio.shape)


def trajectory_ratio(log_probs: jax.Array, log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """Return w_t = sg(exp(Σ m (l − l_old)))·exp(l_t − sg(l_t)), the completion's weight with the token's gradient."""
    return sg(_exp(row_sum(log_ratio, mask))) * jnp.exp(log_probs - sg(log_probs))


RATIOS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "trajectory": trajectory_ratio,
}


def _minimum(first: jax.Array, second: Scalar) -> jax.Array:
    """Return the minimum. In a tie, the whole gradient goes to `first`, instead of half as in `jnp.minimum`."""
    return jnp.where(first <= second, first, second)


def ppo(inputs: SurrogateInputs, settings: LossSettings) -> jax.Array:
    """Return p = −min(min(w, delta)·A, clip(w, 1 − ε, 1 + ε_high)·A)."""
    w, A = inputs.ratio, inputs.advantages
    capped = w if settings.delta is None else _minimum(w, settings.delta)
    clipped = jnp.clip(w, 1 - settings.epsilon, 1 + settings.upper_clip)
    return -_minimum(capped * A, clipped * A)


def cispo(inputs: SurrogateInputs, settings: LossSettings) -> jax.Array:
    """Return p = −sg(min(w, ε_high))·A·l, which caps the ratio but keeps the gradient of every token."""
    return -sg(jnp.minimum(inputs.ratio, settings.upper_clip)) * inputs.advantages * inputs.log_probs


def sapo(inputs: SurrogateInputs, settings: LossSettings) -> jax.Array:
    """Return p = −A·(4/τ)·σ(τ(w − 1)), a smooth gate with slope −A at w = 1. τ depends on the sign of A."""
    w, A = inputs.ratio, inputs.advantages
    tau = jnp.where(A > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    return -A * (4 / tau) * jax.nn.sigmoid(tau * (w - 1))


def vespo(inputs: SurrogateInputs, settings: LossSettings) -> jax.Array:
    """Return p = −sg(φ)·A·l, φ = exp(λ + k·s − λ·eˢ). s is the completion's log-weight; (k, λ) depend on A's sign."""
    A = inputs.advantages
    s = row_sum(jnp.clip(inputs.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO), inputs.mask) + inputs.log_weights[..., None]
    s = jnp.clip(s, math.log(1e-8), MAX_LOG_RATIO)
    k = jnp.where(A >= 0, settings.vespo_k_pos, settings.vespo_k_neg)
    lambda_ = jnp.where(A >= 0, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    phi = jnp.exp(lambda_ + k * s - lambda_ * jnp.exp(s))
    return -sg(phi) * A * inputs.log_probs


def kl_term(inputs: SurrogateInputs, d: jax.Array, settings: LossSettings) -> jax.Array:
    """Compute the per-token KL term from d = l − l_ref, without the factor beta."""
    w = inputs.ratio
    if settings.kl_placement == "reward":
        # The term is w_t·Σ_{s≥t} d_s, with no gradient through the sum. With an unclipped ratio, it is equivalent to
        # A_t ← A_t − beta·Σ_{s≥t} d_s at the current params.
        return w * sg(jax.lax.cumsum(d, axis=d.ndim - 1, reverse=True))
    k = KL_ESTIMATORS[settings.kl_estimator](d)
    if not settings.use_bias_correction_kl:
        return k
    if settings.importance_sampling_level == "sequence" and settings.kl_correction_level == "token":
        # The geometric mean of a completion's ratios is not an importance weight.
        w = token_ratio(inputs.log_probs, inputs.log_ratio, inputs.mask)
    # k1 and k3 require the gradient of w. With sg(w), k3 would have the gradient of KL(π_ref‖π).
    # k2 requires sg(w), since w·k2 has the gradient of E_π[d²/2], which is not a KL.
    return (sg(w) if settings.kl_estimator == "k2" else w) * k


def off_policy_mask(
    inputs: SurrogateInputs, l_old: jax.Array, sampling_log_probs: jax.Array | None, threshold: Scalar
) -> jax.Array:
    """Compute DeepSeek-V3.2's off-policy mask: keep where A ≥ 0 or the row mean of l_sampling − l is ≤ threshold."""
    l, l_sampling = inputs.log_probs, l_old
    if sampling_log_probs is not None:
        l_sampling = cast_like("sampling_log_probs", sampling_log_probs, l)
        # Tokens without a sampler log-prob (NaN) contribute 0 to the mean.
        l_sampling = jnp.where(jnp.isnan(l_sampling), l, l_sampling)
    return (inputs.advantages >= 0) | (row_mean(l_sampling - l, inputs.mask) <= threshold)


def weights_and_log_sums(
    importance_weights: jax.Array | None, l: jax.Array, mask: jax.Array
) -> tuple[jax.Array | None, jax.Array]:
    """Return weights ([..., 1], [..., T] or None) and the sum of their logs over each row, [...]."""
    if importance_weights is None:
        return None, jnp.zeros(l.shape[:-1], l.dtype)
    weights = with_token_axis("importance_weights", importance_weights, l)
    log_w = jnp.clip(jnp.log(weights), math.log(1e-8), MAX_LOG_RATIO)
    return weights, (log_w if log_w.shape[-1] == 1 else row_sum(log_w, mask)).reshape(l.shape[:-1])


SAMPLER_WEIGHT_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""Modes for weights per token or per sequence, truncated to the bounds or masked (set to 0) outside them."""


def sampler_weights(
    old_log_probs: jax.Array,
    sampling_log_probs: jax.Array,
    mask: jax.Array,
    *,
    mode: str = "sequence_mask",
    clip_max: Scalar | None = 3.0,
    clip_min: Scalar | None = None,
) -> jax.Array:
    """Compute importance weights for completions sampled from an engine's distribution μ instead of π_old.

        δ = log π_old − log μ per token
        token:     w_t = exp(δ_t)
        sequence:  w = exp(Σ m δ)
        truncate:  w ← max(min(w, clip_max), clip_min)
        mask:      w ← w if clip_min ≤ w ≤ clip_max, else 0

    Half-precision inputs are converted to float32. Values where `mask` is 0 are ignored, including NaN and inf.
    Log-probs below −1e4 are treated as −1e4, and log w is clipped to [−20, 20]. δ = 0 for tokens that the engine did
    not score (NaN).

    Args:
      old_log_probs: [..., T] float, log-probs under π_old from the trainer, in nats.
      sampling_log_probs: [..., T] float, log-probs under μ from the engine, in nats.
      mask: [..., T] bool or 0/1, the mask m. A row of T tokens is one completion.
      mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
      clip_max: upper bound > 0 on the weights. None disables it.
      clip_min: lower bound ≥ 0 on the weights. None disables it.

    Returns:
      Float32 weights (float64 for float64 old_log_probs) to pass to `grpo_loss` as `importance_weights`. In token
      modes, the shape is [..., T], and weights are 1 where `mask` is 0. In sequence modes, the shape is [...], and the
      weight of a row without tokens is 1.

    Gradient:
      None; the weights are constants. Without bounds, E_μ[w f] = E_π_old[f] for sequence weights. Token weights omit
      the weights of earlier tokens and are exact only for one-token completions. Bounds add bias and reduce variance.

    References:
      TRL's `vllm_importance_sampling_mode`; truncated importance sampling: Ionides 2008, and for separate engines Yao
      et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    one_of("mode", mode, SAMPLER_WEIGHT_MODES)
    old, sampling = as_float("old_log_probs", old_log_probs), as_float("sampling_log_probs", sampling_log_probs)
    mask = jnp.asarray(mask) != 0
    for name, value in (("sampling_log_probs", sampling), ("mask", mask)):
        if value.shape != old.shape or old.ndim == 0:
            raise ValueError(f"{name} and old_log_probs must both be [..., T]; got {value.shape} and {old.shape}.")
    delta = jnp.maximum(old, MIN_LOG_PROB) - jnp.maximum(sampling.astype(old.dtype), MIN_LOG_PROB)
    delta = jnp.where(mask & ~jnp.isnan(sampling), delta, 0)
    if mode.startswith("sequence"):
        delta = delta.sum(axis=-1)
    w = jnp.exp(jnp.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    low, high = -jnp.inf if clip_min is None else clip_min, jnp.inf if clip_max is None else clip_max
    w = jnp.clip(w, low, high) if mode.endswith("truncate") else jnp.where((w < low) | (w > high), 0, w)
    has_tokens = mask if mode.startswith("token") else mask.any(axis=-1)
    return sg(jnp.where(has_tokens, w, 1))


def mean_of_row_means(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Return Σ_rows (Σ m·x / max(Σ m, 1)) / rows, which weights completions equally, regardless of length."""
    return jnp.sum(row_mean(values, mask)) / counts.rows


def mean_of_row_sums(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Return Σ m·x / rows."""
    return jnp.sum(values, where=mask) / counts.rows


def mean_of_tokens(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Return Σ m·x / max(tokens, 1)."""
    return jnp.sum(values, where=mask) / jnp.maximum(counts.tokens, 1)


def sum_over_normalizer(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Return Σ m·x / max(normalizer, 1)."""
    return jnp.sum(values, where=mask) / jnp.maximum(counts.normalizer, 1)


def sum_over_constant(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Return Σ m·x / (rows·max_completion_length). The denominator does not depend on the sampled completions."""
    return jnp.sum(values, where=mask) / (counts.rows * counts.max_completion_length)


Surrogate = Callable[[SurrogateInputs, "LossSettings"], jax.Array]
Reduction = Callable[[jax.Array, jax.Array, Counts], jax.Array]


LOSS_TYPES: dict[str, tuple[Surrogate, Reduction]] = {
    "grpo": (ppo, mean_of_row_means),
    "bnpo": (ppo, mean_of_tokens),
    "dr_grpo": (ppo, sum_over_constant),
    "dapo": (ppo, sum_over_normalizer),
    "luspo": (ppo, mean_of_row_sums),
    "cispo": (cispo, sum_over_normalizer),
    "sapo": (sapo, mean_of_row_means),
    "vespo": (vespo, sum_over_normalizer),
}
"""Surrogate and reduction for each loss type.

To add a loss type, add a function and an entry here, and add the name to `config.fields.LossType` and to the docstring
of `grpo_loss`. Add a NumPy version to tests/maths/test_losses.py and a setting to `experiments.estimators`, which
trains with each loss. If the loss clips, extend `clip_events`. If it applies the sampler weights itself, like `vespo`,
extend `losses.grpo_loss_terms`. If it has a gradient where the advantage is 0, extend
`update.objective.zero_advantage_has_no_gradient`. Add new settings to `LossSettings`, `grpo_loss` and `GRPOConfig`,
their conflicts with other fields to `config.contradictions`, and the corresponding TRL fields to `compat.trl_fields`.
"""


def clip_events(surrogate: Surrogate, inputs: SurrogateInputs, settings: LossSettings) -> dict[str, jax.Array]:
    """Return a mask [..., T] of clipped tokens for each metric. A mask is all False if the surrogate does not clip."""
    w, A = inputs.ratio, inputs.advantages
    never = jnp.zeros(w.shape, bool)
    low, high, capped = never, never, never
    if surrogate is ppo:
        low, high = (w < 1 - settings.epsilon) & (A < 0), (w > 1 + settings.upper_clip) & (A > 0)
        capped = never if settings.delta is None else (w > settings.delta) & (A < 0)
    elif surrogate is cispo:
        high = w > settings.upper_clip
    return {
        "clip_fraction": low | high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "clip_fraction_delta": capped,
    }


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Settings for the objective: arguments to `grpo_loss`. All except `surrogate` are also fields of `GRPOConfig`."""

    loss_type: str = "dapo"
    beta: Scalar = 0.0
    epsilon: Scalar = 0.2
    epsilon_high: Scalar | None = None
    delta: Scalar | None = None
    importance_sampling_level: str = "token"
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = True
    kl_placement: str = "loss"
    max_completion_length: Scalar | None = None
    sapo_temperature_neg: Scalar = 1.05
    sapo_temperature_pos: Scalar = 1.0
    vespo_k_pos: Scalar = 2.0
    vespo_lambda_pos: Scalar = 3.0
    vespo_k_neg: Scalar = 3.0
    vespo_lambda_neg: Scalar = 2.0
    top_entropy_quantile: Scalar = 1.0  # fraction of tokens to keep, by highest entropy
    off_policy_mask_threshold: Scalar | None = None
    kl_correction_level: str = "token"  # level of w in the KL term, for importance_sampling_level="sequence"
    surrogate: Surrogate | None = None

    def __post_init__(self) -> None:
        one_of("loss_type", self.loss_type, LOSS_TYPES)
        one_of("importance_sampling_level", self.importance_sampling_level, RATIOS)
        one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        one_of("kl_placement", self.kl_placement, ("loss", "reward"))
        one_of("kl_correction_level", self.kl_correction_level, ("token", "importance_sampling_level"))

    @property
    def surrogate_and_reduction(self) -> tuple[Surrogate, Reduction]:
        """Surrogate and reduction for `loss_type`. A custom `surrogate` replaces the former."""
        surrogate, reduction = LOSS_TYPES[self.loss_type]
        return self.surrogate or surrogate, reduction

    @property
    def upper_clip(self) -> Scalar:
        """Upper clip range: ε_high, or ε if ε_high is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
