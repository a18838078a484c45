"""The context of a layer: the positions of its tokens, and the keys, values and states before them."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from grpo_jax.models.attention import Segments
from grpo_jax.models.sight import Sight


class Context(flax.struct.PyTreeNode):
    """Positions of a layer's tokens, and what was kept of the tokens before them. Fields as in `hidden`.

    Attributes:
      tables: (cos, sin) of the tokens' positions for each rotary embedding of the decoder.
      growth: [B, G or 1, T, 1, 1] factor on the queries, or None.
      prefix: this layer's keys and values (or states) of the prompts, and their lengths, or None.
      cache: those of the completions, or None.
      index: slot of the first token.
      start: [B] slot in which the completions of each prompt begin, or [B, G] of each completion; or None.
      write: [B, G, T] whose keys and values go into the cache; None: all.
      segments: of a packed sequence, or None.
      last: [B] the only token whose hidden state is wanted, or None.
      present: [B, G, T] which tokens are there, side by side; None: all. Attention has `write` and `last` for it.
      sight: what they see, for a fused attention; None for scores that are written out.
      shared: keys and values as an earlier layer returned them, for a layer without its own; else None.
      layer_input: [B, G, T, ·] the tokens by this layer's own embedding (Gemma 4), or None.
    """

    tables: tuple[tuple[jax.Array, jax.Array], ...]
    growth: jax.Array | None = None
    prefix: tuple[jax.Array, jax.Array, jax.Array] | None = None
    cache: tuple[jax.Array, jax.Array] | None = None
    index: jax.Array | int = 0
    start: jax.Array | None = None
    write: jax.Array | None = None
    segments: Segments | None = None
    last: jax.Array | None = None
    present: jax.Array | None = None
    sight: Sight | None = None
    shared: tuple[jax.Array, jax.Array] | None = None
    layer_input: jax.Array | None = None

    def pick(self, x: jax.Array) -> jax.Array:
        """Token `last` [B] of x [B, G, T, ...], as [B, G, 1, ...]; all tokens where it is None."""
        if self.last is None:
            return x
        return jnp.take_along_axis(x, self.last.reshape(-1, *[1] * (x.ndim - 1)), axis=2)

    def of_last(self) -> Context:
        """Return the context of layers that are given token `last` alone, and keys and values of all."""
        assert self.last is not None
        tables = tuple((self.pick(own), self.pick(other)) for own, other in self.tables)
        growth = None if self.growth is None else self.pick(self.growth)
        return self.replace(tables=tables, growth=growth, index=self.index + self.last, last=None, write=None)
