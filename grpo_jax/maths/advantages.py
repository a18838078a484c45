"""Group-relative advantages from rewards. Axis 1 is the group, and only batch-wide statistics combine prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import one_of

SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


def _center(values: jax.Array, scored: jax.Array, axis: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return values − mean (0 where not scored) and the sample standard deviation (ddof 1) with keepdims."""
    count = jnp.sum(scored, axis=axis, keepdims=True)
    # Subtract the smallest value first, so that equal rewards have deviations and a std of exactly 0. Otherwise, the
    # float32 mean of three rewards of 1000.1 is off by 6e-5, and the scaled advantages are 0.35 instead of 0.
    smallest = jnp.min(values, axis=axis, keepdims=True, where=scored, initial=jnp.inf)
    shifted = jnp.where(scored, values - smallest, 0)
    mean = jnp.sum(shifted, axis=axis, keepdims=True) / jnp.maximum(count, 1)
    centered = jnp.where(scored, shifted - mean, 0)
    # max(count − 1, 1) makes the std of a single scored value 0.
    std = jnp.sqrt(jnp.sum(centered**2, axis=axis, keepdims=True) / jnp.maximum(count - 1, 1))
    return centered, std


def _rewards_and_weights(
    rewards: jax.Array, weights: Sequence[float] | jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return rewards [B, G, K], NaN where the weight is 0, and weights [K], both in float32 or float64."""
    rewards = jnp.asarray(rewards)
    if rewards.ndim not in (2, 3):
        raise ValueError(f"rewards has shape {rewards.shape}; expected [B, G] or [B, G, K], with the group on axis 1.")
    if rewards.ndim == 2:
        rewards = rewards[:, :, None]
    rewards = jax.lax.stop_gradient(rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32)))
    functions = rewards.shape[2]
    weights = jnp.ones(functions) if weights is None else jnp.asarray(weights)
    if weights.shape != (functions,):
        raise ValueError(f"weights has shape {weights.shape}; expected ({functions},), one per reward function.")
    return jnp.where(weights[None, None] == 0, jnp.nan, rewards), weights.astype(rewards.dtype)


def _weighted_sum(values: jax.Array, weights: jax.Array, scored: jax.Array) -> jax.Array:
    """Return Σ_k w_k values_k over the reward functions k that scored the completion: [B, G, K] → [B, G]."""
    return jnp.sum(jnp.where(scored, values * weights[None, None, :], 0), axis=2)


def _rloo(r: jax.Array, scored: jax.Array, lengths: jax.Array | None, epsilon: float) -> jax.Array:
    """Return each reward minus the mean of the other rewards in the group."""
    centered, _ = _center(r, scored, axis=1)
    count = jnp.sum(scored, axis=1, keepdims=True)
    return centered * count / jnp.maximum(count - 1, 1)


def _maxrl(r: jax.Array, scored: jax.Array, lengths: jax.Array | None, epsilon: float) -> jax.Array:
    """Return (r − mean_G r) / mean_G r, or 0 if the group mean is not positive."""
    centered, _ = _center(r, scored, axis=1)
    mean = jnp.mean(r, axis=1, keepdims=True, where=scored)
    return centered / jnp.where(mean > 0, mean, jnp.inf)


def _opo(r: jax.Array, scored: jax.Array, lengths: jax.Array | None, epsilon: float) -> jax.Array:
    """Return r − Σ_G length·r / Σ_G length."""
    if lengths is None or jnp.shape(lengths) != r.shape:
        shape = None if lengths is None else jnp.shape(lengths)
        raise ValueError(f'estimator="opo" needs completion lengths of shape {r.shape} in lengths; got {shape}.')
    tokens = jnp.where(scored, jnp.asarray(lengths, r.dtype), 0)
    centered, _ = _center(r, scored, axis=1)
    total = jnp.sum(tokens, axis=1, keepdims=True)
    baseline = jnp.sum(tokens * centered, axis=1, keepdims=True) / jnp.maximum(total, 1)
    return jnp.where(scored, centered - baseline, 0)


def _reinforce_pp(r: jax.Array, scored: jax.Array, lengths: jax.Array | None, epsilon: float) -> jax.Array:
    """Return c / (std_BG c + epsilon) with c = r − mean_G r. The mean of c over the batch is 0."""
    centered, _ = _center(r, scored, axis=1)
    _, std = _center(centered, scored, axis=(0, 1))
    return centered / (std + epsilon)


OTHER_ESTIMATORS: dict[str, Callable[[jax.Array, jax.Array, jax.Array | None, float], jax.Array]] = {
    "rloo": _rloo,
    "maxrl": _maxrl,
    "opo": _opo,
    "reinforce_pp": _reinforce_pp,
}
"""Advantage estimators other than GRPO. Each is a function of rewards, scored, lengths (all [B, G]) and epsilon."""


def scale_of(scale_rewards: str | None, estimator: str) -> str:
    """Return `scale_rewards`, or the estimator's default if it is None."""
    default = "group" if estimator == "grpo" else "none"
    return default if scale_rewards is None else scale_rewards


def compute_advantages(
    rewards: jax.Array,
    *,
    weights: Sequence[float] | jax.Array | None = None,
    scale_rewards: str | None = None,
    multi_objective_aggregation: str = "sum_then_normalize",
    epsilon: float = 1e-4,
    estimator: str = "grpo",
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Compute group-relative advantages.

        sum_then_normalize:   r = Σ_k w_k R_k              A = (r − mean_G r) / (std r + epsilon)
        normalize_then_sum:   z_k = (R_k − mean_G R_k) / (std_G R_k + epsilon)
                              r = Σ_k w_k z_k              A = (r − mean_BG r) / (std_BG r + epsilon)

    Other estimators, with r = Σ_k w_k R_k, n scored completions in the group and lengths L:

    | estimator | A |
    |---|---|
    | rloo | r − mean of the other rewards = (r − mean_G r)·n/(n − 1) |
    | maxrl | (r − mean_G r) / mean_G r; 0 if the group mean is not positive |
    | opo | r − Σ_G L·r / Σ_G L |
    | reinforce_pp | c / (std_BG c + epsilon), c = r − mean_G r |

    A reward that is NaN (not scored) or has weight 0 is excluded from sums, means and stds. A completion has A = 0 if
    it is not scored, if no other completion in its group is scored, or if all rewards in its group are equal.

    Args:
      rewards: [B, G] or [B, G, K], any real dtype; NaN = not scored. Infinite rewards are not checked for.
      weights: [K] float, weight of each reward function. If None, all weights are 1.
      scale_rewards: std to divide by in sum_then_normalize: "group", "batch" (over all completions) or "none".
        Defaults to "group" for grpo and "none" for the other estimators. Not used in normalize_then_sum.
      multi_objective_aggregation: "sum_then_normalize" or "normalize_then_sum".
      epsilon: constant ≥ 0 added to each std, in units of the reward.
      estimator: "grpo", "rloo", "maxrl" (rewards ≥ 0), "opo" or "reinforce_pp". All except grpo require
        scale_rewards "none" and "sum_then_normalize".
      lengths: [B, G], number of tokens in each completion; used by opo only.

    Returns:
      [B, G] float32 (float64 for float64 rewards), unitless if scaled, else in units of the reward.

    Raises:
      ValueError: if a rank or shape is wrong, a name is unknown, or the estimator does not support the scale.

    Gradient:
      None; rewards are constants. The expected value of (1/G) Σ_i A_i ∇log π(i) over groups of G samples from π is:

      | estimator | expected gradient |
      |---|---|
      | rloo | ∇E[r] |
      | grpo with scale_rewards="none" | (G − 1)/G · ∇E[r] |
      | maxrl with rewards in {0, 1} | ∇ of −Σ_{k<G} (1 − p)^k / k, the truncated series of log p; p = P(reward 1) |

      The other estimators are biased: A is scaled by a std, or has a baseline, that depends on the completion itself.
      The table is verified by enumeration in tests/maths/test_advantages.py.

    References:
      DeepSeekMath (arXiv:2402.03300), section 4.1.2; Dr. GRPO (arXiv:2503.20783) for "none"; GDPO (arXiv:2601.05242)
      for normalize_then_sum. As in TRL, the std has ddof 1, and epsilon=1e-4 is added to it; other libraries use
      ddof 0, or 1e-6 or 1e-8. RLOO (arXiv:2402.14740); MaxRL (arXiv:2602.02710); OPO (arXiv:2505.23585); REINFORCE++
      with a group baseline (arXiv:2501.03262) and the std over completions (some libraries: over tokens).

    Example:
      >>> import jax.numpy as jnp
      >>> rewards = jnp.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, jnp.nan]])
      >>> [[round(a, 3) for a in group] for group in compute_advantages(rewards).tolist()]
      [[0.866, -0.866, -0.866, 0.866], [0.0, 0.0, 0.0, 0.0]]
      >>> compute_advantages(rewards, scale_rewards="none").tolist()
      [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    """
    one_of("estimator", estimator, ("grpo", *OTHER_ESTIMATORS))
    scale_rewards = one_of("scale_rewards", scale_of(scale_rewards, estimator), SCALES)
    one_of("multi_objective_aggregation", multi_objective_aggregation, AGGREGATIONS)
    if estimator != "grpo" and (scale_rewards, multi_objective_aggregation) != ("none", "sum_then_normalize"):
        raise ValueError(
            f"estimator={estimator!r} does not support scale_rewards={scale_rewards!r} with"
            f" multi_objective_aggregation={multi_objective_aggregation!r}; omit both arguments."
        )
    rewards, weights = _rewards_and_weights(rewards, weights)
    scored_by = ~jnp.isnan(rewards)
    scored = jnp.any(scored_by, axis=2)

    if multi_objective_aggregation == "normalize_then_sum":
        centered, std = _center(rewards, scored_by, axis=1)
        r = _weighted_sum(centered / (std + epsilon), weights, scored_by)
        _, std = _center(r, scored, axis=(0, 1))
        return r / (std + epsilon)  # the mean of r is 0; subtracting a rounded mean would make zeros nonzero

    r = _weighted_sum(rewards, weights, scored_by)
    if estimator != "grpo":
        return OTHER_ESTIMATORS[estimator](r, scored, lengths, epsilon)
    centered, std = _center(r, scored, axis=1)
    if scale_rewards == "none":
        return centered
    if scale_rewards == "batch":
        _, std = _center(r, scored, axis=(0, 1))
    return centered / (std + epsilon)


def zero_signal_groups(
    rewards: jax.Array,
    *,
    weights: Sequence[float] | jax.Array | None = None,
    multi_objective_aggregation: str = "sum_then_normalize",
) -> jax.Array:
    """Return a mask that is True for groups without a training signal.

    In a zero-signal group, all scored completions have equal rewards, or no completion is scored. Dynamic sampling
    replaces these groups (DAPO, arXiv:2503.14476, section 3.2).

    Args:
      rewards: [B, G] or [B, G, K]; NaN = not scored.
      weights: [K] float, weight of each reward function. If None, all weights are 1.
      multi_objective_aggregation: which rewards must be equal: the weighted sums for "sum_then_normalize", or the
        rewards from each function with a nonzero weight for "normalize_then_sum".

    Returns:
      [B] bool, True for zero-signal groups.

    Example:
      >>> import jax.numpy as jnp
      >>> zero_signal_groups(jnp.array([[1.0, 1.0], [0.0, 1.0], [jnp.nan, 1.0]])).tolist()
      [True, False, True]
    """
    one_of("multi_objective_aggregation", multi_objective_aggregation, AGGREGATIONS)
    rewards, weights = _rewards_and_weights(rewards, weights)
    scored_by = ~jnp.isnan(rewards)
    if multi_objective_aggregation == "normalize_then_sum":
        _, std = _center(rewards, scored_by, axis=1)
        return jnp.all(std[:, 0, :] == 0, axis=1)
    _, std = _center(_weighted_sum(rewards, weights, scored_by), jnp.any(scored_by, axis=2), axis=1)
    return std[:, 0] == 0
