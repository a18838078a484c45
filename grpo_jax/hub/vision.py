"""Image encoders ("towers") of vision-language checkpoints: configuration, parameters and tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

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

_IDEFICS3: Mapping[str, tuple[str, ...]] = {
    "proj": ("model.connector.modality_projection.",),
    "": ("model.vision_model.",),
}
TOWERS: dict[str, Mapping[str, tuple[str, ...]]] = {
    "Gemma3ForConditionalGeneration": {
        "mm_": ("multi_modal_projector.", "model.multi_modal_projector."),
        "": tuple(f"{a}vision_tower.{b}" for a in ("", "model.") for b in ("vision_model.", "")),
    },
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "Qwen2_5_VLForConditionalGeneration": {"": ("visual.", "model.visual.")},
}
"""Supported architectures, with a dict from the start of a param's path to possible prefixes of its tensor's name."""

_RENAMED = {
    r"(attn|blocks|layers|merger|mlp)_": r"\1.", r"^layers": "encoder.layers", r"^patch_embed\b": "patch_embed.proj",
    r"^(patch|position)_embedding": r"embeddings.\1_embedding",
}  # fmt: skip
"""Substitutions, applied in order, that convert a module's dotted path to its tensor's name without the prefix."""

_SIGLIP_DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
_IDEFICS3_DEFAULTS = {**_SIGLIP_DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_QWEN_DEFAULTS = {
    "hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 112, "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31], "layer_norm_eps": 1e-6,
}  # fmt: skip


def image_token_id(raw: Json) -> int:
    """Return the token whose embeddings image features replace. Raises ValueError if images are not supported."""
    _architecture(raw)
    found = raw.get("image_token_index", raw.get("image_token_id"))
    if not isinstance(found, int):
        raise ValueError(f"config key 'image_token_id' or 'image_token_index' must be a token id; got {found!r}.")
    return found


def tower_config(raw: Json, dtype: str = "float32") -> SiglipConfig | QwenVisionConfig:
    """Convert a vision-language model's config.json to the configuration of its tower, with compute dtype `dtype`.

    Raises:
      ValueError: if images are not supported for the model, or if a value in the config is not supported.

    Example:
      >>> vision = {"image_size": 28, "patch_size": 7}
      >>> raw = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": vision, "mm_tokens_per_image": 4}
      >>> tower_config(raw).block_size
      2
    """
    name, features = _architecture(raw), text_config(raw)["hidden_size"]
    qwen, gemma = name.startswith("Qwen"), name.startswith("Gemma")
    defaults = _QWEN_DEFAULTS if qwen else _SIGLIP_DEFAULTS if gemma else _IDEFICS3_DEFAULTS
    keys = Keys({**(raw.get("vision_config") or {}), "architectures": [name]}, defaults)
    depth, count = ("depth", "num_heads") if qwen else ("num_hidden_layers", "num_attention_heads")
    width, heads, patch = keys["hidden_size"], keys[count], keys["patch_size"]
    if width % heads:
        raise keys.refuse(f"vision_config.{count}", heads, f"a divisor of hidden_size = {width}")
    rope = Rope(theta=float((keys["rope_parameters"] or {}).get("rope_theta", 1e4)))
    encoder = TransformerConfig(
        0, width, keys["intermediate_size"], keys[depth], heads, heads, width // heads, keys["layer_norm_eps"],
        rope=rope, mlp_bias=True, activation=activation_of(keys, "hidden_act"), dtype=dtype,
    )  # fmt: skip
    if qwen:
        if keys["out_hidden_size"] != features:
            raise keys.refuse("vision_config.out_hidden_size", keys["out_hidden_size"], f"hidden_size = {features}")
        channels = (keys.raw.get("in_chans") or keys["in_channels"]) * keys["temporal_patch_size"] * patch**2
        window = keys["window_size"] // keys["spatial_merge_size"] // patch
        full = tuple(keys["fullatt_block_indexes"])
        return QwenVisionConfig(encoder, channels, keys["spatial_merge_size"], window, full, features)
    side, tokens = keys["image_size"] // patch, raw.get("mm_tokens_per_image", 256)
    block = max(side // round(tokens**0.5), 1) if gemma else raw.get("scale_factor", 2)
    if side % block or (gemma and (side // block) ** 2 != tokens):
        key, value = ("mm_tokens_per_image", tokens) if gemma else ("scale_factor", block)
        raise keys.refuse(key, value, f"{'the square of ' * gemma}a divisor of {side}, the number of patches per side")
    return SiglipConfig(encoder, keys["image_size"], patch, block, features, pool=gemma)


def make_tower(raw: Json, dtype: str) -> tuple[SiglipTower | QwenTower, Params]:
    """Return the tower of the model with config.json `raw`, and its abstract params in the compute dtype `dtype`."""
    config = tower_config(raw, dtype)
    tower = SiglipTower(config) if isinstance(config, SiglipConfig) else QwenTower(config)
    params = jax.eval_shape(tower.init, jax.random.key(0), config.inputs)["params"]
    return tower, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), params)


def load_tower(policy: Policy, dtype: DTypeLike | None = None) -> tuple[SiglipTower | QwenTower, Params]:
    """Load the tower of a vision-language model from `policy.config` and `policy.extra_tensors`.

    Returns:
      The module, and its params in `dtype` or the text model's compute dtype. The module maps the inputs of tiles (see
      its docstring) to features [tiles, M, D].

    Raises:
      ValueError: if images are not supported for the model, or if its tensors do not match config.json.
    """
    (tower, shapes), problems, params = make_tower(policy.config, policy.model.config.dtype), [], {}
    for path, leaf in flatten_dict(shapes).items():
        name = _stored_name(policy, path)
        if (stored := policy.extra_tensors.get(name)) is None:
            problems.append(f"{name} is missing")
            continue
        array = stored.reshape(len(stored), -1).T if path[-1] == "kernel" else stored
        if array.shape != leaf.shape or stored.dtype not in [STORED[kind] for kind in READ]:
            wanted = list(leaf.shape[::-1] if path[-1] == "kernel" else leaf.shape)
            got = f"{list(stored.shape)} and {stored.dtype}"
            problems.append(f"{name} must have shape {wanted} and dtype {' or '.join(READ)}; got {got}")
        params[path] = array
    if problems:
        raise ValueError(f"policy.extra_tensors does not match policy.config: {some(problems)}.")
    return tower, unflatten_dict({path: jnp.array(x, dtype or policy.model.config.dtype) for path, x in params.items()})


def tower_tensors(policy: Policy, params: Params) -> dict[str, np.ndarray]:
    """Convert a tower's params to tensors with the names, shapes and dtypes in `policy.extra_tensors`."""
    tensors = {}
    for path, leaf in flatten_dict(params).items():
        name = _stored_name(policy, path)
        stored, array = policy.extra_tensors[name], np.asarray(leaf)
        array = array.T.reshape(stored.shape) if path[-1] == "kernel" else array
        tensors[name] = np.ascontiguousarray(array, stored.dtype)
    return tensors


def _stored_name(policy: Policy, path: tuple[str, ...]) -> str:
    """Return the name of a parameter's tensor, with the first possible prefix if there is no such tensor."""
    module = ".".join(path[:-1])
    for pattern, replacement in _RENAMED.items():
        module = re.sub(pattern, replacement, module)
    name = (module + SUFFIXES.get(path[-1], f".{path[-1]}")).removeprefix(".")
    parts = TOWERS[_architecture(policy.config)]
    prefixes = next(prefixes for start, prefixes in parts.items() if path[0].startswith(start))
    return next((prefix + name for prefix in prefixes if prefix + name in policy.extra_tensors), prefixes[0] + name)


def _architecture(raw: Json) -> str:
    """Return a model's architecture. Raises ValueError if its images are not supported."""
    name = " ".join(raw.get("architectures") or ["a model without 'architectures' in its config.json"])
    if name not in TOWERS:
        raise ValueError(f"{name} does not support images in prompts; use one of these models: {', '.join(TOWERS)}.")
    return name
