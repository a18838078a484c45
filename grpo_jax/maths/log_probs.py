"""Log-probs and entropies of tokens, given their logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.maths.sampling import Sampling, process_logits


def token_log_probs(logits: jax.Array, tokens: jax.Array, *, temperature: float = 1.0) -> jax.Array:
    """Compute the log-prob of each token, log softmax(logits / temperature)[token].

    Args:
      logits: [..., V], any float dtype; computed in float32.
      tokens: [...] integer, in 0..V-1.
      temperature: > 0, unitless.

    Returns:
      [...] float32, ≤ 0.

    Raises:
      ValueError: shapes that do not match, tokens that are not integers, a temperature that is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> round(float(token_log_probs(jnp.array([0.0, jnp.log(3.0)]), jnp.array(1))), 4)
      -0.2877
    """
    if logits.ndim < 1 or logits.shape[:-1] != tokens.shape:
        raise ValueError(f"logits must be [..., V] for tokens [...]; got {logits.shape} and {tokens.shape}.")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers; got {tokens.dtype}.")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0; got {temperature!r} (greedy decoding has no log-probs).")
    return log_probs_of(process_logits(logits, Sampling(temperature)), tokens)


@jax.custom_jvp
def _logit_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return logits[..., token]. The gradient is a mask, which XLA fuses with the rest of the logits' gradient; the
    gradient of a gather would be a separate array as large as the logits."""
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]


@_logit_of.defjvp
def _logit_of_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, object]
) -> tuple[jax.Array, jax.Array]:
    logits, tokens = primals
    here = tokens[..., None] == jax.lax.broadcasted_iota(tokens.dtype, logits.shape, logits.ndim - 1)
    # A product, since XLA would store the zeros of a `where` as an array as large as the logits.
    return _logit_of(logits, tokens), (here.astype(logits.dtype) * tangents[0]).sum(axis=-1)


NORMALIZER = ("logits_max", "logits_sum")
"""Names of intermediate values of `log_sum_exp`. A `jax.checkpoint` that saves them avoids two passes over V."""


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """Return `jax.nn.logsumexp` over the last axis; checkpoint policies can save its maximum and its sum by name."""
    largest = jax.lax.stop_gradient(logits.max(axis=-1))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    largest = checkpoint_name(largest, NORMALIZER[0])
    total = checkpoint_name(jnp.exp(logits - largest[..., None]).sum(axis=-1), NORMALIZER[1])
    log_z: jax.Array = jnp.log(total) + largest
    return log_z


def log_probs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probs [...] of tokens [...] under softmax(logits [..., V])."""
    return _logit_of(logits, tokens) - log_sum_exp(logits)


def log_probs_and_entropy(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `log_probs_of` and the entropies [...] of the distributions in nats."""
    log_z = log_sum_exp(logits)[..., None]
    log_p = logits - log_z
    p, excluded = jnp.exp(log_p), jnp.isneginf(log_p)
    # 0 · log 0 = 0: an excluded token (−inf) adds nothing, and no NaN reaches its gradient. Zero is taken from p, since
    # a constant would be an array as large as the logits. Without the outer `where`, XLA's CPU backend does not
    # vectorize the exponential: eight times slower.
    plogp = jnp.where(excluded, p, p * jnp.where(excluded, p, log_p))
    return _logit_of(logits, tokens) - log_z[..., 0], -plogp.sum(axis=-1)
