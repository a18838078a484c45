"""Metrics of the objective as sums that merge exactly over the parts of a batch; selection of tokens by entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import Scalar, sg


class MetricSums(NamedTuple):
    """Metrics of a part of a batch; parts merge by the sum of `sums` and the maximum of `maxes`."""

    sums: dict[str, jax.Array]
    maxes: dict[str, jax.Array]


def token_totals(metrics: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    """Return Σ m·x over all tokens for each metric [..., T], without gradient.

    The tokens of a row are added in pairs, since a sequential float32 sum of thousands loses its last digits on a CPU.
    XLA would merge two sums in a row into one, and a barrier between them deadlocks the devices of a mesh on CPUs.
    """
    values = jnp.where(mask[None], sg(jnp.stack(list(metrics.values()))), 0)
    while (length := values.shape[-1]) > 1:
        half = length // 2
        pairs = values[..., :half] + values[..., half : 2 * half]
        values = jnp.concatenate([pairs, values[..., 2 * half :]], axis=-1) if length % 2 else pairs
    return dict(zip(metrics, values.sum(axis=tuple(range(1, values.ndim))), strict=True))


def top_entropy_threshold(entropies: jax.Array, mask: jax.Array, quantile: Scalar) -> jax.Array:
    """Return the linear (1 − quantile)-quantile of the entropies where `mask` is True, []."""
    largest = jnp.finfo(entropies.dtype).max
    ordered = jnp.sort(jnp.where(mask, entropies, largest), axis=None)
    last = jnp.maximum(jnp.sum(mask), 1) - 1
    position = (1 - quantile) * last
    below = jnp.floor(position).astype(int)
    above = jnp.minimum(below + 1, last)
    # Bounded by the upper value: rounded above it, the threshold would exclude all tokens.
    return sg(jnp.minimum(ordered[below] + (position - below) * (ordered[above] - ordered[below]), ordered[above]))


def top_entropy_mask(entropies: jax.Array, mask: jax.Array, quantile: Scalar) -> jax.Array:
    """Return the tokens of `mask` whose entropy is at least the linear (1 − quantile)-quantile, [..., T] bool.

    Compute the mask once per minibatch and pass it on as `selected`. Two programs may differ in the last bit of an
    entropy that many tokens share, so a threshold from the other program could drop all of these tokens.
    """
    return mask & (entropies >= top_entropy_threshold(entropies, mask, quantile))


def update_entropy_coef(
    coef: Scalar, entropy: Scalar, *, target: float, delta: float, minimum: float = 0.0, maximum: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Update the adaptive entropy coefficient after an optimizer step.

        coef ← clip(coef + delta, minimum, maximum)   if entropy ≤ target,   else clip(coef − delta, minimum, maximum)
        applied = coef if entropy ≤ target, else 0

    Args:
      coef: [] float, the current coefficient; the config's `entropy_coef` at the start.
      entropy: [] float, nats; the metric `selected_entropy` of the last minibatch.
      target: nats; the bonus acts at and below it.
      delta: > 0, step of the coefficient.
      minimum: lower bound of the coefficient.
      maximum: upper bound of the coefficient.

    Returns:
      The new coefficient and `applied`, the `entropy_coef` of the next step, both [] float32 without gradient. In the
      first step, before any entropy is measured, `entropy_coef` is 0.

    References:
      Skywork-OR1 (arXiv:2505.22312), section 4; TRL's `use_adaptive_entropy`.

    Example:
      >>> [round(float(x), 3) for x in update_entropy_coef(0.01, 0.3, target=0.2, delta=0.005)]
      [0.005, 0.0]
    """
    low = entropy <= target
    coef = jnp.clip(coef + jnp.where(low, delta, -delta), minimum, maximum)
    return sg(coef), sg(jnp.where(low, coef, 0))


def batch_totals(mask: jax.Array, selected: jax.Array | None = None) -> dict[str, jax.Array]:
    """Return the counts of a whole minibatch, for calls of `grpo_loss_terms` with a part of it.

    They are `num_rows`, `num_tokens`, and with `selected`, the `top_entropy_mask` of the minibatch,
    `num_selected_tokens`. Both masks are [..., T].
    """
    mask = jnp.asarray(mask) != 0
    totals = {"num_rows": jnp.asarray(math.prod(mask.shape[:-1])), "num_tokens": jnp.sum(mask)}
    if selected is not None:
        totals["num_selected_tokens"] = jnp.sum(mask & (jnp.asarray(selected) != 0))
    return totals


def merge_metrics(first: MetricSums, second: MetricSums) -> MetricSums:
    """Return the metrics of two parts of a batch together."""
    return MetricSums(
        sums=jax.tree.map(jnp.add, first.sums, second.sums), maxes=jax.tree.map(jnp.maximum, first.maxes, second.maxes)
    )


def finalize_metrics(metrics: MetricSums) -> dict[str, jax.Array]:
    """Return the metrics of merged sums: `x_sum` becomes `x`, the mean over masked-in tokens; the rest is unchanged."""
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
