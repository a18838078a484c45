"""Image processors of vision-language models: the text that stands for an image in a prompt, and the tower's inputs.

transformers resizes and normalizes images with Pillow, without PyTorch. An image's text depends only on its size.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.hub.files import PROCESSOR_FILES, reading
from grpo_jax.hub.policy import quiet_import
from grpo_jax.hub.vision import image_token_id, tower_config
from grpo_jax.messages import import_extra
from grpo_jax.policy import Policy

if TYPE_CHECKING:
    from PIL import Image

Size = tuple[int, int]
"""Height and width of an image in pixels."""


@dataclasses.dataclass(frozen=True, eq=False)
class ImageProcessor:
    """Image processor of a checkpoint. This class, for Gemma 3, resizes an image to one square tile.

    Attributes:
      image_token_id: id of the token whose embeddings are replaced with image features, one per token.
      image_token: text of this token.
      placeholder: text that the chat template writes once per image.
      start: text before the image tokens of a whole image; `end` is the text after them.
      tower_config: configuration of the tower.
      image_processor: image processor from transformers.
    """

    image_token_id: int
    image_token: str
    placeholder: str
    start: str
    end: str
    tower_config: Any
    image_processor: Any

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of image tokens, and features, of an image with the given size in pixels."""
        return self.tower_config.num_features

    def expand(self, height: int, width: int) -> str:
        """Return the text that replaces the placeholder of an image with the given size in pixels."""
        return f"{self.start}{self.image_token * self.num_tokens(height, width)}{self.end}"

    def inputs(self, image: Image.Image) -> dict[str, np.ndarray]:
        """Return the tower's inputs for an RGB image, with a leading axis of tiles."""
        pixels = np.asarray(self.image_processor(image, return_tensors="np")["pixel_values"], np.float32)
        return {"pixels": np.moveaxis(pixels.reshape(-1, *pixels.shape[-3:]), 1, -1)}

    def count_tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of tiles of an image, and of attention windows per tile."""
        return self.num_tokens(height, width) // self.tower_config.num_features, 1

    def positions(self, token_ids: Sequence[int], sizes: Sequence[Size]) -> np.ndarray | None:
        """Return rotary positions [3, P] int32 of a prompt's tokens, or None if they are 0..P−1 along all axes."""
        return None


class _Idefics3(ImageProcessor):
    """An image becomes rows × columns of tiles, followed by the whole image as one tile."""

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
    """An image keeps its aspect ratio. Each group of `merge_size`² patches becomes one token."""

    def num_tokens(self, height: int, width: int) -> int:
        return math.prod(self.grid(height, width))

    def inputs(self, image: Image.Image) -> dict[str, np.ndarray]:
        from grpo_jax.models.qwen_vision import window_inputs

        found = self.image_processor(image, return_tensors="np")
        _, rows, columns = np.asarray(found["image_grid_thw"])[0].tolist()
        return window_inputs(np.asarray(found["pixel_values"], np.float32), (rows, columns), self.tower_config)

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

        A text token's positions are 1 + the largest previous position. An image's tokens start at this value and add
        their row (height) and column (width). All are shifted so that a completion starts at the prompt's length.
        """
        ids = np.asarray(token_ids)
        found, index, position = np.zeros((3, len(ids)), np.int32), 0, 0
        for height, width in sizes:
            rows, columns = self.grid(height, width)
            start = index + int(np.argmax(ids[index:] == self.image_token_id))
            found[:, index:start] = position + np.arange(start - index)
            position, index = position + start - index, start + rows * columns
            found[:, start:index] = position + np.indices((1, rows, columns)).reshape(3, -1)
            position += max(rows, columns)
        found[:, index:] = position + np.arange(len(ids) - index)
        return found + np.int32(index - position)


_FAMILIES: dict[str, tuple[str, type[ImageProcessor]]] = {
    "Gemma3ForConditionalGeneration": ("Gemma3ImageProcessor", ImageProcessor),
    "Idefics3ForConditionalGeneration": ("Idefics3ImageProcessor", _Idefics3),
    "SmolVLMForConditionalGeneration": ("SmolVLMImageProcessor", _Idefics3),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2VLImageProcessor", _Qwen2VL),
}
"""Maps architectures to (name of the image processor's class in transformers, class in this module)."""


def load_processor(policy: Policy) -> ImageProcessor:
    """Create the image processor of a vision-language policy from its configs and tokenizer.

    Raises ValueError if the model does not support images, its processor files are missing or do not match its tower,
    or Pillow is not installed.
    """
    policy.check_tokenizer()
    raw, decode, tower = policy.config, policy.tokenizer.decode, tower_config(policy.config)
    name, kind = _FAMILIES[raw["architectures"][0]]
    plain, nested = (json.loads(policy.files.get(file, b"{}")) for file in PROCESSOR_FILES)
    settings = nested.get("image_processor") or plain  # transformers 5 writes only processor_config.json
    if not settings:
        raise ValueError(
            "policy.files has no preprocessor_config.json, which describes how images are resized; copy it from the"
            " original checkpoint into the model's directory, and load the policy again."
        )
    pillow = import_extra("PIL.Image", "pillow")
    with quiet_import():
        import transformers
    with reading("preprocessor_config.json"):
        # Before transformers 5.4, the class that uses Pillow has no suffix.
        image_processor = (getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)).from_dict(settings)
        if kind is _Idefics3:
            edge, tile = image_processor.size["longest_edge"], image_processor.max_image_size["longest_edge"]
            if edge % tile:  # transformers computes the wrong number of tiles for this size
                raise ValueError(f"size.longest_edge={edge} must be a multiple of max_image_size.longest_edge={tile}")
        if kind is ImageProcessor and image_processor.do_pan_and_scan:
            raise ValueError("do_pan_and_scan=true (crops of large images) is not supported; set it to false")
    image = placeholder = decode([image_token_id(raw)])
    start = end = ""
    if kind is _Idefics3:
        start, end = "<fake_token_around_image><global-img>", "<fake_token_around_image>"
    elif kind is ImageProcessor:
        placeholder, end = decode([raw["boi_token_index"]]), decode([raw["eoi_token_index"]])
        start, end = f"\n\n{placeholder}", f"{end}\n\n"
    processor = kind(image_token_id(raw), image, placeholder, start, end, tower, image_processor)
    given = processor.inputs(pillow.new("RGB", (8, 8)))
    for key, wanted in tower.inputs.items():
        axes = slice(1 if key == "pixels" else 2, None)  # omit the axes of tiles and attention windows
        if given[key].shape[axes] != wanted.shape[axes]:
            raise ValueError(
                f"preprocessor_config.json gives {key} of shape {given[key].shape}, but the tower in config.json"
                f" requires {wanted.shape}; use both files from the same checkpoint."
            )
    return processor
