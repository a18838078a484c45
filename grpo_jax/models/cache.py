"""Caches: keys, values and recurrent states of the tokens that the layers of a decoder have read.

An attention layer keeps keys and values, in slots: one for each token. One that is over the keys and values of an
earlier layer keeps nothing, (). A recurrent layer keeps a `State`, which is as
large after ten thousand tokens as after one. Both have the axes B (of prompts), heads and G (of completions) in front;
what is kept of a prompt lacks G.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class State(NamedTuple):
    """State of a recurrent layer, in the place of an attention layer's (keys, values).

    Attributes:
      memory: [B, H, G, d_k, d_v] float32; of a prompt [B, H, d_k, d_v]. None of a layer that is a convolution alone.
      tail: [B, 1, G, K − 1, C], what the convolution still needs of the last tokens; of a prompt [B, 1, K − 1, C].
    """

    memory: jax.Array | None
    tail: jax.Array


def slots_of(layers: Sequence[Any]) -> int:
    """S of a `Cache`, or P of a `Prefix`; 0 where no layer has slots."""
    return next((layer[1].shape[-2] for layer in layers if layer and not isinstance(layer, State)), 0)


def empty_like(layers: Sequence[Any], group: int, slots: int) -> tuple[Any, ...]:
    """A cache with so many slots for `group` completions of each prompt, zeros, given the layers of a `Prefix`.

    A state is not copied for the completions: each begins with its prompt's when its first token is read.
    """

    def one(layer: Any) -> Any:
        if not layer:
            return ()
        if isinstance(layer, State):
            return jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], group, *x.shape[2:]), x.dtype), layer)
        b, h, d, _ = layer[0].shape
        return jnp.zeros((b, h, group, d, slots), layer[0].dtype), jnp.zeros((b, h, group, slots, d), layer[1].dtype)

    return tuple(map(one, layers))


def with_slots(cache: Sequence[Any], slots: int) -> tuple[Any, ...]:
    """Return the same cache with `slots` slots, at least as many as it has; those that are new come last."""
    more = slots - slots_of(cache)

    def longer(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])

    return tuple(layer if _slotless(layer) else (longer(layer[0], -1), longer(layer[1], -2)) for layer in cache)


def _slotless(layer: Any) -> bool:
    """Return whether a layer keeps a state, or nothing of its own."""
    return isinstance(layer, State) or not layer


def turned(cache: Sequence[Any], first: jax.Array, slots: int) -> tuple[Any, ...]:
    """Return a ring of `slots` slots whose first one is, for each completion, slot `first` [B, G] of the cache's ring.

    Where the new ring is longer, the old one goes round more than once.
    """
    size = slots_of(cache)

    def cut(x: jax.Array, axis: int) -> jax.Array:
        long = jnp.concatenate([x] * (1 + -(-slots // size)), axis=axis)
        own = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=slots, axis=axis)
        return jax.vmap(jax.vmap(own, in_axes=(1, 0), out_axes=1))(long, first % size)

    return tuple(layer if _slotless(layer) else (cut(layer[0], -1), cut(layer[1], -2)) for layer in cache)
