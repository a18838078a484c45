"""One Flax decoder, by configuration.

Sequences stand for themselves, or continue a prompt of which they share what was kept (`attention.Prefix`). Layers are
separate subtrees and unrolled: their names map one to one to Hugging Face's, and no step has to slice weights out of a
stack. Softmax, norms and logits are float32 whatever the compute dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from grpo_jax.models.attention import Cache, Prefix, Segments, see
from grpo_jax.models.block import Layer, apply_alone
from grpo_jax.models.cache import State, slots_of
from grpo_jax.models.context import Context
from grpo_jax.models.layers import LayerKind, Linear, RMSNorm, TransformerConfig
from grpo_jax.models.matmul import matmul_transposed, wide_sums
from grpo_jax.models.quantized import Quantized, matmul_quantized, quantized_kernel
from grpo_jax.models.rope import check_rope_length, query_growth, rope_table
from grpo_jax.models.sight import Kernel, Sight, implementation


class Embedding(nn.Module):
    """Rows of a table, and by the same table the output head where the two are tied."""

    config: TransformerConfig

    def setup(self):
        c = self.config
        self.held = quantized_kernel(self, "embedding")
        if self.held is None:
            self.embedding = self.param(
                "embedding", nn.initializers.normal(c.initializer_range), (c.vocab_size, c.hidden_size)
            )

    def __call__(self, tokens):
        c = self.config
        if self.held is not None:
            return self._scaled(self.held.take(tokens, c.dtype))
        # On a mesh without a mask for ids beyond the vocabulary, which the devices would have to exchange.
        mode = "fill" if c.mesh is None else "clip"
        return self._scaled(jnp.take(self.embedding, tokens, axis=0, mode=mode).astype(c.dtype))

    def _scaled(self, x):
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def attend(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        wide = self.config.asks_for_wide_sums
        if self.held is not None:
            return matmul_quantized(x, self.held, jnp.float32, wide).reshape(*shape[:-1], -1)
        return matmul_transposed(x, self.embedding.astype(x.dtype), jnp.float32, wide).reshape(*shape[:-1], -1)


class Transformer(nn.Module):
    """A decoder-only language model.

    `apply({"params": params}, tokens)` is the whole of it for most uses: [B, T] int32 right-padded tokens to [B, T, V]
    float32 logits, position t seeing tokens 0..t. `hidden`, `prefill` and `unembed` are its parts, for those who share
    a prompt among rows or want logits only where they need them; call them by `apply(..., method="prefill")`.

    Example:
      >>> import jax
      >>> model = Transformer(TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> tokens = jax.numpy.zeros((2, 5), "int32")
      >>> params = model.init(jax.random.key(0), tokens)["params"]
      >>> model.apply({"params": params}, tokens).shape
      (2, 5, 32)
    """

    config: TransformerConfig

    def setup(self):
        c = self.config
        layer = nn.remat(Layer, policy=jax.checkpoint_policies.nothing_saveable) if c.remat else Layer
        self.embed_tokens = Embedding(c)
        if c.layer_input_size:
            width, linear = c.num_layers * c.layer_input_size, functools.partial(Linear, use_bias=False)
            of_layers = dataclasses.replace(c, hidden_size=width, embedding_scale=c.layer_input_size**0.5)
            self.embed_tokens_per_layer = Embedding(of_layers)
            self.per_layer_model_projection = linear(width, dtype=jnp.dtype(c.dtype), stddev=c.initializer_range)
            self.per_layer_projection_norm = RMSNorm(c.rms_norm_eps, c.norm_offset)
        self.layers = [layer(c, kind) for kind in c.layer_kinds]
        self.norm = RMSNorm(c.rms_norm_eps, c.norm_offset)
        if not c.tie_word_embeddings:
            wide = c.asks_for_wide_sums
            self.lm_head = Linear(c.vocab_size, False, jnp.dtype(c.dtype), c.initializer_range, jnp.float32, wide)

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
          prefix: what is kept of the prompts; None where the tokens stand for themselves.
          cache: of the completions, S slots, of which 0..index-1 are filled; None where tokens are all there is.
          index: slot of the first token; the slots are a ring, from S on it is counted on.
          start: [B] int32, the slot in which the completions of each prompt begin, or [B, G] of each completion; None:
            the first.
          segments: those of tokens [A, 1, N], packed sequences; None: completions side by side.
          last: [B] int32, the only token whose hidden state is wanted, not in a packed sequence; None: all.
          write: [B, G, T] bool, which go into the cache, which has all its axes, and stand side by side; None: all.

        Returns:
          Hidden states [B, G, T, D], or [B, G, 1, D], after the last norm, and what is kept of these tokens: the new
          cache, or where there was none (keys, values) [B, H_kv, G, T, d] or a `State` of each layer, which a packed
          sequence has none of.
        """
        c = self.config
        b, g, t = tokens.shape
        chex.assert_equal_shape_prefix([tokens, *(x for x in (start, last, write) if x is not None)], 1)
        positions = jnp.broadcast_to(index + jnp.arange(t)[None], (b, t))
        if segments is not None and prefix is not None:
            lengths = jnp.take_along_axis(prefix.lengths.reshape(b, -1), segments.prompt, axis=1)
            positions = jnp.repeat(lengths, t // segments.prompt.shape[1], axis=1) + segments.position
        elif prefix is not None:
            positions = positions + prefix.lengths[:, None]
        if start is not None:
            positions = positions - start[:, None] if start.ndim == 1 else positions[:, None] - start[..., None]
        longest = slots_of(cache) if cache is not None else t if segments is None else segments.longest
        tables = self._tables(positions, longest, prefix, cached=prefix is not None or cache is not None)
        sight = None if cache is not None else self._sight((b, g, t), prefix, segments)
        present = write if c.mixers is not None else None
        if c.mixers is not None and last is not None:
            present = (jnp.arange(t)[None] <= last[:, None])[:, None]
        context = Context(
            tables,
            query_growth(positions, c.rope),
            index=index,
            start=start,
            write=write,
            segments=segments,
            last=last,
            present=present,
            sight=sight,
        )
        x = by_rows(self.embed_tokens(tokens), c.mesh)
        x, own = self._through(x, context, self._layer_inputs(tokens, x), prefix, cache)
        return self.norm(x), own

    def _tables(
        self, positions: jax.Array, longest: int, prefix: Prefix | None, *, cached: bool
    ) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Return the rotary tables of positions, for layers of full attention and for those with a window."""
        c = self.config
        ropes = [(c.rope, c.heads_of(LayerKind())[1]), (c.local_rope, c.head_dim)]
        used = [(rope, width) for rope, width in ropes if rope is not None]
        if cached:
            longest += 0 if prefix is None else slots_of(prefix.layers)
            for rope, _ in used:
                check_rope_length(rope, longest)
        return tuple(rope_table(positions, rope, width, longest) for rope, width in used)

    def _sight(self, tokens: tuple[int, int, int], prefix: Prefix | None, segments: Segments | None) -> Sight | None:
        """Return the tiles that tokens see which are read as a whole, by heads of each shape; None for "einsum"."""
        c, chosen, sight = self.config, implementation(self.config.attention), None
        if chosen == "einsum":
            return None
        for heads, width in dict.fromkeys(map(c.heads_of, c.layer_kinds)):
            windows = {kind.window for kind in c.layer_kinds if c.heads_of(kind) == (heads, width)}
            kernel = Kernel.of(chosen, width, c.dtype)
            found = see(tokens, prefix, segments, kernel, windows=windows, group=c.num_heads // heads)
            sight = found if sight is None else found.replace(tiles={**sight.tiles, **found.tiles})
        return sight

    def _layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
        """Return the per-layer embeddings [B, G, T, layers, ·] of tokens with embeddings x (Gemma 4), or None.

        (RMSNorm(W x / √D) + e) / √2, e from a table of its own.
        """
        c = self.config
        if not c.layer_input_size:
            return None
        shape = (*tokens.shape, c.num_layers, c.layer_input_size)
        projected = self.per_layer_model_projection(x) * jnp.asarray(c.hidden_size**-0.5, x.dtype)
        own = by_rows(self.embed_tokens_per_layer(tokens), c.mesh)
        both = self.per_layer_projection_norm(projected.reshape(shape)) + own.reshape(shape)
        return both * jnp.asarray(2.0**-0.5, x.dtype)

    def _through(
        self, x: jax.Array, context: Context, inputs: jax.Array | None, prefix: Prefix | None, cache: Cache | None
    ) -> tuple[jax.Array, Cache]:
        """Apply all layers: return the state after the last one, and each one's keys and values (or state)."""
        c, last, i, own = self.config, context.last, 0, list[Any]()
        # After the last layer with keys and values of its own, only token `last` is looked at: there the others give
        # keys and values, and no more. That layer is then unlike those before it.
        narrow = c.num_layers - c.shared_kv_layers - 1
        looped = c.loop_layers and cache is None and self._only_reads()
        while i < c.num_layers:
            stop = narrow if last is not None and i <= narrow else c.num_layers
            period, times = repeats(c.layer_kinds[i:stop]) if looped else (1, 1)
            here = context if last is None or i == narrow else context.replace(last=None)
            if times > 1:
                x, more = self._loop(i, period, times, x, here, inputs, prefix, own)
                own, i = own + more, i + period * times
                continue
            here = self._beside(here, i, inputs, prefix, own).replace(cache=None if cache is None else cache[i])
            x, kept = self._layer(i, x, here if here.last is None else here.replace(sight=None))
            own.append(kept)
            if last is not None and i == narrow < c.num_layers - 1:
                inputs = None if inputs is None else context.pick(inputs)
                context, last = context.of_last().replace(sight=None, present=None), None
            i += 1
        return x, tuple(own)

    def _beside(
        self, context: Context, i: int, inputs: jax.Array | None, prefix: Prefix | None, own: list[Any]
    ) -> Context:
        """Return the context of layer i, with its own prefix, shared keys and per-layer embedding."""
        source = self.config.kv_source(i)
        return context.replace(
            prefix=None if prefix is None else (*prefix.layers[source], prefix.lengths),
            shared=None if source == i else own[source],
            layer_input=None if inputs is None else inputs[..., i, :],
        )

    def _only_reads(self) -> bool:
        """Return whether layers read variables and write router logits at most: no initialization, no dropout."""
        writes = self.is_initializing() or any(map(self.is_mutable_collection, ("params", "intermediates")))
        return not writes and not self.has_rng("dropout")

    def _written(self) -> tuple[str, ...]:
        """Return the collections that layers write which otherwise only read."""
        return ("router",) if self.is_mutable_collection("router") else ()

    def _layer(self, i: int, x: jax.Array, context: Context) -> tuple[jax.Array, Any]:
        """Apply layer i by a function that JAX traces once for all layers of its kind: most of the time of a start."""
        layer = self.layers[i]
        if not self._only_reads():
            return layer(x, context)
        result, written = apply_alone(layer, self._written(), layer.variables, x, context)
        self._sow(written)
        return result

    def _sow(self, written: Any) -> None:
        """Sow router logits that layers wrote when they were applied by themselves."""
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
        prefix: Prefix | None,
        before: list[Any],
    ) -> tuple[jax.Array, list[Any]]:
        """Apply `times` × `period` layers from the `first` on as one loop, whose body is compiled once.

        Their weights are put together for it, in the compute dtype: a copy of them while the program runs.
        """
        layers = [self.layers[first + j].clone(parent=None, name=None) for j in range(period)]

        def of(i: int) -> Any:
            here = self._beside(context, i, inputs, prefix, before)
            own = here.prefix if here.shared is None else None
            return self._cast(self.layers[i].variables), None if own is None else own[:2], here.layer_input

        def body(x: jax.Array, stacked: list[Any]) -> tuple[jax.Array, tuple[list[Any], list[Any]]]:
            own, logits = [], []
            for j, (layer, (variables, prompts, layer_input)) in enumerate(zip(layers, stacked, strict=True)):
                # Layers of one kind without keys and values of their own are over those of one layer.
                here = self._beside(context, first + j, None, prefix, before).replace(layer_input=layer_input)
                if prompts is not None and prefix is not None:
                    here = here.replace(prefix=(*prompts, prefix.lengths))
                (x, kv), written = layer.apply(variables, x, here, mutable=self._written())
                own.append(kv)
                logits.append(written)
            return x, (own, logits)

        numbers = [range(first + j, first + period * times, period) for j in range(period)]
        parts = [jax.tree.map(lambda *x: jnp.stack(x), *map(of, some)) for some in numbers]
        x, (own, logits) = jax.lax.scan(body, x, parts)
        self._sow([[stacked[r] for r in range(times)] for stacked in jax.tree.leaves(logits)])
        return x, [jax.tree.map(lambda x, r=r: x[r], kv) for r in range(times) for kv in own]

    def _cast(self, variables: Any) -> Any:
        """Return the variables of a layer with the kernels in the compute dtype."""
        dtype = jnp.dtype(self.config.dtype)

        def cast(path: Any, x: jax.Array) -> jax.Array:
            return x.astype(dtype) if getattr(path[-1], "key", None) == "kernel" else x

        return jax.tree_util.tree_map_with_path(cast, variables)

    def prefill(self, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Prefix]:
        """Read the prompts once: hidden state [B, D] of each one's last token, and the `Prefix` for its completions."""
        hidden, own = self.hidden(tokens[:, None], last=lengths - 1)

        def only(x: jax.Array) -> jax.Array:
            return x[:, :, 0]

        def turned(kept: Any) -> Any:
            if isinstance(kept, State) or not kept:
                return jax.tree.map(only, kept)
            return only(kept[0]).swapaxes(-1, -2), only(kept[1])

        return hidden[:, 0, 0], Prefix(tuple(map(turned, own)), lengths)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of hidden states [..., D]."""
        return self._cap(self.embed_tokens.attend(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden))

    def unembed_columns(self, hidden: jax.Array) -> jax.Array:
        """Logits [V, N] float32 of hidden states [N, D], where the head is the embedding."""
        if self.embed_tokens.held is not None:
            return self._cap(self.embed_tokens.attend(hidden).T)
        table = self.embed_tokens.embedding.astype(hidden.dtype)
        if self.config.asks_for_wide_sums:
            return self._cap(wide_sums(table, hidden, (1, 1)))
        return self._cap(jnp.matmul(table, hidden.T, preferred_element_type=jnp.float32))

    def _cap(self, logits: jax.Array) -> jax.Array:
        cap, scale = self.config.logit_soft_cap, self.config.logit_scale
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def by_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Activations [B, ...] cut by their rows alone, of which each device has its own.

    Said where they begin: after a lookup in an embedding that is cut along D, XLA's partitioner may as well leave them
    cut along D, and every device then has a part of the rows of all.
    """
    if mesh is None:
        return x
    axes = tuple(name for name in ("data", "fsdp") if name in mesh.shape)
    whole = x.shape[0] % math.prod(mesh.shape[name] for name in axes) > 0
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec() if whole else PartitionSpec(axes)))


def repeats(kinds: Sequence[LayerKind]) -> tuple[int, int]:
    """The longest pattern that layers begin with again and again, as (layers of the pattern, how often)."""
    best = (1, 1)
    for period in range(1, len(kinds) // 2 + 1):
        times = 1
        while kinds[times * period : (times + 1) * period] == kinds[:period]:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = period, times
    return best


def projections(params: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, kernel) of every matrix product of a tree of parameters."""
    return ((path[:-1], leaf) for path, leaf in flatten_dict(params).items() if path[-1] == "kernel")


def kernels_by_columns(params: Any, dtype: DTypeLike) -> Any:
    """The collection "columns" of a tree of parameters: each projection's kernel [in, out] as [out, in], in `dtype`.

    Quantized kernels are left out: a copy of them would be the model that they save.
    """
    kernels = ((at, x) for at, x in projections(params) if not isinstance(x, Quantized))
    return unflatten_dict({(*at, "kernel"): x.astype(dtype).T for at, x in kernels})


def count_parameters(params: Any) -> int:
    """Number of scalars in a tree of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
