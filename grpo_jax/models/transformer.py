"""One Flax decoder, by configuration.

Sequences stand for themselves, or continue a prompt of which they share what was kept (`attention.Prefix`). Layers are
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
import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.models.attention import Cache, Prefix, Segments, see
from grpo_jax.models.block import Context, Layer
from grpo_jax.models.cache import State, slots_of
from grpo_jax.models.layers import LayerKind, Linear, RMSNorm, TransformerConfig
from grpo_jax.models.matmul import matmul_transposed
from grpo_jax.models.quantized import Quantized, matmul_quantized, quantized_kernel
from grpo_jax.models.rope import check_rope_length, query_growth, rope_table
from grpo_jax.models.sight import How, implementation


@functools.partial(jax.jit, static_argnums=0)
def _apply_layer(layer, variables, x, context):
    return layer.apply(variables, x, context)


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
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        if self.held is not None:
            return matmul_quantized(x, self.held, jnp.float32).reshape(*shape[:-1], -1)
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
          prefix: what is kept of the prompts; None where the tokens stand for themselves.
          cache: what is kept of the completions, with S slots, of which 0..index-1 are filled; None where tokens are
            all there is.
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
        ropes = [rope for rope in (c.rope, c.local_rope) if rope is not None]
        if prefix is not None or cache is not None:
            longest += 0 if prefix is None else slots_of(prefix.layers)
            for rope in ropes:
                check_rope_length(rope, longest)
        tables = tuple(rope_table(positions, rope, c.head_dim, longest) for rope in ropes)
        sight, chosen = None, implementation(c.attention)
        if cache is None and chosen != "einsum":
            how = How.of(chosen, c.head_dim)
            windows, group = {kind.window for kind in c.layer_kinds}, c.num_heads // c.num_kv_heads
            sight = see((b, g, t), prefix, segments, how, windows=windows, group=group)
        present = write if c.mixers is not None else None
        if c.mixers is not None and last is not None:
            present = (jnp.arange(t)[None] <= last[:, None])[:, None]
        where: dict[str, Any] = {"index": index, "start": start, "write": write, "segments": segments}
        growth = query_growth(positions, c.rope)
        context = Context(tables, growth, **where, present=present, sight=sight)
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
        only = lambda x: x[:, :, 0]
        turned = lambda k, v: (only(k).swapaxes(-1, -2), only(v))
        layers = (jax.tree.map(only, kept) if isinstance(kept, State) else turned(*kept) for kept in own)
        return hidden[:, 0, 0], Prefix(tuple(layers), lengths)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of hidden states [..., D]."""
        return self._cap(self.embed_tokens.attend(hidden) if self.config.tie_word_embeddings else self.lm_head(hidden))

    def unembed_columns(self, hidden: jax.Array) -> jax.Array:
        """Logits [V, N] float32 of hidden states [N, D], where the head is the embedding."""
        if self.embed_tokens.held is not None:
            return self._cap(self.embed_tokens.attend(hidden).T)
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
