"""What a run is planned for: the model that is named, and how its params are loaded; shapes only."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config.checks import device_problems
from grpo_jax.config.config import GRPOConfig
from grpo_jax.hub.families import read_config
from grpo_jax.hub.huggingface import find_checkpoint
from grpo_jax.hub.quantize import Quantization, check_method, held_shape, quantized_shape, without_quantization
from grpo_jax.hub.tensors import abstract_params
from grpo_jax.messages import raise_all
from grpo_jax.models.layers import TransformerConfig
from grpo_jax.models.lora import init_adapters
from grpo_jax.planning.compiled import bytes_on_device


def read_model(model: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a name, a directory, or a file; or what one holds."""
    if isinstance(model, Mapping):
        return dict(model)
    path = Path(model)
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    return json.loads((find_checkpoint(model, weights=False) / "config.json").read_text(encoding="utf-8"))


class Loaded(NamedTuple):
    """How the params of a run are loaded, and whether it takes them; fields as in `plan`."""

    param_dtype: str = "float32"
    lora: int | Mapping[str, Any] | None = None
    quantize: str | None = None
    quantize_embeddings: bool = False
    donate: bool = False

    def params(self, shape: TransformerConfig, raw: Mapping[str, Any]) -> tuple[Any, Any]:
        """The shapes of what is trained, and of the base that is not; None where all params are trained."""
        method = self.quantize or ("nf4" if raw.get("quantization_config") else None)
        how = Quantization(method, self.quantize_embeddings, shape.tie_word_embeddings)

        def leaf(path: Any, x: Any) -> Any:
            names = [entry.key for entry in path]
            if (method := how.of(names, x.shape)) is not None:
                return quantized_shape(held_shape(names, x.shape), method, self.param_dtype, jax.ShapeDtypeStruct)
            return jax.ShapeDtypeStruct(x.shape, jnp.dtype(self.param_dtype))

        held = jax.tree_util.tree_map_with_path(leaf, abstract_params(shape))
        if self.lora is None:
            return held, None
        adapters = {"rank": 16} | ({"rank": self.lora} if isinstance(self.lora, int) else dict(self.lora))
        return jax.eval_shape(lambda key: init_adapters(key, held, **adapters), jax.random.key(0)), held


def checked(raw: Mapping[str, Any], config: GRPOConfig, loaded: Loaded) -> Loaded:
    """`loaded` itself.

    ValueError for settings that `train` would refuse on the devices of the mesh, for a model that is not supported, or
    for one that is quantized and not frozen.
    """
    raise_all("this plan", list(device_problems(config, math.prod((config.mesh or {}).values()))))
    lora, quantize = loaded.lora, loaded.quantize
    check_method(quantize, loaded.quantize_embeddings)
    read_config(without_quantization(raw))
    if isinstance(lora, int) and lora < 1:
        raise ValueError(f"lora is {lora}; it is the rank of adapters, at least 1.")
    stored = quantize or ("nf4" if raw.get("quantization_config") else None)
    if lora is None and stored is not None:
        raise ValueError(f"quantize is {stored!r}: quantized params cannot be trained; give lora, a rank of adapters.")
    return loaded


def held_bytes(state: Any, base: Any, *, donate: bool = False) -> dict[str, int]:
    """Bytes that stay on each device, by part, of a training state, the base under adapters and the caller's params."""
    held = {
        "base": base,
        "params": state.params,
        "master params": state.master_params,
        "optimizer": state.opt_state,
        "reference": state.ref_params,
        "old params": state.old_params,
        "initial params": state.initial_params,
        "policy": None if donate else state.params,
    }
    return {name: size for name, tree in held.items() if (size := bytes_on_device(tree))}
