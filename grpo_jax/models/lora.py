"""Low-rank adapters (LoRA).

An adapted projection computes y = x W + s (x A) B, with W frozen and s = alpha / rank, without a merged copy of W.
`LoraModel` is a model whose params are the adapters. B is initially 0, so the policy starts as the base, and the
reference is a copy of the adapters: the base is in memory once. A reference that follows the policy has the adapters of
several syncs (`reference_of`).

```
params of a Transformer                        adapters ("params" of a LoraModel)
layers_0/self_attn/q_proj/kernel [in, out]     layers_0/self_attn/q_proj/a [in, rank], …/b [rank, out]
layers_0/mlp/up_proj/kernel      [in, out]     layers_0/mlp/up_proj/a      [in, rank], …/b [rank, out]
```
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.layers import Quantized
from grpo_jax.models.transformer import Transformer, projections
from grpo_jax.types import Params

TARGETS = (
    r"layers_\d+/"
    r"(self_attn/(q|k|v|o)_proj|linear_attn/(in_proj_\w+|out_proj)|conv/(in|out)_proj|mlp/(gate|up|down)_proj"
    r"|per_layer_(input_gate|projection))"
)
"""All projections of attention, recurrent layers, dense MLPs and per-layer embeddings; not the head, the embedding,
routers or experts."""


@flax.struct.dataclass(eq=False)
class LoraModel:
    """A frozen base with low-rank adapters, as a model whose params are the adapters.

    It is a pytree with the base's arrays as leaves: pass it as an argument of a jitted function. As a static argument
    or in a closure, every compiled function would have a copy of the base as a constant.

    Attributes:
      base: params of `model`, without gradient.
      model: the decoder.
      scale: s, alpha / rank.
      dropout: rate on the input of A, used if `apply` has `rngs={"dropout": key}`.

    Example:
      >>> import jax
      >>> from grpo_jax.models.config import TransformerConfig
      >>> model = Transformer(TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> tokens = jax.numpy.zeros((1, 3), "int32")
      >>> base = model.init(jax.random.key(0), tokens)["params"]
      >>> adapters = init_adapters(jax.random.key(1), base, rank=2)
      >>> LoraModel(base, model, scale=2.0).apply({"params": adapters}, tokens).shape
      (1, 3, 32)
    """

    base: Params
    model: Transformer = flax.struct.field(pytree_node=False)
    scale: float = flax.struct.field(pytree_node=False, default=1.0)
    dropout: float = flax.struct.field(pytree_node=False, default=0.0)

    @property
    def config(self) -> TransformerConfig:
        """The shape of the decoder."""
        return self.model.config

    @property
    def prefill(self) -> Callable[..., object]:
        """The decoder's method, which `types.is_cached` looks for; call it as `apply(..., method="prefill")`."""
        return self.model.prefill

    def apply(self, variables: Params, *args: Any, **kwargs: Any) -> Any:
        """`Transformer.apply` with adapters as params; {} is the base."""
        factor = jnp.float32(self.scale)

        def scaled(node: Params) -> Params:
            if "a" not in node:
                return {name: scaled(child) for name, child in node.items()}
            b = node["b"]
            leaf = {"a": node["a"], "b": (b.astype(jnp.float32) * factor).astype(b.dtype)}
            return {**leaf, "rate": jnp.float32(self.dropout)} if self.dropout else leaf

        collections = {**variables, "params": self.base, "lora": scaled(variables["params"])}
        return self.model.apply(collections, *args, **kwargs)


def init_adapters(
    key: jax.Array, base: Params, *, rank: int, targets: str = TARGETS, init: Literal["uniform", "gaussian"] = "uniform"
) -> Params:
    """Initialize adapters: A as in PEFT, and B zero.

    Args:
      key: typed PRNG key, consumed.
      rank: columns of A, at least 1.
      targets: regular expression that has to match the whole path of a projection, such as `layers_0/self_attn/q_proj`.
      init: A is "uniform" in ±in^(−1/2), or "gaussian" with the standard deviation 1 / rank.

    Returns:
      Adapters, float32, nested like `base`.

    Raises:
      ValueError: a rank below 1, an unknown init, or targets that match no projection.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; it has to be at least 1.")
    if init not in ("uniform", "gaussian"):
        raise ValueError(f"init is {init!r}; it has to be 'uniform' or 'gaussian'.")
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise ValueError(f"targets {targets!r} is not a regular expression: {error}.") from error
    kernels = dict(projections(base))
    chosen = [path for path in kernels if pattern.fullmatch("/".join(path))]
    if not chosen:
        example = "/".join(next(iter(kernels)))
        raise ValueError(f"targets {targets!r} matches no projection; the whole of a path as {example!r} has to match.")
    adapters: dict[tuple[str, ...], jax.Array] = {}
    for path, subkey in zip(chosen, jax.random.split(key, len(chosen)), strict=True):
        fan_in, fan_out = kernels[path].shape
        bound = fan_in**-0.5
        adapters[(*path, "a")] = (
            jax.random.uniform(subkey, (fan_in, rank), jnp.float32, -bound, bound)
            if init == "uniform"
            else jax.random.normal(subkey, (fan_in, rank)) / rank
        )
        adapters[(*path, "b")] = jnp.zeros((rank, fan_out), jnp.float32)
    return unflatten_dict(adapters)


FADED = 1e-6
"""Weight below which earlier adapters are dropped from a reference: a tenth of the resolution of log-probs."""


def reference_of(adapters: Params, alpha: float) -> Params:
    """Return adapters of a reference that follows the policy by `sync_adapters`, initially equal to it; float32.

    The reference's weights are a weighted sum of earlier A B, which is not a product of mixed A and mixed B. So the
    factors of the last n syncs are concatenated, [in, n·rank] and [n·rank, out], with the smallest n for which
    (1 − alpha)ⁿ ≤ `FADED`: 16 for alpha = 0.6. If that is not smaller than the matrix, the factors are the matrix and
    an identity. With alpha = 1 a sync copies the adapters, and they are returned unchanged.

    Args:
      alpha: in (0, 1], the weight of the policy in each sync.
    """
    if alpha == 1:
        return adapters
    count = math.ceil(math.log(FADED) / math.log1p(-alpha))

    def one(a: jax.Array, b: jax.Array) -> Params:
        (height, rank), width = a.shape, b.shape[1]
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if rank < min(height, width) <= count * rank:
            return _as_a_matrix(_matmul(a, b))
        more = (count - 1) * rank
        return {"a": jnp.pad(a, ((0, 0), (0, more))), "b": jnp.pad(b, ((0, more), (0, 0)))}

    return _of_each(one, adapters)


def sync_adapters(reference: Params, adapters: Params, step: jax.Array, *, every: int, alpha: float) -> Params:
    """`maths.reference.sync_reference` of the weights A B instead of the factors.

        A_ref B_ref ← alpha·A B + (1 − alpha)·A_ref B_ref   if step % every == 0

    Args:
      step: [] integer, number of optimizer steps done so far.
      every: steps between two syncs.
      alpha: as in `reference_of`.
    """

    def one(a: jax.Array, b: jax.Array, a_ref: jax.Array, b_ref: jax.Array) -> Params:
        (height, rank), width = a.shape, b.shape[1]
        a, b, fade = a.astype(jnp.float32), b.astype(jnp.float32), 1 - alpha
        if rank < min(height, width) == a_ref.shape[1]:
            return _as_a_matrix(alpha * _matmul(a, b) + fade * (b_ref if height <= width else a_ref))
        start = (step // every) * rank % a_ref.shape[1]  # replaces the oldest adapters
        put = jax.lax.dynamic_update_slice_in_dim
        return {"a": put(a_ref, a, start, axis=1), "b": put(fade * b_ref, alpha * b, start, axis=0)}

    return jax.lax.cond(step % every == 0, lambda: _of_each(one, adapters, reference), lambda: reference)


def _as_a_matrix(x: jax.Array) -> Params:
    """Return a matrix [in, out] as a product with an identity."""
    height, width = x.shape
    return {"a": jnp.eye(height), "b": x} if height <= width else {"a": x, "b": jnp.eye(width)}


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _of_each(function: Callable[..., Params], *trees: Params) -> Params:
    """Map a function of the A and B of each tree over trees of adapters."""
    if "a" in trees[0]:
        return function(*(tree[name] for tree in trees for name in ("a", "b")))
    return {name: _of_each(function, *(tree[name] for tree in trees)) for name in trees[0]}


def merge_adapters(base: Params, adapters: Params, scale: float) -> Params:
    """Return the params of a plain `Transformer` that computes the same: W + s A B in float32, leaf dtype kept.

    A quantized base is dequantized to host memory, since it may not fit on its device.
    """
    merged = {}
    for name, node in base.items():
        extra = adapters.get(name, {})
        if not isinstance(node, Mapping):
            merged[name] = _dequantized(name, node) if isinstance(node, Quantized) else node
        elif "a" in extra:
            merged[name] = {**node, "kernel": _merged(node["kernel"], extra, scale)}
        else:
            merged[name] = merge_adapters(node, extra, scale)
    return merged


# Jitted, since each of their forty operations would be compiled for each shape.
_rows = jax.jit(Quantized.rows, static_argnames="dtype")
_matrix = jax.jit(Quantized.matrix, static_argnames="dtype")


def _dequantized(name: str, held: Quantized) -> np.ndarray:
    """Return the matrix of a quantized parameter; an embedding is stored like the kernel of the head tied to it."""
    return np.asarray((_rows if name == "embedding" else _matrix)(held, held.dtype))


def _merged(kernel: jax.Array | Quantized, adapter: Params, scale: float) -> jax.Array | np.ndarray:
    """Return a kernel merged with its adapter; on the host if it was quantized."""
    delta = scale * (adapter["a"].astype(jnp.float32) @ adapter["b"].astype(jnp.float32))
    if isinstance(kernel, Quantized):
        return np.asarray((_matrix(kernel, jnp.float32) + delta).astype(kernel.dtype))
    return (kernel.astype(jnp.float32) + delta).astype(kernel.dtype)
