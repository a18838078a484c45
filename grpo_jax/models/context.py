"""Inputs to layers: caches of keys, values and recurrent states, and the segments of packed sequences.

The leading axes of a cache are B (prompts), heads and G (completions). Arrays for prompts do not have the axis G.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp

from grpo_jax.models.attention_tiles import TileMask


class RecurrentState(NamedTuple):
    """State of a recurrent layer."""

    memory: jax.Array | None  # [B, H, G, d_k, d_v] float32; None for a short convolution
    tail: jax.Array  # [B, 1, G, K − 1, C], convolution inputs for the last K − 1 tokens


KeysValues = tuple[jax.Array, jax.Array]
LayerCache = KeysValues | RecurrentState | tuple[()]

Cache = tuple[LayerCache, ...]
"""One entry per layer: completion keys [B, H_kv, G, d, S] and values [B, H_kv, G, S, d] (the first three axes may be
merged), a `RecurrentState`, or () if the layer reuses the keys and values of a previous layer.

Keys are stored transposed, since multiplying queries by transposed keys takes half the time on CPUs.
"""


@flax.struct.dataclass
class Prefix:
    """Cache for a batch of prompts. All completions of a prompt share the prompt's entries."""

    layers: Cache  # keys [B, H_kv, d, P] and values [B, H_kv, P, d], or states without the axis G
    lengths: jax.Array  # [B] int32 number of prompt tokens; later slots are masked out


@flax.struct.dataclass
class Segments:
    """Segments of packed sequences: N tokens in M blocks of N / M tokens, on each of A devices.

    A segment is one completion. All segments in a block have the same prompt, so a block attends to only one prompt.

    ```
    block     │     0     │     1     │     2     │
    prompt    │     5     │     5     │     7     │     one prompt per block
    number    │ 0 0 0 1 1 │ 1 1 2 2 · │ 3 3 3 3 · │     −1 (·) is padding
    position  │ 0 1 2 0 1 │ 2 3 0 1 0 │ 0 1 2 3 0 │
    ```
    """

    number: jax.Array  # [A, N] int32 segment index of each token; -1 for padding
    position: jax.Array  # [A, N] int32, counted from the segment's first token
    prompt: jax.Array  # [A, M] int32 index into the device's shard of a `Prefix`, which has B / A prompts
    max_segment_length: int = flax.struct.field(pytree_node=False)  # upper bound on the number of tokens per segment
    reach: int = flax.struct.field(pytree_node=False)  # upper bound on how many blocks back a token's segment starts


class Context(flax.struct.PyTreeNode):
    """Layer inputs other than params and hidden states. `Transformer.hidden` documents fields without a comment."""

    tables: tuple[tuple[jax.Array, jax.Array], ...]  # `rope_table` for each of the decoder's rotary embeddings
    q_factors: jax.Array | None = None  # [B, G or 1, T, 1, 1] scale factors for the queries (Llama 4)
    prefix: LayerCache | None = None  # this layer's cache for the prompts
    lengths: jax.Array | None = None  # [B] prompt lengths
    cache: LayerCache | None = None  # this layer's cache for the completions
    index: jax.Array | int = 0
    start: jax.Array | None = None
    write: jax.Array | None = None
    segments: Segments | None = None
    last: jax.Array | None = None
    present: jax.Array | None = None  # [B, G, T] bool, False for padding; only used by recurrent layers
    tile_mask: TileMask | None = None  # mask for fused attention; None if it is not used
    last_visible: jax.Array | None = None  # [B, T] last token that each token attends to; for images in prompts
    shared: KeysValues | None = None  # a previous layer's keys and values, if this layer reuses them
    layer_input: jax.Array | None = None  # [B, G, T, ·] per-layer token embeddings (Gemma 4)

    def pick(self, x: jax.Array) -> jax.Array:
        """Select token `last` [B] from x [B, G, T, ...] as [B, G, 1, ...]. If `last` is None, return x."""
        if self.last is None:
            return x
        return jnp.take_along_axis(x, jnp.expand_dims(self.last, tuple(range(1, x.ndim))), axis=2)

    @property
    def prompt_cache(self) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Prompt keys, values and lengths for an attention layer, or None without prompts."""
        if self.prefix is None or self.lengths is None:
            return None
        keys, values = cast(KeysValues, self.prefix)
        return keys, values, self.lengths

    def of_last(self) -> Context:
        """Return the context for the remaining layers, which run only on token `last`."""
        assert self.last is not None
        tables = tuple((self.pick(cos), self.pick(sin)) for cos, sin in self.tables)
        factors = None if self.q_factors is None else self.pick(self.q_factors)
        return self.replace(
            tables=tables, q_factors=factors, index=self.index + self.last, last=None, write=None, last_visible=None
        )


def num_slots(layers: Cache) -> int:
    """Return the number of slots: S for a `Cache`, P for `Prefix.layers`, or 0 if no layer has slots."""
    return next((layer[1].shape[-2] for layer in layers if layer and not isinstance(layer, RecurrentState)), 0)


def empty_cache(layers: Cache, group: int, slots: int) -> Cache:
    """Create a zero-filled cache with `slots` slots for `group` completions per prompt, given `Prefix.layers`."""

    def empty_layer(layer: LayerCache) -> LayerCache:
        if not layer:
            return ()
        if isinstance(layer, RecurrentState):
            return jax.tree.map(lambda x: jnp.zeros((*x.shape[:2], group, *x.shape[2:]), x.dtype), layer)
        keys, values = layer
        b, h, d, _ = keys.shape
        return jnp.zeros((b, h, group, d, slots), keys.dtype), jnp.zeros((b, h, group, slots, d), values.dtype)

    return tuple(map(empty_layer, layers))


def _map_slots(function: Callable[[jax.Array, int], jax.Array], cache: Cache) -> Cache:
    """Apply `function(array, slot axis)` to all keys and values."""
    return tuple(
        (function(layer[0], -1), function(layer[1], -2)) if layer and not isinstance(layer, RecurrentState) else layer
        for layer in cache
    )


def pad_slots(cache: Cache, slots: int) -> Cache:
    """Append empty slots to a cache, up to `slots` in total."""
    added = slots - num_slots(cache)

    def pad(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, added if i == x.ndim + axis else 0) for i in range(x.ndim)])

    return _map_slots(pad, cache)


def rotate_ring(cache: Cache, first: jax.Array, slots: int) -> Cache:
    """Return a cache with `slots` slots of a ring, from slot `first` [B, G] on. Slots repeat if the ring is smaller."""
    size = num_slots(cache)

    def slice_slots(x: jax.Array, axis: int) -> jax.Array:
        repeated = jnp.concatenate([x] * (1 + -(-slots // size)), axis=axis)
        read = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=slots, axis=axis)
        return jax.vmap(jax.vmap(read, in_axes=(1, 0), out_axes=1))(repeated, first % size)

    return _map_slots(slice_slots, cache)
