"""One Flax decoder for all model families.

Each layer has a separate subtree of params, so names map one to one to Hugging Face's, and weights need not be sliced
from a stack. Softmax, norms and logits are computed in float32 regardless of the compute dtype.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from grpo_jax.models.attention import make_tile_mask
from grpo_jax.models.attention_tiles import MASKED, Kernel, TileMask, attention_implementation, triton_or_tiles
from grpo_jax.models.block import Layer, apply_layer
from grpo_jax.models.config import LayerKind, TransformerConfig
from grpo_jax.models.context import Cache, Context, LayerCache, Prefix, RecurrentState, Segments, num_slots
from grpo_jax.models.layers import Embedding, Linear, Quantized, RMSNorm
from grpo_jax.models.matmul import matmul
from grpo_jax.models.rope import check_rope_length, positions_by_channel, query_factors, rope_table
from grpo_jax.models.sharding import constrain
from grpo_jax.models.splash import BITS
from grpo_jax.types import ImageTiles, Params, PromptImages, Prompts


class Transformer(nn.Module):
    """A decoder-only language model.

    `apply({"params": params}, tokens)` maps right-padded int32 tokens [B, T] to float32 logits [B, T, V]. Position t
    attends to tokens 0..t. To share a prompt among completions or compute only a few logits, call the methods `hidden`,
    `prefill` and `unembed` instead, for example with `apply(..., method="prefill")`.
    """

    config: TransformerConfig
    tower: nn.Module | None = None  # trainable vision tower, or None; its params are under the key "tower"

    def setup(self) -> None:
        c = self.config
        remat = c.remat and not c.remat_on_cpu
        layer = nn.remat(Layer, policy=jax.checkpoint_policies.nothing_saveable) if remat else Layer
        self.embed_tokens = Embedding(c)
        if c.layer_input_size:
            width = c.num_layers * c.layer_input_size
            per_layer = dataclasses.replace(c, hidden_size=width, embedding_scale=c.layer_input_size**0.5)
            self.embed_tokens_per_layer = Embedding(per_layer)
            self.per_layer_model_projection = Linear(width, False, jnp.dtype(c.dtype), c.initializer_range)
            self.per_layer_projection_norm = RMSNorm(c.rms_norm_eps, c.norm_offset)
        self.layers = [layer(c, kind) for kind in c.layer_kinds]
        self.norm = RMSNorm(c.rms_norm_eps, c.norm_offset)
        if not c.tie_word_embeddings:
            dtype, sums = jnp.dtype(c.dtype), c.uses_float32_sums
            self.lm_head = Linear(c.vocab_size, False, dtype, c.initializer_range, jnp.float32, sums)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Compute float32 logits [B, T, V] from tokens [B, T]."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have shape [B, T]; got {tokens.shape}.")
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
        images: PromptImages | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Compute hidden states [B, G, T, D] after the final norm for G completions per prompt, and the new cache.

        If `cache` is None, the new cache has (keys, values) [B, H_kv, G, T, d] or a `RecurrentState` for each layer,
        and () for layers that reuse keys and values and for recurrent layers in packed sequences.

        Args:
          tokens: [B, G, T] int32 tokens.
          prefix: cache for the prompts. If None, `tokens` are whole sequences.
          cache: cache for the completions, with S slots. Slots 0..index-1 are filled.
          index: slot of the first token. Slots form a ring: slot S + 2 is slot 2.
          start: [B, G] int32 slot of each completion's first token. Defaults to 0.
          segments: segments of packed sequences [A, 1, N].
          last: [B] int32 index of the only token whose state is returned, [B, G, 1, D]. Not supported with `segments`.
          write: [B, G, T] bool mask of contiguous tokens to cache. The cache must have three separate leading axes.
          images: images in the prompts. Requires whole prompts [B, 1, T], and features that are already encoded.
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
            positions = positions[:, None] - start[..., None]
        longest = num_slots(cache) if cache is not None else t if segments is None else segments.max_segment_length
        last_visible = None if images is None or not c.bidirectional_images else last_of_image(images.feature_index)
        by_axis = None if images is None else images.positions
        rotated = positions if by_axis is None else positions_by_channel(by_axis, c.rope)
        tables = self._tables(rotated, longest, prefix, cached=prefix is not None or cache is not None)
        # Fused attention has only causal masks, but an image's queries also attend to later keys of the image.
        fused = cache is None and last_visible is None
        tile_mask = self._tile_mask((b, g, t), prefix, segments) if fused else None
        present = write if c.mixers is not None else None
        if c.mixers is not None and last is not None:
            present = (jnp.arange(t)[None] <= last[:, None])[:, None]
        context = Context(
            tables,
            query_factors(positions, c.rope),
            lengths=None if prefix is None else prefix.lengths,
            index=index,
            start=start,
            write=write,
            segments=segments,
            last=last,
            present=present,
            tile_mask=tile_mask,
            last_visible=last_visible,
        )
        # If the embedding is sharded along D, XLA's partitioner may otherwise shard the activations along D too.
        x = constrain(self.embed_tokens(tokens), c.mesh)
        # Without this barrier, XLA would look up the tokens again in each operation that reads x.
        x = x if cache is not None else jax.lax.optimization_barrier(x)
        x = x if images is None else insert_features(x, images)
        prompts = None if prefix is None else prefix.layers
        x, new_cache = self._apply_layers(x, context, self._layer_inputs(tokens, x), prompts, cache)
        return self.norm(x), new_cache

    def _tables(
        self, positions: jax.Array, longest: int, prefix: Prefix | None, *, cached: bool
    ) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Build the rotary table for full attention and, with `local_rope`, a second one for layers with a window."""
        c = self.config
        ropes = [(c.rope, c.heads_of(LayerKind())[1])]
        if c.local_rope is not None:
            ropes.append((c.local_rope, c.head_dim))
        if cached:
            longest += 0 if prefix is None else num_slots(prefix.layers)
            for rope, _ in ropes:
                check_rope_length(rope, longest)
        return tuple(rope_table(positions, rope, width, longest) for rope, width in ropes)

    def _tile_mask(
        self, tokens: tuple[int, int, int], prefix: Prefix | None, segments: Segments | None
    ) -> TileMask | None:
        """Build the `TileMask` for all layers' windows, or return None if attention is "einsum"."""
        c, chosen = self.config, attention_implementation(self.config.attention)
        if chosen == "einsum":
            return None
        # In older versions of JAX, the splash kernels return the sinks' gradients in a different dtype than the sinks'.
        if chosen == "splash" and (segments is None or c.attention_sinks or tokens[2] > 1 << BITS):
            chosen = "tiles"
        if chosen == "mosaic" and not c.fits_mosaic:
            chosen = triton_or_tiles()
        masks = []
        for heads, width in dict.fromkeys(map(c.heads_of, c.layer_kinds)):
            windows = {kind.window for kind in c.layer_kinds if c.heads_of(kind) == (heads, width)}
            kernel, r = Kernel.of(chosen, width, c.dtype), c.num_heads // heads
            masks.append(make_tile_mask(tokens, prefix, segments, kernel, windows=windows, queries_per_kv=r))
        return masks[0].replace(tiles={window: tiles for mask in masks for window, tiles in mask.tiles.items()})

    def _layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
        """Return (RMSNorm(W x / √D) + e) / √2 [B, G, T, layers, ·] for per-layer embeddings e (Gemma 4), or None."""
        c = self.config
        if not c.layer_input_size:
            return None
        shape = (*tokens.shape, c.num_layers, c.layer_input_size)
        projected = self.per_layer_model_projection(x) * jnp.asarray(c.hidden_size**-0.5, x.dtype)
        embedded = constrain(self.embed_tokens_per_layer(tokens), c.mesh)
        total = self.per_layer_projection_norm(projected.reshape(shape)) + embedded.reshape(shape)
        return total * jnp.asarray(2.0**-0.5, x.dtype)

    def _apply_layers(
        self, x: jax.Array, context: Context, inputs: jax.Array | None, prompts: Cache | None, cache: Cache | None
    ) -> tuple[jax.Array, Cache]:
        """Apply all layers. Returns the hidden states after the last layer, and each layer's new cache."""
        c, last, i, caches = self.config, context.last, 0, list[LayerCache]()
        # The last layer that computes keys and values (`last_kv`) computes them for all tokens, but its output only for
        # token `last`. Therefore, it cannot be part of a loop with the layers before it.
        last_kv = c.num_layers - c.shared_kv_layers - 1
        looped = c.loop_layers and cache is None and self._is_pure()

        def context_of(i: int) -> Context:
            """Return `context` with the prefix, cache, shared keys and values, and per-layer embedding for layer i."""
            source = c.kv_source(i)
            return context.replace(
                prefix=None if prompts is None else prompts[source],
                cache=None if cache is None else cache[i],
                shared=None if source == i else caches[source],
                layer_input=None if inputs is None else inputs[..., i, :],
                last=last if i == last_kv else None,
            )

        while i < c.num_layers:
            stop = last_kv if last is not None and i <= last_kv else c.num_layers
            period, times = repeating_pattern(c.layer_kinds[i:stop]) if looped else (1, 1)
            if times > 1:
                x, loop_caches = self._loop(i, period, times, x, context_of)
                caches, i = caches + loop_caches, i + period * times
                continue
            ctx = context_of(i)
            x, layer_cache = self._layer(i, x, ctx if ctx.last is None else ctx.replace(tile_mask=None))
            caches.append(layer_cache)
            if ctx.last is not None and i < c.num_layers - 1:
                inputs = None if inputs is None else context.pick(inputs)
                context, last = context.of_last().replace(tile_mask=None, present=None), None
            i += 1
        return x, tuple(caches)

    def _is_pure(self) -> bool:
        """Return whether layers are pure, except for router logits. False during initialization and with dropout."""
        writes = self.is_initializing() or any(map(self.is_mutable_collection, ("params", "intermediates")))
        return not writes and not self.has_rng("dropout")

    def _written(self) -> tuple[str, ...]:
        """Return the names of the collections that layers write even if `_is_pure()` is True."""
        return ("router",) if self.is_mutable_collection("router") else ()

    def _sow(self, written: Params) -> None:
        """Sow the router logits from layers applied with `apply_layer` or in a loop."""
        for logits in jax.tree.leaves(written):
            self.sow("router", "logits", logits)

    def _layer(self, i: int, x: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
        """Apply layer i. Each kind of layer is traced only once, since tracing dominates the start-up time."""
        layer = self.layers[i]
        if not self._is_pure():
            return layer(x, context)
        # Without its name and parent, a layer compares equal to all layers of its kind.
        unbound = layer.clone(parent=None, name=None)
        variables = layer.variables
        if self.config.mesh is not None and context.cache is None:
            # Without this barrier, XLA would gather the sharded weights of all layers before the first layer, and
            # compute the gradients of all weights after the last layer, with the activations of all layers in memory.
            variables, x = jax.lax.optimization_barrier((variables, x))
        result, written = apply_layer(unbound, self._written(), variables, x, context)
        self._sow(written)
        return result

    def _loop(
        self, first: int, period: int, times: int, x: jax.Array, context_of: Callable[[int], Context]
    ) -> tuple[jax.Array, list[LayerCache]]:
        """Apply `times` × `period` layers, starting at layer `first`, in a `lax.scan` over their stacked weights."""
        layers = [self.layers[first + j].clone(parent=None, name=None) for j in range(period)]
        # Layers of the same kind that share keys and values have the same source layer.
        contexts = [context_of(first + j) for j in range(period)]

        def variables_of(i: int) -> tuple[Params, LayerCache | None, jax.Array | None]:
            ctx = context_of(i)
            return self._cast(self.layers[i].variables), ctx.prefix if ctx.shared is None else None, ctx.layer_input

        def body(x: jax.Array, stacked: Sequence[tuple[Params, LayerCache | None, jax.Array | None]]) -> Params:
            caches, logits = [], []
            for layer, ctx, (variables, prefix, layer_input) in zip(layers, contexts, stacked, strict=True):
                ctx = ctx.replace(layer_input=layer_input, prefix=ctx.prefix if prefix is None else prefix)
                (x, cache), written = layer.apply(variables, x, ctx, mutable=self._written())
                caches.append(cache)
                logits.append(written)
            return x, (caches, logits)

        indices = [range(first + j, first + period * times, period) for j in range(period)]
        parts = [jax.tree.map(lambda *x: jnp.stack(x), *map(variables_of, repeated)) for repeated in indices]
        x, (caches, logits) = jax.lax.scan(body, x, parts)
        self._sow([[stacked[r] for r in range(times)] for stacked in jax.tree.leaves(logits)])
        return x, [jax.tree.map(lambda x, r=r: x[r], cache) for r in range(times) for cache in caches]

    def _cast(self, variables: Params) -> Params:
        """Cast the kernels in a layer's variables to the compute dtype."""
        dtype = jnp.dtype(self.config.dtype)

        def cast(path: tuple[object, ...], x: jax.Array) -> jax.Array:
            return x.astype(dtype) if getattr(path[-1], "key", None) == "kernel" else x

        return jax.tree_util.tree_map_with_path(cast, variables)

    def prefill(self, prompts: Prompts) -> tuple[jax.Array, Prefix]:
        """Compute the hidden state [B, D] for each prompt's last token, and the prompts' `Prefix`."""
        images = prompts.images
        if images is not None and isinstance(images.features, ImageTiles):
            images = images.replace(features=self._encode(images.features))
        hidden, cache = self.hidden(prompts.tokens[:, None], last=prompts.lengths - 1, images=images)

        def prefix_of(layer: LayerCache) -> LayerCache:
            if isinstance(layer, RecurrentState) or not layer:
                return jax.tree.map(lambda x: x[:, :, 0], layer)
            keys, values = layer
            return keys[:, :, 0].swapaxes(-1, -2), values[:, :, 0]

        return hidden[:, 0, 0], Prefix(tuple(map(prefix_of, cache)), prompts.lengths)

    def _encode(self, tiles: ImageTiles) -> jax.Array:
        """Compute features [B, N, D] for the images in B prompts with the vision tower."""
        assert self.tower is not None, "image tiles are passed only to models with a tower"
        encode = nn.remat(operator.call) if self.config.remat else operator.call
        features = encode(self.tower, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tiles.inputs))
        features = features.reshape(len(tiles.feature_index), -1, features.shape[-1])
        return jnp.take_along_axis(features, tiles.feature_index[..., None], axis=1)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Compute float32 logits [..., V] for hidden states [..., D]."""
        return self._cap(self.embed_tokens.attend(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden))

    def unembed_columns(self, hidden: jax.Array) -> jax.Array:
        """Compute float32 logits for hidden states [N, D], transposed to [V, N]. Requires tied embeddings."""
        table, sums = self.embed_tokens.embedding.astype(hidden.dtype), self.config.uses_float32_sums
        return self._cap(matmul(table, hidden, jnp.float32, sums, transposed=True), axis=0)

    def _cap(self, logits: jax.Array, axis: int = -1) -> jax.Array:
        """Scale and cap logits, and mask the image token's logit. `axis` is the vocabulary axis."""
        cap, scale, image = self.config.logit_soft_cap, self.config.logit_scale, self.config.image_token_id
        logits = logits if scale == 1.0 else logits * scale
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        if image is None:
            return logits
        ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis % logits.ndim)
        return jnp.where(ids == image, MASKED, logits)


def insert_features(x: jax.Array, images: PromptImages) -> jax.Array:
    """Replace the embeddings of image tokens in x [B, 1, P, D] with image features."""
    assert not isinstance(images.features, ImageTiles), "images.features must be an array; `prefill` encodes tiles"
    features = jnp.take_along_axis(images.features, jnp.maximum(images.feature_index, 0)[..., None], axis=1)
    return jnp.where((images.feature_index >= 0)[:, None, :, None], features[:, None].astype(x.dtype), x)


def last_of_image(feature_index: jax.Array) -> jax.Array:
    """Return the index of the last token in each token's image, [B, P] int32. A text token's entry is its own index.

    Consecutive image tokens count as one image.

    Example:
      >>> last_of_image(jnp.array([[-1, 0, 1, -1, 2, -1]])).tolist()
      [[0, 2, 2, 3, 4, 5]]
    """
    index = jnp.broadcast_to(jnp.arange(feature_index.shape[1]), feature_index.shape)
    next_text = jax.lax.cummin(jnp.where(feature_index < 0, index, feature_index.shape[1]), axis=1, reverse=True)
    return jnp.where(feature_index < 0, index, next_text - 1)


def repeating_pattern(kinds: Sequence[LayerKind]) -> tuple[int, int]:
    """Return (length, repetitions) of the pattern that, repeated from the first layer on, covers the most layers."""
    best = (1, 1)
    for period in range(1, len(kinds) // 2 + 1):
        times = 1
        while kinds[times * period : (times + 1) * period] == kinds[:period]:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = period, times
    return best


def projections(params: Params) -> Iterator[tuple[tuple[str, ...], Params]]:
    """Iterate over the (path, kernel) pairs of all linear layers."""
    return ((path[:-1], leaf) for path, leaf in flatten_dict(params).items() if path[-1] == "kernel")


def kernels_by_columns(params: Params, dtype: DTypeLike) -> Params:
    """Build the "columns" collection: each kernel [in, out] transposed to [out, in], except quantized kernels."""
    kernels = ((path, x) for path, x in projections(params) if not isinstance(x, Quantized))
    return unflatten_dict({(*path, "kernel"): x.astype(dtype).T for path, x in kernels})
