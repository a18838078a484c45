"""One layer of the decoder: attention or a recurrent layer, a dense MLP or a mixture of experts, and the norms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from grpo_jax.models.attention import attend, group_attention, packed_attention
from grpo_jax.models.context import Context
from grpo_jax.models.experts import Experts, MixtureOfExperts, ScaledRouter
from grpo_jax.models.fused_step import has_step_kernel, step_attention
from grpo_jax.models.layers import (
    ACTIVATIONS,
    UNTRAINED,
    LayerKind,
    RMSNorm,
    TransformerConfig,
    linear,
    tokens_of,
    unit_rms,
)
from grpo_jax.models.recurrent import GatedDeltaNet, ShortConvolution
from grpo_jax.models.rope import rotate
from grpo_jax.models.sight import Kernel, implementation
from grpo_jax.types import Params


class Attention(nn.Module):
    """Projections, rotary embedding and attention of one layer."""

    config: TransformerConfig
    kind: LayerKind

    @nn.compact
    def __call__(self, x, context):
        c = self.config
        b, g, t, _ = x.shape
        n = t if context.last is None else 1
        h, d = c.heads_of(self.kind)
        q, k, v, gate = self._project(x, context)
        # Heads before rows: both score products below are then plain batched matrix products, without a transpose.
        q = q.reshape(b, g, n, h, -1, d).transpose(0, 3, 1, 2, 4, 5)
        kept: tuple[Any, ...] = ()
        if self.kind.shared_kv:
            k, v = context.shared
            keys = k if context.cache is not None else k.swapaxes(-1, -2)
        else:
            k, v = k.transpose(0, 3, 1, 2, 4), v.transpose(0, 3, 1, 2, 4)
            keys = k.swapaxes(-1, -2)
            if context.cache is not None:
                k, v = keys, v = self._write(context, keys, v)
            kept = (k, v)
        y = self._attend(q, keys, k, v, context)
        y = y.transpose(0, 2, 3, 1, 4, 5).reshape(b, g, n, c.num_heads * d)
        if gate is not None:
            y = y * jax.nn.sigmoid(gate.reshape(y.shape))
        return linear(c, "o_proj", c.hidden_size, c.o_bias)(y), kept

    def _norm(self, name, x):
        return None if x is None else RMSNorm(self.config.rms_norm_eps, self.config.norm_offset, name=name)(x)

    def _project(self, x, context):
        """Return queries, keys and values [B, G, T, heads, d], the first two rotated, and the gate; None for none."""
        c = self.config
        (h, d), (b, g, t, _) = c.heads_of(self.kind), x.shape
        q = linear(c, "q_proj", c.num_heads * d * (2 if c.attention_gate else 1), c.qkv_bias)(context.pick(x))
        gate = k = v = None
        if c.attention_gate:
            q, gate = jnp.split(q.reshape(b, g, -1, c.num_heads, 2 * d), 2, axis=-1)
        if not self.kind.shared_kv:
            k, v = self._keys_and_values(x, h, d)
        if c.qk_norm == "flat":
            q, k = self._norm("q_norm", q), self._norm("k_norm", k)
        q, k = q.reshape(b, g, -1, c.num_heads, d), None if k is None else k.reshape(b, g, t, h, d)
        if c.qk_norm == "head":
            q, k = self._norm("q_norm", q), self._norm("k_norm", k)
        return *self._turn(q, k, context), v, gate

    def _keys_and_values(self, x, h, d):
        """Return keys [B, G, T, H_kv d] and values [B, G, T, H_kv, d]."""
        c = self.config
        k = v = linear(c, "k_proj", h * d, c.qkv_bias)(x)
        if not (c.values_are_keys and self.kind.window is None):
            v = linear(c, "v_proj", h * d, c.qkv_bias)(x)
        v = v.reshape(*x.shape[:3], h, d)
        return k, unit_rms(v, c.rms_norm_eps).astype(v.dtype) if c.v_norm else v

    def _attend(self, q, keys, k, v, context):
        """Return the attention of queries [B, H_kv, G, T, R, d] over keys (`keys`: transposed) and values."""
        c, last = self.config, context.last
        h, d = c.heads_of(self.kind)
        scale = d**-0.5 if c.query_scale is None else c.query_scale
        window, soft_cap, sinks = self.kind.window, c.attention_soft_cap, None
        if c.attention_sinks:
            init = nn.initializers.normal(c.initializer_range)
            sinks = self.param("sinks", init, (c.num_heads,)).astype(jnp.float32).reshape(h, -1)
        if context.sight is not None:
            kernel = Kernel.of(implementation(c.attention), d, c.dtype)
            kernel = kernel._replace(scale=scale, window=window, soft_cap=soft_cap)
            return attend(q, k, v, context.prefix, context.sight, kernel, c.mesh, sinks)
        if self._steps_by_kernel(q, keys, context):
            b, _, g, *_ = q.shape
            keys, v = (x.reshape(b, h, g, *x.shape[-2:]) for x in (keys, v))
            kernel = Kernel(implementation(c.attention), 0, 0, scale, window, soft_cap)
            places = {"index": context.index, "start": context.start}
            return step_attention(q, keys, v, context.prefix, **places, kernel=kernel, mesh=c.mesh, sinks=sinks)
        if context.segments is not None:
            attention = functools.partial(packed_attention, q, k, v, context.prefix, context.segments)
        else:
            index = context.index if last is None else context.index + last
            attention = functools.partial(group_attention, q, keys, v, context.prefix, index=index, start=context.start)
        return attention(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)

    def _steps_by_kernel(self, q, keys, context):
        """Return whether this is one decode step of completions, and a kernel computes it."""
        if context.cache is None or context.prefix is None or context.last is not None or q.shape[3] > 1:
            return False
        b, h, g, *_, d = q.shape
        c, slots = self.config, (keys.shape[-1], context.prefix[1].shape[-2])
        programs = b * h * g // (1 if c.mesh is None else c.mesh.size)
        return has_step_kernel(implementation(c.attention), head_dim=d, keys=slots, programs=programs)

    def _write(self, context, keys, v):
        """Return the cache with keys [B, H_kv, G, d, T] and values [B, H_kv, G, T, d] in it."""
        own_keys, own_values = context.cache
        (b, _, g, t, d), like = v.shape, own_keys.shape[:-2]
        keys, v = keys.reshape(*like, d, t).astype(own_keys.dtype), v.reshape(*like, t, d).astype(own_values.dtype)
        slot = context.index % own_values.shape[-2]
        if context.write is not None:
            write = context.write.reshape(b, 1, g, t, 1)
            keys = jnp.where(write.swapaxes(-1, -2), keys, jax.lax.dynamic_slice_in_dim(own_keys, slot, t, axis=-1))
            v = jnp.where(write, v, jax.lax.dynamic_slice_in_dim(own_values, slot, t, axis=-2))
        keys = jax.lax.dynamic_update_slice_in_dim(own_keys, keys, slot, axis=-1)
        return keys, jax.lax.dynamic_update_slice_in_dim(own_values, v, slot, axis=-2)

    def _turn(self, q, k, context):
        """Return queries and keys rotated to their positions."""
        local = None if self.kind.window is None else self.config.local_rope
        rope, table = (self.config.rope, context.tables[0]) if local is None else (local, context.tables[1])
        if self.kind.rotary:
            turn = functools.partial(rotate, pairs=rope.pairs)
            q = turn(q, (context.pick(table[0]), context.pick(table[1])))
            k = None if k is None else turn(k, table)
        return q if context.growth is None else q * context.pick(context.growth).astype(q.dtype), k


class MLP(nn.Module):
    """down(act(gate x) · up x) (Shazeer 2020, GLU variants)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x):
        c = self.config

        def gated(gate, up):
            return ACTIVATIONS[c.activation](gate) * up

        gate, up = (linear(c, name, c.intermediate_size, c.mlp_bias)(x) for name in ("gate_proj", "up_proj"))
        # What lies between the products is cheaper to make again in the backward pass than to write and to keep.
        return linear(c, "down_proj", c.hidden_size, c.mlp_bias)(jax.checkpoint(gated)(gate, up))


class Layer(nn.Module):
    """x + attention, x + MLP, with the norms where `config.norms` puts them. Norms carry Hugging Face's names.

    With `context.last` [B], only the state of that token is computed, beside the keys and values of all.
    """

    config: TransformerConfig
    kind: LayerKind

    @nn.compact
    def __call__(self, x, context):
        c = self.config
        x, kept = self._mix(x, context)
        if c.layer_input_size:
            x = x + self._per_layer_input(x, context.pick(context.layer_input))
        if c.layer_scalar:
            factor = self.param(*UNTRAINED, nn.initializers.ones, (1,))
            x = x * jax.lax.stop_gradient(factor).astype(x.dtype).reshape(1, 1, 1, 1)
        return x, kept

    def _norm(self, name, x):
        return RMSNorm(self.config.rms_norm_eps, self.config.norm_offset, name=name)(x)

    def _mix(self, x, context):
        """Return the state of tokens after attention and MLP, and their keys and values (or recurrent state)."""
        c, norm = self.config, self._norm

        def add(x, y):
            return x + (y if c.residual_scale == 1.0 else y * c.residual_scale)

        attention = self._mixer()
        mlp = self._experts() if self.kind.sparse and not c.experts_beside_mlp else MLP(self._dense(), name="mlp")
        if c.norms == "pre":
            y, kept = attention(norm("input_layernorm", x), context)
            x = add(context.pick(x), y)
            return add(x, mlp(norm("post_attention_layernorm", x))), kept
        if c.norms == "sandwich":
            y, kept = attention(norm("input_layernorm", x), context)
            x = add(context.pick(x), norm("post_attention_layernorm", y))
            y = mlp(norm("pre_feedforward_layernorm", x))
            if self.kind.sparse and c.experts_beside_mlp:
                y = norm("post_feedforward_layernorm_1", y) + self._beside(x)
            return add(x, norm("post_feedforward_layernorm", y)), kept
        y, kept = attention(x, context)
        x = add(context.pick(x), norm("post_attention_layernorm", y))
        return add(x, norm("post_feedforward_layernorm", mlp(x))), kept

    def _dense(self):
        """Return the config of the MLP."""
        c = self.config
        width = c.shared_kv_mlp if self.kind.shared_kv and c.shared_kv_mlp else c.intermediate_size
        return c if width == c.intermediate_size else dataclasses.replace(c, intermediate_size=width)

    def _mixer(self):
        if self.kind.mixer == "delta":
            return GatedDeltaNet(self.config, name="linear_attn")
        if self.kind.mixer == "conv":
            return ShortConvolution(self.config, name="conv")
        return Attention(self.config, self.kind, name="self_attn")

    def _experts(self):
        c = self.config
        shared = dataclasses.replace(c, intermediate_size=c.shared_expert_size)
        return MixtureOfExperts(c, MLP(shared, parent=None) if c.shared_expert_size else None, name="mlp")

    def _beside(self, x):
        """Return the output of the experts beside the MLP, whose router reads x without a norm."""
        weights, chosen = ScaledRouter(self.config, name="router")(x)
        y = tokens_of(self._norm("pre_feedforward_layernorm_2", x))
        y = Experts(self.config, name="experts")(y, tokens_of(weights), tokens_of(chosen), x.shape[0])
        return self._norm("post_feedforward_layernorm_2", y.reshape(x.shape))

    def _per_layer_input(self, x, layer_input):
        """Return norm(W_out (act(W_in x) · layer_input)), the tokens' own embedding for this layer (Gemma 4)."""
        c = self.config
        gate = ACTIVATIONS[c.activation](linear(c, "per_layer_input_gate", c.layer_input_size)(x))
        y = linear(c, "per_layer_projection", c.hidden_size)(gate * layer_input)
        return self._norm("post_per_layer_input_norm", y)


def apply_alone(
    layer: Layer, written: tuple[str, ...], variables: Params, x: jax.Array, context: Context
) -> tuple[tuple[jax.Array, object], Params]:
    """Apply a layer by a function that JAX traces once for all layers of its kind.

    Returns:
      What the layer returns, and the collections `written` by it.
    """
    c = layer.config
    tied = c.remat and c.remat_on_cpu
    # Without its name and parent, a layer equals all others of its kind.
    alone = Layer(c, layer.kind, parent=None) if tied else layer.clone(parent=None, name=None)
    return apply_layer(alone, written, tied, variables, x, context)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def apply_layer(layer, written, tied, variables, x, context):
    apply = functools.partial(layer.apply, mutable=written)
    return (recomputed(apply) if tied else apply)(variables, x, context)


Result = TypeVar("Result")


def recomputed(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function, of which nothing is kept for the backward pass but its arguments: `jax.checkpoint` for CPUs.

    XLA's compiler for CPUs drops the optimization barriers of `jax.checkpoint` before it merges equal computations, so
    nothing is saved. Here the second computation depends on the cotangent, and is a different one. It is not
    differentiated forward or twice.

    Args:
      function: of pytrees of arrays. The first argument, such as weights, goes into the second computation as it is;
        to the floating-point arrays of the others 0 · (elements of the cotangent) is added.

    Example:
      >>> square = recomputed(lambda weights, x: jnp.sin(weights * x) ** 2)
      >>> round(float(jax.grad(square, argnums=1)(2.0, 0.5)), 4), round(float(2 * jnp.sin(2.0)), 4)
      (1.8186, 1.8186)
    """

    @jax.custom_vjp
    def call(*arguments: object) -> Result:
        return function(*arguments)

    def forward(*arguments: object) -> tuple[Result, tuple[object, ...]]:
        return function(*arguments), arguments

    def backward(arguments: tuple[object, ...], cotangents: Result) -> tuple[object, ...]:
        first, *others = arguments
        zero = functools.reduce(jnp.add, [0 * x.reshape(-1)[0] for x in jax.tree.leaves(cotangents) if _moves(x)])
        tied = jax.tree.map(lambda x: x + zero.astype(x.dtype) if _moves(x) else x, others)
        leaves, tree = jax.tree.flatten((first, *tied))
        moving = [i for i, x in enumerate(leaves) if _moves(x)]

        def of(*values: jax.Array) -> Result:
            there = dict(zip(moving, values, strict=True))
            return function(*jax.tree.unflatten(tree, [there.get(i, x) for i, x in enumerate(leaves)]))

        _, pullback = jax.vjp(of, *(leaves[i] for i in moving))
        found = dict(zip(moving, pullback(cotangents), strict=True))
        none = [np.zeros(np.shape(x), jax.dtypes.float0) for x in leaves]
        return jax.tree.unflatten(tree, [found.get(i, none[i]) for i in range(len(leaves))])

    call.defvjp(forward, backward)
    return call


def _moves(x: ArrayLike) -> bool:
    """Whether a gradient with respect to it exists."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))
