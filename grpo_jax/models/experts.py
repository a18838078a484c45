"""Mixture-of-experts layers and their load-balancing loss."""

from __future__ import annotations

import functools
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.models.attention_tiles import attention_implementation
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.layers import ACTIVATIONS, MLP, Quantized, kernel_of, linear, rows_for, tokens_of, unit_rms
from grpo_jax.models.ragged import has_kernel, ragged_dot
from grpo_jax.models.sharding import dividing_axes
from grpo_jax.types import Params

ExpertWeights = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]
"""Weights of E experts: gate and up kernels [E, D, F], down kernel [E, F, D], and gate and up biases [E, F] or None."""


class Experts(nn.Module):
    """Gated MLPs, combined with a router's weights: Σ_e weight_e · expert_e(x) over each token's chosen experts.

    Tokens are sorted by expert, so that each expert's tokens are one block of a ragged matrix product. Experts do not
    have a capacity limit, so no tokens are dropped, and a token's output does not depend on other tokens. If "fsdp"
    shards the kernels, devices gather the kernels, unless exchanging tokens transfers fewer bytes.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, weights: jax.Array, chosen: jax.Array, groups: int) -> jax.Array:
        """Apply experts `chosen` [N, k] with `weights` [N, k] to x [N, D], the tokens of an array [groups, ..., D]."""
        c = self.config
        dtype = jnp.dtype(c.dtype)
        chex.assert_shape([weights, chosen], (x.shape[0], c.num_experts_per_token))

        def kernel(name: str, fan_in: int, fan_out: int) -> jax.Array:
            w = kernel_of(self, name, (c.num_experts, fan_in, fan_out), c.initializer_range)
            return rows_for(x.astype(dtype), w).swapaxes(-1, -2) if isinstance(w, Quantized) else w.astype(dtype)

        def bias(name: str, size: int) -> jax.Array | None:
            if not c.expert_bias:
                return None
            return self.param(name, nn.initializers.zeros, (c.num_experts, size)).astype(dtype)

        gate, up = (kernel(name, c.hidden_size, c.expert_size) for name in ("gate_proj", "up_proj"))
        down = kernel("down_proj", c.expert_size, c.hidden_size)
        experts = (gate, up, down, bias("gate_bias", c.expert_size), bias("up_bias", c.expert_size))
        y = self._sums(groups, x.astype(dtype), weights.astype(dtype), chosen, experts)
        down_bias = bias("down_bias", c.hidden_size)
        if down_bias is None:
            return y
        # Computing Σ weight_e · bias_e does not require sorted tokens.
        by_expert = jax.nn.one_hot(chosen, c.num_experts, dtype=dtype) * weights.astype(dtype)[..., None]
        return y + by_expert.sum(axis=1) @ down_bias

    def _sums(
        self, groups: int, x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: ExpertWeights
    ) -> jax.Array:
        """Compute `_expert_sums`. On a mesh, each device processes its own tokens or its own channels."""
        c = self.config
        kernels, mesh = attention_implementation(c.attention), c.mesh
        sums = functools.partial(_expert_sums, c)
        if mesh is None:
            return sums(x, weights, chosen, experts)

        def devices(axes: tuple[str, ...]) -> int:
            return math.prod(mesh.shape[name] for name in axes)

        # Each device sorts its own tokens, since XLA's partitioner would otherwise gather all of them.
        channel_axes = dividing_axes(c.expert_size, mesh, "tensor")
        width_axes = dividing_axes(c.hidden_size, mesh, "fsdp")
        token_axes, data_axes = dividing_axes(groups, mesh, "data", "fsdp"), dividing_axes(groups, mesh, "data")
        # If the width per device does not suit a GPU kernel, XLA multiplies every token by all experts' matrices.
        channels, width = c.expert_size // devices(channel_axes), c.hidden_size
        narrow = width // devices(width_axes)
        too_narrow = has_kernel(kernels, width, channels) and not has_kernel(kernels, narrow, channels)
        if width_axes and not too_narrow and self._exchange_is_cheaper(x, devices(data_axes)):
            # Kernels stay sharded, and each device receives its own channels of all tokens in its "data" shard.
            token_axes, sums = data_axes, functools.partial(sums, across=width_axes)
        else:
            # Without these constraints, XLA gathers the kernels in float32 and rounds them afterwards.
            by_kernel = ((width_axes, channel_axes), (width_axes, channel_axes), (channel_axes, width_axes))
            shardings = (NamedSharding(mesh, PartitionSpec(None, *axes)) for axes in by_kernel)
            experts = (*map(jax.lax.with_sharding_constraint, experts[:3], shardings), *experts[3:])
            width_axes = ()

        def of_each(x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: ExpertWeights) -> jax.Array:
            own = sums(x, weights, chosen, experts)
            return jax.lax.psum(own, channel_axes) if channel_axes else own

        of_rows, by_width = PartitionSpec(token_axes), PartitionSpec(token_axes, width_axes)
        up, down = PartitionSpec(None, width_axes, channel_axes), PartitionSpec(None, channel_axes, width_axes)
        bias = PartitionSpec(None, channel_axes)
        specs = (by_width, of_rows, of_rows, (up, up, down, bias, bias))
        each = jax.shard_map(of_each, mesh=mesh, in_specs=specs, out_specs=by_width, check_vma=False)
        return each(x, weights, chosen, experts)

    def _exchange_is_cheaper(self, x: jax.Array, parts: int) -> bool:
        """Return whether exchanging 1 / `parts` of the tokens transfers fewer bytes than gathering the kernels."""
        c = self.config
        product = 4 * c.num_experts_per_token * c.expert_size  # bytes per token for float32 gate or up products
        exchanged = len(x) // parts * (2 * x.dtype.itemsize * c.hidden_size + 2 * 2 * product)
        return exchanged < 3 * x.dtype.itemsize * c.num_experts * c.hidden_size * c.expert_size


def expert_activation(config: TransformerConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute an expert's activation from the outputs of its gate and up projections."""
    if config.expert_swiglu is None:
        return ACTIVATIONS[config.activation](gate) * up
    alpha, limit = config.expert_swiglu
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1) * (gate * jax.nn.sigmoid(alpha * gate))


def _expert_sums(
    config: TransformerConfig,
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    experts: ExpertWeights,
    across: tuple[str, ...] = (),
) -> jax.Array:
    """Compute Σ weight · expert(x) over the chosen experts for tokens x [N, D], without the down projection's bias."""
    # `across` names the mesh axes that shard the D channels of tokens and kernels.
    gate_kernel, up_kernel, down_kernel, gate_bias, up_bias = experts
    kernels = attention_implementation(config.attention)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=gate_kernel.shape[0]).astype(jnp.int32)
    row = order // chosen.shape[1]
    y = jnp.take(x, row, axis=0)
    if across:
        dots = [ragged_dot(y, w, sizes, kernels, jnp.dtype(jnp.float32)) for w in (gate_kernel, up_kernel)]
        gate, up = (dot.astype(x.dtype) for dot in jax.lax.psum(dots, across))
    else:
        gate, up = (ragged_dot(y, w, sizes, kernels) for w in (gate_kernel, up_kernel))
    if gate_bias is not None and up_bias is not None:
        expert = jnp.take(chosen.reshape(-1), order)
        gate = gate + jnp.take(gate_bias, expert, axis=0)
        up = up + jnp.take(up_bias, expert, axis=0)
    y = ragged_dot(expert_activation(config, gate, up), down_kernel, sizes, kernels)
    y = y * jnp.take(weights.reshape(-1), order)[:, None]
    return jnp.zeros(x.shape, y.dtype).at[row].add(y)


class MixtureOfExperts(nn.Module):
    """A mixture-of-experts layer: a router, its `Experts`, and an optional gated shared expert.

    Router logits are sown as "logits" in the "router" collection, for `router_loss`.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        logits = linear(c, "gate", c.num_experts, c.expert_bias)(x).astype(jnp.float32)
        self.sow("router", "logits", logits)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), c.num_experts_per_token)
        if c.normalize_expert_weights:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        y = Experts(c, name="experts")(tokens_of(x), tokens_of(weights), tokens_of(chosen), x.shape[0])
        y = y.reshape(x.shape)
        if not c.shared_expert_size:
            return y
        shared = MLP(c, c.shared_expert_size, name="shared_expert")(x)
        return y + jax.nn.sigmoid(linear(c, "shared_expert_gate", 1)(x)) * shared


class ScaledRouter(nn.Module):
    """Router with normalized inputs, a scale for each input channel, and a factor for each expert (Gemma 4)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weights and indices [..., k] of the chosen experts for tokens [..., D]."""
        c, ones = self.config, nn.initializers.ones
        factor = self.param("input_scale", ones, (c.hidden_size,)).astype(jnp.float32) * c.hidden_size**-0.5
        expert_scale = self.param("per_expert_scale", ones, (c.num_experts,)).astype(jnp.float32)
        x = (unit_rms(x, c.rms_norm_eps) * jnp.expand_dims(factor, tuple(range(x.ndim - 1)))).astype(x.dtype)
        logits = linear(c, "proj", c.num_experts)(x).astype(jnp.float32)
        self.sow("router", "logits", logits)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), c.num_experts_per_token)
        return weights / weights.sum(axis=-1, keepdims=True) * jnp.take(expert_scale, chosen), chosen


def router_loss(router: Params, mask: jax.Array, *, num_experts_per_token: int) -> jax.Array:
    """Compute the scalar load-balancing loss E Σ_e f_e p_e (Fedus et al. 2021, Switch Transformers, eq. 4 to 6).

    E is the number of experts, f_e is the fraction of tokens routed to expert e, and p_e is the router's mean
    probability for e, both over the tokens with mask 1 in all sparse layers. Only p has a gradient. With uniform
    routing, the loss equals `num_experts_per_token`. `router` is the "router" collection returned by
    `model.apply(variables, ..., mutable=["router"])`.
    """
    layers = jax.tree.leaves(router)
    counts = totals = jnp.zeros(layers[0].shape[-1:])
    flat = mask.reshape(-1, 1).astype(jnp.float32)
    for logits in layers:
        probs = jax.nn.softmax(logits.astype(jnp.float32).reshape(-1, logits.shape[-1]))
        _, chosen = jax.lax.top_k(probs, num_experts_per_token)
        counts += (jax.nn.one_hot(chosen, probs.shape[-1]).sum(axis=1) * flat).sum(axis=0)
        totals += (probs * flat).sum(axis=0)
    tokens = jnp.maximum(len(layers) * flat.sum(), 1.0)
    return len(counts) * jnp.sum(jax.lax.stop_gradient(counts / tokens) * (totals / tokens))
