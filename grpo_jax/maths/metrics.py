"""Loss metrics as sums that can be added over the parts of a batch, and entropy-based token selection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import Scalar, sg


class MetricSums(NamedTuple):
    """Metrics for one part of a batch. To merge parts, add their `sums` and take the maximum of their `maxes`."""

    sums: dict[str, jax.Array]
    maxes: dict[str, jax.Array]


def token_totals(metrics: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    """Return the sum of each metric [..., T] over the tokens where `mask` is True, without gradient.

    The tokens in a row are added pairwise, since a sequential float32 sum of thousands of values loses its last digits
    on CPU. Summing in two stages does not help: XLA merges both stages, and an optimization barrier between them
    deadlocks a mesh of CPU devices.
    """
    values = jnp.where(mask[None], sg(jnp.stack(list(metrics.values()))), 0)
    while (length := values.shape[-1]) > 1:
        half = length // 2
        pairs = values[..., :half] + values[..., half : 2 * half]
        values = jnp.concatenate([pairs, values[..., 2 * half :]], axis=-1) if length % 2 else pairs
    return dict(zip(metrics, values.sum(axis=tuple(range(1, values.ndim))), strict=True))


def top_entropy_threshold(entropies: jax.Array, mask: jax.Array, quantile: Scalar) -> jax.Array:
    """Return the linearly interpolated (1 − quantile)-quantile of the entropies where `mask` is True, as a scalar."""
    largest = jnp.finfo(entropies.dtype).max
    ordered = jnp.sort(jnp.where(mask, entropies, largest), axis=None)
    last = jnp.maximum(jnp.sum(mask), 1) - 1
    position = (1 - quantile) * last
    below = jnp.floor(position).astype(int)
    above = jnp.minimum(below + 1, last)
    # Without this bound, rounding could put the threshold above the upper value and exclude all tokens.
    return sg(jnp.minimum(ordered[below] + (position - below) * (ordered[above] - ordered[below]), ordered[above]))


def top_entropy_mask(entropies: jax.Array, mask: jax.Array, quantile: Scalar) -> jax.Array:
    """Return a mask [..., T] that selects tokens with an entropy of at least the (1 − quantile)-quantile.

    Compute this mask once per minibatch and pass it as `selected`. Two programs may compute entropies that differ in
    the last bit, so a threshold from a different program could exclude every token if all entropies are equal.
    """
    return mask & (entropies >= top_entropy_threshold(entropies, mask, quantile))


def update_entropy_coef(
    coef: Scalar, entropy: Scalar, *, target: float, delta: float, minimum: float = 0.0, maximum: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Update the adaptive entropy coefficient after an optimizer step.

        coef ← clip(coef + delta, minimum, maximum)   if entropy ≤ target,   else clip(coef − delta, minimum, maximum)
        applied = coef if entropy ≤ target, else 0

    Args:
      coef: [] float, current coefficient; initially the config's `entropy_coef`.
      entropy: [] float, the metric `selected_entropy` of the last minibatch, in nats.
      target: entropy in nats at or below which the bonus is applied.
      delta: amount > 0 by which the coefficient changes per step.
      minimum: lower bound on the coefficient.
      maximum: upper bound on the coefficient.

    Returns:
      The new coefficient and `applied`, the `entropy_coef` for the next step, both [] float32 without gradient. The
      first step uses 0, since no entropy is available yet.

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
    """Count the rows and tokens in a whole minibatch, to pass to `grpo_loss_terms` with each part of the minibatch.

    Returns `num_rows` and `num_tokens`, and also `num_selected_tokens` if `selected` (the minibatch's
    `top_entropy_mask`) is given. Both masks are [..., T].
    """
    mask = jnp.asarray(mask) != 0
    totals = {"num_rows": jnp.asarray(math.prod(mask.shape[:-1])), "num_tokens": jnp.sum(mask)}
    if selected is not None:
        totals["num_selected_tokens"] = jnp.sum(mask & (jnp.asarray(selected) != 0))
    return totals


def merge_metrics(first: MetricSums, second: MetricSums) -> MetricSums:
    """Merge the metrics for two parts of a batch."""
    return MetricSums(
        sums=jax.tree.map(jnp.add, first.sums, second.sums), maxes=jax.tree.map(jnp.maximum, first.maxes, second.maxes)
    )


def empty_sums(like: MetricSums) -> MetricSums:
    """Return the metrics of an empty part of a batch, with the shapes and dtypes of `like`, which may be abstract."""
    return MetricSums(
        sums=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.sums),
        maxes=jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), like.maxes),
    )


def finalize_metrics(metrics: MetricSums) -> dict[str, jax.Array]:
    """Convert sums to metrics. Each `x_sum` becomes `x`, the mean over tokens (`selected_entropy`: selected tokens)."""
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
