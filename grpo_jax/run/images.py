"""Images in a run's prompts: they are read, preprocessed and, with a frozen tower, encoded once per prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import flax.linen as nn
import jax
import numpy as np

from grpo_jax.models.sharding import fetch, place, shard_count, split
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.run.placement import with_shape
from grpo_jax.text.images import ImageSource, has_images, open_image
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.types import ImageTiles, Params, PromptImages, Prompts, Row

if TYPE_CHECKING:  # at runtime, imported only if prompts have images
    from grpo_jax.hub.processor import ImageProcessor

Encoded = TypeVar("Encoded", bound=EncodedPrompts)
Key = TypeVar("Key")

VALUES = 3 * 2**20
"""Number of input values, such as pixels × 3, that a device encodes at a time. It limits the attention scores."""


@dataclasses.dataclass(frozen=True)
class ImageEncoder:
    """Adds the images of dataset rows to prompts. All prompts of a run get arrays of the same shapes.

    Attributes:
      processor: image processor of the checkpoint.
      tower: vision tower.
      params: frozen params of the tower, or None if it is trained. Then prompts get the tower's inputs.
      num_tokens: N, maximum number of image tokens in a prompt.
      num_tiles: K, maximum number of tiles in a prompt.
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
        """Return prompts (NumPy arrays) with `PromptImages` for the images of each prompt."""
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        is_image = tokens == self.processor.image_token_id
        places: Any = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1).astype(np.int32)
        opened = [[open_image(source) for source in sources] for sources in images]
        sizes = [[(image.height, image.width) for image in found] for found in opened]
        inputs = [[self.processor.inputs(image) for image in found] for found in opened]
        counts = [[self.processor.num_tokens(*size) for size in found] for found in sizes]
        positions = [
            self.processor.positions(row[:length].tolist(), size)
            for row, length, size in zip(tokens, lengths, sizes, strict=True)
        ]
        by_axis: Any = None
        if rows := [x for x in positions if x is not None]:
            by_axis = np.stack([np.pad(x, ((0, 0), (0, tokens.shape[1] - x.shape[1]))) for x in rows])
        features: Any = (self._tiles if self.params is None else self._features)(inputs, counts)
        return prompts.replace(images=PromptImages(features, places, by_axis))

    def _stacked(self, images: Sequence[dict[str, np.ndarray]], count: int) -> dict[str, Any]:
        """Stack the images' tiles into arrays [count, ...], padded with zeros."""
        arrays = dict[str, Any]()
        for name, shape in self.processor.tower.inputs.items():
            arrays[name] = np.zeros((count, self.num_windows * shape.shape[1], *shape.shape[2:]), shape.dtype)
            for i, tile in enumerate(tile for one in images for tile in one[name]):
                arrays[name][i, : len(tile)] = tile
        return arrays

    def _tiles(self, inputs: Sequence[Sequence[dict[str, np.ndarray]]], counts: Sequence[Sequence[int]]) -> ImageTiles:
        each = [self._stacked(found, self.num_tiles) for found in inputs]
        arrays: dict[str, Any] = {name: np.stack([x[name] for x in each]) for name in each[0]}
        per_tile = arrays["order"].shape[2] if "order" in arrays else self.processor.tower.num_features
        order: Any = np.zeros((len(inputs), self.num_tokens), np.int32)
        for row, found, numbers in zip(order, inputs, counts, strict=True):
            index = tile = 0
            for one, count in zip(found, numbers, strict=True):
                row[index : index + count] = tile * per_tile + np.arange(count)
                index, tile = index + count, tile + len(next(iter(one.values())))
        return ImageTiles(arrays, order)

    def _features(
        self, inputs: Sequence[Sequence[dict[str, np.ndarray]]], counts: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Compute features [B, N, D], for a few tiles at a time."""
        images = [one for found in inputs for one in found]
        total = sum(len(next(iter(one.values()))) for one in images)
        devices, values = shard_count(self.mesh), sum(x[0].size for x in self._stacked([], 1).values())
        size = min(max(1, VALUES // values), -(-len(inputs) * self.num_tiles // devices)) * devices  # tiles at a time
        tiles = self._stacked(images, max(1, -(-total // size)) * size)
        encoded = []
        for start in range(0, max(total, 1), size):
            part = {name: x[start : start + size] for name, x in tiles.items()}
            encoded.append(fetch(_encode(self.tower, self.params, split(part, self.mesh))))
        found = np.concatenate(encoded)
        features, tile = np.zeros((len(inputs), self.num_tokens, found.shape[2]), found.dtype), 0
        for row, of_prompt, numbers in zip(features, inputs, counts, strict=True):
            index = 0
            for one, count in zip(of_prompt, numbers, strict=True):
                end = tile + len(next(iter(one.values())))
                row[index : index + count] = found[tile:end].reshape(-1, found.shape[2])[:count]
                index, tile = index + count, end
        return features


@functools.partial(jax.jit, static_argnames="tower")
def _encode(tower: nn.Module, params: Params, inputs: Mapping[str, jax.Array]) -> Any:
    return tower.apply({"params": params}, inputs)


def check_text_only(rows: Mapping[str, Sequence[Row] | None], argument: str, value: object) -> None:
    """Raise ValueError if `value` is given and a row has images, which the argument's feature does not receive."""
    for name, part in rows.items() if value is not None else ():
        found = next((i for i, row in enumerate(part or ()) if has_images(row)), None)
        if found is not None:
            raise ValueError(f"{argument} does not receive images, but {name} row {found} has images; omit {argument}")


def _trained_tower(policy: Policy, params: Params) -> Params | None:
    """Return the params of a tower that was trained, from `params` or the frozen base of adapters, or None."""
    held = (tree for tree in (params, getattr(policy.model, "base", None)) if isinstance(tree, Mapping))
    return next((tree["tower"] for tree in held if "tower" in tree), None)


def without_image_token(policy: Policy) -> Policy:
    """Mask the logit of the image token, so that it is not sampled."""
    from grpo_jax.hub.vision import image_token_id

    return policy.replace(model=with_shape(policy.model, image_token_id=image_token_id(policy.config)))


def with_tower(policy: Policy, parts: Mapping[str, EncodedPrompts], *, freeze: bool) -> Policy:
    """Add the vision tower to a policy's model and params, unless it is frozen. If rows have images, the image token is
    not sampled.

    Raises ValueError if a trained tower would be lost, or if the tower cannot be trained.
    """
    has_images = any(part.images for part in parts.values())
    if freeze and "tower" in policy.params:
        raise ValueError(
            "freeze_vision = True, but policy.params contain a trained vision tower; use freeze_vision=False, or write"
            " the policy with save_pretrained and load it again"
        )
    if not freeze and not (isinstance(policy.model, Transformer) and (has_images or "tower" in policy.params)):
        reason = "the dataset has no images" if isinstance(policy.model, Transformer) else "the policy has adapters"
        raise ValueError(f"freeze_vision = False, but {reason}; use freeze_vision=True")
    if not has_images:
        return policy
    from grpo_jax.hub.vision import load_tower

    policy = without_image_token(policy)
    if freeze:
        return policy
    tower, params = load_tower(policy, policy.params["norm"]["scale"].dtype)
    params = {"tower": params, **policy.params}  # a tower in `policy.params` was trained in a previous run
    return policy.replace(model=policy.model.clone(tower=tower), params=params)


def with_encoder(
    policy: Policy, parts: Mapping[Key, Encoded], mesh: jax.sharding.Mesh | None = None, params: Params = None
) -> dict[Key, Encoded]:
    """Add an `ImageEncoder` to encoded datasets if any of them has images.

    The encoder uses the tower in `params`, if they contain a trained one, instead of the checkpoint's.
    """
    if not any(part.images for part in parts.values()):
        return dict(parts)
    from grpo_jax.hub.processor import load_processor
    from grpo_jax.hub.vision import load_tower

    processor, tower, frozen = load_processor(policy), getattr(policy.model, "tower", None), None
    if tower is None:
        tower, frozen = load_tower(policy)
        frozen = place(_trained_tower(policy, params) or frozen, mesh)
    tiles = [[processor.tiles(*size) for size in sizes] for part in parts.values() for sizes in part.image_sizes or ()]
    encoder = ImageEncoder(
        processor,
        tower,
        frozen,
        num_tokens=max(ids.count(processor.image_token_id) for part in parts.values() for ids in part.token_ids),
        num_tiles=max(sum(count for count, _ in row) for row in tiles),
        num_windows=max(windows for row in tiles for _, windows in row),
        mesh=mesh,
    )
    return {name: dataclasses.replace(part, add_images=encoder, image_sizes=None) for name, part in parts.items()}
