"""Logits to tokens: the processed distribution, and an exact draw from it by the inverse of its cumulative sum.

A Gumbel draw needs one random number for each entry of the vocabulary and is the dearest part of a decode step on a
CPU. The inverse CDF needs two for each draw: one picks a block of the vocabulary by the blocks' masses, the other picks
a token inside the block. Two levels keep it exact for rare tokens (each level resolves 2^-23) and cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Sampling(NamedTuple):
    """The settings of the distribution that tokens are drawn from; hashable, so a static argument of programs.

    Attributes:
      temperature: > 0, unitless. 0 stands for greedy decoding, whose log-probs are those at temperature 1.
      top_k: tokens to keep, 0 for all.
      top_p: mass to keep, in (0, 1].
      min_p: in [0, 1], or None.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for a setting that names no distribution; the settings are Python numbers."""
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
    """Logits of the distribution that tokens are drawn from: tempered, then cut to its head.

    In this order, each on what the one before left (as transformers does): logits / temperature; the `top_k` largest;
    the smallest set of most likely tokens whose mass reaches `top_p`; tokens at least `min_p` times as likely as the
    likeliest. What is cut gets −inf. Tokens that tie with the last one kept are kept.

    Args:
      logits: [..., V], any float dtype.
      sampling: the four settings.
      keep: [...] int token ids that are never cut: the trainer scores a token that was drawn, and it must not vanish
        when the params have moved a little since.

    Returns:
      [..., V] float32.

    Raises:
      ValueError: a setting outside its range.

    Example:
      >>> import jax.numpy as jnp
      >>> process_logits(jnp.array([2.0, 1.0, 0.0]), Sampling(temperature=0.5, top_k=2)).tolist()
      [4.0, 2.0, -inf]
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
        smallest = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        # A token stays if the mass of those before it has not reached top_p yet: the first always stays.
        stays = jnp.cumsum(probs, axis=-1) - probs < top_p
        smallest = jnp.min(jnp.where(stays, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if min_p:
        logits = jnp.where(logits >= logits.max(axis=-1, keepdims=True) + math.log(min_p), logits, -jnp.inf)
    if keep is not None:
        kept = jnp.arange(logits.shape[-1]).reshape((1,) * keep.ndim + (-1,)) == keep[..., None]
        logits = jnp.where(kept, full, logits)
    return logits


def uniforms(keys: jax.Array) -> jax.Array:
    """The two uniforms [..., 2] float32 in [0, 1) that a draw takes, for each of [...] typed keys."""
    flat = keys.reshape(-1)
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(flat).reshape((*keys.shape, 2))


def _inverse_cdf(u: jax.Array, weights: jax.Array, axis: int) -> jax.Array:
    """First index along the axis at which the cumulative sum of weights passes u · total, for u in [0, 1).

    An entry of weight zero is never returned, however the sums were rounded, as long as one entry is positive.
    """
    cumulative = jnp.where(weights > 0, jnp.cumsum(weights, axis=axis), 0)
    total = cumulative.max(axis=axis)
    target = jnp.minimum(u * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.argmax(cumulative > jnp.expand_dims(target, axis), axis=axis)


def vocabulary_blocks(size: int) -> tuple[int, int]:
    """How a vocabulary is cut into blocks for a draw, as (blocks, width): about as many as tokens of each.

    Where it can be, the blocks fill the vocabulary, and are divisible by a power of two: over so many devices a
    vocabulary can be cut, and each has whole blocks. The cut decides which token a uniform gives, so it depends on
    nothing but the vocabulary.

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
    u: jax.Array, logits: jax.Array, *, axis: int = -1, together: Callable[[jax.Array], jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draw a token from softmax(logits) for each row, given its two uniforms.

    Args:
      u: [..., 2] float32 in [0, 1).
      logits: [..., V] float32; −inf is never drawn.
      axis: the vocabulary's axis of `logits`.
      together: for a vocabulary cut over devices, a function that gathers the parts of a small array. A block is then
        selected by a masked sum over all blocks: an index would gather the logits.

    Returns:
      tokens [...] int32, and their log-probs [...] float32 under softmax(logits).
    """
    axis %= logits.ndim
    before, vocab, after = logits.shape[:axis], logits.shape[axis], logits.shape[axis + 1 :]
    chex.assert_shape(u, (*before, *after, 2))
    blocks, width = vocabulary_blocks(vocab)
    top = logits.max(axis=axis, keepdims=True)
    padding = [(0, blocks * width - vocab if i == axis else 0) for i in range(logits.ndim)]

    def cut(x: jax.Array) -> jax.Array:
        return jnp.pad(x, padding).reshape((*before, blocks, width, *after))

    weights = cut(jnp.exp(logits - top))
    masses = weights.sum(axis=axis + 1)
    masses = masses if together is None else together(masses)
    block = _inverse_cdf(u[..., 0], masses, axis)
    ones = [1] * len(before), [1] * len(after)
    if together is not None:
        chosen = jnp.arange(blocks).reshape((*ones[0], -1, 1, *ones[1])) == jnp.expand_dims(block, (axis, axis + 1))
        inside = together(jnp.where(chosen, weights, 0).sum(axis=axis))
    else:
        inside = jnp.take_along_axis(weights, jnp.expand_dims(block, (axis, axis + 1)), axis=axis).squeeze(axis)
    place = _inverse_cdf(u[..., 1], inside, axis)
    tokens = (block * width + place).astype(jnp.int32)
    if together is not None:
        own = jnp.arange(width).reshape((*ones[0], -1, *ones[1])) == jnp.expand_dims(place, axis)
        drawn = jnp.where(chosen & jnp.expand_dims(own, axis), cut(logits), 0).sum(axis=(axis, axis + 1))
        drawn = jnp.expand_dims(together(drawn), axis)
    else:
        drawn = jnp.take_along_axis(logits, jnp.expand_dims(tokens, axis), axis=axis)
    return tokens, (drawn - top).squeeze(axis) - jnp.log(masses.sum(axis=axis))


def greedy_tokens(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The likeliest token of each row [...] int32, and its log-prob [...] float32."""
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
    """Draw one token for each row of logits, and say with which log-prob it was drawn.

    token ~ softmax(process_logits(logits)), log-prob = log softmax(process_logits(logits))[token].

    Args:
      key: one typed PRNG key, consumed; or [...] keys, one per draw.
      logits: [..., V], any float dtype; −inf is never drawn, and a row has at least one finite entry.
      temperature: ≥ 0; 0 takes the likeliest token, with its log-prob at temperature 1.
      top_k: as in `Sampling`.
      top_p: as in `Sampling`.
      min_p: as in `Sampling`.

    Returns:
      tokens [...] int32, log_probs [...] float32.

    Raises:
      ValueError: logits without a vocabulary axis, keys of another shape, or a setting outside its range.

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
        key = jax.random.wrap_key_data(key)  # keys of the old kind, uint32 [..., 2]
    if key.shape == ():
        return draw_tokens(jax.random.uniform(key, (*rows, 2)), processed)
    if key.shape != rows:
        raise ValueError(f"key must be one key, or one per draw {rows}; got shape {key.shape}.")
    return draw_tokens(uniforms(key), processed)
