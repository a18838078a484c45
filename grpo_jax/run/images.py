"""Images in a run's prompts: they are read, preprocessed and, with a frozen tower, encoded once per prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import flax.linen as nn
import jax
import numpy as np

from grpo_jax.models.images import encode
from grpo_jax.models.sharding import fetch, place, shard_count, split
from grpo_jax.policy import Policy
from grpo_jax.text.images import ImageSource, open_image
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.types import ImageTiles, Params, PromptImages, Prompts

if TYPE_CHECKING:  # at runtime, imported only if prompts have images
    from grpo_jax.hub.processor import ImageProcessor

Encoded = TypeVar("Encoded", bound=EncodedPrompts)

TILES = 8
"""Number of tiles that a device encodes at a time."""


@dataclasses.dataclass(frozen=True)
class ImageEncoder:
    """Adds the images of dataset rows to prompts.

    Attributes:
      processor: image processor of the checkpoint.
      tower: vision tower.
      params: frozen params of the tower, or None if it is trained. Then prompts get the tower's inputs.
      num_tokens: N, maximum number of image tokens in a prompt.
      mesh: mesh on which tiles are encoded in parallel, or None.
    """

    processor: ImageProcessor
    tower: nn.Module
    params: Params | None
    num_tokens: int
    mesh: jax.sharding.Mesh | None = None

    def __call__(self, prompts: Prompts, images: Sequence[Sequence[ImageSource]]) -> Prompts:
        """Return prompts (NumPy arrays) with `PromptImages` for the images of each prompt."""
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        is_image = tokens == self.processor.image_token_id
        places = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1).astype(np.int32)
        opened = [[open_image(source) for source in sources] for sources in images]
        sizes = [[(image.height, image.width) for image in found] for found in opened]
        tiles = self._tiles([[self.processor.inputs(image) for image in found] for found in opened], sizes)
        positions = [
            self.processor.positions(row[:length].tolist(), size)
            for row, length, size in zip(tokens, lengths, sizes, strict=True)
        ]
        by_axis: Any = None
        if rows := [x for x in positions if x is not None]:
            by_axis = np.stack([np.pad(x, ((0, 0), (0, tokens.shape[1] - x.shape[1]))) for x in rows])
        features: Any = tiles if self.params is None else self._encode(tiles)
        return prompts.replace(images=PromptImages(features, places, by_axis))

    def _tiles(
        self, inputs: Sequence[Sequence[dict[str, np.ndarray]]], sizes: Sequence[Sequence[tuple[int, int]]]
    ) -> ImageTiles:
        """Stack the inputs for all images. Numbers of tiles and windows are rounded up, so that few shapes compile."""
        arrays, order = dict[str, Any](), np.zeros((len(inputs), self.num_tokens), np.int32)
        most = _power_of_two(max(sum(_count(one) for one in found) for found in inputs))
        for name, shape in self.processor.tower.inputs.items():
            each = [[one[name] for one in found] for found in inputs]
            widths = [x.shape[1] // shape.shape[1] for found in each for x in found]  # attention windows, or 1
            width = shape.shape[1] * _power_of_two(max(widths, default=1))
            arrays[name] = np.zeros((len(inputs), most, width, *shape.shape[2:]), shape.dtype)
            for row, found in zip(arrays[name], each, strict=True):
                tile = 0
                for x in found:
                    row[tile : tile + len(x), : x.shape[1]] = x
                    tile += len(x)
        per_tile = arrays["order"].shape[2] if "order" in arrays else self.processor.tower.num_features
        for row, found, of_prompt in zip(order, inputs, sizes, strict=True):
            index = tile = 0
            for one, (height, width) in zip(found, of_prompt, strict=True):
                count = self.processor.num_tokens(height, width)
                row[index : index + count] = tile * per_tile + np.arange(count)
                index, tile = index + count, tile + _count(one)
        return ImageTiles(arrays, cast(Any, order))

    def _encode(self, tiles: ImageTiles) -> np.ndarray:
        """Compute features [B, N, D], for a few prompts at a time."""
        b, k = next(iter(tiles.inputs.values())).shape[:2]
        devices = shard_count(self.mesh)
        size = min(max(1, TILES // k), -(-b // devices)) * devices
        at = [np.minimum(np.arange(start, start + size), b - 1) for start in range(0, b, size)]
        parts = (jax.tree.map(lambda x, at=chosen: x[at], tiles) for chosen in at)
        found = [fetch(_encode_tiles(self.tower, self.params, split(part, self.mesh))) for part in parts]
        return np.concatenate(found)[:b]


@functools.partial(jax.jit, static_argnames="tower")
def _encode_tiles(tower: nn.Module, params: Params, tiles: ImageTiles) -> jax.Array:
    return encode(functools.partial(tower.apply, {"params": params}), tiles)


def _count(inputs: dict[str, np.ndarray]) -> int:
    """Return the number of tiles of an image."""
    return len(next(iter(inputs.values())))


def _power_of_two(count: int) -> int:
    """Return the smallest power of two ≥ count, at least 1."""
    return 1 << (max(1, count) - 1).bit_length()


def with_encoder(
    policy: Policy, parts: dict[str, Encoded], mesh: jax.sharding.Mesh | None = None
) -> dict[str, Encoded]:
    """Add an `ImageEncoder` to the datasets that have images. It uses the policy's trained tower, if it has one."""
    if not any(part.images for part in parts.values()):
        return parts
    from grpo_jax.hub.processor import load_processor
    from grpo_jax.hub.vision import load_tower

    processor = load_processor(policy)
    tower = getattr(policy.model, "tower", None)
    params = None
    if tower is None:
        tower, params = load_tower(policy)
    counts = [ids.count(processor.image_token_id) for part in parts.values() for ids in part.token_ids]
    encoder = ImageEncoder(processor, tower, None if params is None else place(params, mesh), max(counts), mesh)
    return {name: dataclasses.replace(part, add_images=encoder) for name, part in parts.items()}
