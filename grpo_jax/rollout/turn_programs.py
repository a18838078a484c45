"""Turns on the device: compiled parts of a rollout in which every completion has slots of its own."""

from __future__ import annotations

import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp

from grpo_jax.devices.streams import shared
from grpo_jax.maths.sampling import uniforms
from grpo_jax.models.attention import Cache, Prefix
from grpo_jax.rollout.decode import draw_next, is_eos, read_prompts


class TurnStream(flax.struct.PyTreeNode):
    """Completions that take turns together, as they stand on the device.

    Attributes:
      prefix: of the prompts, B of them.
      cache: own keys [B, H_kv, G, d, S] and values [B, H_kv, G, S, d] of each layer.
      token: [B, G] the last token of each completion, which is not in the cache yet.
      index: [B, G] int32, slots that a completion has filled: all of its tokens but the last.
      keys: [B, G] typed keys.
    """

    prefix: Prefix
    cache: Cache
    token: jax.Array
    index: jax.Array
    keys: jax.Array


def _uniforms(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """[B, G, 2] for the tokens with these numbers [B, G] in their completions."""
    return uniforms(jax.vmap(jax.vmap(jax.random.fold_in))(keys, numbers))


@shared
@functools.partial(jax.jit, static_argnames=("slots", "sampling", "mesh"))
def begin(model, params, prompts, keys, *, slots, sampling, mesh=None):
    """Read the prompts and draw the first token of every completion: the stream, tokens and log-probs [B, G]."""
    (b, g), (prefix, token, log_prob) = keys.shape, read_prompts(model, params, prompts, keys, sampling, mesh)
    heads, d = prefix.layers[0][0].shape[1:3]
    empty = lambda *shape: jnp.zeros((b, heads, g, *shape), prefix.layers[0][0].dtype)
    cache = tuple((empty(d, slots), empty(slots, d)) for _ in prefix.layers)
    return TurnStream(prefix, cache, token, jnp.zeros((b, g), jnp.int32), keys), token, log_prob


@shared
@functools.partial(jax.jit, static_argnames=("steps", "eos_token_ids", "sampling", "mesh"), donate_argnames=("stream",))
def draw_turn(model, variables, stream, active, room, *, steps, eos_token_ids, sampling, mesh=None):
    """Up to `steps` tokens more of the active completions, each until its turn ends or it has no `room` [B, G] left.

    Returns:
      The stream, which of them are still active [B, G], and tokens, log-probs and which were drawn [B, G, steps].
    """
    b, g = stream.token.shape
    chex.assert_shape([stream.index, active, room], (b, g))
    u = jax.vmap(lambda i: _uniforms(stream.keys, stream.index + 1 + i))(jnp.arange(steps))
    shape = (steps, b, g)
    drawn = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool))

    def step(carry):
        i, cache, token, index, active, drawn = carry
        how = (token[:, :, None], stream.prefix, cache, index)
        hidden, cache = model.apply(variables, *how, method="hidden")
        new, log_prob = draw_next(model, variables, u[i], hidden[:, :, 0], sampling, mesh)
        token, index = jnp.where(active, new, token), index + active
        drawn = tuple(x.at[i].set(y) for x, y in zip(drawn, (token, log_prob, active), strict=True))
        return i + 1, cache, token, index, active & ~is_eos(token, eos_token_ids) & (i + 1 < room), drawn

    carry = (jnp.int32(0), stream.cache, stream.token, stream.index, active, drawn)
    carry = jax.lax.while_loop(lambda carry: (carry[0] < steps) & carry[4].any(), step, carry)
    _, cache, token, index, active, drawn = carry
    tokens, log_probs, mask = (jnp.moveaxis(x, 0, -1) for x in drawn)
    stream = stream.replace(cache=cache, token=token, index=index)
    return stream, active, (tokens, jnp.where(mask, log_probs, 0.0), mask)


@shared
@functools.partial(jax.jit, static_argnames=("sampling", "mesh"), donate_argnames=("stream",))
def read_chunk(model, variables, stream, tokens, counts, last, *, sampling, mesh=None):
    """Read `counts` [B, G] of tokens [B, G, N], the last drawn one first, and draw the next where they are the `last`.

    Returns:
      The stream, and tokens and log-probs [B, G], to be looked at where a token was drawn.
    """
    given = (tokens, stream.prefix, stream.cache, stream.index)
    hidden, cache = model.apply(variables, *given, method="hidden")
    at = jnp.maximum(counts - 1, 0)[:, :, None, None]
    hidden = jnp.take_along_axis(hidden, at, axis=2)[:, :, 0]
    index = stream.index + counts
    new, log_prob = draw_next(model, variables, _uniforms(stream.keys, index), hidden, sampling, mesh)
    token = jnp.where(last, new, stream.token)
    return stream.replace(cache=cache, token=token, index=index), token, log_prob


@functools.partial(jax.jit, static_argnames=("slots",))
def choose(stream: TurnStream, groups, order, *, slots: int) -> TurnStream:
    """Completions order [B', G'] of groups [B'], with `slots` slots."""
    pick = lambda x: x[groups[:, None], order]
    own = lambda x: pick(x.swapaxes(1, 2)).swapaxes(1, 2)
    more = slots - stream.cache[0][1].shape[3]
    longer = lambda x, axis: jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])
    cache = tuple((longer(own(k), -1), longer(own(v), -2)) for k, v in stream.cache)
    prefix = jax.tree.map(lambda x: x[groups], stream.prefix)
    return TurnStream(prefix, cache, pick(stream.token), pick(stream.index), pick(stream.keys))
