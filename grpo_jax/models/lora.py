"""Low-rank adapters (LoRA).

An adapted projection computes y = x W + s (x A) B, with W [in, out] frozen and s = alpha / rank. For each adapted
kernel, such as layers_0/self_attn/q_proj/kernel, there are arrays A [in, rank] and B [rank, out] at …/q_proj/a and
…/q_proj/b. B is initialized to 0, so the policy initially equals the base. A reference policy consists of adapters from
one or more syncs (`reference_adapters`), so the base is stored only once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.layers import Quantized
from grpo_jax.models.transformer import Transformer, projections
from grpo_jax.types import Params

TARGETS = (
    r"layers_\d+/"
    r"(self_attn/(q|k|v|o)_proj|linear_attn/(in_proj_\w+|out_proj)|conv/(in|out)_proj|mlp/(gate|up|down)_proj"
    r"|per_layer_(input_gate|projection))"
)
"""Default targets: each layer's projections in attention, recurrent mixers, dense MLPs and per-layer inputs. The output
head, embeddings, routers and experts are not adapted."""


@flax.struct.dataclass(eq=False)
class LoraModel:
    """A frozen base model with low-rank adapters as the model's params.

    It is a pytree with the base's arrays as leaves. Pass it to jitted functions as a regular argument. If it were a
    static argument or captured by a closure, the base would be a constant in every compiled function.
    """

    base: Params  # frozen params of `model`
    model: Transformer = flax.struct.field(pytree_node=False)
    scale: float = flax.struct.field(pytree_node=False, default=1.0)  # s = alpha / rank
    dropout: float = flax.struct.field(pytree_node=False, default=0.0)  # dropout rate for the input to A

    @property
    def config(self) -> TransformerConfig:
        return self.model.config

    @property
    def prefill(self) -> Callable[..., object]:
        """The decoder's `prefill` method. Call it with `apply(..., method="prefill")`."""
        return self.model.prefill

    def apply(self, variables: Params, *args: Any, **kwargs: Any) -> Any:
        """Call `Transformer.apply` with adapters as params. Empty params select the base model."""

        def scaled(adapter: Params) -> Params:
            b = adapter["b"].astype(jnp.float32) * jnp.float32(self.scale)
            factors = {"a": adapter["a"], "b": b.astype(adapter["b"].dtype)}
            return {**factors, "rate": jnp.float32(self.dropout)} if self.dropout else factors

        lora = jax.tree.map(scaled, variables["params"], is_leaf=_is_adapter)
        return self.model.apply({**variables, "params": self.base, "lora": lora}, *args, **kwargs)


def _is_adapter(node: Params) -> bool:
    return "a" in node


def init_adapters(key: jax.Array, base: Params, *, rank: int, targets: str = TARGETS) -> Params:
    """Create float32 adapters, nested like `base`, for the projections whose full path matches `targets`.

    As in PEFT, A is uniform in ±in^(−1/2), and B is zero.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}.")
    if not isinstance(targets, str):
        raise ValueError(f"targets must be a regular expression, such as '.*/(q_proj|v_proj)'; got {targets!r}.")
    kernels = dict(projections(base))
    chosen = [path for path in kernels if re.fullmatch(targets, "/".join(path))]
    if not chosen:
        example = "/".join(next(iter(kernels)))
        raise ValueError(f"targets must match the full path of a projection, such as {example!r}; got {targets!r}.")
    adapters: dict[tuple[str, ...], jax.Array] = {}
    for path, subkey in zip(chosen, jax.random.split(key, len(chosen)), strict=True):
        fan_in, fan_out = kernels[path].shape
        bound = fan_in**-0.5
        adapters[(*path, "a")] = jax.random.uniform(subkey, (fan_in, rank), jnp.float32, -bound, bound)
        adapters[(*path, "b")] = jnp.zeros((rank, fan_out), jnp.float32)
    return unflatten_dict(adapters)


FADED = 1e-6
"""Adapters from old syncs are dropped from a reference once their weight no longer exceeds this value."""


def reference_adapters(adapters: Params, alpha: float) -> Params:
    """Create float32 reference adapters for `sync_adapter_products`, initially equivalent to the policy's adapters.

    A weighted sum of products A B differs from the product of averaged factors. Therefore, the factors from the last n
    syncs are concatenated, [in, n·rank] and [n·rank, out], with the smallest n such that (1 − alpha)ⁿ ≤ `FADED`. If
    n·rank is at least the smaller side of A B, the product A B and an identity are used as factors. With alpha = 1, a
    sync copies the adapters, so they are returned unchanged.
    """
    if alpha == 1:
        return adapters
    count = math.ceil(math.log(FADED) / math.log1p(-alpha))

    def make_reference(adapter: Params) -> Params:
        a, b = adapter["a"].astype(jnp.float32), adapter["b"].astype(jnp.float32)
        (height, rank), width = a.shape, b.shape[1]
        if min(height, width) <= count * rank:
            return _as_adapter(jnp.matmul(a, b, precision="highest"))
        padding = (count - 1) * rank
        return {"a": jnp.pad(a, ((0, 0), (0, padding))), "b": jnp.pad(b, ((0, padding), (0, 0)))}

    return jax.tree.map(make_reference, adapters, is_leaf=_is_adapter)


def sync_adapter_products(reference: Params, adapters: Params, step: jax.Array, *, every: int, alpha: float) -> Params:
    """Apply `maths.reference.sync_reference` to adapters, but average the products A B instead of the factors.

    A_ref B_ref ← alpha·A B + (1 − alpha)·A_ref B_ref   if step % every == 0
    """

    def sync(adapter: Params, reference: Params) -> Params:
        a, b = adapter["a"].astype(jnp.float32), adapter["b"].astype(jnp.float32)
        a_ref, b_ref, decay = reference["a"], reference["b"], 1 - alpha
        (height, rank), width = a.shape, b.shape[1]
        if min(height, width) == a_ref.shape[1]:
            product = jnp.matmul(a, b, precision="highest")
            return _as_adapter(alpha * product + decay * (b_ref if height <= width else a_ref))
        start = (step // every) * rank % a_ref.shape[1]  # offset of the oldest adapters, to overwrite
        update = jax.lax.dynamic_update_slice_in_dim
        return {"a": update(a_ref, a, start, axis=1), "b": update(decay * b_ref, alpha * b, start, axis=0)}

    def sync_all() -> Params:
        return jax.tree.map(sync, adapters, reference, is_leaf=_is_adapter)

    return jax.lax.cond(step % every == 0, sync_all, lambda: reference)


def _as_adapter(x: jax.Array) -> Params:
    """Express a matrix [in, out] as an adapter: the matrix times an identity."""
    height, width = x.shape
    return {"a": jnp.eye(height), "b": x} if height <= width else {"a": x, "b": jnp.eye(width)}


def merge_adapters(base: Params, adapters: Params, scale: float) -> Params:
    """Compute params for a `Transformer` without adapters: W + s A B, computed in float32 and cast to W's dtype.

    A quantized base is dequantized into host memory, since the result may not fit into device memory.
    """
    merged, factors = flatten_dict(base), flatten_dict(adapters)
    for path, leaf in merged.items():
        quantized = isinstance(leaf, Quantized)
        matrix = _matrix(leaf, jnp.float32) if quantized else leaf
        if path[-1] == "kernel" and (*path[:-1], "a") in factors:
            a, b = (factors[(*path[:-1], name)].astype(jnp.float32) for name in ("a", "b"))
            product = jnp.matmul(a, b, precision="highest")
            matrix = (matrix.astype(jnp.float32) + scale * product).astype(leaf.dtype)
        merged[path] = np.asarray(matrix.astype(leaf.dtype)) if quantized else matrix
    return unflatten_dict(merged)


# Use `jit`, since otherwise each operation in `Quantized.matrix` would be compiled separately for every shape.
_matrix = jax.jit(Quantized.matrix, static_argnames="dtype")
