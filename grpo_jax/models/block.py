"""A decoder layer: attention or a recurrent mixer, a dense MLP or a mixture of experts, and the norms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.models.attention import group_attention, packed_attention, tiled_attention
from grpo_jax.models.attention_tiles import Kernel, attention_implementation
from grpo_jax.models.config import LayerKind, TransformerConfig
from grpo_jax.models.context import Context, KeysValues, LayerCache
from grpo_jax.models.experts import Experts, MixtureOfExperts, ScaledRouter
from grpo_jax.models.fused_step import NormAndRope, has_step_kernel, step_attention
from grpo_jax.models.layers import ACTIVATIONS, MLP, linear, norm, tokens_of, unit_rms
from grpo_jax.models.recurrent import GatedDeltaNet, ShortConvolution
from grpo_jax.models.rope import Rope, rotate
from grpo_jax.types import Params

Result = TypeVar("Result")


class Attention(nn.Module):
    """Self-attention of a decoder layer, including the projections and the rotary embedding."""

    config: TransformerConfig
    kind: LayerKind

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
        """Return the output [B, G, T, D], or [B, G, 1, D] with `context.last`, and the layer's new cache.

        The new cache is () if the layer reuses another layer's keys and values.
        """
        c = self.config
        b, g, t, _ = x.shape
        n = t if context.last is None else 1
        h, d = c.heads_of(self.kind)
        q, k, v, gate = self._project(x, context)
        if n == 1 and self._has_step_kernel(context, b * h * g):
            y, new_cache = self._step(q, k, v, context)
        else:
            q, k = self._normalize_and_rotate(q, k, context)
            y, new_cache = self._attend(q, k, v, context)
        y = y.reshape(b, g, n, c.num_heads * d)
        if gate is not None:
            y = y * jax.nn.sigmoid(gate.reshape(y.shape))
        return linear(c, "o_proj", c.hidden_size, c.o_bias)(y), new_cache

    def _project(
        self, x: jax.Array, context: Context
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
        """Project x to queries [B, G, T, heads, d], keys, values and the gate. Arrays that the layer lacks are None."""
        c = self.config
        (h, d), (b, g, t, _) = c.heads_of(self.kind), x.shape
        gate = k = v = None
        q = linear(c, "q_proj", c.num_heads * d * (2 if c.attention_gate else 1), c.qkv_bias)(context.pick(x))
        if c.attention_gate:
            q, gate = jnp.split(q.reshape(b, g, -1, c.num_heads, 2 * d), 2, axis=-1)
        if not self.kind.shared_kv:
            k = v = linear(c, "k_proj", h * d, c.qkv_bias)(x)
            if not (c.values_are_keys and self.kind.window is None):
                v = linear(c, "v_proj", h * d, c.qkv_bias)(x)
            v = v.reshape(b, g, t, h, d)
            v = unit_rms(v, c.rms_norm_eps).astype(v.dtype) if c.v_norm else v
            k = norm(c, "k_norm")(k) if c.qk_norm == "flat" else k
            k = k.reshape(b, g, t, h, d)
        q = norm(c, "q_norm")(q) if c.qk_norm == "flat" else q
        return q.reshape(b, g, -1, c.num_heads, d), k, v, gate

    def _rope(self, context: Context) -> tuple[Rope, tuple[jax.Array, jax.Array]]:
        """Return the layer's rotary embedding and its table."""
        if self.kind.window is not None and self.config.local_rope is not None:
            return self.config.local_rope, context.tables[1]
        return self.config.rope, context.tables[0]

    def _normalize_and_rotate(
        self, q: jax.Array, k: jax.Array | None, context: Context
    ) -> tuple[jax.Array, jax.Array | None]:
        c = self.config
        rope, (cos, sin) = self._rope(context)

        def prepare(name: str, x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
            x = norm(c, name)(x) if c.qk_norm == "head" else x
            return rotate(x, table, pairs=rope.pairs) if self.kind.rotary else x

        k = None if k is None else prepare("k_norm", k, (cos, sin))
        q = prepare("q_norm", q, (context.pick(cos), context.pick(sin)))
        return q if context.q_factors is None else q * context.pick(context.q_factors).astype(q.dtype), k

    def _kernel(self, context: Context) -> Kernel:
        c, (_, d) = self.config, self.config.heads_of(self.kind)
        name = attention_implementation(c.attention) if context.tile_mask is None else context.tile_mask.implementation
        scale = d**-0.5 if c.query_scale is None else c.query_scale
        return Kernel.of(name, d, c.dtype)._replace(scale=scale, window=self.kind.window, soft_cap=c.attention_soft_cap)

    def _sinks(self) -> jax.Array | None:
        c = self.config
        if not c.attention_sinks:
            return None
        init = nn.initializers.normal(c.initializer_range)
        return self.param("sinks", init, (c.num_heads,)).astype(jnp.float32).reshape(c.heads_of(self.kind)[0], -1)

    def _has_step_kernel(self, context: Context, heads: int) -> bool:
        """Return whether to use the decode kernel, given one token per completion. `heads` is B·H_kv·G."""
        cache, prefix, mesh = context.shared or context.cache, context.prompt_cache, self.config.mesh
        if context.cache is None or prefix is None or context.last is not None:
            return False
        slots = cast(KeysValues, cache)[1].shape[-2], prefix[1].shape[-2]
        d, programs = prefix[1].shape[-1], heads // (1 if mesh is None else mesh.size)
        return has_step_kernel(self._kernel(context).implementation, head_dim=d, keys=slots, programs=programs)

    def _step(
        self, q: jax.Array, k: jax.Array | None, v: jax.Array | None, context: Context
    ) -> tuple[jax.Array, LayerCache]:
        """Run the decode kernel. Returns the attention [B, G, H_kv, R, d] of the new tokens, and the new cache."""
        c, (h, d), (b, g, *_), prefix = self.config, self.config.heads_of(self.kind), q.shape, context.prompt_cache
        assert prefix is not None
        rope, table = self._rope(context)
        fused = NormAndRope(None, table if self.kind.rotary else None, c.rms_norm_eps, c.norm_offset, rope.pairs)
        if context.q_factors is not None:  # the kernel cannot apply factors after its rotation
            (q, k), fused = self._normalize_and_rotate(q, k, context), NormAndRope()
        elif c.qk_norm == "head":
            params = self.variables["params"]
            q_scale = params["q_norm"]["scale"]
            k_scale = q_scale if k is None else params["k_norm"]["scale"]
            fused = fused._replace(scales=(q_scale, k_scale))
        new = None if k is None or v is None else (k[:, :, 0], v[:, :, 0])
        cache = cast(KeysValues, context.cache if new is not None else context.shared)
        write = None if context.write is None else context.write.reshape(b, g)
        y, new_cache = step_attention(
            q.reshape(b, g, h, -1, d),
            new,
            cast(KeysValues, tuple(x.reshape((b, h, g, *x.shape[-2:])) for x in cache)),
            prefix,
            fused,
            index=context.index,
            start=context.start,
            write=write,
            kernel=self._kernel(context),
            mesh=c.mesh,
            sinks=self._sinks(),
        )
        return y, () if new is None else (new_cache[0].reshape(cache[0].shape), new_cache[1].reshape(cache[1].shape))

    def _attend(
        self, q: jax.Array, k: jax.Array | None, v: jax.Array | None, context: Context
    ) -> tuple[jax.Array, LayerCache]:
        """Compute the attention [B, G, T, H_kv, R, d] of normalized and rotated queries, and the layer's new cache."""
        (h, d), (b, g, n, *_) = self.config.heads_of(self.kind), q.shape
        # With the head axis before the token axis, both attention products are batched products without a transpose.
        q = q.reshape(b, g, n, h, -1, d).transpose(0, 3, 1, 2, 4, 5)
        new_cache: LayerCache = ()
        if k is None or v is None:
            assert context.shared is not None
            k, v = context.shared
            keys = k if context.cache is not None else k.swapaxes(-1, -2)
        else:
            k, v = k.transpose(0, 3, 1, 2, 4), v.transpose(0, 3, 1, 2, 4)
            keys = k.swapaxes(-1, -2)
            if context.cache is not None:
                k, v = keys, v = self._update_cache(context, keys, v)
            new_cache = (k, v)
        kernel, sinks, prefix = self._kernel(context), self._sinks(), context.prompt_cache
        if context.tile_mask is not None:
            y = tiled_attention(q, k, v, prefix, context.tile_mask, kernel, self.config.mesh, sinks)
        elif context.segments is not None:
            assert prefix is not None
            y = packed_attention(q, k, v, prefix, context.segments, kernel, sinks)
        else:
            y = group_attention(
                q,
                keys,
                v,
                prefix,
                index=context.index if context.last is None else context.index + context.last,
                start=context.start,
                last_visible=context.last_visible if context.last is None else None,
                kernel=kernel,
                sinks=sinks,
            )
        return y.transpose(0, 2, 3, 1, 4, 5), new_cache

    def _update_cache(self, context: Context, keys: jax.Array, v: jax.Array) -> KeysValues:
        """Return the layer's cache, updated with keys [B, H_kv, G, d, T] and values [B, H_kv, G, T, d]."""
        old_keys, old_values = cast(KeysValues, context.cache)
        (b, _, g, t, d), like = v.shape, old_keys.shape[:-2]
        keys, v = keys.reshape((*like, d, t)).astype(old_keys.dtype), v.reshape((*like, t, d)).astype(old_values.dtype)
        slot = context.index % old_values.shape[-2]
        if context.write is not None:
            write = context.write.reshape(b, 1, g, t, 1)
            keys = jnp.where(write.swapaxes(-1, -2), keys, jax.lax.dynamic_slice_in_dim(old_keys, slot, t, axis=-1))
            v = jnp.where(write, v, jax.lax.dynamic_slice_in_dim(old_values, slot, t, axis=-2))
        keys = jax.lax.dynamic_update_slice_in_dim(old_keys, keys, slot, axis=-1)
        return keys, jax.lax.dynamic_update_slice_in_dim(old_values, v, slot, axis=-2)


class Layer(nn.Module):
    """A decoder layer: x + mixer(x), then x + MLP(x), with norms placed according to `config.norms`.

    If `context.last` [B] is set, hidden states are computed only at these indices, but keys and values for all tokens.
    """

    config: TransformerConfig
    kind: LayerKind

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, LayerCache]:
        """Return the hidden states [B, G, T, D], or [B, G, 1, D] with `context.last`, and the layer's new cache."""
        c = self.config

        def add(x: jax.Array, y: jax.Array) -> jax.Array:
            return x + (y if c.residual_scale == 1.0 else y * c.residual_scale)

        pre, post = c.norms in ("pre", "sandwich"), c.norms in ("sandwich", "post")
        y, new_cache = self._mixer()(norm(c, "input_layernorm")(x) if pre else x, context)
        x = add(context.pick(x), norm(c, "post_attention_layernorm")(y) if post else y)
        before_mlp = "post_attention_layernorm" if c.norms == "pre" else "pre_feedforward_layernorm"
        y = self._mlp()(norm(c, before_mlp)(x) if pre else x)
        if self.kind.sparse and c.parallel_experts:
            y = norm(c, "post_feedforward_layernorm_1")(y) + self._parallel_experts(x)
        x = add(x, norm(c, "post_feedforward_layernorm")(y) if post else y)
        if context.layer_input is not None:
            x = x + self._per_layer_input(x, context.pick(context.layer_input))
        if c.layer_scalar:
            factor = self.param("layer_scalar", nn.initializers.ones, (1,))
            x = x * jax.lax.stop_gradient(factor).astype(x.dtype).reshape(1, 1, 1, 1)
        return x, new_cache

    def _mixer(self) -> Callable[[jax.Array, Context], tuple[jax.Array, LayerCache]]:
        if self.kind.mixer == "delta":
            return GatedDeltaNet(self.config, name="linear_attn")
        if self.kind.mixer == "conv":
            return ShortConvolution(self.config, name="conv")
        return Attention(self.config, self.kind, name="self_attn")

    def _mlp(self) -> Callable[[jax.Array], jax.Array]:
        c = self.config
        if self.kind.sparse and not c.parallel_experts:
            return MixtureOfExperts(c, name="mlp")
        return MLP(c, c.shared_kv_mlp if self.kind.shared_kv and c.shared_kv_mlp else c.intermediate_size, name="mlp")

    def _parallel_experts(self, x: jax.Array) -> jax.Array:
        """Apply the experts that run in parallel with the MLP, and normalize their output (Gemma 4)."""
        weights, chosen = ScaledRouter(self.config, name="router")(x)
        y = tokens_of(norm(self.config, "pre_feedforward_layernorm_2")(x))
        y = Experts(self.config, name="experts")(y, tokens_of(weights), tokens_of(chosen), x.shape[0])
        return norm(self.config, "post_feedforward_layernorm_2")(y.reshape(x.shape))

    def _per_layer_input(self, x: jax.Array, layer_input: jax.Array) -> jax.Array:
        """Compute norm(W_out (act(W_in x) · layer_input)) for the per-layer embedding `layer_input` (Gemma 4)."""
        c = self.config
        gate = ACTIVATIONS[c.activation](linear(c, "per_layer_input_gate", c.layer_input_size)(x))
        y = linear(c, "per_layer_projection", c.hidden_size)(gate * layer_input)
        return norm(c, "post_per_layer_input_norm")(y)


@functools.partial(jax.jit, static_argnums=(0, 1))
def apply_layer(
    layer: Layer, written: tuple[str, ...], variables: Params, x: jax.Array, context: Context
) -> tuple[tuple[jax.Array, LayerCache], Params]:
    """Apply a layer, and return its result and the updated variable collections that `written` names.

    The layer is a static argument to `jit`, so that JAX traces each kind of layer only once.
    """
    apply = functools.partial(layer.apply, mutable=written)
    recompute = layer.config.remat and layer.config.remat_on_cpu
    return (cpu_remat(apply) if recompute else apply)(variables, x, context)


def cpu_remat(apply: Callable[[Params, jax.Array, Context], Result]) -> Callable[[Params, jax.Array, Context], Result]:
    """Wrap a layer's `apply` to store only its arguments for the backward pass: `jax.checkpoint` for CPUs.

    XLA's CPU compiler drops `jax.checkpoint`'s optimization barriers and would merge the recomputation with the forward
    pass. To prevent this, a zero computed from the cotangents is added to the arguments. First-order reverse mode only.
    """

    @jax.custom_vjp
    def call(variables: Params, x: jax.Array, context: Context) -> Result:
        return apply(variables, x, context)

    def forward(variables: Params, x: jax.Array, context: Context) -> tuple[Result, tuple[Params, jax.Array, Context]]:
        return apply(variables, x, context), (variables, x, context)

    def backward(arguments: tuple[Params, jax.Array, Context], cotangents: Result) -> tuple[Params, jax.Array, Context]:
        variables, *others = arguments
        zero = functools.reduce(jnp.add, [0 * x.reshape(-1)[0] for x in jax.tree.leaves(cotangents)])

        def add_zero(x: jax.Array) -> jax.Array:
            return x + zero.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x

        x, context = jax.tree.map(add_zero, others)
        return jax.vjp(apply, variables, x, context)[1](cotangents)

    call.defvjp(forward, backward)
    return call
