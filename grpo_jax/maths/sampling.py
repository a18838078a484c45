"""The distribution that tokens are sampled from, and exact sampling from it with the inverse CDF.

Gumbel sampling needs a random number for each vocabulary entry and would be the most expensive part of a decode step on
CPU. The inverse CDF needs only two numbers per token. The first selects a block of the vocabulary with probability
proportional to the block's mass. The second selects a token in the block. Each number has a resolution of 2^-23, so
even rare tokens are drawn with accurate probabilities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Sampling(NamedTuple):
    """Settings for the sampling distribution, hashable for use as a static argument."""

    temperature: float = 1.0  # unitless; 0 selects greedy decoding, with log-probs at temperature 1
    top_k: int = 0  # number of tokens to keep; 0 keeps all
    top_p: float = 1.0  # probability mass to keep, in (0, 1]
    min_p: float | None = None  # minimum probability relative to the largest, in [0, 1]; None keeps all


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError if a setting is out of range."""
    temperature, top_k, top_p, min_p = sampling
    if not temperature >= 0 or math.isinf(temperature):
        raise ValueError(f"temperature must be a finite number ≥ 0 (0 is greedy); got {temperature!r}.")
    if top_k < 0 or int(top_k) != top_k:
        raise ValueError(f"top_k must be an integer ≥ 0 (0 keeps all tokens); got {top_k!r}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1] (1 keeps all tokens); got {top_p!r}.")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be None or in [0, 1]; got {min_p!r}.")


def process_logits(logits: jax.Array, sampling: Sampling, *, keep: jax.Array | None = None) -> jax.Array:
    """Compute the logits [..., V] float32 for the sampling distribution.

    As in transformers, these steps are applied in order, each to the result of the previous step: divide by the
    temperature, unless it is 0; keep the `top_k` largest logits; keep the most likely tokens until their total mass
    reaches `top_p`; keep tokens at least `min_p` times as likely as the most likely token. All other tokens get −inf.
    Tokens tied with the last kept token are also kept. The token ids in `keep`, [...], are never removed, so that a
    sampled token's log-prob remains finite when the params change.
    """
    check_sampling(sampling)
    temperature, top_k, top_p, min_p = sampling
    logits = logits.astype(jnp.float32)
    if temperature not in (0, 1):
        logits = logits / temperature
    if not (top_k or top_p < 1 or min_p):
        return logits
    full = logits
    if 0 < top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, int(top_k))[0][..., -1:]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        # Compare the mass before each token, so that the first token is always kept.
        kept = jnp.cumsum(probs, axis=-1) - probs < top_p
        smallest = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if min_p:
        logits = jnp.where(logits >= logits.max(axis=-1, keepdims=True) + math.log(min_p), logits, -jnp.inf)
    if keep is not None:
        kept = jnp.arange(logits.shape[-1]).reshape((1,) * keep.ndim + (-1,)) == keep[..., None]
        logits = jnp.where(kept, full, logits)
    return logits


def uniforms(keys: jax.Array) -> jax.Array:
    """Draw two uniform random numbers [..., 2] float32 in [0, 1) from each typed key [...]."""
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys.reshape(-1)).reshape((*keys.shape, 2))


def _inverse_cdf(u: jax.Array, weights: jax.Array, axis: int) -> jax.Array:
    """Return the first index along `axis` where the cumulative sum of weights exceeds u · total, for u in [0, 1).

    Rounding never selects an entry with weight 0, unless all weights are 0.
    """
    cumulative = jnp.where(weights > 0, jnp.cumsum(weights, axis=axis), 0)
    total = cumulative.max(axis=axis)
    target = jnp.minimum(u * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.argmax(cumulative > jnp.expand_dims(target, axis), axis=axis)


def vocabulary_blocks(size: int) -> tuple[int, int]:
    """Return the number and the width of vocabulary blocks for sampling.

    The width is the smallest power of two ≥ √size. If this width would require padding and the size is a multiple of
    32, the number of blocks is instead the largest power of two that divides the size, up to 512, so that a vocabulary
    can be sharded in whole blocks. The blocks affect which token a random number selects, and depend only on the size.

    Example:
      >>> vocabulary_blocks(8192), vocabulary_blocks(151936), vocabulary_blocks(33)
      ((64, 128), (128, 1187), (5, 8))
    """
    width = 1 << max(0, math.ceil(math.log2(max(size, 1)) / 2))
    power = size & -size
    if size % width and power >= 32:
        width = size // min(power, 512)
    return -(-size // width), width


def draw_tokens(
    u: jax.Array, logits: jax.Array, *, axis: int = -1, all_gather: Callable[[jax.Array], jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draw a token from softmax(logits) for each row. u [..., 2] selects a vocabulary block and then a token in it.

    Returns tokens [...] int32 and their log-probs [...] float32. Tokens with logit −inf are never drawn. u contains
    uniform numbers in [0, 1), and `axis` is the vocabulary axis. If it is sharded, pass `all_gather`, a function that
    replicates an array. Blocks are then selected with a masked sum, since indexing would gather all logits.
    """
    axis %= logits.ndim
    leading, vocab, trailing = logits.shape[:axis], logits.shape[axis], logits.shape[axis + 1 :]
    chex.assert_shape(u, (*leading, *trailing, 2))
    blocks, width = vocabulary_blocks(vocab)
    padding = [(0, blocks * width - vocab if i == axis else 0) for i in range(logits.ndim)]
    parts = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*leading, blocks, width, *trailing)
    in_passes, in_one_pass = (functools.partial(x, axis=axis + 1) for x in (_masses_in_passes, _masses_in_one_pass))
    top, masses = jax.lax.platform_dependent(parts, cpu=in_passes, default=in_one_pass)
    masses = masses if all_gather is None else all_gather(masses)
    block = jnp.expand_dims(_inverse_cdf(u[..., 0], masses, axis), (axis, axis + 1))
    if all_gather is None:
        block_logits = jnp.take_along_axis(parts, block, axis=axis).squeeze(axis)
    else:
        index = jax.lax.broadcasted_iota(jnp.int32, parts.shape, axis)
        block_logits = all_gather(jnp.where(index == block, parts, 0).sum(axis=axis))
    index_in_block = _inverse_cdf(u[..., 1], jnp.exp(block_logits - top), axis)
    drawn = jnp.take_along_axis(block_logits, jnp.expand_dims(index_in_block, axis), axis=axis)
    tokens = block.squeeze((axis, axis + 1)) * width + index_in_block
    return tokens.astype(jnp.int32), (drawn - top).squeeze(axis) - jnp.log(masses.sum(axis=axis))


def _masses_in_passes(parts: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Compute each row's largest logit, then each block's Σ exp(logit − largest). CPUs vectorize both passes."""
    top = parts.max(axis=(axis - 1, axis), keepdims=True)
    return top.squeeze(axis), jnp.exp(parts - top).sum(axis=axis)


def _masses_in_one_pass(parts: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Compute the results of `_masses_in_passes` with one reduction, so that accelerators read the logits only once."""

    def merge(x: Sequence[jax.Array], y: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        largest = jnp.maximum(x[0], y[0])
        x_sum, y_sum = (s * jnp.exp(jnp.where(m == -jnp.inf, 0.0, m - largest)) for m, s in (x, y))
        return largest, x_sum + y_sum

    values = parts, (parts != -jnp.inf).astype(parts.dtype)
    initial = jnp.array(-jnp.inf, parts.dtype), jnp.array(0, parts.dtype)
    largest, total = jax.lax.reduce(values, initial, merge, (axis,))
    top = largest.max(axis=axis - 1, keepdims=True)
    return top, total * jnp.exp(largest - top)


def greedy_tokens(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the most likely token of each row, [...] int32, and its log-prob, [...] float32."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return tokens, jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1)


def sample_tokens(
    key: jax.Array,
    logits: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample one token for each row of logits, and return it with its log-prob.

    token ~ softmax(process_logits(logits)), log-prob = log softmax(process_logits(logits))[token].

    Args:
      key: single PRNG key, or keys [...], one per row of logits.
      logits: [..., V], any float dtype. Tokens with logit −inf are never drawn. Each row needs a finite entry.
      temperature: divisor ≥ 0 of the logits; 0 selects the most likely token, with its log-prob at temperature 1.
      top_k: as in `Sampling`.
      top_p: as in `Sampling`.
      min_p: as in `Sampling`.

    Returns:
      The tokens, [...] int32, and their log-probs, [...] float32 in nats.

    Raises:
      ValueError: if the vocabulary axis is missing or empty, the keys' shape is wrong, or a setting is out of range.

    Example:
      >>> import jax
      >>> tokens, log_probs = sample_tokens(jax.random.key(0), jax.numpy.zeros((3, 4)))
      >>> tokens.shape, [round(x, 4) for x in log_probs.tolist()]
      ((3,), [-1.3863, -1.3863, -1.3863])
    """
    if logits.ndim < 1 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [..., V] with V ≥ 1; got shape {logits.shape}.")
    processed = process_logits(logits, Sampling(temperature, top_k, top_p, min_p))
    if temperature == 0:
        return greedy_tokens(processed)
    rows = logits.shape[:-1]
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)  # raw keys, uint32 [..., 2]
    if key.shape == ():
        return draw_tokens(jax.random.uniform(key, (*rows, 2)), processed)
    if key.shape != rows:
        raise ValueError(f"key must be a single key or have shape {rows}; got shape {key.shape}.")
    return draw_tokens(uniforms(key), processed)
