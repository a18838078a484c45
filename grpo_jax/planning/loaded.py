"""The model of a run that is planned, and how its params are loaded; shapes only."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config.checks import device_problems, mesh_problems
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import Config, SFTConfig
from grpo_jax.hub.families import read_config
from grpo_jax.hub.huggingface import checkpoint_config, find_checkpoint
from grpo_jax.hub.quantize import Quantization, check_method, held_shape, quantized_shape, without_quantization
from grpo_jax.hub.tensors import abstract_params
from grpo_jax.messages import raise_all
from grpo_jax.models.layers import TransformerConfig
from grpo_jax.models.lora import TARGETS, init_adapters
from grpo_jax.models.quantized import Quantized
from grpo_jax.types import Json, Params

Model = str | os.PathLike[str] | Json
"""A name on the hub, a directory, a config.json, or what one holds."""


def read_model(model: Model) -> Json:
    """The content of a model's config.json."""
    if isinstance(model, Mapping):
        return dict(model)
    path = Path(model)
    if path.is_file() and path.suffix != ".gguf":
        return json.loads(path.read_text(encoding="utf-8"))
    return checkpoint_config(find_checkpoint(model, weights=False))


class Taught(NamedTuple):
    """The teacher of a run that is planned.

    Attributes:
      model: the content of its config.json.
      quantize: how its params are held, as in `from_pretrained`.
    """

    model: Json
    quantize: str | None = None

    def check(self, config: Config) -> None:
        """Raise a `ValueError` unless a run with these settings learns from it."""
        if not isinstance(config, GRPOConfig) or config.distillation_coef == 0:
            raise ValueError("teacher: nothing would be learned from it; set distillation_coef, or leave it out")
        if config.distillation_mode == "topk_logits":
            raise ValueError("teacher: distillation_mode = 'topk_logits' is for a server, which holds nothing here")
        check_method(self.quantize)
        read_config(without_quantization(self.model))


@dataclasses.dataclass(frozen=True)
class Loaded:
    """How the params of a run are loaded, and whether it takes them; fields as in `plan`."""

    param_dtype: str = "float32"
    lora: int | Json | None = None
    quantize: str | None = None
    quantize_embeddings: bool = False
    donate: bool = False

    def check(self, raw: Json, config: Config) -> None:
        """Raise unless this is a run of that config.json.

        Raises:
          ValueError: settings that `train` would refuse on the devices of the mesh, a model that is not supported, or
            one that is quantized and not frozen.
        """
        devices = math.prod((config.mesh or {}).values())
        problems = mesh_problems(config, devices) if isinstance(config, SFTConfig) else device_problems(config, devices)
        raise_all("this plan", list(problems))
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
        """The shapes of what is trained, and of the base that is not; None where all params are trained."""
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

    def of_teacher(self, taught: Taught) -> Params:
        """The shapes of the params of a teacher that is another model."""
        shape = read_config(without_quantization(taught.model))
        held = dataclasses.replace(self, lora=None, quantize=taught.quantize, quantize_embeddings=False)
        return held.params(shape, taught.model)[0]

    @property
    def _rank(self) -> int:
        """The rank of adapters."""
        return self.lora if isinstance(self.lora, int) else (self.lora or {}).get("rank", 16)

    def _method(self, raw: Json) -> str | None:
        """How the projections are quantized: as asked for, or in NF4 where they are stored so."""
        return self.quantize or ("nf4" if raw.get("quantization_config") else None)
