"""Image encoders ("towers") of vision-language checkpoints: their configuration, and their parameters in both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.hub.files import READ, STORED
from grpo_jax.hub.keys import Keys, activation_of, text_config
from grpo_jax.hub.tensors import SUFFIXES
from grpo_jax.messages import some
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.qwen_vision import QwenTower, QwenVisionConfig
from grpo_jax.models.rope import Rope
from grpo_jax.models.siglip import SiglipConfig, SiglipTower
from grpo_jax.policy import Policy
from grpo_jax.types import Json, Params

_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
_IDEFICS3 = {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_QWEN = {
    "hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "layer_norm_eps": 1e-6,
    "in_channels": 3, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 112,
    "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31], "rope_parameters": {},
}  # fmt: skip

_GEMMA3_PREFIXES = {
    "encoder": (
        "vision_tower.vision_model.",
        "vision_tower.",
        "model.vision_tower.",
        "model.vision_tower.vision_model.",
    ),
    "projector": ("multi_modal_projector.", "model.multi_modal_projector."),
}
_IDEFICS3_PREFIXES: dict[str, tuple[str, ...]] = {
    "encoder": ("model.vision_model.",),
    "projector": ("model.connector.modality_projection.",),
}
PREFIXES: dict[str, dict[str, tuple[str, ...]]] = {
    "Gemma3ForConditionalGeneration": _GEMMA3_PREFIXES,
    "Idefics3ForConditionalGeneration": _IDEFICS3_PREFIXES,
    "SmolVLMForConditionalGeneration": _IDEFICS3_PREFIXES,
    "Qwen2_5_VLForConditionalGeneration": {"": ("visual.", "model.visual.")},
}
"""Supported models: a dict that maps each part of the tower's params to the possible prefixes of its tensors."""

_RENAMED = (
    (r"^(patch|position)_embedding\b", r"embeddings.\1_embedding"),
    (r"^layers_(\d+)", r"encoder.layers.\1"),
    (r"\b(blocks|mlp)_(\d+)", r"\1.\2"),
    (r"^patch_embed\b", "patch_embed.proj"),
)
"""Regular expressions that rename the tower's modules to a checkpoint's, after the prefix."""


def image_token_id(raw: Json) -> int:
    """Return the id of the token whose embeddings are replaced by image features, from a config.json.

    Example:
      >>> image_token_id({"architectures": ["Gemma3ForConditionalGeneration"], "image_token_index": 262144})
      262144
    """
    _check_supported(raw)
    found = raw.get("image_token_index", raw.get("image_token_id"))
    if not isinstance(found, int):
        raise ValueError(f"config key 'image_token_id' must be the id of the image token; got {found!r}.")
    return found


def tower_config(raw: Json, dtype: str = "float32") -> SiglipConfig | QwenVisionConfig:
    """Convert a vision-language model's config.json to the configuration of its tower.

    Args:
      raw: content of config.json.
      dtype: compute dtype, "float32" or "bfloat16".

    Raises:
      ValueError: if the model's images are not supported, or if a value in the config is not.

    Example:
      >>> vision = {"image_size": 28, "patch_size": 7}
      >>> raw = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": vision, "mm_tokens_per_image": 4}
      >>> tower_config(raw).num_features
      4
    """
    _check_supported(raw)
    name = raw["architectures"][0]
    defaults = {"Gemma3": _SIGLIP, "Qwen2_5_VL": _QWEN}.get(name.removesuffix("ForConditionalGeneration"), _IDEFICS3)
    keys = Keys({**(raw.get("vision_config") or {}), "architectures": [name]}, defaults)
    features = Keys(text_config(raw), {})["hidden_size"]
    depth, heads = ("depth", "num_heads") if defaults is _QWEN else ("num_hidden_layers", "num_attention_heads")
    for key in ("hidden_size", "intermediate_size", "patch_size", depth, heads):
        if not isinstance(keys[key], int) or keys[key] < 1:
            raise keys.refuse(f"vision_config.{key}", keys[key], "a positive integer")
    if keys["hidden_size"] % keys[heads]:
        raise keys.refuse(f"vision_config.{heads}", keys[heads], f"a divisor of hidden_size = {keys['hidden_size']}")
    encoder = TransformerConfig(
        vocab_size=0,
        hidden_size=keys["hidden_size"],
        intermediate_size=keys["intermediate_size"],
        num_layers=keys[depth],
        num_heads=keys[heads],
        num_kv_heads=keys[heads],
        head_dim=keys["hidden_size"] // keys[heads],
        rms_norm_eps=keys["layer_norm_eps"],
        rope=Rope(theta=float((keys["rope_parameters"] or {}).get("rope_theta", 1e4))),
        mlp_bias=True,
        activation=activation_of(keys, "hidden_act"),
        dtype=dtype,
    )
    if defaults is _QWEN:
        return _qwen_config(keys, encoder, features)
    side = keys["image_size"] // keys["patch_size"]
    if defaults is _SIGLIP:
        tokens = raw.get("mm_tokens_per_image", 256)
        rows = int(tokens**0.5)
        if rows**2 != tokens or side % rows:
            raise keys.refuse("mm_tokens_per_image", tokens, f"the square of a divisor of {side} patches per side")
        block = side // rows
    else:
        block = raw.get("scale_factor", 2)
        if side % block:
            raise keys.refuse("scale_factor", block, f"a divisor of {side} patches per side")
    pooled = defaults is _SIGLIP
    return SiglipConfig(encoder, keys["image_size"], keys["patch_size"], block, features, pooled)


def _qwen_config(keys: Keys, encoder: TransformerConfig, features: int) -> QwenVisionConfig:
    if keys["out_hidden_size"] != features:
        raise keys.refuse("vision_config.out_hidden_size", keys["out_hidden_size"], f"the text model's {features}")
    patch, merge = keys["patch_size"], keys["spatial_merge_size"]
    channels = keys.raw.get("in_chans") or keys["in_channels"]
    return QwenVisionConfig(
        encoder,
        channels=channels * keys["temporal_patch_size"] * patch**2,
        merge=merge,
        window=keys["window_size"] // merge // patch,
        full_layers=tuple(keys["fullatt_block_indexes"]),
        features=features,
    )


def load_tower(policy: Policy) -> tuple[SiglipTower | QwenTower, Params]:
    """Load the tower of a vision-language model from a policy's `config` and `extra_tensors`.

    Args:
      policy: policy from `from_pretrained`.

    Returns:
      The module and its params, in the text model's compute dtype. `module.apply({"params": params}, inputs)` returns
      features [N, M, D] for N images.

    Raises:
      ValueError: if the model's images are not supported, or if its tensors do not match config.json.
    """
    tower, shapes = _abstract_tower(policy)
    names = _stored_names(policy, shapes)
    problems: dict[str, list[str]] = {"missing": [], "of the wrong shape": [], "of an unsupported dtype": []}
    params = {}
    for path, shape in shapes.items():
        stored = policy.extra_tensors.get(names[path])
        if stored is None:
            problems["missing"].append(names[path])
            continue
        array = stored.reshape(len(stored), -1).T if path[-1] == "kernel" else stored
        if array.shape != shape:
            problems["of the wrong shape"].append(f"{names[path]} has shape {list(stored.shape)}")
        elif stored.dtype not in [STORED[kind] for kind in READ]:
            problems["of an unsupported dtype"].append(f"{names[path]} has dtype {stored.dtype}")
        else:
            params[path] = array
    found = [f"{what}: {some(names)}" for what, names in problems.items() if names]
    if found:
        raise ValueError(f"policy.extra_tensors does not match policy.config: {'; '.join(found)}.")
    dtype = jnp.dtype(tower.config.encoder.dtype)
    return tower, unflatten_dict({path: jnp.array(array, dtype) for path, array in params.items()})


def tower_tensors(policy: Policy, params: Params) -> dict[str, np.ndarray]:
    """Convert a tower's params to tensors with the names, shapes and dtypes in `policy.extra_tensors`."""
    leaves = flatten_dict(params)
    tensors = {}
    for path, name in _stored_names(policy, leaves).items():
        array, stored = np.asarray(leaves[path]), policy.extra_tensors[name]
        array = array.T.reshape(stored.shape) if path[-1] == "kernel" else array
        tensors[name] = np.ascontiguousarray(array, stored.dtype)
    return tensors


def _abstract_tower(policy: Policy) -> tuple[SiglipTower | QwenTower, dict[tuple[str, ...], tuple[int, ...]]]:
    """Return the module and the shape of each parameter."""
    config = tower_config(policy.config, policy.model.config.dtype)
    tower = SiglipTower(config) if isinstance(config, SiglipConfig) else QwenTower(config)
    params = jax.eval_shape(tower.init, jax.random.key(0), config.inputs)["params"]
    return tower, {path: leaf.shape for path, leaf in flatten_dict(params).items()}


def _stored_names(policy: Policy, paths: Mapping[tuple[str, ...], object]) -> dict[tuple[str, ...], str]:
    """Return the name of each parameter's tensor, with the first prefix for which `extra_tensors` contains one."""
    found: dict[tuple[str, ...], str] = {}
    for part, prefixes in PREFIXES[policy.config["architectures"][0]].items():
        inside = {path: path[1:] if part else path for path in paths if part in ("", path[0])}
        names = {path: _name(rest) for path, rest in inside.items()}
        held = (p for p in prefixes if any(p + name in policy.extra_tensors for name in names.values()))
        prefix = next(held, prefixes[0])
        found |= {path: prefix + name for path, name in names.items()}
    return found


def _name(path: tuple[str, ...]) -> str:
    """Return a parameter's name in a checkpoint, without the prefix."""
    name = ".".join(path[:-1])
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return (name + SUFFIXES.get(path[-1], f".{path[-1]}")).removeprefix(".")


def _check_supported(raw: Json) -> None:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in PREFIXES:
        raise ValueError(
            f"{' '.join(names) or 'the model'} does not support images in prompts; use a model with one of the"
            f" architectures {', '.join(PREFIXES)}."
        )
