"""Per-token estimators of KL(π‖π_ref) from the log-probs of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import MAX_LOG_RATIO, MIN_LOG_PROB, as_float, one_of, ste_clip


def k1(log_ratio: jax.Array) -> jax.Array:
    """Return d = log_ratio, an unbiased estimator. On-policy, its expected gradient is 0 for any reference."""
    return log_ratio


def k2(log_ratio: jax.Array) -> jax.Array:
    """Return d²/2, d = log_ratio, a biased estimator. On-policy, its expected gradient is ∇KL(π‖π_ref)."""
    return log_ratio**2 / 2


def k3(log_ratio: jax.Array) -> jax.Array:
    """Return e^{−d} − 1 + d, d = log_ratio, an unbiased estimator. On-policy, its expected gradient is ∇KL(π_ref‖π)."""
    d = ste_clip(log_ratio, -MAX_LOG_RATIO, jnp.inf)
    # Evaluating e^{−d} − 1 + d directly would lose all digits near d = 0, where d usually is.
    return jnp.expm1(-d) + d


KL_ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_divergence(log_probs: jax.Array, ref_log_probs: jax.Array, *, estimator: str = "k3") -> jax.Array:
    """Estimate KL(π‖π_ref) per token from the log-probs of tokens sampled from π.

        d = log_probs − ref_log_probs
        k1 = d        k2 = d²/2        k3 = e^{−d} − 1 + d

    Half-precision inputs are converted to float32. Log-probs below −1e4 are treated as −1e4. In k3, d below −20 is
    treated as −20 in the value and the derivative, to keep the exponential from overflowing.

    Args:
      log_probs: [...] float, log-probs of the sampled tokens under the policy, in nats.
      ref_log_probs: [...] float, log-probs of the same tokens under the reference, in nats.
      estimator: "k1", "k2" or "k3".

    Returns:
      [...] float32 (float64 for float64 input), nats per token.

    Raises:
      ValueError: if the shapes differ, a dtype is not floating-point, or the estimator is unknown.

    Gradient:
      With respect to `log_probs`: 1 for k1, d for k2 and 1 − e^{−d} for k3. `ref_log_probs` is constant. An unbiased
      value does not imply an unbiased gradient: over tokens sampled from π in a given state, the expected gradient is 0
      for k1, ∇KL(π‖π_ref) for k2, and ∇KL(π_ref‖π) for k3. For products with the ratio and for whole
      completions, see `grpo_loss`.

    References:
      Schulman, "Approximating KL Divergence" (2020): k1, k2, k3. DeepSeekMath (arXiv:2402.03300), equation 4: k3.

    Example:
      >>> import jax.numpy as jnp
      >>> policy, reference = jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.5]))
      >>> [round(float(x), 3) for x in kl_divergence(policy, reference, estimator="k1")]
      [0.693, -0.693]
      >>> [round(float(x), 3) for x in kl_divergence(policy, reference)]
      [0.193, 0.307]
    """
    estimate = KL_ESTIMATORS[one_of("estimator", estimator, KL_ESTIMATORS)]
    log_probs = as_float("log_probs", log_probs)
    ref_log_probs = jax.lax.stop_gradient(as_float("ref_log_probs", ref_log_probs)).astype(log_probs.dtype)
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(
            f"log_probs has shape {log_probs.shape} and ref_log_probs has shape "
            f"{ref_log_probs.shape}; pass log-probs of the same tokens."
        )
    return estimate(ste_clip(log_probs, MIN_LOG_PROB, jnp.inf) - ste_clip(ref_log_probs, MIN_LOG_PROB, jnp.inf))
