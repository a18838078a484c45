"""Images in a run's prompts: reading, preprocessing and, if the vision tower is frozen, encoding (once per prompt)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import flax.linen as nn
import jax
import numpy as np

from grpo_jax.models.sharding import fetch, place, shard, shard_count
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.run.placement import with_shape
from grpo_jax.text.images import ImageSource, has_images, open_image
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.types import ImageTiles, Params, PromptImages, Prompts, Row

if TYPE_CHECKING:  # at runtime, imported only if prompts have images
    from grpo_jax.hub.vision import ImageProcessor

Encoded = TypeVar("Encoded", bound=EncodedPrompts)
Key = TypeVar("Key")

Tile = dict[str, np.ndarray]
"""The vision tower's inputs for one tile, without the leading axis over tiles."""

MAX_INPUT_VALUES = 3 * 2**20
"""Maximum number of input values (3 per pixel) per device in a call to the tower, unless a single tile has more."""


@dataclasses.dataclass(frozen=True)
class ImageEncoder:
    """Adds the images of dataset rows to prompts [B, P]. Shapes depend only on B and P, so that programs compile once.

    Attributes:
      processor: image processor of the checkpoint.
      tower: vision tower.
      params: params of a frozen tower. If None, the tower is trainable, and prompts contain its inputs, not features.
      num_tokens: N, maximum number of image tokens in a prompt.
      num_tiles: maximum number of tiles in a prompt.
      num_windows: maximum number of attention windows in a tile.
      mesh: mesh on which tiles are encoded in parallel, or None.
    """

    processor: ImageProcessor
    tower: nn.Module
    params: Params | None
    num_tokens: int
    num_tiles: int
    num_windows: int
    mesh: jax.sharding.Mesh | None = None

    def __call__(self, prompts: Prompts, images: Sequence[Sequence[ImageSource]]) -> Prompts:
        """Return `prompts` as NumPy arrays, with `PromptImages` for the images of each prompt."""
        tokens, processor, positions = np.asarray(prompts.tokens), self.processor, list[np.ndarray]()
        is_image = tokens == processor.image_token_id
        feature_index: Any = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1).astype(np.int32)
        tiles, counts = list[list[Tile]](), list[list[int]]()  # per prompt; `counts` has the feature count of each tile
        for row, length, sources in zip(tokens, np.asarray(prompts.lengths), images, strict=True):
            opened = [open_image(source) for source in sources]
            sizes = [(image.height, image.width) for image in opened]
            tiles.append([])
            for inputs in map(processor.inputs, opened):
                tiles[-1] += [dict(zip(inputs, tile, strict=True)) for tile in zip(*inputs.values(), strict=True)]
            per_image = [(processor.num_tokens(*size), processor.count_tiles(*size)[0]) for size in sizes]
            counts.append([features // k for features, k in per_image for _ in range(k)])
            if (by_axis := processor.positions(row[:length].tolist(), sizes)) is not None:
                positions.append(np.pad(by_axis, ((0, 0), (0, len(row) - length))))
        features: Any = self._tiles(tiles, counts) if self.params is None else self._features(tiles, counts)
        axes: Any = np.stack(positions) if positions else None
        return prompts.replace(images=PromptImages(features, feature_index, axes))

    def _tiles(self, tiles: Sequence[Sequence[Tile]], counts: Sequence[Sequence[int]]) -> ImageTiles:
        padded = [self._pad_and_stack(prompt_tiles, self.num_tiles) for prompt_tiles in tiles]
        inputs: dict[str, Any] = {name: np.stack([x[name] for x in padded]) for name in padded[0]}
        per_tile = inputs["raster_index"].shape[2] if "raster_index" in inputs else self.tower.config.num_features
        return ImageTiles(inputs, self._feature_index(counts, [0] * len(counts), per_tile))

    def _features(self, tiles: Sequence[Sequence[Tile]], counts: Sequence[Sequence[int]]) -> np.ndarray:
        """Compute image features [B, N, D]. `MAX_INPUT_VALUES` limits the number of tiles in each call to the tower."""
        flat, devices = [tile for group in tiles for tile in group], shard_count(self.mesh)
        values = sum(x.size for x in self._pad_and_stack([], 1).values())
        size = min(max(1, MAX_INPUT_VALUES // values), -(-len(tiles) * self.num_tiles // devices)) * devices
        encoded = []
        for start in range(0, max(len(flat), 1), size):
            part = shard(self._pad_and_stack(flat[start : start + size], size), self.mesh)
            encoded.append(fetch(_encode(self.tower, self.params, part)))
        features = np.concatenate(encoded)
        first = np.cumsum([0, *map(len, counts)])[:-1]  # index of each prompt's first tile
        return features.reshape(-1, features.shape[2])[self._feature_index(counts, first.tolist(), features.shape[1])]

    def _pad_and_stack(self, tiles: Sequence[Tile], count: int) -> dict[str, np.ndarray]:
        """Stack tiles into arrays [count, ...], padded with zeros."""
        arrays = dict[str, np.ndarray]()
        for name, shape in self.processor.tower_config.inputs.items():
            arrays[name] = np.zeros((count, self.num_windows * shape.shape[1], *shape.shape[2:]), shape.dtype)
            for array, tile in zip(arrays[name], tiles, strict=False):
                array[: len(tile[name])] = tile[name]
        return arrays

    def _feature_index(self, counts: Sequence[Sequence[int]], first_tile: Sequence[int], per_tile: int) -> Any:
        """Return indices [B, N] into the tiles' flattened features. The tiles of prompt b start at `first_tile[b]`."""
        feature_index = np.zeros((len(counts), self.num_tokens), np.int32)
        for row, used, start in zip(feature_index, counts, first_tile, strict=True):
            indices = [per_tile * tile + np.arange(count) for tile, count in enumerate(used, start)]
            row[: sum(used)] = np.concatenate([np.zeros(0, np.int32), *indices])
        return feature_index


@functools.partial(jax.jit, static_argnames="tower")
def _encode(tower: nn.Module, params: Params, inputs: Mapping[str, jax.Array]) -> Any:
    return tower.apply({"params": params}, inputs)


def check_text_only(rows: Mapping[str, Sequence[Row] | None], argument: str, value: object) -> None:
    """Raise ValueError if `value` is not None and a row has images. `argument` is the name of `value` in messages."""
    if value is not None and any(has_images(row) for part in rows.values() for row in part or ()):
        raise ValueError(f"{argument} does not support images; omit {argument}, or use a dataset without images")


def without_image_token(policy: Policy) -> Policy:
    """Return the policy with the logit of the image token masked, so that the token is not sampled."""
    from grpo_jax.hub.vision import image_token_id

    return policy.replace(model=with_shape(policy.model, image_token_id=image_token_id(policy.config)))


def with_tower(policy: Policy, parts: Mapping[str, EncodedPrompts], *, freeze: bool) -> Policy:
    """If rows have images, mask the image token and, unless `freeze`, add a trainable tower. Returns the policy."""
    has_images = any(part.images for part in parts.values())
    trained = isinstance(policy.params, Mapping) and "tower" in policy.params
    if freeze and trained:
        raise ValueError(
            "freeze_vision=True, but policy.params contains a trained vision tower; use freeze_vision=False, or write"
            " the policy with save_pretrained and load it again"
        )
    if not freeze and not (isinstance(policy.model, Transformer) and (has_images or trained)):
        reason = "the policy has adapters" if has_images else "the dataset has no images"
        raise ValueError(f"freeze_vision=False, but {reason}; use freeze_vision=True")
    if not has_images:
        return policy
    from grpo_jax.hub.vision import load_tower

    policy = without_image_token(policy)
    if freeze:
        return policy
    tower, params = load_tower(policy, policy.params["norm"]["scale"].dtype)
    params = {"tower": params, **policy.params}  # a tower from a previous run replaces the checkpoint's
    return policy.replace(model=policy.model.clone(tower=tower), params=params)


def with_encoder(
    policy: Policy, parts: Mapping[Key, Encoded], mesh: jax.sharding.Mesh | None = None, params: Params = None
) -> dict[Key, Encoded]:
    """Add an `ImageEncoder` to each of the encoded datasets if any of them has images.

    A trained tower in `params`, or in the frozen base of adapters, is used instead of the checkpoint's tower.
    """
    if not any(part.images for part in parts.values()):
        return dict(parts)
    from grpo_jax.hub.vision import load_processor, load_tower

    processor, tower, frozen = load_processor(policy), getattr(policy.model, "tower", None), None
    if tower is None:
        tower, frozen = load_tower(policy)
        trees = (tree for tree in (params, getattr(policy.model, "base", None)) if isinstance(tree, Mapping))
        frozen = place(next((tree["tower"] for tree in trees if "tower" in tree), frozen), mesh)
    tiles = [[processor.count_tiles(*x) for x in sizes] for part in parts.values() for sizes in part.image_sizes or ()]
    encoder = ImageEncoder(
        processor,
        tower,
        frozen,
        num_tokens=max(ids.count(processor.image_token_id) for part in parts.values() for ids in part.token_ids),
        num_tiles=max(sum(count for count, _ in row) for row in tiles),
        num_windows=max(windows for row in tiles for _, windows in row),
        mesh=mesh,
    )
    return {name: dataclasses.replace(part, image_encoder=encoder, image_sizes=None) for name, part in parts.items()}
