"""Rewards to advantages. The group is axis 1: only the statistics named "batch" mix prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import choose

SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


def _centre(values: jax.Array, scored: jax.Array, axis: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return values − mean (0 where not scored) and the standard deviation with Bessel's correction, keepdims."""
    count = jnp.sum(scored, axis=axis, keepdims=True)
    # Relative to the smallest value, so that equal rewards give exactly 0 and 0. Otherwise the float32 mean of three
    # times 1000.1 is off by 6e-5, and dividing by the std (also 6e-5) gives an advantage of 0.4.
    smallest = jnp.min(values, axis=axis, keepdims=True, where=scored, initial=jnp.inf)
    shifted = jnp.where(scored, values - smallest, 0)
    mean = jnp.sum(shifted, axis=axis, keepdims=True) / jnp.maximum(count, 1)
    centred = jnp.where(scored, shifted - mean, 0)
    # The std of a single scored value is 0, as of a group of equal values.
    std = jnp.sqrt(jnp.sum(centred**2, axis=axis, keepdims=True) / jnp.maximum(count - 1, 1))
    return centred, std


def _rewards_and_weights(
    rewards: jax.Array, weights: Sequence[float] | jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return rewards [B, G, K] and weights [K] of at least float32; raise a ValueError for wrong shapes."""
    rewards = jnp.asarray(rewards)
    if rewards.ndim not in (2, 3):
        raise ValueError(f"rewards has shape {rewards.shape}; pass [B, G] or [B, G, K], the group on axis 1.")
    if rewards.ndim == 2:
        rewards = rewards[:, :, None]
    rewards = jax.lax.stop_gradient(rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32)))
    functions = rewards.shape[2]
    weights = jnp.ones(functions) if weights is None else jnp.asarray(weights)
    if weights.shape != (functions,):
        raise ValueError(f"weights has shape {weights.shape}; pass ({functions},), one weight per reward function.")
    return rewards, weights.astype(rewards.dtype)


def _weighted_sum(values: jax.Array, weights: jax.Array, scored: jax.Array) -> jax.Array:
    """Return Σ_k w_k values_k over the scored k: [B, G, K] → [B, G]."""
    return jnp.sum(jnp.where(scored, values * weights[None, None, :], 0), axis=2)


def _rloo(r: jax.Array, scored: jax.Array, lengths: jax.Array | None, epsilon: float) -> jax.Array:
    """Return r_i minus the mean of the others in its group."""
    centred, _ = _centre(r, scored, axis=1)
    count = jnp.sum(scored, axis=1, keepdims=True)
    return centred * count / jnp.maximum(count - 1, 1)


def _maxrl(r: jax.Array, scored: jax.Array, lengths: jax.Array | None, epsilon: float) -> jax.Array:
    """Return (r − mean_G r) / mean_G r, or 0 in a group whose mean is not above 0."""
    centred, _ = _centre(r, scored, axis=1)
    mean = jnp.mean(r, axis=1, keepdims=True, where=scored)
    return centred / jnp.where(mean > 0, mean, jnp.inf)


def _opo(r: jax.Array, scored: jax.Array, lengths: jax.Array | None, epsilon: float) -> jax.Array:
    """Return r − Σ_G length·r / Σ_G length."""
    if lengths is None or jnp.shape(lengths) != r.shape:
        came = None if lengths is None else jnp.shape(lengths)
        raise ValueError(f'lengths has shape {came}; estimator="opo" needs {r.shape}, the tokens of each completion.')
    tokens = jnp.where(scored, jnp.asarray(lengths, r.dtype), 0)
    centred, _ = _centre(r, scored, axis=1)
    baseline = jnp.sum(tokens * centred, axis=1, keepdims=True) / jnp.maximum(jnp.sum(tokens, axis=1, keepdims=True), 1)
    return jnp.where(scored, centred - baseline, 0)


def _reinforce_pp(r: jax.Array, scored: jax.Array, lengths: jax.Array | None, epsilon: float) -> jax.Array:
    """Return c / (std_BG c + epsilon), c = r − mean_G r, whose mean over the batch is 0."""
    centred, _ = _centre(r, scored, axis=1)
    _, std = _centre(centred, scored, axis=(0, 1))
    return centred / (std + epsilon)


OTHER_ESTIMATORS: dict[str, Callable[[jax.Array, jax.Array, jax.Array | None, float], jax.Array]] = {
    "rloo": _rloo,
    "maxrl": _maxrl,
    "opo": _opo,
    "reinforce_pp": _reinforce_pp,
}
"""Estimators of advantages [B, G], given rewards, which of them are scored, lengths (all [B, G]) and epsilon."""


def scale_of(scale_rewards: str | None, estimator: str) -> str:
    """Return the scale of advantages; None selects the estimator's own."""
    own = "group" if estimator == "grpo" else "none"
    return own if scale_rewards is None else scale_rewards


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
    | rloo | r − mean of the others = (r − mean_G r)·n/(n − 1) |
    | maxrl | (r − mean_G r) / mean_G r; 0 in a group whose mean is not above 0 |
    | opo | r − Σ_G L·r / Σ_G L |
    | reinforce_pp | c / (std_BG c + epsilon), c = r − mean_G r |

    NaN means "not scored by this function" and is left out of sums, means and stds. A completion without a score gets
    A = 0, and all completions of a group with equal rewards get exactly 0.

    Args:
      rewards: [B, G] or [B, G, K], any real dtype; NaN = not scored. Infinite rewards are not checked.
      weights: [K] float, weight of each reward function; None: all 1.
      scale_rewards: the std that divides in sum_then_normalize: "group", "batch" (all completions), or "none". None:
        "group" for grpo, "none" for the other estimators. normalize_then_sum does not use it.
      multi_objective_aggregation: "sum_then_normalize" or "normalize_then_sum".
      epsilon: ≥ 0, added to each std, in units of the reward.
      estimator: "grpo", "rloo", "maxrl" (rewards ≥ 0), "opo" or "reinforce_pp". All but grpo require their own scale
        and "sum_then_normalize".
      lengths: [B, G], tokens of each completion; for opo only.

    Returns:
      [B, G] float32 (float64 for float64 rewards), unitless; higher is better.

    Raises:
      ValueError: wrong ranks or shapes, an unknown name, or a scale that contradicts the estimator.

    Gradient:
      None: rewards are data. The expected value of (1/G) Σ_i A_i ∇log π(i) over groups of G sampled from π is:

      | estimator | expected gradient |
      |---|---|
      | rloo | ∇E[r] |
      | grpo with scale_rewards="none" | (G − 1)/G · ∇E[r] |
      | maxrl, rewards 0 and 1 | ∇ of −Σ_{k<G} (1 − p)^k / k, which is log p truncated; p is the probability of 1 |

      The others are biased by amounts that depend on the group. tests/maths/test_advantages.py enumerates all of them.

    References:
      DeepSeekMath (arXiv:2402.03300), section 4.1.2; Dr. GRPO (arXiv:2503.20783) for "none"; GDPO (arXiv:2601.05242)
      for normalize_then_sum. The std has ddof 1 and epsilon is 1e-4, added to the std, as in TRL; other libraries use
      ddof 0, or 1e-6 or 1e-8. RLOO (arXiv:2402.14740); MaxRL (arXiv:2602.02710); OPO (arXiv:2505.23585); REINFORCE++
      with a group baseline (arXiv:2501.03262), with the std over completions; some libraries use tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> rewards = jnp.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, jnp.nan]])
      >>> [[round(a, 3) for a in group] for group in compute_advantages(rewards).tolist()]
      [[0.866, -0.866, -0.866, 0.866], [0.0, 0.0, 0.0, 0.0]]
      >>> compute_advantages(rewards, scale_rewards="none").tolist()
      [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    """
    choose("estimator", estimator, ("grpo", *OTHER_ESTIMATORS))
    scale_rewards = choose("scale_rewards", scale_of(scale_rewards, estimator), SCALES)
    choose("multi_objective_aggregation", multi_objective_aggregation, AGGREGATIONS)
    if estimator != "grpo" and (scale_rewards, multi_objective_aggregation) != ("none", "sum_then_normalize"):
        raise ValueError(
            f"estimator={estimator!r} has a scale of its own, and scale_rewards={scale_rewards!r} with"
            f" multi_objective_aggregation={multi_objective_aggregation!r} is another;"
            " leave both out."
        )
    rewards, weights = _rewards_and_weights(rewards, weights)
    scored_by = ~jnp.isnan(rewards)
    scored = jnp.any(scored_by, axis=2)

    if multi_objective_aggregation == "normalize_then_sum":
        centred, std = _centre(rewards, scored_by, axis=1)
        z = centred / (std + epsilon)
        centred, std = _centre(_weighted_sum(z, weights, scored_by), scored, axis=(0, 1))
        return centred / (std + epsilon)

    r = _weighted_sum(rewards, weights, scored_by)
    if estimator != "grpo":
        return OTHER_ESTIMATORS[estimator](r, scored, lengths, epsilon)
    centred, std = _centre(r, scored, axis=1)
    if scale_rewards == "none":
        return centred
    if scale_rewards == "batch":
        _, std = _centre(r, scored, axis=(0, 1))
    return centred / (std + epsilon)


def zero_signal_groups(
    rewards: jax.Array,
    *,
    weights: Sequence[float] | jax.Array | None = None,
    multi_objective_aggregation: str = "sum_then_normalize",
) -> jax.Array:
    """Return which groups are zero-signal groups: all scored completions have equal rewards, or none is scored.

    Dynamic sampling replaces these groups (DAPO, arXiv:2503.14476, section 3.2).

    Args:
      rewards: [B, G] or [B, G, K]; NaN = not scored.
      weights: [K] float; None: all 1.
      multi_objective_aggregation: with "sum_then_normalize" the weighted sums must be equal; with "normalize_then_sum"
        the scores of each reward function of non-zero weight.

    Returns:
      [B] bool.

    Example:
      >>> import jax.numpy as jnp
      >>> zero_signal_groups(jnp.array([[1.0, 1.0], [0.0, 1.0], [jnp.nan, 1.0]])).tolist()
      [True, False, True]
    """
    choose("multi_objective_aggregation", multi_objective_aggregation, AGGREGATIONS)
    rewards, weights = _rewards_and_weights(rewards, weights)
    scored_by = ~jnp.isnan(rewards)
    if multi_objective_aggregation == "normalize_then_sum":
        _, std = _centre(rewards, scored_by, axis=1)
        return jnp.all((std[:, 0, :] == 0) | (weights[None, :] == 0), axis=1)
    _, std = _centre(_weighted_sum(rewards, weights, scored_by), jnp.any(scored_by, axis=2), axis=1)
    return std[:, 0] == 0
