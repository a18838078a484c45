"""Frozen matrices in four and eight bits, and the product that reads them.

A matrix W [in, out] is held by the rows of Wᵀ [out, in], as files store it. Each row is cut into blocks, and a weight
is its code's value times the scale of its block:

```
        codes                      value of a code               block       scale of a block
nf4     uint8, two codes a byte    NF4[code], in [−1, 1]         64          float32, or 8 bits twice quantized
int8    int8                       the code, in −127..127        a row       float32
```

With `nested`, scales are themselves in 8 bits: levels[code] · outer of 256 scales + offset: 4.127 bits a weight.
Widths that the block does not divide (nf4) run on over the ends of rows, as in bitsandbytes: codes and scales are then
of one axis, and no mesh cuts them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.typing import DTypeLike

from grpo_jax.models.matmul import wide_product, wide_sums

NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip
"""Values of the 16 codes of NF4 (arXiv:2305.14314, appendix E)."""

NESTED_BLOCK = 256
"""Scales that share an outer scale."""


@flax.struct.dataclass(eq=False)
class Quantized:
    """A frozen matrix in the place of a kernel; a pytree, of which nothing is ever differentiated.

    Attributes:
      codes: uint8 [..., out, in/2], the first code of a byte in its upper half, or int8 [..., out, in].
      scales: [..., out, in/block] float32, or uint8 with `nested`.
      nested: (levels [256], outer [ceil(scales/256)], offset [1]) float32, or None.
      shape: of the matrix that it stands for, [..., in, out].
      block: weights of one scale.
      dtype: name of the dtype that the matrix has where it is written out, as in a merge.

    Example:
      >>> codes, scales = jnp.array([[127, -127], [0, 64]], jnp.int8), jnp.array([[1.0], [2.0]])
      >>> Quantized(codes, scales, None, shape=(2, 2), block=2, dtype="float32").rows(jnp.float32)[0].tolist()
      [127.0, -127.0]
    """

    codes: Any
    scales: Any
    nested: Any = None
    shape: tuple[int, ...] = flax.struct.field(pytree_node=False, kw_only=True)
    block: int = flax.struct.field(pytree_node=False, kw_only=True)
    dtype: str = flax.struct.field(pytree_node=False, kw_only=True)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def rows(self, dtype: DTypeLike) -> jax.Array:
        """Return Wᵀ [..., out, in]: the float32 products of values and scales, rounded to `dtype`."""
        *lead, fan_in, fan_out = self.shape
        values, scales = _values(self.codes), self._scales()
        if scales.ndim == 1:
            size = math.prod(self.shape)
            values, scales = values[:size], jnp.repeat(scales, self.block)[:size]
        else:
            values, scales = values.reshape(*scales.shape, self.block), scales[..., None]
        return (values * scales).astype(dtype).reshape(*lead, fan_out, fan_in)

    def matrix(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Return W [..., in, out], in its own dtype unless another is given."""
        return self.rows(self.dtype if dtype is None else dtype).swapaxes(-1, -2)

    def take(self, at: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return rows `at` [...] of Wᵀ as [..., in] and write out no other; where rows are cut into whole blocks."""
        codes, scales = (jnp.take(x, at, axis=0, mode="clip") for x in (self.codes, self.scales))
        values = _values(codes)
        if self.nested is not None:
            count = scales.shape[-1]
            place = at[..., None] * count + jnp.arange(count).reshape(*[1] * at.ndim, -1)
            scales = self._plain(scales, jnp.take(self.nested[1], place // NESTED_BLOCK, mode="clip"))
        blocks = values.reshape(*scales.shape, self.block) * scales[..., None]
        return blocks.astype(dtype).reshape(values.shape)

    def _scales(self) -> jax.Array:
        """Return the scale of each block in float32."""
        if self.nested is None:
            return self.scales
        outer = jnp.repeat(self.nested[1], NESTED_BLOCK)[: math.prod(self.scales.shape)].reshape(self.scales.shape)
        return self._plain(self.scales, outer)

    def _plain(self, scales: jax.Array, outer: jax.Array) -> jax.Array:
        """Return nested scales in float32, given the outer scale of each."""
        levels, _, offset = self.nested
        # PyTorch rounds the product before it adds. A compiler would make one multiply-add of both, but for the
        # maximum, which leaves every number as it is.
        return jnp.maximum(levels[scales.astype(jnp.int32)] * outer, jnp.finfo(jnp.float32).min) + offset[0]


def _values(codes: jax.Array) -> jax.Array:
    """Return the float32 values of codes; of packed ones twice as many on the last axis."""
    if codes.dtype != jnp.uint8:
        return codes.astype(jnp.float32)
    codes = jnp.stack([codes >> 4, codes & 15], axis=-1).reshape(*codes.shape[:-1], -1)
    # Sixteen choices and no table: they fuse with what reads them on every backend.
    return functools.reduce(jnp.add, (jnp.where(codes == i, value, jnp.float32(0)) for i, value in enumerate(NF4)))


def is_quantized(tree: Any) -> bool:
    """Return whether a tree of parameters has any quantized matrix."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Quantized))
    return any(isinstance(leaf, Quantized) for leaf in leaves)


def quantized_kernel(module: nn.Module, name: str = "kernel") -> Quantized | None:
    """Return the parameter of a Flax module if it is held quantized."""
    held = module.get_variable("params", name) if module.has_variable("params", name) else None
    return held if isinstance(held, Quantized) else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def matmul_quantized(x: jax.Array, w: Quantized, dtype: DTypeLike | None = None, wide: bool = False) -> jax.Array:
    """x W, for x [N, in]; `dtype` and `wide` as in `matmul.matmul`. The gradient goes to x alone.

    W is written out in the dtype of x where it is needed, and again for the gradient: kept from the forward to the
    backward pass, the matrices would be the model in 16 bits.
    """
    return _value(x, w, dtype, wide)


def _value(x: jax.Array, w: Quantized, dtype: DTypeLike | None, wide: bool) -> jax.Array:
    """The product itself, in which policies of `jax.checkpoint` see one."""
    if wide:
        return wide_sums(x, rows_for(x, w), (1, 1)).astype(dtype or x.dtype)
    return jnp.matmul(x, rows_for(x, w).T, preferred_element_type=dtype)


def rows_for(x: jax.Array, w: Quantized) -> jax.Array:
    """Return Wᵀ in the dtype of x, not before x is there.

    A compiler would else write out all matrices at the beginning of a program, or keep those of the forward pass for
    the backward pass, or take them out of a loop over tokens.
    """
    x = jax.lax.stop_gradient(x)

    def later(codes):
        return jax.lax.platform_dependent(codes, x, cpu=_after, default=_beside)

    scales = w.scales if w.nested is None else later(w.scales)
    return dataclasses.replace(w, codes=later(w.codes), scales=scales).rows(x.dtype)


def _beside(codes: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier((codes, x))[0]


def _after(codes: jax.Array, x: jax.Array) -> jax.Array:
    """Return codes that depend on x by a zero that looks like none: the order of a CPU's program heeds no barrier."""
    bits = jax.lax.bitcast_convert_type(x[0, 0].astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    return codes ^ jnp.minimum(bits, 0).astype(codes.dtype)


@functools.partial(matmul_quantized.defjvp, symbolic_zeros=True)
def _matmul_quantized_jvp(dtype, wide, primals, tangents):
    (x, w), (dx, _) = primals, tangents
    y = _value(x, w, dtype, wide)
    if isinstance(dx, SymbolicZero):
        return y, jnp.zeros_like(y)

    def forwards(w, dx):
        if wide:
            return wide_product(dx, rows_for(dx, w), (1, 1)).astype(y.dtype)
        return (dx @ rows_for(dx, w).T).astype(y.dtype)

    def backwards(w, g):
        g = g.astype(x.dtype)
        return wide_product(g, rows_for(g, w), (1, 0)) if wide else g @ rows_for(g, w)

    return y, linear_call(forwards, backwards, w, dx)
