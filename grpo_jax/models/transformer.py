"""One Flax decoder, by configuration.

Sequences stand for themselves, or continue a prompt whose keys and values they share (`attention.Prefix`). Layers are
separate subtrees and unrolled: their names map one to one to Hugging Face's, and no step has to slice weights out of a
stack. Softmax, norms and logits are float32 whatever the compute dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.models.attention import Cache, Prefix, Segments, attend, group_attention, packed_attention, see
from grpo_jax.models.experts import MixtureOfExperts
from grpo_jax.models.layers import ACTIVATIONS, LayerKind, Linear, RMSNorm, TransformerConfig
from grpo_jax.models.matmul import matmul_transposed
from grpo_jax.models.quantized import Quantized
from grpo_jax.models.rope import check_rope_length, query_growth, rope_table, rotate
from grpo_jax.models.sight import How, Sight, implementation


class Context(flax.struct.PyTreeNode):
    """What a layer's tokens stand in: where they are, and what they see beside themselves. Fields as in `hidden`.

    Attributes:
      tables: (cos, sin) of the tokens' positions for each rotary embedding of the decoder.
      growth: [B, G or 1, T, 1, 1] factor on the queries, or None.
      prefix: keys, values and lengths of the prompts in this layer, or None.
      cache: own keys and values of this layer, or None.
      index: slot of the first token.
      start: [B] slot in which the completions of each prompt begin, or [B, G] of each completion; or None.
      write: [B, G, T] whose keys and values go into the cache; None: all.
      segments: of a packed sequence, or None.
      last: [B] the only token whose state is wanted, or None.
      sight: what they see, for a fused attention; None for scores that are written out.
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
    sight: Sight | None = None

    def pick(self, x: jax.Array) -> jax.Array:
        """Token `last` [B] of x [B, G, T, ...], as [B, G, 1, ...]; all tokens where it is None."""
        if self.last is None:
            return x
        return jnp.take_along_axis(x, self.last.reshape(-1, *[1] * (x.ndim - 1)), axis=2)


class Attention(nn.Module):
    """Projections, rotary embedding and attention of one layer."""

    config: TransformerConfig
    kind: LayerKind

    @nn.compact
    def __call__(self, x, context):
        c, window, last = self.config, self.kind.window, context.last
        b, g, t, _ = x.shape
        n = t if last is None else 1
        h, r, d = c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim

        def linear(name, features, bias):
            return Linear(features, bias, jnp.dtype(c.dtype), c.initializer_range, name=name)

        def norm(name):
            return RMSNorm(c.rms_norm_eps, c.norm_offset, name=name)

        q = linear("q_proj", h * r * d, c.qkv_bias)(context.pick(x))
        k = linear("k_proj", h * d, c.qkv_bias)(x)
        v = linear("v_proj", h * d, c.qkv_bias)(x).reshape(b, g, t, h, d)
        if c.qk_norm == "flat":
            q, k = norm("q_norm")(q), norm("k_norm")(k)
        q, k = q.reshape(b, g, n, h * r, d), k.reshape(b, g, t, h, d)
        if c.qk_norm == "head":
            q, k = norm("q_norm")(q), norm("k_norm")(k)
        q, k = self._turn(q, k, context)
        # Heads before rows: both score products below are then plain batched matrix products, without a transpose.
        q = q.reshape(b, g, n, h, r, d).transpose(0, 3, 1, 2, 4, 5)
        k, v = k.transpose(0, 3, 1, 2, 4), v.transpose(0, 3, 1, 2, 4)
        keys = k.swapaxes(-1, -2)
        if context.cache is not None:
            own_keys, own_values = context.cache
            like = own_keys.shape[:-2]
            keys, v = keys.reshape(*like, d, t).astype(own_keys.dtype), v.reshape(*like, t, d).astype(own_values.dtype)
            slot = context.index % own_values.shape[-2]
            if context.write is not None:
                write = context.write.reshape(b, 1, g, t, 1)
                keys = jnp.where(write.swapaxes(-1, -2), keys, jax.lax.dynamic_slice_in_dim(own_keys, slot, t, axis=-1))
                v = jnp.where(write, v, jax.lax.dynamic_slice_in_dim(own_values, slot, t, axis=-2))
            k = keys = jax.lax.dynamic_update_slice_in_dim(own_keys, keys, slot, axis=-1)
            v = jax.lax.dynamic_update_slice_in_dim(own_values, v, slot, axis=-2)
        scale = d**-0.5 if c.query_scale is None else c.query_scale
        how: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": c.attention_soft_cap}
        sinks = None
        if c.attention_sinks:
            init = nn.initializers.normal(c.initializer_range)
            sinks = self.param("sinks", init, (h * r,)).astype(jnp.float32).reshape(h, r)
        if context.sight is not None:
            fused = How.of(implementation(c.attention), d)._replace(**how)
            y = attend(q, k, v, context.prefix, context.sight, fused, c.mesh, sinks)
        elif context.segments is None:
            index = context.index if last is None else context.index + last
            y = group_attention(q, keys, v, context.prefix, index=index, start=context.start, sinks=sinks, **how)
        else:
            y = packed_attention(q, k, v, context.prefix, context.segments, sinks=sinks, **how)
        y = y.transpose(0, 2, 3, 1, 4, 5).reshape(b, g, n, h * r * d)
        return linear("o_proj", c.hidden_size, c.o_bias)(y), (k, v)

    def _turn(self, q, k, context):
        """Queries and keys at their positions."""
        local = None if self.kind.window is None else self.config.local_rope
        rope, table = (self.config.rope, context.tables[0]) if local is None else (local, context.tables[1])
        if self.kind.rotary:
            turn = functools.partial(rotate, pairs=rope.pairs)
            q, k = turn(q, (context.pick(table[0]), context.pick(table[1]))), turn(k, table)
        return q if context.growth is None else q * context.pick(context.growth).astype(q.dtype), k


class MLP(nn.Module):
    """down(act(gate x) · up x) (Shazeer 2020, GLU variants)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x):
        c = self.config

        def linear(name, features):
            return Linear(features, c.mlp_bias, jnp.dtype(c.dtype), c.initializer_range, name=name)

        gate, up = (linear(name, c.intermediate_size)(x) for name in ("gate_proj", "up_proj"))
        gated = lambda gate, up: ACTIVATIONS[c.activation](gate) * up
        # What lies between the products is cheaper to make again in the backward pass than to write and to keep.
        return linear("down_proj", c.hidden_size)(jax.checkpoint(gated)(gate, up))


class Layer(nn.Module):
    """x + attention, x + MLP, with the norms where `config.norms` puts them. Norms carry Hugging Face's names.

    With `context.last` [B], only the state of that token is computed, beside the keys and values of all.
    """

    config: TransformerConfig
    kind: LayerKind

    @nn.compact
    def __call__(self, x, context):
        c = self.config

        def norm(name):
            return RMSNorm(c.rms_norm_eps, c.norm_offset, name=name)

        def add(x, y):
            return x + (y if c.residual_scale == 1.0 else y * c.residual_scale)

        attention = Attention(c, self.kind, name="self_attn")
        mlp = MixtureOfExperts(c, name="mlp") if self.kind.sparse else MLP(c, name="mlp")
        if c.norms == "pre":
            y, kv = attention(norm("input_layernorm")(x), context)
            x = add(context.pick(x), y)
            return add(x, mlp(norm("post_attention_layernorm")(x))), kv
        if c.norms == "sandwich":
            y, kv = attention(norm("input_layernorm")(x), context)
            x = add(context.pick(x), norm("post_attention_layernorm")(y))
            y = mlp(norm("pre_feedforward_layernorm")(x))
            return add(x, norm("post_feedforward_layernorm")(y)), kv
        y, kv = attention(x, context)
        x = add(context.pick(x), norm("post_attention_layernorm")(y))
        return add(x, norm("post_feedforward_layernorm")(mlp(x))), kv


@functools.partial(jax.jit, static_argnums=0)
def _apply_layer(layer, variables, x, context):
    return layer.apply(variables, x, context)


class Embedding(nn.Module):
    """Rows of a table, and by the same table the output head where the two are tied."""

    config: TransformerConfig

    def setup(self):
        c = self.config
        self.embedding = self.param(
            "embedding", nn.initializers.normal(c.initializer_range), (c.vocab_size, c.hidden_size)
        )

    def __call__(self, tokens):
        c = self.config
        # On a mesh without a mask for ids beyond the vocabulary, which the devices would have to exchange.
        mode = "fill" if c.mesh is None else "clip"
        x = jnp.take(self.embedding, tokens, axis=0, mode=mode).astype(c.dtype)
        return x if c.embedding_scale == 1.0 else x * jnp.asarray(c.embedding_scale, x.dtype)

    def attend(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        return matmul_transposed(x, self.embedding.astype(x.dtype), jnp.float32).reshape(*shape[:-1], -1)


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
        layer = nn.remat(Layer, policy=getattr(jax.checkpoint_policies, c.remat_policy)) if c.remat else Layer
        self.embed_tokens = Embedding(c)
        self.layers = [layer(c, kind) for kind in c.layer_kinds]
        self.norm = RMSNorm(c.rms_norm_eps, c.norm_offset)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.vocab_size, False, jnp.dtype(c.dtype), c.initializer_range, jnp.float32)

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
          prefix: the prompts' keys and values; None where the tokens stand for themselves.
          cache: own keys and values with S slots, of which 0..index-1 are filled; None where tokens are all there is.
          index: slot of the first token; the slots are a ring, from S on it is counted on.
          start: [B] int32, the slot in which the completions of each prompt begin, or [B, G] of each completion; None:
            the first.
          segments: those of tokens [A, 1, N], packed sequences; None: completions side by side.
          last: [B] int32, the only token whose hidden state is wanted, not in a packed sequence; None: all.
          write: [B, G, T] bool, whose keys and values go into the cache, which has all its axes; None: all.

        Returns:
          Hidden states [B, G, T, D], or [B, G, 1, D], after the last norm, and the own keys and values: the cache with
          the new ones written, or both [B, H_kv, G, T, d] where there was none.
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
        longest = cache[0][1].shape[-2] if cache is not None else t if segments is None else segments.longest
        ropes = [rope for rope in (c.rope, c.local_rope) if rope is not None]
        if prefix is not None or cache is not None:
            longest += 0 if prefix is None else prefix.layers[0][1].shape[2]
            for rope in ropes:
                check_rope_length(rope, longest)
        tables = tuple(rope_table(positions, rope, c.head_dim, longest) for rope in ropes)
        sight, chosen = None, implementation(c.attention)
        if cache is None and chosen != "einsum":
            how = How.of(chosen, c.head_dim)
            windows, group = {kind.window for kind in c.layer_kinds}, c.num_heads // c.num_kv_heads
            sight = see((b, g, t), prefix, segments, how, windows=windows, group=group)
        growth = query_growth(positions, c.rope)
        context = Context(tables, growth, index=index, start=start, write=write, segments=segments, sight=sight)
        x, own, i = by_rows(self.embed_tokens(tokens), c.mesh), list[Any](), 0
        while i < c.num_layers:
            looped = c.loop_layers and cache is None and self._only_reads()
            # With `last`, the last layer is unlike the others.
            period, times = repeats(c.layer_kinds[i : c.num_layers - (last is not None)]) if looped else (1, 1)
            if times > 1:
                x, more = self._loop(i, period, times, x, context, prefix)
                own, i = own + more, i + period * times
                continue
            here = context.replace(
                prefix=None if prefix is None else (*prefix.layers[i], prefix.lengths),
                cache=None if cache is None else cache[i],
                # Nothing comes after the last layer: there the other tokens give keys and values, and no more.
                last=last if i == c.num_layers - 1 else None,
                sight=sight if last is None or i < c.num_layers - 1 else None,
            )
            x, kv = self._layer(i)(x, here)
            own.append(kv)
            i += 1
        return self.norm(x), tuple(own)

    def _only_reads(self) -> bool:
        """Whether layers do no more than read their variables: no initialization, no dropout, no collection written."""
        writes = self.is_initializing() or any(map(self.is_mutable_collection, ("params", "router", "intermediates")))
        return not writes and not self.has_rng("dropout")

    def _layer(self, i: int) -> Callable[..., Any]:
        """Layer i, as a function that JAX traces once for all layers of its kind: most of the time of a start."""
        layer = self.layers[i]
        if not self._only_reads():
            return layer
        # Without its name and parent, a layer equals all others of its kind.
        return functools.partial(_apply_layer, layer.clone(parent=None, name=None), layer.variables)

    def _loop(
        self, first: int, period: int, times: int, x: jax.Array, context: Context, prefix: Prefix | None
    ) -> tuple[jax.Array, list[Any]]:
        """`times` × `period` layers from the `first` on as one loop, whose body is compiled once.

        Their weights are put together for it, in the compute dtype: a copy of them while the program runs.
        """
        layers = [self.layers[first + j].clone(parent=None, name=None) for j in range(period)]

        def of(i: int) -> Any:
            return self._cast(self.layers[i].variables), None if prefix is None else prefix.layers[i]

        def body(x: jax.Array, given: list[Any]) -> tuple[jax.Array, list[Any]]:
            own = []
            for layer, (variables, prompts) in zip(layers, given, strict=True):
                here = context.replace(prefix=None if prefix is None else (*prompts, prefix.lengths))
                x, kv = layer.apply(variables, x, here)
                own.append(kv)
            return x, own

        numbers = [range(first + j, first + period * times, period) for j in range(period)]
        given = [jax.tree.map(lambda *x: jnp.stack(x), *map(of, some)) for some in numbers]
        x, own = jax.lax.scan(body, x, given)
        return x, [jax.tree.map(lambda x, r=r: x[r], kv) for r in range(times) for kv in own]

    def _cast(self, variables: Any) -> Any:
        """Variables of a layer with the kernels as its products take them."""
        dtype = jnp.dtype(self.config.dtype)
        cast = lambda path, x: x.astype(dtype) if getattr(path[-1], "key", None) == "kernel" else x
        return jax.tree_util.tree_map_with_path(cast, variables)

    def prefill(self, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Prefix]:
        """Read the prompts once: hidden state [B, D] of each one's last token, and the `Prefix` for its completions."""
        hidden, own = self.hidden(tokens[:, None], last=lengths - 1)
        return hidden[:, 0, 0], Prefix(tuple((k[:, :, 0].swapaxes(-1, -2), v[:, :, 0]) for k, v in own), lengths)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of hidden states [..., D]."""
        return self._cap(self.embed_tokens.attend(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden))

    def unembed_columns(self, hidden: jax.Array) -> jax.Array:
        """Logits [V, N] float32 of hidden states [N, D], where the head is the embedding."""
        table = self.embed_tokens.embedding.astype(hidden.dtype)
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
    """The longest pattern that layers begin with again and again, as (layers of the pattern, how often).

    Example:
      >>> local, full = LayerKind(window=4), LayerKind()
      >>> repeats([full] * 5), repeats([local, local, full] * 2 + [local]), repeats([full, local, local])
      ((1, 5), (3, 2), (1, 1))
    """
    best = (1, 1)
    for period in range(1, len(kinds) // 2 + 1):
        times = 1
        while kinds[times * period : (times + 1) * period] == kinds[:period]:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = period, times
    return best


def empty_cache(config: TransformerConfig, batch: int, group: int, slots: int, dtype: Any = None) -> Cache:
    """Own keys and values for `slots` decode steps of [batch, group] completions, zeros."""
    heads, d = (batch, config.num_kv_heads, group), config.head_dim
    dtype = jnp.dtype(dtype or config.dtype)
    pair = lambda: (jnp.zeros((*heads, d, slots), dtype), jnp.zeros((*heads, slots, d), dtype))
    return tuple(pair() for _ in range(config.num_layers))


def projections(params: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, kernel) of every matrix product of a tree of parameters."""
    for name, node in params.items():
        if name == "kernel":
            yield path, node
        elif isinstance(node, dict):
            yield from projections(node, (*path, name))


def kernels_by_columns(params: Any) -> Any:
    """The collection "columns" of a tree of parameters: each projection's kernel [in, out] as [out, in].

    Quantized kernels are left out: a copy of them would be the model that they save.
    """
    plain = ((path, kernel) for path, kernel in projections(params) if not isinstance(kernel, Quantized))
    return unflatten_dict({(*path, "kernel"): kernel.T for path, kernel in plain})


def count_parameters(params: Any) -> int:
    """Number of scalars in a tree of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
