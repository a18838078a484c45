"""Turns on the device: compiled parts of a rollout in which every completion has slots of its own."""

from __future__ import annotations

import functools
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp

from grpo_jax.devices.streams import shared
from grpo_jax.maths.sampling import uniforms
from grpo_jax.models.attention import Cache, Prefix
from grpo_jax.models.cache import State, empty_like, slots_of
from grpo_jax.rollout.decode import draw_next, is_eos, read_prompts

LEAD = 16
"""The slot in which completions begin: before it there is room for what fills up a short text that is read."""


class TurnStream(flax.struct.PyTreeNode):
    """Completions that take turns together, as they stand on the device.

    All write to the same slot of a ring, so a completion whose turn has ended before the others' stays behind. When the
    next turn begins, `align` turns each completion's slots so far that all end side by side again:

    ```
    slots of           a turn ends                      aligned, with the next tokens to be read
    completion 0   a b c d · · · ·  end 4               · · · a b c d │ x      one token to be read
    completion 1   e f · · · · · ·  end 2               · · · · · e f │ u      in the last slot
    completion 2   g h i j k l · ·  end 6               · g h i j k l │ y      and then from the first slot on
    ```

    Attributes:
      prefix: of the prompts, B of them.
      cache: what is kept of the completions; its slots are a ring.
      token: [B, G] the last token of each completion, which is not in the cache yet.
      start: [B, G] int32, the slot in which each completion begins.
      keys: [B, G] typed keys.
    """

    prefix: Prefix
    cache: Cache
    token: jax.Array
    start: jax.Array
    keys: jax.Array


def _uniforms(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """[B, G, 2] for the tokens with these numbers [B, G] in their completions."""
    return uniforms(jax.vmap(jax.vmap(jax.random.fold_in))(keys, numbers))


@shared
@functools.partial(jax.jit, static_argnames=("slots", "sampling", "mesh"))
def begin(model, params, prompts, keys, *, slots, sampling, mesh=None):
    """Read the prompts and draw the first token of every completion: the stream, tokens and log-probs [B, G]."""
    (b, g), (prefix, token, log_prob) = keys.shape, read_prompts(model, params, prompts, keys, sampling, mesh)
    cache = empty_like(prefix.layers, g, slots)
    return TurnStream(prefix, cache, token, jnp.full((b, g), LEAD, jnp.int32), keys), token, log_prob


@shared
@functools.partial(jax.jit, static_argnames=("steps", "eos_token_ids", "sampling", "mesh"), donate_argnames=("cache",))
def draw_turn(model, variables, cache, stream, slot, active, room, *, steps, eos_token_ids, sampling, mesh=None):
    """Up to `steps` tokens more of the active completions, each until its turn ends or it has no `room` [B, G] left.

    Args:
      cache: that of the stream, which is given without it: donated.
      slot: the next one, of the active completions.

    Returns:
      The cache, the last tokens [B, G], and tokens, log-probs and which were drawn [B, G, steps].
    """
    b, g = stream.token.shape
    chex.assert_shape([stream.start, active, room], (b, g))
    u = jax.vmap(lambda i: _uniforms(stream.keys, slot - stream.start + 1 + i))(jnp.arange(steps))
    shape = (steps, b, g)
    drawn = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool))

    def step(carry):
        i, cache, token, active, drawn = carry
        given = (token[:, :, None], stream.prefix, cache, slot + i, stream.start)
        hidden, cache = model.apply(variables, *given, write=active[..., None], method="hidden")
        new, log_prob = draw_next(model, variables, u[i], hidden[:, :, 0], sampling, mesh)
        token = jnp.where(active, new, token)
        drawn = tuple(x.at[i].set(y) for x, y in zip(drawn, (token, log_prob, active), strict=True))
        return i + 1, cache, token, active & ~is_eos(token, eos_token_ids) & (i + 1 < room), drawn

    carry = (jnp.int32(0), cache, stream.token, active, drawn)
    carry = jax.lax.while_loop(lambda carry: (carry[0] < steps) & carry[3].any(), step, carry)
    _, cache, token, _, drawn = carry
    tokens, log_probs, mask = (jnp.moveaxis(x, 0, -1) for x in drawn)
    return cache, token, (tokens, jnp.where(mask, log_probs, 0.0), mask)


@shared
@functools.partial(jax.jit, static_argnames=("sampling", "mesh"), donate_argnames=("cache",))
def read_chunk(model, variables, cache, stream, slot, tokens, real, *, sampling, mesh=None):
    """Read the `real` ones [B, G, N] of tokens [B, G, N], which end side by side, from a slot on; draw what comes next.

    Returns:
      The cache, and tokens and log-probs [B, G]; to be looked at where the last token was real, after the last chunk.
    """
    given = (tokens, stream.prefix, cache, slot, stream.start)
    hidden, cache = model.apply(variables, *given, write=real, method="hidden")
    u = _uniforms(stream.keys, slot + tokens.shape[-1] - stream.start)
    token, log_prob = draw_next(model, variables, u, hidden[:, :, -1], sampling, mesh)
    return cache, token, log_prob


@functools.partial(jax.jit, static_argnames=("slots",))
def align(stream: TurnStream, groups, order, filled, more, *, slots: int) -> TurnStream:
    """Completions order [B', G'] of groups [B'], in a ring of `slots` slots.

    Each has `filled` [B', G'] slots, of which the last stands `more` [B', G'] before the end of the ring.
    """
    pick = lambda x: x[groups[:, None], order]
    old, size = pick(stream.start), slots_of(stream.cache)
    start = slots - more - filled
    of_heads = lambda x: pick(x.swapaxes(1, 2))  # [B', G', H, …]

    def turned(x: jax.Array, axis: int) -> jax.Array:
        x = of_heads(x)
        long = jnp.concatenate([x] * (1 + -(-slots // size)), axis=axis)
        # What is to stand in slot 0 of the new ring; before its own first slot nobody looks.
        first = (old - start) % size
        cut = lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, slots, axis=axis)
        return jax.vmap(jax.vmap(cut))(long, first).swapaxes(1, 2)

    def moved(layer: Any) -> Any:
        if isinstance(layer, State):
            return jax.tree.map(lambda x: of_heads(x).swapaxes(1, 2), layer)
        if not layer:  # it is over the keys and values of an earlier one
            return ()
        return turned(layer[0], -1), turned(layer[1], -2)

    cache = tuple(map(moved, stream.cache))
    prefix = jax.tree.map(lambda x: x[groups], stream.prefix)
    return TurnStream(prefix, cache, pick(stream.token), start, pick(stream.keys))
