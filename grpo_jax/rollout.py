"""Completions of prompts: each prompt read once, one compiled decode, rows that have ended left behind.

Every random number is found by counting. Row (b, g) of a call with `key` draws its token t with
fold_in(fold_in(fold_in(key, prompt_indices[b]), g), t). So a row's sample depends neither on the rows beside it nor on
how rows are laid out over devices, cut into batches, or moved together when others have ended.

Decoding goes in segments. Inside one, everything is on the device. Between two, the host looks which rows have ended,
moves the living ones of each group together into the next smaller bucket of rows, and grows the cache to the next bucket
of slots, so that attention never looks at slots that nobody has reached.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.log_probs import join_rows
from grpo_jax.models.transformer import Cache, Prefix
from grpo_jax.sampling import check_sampling, draw_tokens, greedy_tokens, process_logits, uniforms
from grpo_jax.types import Completions, Model, Params, Prompts

__all__ = ["generate", "row_keys"]

SEGMENT = 32
"""Decode steps between two looks at which rows have ended."""


def row_keys(key: jax.Array, prompt_indices: jax.Array, num_generations: int) -> jax.Array:
    """One typed key a row, [B, G]: fold_in(fold_in(key, prompt_indices[b]), g)."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    fold = jax.random.fold_in
    rows = jnp.arange(num_generations)
    return jax.vmap(lambda b: jax.vmap(lambda g: fold(fold(key, b), g))(rows))(prompt_indices)


def _draw(u, logits, sampling):
    logits = process_logits(logits, **sampling)
    return greedy_tokens(logits) if sampling["temperature"] == 0 else draw_tokens(u, logits)


def _is_eos(tokens: jax.Array, eos_token_ids: tuple[int, ...]) -> jax.Array:
    ended = jnp.zeros(tokens.shape, bool)
    for eos in eos_token_ids:
        ended |= tokens == eos
    return ended


def _step_uniforms(keys: jax.Array, first: jax.Array | int, steps: int) -> jax.Array:
    """[steps, B, G, 2]: made for a whole segment at once, because one wide draw is cheaper than many narrow ones."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    counts = first + jnp.arange(steps)
    return jax.vmap(lambda t: uniforms(fold(keys.reshape(-1), t).reshape(keys.shape)))(counts)


def _prefill(model, params, prompts, keys, *, eos_token_ids, slots, sampling):
    """Read the prompts and draw the first token of every row, from logits computed once a prompt."""
    b, g = keys.shape
    last, prefix = model.apply({"params": params}, prompts.tokens, prompts.lengths, method="prefill")
    logits = model.apply({"params": params}, last, method="unembed")
    logits = jnp.broadcast_to(logits[:, None], (b, g, logits.shape[-1]))
    tokens, log_probs = _draw(_step_uniforms(keys, 0, 1)[0], logits, sampling)

    def cache_of(k):
        return jnp.zeros((*k.shape[:2], g, slots, k.shape[-1]), k.dtype)

    cache = tuple((cache_of(k), cache_of(v)) for k, v in prefix.layers)
    return prefix, cache, tokens, log_probs, _is_eos(tokens, eos_token_ids)


def _decode(model, params, prefix, cache, token, ended, keys, first, *, steps, eos_token_ids, pad_token_id, sampling):
    """Decode tokens first..first+steps-1 of rows whose token first-1 is `token`; stop early when all have ended."""
    b, g = token.shape
    u = _step_uniforms(keys, first, steps)
    tokens = jnp.full((steps, b, g), pad_token_id, jnp.int32)
    log_probs = jnp.zeros((steps, b, g), jnp.float32)
    mask = jnp.zeros((steps, b, g), bool)

    def unfinished(carry):
        i, _, _, ended, *_ = carry
        return (i < steps) & ~ended.all()

    def step(carry):
        i, cache, token, ended, tokens, log_probs, mask = carry
        hidden, cache = model.apply(
            {"params": params}, token[:, :, None], prefix, cache, first + i - 1, method="hidden"
        )
        logits = model.apply({"params": params}, hidden[:, :, 0], method="unembed")
        drawn, log_prob = _draw(u[i], logits, sampling)
        drawn = jnp.where(ended, pad_token_id, drawn)
        tokens = tokens.at[i].set(drawn)
        log_probs = log_probs.at[i].set(jnp.where(ended, 0.0, log_prob))
        mask = mask.at[i].set(~ended)
        return i + 1, cache, drawn, ended | _is_eos(drawn, eos_token_ids), tokens, log_probs, mask

    carry = (jnp.int32(0), cache, token, ended, tokens, log_probs, mask)
    _, cache, token, ended, tokens, log_probs, mask = jax.lax.while_loop(unfinished, step, carry)
    rows_first = lambda x: jnp.moveaxis(x, 0, -1)
    return cache, token, ended, rows_first(tokens), rows_first(log_probs), rows_first(mask)


def _move(cache: Cache, prefix: Prefix, token, ended, keys, groups, order, *, slots):
    """Keep rows order [B', G'] of groups [B'], and grow the cache to `slots`."""

    def own(x):
        x = jnp.take_along_axis(x[groups], order[:, None, :, None, None], axis=2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, slots - x.shape[3]), (0, 0)))

    rows = lambda x: jnp.take_along_axis(x[groups], order, axis=1)
    cache = tuple((own(k), own(v)) for k, v in cache)
    prefix = Prefix(tuple((k[groups], v[groups]) for k, v in prefix.layers), prefix.lengths[groups])
    return cache, prefix, rows(token), rows(ended), keys[groups[:, None], order]
