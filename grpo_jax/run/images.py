"""Images in a run's prompts: they are read, preprocessed and, with a frozen tower, encoded once per prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.hub.processor import ImageProcessor, load_processor
from grpo_jax.hub.vision import load_tower
from grpo_jax.models.images import encode
from grpo_jax.models.sharding import fetch, shard_count, split
from grpo_jax.policy import Policy
from grpo_jax.text.images import ImageSource, open_image
from grpo_jax.types import ImageTiles, Params, PromptImages, Prompts

TILES = 8
"""Tiles that a device encodes at a time."""


@dataclasses.dataclass(frozen=True)
class ImageEncoder:
    """Adds the images of dataset rows to prompts.

    Attributes:
      processor: image processor of the checkpoint.
      tower: vision tower.
      params: frozen params of the tower, or None if it is trained, so that the model encodes the images.
      num_tokens: N, maximum number of image tokens in a prompt.
      mesh: mesh over whose data-parallel devices tiles are divided.
    """

    processor: ImageProcessor
    tower: nn.Module
    params: Params | None
    num_tokens: int
    mesh: jax.sharding.Mesh | None = None

    def add_images(self, prompts: Prompts, images: Sequence[Sequence[ImageSource]]) -> Prompts:
        """Return prompts with `images`, one sequence per prompt, as NumPy arrays."""
        tokens, lengths, token = np.asarray(prompts.tokens), np.asarray(prompts.lengths), self.processor.image_token_id
        is_image = (tokens == token) & (np.arange(tokens.shape[1]) < lengths[:, None])
        places = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1).astype(np.int32)
        opened = [[open_image(source) for source in of_prompt] for of_prompt in images]
        sizes = [[(image.height, image.width) for image in of_prompt] for of_prompt in opened]
        tiles = self._tiles([[self.processor.inputs(image) for image in of_prompt] for of_prompt in opened], sizes)
        each = [
            self.processor.positions(row[:n].tolist(), size)
            for row, n, size in zip(tokens, lengths, sizes, strict=True)
        ]
        positions: Any = None
        if each[0] is not None:
            positions = np.stack([np.pad(x, ((0, 0), (0, tokens.shape[1] - x.shape[1]))) for x in each])
        as_arrays: Any = tiles if self.params is None else self._encode(tiles)
        return prompts.replace(images=PromptImages(as_arrays, places, positions))
