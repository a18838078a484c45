"""Mixture-of-experts layers and their router's loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.models.layers import ACTIVATIONS, TransformerConfig, linear, tokens_of, unit_rms
from grpo_jax.models.quantized import quantized_kernel, rows_for
from grpo_jax.models.ragged import has_kernel, ragged_dot
from grpo_jax.models.sight import implementation


class Experts(nn.Module):
    """Gated MLPs, of which each token uses a few: Σ_e weight_e · expert_e(x) over its chosen experts.

    Rows are sorted by expert, so that each expert is one block of a ragged matrix product: no expert has a capacity, no
    token is dropped, and a row does not depend on its neighbours. On a mesh whose "fsdp" cuts the kernels, the devices
    gather these, or exchange rows where that is less.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, weights: jax.Array, chosen: jax.Array, groups: int) -> jax.Array:
        """x [N, D], weights and chosen [N, k] to [N, D]; N are the tokens of `groups` groups."""
        c = self.config
        dtype = jnp.dtype(c.dtype)
        chex.assert_shape([weights, chosen], (x.shape[0], c.num_experts_per_token))

        def kernel(name, fan_in, fan_out):
            held = quantized_kernel(self, name)
            if held is not None:
                return rows_for(x.astype(dtype), held).swapaxes(-1, -2)
            init = nn.initializers.normal(c.initializer_range)
            return self.param(name, init, (c.num_experts, fan_in, fan_out)).astype(dtype)

        gate, up = (kernel(name, c.hidden_size, c.expert_size) for name in ("gate_proj", "up_proj"))
        down = kernel("down_proj", c.expert_size, c.hidden_size)
        biases = []
        if c.expert_bias:

            def bias(name, size):
                return self.param(name, nn.initializers.zeros, (c.num_experts, size)).astype(dtype)

            biases = [bias("gate_bias", c.expert_size), bias("up_bias", c.expert_size)]
            # Σ weight_e · bias_e needs no row to be sorted.
            each = jax.nn.one_hot(chosen, c.num_experts, dtype=dtype) * weights.astype(dtype)[..., None]
            added = each.sum(axis=1) @ bias("down_bias", c.hidden_size)
        y = self._sums(groups, x.astype(dtype), weights.astype(dtype), chosen, gate, up, down, *biases)
        return y + added if biases else y

    def _sums(self, groups: int, *arrays: jax.Array) -> jax.Array:
        """`_expert_sums` of the rows of `groups` groups, on the devices that have them or the kernels."""
        c = self.config
        chosen = implementation(c.attention)
        sums = functools.partial(_expert_sums, gated=gate_of(c), implementation=chosen)
        mesh = c.mesh
        if mesh is None:
            return sums(*arrays)

        def devices(axes: tuple[str, ...]) -> int:
            return math.prod(mesh.shape[name] for name in axes)

        def cut(size: int, *axes: str) -> tuple[str, ...]:
            """The axes with more than one device, if these divide the size."""
            axes = tuple(name for name in axes if mesh.shape.get(name, 1) > 1)
            return axes if size % devices(axes) == 0 else ()

        # Each device sorts its own rows: XLA's partitioner has no sort that is cut, and gathers the rows of all.
        inner, width = cut(c.expert_size, "tensor"), cut(c.hidden_size, "fsdp")
        rows, of_data = cut(groups, "data", "fsdp"), cut(groups, "data")
        # A device's channels may be too few for a GPU's kernels: its rows would meet the matrices of all experts.
        channels, outer = c.expert_size // devices(inner), c.hidden_size
        lost = has_kernel(chosen, outer, channels) and not has_kernel(chosen, outer // devices(width), channels)
        if width and not lost and self._rows_are_less(arrays[0], devices(of_data)):
            # Kernels stay where they are, cut by channels of the rows, and each device has its channels of all rows.
            rows, sums = of_data, functools.partial(sums, across=width)
        else:
            width = ()

        def of_each(*own_arrays: jax.Array) -> jax.Array:
            own = sums(*own_arrays)
            return jax.lax.psum(own, inner) if inner else own

        of_rows, by_width = PartitionSpec(rows), PartitionSpec(rows, width)
        wide, deep = PartitionSpec(None, width, inner), PartitionSpec(None, inner, width)
        biases = (PartitionSpec(None, inner),) * (len(arrays) - 6)
        specs = (by_width, of_rows, of_rows, wide, wide, deep, *biases)
        return jax.shard_map(of_each, mesh=mesh, in_specs=specs, out_specs=by_width, check_vma=False)(*arrays)

    def _rows_are_less(self, x: jax.Array, parts: int) -> bool:
        """Return whether devices exchange fewer bytes for one of `parts` parts of the rows than for the kernels."""
        c = self.config
        product = 4 * c.num_experts_per_token * c.expert_size  # of a row, in float32; two of them are summed
        rows = len(x) // parts * (2 * x.dtype.itemsize * c.hidden_size + 2 * 2 * product)
        return rows < 3 * x.dtype.itemsize * c.num_experts * c.hidden_size * c.expert_size


def gate_of(config: TransformerConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the activation of an expert, a function of its two products (gate x, up x)."""
    if config.expert_swiglu is None:
        activation = ACTIVATIONS[config.activation]
        return lambda gate, up: activation(gate) * up
    alpha, limit = config.expert_swiglu

    def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, limit)
        return (jnp.clip(up, -limit, limit) + 1) * (gate * jax.nn.sigmoid(alpha * gate))

    return clamped


def _expert_sums(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
    implementation: str,
    across: tuple[str, ...] = (),
) -> jax.Array:
    """Return Σ weight · expert(x) over the chosen experts of rows x [N, D], without the last bias.

    `across`: axes of devices, each of which has some of the D channels of the rows and of the kernels.
    """
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
    row = order // chosen.shape[1]
    y = jnp.take(x, row, axis=0)
    if across:
        parts = [ragged_dot(y, kernel, sizes, implementation, jnp.dtype(jnp.float32)) for kernel in (gate, up)]
        wide = [part.astype(x.dtype) for part in jax.lax.psum(parts, across)]
    else:
        wide = [ragged_dot(y, kernel, sizes, implementation) for kernel in (gate, up)]
    if gate_bias is not None and up_bias is not None:
        expert = jnp.take(chosen.reshape(-1), order)
        wide = [x + jnp.take(bias, expert, axis=0) for x, bias in zip(wide, (gate_bias, up_bias), strict=True)]
    y = gated(*wide)
    y = ragged_dot(y, down, sizes, implementation) * jnp.take(weights.reshape(-1), order)[:, None]
    return jnp.zeros(x.shape, y.dtype).at[row].add(y)


class MixtureOfExperts(nn.Module):
    """A router and its `Experts`. Router logits are sown as "router"/"logits", for `router_loss`.

    A `shared_expert` is for all tokens, each of which weighs it by a gate.
    """

    config: TransformerConfig
    shared_expert: nn.Module | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        logits = linear(c, "gate", c.num_experts, c.expert_bias)(x)
        logits = logits.astype(jnp.float32)
        self.sow("router", "logits", logits)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), c.num_experts_per_token)
        if c.normalize_expert_weights:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        rows = tokens_of(x), tokens_of(weights), tokens_of(chosen)
        y = Experts(c, name="experts")(*rows, x.shape[0]).reshape(x.shape)
        if self.shared_expert is None:
            return y
        return y + jax.nn.sigmoid(linear(c, "shared_expert_gate", 1)(x)) * self.shared_expert(x)


class ScaledRouter(nn.Module):
    """A router that norms what it looks at and scales it by channel, and weighs each expert by a factor of its own.

    The weights of a token's experts, before that factor, sum to one. Logits are sown as by `MixtureOfExperts`.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weights and the experts [..., k] of tokens [..., D]."""
        c, ones = self.config, nn.initializers.ones
        factor = self.param("input_scale", ones, (c.hidden_size,)).astype(jnp.float32) * c.hidden_size**-0.5
        of_expert = self.param("per_expert_scale", ones, (c.num_experts,)).astype(jnp.float32)
        seen = (unit_rms(x, c.rms_norm_eps) * factor.reshape(*(1,) * (x.ndim - 1), -1)).astype(x.dtype)
        logits = linear(c, "proj", c.num_experts)(seen).astype(jnp.float32)
        self.sow("router", "logits", logits)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), c.num_experts_per_token)
        return weights / weights.sum(axis=-1, keepdims=True) * jnp.take(of_expert, chosen), chosen


def router_loss(router: Any, mask: jax.Array, *, num_experts_per_token: int) -> jax.Array:
    """Load-balancing loss of a mixture of experts: E Σ_e f_e p_e.

    f_e is the number of tokens sent to expert e, and p_e the mean probability that the router gave it, both over the
    masked-in tokens of all sparse layers; a router without preferences has the least loss, `num_experts_per_token`.

    Args:
      router: the "router" collection, from `model.apply(variables, ..., mutable=["router"])`.
      mask: [B, T] or [B, G, T], as the tokens were; the tokens that count.
      num_experts_per_token: k of the config.

    Returns:
      [] float32; minimise, times the config's `router_aux_loss_coef`.

    Gradient:
      Through p only; f counts.

    References:
      Fedus et al. 2021, Switch Transformers, eq. 4 to 6, as transformers' `load_balancing_loss_func` has it.
    """
    layers = jax.tree.leaves(router)
    used = wanted = jnp.zeros(layers[0].shape[-1:])
    count = jnp.zeros(())
    flat = mask.reshape(-1, 1).astype(jnp.float32)
    for logits in layers:
        probs = jax.nn.softmax(logits.astype(jnp.float32).reshape(-1, logits.shape[-1]))
        _, chosen = jax.lax.top_k(probs, num_experts_per_token)
        used += (jax.nn.one_hot(chosen, probs.shape[-1]).sum(axis=1) * flat).sum(axis=0)
        wanted += (probs * flat).sum(axis=0)
        count += flat.sum()
    count = jnp.maximum(count, 1.0)
    return len(used) * jnp.sum(jax.lax.stop_gradient(used / count) * (wanted / count))
