"""Token log-probs and entropies from logits."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from grpo_jax.maths.sampling import Sampling, process_logits


def token_log_probs(logits: jax.Array, tokens: jax.Array, *, temperature: float = 1.0) -> jax.Array:
    """Compute the log-prob of each token: log softmax(logits / temperature)[token].

    Args:
      logits: [..., V], any float dtype, converted to float32.
      tokens: [...] integer, token ids in 0..V-1.
      temperature: unitless divisor of the logits, > 0.

    Returns:
      [...] float32 ≤ 0, in nats.

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
        raise ValueError(f"tokens must be integers; got dtype {tokens.dtype}.")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0; got {temperature!r}. To score greedy completions, use 1.0.")
    return log_probs_of(process_logits(logits, Sampling(temperature)), tokens)


NORMALIZER = ("log_normalizer", "entropy")
"""Names of the two results of `reduce_logits` that its backward pass needs. A `jax.checkpoint` policy can save them."""


def reduce_logits(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log Z = log Σ_v exp(logits_v), the entropy of softmax(logits) and the token's logit, all [...] float32."""
    log_z, entropy, logit = _reduce_p.bind(logits, tokens)
    return checkpoint_name(log_z, NORMALIZER[0]), checkpoint_name(entropy, NORMALIZER[1]), logit


def _is_token(tokens: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return tokens[..., None] == jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def _in_passes(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the results of `reduce_logits` in several vectorized passes, which is faster on CPUs."""
    largest = logits.max(axis=-1)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    log_z = jnp.log(jnp.exp(logits - largest[..., None]).sum(axis=-1)) + largest
    log_p = logits - log_z[..., None]
    p, excluded = jnp.exp(log_p), jnp.isneginf(log_p)
    # 0 · log 0 = 0: an excluded token (−inf) contributes nothing. Without the outer `where`, XLA's CPU backend does not
    # vectorize the exponential, which makes it eight times slower.
    entropy = -jnp.where(excluded, p, p * jnp.where(excluded, p, log_p)).sum(axis=-1)
    return log_z, entropy, jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]


def _in_one_pass(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reduce logits l to m = max l, s = Σ exp(l − m), t = Σ exp(l − m)·(l − m), l_token. The entropy is log s − t/s."""

    def merge(x: Sequence[jax.Array], y: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        largest = jnp.maximum(x[0], y[0])
        parts = []
        for m, s, t, _ in (x, y):
            shift = jnp.where(m == -jnp.inf, 0.0, m - largest)
            parts.append((jnp.exp(shift) * s, jnp.exp(shift) * (t + shift * s)))
        return largest, parts[0][0] + parts[1][0], parts[0][1] + parts[1][1], x[3] + y[3]

    zeros = jnp.zeros_like(logits)
    chosen = jnp.where(_is_token(tokens, logits.shape), logits, zeros)
    values = logits, (logits != -jnp.inf).astype(logits.dtype), zeros, chosen
    initial = tuple(jnp.array(x, logits.dtype) for x in (-jnp.inf, 0, 0, 0))
    largest, total, weighted, logit = jax.lax.reduce(values, initial, merge, (logits.ndim - 1,))
    return jnp.log(total) + largest, jnp.log(total) - weighted / total, logit


def _jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, object]
) -> tuple[list[jax.Array], list[jax.Array]]:
    (logits, tokens), (tangent, _) = primals, tangents
    log_z, entropy, logit = reduce_logits(logits, tokens)
    log_p = logits - log_z[..., None]
    p = jnp.exp(log_p)
    # For excluded tokens (log_p = −inf), use p, which is 0: XLA would materialize a constant 0 with shape [..., V].
    centered = jnp.where(jnp.isneginf(log_p), p, log_p) + entropy[..., None]
    mask = _is_token(tokens, logits.shape)
    # Multiply by a mask, since XLA fuses this product with the rest of the gradient. The gradient of a gather, or the
    # zeros of a `where`, would be stored as a separate array as large as the logits.
    sums = (p * tangent).sum(axis=-1), -(p * centered * tangent).sum(axis=-1), (mask.astype(p.dtype) * tangent).sum(-1)
    return [log_z, entropy, logit], list(sums)


def _batched(xs: Sequence[jax.Array], axes: Sequence[int | None]) -> tuple[list[jax.Array], list[int]]:
    size = next(x.shape[axis] for x, axis in zip(xs, axes, strict=True) if axis is not None)
    logits, tokens = (batching.bdim_at_front(x, axis, size) for x, axis in zip(xs, axes, strict=True))
    return _reduce_p.bind(logits, tokens), [0, 0, 0]


# This is a primitive because JAX drops the rule of a `custom_jvp` function in a loop when differentiating a gradient.
_reduce_p = Primitive("reduce_logits")
_reduce_p.multiple_results = True
_reduce_p.def_impl(jax.jit(reduce_logits))
_reduce_p.def_abstract_eval(lambda logits, tokens: [ShapedArray(tokens.shape, logits.dtype)] * 3)
ad.primitive_jvps[_reduce_p] = _jvp
batching.primitive_batchers[_reduce_p] = _batched
mlir.register_lowering(_reduce_p, mlir.lower_fun(_in_one_pass, multiple_results=True))
mlir.register_lowering(_reduce_p, mlir.lower_fun(_in_passes, multiple_results=True), platform="cpu")


def log_probs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probs [...] of tokens [...] under softmax(logits [..., V])."""
    return log_probs_and_entropy(logits, tokens)[0]


def log_probs_and_entropy(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the log-probs [...] of tokens [...] and the entropies [...] of softmax(logits [..., V]), in nats."""
    log_z, entropy, logit = reduce_logits(logits, tokens)
    return logit - log_z, entropy
