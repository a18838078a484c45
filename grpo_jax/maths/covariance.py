"""Which tokens lower the entropy: those whose log-prob and advantage are high together (Clip-Cov and KL-Cov)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import clean, floating, like_log_probs, read_mask, row_or_token, sg
from grpo_jax.maths.metrics import token_totals
from grpo_jax.maths.surrogates import RATIOS, LossSettings, ppo_stops

BY_COVARIANCE = ("clip_cov", "kl_cov")
"""The loss types that choose tokens by their covariance, among all tokens of a minibatch."""


def covariance_share(
    log_probs: jax.Array,
    old_log_probs: jax.Array | None,
    advantages: jax.Array,
    mask: jax.Array,
    settings: LossSettings,
) -> jax.Array:
    """The share by which each token of a minibatch is chosen by "clip_cov" or "kl_cov".

        c = (A − mean_m A)·(l − mean_m l),   the means over all masked-in tokens of the minibatch
        clip_cov:   share = min(N/n, 1) on the n tokens with clip_cov_lb < c < clip_cov_ub that neither the clip nor
                    `delta` has stopped, N = max(⌊clip_cov_ratio·Σ m⌋, 1)
        kl_cov:     share = 1 on the max(⌊kl_cov_ratio·Σ m⌋, 1) tokens of the largest c; tokens that tie for the last
                    places share them

    The paper draws N of the n tokens of clip_cov at random, and leaves them out. Here each is left out by its chance
    N/n of being drawn. The loss is linear in that, so its gradient is the expected gradient of the random choice, and
    it depends neither on a key nor on how the minibatch lies on the devices.

    Like `top_entropy_mask` it is made once for a whole minibatch, and each part is given its part (`cov_share`).

    Args:
      log_probs: [..., T] float, nats, under the present params.
      old_log_probs: [..., T] float, nats, or None: `log_probs`, none of which the clip stops.
      advantages: [...] or [..., T] float.
      mask: [..., T] bool or 0/1.
      settings: `loss_type`, and the numbers named above; the clip is that of `ppo`.

    Returns:
      [..., T] float in [0, 1], 0 where `mask` is 0.

    Raises:
      ValueError: on shapes or dtypes that do not fit.

    Gradient:
      None.

    References:
      Clip-Cov and KL-Cov (arXiv:2505.22617), equations 10 to 12, and the authors' code, in which the means are those
      of a micro-batch.

    Example:
      >>> settings = LossSettings(loss_type="kl_cov", kl_cov_ratio=0.5)
      >>> l, mask = jnp.array([[-0.1, -2.0], [-0.1, -2.0]]), jnp.ones((2, 2))
      >>> covariance_share(l, None, jnp.array([1.0, -1.0]), mask, settings).tolist()  # likely and good, or neither
      [[1.0, 0.0], [0.0, 1.0]]
    """
    log_probs = floating("log_probs", log_probs)
    mask = read_mask(log_probs, mask)
    l = sg(clean(log_probs, mask))
    A = sg(jnp.where(mask, row_or_token("advantages", advantages, l), 0))
    count = jnp.maximum(jnp.sum(mask), 1)
    totals = token_totals({"A": A, "l": l}, mask)
    c = (A - totals["A"] / count) * (l - totals["l"] / count)
    ratio = settings.clip_cov_ratio if settings.loss_type == "clip_cov" else settings.kl_cov_ratio
    chosen = jnp.maximum(jnp.floor(ratio * count * (1 + 1e-6)), 1)  # 0.0002 · 5000 is 1, however it is rounded
    if settings.loss_type == "clip_cov":
        old = l if old_log_probs is None else sg(clean(like_log_probs("old_log_probs", old_log_probs, l), mask))
        w = RATIOS[settings.importance_sampling_level](l, l - old, mask)
        low, high, capped = ppo_stops(w, A, settings)
        band = mask & ~(low | high | capped) & (c > settings.clip_cov_lb) & (c < settings.clip_cov_ub)
        return jnp.where(band, jnp.minimum(chosen / jnp.maximum(jnp.sum(band), 1), 1), 0)
    ordered = jnp.sort(jnp.where(mask, c, -jnp.inf), axis=None)[::-1]
    least = ordered[jnp.minimum(chosen.astype(int), ordered.size) - 1]
    above, ties = mask & (c > least), mask & (c == least)
    rest = (chosen - jnp.sum(above)) / jnp.maximum(jnp.sum(ties), 1)
    return jnp.where(above, 1, jnp.where(ties, rest, 0)).astype(l.dtype)


def read_share(
    cov_share: jax.Array | None, l: jax.Array, l_old: jax.Array, A: jax.Array, mask: jax.Array, settings: LossSettings
) -> jax.Array | None:
    """The part of a call in `covariance_share`, or that of its own tokens; None for the other loss types."""
    if settings.loss_type not in BY_COVARIANCE:
        return None
    if cov_share is None:
        return covariance_share(l, l_old, A, mask, settings)
    return jnp.where(mask, sg(like_log_probs("cov_share", cov_share, l)), 0)
