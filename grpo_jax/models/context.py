"""Caches of keys, values and recurrent states, packed segments, and the context in which a layer runs.

An attention layer keeps keys and values in slots, one for each token. A layer that uses the keys and values of an
earlier layer keeps nothing, (). A recurrent layer keeps a `RecurrentState`, whose size does not depend on the number of
tokens. All have the axes B (prompts), heads and G (completions) in front; for prompts the axis G is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp

from grpo_jax.models.tiles import TileMask


class RecurrentState(NamedTuple):
    """State of a recurrent layer.

    Attributes:
      memory: [B, H, G, d_k, d_v] float32, of prompts [B, H, d_k, d_v]; None for a layer that only convolves.
      tail: [B, 1, G, K − 1, C], inputs of the convolution at the last tokens; of prompts [B, 1, K − 1, C].
    """

    memory: jax.Array | None
    tail: jax.Array


KeysValues = tuple[jax.Array, jax.Array]
LayerCache = KeysValues | RecurrentState | tuple[()]

Cache = tuple[LayerCache, ...]
"""For each layer keys [B, H_kv, G, d, S] and values [B, H_kv, G, S, d] of the completions, whose first three axes may
be merged; or a `RecurrentState`; or () if the layer uses the keys and values of an earlier one.

Keys are stored transposed: a query's scores are then one plain product, which takes a CPU half the time in a decode
step.
"""


@flax.struct.dataclass
class Prefix:
    """Keys, values and recurrent states of a batch of prompts, shared by all completions of a prompt.

    Attributes:
      layers: for each layer (keys [B, H_kv, d, P], values [B, H_kv, P, d]), or a `RecurrentState`, or () if the layer
        uses the keys and values of an earlier one.
      lengths: [B] int32; later slots are masked out.
    """

    layers: Cache
    lengths: jax.Array


@flax.struct.dataclass
class Segments:
    """Segments of packed sequences: N tokens in M blocks of N / M, on each of A devices.

    A segment is one completion. A block has segments of one prompt only, so that it attends to one prefix.

    ```
    block     │     0     │     1     │     2     │
    prompt    │     5     │     5     │     7     │     one prompt per block
    number    │ 0 0 0 1 1 │ 1 1 2 2 · │ 3 3 3 3 · │     −1 (·) is padding
    position  │ 0 1 2 0 1 │ 2 3 0 1 0 │ 0 1 2 3 0 │
    ```

    Attributes:
      number: [A, N] int32.
      position: [A, N] int32, counted from the segment's first token.
      prompt: [A, M] int32, index into the device's part of a `Prefix`, which has B / A prompts.
      longest: upper bound of a segment's tokens.
      reach: upper bound of the number of blocks before a token's block in which its segment begins.
    """

    number: jax.Array
    position: jax.Array
    prompt: jax.Array
    longest: int = flax.struct.field(pytree_node=False)
    reach: int = flax.struct.field(pytree_node=False)


class Context(flax.struct.PyTreeNode):
    """Everything that a layer depends on besides its params and hidden states. Fields as in `Transformer.hidden`.

    Attributes:
      tables: (cos, sin) of the tokens' positions for each rotary embedding of the decoder.
      growth: [B, G or 1, T, 1, 1] factor on the queries, or None.
      prefix: this layer's keys and values, or state, of the prompts; None without prompts.
      lengths: [B] of the prompts; None without prompts.
      cache: this layer's keys and values, or state, of the completions; None without a cache.
      index: slot of the first token.
      start: [B] slot in which the completions of each prompt begin, or [B, G] of each completion; None: 0.
      write: [B, G, T] bool, tokens whose keys and values go into the cache; None: all.
      segments: of a packed sequence, or None.
      last: [B] the only token whose hidden state is computed; None: all.
      present: [B, G, T] bool, False on padding; None: no padding. Only recurrent layers read it.
      tile_mask: visible tiles for fused attention; None: scores are written out.
      shared: keys and values of an earlier layer, for a layer without its own; else None.
      layer_input: [B, G, T, ·] this layer's own embedding of the tokens (Gemma 4), or None.
    """

    tables: tuple[tuple[jax.Array, jax.Array], ...]
    growth: jax.Array | None = None
    prefix: LayerCache | None = None
    lengths: jax.Array | None = None
    cache: LayerCache | None = None
    index: jax.Array | int = 0
    start: jax.Array | None = None
    write: jax.Array | None = None
    segments: Segments | None = None
    last: jax.Array | None = None
    present: jax.Array | None = None
    tile_mask: TileMask | None = None
    shared: KeysValues | None = None
    layer_input: jax.Array | None = None

    def pick(self, x: jax.Array) -> jax.Array:
        """Return token `last` [B] of x [B, G, T, ...] as [B, G, 1, ...]; x itself if `last` is None."""
        if self.last is None:
            return x
        return jnp.take_along_axis(x, jnp.expand_dims(self.last, tuple(range(1, x.ndim))), axis=2)

    @property
    def prompt_keys(self) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Keys, values and lengths of the prompts, for an attention layer; None without prompts."""
        if self.prefix is None or self.lengths is None:
            return None
        keys, values = cast(KeysValues, self.prefix)
        return keys, values, self.lengths

    def of_last(self) -> Context:
        """Return the context of the layers that run on token `last` only."""
        assert self.last is not None
        tables = tuple((self.pick(own), self.pick(other)) for own, other in self.tables)
        growth = None if self.growth is None else self.pick(self.growth)
        return self.replace(tables=tables, growth=growth, index=self.index + self.last, last=None, write=None)


def num_slots(layers: Cache) -> int:
    """Return S of a `Cache`, or P of the layers of a `Prefix`; 0 if no layer has slots."""
    return next((layer[1].shape[-2] for layer in layers if layer and not isinstance(layer, RecurrentState)), 0)


def empty_cache(layers: Cache, group: int, slots: int) -> Cache:
    """Return a zero cache for `group` completions of each prompt, given the layers of a `Prefix`.

    States are not copied from the prompts: a completion's first token reads its prompt's.
    """

    def one(layer: LayerCache) -> LayerCache:
        if not layer:
            return ()
        if isinstance(layer, RecurrentState):
            return jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], group, *x.shape[2:]), x.dtype), layer)
        keys, values = layer
        b, h, d, _ = keys.shape
        return jnp.zeros((b, h, group, d, slots), keys.dtype), jnp.zeros((b, h, group, slots, d), values.dtype)

    return tuple(map(one, layers))


def _map_slots(function: Callable[[jax.Array, int], jax.Array], cache: Cache) -> Cache:
    """Apply `function(array, axis of the slots)` to all keys and values."""
    return tuple(
        (function(layer[0], -1), function(layer[1], -2)) if layer and not isinstance(layer, RecurrentState) else layer
        for layer in cache
    )


def pad_slots(cache: Cache, slots: int) -> Cache:
    """Return the cache with empty slots appended, up to `slots`."""
    more = slots - num_slots(cache)

    def longer(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])

    return _map_slots(longer, cache)


def rotate_ring(cache: Cache, first: jax.Array, slots: int) -> Cache:
    """Return a ring of `slots` slots which begins, for each completion, at slot `first` [B, G] of the cache's ring.

    If the new ring is longer, the old one is repeated.
    """
    size = num_slots(cache)

    def cut(x: jax.Array, axis: int) -> jax.Array:
        long = jnp.concatenate([x] * (1 + -(-slots // size)), axis=axis)
        own = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=slots, axis=axis)
        return jax.vmap(jax.vmap(own, in_axes=(1, 0), out_axes=1))(long, first % size)

    return _map_slots(cut, cache)
