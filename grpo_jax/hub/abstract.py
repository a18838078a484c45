"""The params of a model as they would be loaded: their shapes, without reading a weight."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from grpo_jax.hub.families import read_config
from grpo_jax.hub.huggingface import checkpoint_config, find_checkpoint
from grpo_jax.hub.quantize import Quantization, check_method, held_shape, quantized_shape, without_quantization
from grpo_jax.hub.tensors import abstract_params
from grpo_jax.models.layers import TransformerConfig
from grpo_jax.models.lora import TARGETS, init_adapters
from grpo_jax.models.quantized import Quantized
from grpo_jax.types import Json, Params

ModelName = str | os.PathLike[str] | Json
"""A name on the hub, a directory, a config.json, or its content."""


def read_model(model: ModelName) -> Json:
    """The content of a model's config.json."""
    if isinstance(model, Mapping):
        return dict(model)
    path = Path(model)
    if path.is_file() and path.suffix != ".gguf":
        return json.loads(path.read_text(encoding="utf-8"))
    return checkpoint_config(find_checkpoint(model, weights=False))


@dataclasses.dataclass(frozen=True)
class Loading:
    """How the params of a run are loaded, for their shapes.

    Attributes:
      param_dtype: "float32" or "bfloat16", of the params as they are loaded.
      lora: rank of adapters on a frozen base, or `rank` and `targets` of `add_lora`; None: all params are trained.
      quantize: how that base is held, as in `from_pretrained`; None: plain, or in NF4 if bitsandbytes has stored it so.
      quantize_embeddings: as in `from_pretrained`.
    """

    param_dtype: str = "float32"
    lora: int | Json | None = None
    quantize: str | None = None
    quantize_embeddings: bool = False

    def check(self, raw: Json) -> None:
        """Raise a `ValueError` for an unknown model, or one that is quantized and not frozen."""
        check_method(self.quantize, self.quantize_embeddings)
        read_config(without_quantization(raw))
        if self.lora is not None and self._rank < 1:
            raise ValueError(f"lora is {self.lora}; it is the rank of adapters, at least 1.")
        method = self._method(raw)
        if self.lora is None and method is not None:
            raise ValueError(
                f"quantize is {method!r}: quantized params cannot be trained; give lora, a rank of adapters."
            )

    def params(self, shape: TransformerConfig, raw: Json) -> tuple[Params, Params | None]:
        """The shapes of what is trained, and of the frozen base; None where all params are trained."""
        quantization = Quantization(self._method(raw), self.quantize_embeddings, shape.tie_word_embeddings)

        def held(path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | Quantized:
            names = [entry.key for entry in path]
            if (method := quantization.of(names, x.shape)) is not None:
                return quantized_shape(held_shape(names, x.shape), method, self.param_dtype, jax.ShapeDtypeStruct)
            return jax.ShapeDtypeStruct(x.shape, jnp.dtype(self.param_dtype))

        params = jax.tree_util.tree_map_with_path(held, abstract_params(shape))
        if self.lora is None:
            return params, None
        targets = TARGETS if isinstance(self.lora, int) else self.lora.get("targets", TARGETS)
        init = functools.partial(init_adapters, base=params, rank=self._rank, targets=targets)
        return jax.eval_shape(init, jax.random.key(0)), params

    @property
    def _rank(self) -> int:
        """The rank of adapters."""
        return self.lora if isinstance(self.lora, int) else (self.lora or {}).get("rank", 16)

    def _method(self, raw: Json) -> str | None:
        """How the projections are quantized: as requested, or in NF4 where they are stored so."""
        return self.quantize or ("nf4" if raw.get("quantization_config") else None)
