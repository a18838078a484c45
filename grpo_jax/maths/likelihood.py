"""The loss of supervised fine-tuning (SFT): the log-probs of tokens that are given."""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import Scalar, choose, clean, floating, read_mask, sg
from grpo_jax.maths.metrics import MetricSums, token_totals


def likelihood_loss(
    log_probs: jax.Array, mask: jax.Array, *, loss_type: str = "nll", num_tokens: Scalar | None = None
) -> jax.Array:
    """The negative log-likelihood of given tokens, as SFT minimises it.

        nll:  Σ m · (−l) / max(Σ m, 1)
        dft:  Σ m · (−sg(p) · l) / max(Σ m, 1),   p = exp(l)

    The gradient of "nll" is that of `grpo_loss(..., loss_type="bnpo")` where every advantage is 1, the ratio is 1 and
    beta is 0.

    Args:
      log_probs: [..., T] float, l.
      mask: [..., T], m: 1 on the tokens that are learned.
      loss_type: "nll" or "dft".
      num_tokens: [], Σ m of the whole minibatch where this is a part of it: the parts' losses add up then.

    Returns:
      [] float32, nats per token.

    Raises:
      ValueError: another `loss_type`.

    References:
      Dynamic Fine-Tuning (arXiv:2508.05629), equation 9; TRL's `SFTTrainer.compute_loss`.

    Example:
      >>> float(likelihood_loss(jnp.array([[-1.0, -3.0, -9.0]]), jnp.array([[1, 1, 0]])))
      2.0
    """
    choose("loss_type", loss_type, ("nll", "dft"))
    log_probs = floating("log_probs", log_probs)
    mask = read_mask(log_probs, mask)
    l = clean(log_probs, mask)
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
    """`likelihood_loss` of a part of a minibatch, with metrics in a form that merges exactly.

    Args:
      log_probs: [..., T] float.
      entropies: [..., T] float, nats; a metric alone.
      likeliest: [..., T] float, 1 where the token is the likeliest one; a metric alone.
      mask: [..., T] bool.
      loss_type: as in `likelihood_loss`.
      num_tokens: [], learned tokens of the whole minibatch.

    Returns:
      ([] float32 loss, `MetricSums` of `loss`, `entropy`, `mean_token_accuracy`, `tokens` and `rows`).
    """
    chex.assert_equal_shape([log_probs, entropies, likeliest, mask])
    loss = likelihood_loss(log_probs, mask, loss_type=loss_type, num_tokens=num_tokens)
    totals = token_totals({"entropy": clean(entropies, mask), "mean_token_accuracy": clean(likeliest, mask)}, mask)
    sums = {"loss": loss, "tokens": mask.sum(), "rows": jnp.asarray(math.prod(mask.shape[:-1]))}
    sums |= {f"{name}_sum": total for name, total in totals.items()}
    return loss, MetricSums(sums={name: sg(x.astype(loss.dtype)) for name, x in sums.items()}, maxes={})
