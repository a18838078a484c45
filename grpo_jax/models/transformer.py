"""One Flax decoder for all families.

Tokens are whole sequences, or completions of prompts whose keys and values they share (`context.Prefix`). Layers are
separate, unrolled subtrees: their names map one to one to Hugging Face's, and no step has to slice weights out of a
stack. Softmax, norms and logits are float32 whatever the compute dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from grpo_jax.models.attention import axes_that_cut, make_tile_mask
from grpo_jax.models.block import Layer, apply_alone
from grpo_jax.models.config import LayerKind, TransformerConfig
from grpo_jax.models.context import Cache, Context, LayerCache, Prefix, RecurrentState, Segments, num_slots
from grpo_jax.models.layers import Linear, Quantized, RMSNorm, matmul_quantized, quantized_kernel, tokens_of
from grpo_jax.models.matmul import dot_float32, matmul
from grpo_jax.models.rope import check_rope_length, query_growth, rope_table
from grpo_jax.models.tiles import Kernel, TileMask, implementation
from grpo_jax.types import Params


class Embedding(nn.Module):
    """An embedding table, and the output head if the two are tied."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        self.held = quantized_kernel(self, "embedding")
        if self.held is None:
            self.embedding = self.param(
                "embedding", nn.initializers.normal(c.initializer_range), (c.vocab_size, c.hidden_size)
            )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        if self.held is not None:
            return self._scaled(self.held.take(tokens, c.dtype))
        # On a mesh, a mask for ids beyond the vocabulary would have to be exchanged.
        mode = "fill" if c.mesh is None else "clip"
        return self._scaled(jnp.take(self.embedding, tokens, axis=0, mode=mode).astype(c.dtype))

    def _scaled(self, x: jax.Array) -> jax.Array:
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of x [..., D]."""
        rows, sums = tokens_of(x), self.config.uses_float32_sums
        if self.held is not None:
            logits = matmul_quantized(rows, self.held, jnp.float32, sums)
        else:
            logits = matmul(rows, self.embedding.astype(x.dtype), jnp.float32, sums, transposed=True)
        return logits.reshape((*x.shape[:-1], -1))


class Transformer(nn.Module):
    """A decoder-only language model.

    `apply({"params": params}, tokens)` maps [B, T] int32 right-padded tokens to [B, T, V] float32 logits; position t
    sees tokens 0..t. `hidden`, `prefill` and `unembed` are its parts, for callers that share a prompt among completions
    or need few logits; call them as `apply(..., method="prefill")`.

    Example:
      >>> import jax
      >>> model = Transformer(TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> tokens = jax.numpy.zeros((2, 5), "int32")
      >>> params = model.init(jax.random.key(0), tokens)["params"]
      >>> model.apply({"params": params}, tokens).shape
      (2, 5, 32)
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        layer = nn.remat(Layer, policy=jax.checkpoint_policies.nothing_saveable) if c.remat else Layer
        self.embed_tokens = Embedding(c)
        if c.layer_input_size:
            width = c.num_layers * c.layer_input_size
            of_layers = dataclasses.replace(c, hidden_size=width, embedding_scale=c.layer_input_size**0.5)
            self.embed_tokens_per_layer = Embedding(of_layers)
            self.per_layer_model_projection = Linear(width, False, jnp.dtype(c.dtype), c.initializer_range)
            self.per_layer_projection_norm = RMSNorm(c.rms_norm_eps, c.norm_offset)
        self.layers = [layer(c, kind) for kind in c.layer_kinds]
        self.norm = RMSNorm(c.rms_norm_eps, c.norm_offset)
        if not c.tie_word_embeddings:
            dtype, sums = jnp.dtype(c.dtype), c.uses_float32_sums
            self.lm_head = Linear(c.vocab_size, False, dtype, c.initializer_range, jnp.float32, sums)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [B, T, V] float32 of tokens [B, T]."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T]; got shape {tokens.shape}.")
        hidden, _ = self.hidden(tokens[:, None])
        return self.unembed(hidden[:, 0])

    def hidden(
        self,
        tokens: jax.Array,
        prefix: Prefix | None = None,
        cache: Cache | None = None,
        index: jax.Array | int = 0,
        start: jax.Array | None = None,
        segments: Segments | None = None,
        last: jax.Array | None = None,
        write: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Last hidden states of G completions per prompt.

        Args:
          tokens: [B, G, T] int32.
          prefix: the prompts; None: `tokens` are whole sequences.
          cache: of the completions, S slots, 0..index-1 filled; None: `tokens` are whole completions.
          index: slot of the first token. Slots form a ring: slot S + 2 is slot 2.
          start: [B] int32, the slot in which the completions of each prompt begin, or [B, G] of each completion; None:
            0.
          segments: of packed sequences [A, 1, N]; None: not packed.
          last: [B] int32, the only token whose hidden state is computed, not for packed sequences; None: all.
          write: [B, G, T] bool, tokens that go into the cache, whose first three axes are then separate; they are
            contiguous. None: all.

        Returns:
          Hidden states [B, G, T, D], or [B, G, 1, D], after the last norm; and the new cache. Without a cache: for each
          layer (keys, values) [B, H_kv, G, T, d], or a `RecurrentState`, or () where a `Cache` has () and for recurrent
          layers of packed sequences.
        """
        c = self.config
        b, g, t = tokens.shape
        chex.assert_equal_shape_prefix([x for x in (tokens, start, last, write) if x is not None], 1)
        positions = jnp.broadcast_to(index + jnp.arange(t)[None], (b, t))
        if segments is not None and prefix is not None:
            lengths = jnp.take_along_axis(prefix.lengths.reshape(b, -1), segments.prompt, axis=1)
            positions = jnp.repeat(lengths, t // segments.prompt.shape[1], axis=1) + segments.position
        elif prefix is not None:
            positions = positions + prefix.lengths[:, None]
        if start is not None:
            positions = positions - start[:, None] if start.ndim == 1 else positions[:, None] - start[..., None]
        longest = num_slots(cache) if cache is not None else t if segments is None else segments.longest
        tables = self._tables(positions, longest, prefix, cached=prefix is not None or cache is not None)
        tile_mask = None if cache is not None else self._tile_mask((b, g, t), prefix, segments)
        present = write if c.mixers is not None else None
        if c.mixers is not None and last is not None:
            present = (jnp.arange(t)[None] <= last[:, None])[:, None]
        context = Context(
            tables,
            query_growth(positions, c.rope),
            lengths=None if prefix is None else prefix.lengths,
            index=index,
            start=start,
            write=write,
            segments=segments,
            last=last,
            present=present,
            tile_mask=tile_mask,
        )
        x = constrain_rows(self.embed_tokens(tokens), c.mesh)
        prompts = None if prefix is None else prefix.layers
        x, kept = self._apply_layers(x, context, self._layer_inputs(tokens, x), prompts, cache)
        return self.norm(x), kept

    def _tables(
        self, positions: jax.Array, longest: int, prefix: Prefix | None, *, cached: bool
    ) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Return the rotary tables of positions, for layers of full attention and for those with a window."""
        c = self.config
        ropes = [(c.rope, c.heads_of(LayerKind())[1]), (c.local_rope, c.head_dim)]
        used = [(rope, width) for rope, width in ropes if rope is not None]
        if cached:
            longest += 0 if prefix is None else num_slots(prefix.layers)
            for rope, _ in used:
                check_rope_length(rope, longest)
        return tuple(rope_table(positions, rope, width, longest) for rope, width in used)

    def _tile_mask(
        self, tokens: tuple[int, int, int], prefix: Prefix | None, segments: Segments | None
    ) -> TileMask | None:
        """Return the visible tiles of whole sequences for all windows of the layers; None for "einsum"."""
        c, chosen = self.config, implementation(self.config.attention)
        if chosen == "einsum":
            return None
        masks = []
        for heads, width in dict.fromkeys(map(c.heads_of, c.layer_kinds)):
            windows = {kind.window for kind in c.layer_kinds if c.heads_of(kind) == (heads, width)}
            kernel = Kernel.of(chosen, width, c.dtype)
            masks.append(make_tile_mask(tokens, prefix, segments, kernel, windows=windows, group=c.num_heads // heads))
        return masks[0].replace(tiles={window: tiles for mask in masks for window, tiles in mask.tiles.items()})

    def _layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
        """Return the per-layer embeddings [B, G, T, layers, ·] of tokens with embeddings x (Gemma 4), or None.

        (RMSNorm(W x / √D) + e) / √2, e from a table of its own.
        """
        c = self.config
        if not c.layer_input_size:
            return None
        shape = (*tokens.shape, c.num_layers, c.layer_input_size)
        projected = self.per_layer_model_projection(x) * jnp.asarray(c.hidden_size**-0.5, x.dtype)
        own = constrain_rows(self.embed_tokens_per_layer(tokens), c.mesh)
        both = self.per_layer_projection_norm(projected.reshape(shape)) + own.reshape(shape)
        return both * jnp.asarray(2.0**-0.5, x.dtype)

    def _apply_layers(
        self, x: jax.Array, context: Context, inputs: jax.Array | None, prompts: Cache | None, cache: Cache | None
    ) -> tuple[jax.Array, Cache]:
        """Apply all layers: return the state after the last one, and each one's keys and values (or state)."""
        c, last, i, kept = self.config, context.last, 0, list[LayerCache]()
        # Only token `last` needs the output of the last layer with keys and values of its own; the others only need
        # their keys and values there. So that layer differs from those before it.
        narrow = c.num_layers - c.shared_kv_layers - 1
        looped = c.loop_layers and cache is None and self._only_reads()
        while i < c.num_layers:
            stop = narrow if last is not None and i <= narrow else c.num_layers
            period, times = repeats(c.layer_kinds[i:stop]) if looped else (1, 1)
            here = context if last is None or i == narrow else context.replace(last=None)
            if times > 1:
                x, more = self._loop(i, period, times, x, here, inputs, prompts, kept)
                kept, i = kept + more, i + period * times
                continue
            here = self._layer_context(here, i, inputs, prompts, kept)
            here = here.replace(cache=None if cache is None else cache[i])
            x, own = self._layer(i, x, here if here.last is None else here.replace(tile_mask=None))
            kept.append(own)
            if last is not None and i == narrow < c.num_layers - 1:
                inputs = None if inputs is None else context.pick(inputs)
                context, last = context.of_last().replace(tile_mask=None, present=None), None
            i += 1
        return x, tuple(kept)

    def _layer_context(
        self, context: Context, i: int, inputs: jax.Array | None, prompts: Cache | None, kept: Sequence[LayerCache]
    ) -> Context:
        """Return the context of layer i, with its own prefix, shared keys and per-layer embedding."""
        source = self.config.kv_source(i)
        return context.replace(
            prefix=None if prompts is None else prompts[source],
            shared=None if source == i else kept[source],
            layer_input=None if inputs is None else inputs[..., i, :],
        )

    def _only_reads(self) -> bool:
        """Return whether layers read variables and write router logits at most: no initialization, no dropout."""
        writes = self.is_initializing() or any(map(self.is_mutable_collection, ("params", "intermediates")))
        return not writes and not self.has_rng("dropout")

    def _written(self) -> tuple[str, ...]:
        """Return the collections that layers write even if `_only_reads`."""
        return ("router",) if self.is_mutable_collection("router") else ()

    def _layer(self, i: int, x: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
        """Apply layer i by a function that JAX traces once per kind of layer: most of the start-up time."""
        layer = self.layers[i]
        if not self._only_reads():
            return layer(x, context)
        result, written = apply_alone(layer, self._written(), layer.variables, x, context)
        self._sow(written)
        return result

    def _sow(self, written: Params) -> None:
        """Sow router logits of layers that were applied alone."""
        for logits in jax.tree.leaves(written):
            self.sow("router", "logits", logits)

    def _loop(
        self,
        first: int,
        period: int,
        times: int,
        x: jax.Array,
        context: Context,
        inputs: jax.Array | None,
        prompts: Cache | None,
        before: Sequence[LayerCache],
    ) -> tuple[jax.Array, list[LayerCache]]:
        """Apply `times` × `period` layers from the `first` on as one loop, whose body is compiled once.

        Their weights are stacked in the compute dtype: a copy of them while the program runs.
        """
        layers = [self.layers[first + j].clone(parent=None, name=None) for j in range(period)]

        def variables_of(i: int) -> tuple[Params, LayerCache | None, jax.Array | None]:
            here = self._layer_context(context, i, inputs, prompts, before)
            own = here.prefix if here.shared is None else None
            return self._cast(self.layers[i].variables), own, here.layer_input

        def body(x: jax.Array, stacked: Sequence[tuple[Params, LayerCache | None, jax.Array | None]]) -> Params:
            own, logits = [], []
            for j, (layer, (variables, prefix, layer_input)) in enumerate(zip(layers, stacked, strict=True)):
                # Layers of one kind that share keys and values use the same source layer.
                here = self._layer_context(context, first + j, None, prompts, before).replace(layer_input=layer_input)
                here = here if prefix is None else here.replace(prefix=prefix)
                (x, kept), written = layer.apply(variables, x, here, mutable=self._written())
                own.append(kept)
                logits.append(written)
            return x, (own, logits)

        numbers = [range(first + j, first + period * times, period) for j in range(period)]
        parts = [jax.tree.map(lambda *x: jnp.stack(x), *map(variables_of, some)) for some in numbers]
        x, (own, logits) = jax.lax.scan(body, x, parts)
        self._sow([[stacked[r] for r in range(times)] for stacked in jax.tree.leaves(logits)])
        return x, [jax.tree.map(lambda x, r=r: x[r], kept) for r in range(times) for kept in own]

    def _cast(self, variables: Params) -> Params:
        """Return the variables of a layer with the kernels in the compute dtype."""
        dtype = jnp.dtype(self.config.dtype)

        def cast(path: tuple[object, ...], x: jax.Array) -> jax.Array:
            return x.astype(dtype) if getattr(path[-1], "key", None) == "kernel" else x

        return jax.tree_util.tree_map_with_path(cast, variables)

    def prefill(self, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Prefix]:
        """Read the prompts once: hidden state [B, D] of each one's last token, and the `Prefix` for its completions."""
        hidden, kept = self.hidden(tokens[:, None], last=lengths - 1)

        def transposed(layer: LayerCache) -> LayerCache:
            if isinstance(layer, RecurrentState) or not layer:
                return jax.tree.map(lambda x: x[:, :, 0], layer)
            keys, values = layer
            return keys[:, :, 0].swapaxes(-1, -2), values[:, :, 0]

        return hidden[:, 0, 0], Prefix(tuple(map(transposed, kept)), lengths)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of hidden states [..., D]."""
        return self._cap(self.embed_tokens.attend(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden))

    def unembed_columns(self, hidden: jax.Array) -> jax.Array:
        """Logits [V, N] float32 of hidden states [N, D], where the head is the embedding."""
        if self.embed_tokens.held is not None:
            return self._cap(self.embed_tokens.attend(hidden).T)
        table = self.embed_tokens.embedding.astype(hidden.dtype)
        if self.config.uses_float32_sums:
            return self._cap(dot_float32(table, hidden, (1, 1)))
        return self._cap(jnp.matmul(table, hidden.T, preferred_element_type=jnp.float32))

    def _cap(self, logits: jax.Array) -> jax.Array:
        cap, scale = self.config.logit_soft_cap, self.config.logit_scale
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def constrain_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Constrain activations [B, ...] to be cut along their rows only.

    After a lookup in an embedding that is cut along D, XLA's partitioner may otherwise leave them cut along D: every
    device then has a part of all rows.
    """
    if mesh is None:
        return x
    axes = axes_that_cut(x.shape[0], mesh, "data", "fsdp")
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(axes) if axes else PartitionSpec()))


def repeats(kinds: Sequence[LayerKind]) -> tuple[int, int]:
    """Return the pattern whose repetitions cover most of the first layers, as (layers of the pattern, repetitions)."""
    best = (1, 1)
    for period in range(1, len(kinds) // 2 + 1):
        times = 1
        while kinds[times * period : (times + 1) * period] == kinds[:period]:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = period, times
    return best


def projections(params: Params) -> Iterator[tuple[tuple[str, ...], Params]]:
    """Return (path, kernel) of every matrix product of a tree of params."""
    return ((path[:-1], leaf) for path, leaf in flatten_dict(params).items() if path[-1] == "kernel")


def kernels_by_columns(params: Params, dtype: DTypeLike) -> Params:
    """Return the collection "columns" of a tree of params: each projection's kernel [in, out] as [out, in], in `dtype`.

    Quantized kernels are left out: a copy of them would take the memory that quantization saves.
    """
    kernels = ((at, x) for at, x in projections(params) if not isinstance(x, Quantized))
    return unflatten_dict({(*at, "kernel"): x.astype(dtype).T for at, x in kernels})


def count_parameters(params: Params) -> int:
    """Return the number of scalars in a tree of params."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
