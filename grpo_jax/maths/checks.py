"""Argument checks for the pure functions, and bounds on log-probs and log-ratios."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from grpo_jax.messages import nearest

MAX_LOG_RATIO = 20.0
"""Largest exponent when a log-ratio is exponentiated: e²⁰ ≈ 4.9e8. e⁸⁹ would overflow float32, and the squared gradient
entries in global-norm clipping would overflow much earlier."""

MIN_LOG_PROB = -1e4
"""Lower bound on log-probs. It replaces −inf (an excluded token), so that differences of log-probs are finite."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def ste_clip(x: jax.Array, low: float, high: float) -> jax.Array:
    """Return clip(x, low, high) with a straight-through gradient: the derivative is 1 even out of bounds."""
    return jnp.clip(x, low, high)


@ste_clip.defjvp
def _ste_clip_jvp(
    low: float, high: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return ste_clip(primals[0], low, high), tangents[0]


def one_of(argument: str, value: str, known: Iterable[str]) -> str:
    """Return `value` if it is in `known`; otherwise raise a ValueError that lists `known`."""
    known = list(known)
    if value in known:
        return value
    close = nearest(value, known)
    hint = f" Did you mean {close!r}?" if close else ""
    raise ValueError(f"{argument}={value!r} is not supported; use one of {', '.join(map(repr, known))}.{hint}")


def as_float(argument: str, value: jax.Array) -> jax.Array:
    """Convert a floating-point array to float32, or keep it in float64. Raises ValueError for non-floating dtypes."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"{argument} has dtype {value.dtype}; expected a floating-point dtype.")
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))


sg = jax.lax.stop_gradient

Scalar = float | jax.Array


def cast_like(name: str, value: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Cast `value` to the dtype of `log_probs`. Raises ValueError if the shapes differ."""
    value = as_float(name, value)
    if value.shape != log_probs.shape:
        raise ValueError(f"{name} has shape {value.shape}; expected {log_probs.shape}, the shape of log_probs.")
    return value.astype(log_probs.dtype)


def with_token_axis(name: str, value: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Return `value` without gradient, as [..., 1] if it has one entry per row, or [..., T] if one per token."""
    value = as_float(name, value)
    rows = log_probs.shape[:-1]
    if value.shape == rows:
        value = value[..., None]
    elif value.shape not in (log_probs.shape, (*rows, 1)):
        raise ValueError(f"{name} has shape {value.shape}; expected {rows} (per row) or {log_probs.shape} (per token).")
    return sg(value).astype(log_probs.dtype)


def as_mask(log_probs: jax.Array, mask: jax.Array, name: str = "mask") -> jax.Array:
    """Convert the mask to bool. Raises ValueError if the shapes differ or `log_probs` is a scalar."""
    if log_probs.ndim == 0:
        raise ValueError("log_probs has shape (); expected [..., T], with the completion tokens on the last axis.")
    mask = jnp.asarray(mask) != 0
    if mask.shape != log_probs.shape:
        raise ValueError(f"{name} has shape {mask.shape}; expected {log_probs.shape}, the shape of log_probs.")
    return mask


def bound_log_probs(log_probs: jax.Array, mask: jax.Array) -> jax.Array:
    """Set log-probs to 0 where the mask is False; clip the others to ≥ `MIN_LOG_PROB` (straight-through gradient).

    Call this before any other use of the log-probs, because masking a NaN later leaves 0·NaN in the gradient.
    """
    return ste_clip(jnp.where(mask, log_probs, 0), MIN_LOG_PROB, jnp.inf)


def is_static_zero(coefficient: Scalar) -> bool:
    """Return whether the coefficient is the Python number 0, in which case its term can be omitted. False if traced."""
    return isinstance(coefficient, int | float) and coefficient == 0
