"""The GRPO objective: ratio level → per-token surrogate → masks and weights → KL → reduction.

Each variant is a function in one of three tables: `RATIOS`, `SURROGATES` and `REDUCTIONS` (which `LOSS_TYPES` pairs).
Leading axes are free: [B, G, T] and [R, T] mean the same, a row is one completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.kl import ESTIMATORS, MAX_LOG_RATIO, MIN_LOG_PROB, bounded, choose, floating, k3

sg = jax.lax.stop_gradient
Scalar = float | jax.Array


class Tokens(NamedTuple):
    """What a surrogate sees. All arrays are [..., T], and harmless (0, ratio 1) where `mask` is False.

    Attributes:
      log_probs: l, the one array that carries a gradient, and by it `log_ratio` and `ratio`.
      log_ratio: l − l_old.
      ratio: w at the chosen importance sampling level.
      advantages: A, constant.
      mask: bool.
      log_weights: [...] summed log of the sampler weights of each row (vespo only).
    """

    log_probs: jax.Array
    log_ratio: jax.Array
    ratio: jax.Array
    advantages: jax.Array
    mask: jax.Array
    log_weights: jax.Array


class Settings(NamedTuple):
    """The numbers that the surrogates read; `grpo_loss` documents each."""

    epsilon: Scalar
    epsilon_high: Scalar
    delta: Scalar | None
    sapo_temperature_neg: Scalar
    sapo_temperature_pos: Scalar
    vespo_k_pos: Scalar
    vespo_lambda_pos: Scalar
    vespo_k_neg: Scalar
    vespo_lambda_neg: Scalar


class Counts(NamedTuple):
    """The denominators: of the whole optimizer batch, of which a call may see only a part."""

    rows: Scalar
    tokens: Scalar
    normalizer: Scalar
    max_completion_length: Scalar


class MetricSums(NamedTuple):
    """Metrics of a part of a batch in a form that merges exactly: `sums` add up, of `maxes` the largest counts."""

    sums: dict[str, jax.Array]
    maxes: dict[str, jax.Array]


# Importance ratio ---------------------------------------------------------------------------------------------------


def _exp(log_ratio: jax.Array) -> jax.Array:
    """exp(log_ratio), which cannot overflow: the log-ratio is bounded above, its gradient kept alive."""
    return jnp.exp(bounded(log_ratio, -jnp.inf, MAX_LOG_RATIO))


def _row_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Σ m·x over the row, [..., T] → [..., 1]."""
    return jnp.sum(values, axis=-1, keepdims=True, where=mask)


def _row_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Σ m·x / max(Σ m, 1) over the row, [..., T] → [..., 1]."""
    return _row_sum(values, mask) / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)


def _totals(metrics: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    """Σ m·x over all tokens for each metric [..., T], without gradient.

    The tokens of a row are added pair by pair: a CPU may add number after number, which in float32 costs a sum of
    thousands its last digits. (Two sums in a row would not help, XLA makes one of them; and a barrier between them lets
    the devices of a mesh wait for one another for ever, on CPUs.)
    """
    dtype = jnp.result_type(*metrics.values())
    values = jnp.where(mask[None], jnp.stack([sg(x).astype(dtype) for x in metrics.values()]), 0)
    while (length := values.shape[-1]) > 1:
        half = length // 2
        pairs = values[..., :half] + values[..., half : 2 * half]
        values = jnp.concatenate([pairs, values[..., 2 * half :]], axis=-1) if length % 2 else pairs
    return dict(zip(metrics, values.sum(axis=tuple(range(1, values.ndim))), strict=True))


def token_ratio(log_probs: jax.Array, log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """w_t = exp(l_t − l_old_t)."""
    return _exp(log_ratio)


def sequence_ratio(log_probs: jax.Array, log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """w_t = exp(Σ m (l − l_old) / Σ m), the same for every token of the row; gradient through the mean (GSPO)."""
    return jnp.broadcast_to(_exp(_row_mean(log_ratio, mask)), log_ratio.shape)


def trajectory_ratio(log_probs: jax.Array, log_ratio: jax.Array, mask: jax.Array) -> jax.Array:
    """w_t = sg(exp(Σ m (l − l_old)))·exp(l_t − sg(l_t)): the weight of the whole completion, own token's gradient."""
    return sg(_exp(_row_sum(log_ratio, mask))) * jnp.exp(log_probs - sg(log_probs))


RATIOS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "trajectory": trajectory_ratio,
}

# Surrogates: the per-token policy loss p, [..., T], minimised --------------------------------------------------------


def _lesser(first: jax.Array, second: Scalar) -> jax.Array:
    """min, with the gradient of `first` at a tie (jnp.minimum would halve it)."""
    return jnp.where(first <= second, first, second)


def clipped(tokens: Tokens, settings: Settings) -> jax.Array:
    """p = −min(min(w, delta)·A, clip(w, 1 − ε, 1 + ε_high)·A)."""
    w, A = tokens.ratio, tokens.advantages
    first = w if settings.delta is None else _lesser(w, settings.delta)
    second = jnp.clip(w, 1 - settings.epsilon, 1 + settings.epsilon_high)
    return -_lesser(first * A, second * A)


def cispo(tokens: Tokens, settings: Settings) -> jax.Array:
    """p = −sg(min(w, ε_high))·A·l: the weight is capped, the gradient never vanishes."""
    return -sg(jnp.minimum(tokens.ratio, settings.epsilon_high)) * tokens.advantages * tokens.log_probs


def sapo(tokens: Tokens, settings: Settings) -> jax.Array:
    """p = −A·(4/τ)·σ(τ(w − 1)), τ by the sign of A: a smooth gate in the place of the clip, slope 1 at w = 1."""
    w, A = tokens.ratio, tokens.advantages
    tau = jnp.where(A > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
    return -A * (4 / tau) * jax.nn.sigmoid(tau * (w - 1))


def vespo(tokens: Tokens, settings: Settings) -> jax.Array:
    """p = −sg(φ)·A·l, φ = exp(λ + k·s − λ·eˢ), s the log-weight of the whole completion, (k, λ) by the sign of A."""
    A = tokens.advantages
    s = _row_sum(jnp.clip(tokens.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO), tokens.mask) + tokens.log_weights[..., None]
    s = jnp.clip(s, math.log(1e-8), MAX_LOG_RATIO)
    k = jnp.where(A >= 0, settings.vespo_k_pos, settings.vespo_k_neg)
    lambda_ = jnp.where(A >= 0, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    phi = jnp.exp(lambda_ + k * s - lambda_ * jnp.exp(s))
    return -sg(phi) * A * tokens.log_probs


# Reductions: [..., T] → [], additive over the parts of a batch ------------------------------------------------------


def mean_of_row_means(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Σ_rows (Σ m·x / max(Σ m, 1)) / rows: every completion weighs the same, so the tokens of long ones weigh less."""
    return jnp.sum(_row_mean(values, mask)) / counts.rows


def mean_of_row_sums(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Σ m·x / rows."""
    return jnp.sum(values, where=mask) / counts.rows


def mean_of_tokens(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Σ m·x / max(tokens, 1)."""
    return jnp.sum(values, where=mask) / jnp.maximum(counts.tokens, 1)


def sum_over_normalizer(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Σ m·x / max(normalizer, 1)."""
    return jnp.sum(values, where=mask) / jnp.maximum(counts.normalizer, 1)


def sum_over_constant(values: jax.Array, mask: jax.Array, counts: Counts) -> jax.Array:
    """Σ m·x / (rows·max_completion_length): no denominator depends on what was sampled."""
    return jnp.sum(values, where=mask) / (counts.rows * counts.max_completion_length)


Surrogate = Callable[[Tokens, Settings], jax.Array]
Reduction = Callable[[jax.Array, jax.Array, Counts], jax.Array]
LOSS_TYPES: dict[str, tuple[Surrogate, Reduction]] = {
    "grpo": (clipped, mean_of_row_means),
    "bnpo": (clipped, mean_of_tokens),
    "dr_grpo": (clipped, sum_over_constant),
    "dapo": (clipped, sum_over_normalizer),
    "luspo": (clipped, mean_of_row_sums),
    "cispo": (cispo, sum_over_normalizer),
    "sapo": (sapo, mean_of_row_means),
    "vespo": (vespo, sum_over_normalizer),
}

# Entropy ------------------------------------------------------------------------------------------------------------


def top_entropy_threshold(entropies: jax.Array, mask: jax.Array, quantile: Scalar) -> jax.Array:
    """The linear (1 − quantile)-quantile of the entropies where `mask` is True, []."""
    largest = jnp.finfo(entropies.dtype).max
    ordered = jnp.sort(jnp.where(mask, entropies, largest), axis=None)
    last = jnp.maximum(jnp.sum(mask), 1) - 1
    position = (1 - quantile) * last
    below = jnp.floor(position).astype(int)
    above = jnp.minimum(below + 1, last)
    return sg(ordered[below] + (position - below) * (ordered[above] - ordered[below]))


def update_entropy_coef(
    coef: Scalar, entropy: Scalar, *, target: float, delta: float, minimum: float = 0.0, maximum: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Moves the adaptive entropy coefficient by one step, once an optimizer step.

        coef ← clip(coef + delta, minimum, maximum)   if entropy ≤ target,   else clip(coef − delta, minimum, maximum)
        applied = coef if entropy ≤ target, else 0

    Args:
      coef: [] float, the coefficient so far (`entropy_coef` of the config at the start).
      entropy: [] float, nats; the metric `selected_entropy` of the optimizer batch just done.
      target: nats; at or below it the bonus is on.
      delta: > 0, size of a step of the coefficient.
      minimum: lower bound of the coefficient.
      maximum: upper bound of the coefficient.

    Returns:
      ([] float32, [] float32): the new coefficient (to be kept), and the one to pass as `entropy_coef` in the next
      step. Before the first step nothing has been measured: pass 0.

    Gradient:
      None.

    References:
      Skywork-OR1 (arXiv:2505.22312), section 4; TRL's `use_adaptive_entropy`.

    Example:
      >>> coef, applied = update_entropy_coef(0.01, 0.1, target=0.2, delta=0.005)
      >>> round(float(coef), 3), round(float(applied), 3)
      (0.015, 0.015)
      >>> coef, applied = update_entropy_coef(0.01, 0.3, target=0.2, delta=0.005)
      >>> round(float(coef), 3), round(float(applied), 3)
      (0.005, 0.0)
    """
    low = entropy <= target
    coef = jnp.clip(coef + jnp.where(low, delta, -delta), minimum, maximum)
    return sg(coef), sg(jnp.where(low, coef, 0))


# The objective ------------------------------------------------------------------------------------------------------


def batch_totals(
    mask: jax.Array, entropies: jax.Array | None = None, top_entropy_quantile: Scalar = 1.0
) -> dict[str, jax.Array]:
    """Counts a whole optimizer batch, for calls of `grpo_loss` that see a part of it: `grpo_loss(..., **totals)`.

    Args:
      mask: [..., T], of the whole batch.
      entropies: [..., T] nats, of the whole batch; needed when top_entropy_quantile < 1. The result is exact if they
        were computed at the params of this very step.
      top_entropy_quantile: in [0, 1].

    Returns:
      `num_rows` and `num_tokens`; with `entropies` also `entropy_threshold` and `num_selected_tokens`.
    """
    mask = jnp.asarray(mask) != 0
    totals = {"num_rows": jnp.asarray(math.prod(mask.shape[:-1])), "num_tokens": jnp.sum(mask)}
    if entropies is not None:
        entropies = floating("entropies", entropies)
        totals["entropy_threshold"] = top_entropy_threshold(entropies, mask, top_entropy_quantile)
        totals["num_selected_tokens"] = jnp.sum(mask & (entropies >= totals["entropy_threshold"]))
    return totals


def merge_metrics(first: MetricSums, second: MetricSums) -> MetricSums:
    """The metrics of two parts of a batch as those of both together: sums add, maxes take the larger."""
    return MetricSums(
        sums=jax.tree.map(jnp.add, first.sums, second.sums),
        maxes=jax.tree.map(jnp.maximum, first.maxes, second.maxes),
    )


def finalize_metrics(metrics: MetricSums) -> dict[str, jax.Array]:
    """Sums → metrics: `x_sum` becomes `x`, the mean over the masked-in tokens; everything else stays as it is."""
    sums = dict(metrics.sums)
    result = dict(metrics.maxes)
    if "selected_entropy_sum" in sums:
        result["selected_entropy"] = sums.pop("selected_entropy_sum") / jnp.maximum(sums["selected_tokens"], 1)
    for name, value in sums.items():
        if name.endswith("_sum"):
            result[name.removesuffix("_sum")] = value / jnp.maximum(sums["tokens"], 1)
        else:
            result[name] = value
    return result


def _is_off(coefficient: Scalar) -> bool:
    """True if the term of this coefficient can be left out: the number 0. A traced value counts as on."""
    return isinstance(coefficient, int | float) and coefficient == 0


def _like_log_probs(name: str, value: jax.Array, log_probs: jax.Array) -> jax.Array:
    """A constant of the shape and dtype of log_probs."""
    value = floating(name, value)
    if value.shape != log_probs.shape:
        raise ValueError(f"{name} has shape {value.shape}; pass {log_probs.shape}, that of log_probs.")
    return sg(value).astype(log_probs.dtype)


def _row_or_token(name: str, value: jax.Array, log_probs: jax.Array) -> jax.Array:
    """A constant of shape [..., 1] if given per row, [..., T] if per token."""
    value = floating(name, value)
    rows = log_probs.shape[:-1]
    if value.shape == rows:
        value = value[..., None]
    elif value.shape not in (log_probs.shape, (*rows, 1)):
        raise ValueError(f"{name} has shape {value.shape}; pass {rows} (per row) or {log_probs.shape} (per token).")
    return sg(value).astype(log_probs.dtype)


def _clip_events(surrogate: Surrogate, tokens: Tokens, settings: Settings) -> dict[str, jax.Array]:
    """Where the ratio has left the range in the direction in which the clip stops the gradient, [..., T] bool."""
    w, A = tokens.ratio, tokens.advantages
    never = jnp.zeros(w.shape, bool)
    low, high, capped = never, never, never
    if surrogate is clipped:
        low = (w < 1 - settings.epsilon) & (A < 0)
        high = (w > 1 + settings.epsilon_high) & (A > 0)
        capped = never if settings.delta is None else (w > settings.delta) & (A < 0)
    elif surrogate is cispo:
        high = w > settings.epsilon_high
    return {
        "clip_fraction": low | high,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "clip_fraction_delta": capped,
    }


def grpo_loss_terms(
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
    importance_weights: jax.Array | None = None,
    num_rows: Scalar | None = None,
    num_tokens: Scalar | None = None,
    num_selected_tokens: Scalar | None = None,
    entropy_threshold: Scalar | None = None,
) -> tuple[jax.Array, MetricSums]:
    """`grpo_loss` for a part of an optimizer batch: the same arguments, metrics in a form that merges exactly.

    With the counts of the whole batch (`batch_totals`) the losses of the parts add up to the loss of the whole, and so
    do their gradients, however the batch was cut along the leading axes:

        totals = batch_totals(mask)
        loss = Σ_parts grpo_loss_terms(..., **totals)[0]
        metrics = finalize_metrics(merge_metrics(...))

    Returns:
      ([] float32 loss to minimise, `MetricSums`).
    """
    surrogate, reduction = LOSS_TYPES[choose("loss_type", loss_type, LOSS_TYPES)]
    importance_ratio = RATIOS[choose("importance_sampling_level", importance_sampling_level, RATIOS)]
    estimate = ESTIMATORS[choose("kl_estimator", kl_estimator, ESTIMATORS)]
    choose("kl_placement", kl_placement, ("loss", "reward"))
    if ref_log_probs is None and not _is_off(beta):
        raise ValueError(f"beta={beta} needs ref_log_probs, the log-probs under the reference; or pass beta=0.0.")
    if entropies is None and not (_is_off(entropy_coef) and _is_off(1 - top_entropy_quantile)):
        raise ValueError(
            "entropy_coef and top_entropy_quantile need entropies, [..., T] nats; "
            "or pass entropy_coef=0.0 and top_entropy_quantile=1.0."
        )

    log_probs = floating("log_probs", log_probs)
    if log_probs.ndim == 0:
        raise ValueError("log_probs has shape (); pass [..., T], completion tokens on the last axis.")
    mask = jnp.asarray(mask) != 0
    if mask.shape != log_probs.shape:
        raise ValueError(f"mask has shape {mask.shape}; pass {log_probs.shape}, that of log_probs.")

    # What stands under the mask is replaced before anything is computed from it. Done after, a NaN there would still
    # reach the gradient as 0·NaN.
    def clean(values):
        return bounded(jnp.where(mask, values, 0), MIN_LOG_PROB, jnp.inf)

    l = clean(log_probs)
    l_old = sg(l) if old_log_probs is None else clean(_like_log_probs("old_log_probs", old_log_probs, l))
    A = jnp.where(mask, _row_or_token("advantages", advantages, l), 0)
    count = jnp.sum(mask)
    num_tokens = count if num_tokens is None else num_tokens
    counts = Counts(
        rows=math.prod(mask.shape[:-1]) if num_rows is None else num_rows,
        tokens=num_tokens,
        normalizer=num_tokens if normalizer is None else normalizer,
        max_completion_length=mask.shape[-1] if max_completion_length is None else max_completion_length,
    )

    # Policy term: surrogate, then the masks and weights that touch it alone.
    log_ratio = l - l_old
    w = importance_ratio(l, log_ratio, mask)
    weights, log_weights = None, jnp.zeros(l.shape[:-1], l.dtype)
    if importance_weights is not None:
        weights = _row_or_token("importance_weights", importance_weights, l)
        log_w = jnp.clip(jnp.log(weights), math.log(1e-8), MAX_LOG_RATIO)
        log_weights = (log_w if log_w.shape[-1] == 1 else _row_sum(log_w, mask)).reshape(l.shape[:-1])
    tokens = Tokens(l, log_ratio, w, A, mask, log_weights)
    settings = Settings(
        epsilon=epsilon,
        epsilon_high=epsilon if epsilon_high is None else epsilon_high,
        delta=delta,
        sapo_temperature_neg=sapo_temperature_neg,
        sapo_temperature_pos=sapo_temperature_pos,
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
    )
    p = surrogate(tokens, settings)

    token_sums: dict[str, jax.Array] = {}
    if off_policy_mask_threshold is not None:
        l_sampling = l_old
        if sampling_log_probs is not None:
            l_sampling = _like_log_probs("sampling_log_probs", sampling_log_probs, l)
            # A token that the sampler could not score (NaN) is no evidence of drift.
            l_sampling = jnp.where(jnp.isnan(l_sampling), l, l_sampling)
        keep = (A >= 0) | (_row_mean(l_sampling - l, mask) <= off_policy_mask_threshold)
        p = jnp.where(keep, p, 0)
        token_sums["off_policy_fraction"] = ~keep
    selected = mask
    if entropies is not None:
        entropies = floating("entropies", entropies)
        if entropies.shape != l.shape:
            raise ValueError(f"entropies has shape {entropies.shape}; pass {l.shape}, that of log_probs.")
        entropies = entropies.astype(l.dtype)
        if not _is_off(1 - top_entropy_quantile):
            if entropy_threshold is None:
                entropy_threshold = top_entropy_threshold(entropies, mask, top_entropy_quantile)
            selected = mask & (entropies >= entropy_threshold)
            p = jnp.where(selected, p, 0)
    if weights is not None and surrogate is not vespo:
        p = p * jnp.where(mask, weights, 1)
    loss = policy_loss = reduction(p, mask, counts)
    sums = {"policy_loss": policy_loss}

    # KL term.
    kl_in_loss = jnp.zeros_like(loss)
    if ref_log_probs is not None:
        d = l - clean(_like_log_probs("ref_log_probs", ref_log_probs, l))
        token_sums["kl"] = k3(d)
        sums["kl_bounded_tokens"] = jnp.sum(d < -MAX_LOG_RATIO)
        if not _is_off(beta):
            if kl_placement == "reward":
                # A_t ← A_t − beta·Σ_{s≥t} d_s at the current params, on the unclipped ratio.
                k = w * sg(jax.lax.cumsum(d, axis=d.ndim - 1, reverse=True))
            elif use_bias_correction_kl:
                # k1 and k3 need w in the gradient: under sg(w), k3's would be that of KL(π_ref‖π) again. k2 must not
                # have it there: differentiated, w·k2 follows E_π[d²/2], which is no KL.
                k = (sg(w) if kl_estimator == "k2" else w) * estimate(d)
            else:
                k = estimate(d)
            kl_in_loss = reduction(beta * k, mask, counts)
            loss = loss + kl_in_loss
    else:
        token_sums["kl"] = jnp.zeros_like(l)
        sums["kl_bounded_tokens"] = jnp.zeros_like(count)
    sums["kl_in_loss"] = kl_in_loss

    # Entropy term.
    if entropies is not None:
        if num_selected_tokens is None:
            num_selected_tokens = num_tokens if selected is mask else jnp.sum(selected)
        sums["selected_tokens"] = jnp.sum(selected)
        sums["selected_entropy_sum"] = jnp.sum(entropies, where=selected)
        sums["entropy_bonus"] = entropy_coef * sums["selected_entropy_sum"] / jnp.maximum(num_selected_tokens, 1)
        loss = loss - sums["entropy_bonus"]
        token_sums["entropy"] = entropies

    token_sums |= {"ratio_mean": w, "approx_kl_old": k3(-log_ratio), **_clip_events(surrogate, tokens, settings)}
    sums |= {name + "_sum": total for name, total in _totals(token_sums, mask).items()}
    sums |= {"loss": loss, "tokens": count, "rows": jnp.asarray(math.prod(mask.shape[:-1]))}
    maxes = {"ratio_max": jnp.max(w, initial=0, where=mask)}
    # Metrics never steer the loss; and they are floats, also the counts, so that they average over steps and devices.
    sums, maxes = jax.tree.map(lambda x: sg(x.astype(l.dtype)), (sums, maxes))
    return loss, MetricSums(sums, maxes)


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
    importance_weights: jax.Array | None = None,
    num_rows: Scalar | None = None,
    num_tokens: Scalar | None = None,
    num_selected_tokens: Scalar | None = None,
    entropy_threshold: Scalar | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the GRPO objective and its metrics.

        d = l − l_ref,   w = ratio of l to l_old at the importance sampling level,   p = surrogate(w, A) of `loss_type`
        loss = reduce(p · masks and weights) + reduce(beta · k) − entropy_coef · Σ m' H / max(Σ m', 1)

    | loss_type | p | reduce |
    |---|---|---|
    | grpo | −min(min(w, delta)·A, clip(w, 1−ε, 1+ε_high)·A) | mean over rows of Σ m p / max(Σ m, 1) |
    | bnpo | same | Σ m p / max(Σ m, 1) |
    | dr_grpo | same | Σ m p / (rows · max_completion_length) |
    | dapo | same | Σ m p / max(normalizer, 1) |
    | luspo | same; meant for the sequence level, which it does not choose by itself | mean over rows of Σ m p |
    | cispo | −sg(min(w, ε_high))·A·l | as dapo |
    | sapo | −A·(4/τ)·σ(τ(w−1)), τ by the sign of A | as grpo |
    | vespo | −sg(φ)·A·l, φ = exp(λ + k·s − λ·eˢ) | as dapo |

    In vespo s = clip(Σ m·clip(l − l_old, ±20) + Σ m·log(importance_weights), log 1e-8, 20), and (k, λ) go by the sign
    of A.

    | level | w |
    |---|---|
    | token | exp(l − l_old) |
    | sequence | exp(Σ m (l − l_old) / Σ m), gradient through the mean |
    | trajectory | sg(exp(Σ m (l − l_old)))·exp(l − sg(l)): unbiased, high variance |

    Half precision is computed in float32. What stands where `mask` is 0 is ignored, NaN and inf included. Log-probs
    below −1e4 (−inf) count as −1e4, log-ratios above 20 as 20 when they are exponentiated; values are bounded, the
    gradient is kept alive.

    Args:
      log_probs: [..., T] float, nats; l, under the params that are trained. A row of T tokens is one completion.
      old_log_probs: [..., T] float, nats, or None: sg(l), ratio 1 in value with the gradient of l.
      ref_log_probs: [..., T] float, nats; may be None if beta is 0. If given, the KL is measured whatever beta is.
      advantages: [...] or [..., T] float, unitless.
      mask: [..., T] bool or 0/1; True on the completion tokens that count.
      loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo".
      beta: ≥ 0, weight of the KL term. The number 0 leaves the term out.
      epsilon: ≥ 0, lower clip range.
      epsilon_high: ≥ 0, upper clip range; None means epsilon. In cispo it is the cap itself (5.0 in the paper), not
        1 + epsilon_high: left at None there, on-policy gradients are scaled by epsilon.
      delta: > 1 + epsilon_high, cap of the ratio in the unclipped term; None means no cap.
      importance_sampling_level: "token", "sequence" or "trajectory".
      kl_estimator: "k1", "k2" or "k3" of d.
      use_bias_correction_kl: whether the estimator is multiplied by w (k1, k3) or by sg(w) (k2); only for placement
        "loss".
      kl_placement: "loss" adds beta·k to p. "reward" adds beta·w·sg(Σ_{s≥t} m_s d_s), which is the same as subtracting
        beta·Σ_{s≥t} d_s from the normalised advantages at the current params, without clipping.
      max_completion_length: tokens, constant of dr_grpo; None means T.
      normalizer: tokens, denominator of dapo, cispo and vespo: the masked-in tokens of the whole optimizer batch. None
        means num_tokens.
      sapo_temperature_neg: τ > 0 where A ≤ 0.
      sapo_temperature_pos: τ > 0 where A > 0.
      vespo_k_pos: k where A ≥ 0.
      vespo_lambda_pos: λ where A ≥ 0.
      vespo_k_neg: k where A < 0.
      vespo_lambda_neg: λ where A < 0.
      entropies: [..., T] float, nats, of the next-token distributions; differentiable.
      entropy_coef: weight of the entropy bonus, per mean nat; may be traced. m' is the mask after the next line.
      top_entropy_quantile: ρ in [0, 1]; below 1 only tokens with entropy ≥ the linear (1−ρ)-quantile enter p.
      sampling_log_probs: [..., T] float, nats, of the sampler; for the off-policy mask only. None means old_log_probs,
        a NaN means "not scored".
      off_policy_mask_threshold: nats; keeps p where A ≥ 0 or mean_m(l_sampling − l) ≤ threshold. None keeps all.
      importance_weights: [...] or [..., T] float ≥ 0, weights for sampler against trainer; multiply p (in vespo they
        enter s). None means 1.
      num_rows: rows of the whole optimizer batch, if this call sees a part of it; None means those of this call.
      num_tokens: masked-in tokens of the whole optimizer batch, likewise. Denominator of bnpo and of the bonus.
      num_selected_tokens: Σ m' of the whole optimizer batch, likewise.
      entropy_threshold: nats; the quantile over the whole optimizer batch, likewise. `batch_totals` computes all four.

    Returns:
      loss: [] float32 (float64 for float64 log_probs), to be minimised.
      metrics: dict of [] floats without gradient. `loss` = `policy_loss` + `kl_in_loss` − `entropy_bonus` (as they
        enter the loss). Means over masked-in tokens: `kl` (plain k3 whatever enters the loss; 0 without reference),
        `entropy`, `ratio_mean`, `approx_kl_old` (k3 estimate of KL(old‖new) by the token log-ratios), `clip_fraction`
        = `clip_fraction_low` (w < 1−ε, A < 0) + `clip_fraction_high` (w > 1+ε_high, A > 0; in cispo w > ε_high),
        `clip_fraction_delta` (w > delta, A < 0), `off_policy_fraction` (if its threshold is given). Others:
        `ratio_max`, `kl_bounded_tokens` (tokens with d < −20), `tokens`, `rows`; with entropies `selected_tokens`
        (Σ m') and `selected_entropy` (mean over m').
        Metrics of the parts of a batch do not merge exactly; those of `grpo_loss_terms` do, by `merge_metrics`.

    Raises:
      ValueError: on shapes, dtypes or names that do not fit, and on a term without the array that it needs.

    Gradient:
      With respect to `log_probs` and `entropies` only; all else is held constant. Expected gradient of the KL term for
      one token drawn from π_old, in a state that is given:

      | in the loss | gradient |
      |---|---|
      | k1 | 0 on-policy |
      | k2 | ∇KL(π‖π_ref) on-policy; biased off-policy |
      | k3 | ∇KL(π_ref‖π) on-policy, the other direction, so at the first update already; biased off-policy |
      | w·k3, w·k1, sg(w)·k2 | ∇KL(π‖π_ref), also off-policy: `use_bias_correction_kl=True`, the default |
      | placement "reward", level "trajectory" | ∇KL(π‖π_ref) of whole completions, also off-policy |

      Only the last line is about whole completions. The terms in the loss leave out the effect of a token on the states
      after it, on-policy too: 4 to 47 % of the gradient's norm in four draws of a problem of two tokens, enumerated in
      tests/test_enumeration.py. The last line is exact there, and pays with variance.

      At the sequence level the correction uses the *sequence* ratio, as TRL does, and is biased for completions of more
      than one token.

    References:
      DeepSeekMath (arXiv:2402.03300) equation 3; DAPO (arXiv:2503.14476); Dr. GRPO (arXiv:2503.20783); GSPO
      (arXiv:2507.18071); CISPO (arXiv:2506.13585); SAPO (arXiv:2511.20347); LUSPO (arXiv:2602.05261); VESPO
      (arXiv:2602.10693); the two-sided clip of INTELLECT-2 (arXiv:2505.07291); the KL correction and the off-policy
      mask of DeepSeek-V3.2 (arXiv:2512.02556); top-entropy tokens (arXiv:2506.01939).

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
    # First line, so that these are the arguments and nothing else. A test holds the two signatures together.
    loss, metrics = grpo_loss_terms(**locals())
    return loss, finalize_metrics(metrics)
