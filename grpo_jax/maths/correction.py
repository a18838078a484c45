"""Importance weights for completions that another engine than the trainer has sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import MAX_LOG_RATIO, MIN_LOG_PROB, Scalar, choose, floating, sg

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""Per token or per completion; what lies outside of the bounds is moved onto them, or gets the weight 0."""


def sampler_weights(
    old_log_probs: jax.Array,
    sampling_log_probs: jax.Array,
    mask: jax.Array,
    *,
    mode: str = "sequence_mask",
    clip_max: Scalar | None = 3.0,
    clip_min: Scalar | None = None,
) -> jax.Array:
    """Weighs completions drawn from a distribution μ as if they were drawn from π_old.

        δ = log π_old − log μ per token
        token:     w_t = exp(δ_t)
        sequence:  w = exp(Σ m δ)
        truncate:  w ← max(min(w, clip_max), clip_min)
        mask:      w ← w if clip_min ≤ w ≤ clip_max, else 0

    Half precision is computed in float32. What stands where `mask` is 0 is ignored, NaN and inf included. Log-probs
    below −1e4 (−inf) count as −1e4, and |log w| above 20 as 20. A token that the engine could not score (NaN) counts
    with δ = 0.

    Args:
      old_log_probs: [..., T] float, nats; log-probs under π_old, by the trainer's own scorer.
      sampling_log_probs: [..., T] float, nats; log-probs of the engine, of the distribution that it drew from.
      mask: [..., T] bool or 0/1; True on the tokens that count. A row of T tokens is one completion.
      mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
      clip_max: > 0, upper bound of the weights; None: unbounded.
      clip_min: ≥ 0, lower bound; None: unbounded.

    Returns:
      float32 (float64 for float64 old_log_probs): [..., T] in the token modes, 1 where `mask` is 0; [...] in the
      sequence modes, 1 for a row without tokens. Both are what `grpo_loss` takes as `importance_weights`.

    Raises:
      ValueError: on shapes or dtypes that do not fit, and on a mode that is not known.

    Gradient:
      None: the weights are constants. Without bounds, the expectation over completions from μ of w (sequence) times
      anything is that over completions from π_old. The token weights leave out the weights of the tokens before: they
      are exact for completions of one token. Bounds trade bias for variance.

    References:
      TRL's `vllm_importance_sampling_mode`; truncated importance sampling: Ionides 2008, and for engines of their own
      Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).

    Example:
      >>> import jax.numpy as jnp
      >>> old, sampling = jnp.log(jnp.array([[0.5, 0.8]])), jnp.log(jnp.array([[0.25, 0.4]]))
      >>> sampler_weights(old, sampling, jnp.ones((1, 2)), mode="token_truncate", clip_max=1.5).tolist()
      [[1.5, 1.5]]
      >>> round(float(sampler_weights(old, sampling, jnp.ones((1, 2)), mode="sequence_mask", clip_max=5.0)[0]), 4)
      4.0
    """
    choose("mode", mode, MODES)
    old, sampling = floating("old_log_probs", old_log_probs), floating("sampling_log_probs", sampling_log_probs)
    mask = jnp.asarray(mask) != 0
    for name, value in (("sampling_log_probs", sampling), ("mask", mask)):
        if value.shape != old.shape or old.ndim == 0:
            raise ValueError(f"{name} has shape {value.shape}; pass {old.shape}, that of old_log_probs [..., T].")
    delta = jnp.maximum(old, MIN_LOG_PROB) - jnp.maximum(sampling.astype(old.dtype), MIN_LOG_PROB)
    delta = jnp.where(mask & ~jnp.isnan(sampling), delta, 0)  # no gradient passes here: one `where` is enough
    if mode.startswith("sequence"):
        delta = delta.sum(axis=-1)
    w = jnp.exp(jnp.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    low, high = -jnp.inf if clip_min is None else clip_min, jnp.inf if clip_max is None else clip_max
    w = jnp.clip(w, low, high) if mode.endswith("truncate") else jnp.where((w < low) | (w > high), 0, w)
    counts = mask if mode.startswith("token") else mask.any(axis=-1)
    return sg(jnp.where(counts, w, 1))
