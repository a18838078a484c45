"""Low-rank adapters: train a few thousandths of a model and leave its weights alone.

An adapted projection computes y = x W + s (x A) B, with W frozen and s = alpha / rank; no merged copy of W is ever made
in training. `LoraModel` is a model by the same protocol whose parameters are the adapters. A fresh adapter has B = 0,
so the policy begins as the base, and a reference policy is a copy of a few adapters: the base is in memory once.

```
params of a Transformer                        adapters ("params" of a LoraModel)
layers_0/self_attn/q_proj/kernel [in, out]     layers_0/self_attn/q_proj/a [in, rank], …/b [rank, out]
layers_0/mlp/up_proj/kernel      [in, out]     layers_0/mlp/up_proj/a      [in, rank], …/b [rank, out]
```
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from grpo_jax.models.layers import TransformerConfig
from grpo_jax.models.quantized import Quantized
from grpo_jax.models.transformer import Transformer, projections
from grpo_jax.types import Params

TARGETS = (
    r"layers_\d+/"
    r"(self_attn/(q|k|v|o)_proj|linear_attn/(in_proj_\w+|out_proj)|conv/(in|out)_proj|mlp/(gate|up|down)_proj"
    r"|per_layer_(input_gate|projection))"
)
"""Every projection of attention, of a recurrent layer and of a dense MLP, and those of what a layer is told of a token;
not the head, the embedding, a router or experts."""


@flax.struct.dataclass(eq=False)
class LoraModel:
    """A frozen base with low-rank adapters, as a model whose params are the adapters.

    It is a pytree with the base's arrays as leaves, so it can be an argument of a jitted function; as a static argument
    or in a closure it works too, but the base is then a constant that every compiled function holds a copy of.

    Attributes:
      base: params of `model`; held, never differentiated.
      model: the decoder.
      scale: s, alpha / rank.
      dropout: rate on the input of A, in force where `apply` is given `rngs={"dropout": key}`.

    Example:
      >>> import jax
      >>> from grpo_jax.models.layers import TransformerConfig
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
    def prefill(self) -> Any:
        """The decoder's method, by which `types.is_cached` knows it; call it by `apply(..., method="prefill")`."""
        return self.model.prefill

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """As `Transformer.apply`, with adapters for params; {} is the base."""
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
    """Fresh adapters: A drawn as PEFT draws it, and B zero.

    Args:
      key: typed PRNG key, consumed.
      base: params of a `Transformer`.
      rank: columns of A, at least 1.
      targets: regular expression that the whole path of a projection, as `layers_0/self_attn/q_proj`, has to match.
      init: A is "uniform" in ±in^(−1/2), or "gaussian" with the standard deviation 1 / rank.

    Returns:
      Adapters, float32, nested like `base`.

    Raises:
      ValueError: a rank below 1, another init, or targets that no projection matches.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; it has to be at least 1.")
    if init not in ("uniform", "gaussian"):
        raise ValueError(f"init is {init!r}; it has to be 'uniform' or 'gaussian'.")
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise ValueError(f"targets {targets!r} is no regular expression: {error}.") from error
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


def merge_adapters(base: Params, adapters: Params, scale: float) -> Params:
    """The params of a plain `Transformer` that computes the same: W + s A B in float32, leaf dtype kept.

    A base that is quantized is written out on the host, since it may not fit where it is held.
    """
    merged = {}
    for name, node in base.items():
        extra = adapters.get(name, {})
        if not isinstance(node, Mapping):
            merged[name] = _written_out(name, node) if isinstance(node, Quantized) else node
        elif "a" in extra:
            merged[name] = {**node, "kernel": _merged(node["kernel"], extra, scale)}
        else:
            merged[name] = merge_adapters(node, extra, scale)
    return merged


def _written_out(name: str, held: Quantized) -> np.ndarray:
    """What a quantized parameter stands for; an embedding is held as the kernel of the head that is tied to it."""
    return np.asarray(held.rows(held.dtype) if name == "embedding" else held.matrix())


def _merged(kernel: Any, adapter: Params, scale: float) -> Any:
    """One kernel with its adapter; on the host if it was quantized."""
    delta = scale * (adapter["a"].astype(jnp.float32) @ adapter["b"].astype(jnp.float32))
    if isinstance(kernel, Quantized):
        return np.asarray((kernel.matrix(jnp.float32) + delta).astype(kernel.dtype))
    return (kernel.astype(jnp.float32) + delta).astype(kernel.dtype)
