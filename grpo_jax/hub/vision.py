"""Vision-language checkpoints: the tensors of their image encoders ("towers"), and their image processors.

transformers resizes and normalizes images with Pillow, without PyTorch. The text that represents an image in a
prompt depends only on the image's size.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from grpo_jax.hub.files import PARAM_DTYPES, PROCESSOR_FILES, STORAGE_DTYPES, parsing
from grpo_jax.hub.keys import Keys, activation_of, text_config
from grpo_jax.hub.policy import quiet_import
from grpo_jax.hub.tensors import SUFFIXES
from grpo_jax.messages import import_extra, shorten
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.rope import Rope
from grpo_jax.models.towers import QwenTower, QwenVisionConfig, SiglipConfig, SiglipTower, window_inputs
from grpo_jax.policy import Policy
from grpo_jax.types import Json, Params

if TYPE_CHECKING:
    from PIL import Image

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
    """Return the id of the token that image features replace. Raises ValueError if images are not supported."""
    _architecture(raw)
    token_id = raw.get("image_token_index", raw.get("image_token_id"))
    if not isinstance(token_id, int):
        raise ValueError(f"config key 'image_token_id' or 'image_token_index' must be a token id; got {token_id!r}.")
    return token_id


def tower_config(raw: Json, dtype: str = "float32") -> SiglipConfig | QwenVisionConfig:
    """Convert a vision-language model's config.json to the configuration of its tower, with compute dtype `dtype`.

    Raises ValueError if images are not supported for the model, or if a value in the config is not supported.
    """
    name, features = _architecture(raw), text_config(raw)["hidden_size"]
    qwen, gemma = name.startswith("Qwen"), name.startswith("Gemma")
    defaults = _QWEN_DEFAULTS if qwen else _SIGLIP_DEFAULTS if gemma else _IDEFICS3_DEFAULTS
    keys = Keys({**(raw.get("vision_config") or {}), "architectures": [name]}, defaults)
    depth, count = ("depth", "num_heads") if qwen else ("num_hidden_layers", "num_attention_heads")
    width, heads, patch = keys["hidden_size"], keys[count], keys["patch_size"]
    rope = Rope(theta=float((keys["rope_parameters"] or {}).get("rope_theta", 1e4)))
    encoder = TransformerConfig(
        0, width, keys["intermediate_size"], keys[depth], heads, heads, width // heads, keys["layer_norm_eps"],
        rope=rope, mlp_bias=True, activation=activation_of(keys, "hidden_act"), dtype=dtype,
    )  # fmt: skip
    if qwen:
        channels = (keys.raw.get("in_chans") or keys["in_channels"]) * keys["temporal_patch_size"] * patch**2
        window = keys["window_size"] // keys["spatial_merge_size"] // patch
        full = tuple(keys["fullatt_block_indexes"])
        return QwenVisionConfig(encoder, channels, keys["spatial_merge_size"], window, full, features)
    side, tokens = keys["image_size"] // patch, raw.get("mm_tokens_per_image", 256)
    block = side // round(tokens**0.5) if gemma else raw.get("scale_factor", 2)
    return SiglipConfig(encoder, keys["image_size"], patch, block, features, pool=gemma)


def make_tower(raw: Json, dtype: str) -> tuple[SiglipTower | QwenTower, Params]:
    """Return the tower of the model with config.json `raw`, and its abstract params in the compute dtype `dtype`."""
    config = tower_config(raw, dtype)
    tower = SiglipTower(config) if isinstance(config, SiglipConfig) else QwenTower(config)
    params = jax.eval_shape(tower.init, jax.random.key(0), config.inputs)["params"]
    return tower, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), params)


def load_tower(policy: Policy, dtype: DTypeLike | None = None) -> tuple[SiglipTower | QwenTower, Params]:
    """Load a vision-language model's tower and its params. If `dtype` is None, the model's compute dtype is used.

    Raises ValueError if images are not supported for the model, or if the policy's tensors do not match its config.
    """
    (tower, shapes), problems, params = make_tower(policy.config, policy.model.config.dtype), [], {}
    dtypes = [STORAGE_DTYPES[name] for name in PARAM_DTYPES]
    for path, leaf in flatten_dict(shapes).items():
        name = _stored_name(policy, path)
        if (stored := policy.extra_tensors.get(name)) is None:
            problems.append(f"{name} is missing")
            continue
        array = stored.reshape(len(stored), -1).T if path[-1] == "kernel" else stored
        if array.shape != leaf.shape or stored.dtype not in dtypes:
            shape = list(leaf.shape[::-1] if path[-1] == "kernel" else leaf.shape)
            got = f"got {list(stored.shape)} and {stored.dtype}"
            problems.append(f"{name} must have shape {shape} and one of the dtypes {', '.join(PARAM_DTYPES)}; {got}")
        params[path] = array
    if problems:
        raise ValueError(f"policy.extra_tensors does not match policy.config: {shorten(problems)}.")
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
    """Return the name of a parameter's tensor in `policy.extra_tensors`, or a default name if the tensor is missing."""
    module = ".".join(path[:-1])
    for pattern, replacement in _RENAMED.items():
        module = re.sub(pattern, replacement, module)
    name = (module + SUFFIXES.get(path[-1], f".{path[-1]}")).removeprefix(".")
    parts, *_ = ARCHITECTURES[_architecture(policy.config)]
    prefixes = next(prefixes for start, prefixes in parts.items() if path[0].startswith(start))
    return next((prefix + name for prefix in prefixes if prefix + name in policy.extra_tensors), prefixes[0] + name)


def _architecture(raw: Json) -> str:
    """Return a model's architecture. Raises ValueError if images are not supported for it."""
    name = " ".join(raw.get("architectures") or ["a model without 'architectures' in its config.json"])
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{name} does not support images in prompts; use one of these models: {', '.join(ARCHITECTURES)}."
        )
    return name


Size = tuple[int, int]
"""Height and width of an image in pixels."""


@dataclasses.dataclass(frozen=True, eq=False)
class ImageProcessor:
    """Image processor of a checkpoint. The base class is for Gemma 3, which resizes each image to one square tile."""

    image_token_id: int  # the token whose embeddings are replaced with image features, one per token
    image_token: str  # text of this token
    placeholder: str  # text that the chat template writes once per image
    start: str  # text before an image's tokens; in Idefics 3, only before the tile with the whole image
    end: str  # text after an image's tokens, and in Idefics 3 also before each tile
    tower_config: Any
    image_processor: Any  # image processor from transformers

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of image tokens, one per feature, of an image with the given size in pixels."""
        return self.tower_config.num_features

    def expand(self, height: int, width: int) -> str:
        """Return the text that replaces the placeholder of an image with the given size in pixels."""
        return f"{self.start}{self.image_token * self.num_tokens(height, width)}{self.end}"

    def inputs(self, image: Image.Image) -> dict[str, np.ndarray]:
        """Return the tower's inputs for an RGB image, with a leading axis of tiles."""
        pixels = np.asarray(self.image_processor(image, return_tensors="np")["pixel_values"], np.float32)
        return {"pixels": np.moveaxis(pixels.reshape(-1, *pixels.shape[-3:]), 1, -1)}

    def count_tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of tiles in an image, and the number of attention windows per tile."""
        return self.num_tokens(height, width) // self.tower_config.num_features, 1

    def positions(self, token_ids: Sequence[int], sizes: Sequence[Size]) -> np.ndarray | None:
        """Return rotary positions [3, P] int32 of a prompt's tokens, or None if they are 0..P−1 along all axes."""
        return None


class _Idefics3(ImageProcessor):
    """An image becomes a grid of tiles (unless it fits into one), followed by the whole image as one tile."""

    def num_tokens(self, height: int, width: int) -> int:
        return (math.prod(self.grid(height, width)) + 1) * self.tower_config.num_features

    def expand(self, height: int, width: int) -> str:
        rows, columns = self.grid(height, width)
        tile, lines = self.image_token * self.tower_config.num_features, list[str]()
        for row in range(1, rows + 1):
            lines.append("".join(f"{self.end}<row_{row}_col_{i}>{tile}" for i in range(1, columns + 1)))
        return "\n".join([*lines, *[""] * (rows > 0), f"{self.start}{tile}{self.end}"])

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of rows and columns of tiles. Both are 0 if the image is not split."""
        _, rows, columns = self.image_processor.get_number_of_image_patches(height, width, {})
        return (rows, columns) if rows * columns > 1 else (0, 0)


class _Qwen2VL(ImageProcessor):
    """Roughly keeps the aspect ratio of an image, and merges each group of `merge_size`² patches into one token."""

    def num_tokens(self, height: int, width: int) -> int:
        return math.prod(self.grid(height, width))

    def inputs(self, image: Image.Image) -> dict[str, np.ndarray]:
        arrays = self.image_processor(image, return_tensors="np")
        _, rows, columns = np.asarray(arrays["image_grid_thw"])[0].tolist()
        return window_inputs(np.asarray(arrays["pixel_values"], np.float32), (rows, columns), self.tower_config)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of rows and columns of tokens. Raises ValueError if the aspect ratio is more than 200."""
        unit, size = self.image_processor.patch_size * self.image_processor.merge_size, self.image_processor.size
        resize = importlib.import_module(type(self.image_processor).__module__).smart_resize
        pixels = resize(height, width, unit, size["shortest_edge"], size["longest_edge"])
        return pixels[0] // unit, pixels[1] // unit

    def count_tiles(self, height: int, width: int) -> tuple[int, int]:
        return 1, math.prod(-(-side // self.tower_config.window_size) for side in self.grid(height, width))

    def positions(self, token_ids: Sequence[int], sizes: Sequence[Size]) -> np.ndarray:
        """Return positions [3, P] int32 of a prompt's tokens along time, height and width.

        A text token, or an image's first token, is at 1 + the largest previous position. Other image tokens are offset
        by row (height) and column (width). Positions are shifted so that a completion starts at the prompt's length.
        """
        ids = np.asarray(token_ids)
        positions, index, position = np.zeros((3, len(ids)), np.int32), 0, 0
        for height, width in sizes:
            rows, columns = self.grid(height, width)
            start = index + int(np.argmax(ids[index:] == self.image_token_id))
            positions[:, index:start] = position + np.arange(start - index)
            position, index = position + start - index, start + rows * columns
            positions[:, start:index] = position + np.indices((1, rows, columns)).reshape(3, -1)
            position += max(rows, columns)
        positions[:, index:] = position + np.arange(len(ids) - index)
        return positions + np.int32(index - position)


_IDEFICS3 = {"proj": ("model.connector.modality_projection.",), "": ("model.vision_model.",)}
_GEMMA3 = {
    "mm_": ("multi_modal_projector.", "model.multi_modal_projector."),
    "": tuple(f"{a}vision_tower.{b}" for a in ("", "model.") for b in ("vision_model.", "")),
}
ARCHITECTURES: dict[str, tuple[Mapping[str, tuple[str, ...]], str, type[ImageProcessor]]] = {
    "Gemma3ForConditionalGeneration": (_GEMMA3, "Gemma3ImageProcessor", ImageProcessor),
    "Idefics3ForConditionalGeneration": (_IDEFICS3, "Idefics3ImageProcessor", _Idefics3),
    "SmolVLMForConditionalGeneration": (_IDEFICS3, "SmolVLMImageProcessor", _Idefics3),
    "Qwen2_5_VLForConditionalGeneration": ({"": ("visual.", "model.visual.")}, "Qwen2VLImageProcessor", _Qwen2VL),
}
"""Supported architectures. Each has a dict that maps the start of a parameter's path to possible prefixes of tensors in
its tower, the name of the image processor's class in transformers, and the corresponding class in this module."""


def load_processor(policy: Policy) -> ImageProcessor:
    """Create the image processor of a vision-language policy from its configs and tokenizer.

    Raises ValueError if images are not supported, processor files are unusable, or the tokenizer or Pillow is missing.
    """
    policy.check_tokenizer()
    raw, decode, tower = policy.config, policy.tokenizer.decode, tower_config(policy.config)
    _, name, processor_class = ARCHITECTURES[_architecture(raw)]
    preprocessor, processor = (json.loads(policy.files.get(file, b"{}")) for file in PROCESSOR_FILES)
    settings = processor.get("image_processor") or preprocessor  # transformers 5 writes only processor_config.json
    if not settings:
        raise ValueError(
            "policy.files has no preprocessor_config.json, which describes how images are resized; copy it from the"
            " original checkpoint into the model's directory, and load the policy again."
        )
    import_extra("PIL.Image", "pillow")
    with quiet_import():
        import transformers
    with parsing("processor_config.json" if processor.get("image_processor") else "preprocessor_config.json"):
        # Before transformers 5.4, the class that uses Pillow has no suffix.
        image_processor = (getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)).from_dict(settings)
        if processor_class is _Idefics3:
            edge, tile = image_processor.size["longest_edge"], image_processor.max_image_size["longest_edge"]
            if edge % tile:  # transformers would compute the wrong number of tiles
                raise ValueError(f"size.longest_edge={edge} must be a multiple of max_image_size.longest_edge={tile}")
        if processor_class is ImageProcessor and image_processor.do_pan_and_scan:
            raise ValueError("do_pan_and_scan=true (crops of large images) is not supported; set it to false")
    image = placeholder = decode([image_token_id(raw)])
    start = end = ""
    if processor_class is _Idefics3:
        start, end = "<fake_token_around_image><global-img>", "<fake_token_around_image>"
    elif processor_class is ImageProcessor:
        placeholder, end = decode([raw["boi_token_index"]]), decode([raw["eoi_token_index"]])
        start, end = f"\n\n{placeholder}", f"{end}\n\n"
    return processor_class(image_token_id(raw), image, placeholder, start, end, tower, image_processor)
