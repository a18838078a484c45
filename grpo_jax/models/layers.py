"""Linear layers (quantized or not), the RMS norm and the gated MLP.

A frozen matrix W [in, out], quantized to four or eight bits, is stored as Wᵀ [out, in], as in checkpoint files. Each
row is split into blocks, and a weight is its code's value times its block's scale. NF4 stores two codes per byte, with
the values NF4[code] and blocks of 64 weights. int8 has values from −127 to 127, and each row is one block. A nested
scale is levels[code] · outer + offset, with one outer scale per 256 scales, for a total of 4.127 bits per NF4 weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.typing import DTypeLike

from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.matmul import dot_float32, dot_rounded, matmul, matmul_by_columns, scale_columns
from grpo_jax.types import Params

NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip
"""Values of the 16 NF4 codes (arXiv:2305.14314, appendix E)."""

NESTED_BLOCK = 256
"""Number of nested scales that share an outer scale."""


@flax.struct.dataclass(eq=False)
class Quantized:
    """A frozen quantized matrix that replaces a kernel. It is a pytree of JAX or NumPy arrays."""

    codes: Any  # uint8 [..., out, in/2], the first code of a byte in its upper half; or int8 [..., out, in]
    scales: Any  # [..., out, in/block] float32, or uint8 with `nested`
    nested: Any = None  # (levels [256], outer [ceil(scales/256)], offset [1]) float32, or None
    shape: tuple[int, ...] = flax.struct.field(pytree_node=False, kw_only=True)  # shape (..., in, out) of W
    block: int = flax.struct.field(pytree_node=False, kw_only=True)  # number of weights per scale
    dtype: str = flax.struct.field(pytree_node=False, kw_only=True)  # default dtype of the dequantized matrix

    def rows(self, dtype: DTypeLike) -> jax.Array:
        """Dequantize to Wᵀ [..., out, in], computed in float32 and rounded to `dtype`."""
        values, scales = _values(self.codes), self.scales
        if self.nested is not None:
            levels, outer, offset = self.nested
            outer = jnp.repeat(outer, NESTED_BLOCK)[: math.prod(scales.shape)].reshape(scales.shape)
            # PyTorch rounds the product before the addition. The maximum does not change any value, but prevents the
            # compiler from fusing both operations into one multiply-add.
            products = levels[scales.astype(jnp.int32)] * outer
            scales = jnp.maximum(products, jnp.finfo(jnp.float32).min) + offset[0]
        blocks = values.reshape((*scales.shape, self.block)) * scales[..., None]
        return blocks.astype(dtype).reshape(values.shape)

    def matrix(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Dequantize to W [..., in, out], in `self.dtype` by default."""
        return self.rows(self.dtype if dtype is None else dtype).swapaxes(-1, -2)


def _values(codes: jax.Array) -> jax.Array:
    """Convert codes [..., in], or packed codes [..., in/2], to their float32 values."""
    if codes.dtype != jnp.uint8:
        return codes.astype(jnp.float32)
    codes = jnp.stack([codes >> 4, codes & 15], axis=-1).reshape((*codes.shape[:-1], -1))
    # Use sixteen selects instead of a table lookup, because they fuse with their consumer on every backend.
    return functools.reduce(jnp.add, (jnp.where(codes == i, value, jnp.float32(0)) for i, value in enumerate(NF4)))


def is_quantized(tree: Params) -> bool:
    """Return whether a tree of params contains a quantized matrix."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Quantized))
    return any(isinstance(leaf, Quantized) for leaf in leaves)


def kernel_of(module: nn.Module, name: str, shape: tuple[int, ...], stddev: float) -> Quantized | jax.Array:
    """Return the module's kernel [..., in, out] with the given name, which may be quantized."""
    kernel = module.get_variable("params", name) if module.has_variable("params", name) else None
    return kernel if isinstance(kernel, Quantized) else module.param(name, nn.initializers.normal(stddev), shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def matmul_quantized(
    x: jax.Array, w: Quantized, dtype: DTypeLike | None = None, float32_sums: bool = False
) -> jax.Array:
    """Compute x W for x [N, in]. Only x has a gradient. See `matmul.matmul` for `dtype` and `float32_sums`.

    W is dequantized for the product, and again for the gradient. Keeping dequantized matrices from the forward pass to
    the backward pass would take as much memory as a 16-bit model.
    """
    return _product(x, w, dtype, float32_sums)


def _product(x: jax.Array, w: Quantized, dtype: DTypeLike | None, float32_sums: bool) -> jax.Array:
    """Compute the product for `matmul_quantized` as a dot product that `jax.checkpoint` policies recognize."""
    if float32_sums:
        return dot_float32(x, rows_for(x, w), (1, 1)).astype(dtype or x.dtype)
    return jnp.matmul(x, rows_for(x, w).T, preferred_element_type=dtype)


def rows_for(x: jax.Array, w: Quantized) -> jax.Array:
    """Dequantize Wᵀ to the dtype of x, but only after x has been computed, not at program start or before a loop."""
    x = jax.lax.stop_gradient(x)

    def delay(codes: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(codes, x, cpu=_delay_on_cpu, default=_delay)

    scales = w.scales if w.nested is None else delay(w.scales)
    return dataclasses.replace(w, codes=delay(w.codes), scales=scales).rows(x.dtype)


def _delay(codes: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier((codes, x))[0]


def _delay_on_cpu(codes: jax.Array, x: jax.Array) -> jax.Array:
    """XOR codes with a zero computed from x, so that they depend on x. XLA's CPU scheduler ignores barriers."""
    bits = jax.lax.bitcast_convert_type(x[0, 0].astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    return codes ^ jnp.minimum(bits, 0).astype(codes.dtype)


@functools.partial(matmul_quantized.defjvp, symbolic_zeros=True)
def _matmul_quantized_jvp(
    dtype: DTypeLike | None,
    float32_sums: bool,
    primals: tuple[jax.Array, Quantized],
    tangents: tuple[jax.Array | SymbolicZero, object],
) -> tuple[jax.Array, jax.Array]:
    (x, w), (dx, _) = primals, tangents
    y = _product(x, w, dtype, float32_sums)
    if isinstance(dx, SymbolicZero):
        return y, jnp.zeros_like(y)

    def forwards(w: Quantized, dx: jax.Array) -> jax.Array:
        rows = rows_for(dx, w)
        return (dot_rounded(dx, rows, (1, 1)) if float32_sums else dx @ rows.T).astype(y.dtype)

    def backwards(w: Quantized, g: jax.Array) -> jax.Array:
        g = g.astype(x.dtype)
        return dot_rounded(g, rows_for(g, w), (1, 0)) if float32_sums else g @ rows_for(g, w)

    return y, linear_call(forwards, backwards, w, dx)


UNTRAINED = ("layer_scalar",)
"""Names of params that are updated neither by gradients nor by weight decay."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
}


class Linear(nn.Module):
    """Linear layer x W (+ b), where W is an array [in, out] or `Quantized`.

    If the "lora" collection contains an adapter, (x A) B is added. If the "columns" collection contains Wᵀ (from
    `kernels_by_columns`, for decoding on a CPU), Wᵀ is read instead of W.
    """

    features: int
    use_bias: bool
    dtype: jnp.dtype  # dtype of the operands
    stddev: float  # standard deviation of initial weights
    result_dtype: DTypeLike | None = None  # defaults to `dtype`
    float32_sums: bool = False  # see `matmul`

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        out = self.dtype if self.result_dtype is None else self.result_dtype
        kernel = kernel_of(self, "kernel", (x.shape[-1], self.features), self.stddev)
        # Merge the leading axes: for a 4-D operand, XLA's CPU backend takes three times as long for the gradient.
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        if isinstance(kernel, Quantized):
            y = matmul_quantized(x.astype(self.dtype), kernel, out, self.float32_sums)
        elif self.has_variable("columns", "kernel"):
            columns: jax.Array = self.get_variable("columns", "kernel")
            y = matmul_by_columns(x.astype(self.dtype), columns.astype(self.dtype), out, self.float32_sums)
        else:
            y = matmul(x.astype(self.dtype), kernel.astype(self.dtype), out, self.float32_sums)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,)).astype(out)[None]
        if self.has_variable("lora", "a"):
            if self.has_variable("lora", "rate") and self.has_rng("dropout"):
                keep_rate = jnp.asarray(1 - self.get_variable("lora", "rate"))
                keep = jax.random.bernoulli(self.make_rng("dropout"), keep_rate, x.shape)
                x = jnp.where(keep, x / keep_rate.astype(x.dtype), jnp.zeros((), x.dtype))
            a: jax.Array = self.get_variable("lora", "a").astype(self.dtype)
            b: jax.Array = self.get_variable("lora", "b").astype(self.dtype)
            y = y + matmul(matmul(x.astype(self.dtype), a, None, self.float32_sums), b, out, self.float32_sums)
        return y.reshape((*shape[:-1], self.features))


def linear(config: TransformerConfig, name: str, features: int, use_bias: bool = False) -> Linear:
    """Create a `Linear` submodule in the calling module, with the config's dtype."""
    dtype, sums = jnp.dtype(config.dtype), config.uses_float32_sums
    return Linear(features, use_bias, dtype, config.initializer_range, float32_sums=sums, name=name)


def tokens_of(x: jax.Array) -> jax.Array:
    """Reshape x [..., D] to [N, D], where N is the number of tokens."""
    return x.reshape(-1, x.shape[-1])


class Embedding(nn.Module):
    """Token embedding table, which is also the output head if the two are tied."""

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        init, shape = nn.initializers.normal(c.initializer_range), (c.vocab_size, c.hidden_size)
        self.embedding = self.param("embedding", init, shape)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        # "fill" masks ids outside the vocabulary. On a mesh, devices would have to exchange that mask.
        mode = "fill" if c.mesh is None else "clip"
        x = jnp.take(self.embedding, tokens, axis=0, mode=mode).astype(c.dtype)
        return x if c.embedding_scale == 1.0 else x * jnp.asarray(c.embedding_scale, x.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Compute float32 logits [..., V] for hidden states x [..., D]."""
        # With promotion on a mesh, devices would reduce the table's gradient, and store it unsharded, in float32.
        dtype = x.dtype if self.config.mesh is not None else jnp.promote_types(self.embedding.dtype, x.dtype)
        table, sums = self.embedding.astype(dtype), self.config.uses_float32_sums
        return matmul(tokens_of(x), table, jnp.float32, sums, transposed=True).reshape((*x.shape[:-1], -1))


class MLP(nn.Module):
    """Gated MLP, down(act(gate x) · up x) (Shazeer 2020, GLU variants)."""

    config: TransformerConfig
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate, up = (linear(c, name, self.width, c.mlp_bias)(x) for name in ("gate_proj", "up_proj"))
        # Recomputing the activation in the backward pass is cheaper than storing it.
        gated = jax.checkpoint(lambda gate, up: ACTIVATIONS[c.activation](gate) * up)
        return linear(c, "down_proj", c.hidden_size, c.mlp_bias)(gated(gate, up))


def norm(config: TransformerConfig, name: str) -> RMSNorm:
    """Create an `RMSNorm` submodule in the calling module, with the config's epsilon and offset."""
    return RMSNorm(config.rms_norm_eps, config.norm_offset, name=name)


class RMSNorm(nn.Module):
    """RMS norm, x / sqrt(mean(x²) + eps) · (scale + offset), in float32 (Zhang & Sennrich 2019, eq. 4)."""

    eps: float
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        scale = self.param("scale", init, (x.shape[-1],)).astype(jnp.float32) + self.offset
        y = unit_rms(x, self.eps)
        return scale_columns(y.reshape(-1, x.shape[-1]), scale).reshape(x.shape).astype(x.dtype)


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """Compute x / sqrt(mean(x²) + eps) in float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
