"""Token log-probs and entropies from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.maths.sampling import Sampling, process_logits


def token_log_probs(logits: jax.Array, tokens: jax.Array, *, temperature: float = 1.0) -> jax.Array:
    """Compute the log-prob of each token: log softmax(logits / temperature)[token].

    Args:
      logits: [..., V], any float dtype. The computation uses float32.
      tokens: [...] integer, token ids in 0..V-1.
      temperature: unitless divisor of the logits, > 0.

    Returns:
      [...] float32, nats ≤ 0.

    Raises:
      ValueError: if the shapes do not match, `tokens` are not integers, or `temperature` is not positive.

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
    """Return logits[..., token].

    The gradient is a mask, which XLA fuses into the rest of the logits' gradient. A gather's gradient would be a
    separate array as large as the logits.
    """
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]


@_logit_of.defjvp
def _logit_of_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, object]
) -> tuple[jax.Array, jax.Array]:
    logits, tokens = primals
    here = tokens[..., None] == jax.lax.broadcasted_iota(tokens.dtype, logits.shape, logits.ndim - 1)
    # Multiply instead of using `where`: XLA would store its zeros as an array as large as the logits.
    return _logit_of(logits, tokens), (here.astype(logits.dtype) * tangents[0]).sum(axis=-1)


NORMALIZER = ("logits_max", "logits_sum")
"""Names of the intermediate values in `log_sum_exp`. Saving them with `jax.checkpoint` avoids two passes over V."""


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """Return `jax.nn.logsumexp` over the last axis. Checkpoint policies can save its maximum and sum (`NORMALIZER`)."""
    largest = jax.lax.stop_gradient(logits.max(axis=-1))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    largest = checkpoint_name(largest, NORMALIZER[0])
    total = checkpoint_name(jnp.exp(logits - largest[..., None]).sum(axis=-1), NORMALIZER[1])
    log_z: jax.Array = jnp.log(total) + largest
    return log_z


def log_probs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Compute the log-probs [...] of tokens [...] under softmax(logits [..., V])."""
    return _logit_of(logits, tokens) - log_sum_exp(logits)


def log_probs_and_entropy(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute log-probs [...] of tokens [...] under softmax(logits [..., V]), and its entropies [...], in nats."""
    log_z = log_sum_exp(logits)[..., None]
    log_p = logits - log_z
    p, excluded = jnp.exp(log_p), jnp.isneginf(log_p)
    # With 0 · log 0 = 0, an excluded token (−inf) contributes nothing, and its gradient is not NaN. The zero comes from
    # p, since XLA would store a constant as an array as large as the logits. Without the outer `where`, XLA's CPU
    # backend does not vectorize the exponential, which makes it eight times slower.
    plogp = jnp.where(excluded, p, p * jnp.where(excluded, p, log_p))
    return _logit_of(logits, tokens) - log_z[..., 0], -plogp.sum(axis=-1)
