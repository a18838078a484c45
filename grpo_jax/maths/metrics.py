"""Metrics of the objective as sums that merge exactly over the parts of a batch, and the entropy's bookkeeping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.maths.checks import Scalar, sg


class MetricSums(NamedTuple):
    """Metrics of a part of a batch in a form that merges exactly: `sums` add up, of `maxes` the largest counts."""

    sums: dict[str, jax.Array]
    maxes: dict[str, jax.Array]


def token_totals(metrics: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    """Σ m·x over all tokens for each metric [..., T], without gradient.

    The tokens of a row are added pair by pair: a CPU may add number after number, which in float32 costs a sum of
    thousands its last digits. (Two sums in a row would not help, XLA makes one of them; and a barrier between them lets
    the devices of a mesh wait for one another for ever, on CPUs.)
    """
    values = jnp.where(mask[None], sg(jnp.stack(list(metrics.values()))), 0)
    while (length := values.shape[-1]) > 1:
        half = length // 2
        pairs = values[..., :half] + values[..., half : 2 * half]
        values = jnp.concatenate([pairs, values[..., 2 * half :]], axis=-1) if length % 2 else pairs
    return dict(zip(metrics, values.sum(axis=tuple(range(1, values.ndim))), strict=True))


def top_entropy_threshold(entropies: jax.Array, mask: jax.Array, quantile: Scalar) -> jax.Array:
    """The linear (1 − quantile)-quantile of the entropies where `mask` is True, []."""
    largest = jnp.finfo(entropies.dtype).max
    ordered = jnp.sort(jnp.where(mask, entropies, largest), axis=None)
    last = jnp.maximum(jnp.sum(mask), 1) - 1
    position = (1 - quantile) * last
    below = jnp.floor(position).astype(int)
    above = jnp.minimum(below + 1, last)
    # Rounding must not lift it above the value that it ends at, or no token would reach it.
    return sg(jnp.minimum(ordered[below] + (position - below) * (ordered[above] - ordered[below]), ordered[above]))


def top_entropy_mask(entropies: jax.Array, mask: jax.Array, quantile: Scalar) -> jax.Array:
    """The tokens of `mask` whose entropy is at least the linear (1 − quantile)-quantile, [..., T] bool.

    It is made once for a whole minibatch and handed on (`selected`). Tokens in the same state share their entropy, and
    two programs that compute it may differ in the last bit: selecting in one of them by a threshold from the other can
    drop all of these tokens.
    """
    return mask & (entropies >= top_entropy_threshold(entropies, mask, quantile))


def update_entropy_coef(
    coef: Scalar, entropy: Scalar, *, target: float, delta: float, minimum: float = 0.0, maximum: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Moves the adaptive entropy coefficient by one step, once an optimizer step.

        coef ← clip(coef + delta, minimum, maximum)   if entropy ≤ target,   else clip(coef − delta, minimum, maximum)
        applied = coef if entropy ≤ target, else 0

    Args:
      coef: [] float, the coefficient so far (`entropy_coef` of the config at the start).
      entropy: [] float, nats; the metric `selected_entropy` of the minibatch just done.
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


def batch_totals(mask: jax.Array, selected: jax.Array | None = None) -> dict[str, jax.Array]:
    """Counts a whole minibatch, for calls of `grpo_loss` that see a part of it: `grpo_loss(..., **totals)`.

    Args:
      mask: [..., T], of the whole batch.
      selected: [..., T], the `top_entropy_mask` of the whole batch where top_entropy_quantile < 1, of which each call
        is given its part.

    Returns:
      `num_rows` and `num_tokens`; with `selected` also `num_selected_tokens`.
    """
    mask = jnp.asarray(mask) != 0
    totals = {"num_rows": jnp.asarray(math.prod(mask.shape[:-1])), "num_tokens": jnp.sum(mask)}
    if selected is not None:
        totals["num_selected_tokens"] = jnp.sum(mask & (jnp.asarray(selected) != 0))
    return totals


def merge_metrics(first: MetricSums, second: MetricSums) -> MetricSums:
    """The metrics of two parts of a batch as those of both together: sums add, maxes take the larger."""
    return MetricSums(
        sums=jax.tree.map(jnp.add, first.sums, second.sums), maxes=jax.tree.map(jnp.maximum, first.maxes, second.maxes)
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
