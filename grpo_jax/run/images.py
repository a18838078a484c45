"""Images in a run's prompts: they are read, preprocessed and, with a frozen tower, encoded once per prompt."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import flax.linen as nn
import jax
import numpy as np

from grpo_jax.models.images import encode
from grpo_jax.models.sharding import fetch, place, shard_count, split
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
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
        places: Any = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1).astype(np.int32)
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
        arrays, tower = dict[str, Any](), self.processor.tower
        for name, shape in tower.inputs.items():
            rows = [[tile for one in found for tile in one[name]] for found in inputs]
            windows = max((len(tile) // shape.shape[1] for row in rows for tile in row), default=1)
            most, width = _power_of_two(max(map(len, rows))), shape.shape[1] * _power_of_two(windows)
            arrays[name] = np.zeros((len(rows), most, width, *shape.shape[2:]), shape.dtype)
            for k, row in enumerate(rows):
                for i, tile in enumerate(row):
                    arrays[name][k, i, : len(tile)] = tile
        per_tile = arrays["order"].shape[2] if "order" in arrays else tower.num_features
        order: Any = np.zeros((len(inputs), self.num_tokens), np.int32)
        for row, found, of_prompt in zip(order, inputs, sizes, strict=True):
            index = tile = 0
            for one, size in zip(found, of_prompt, strict=True):
                count = self.processor.num_tokens(*size)
                row[index : index + count] = tile * per_tile + np.arange(count)
                index, tile = index + count, tile + len(next(iter(one.values())))
        return ImageTiles(arrays, order)

    def _encode(self, tiles: ImageTiles) -> np.ndarray:
        """Compute features [B, N, D], for a few prompts at a time."""
        b, devices = len(tiles.order), shard_count(self.mesh)
        values = sum(x[0].size for x in tiles.inputs.values())  # of a prompt
        size = min(max(1, VALUES // values), -(-b // devices)) * devices
        at = [np.minimum(np.arange(start, start + size), b - 1) for start in range(0, b, size)]
        parts = (jax.tree.map(lambda x, at=chosen: x[at], tiles) for chosen in at)
        found = [fetch(_encode_tiles(self.tower, self.params, split(part, self.mesh))) for part in parts]
        return np.concatenate(found)[:b]


@functools.partial(jax.jit, static_argnames="tower")
def _encode_tiles(tower: nn.Module, params: Params, tiles: ImageTiles) -> jax.Array:
    def apply(inputs: Mapping[str, jax.Array]) -> Any:
        return tower.apply({"params": params}, inputs)

    return encode(apply, tiles)


def _power_of_two(count: int) -> int:
    """Return the smallest power of two ≥ count, at least 1."""
    return 1 << (max(1, count) - 1).bit_length()


def check_text_only(rows: Mapping[str, Sequence[Row] | None], argument: str, value: object) -> None:
    """Raise ValueError if `value` is given and a row has images, which the argument's feature does not receive."""
    for name, part in rows.items() if value is not None else ():
        found = next((i for i, row in enumerate(part or ()) if has_images(row)), None)
        if found is not None:
            raise ValueError(f"{argument} does not receive images, but {name} row {found} has images; omit {argument}")


def with_tower(policy: Policy, parts: Mapping[str, EncodedPrompts], *, freeze: bool) -> Policy:
    """Add the vision tower to a policy's model and params, unless it is frozen.

    Raises ValueError if a trained tower would be lost, or if the tower cannot be trained.
    """
    if freeze:
        if "tower" in policy.params:
            raise ValueError(
                "freeze_vision = True, but policy.params contain a trained vision tower; use freeze_vision=False, or"
                " write the policy with save_pretrained and load it again"
            )
        return policy
    if not isinstance(policy.model, Transformer) or not any(part.images for part in parts.values()):
        reason = "the dataset has no images" if isinstance(policy.model, Transformer) else "the policy has adapters"
        raise ValueError(f"freeze_vision = False, but {reason}; use freeze_vision=True")
    from grpo_jax.hub.vision import load_tower

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

    processor, trained = load_processor(policy), getattr(policy.model, "tower", None)
    tower, frozen = (trained, None) if trained is not None else load_tower(policy)
    if frozen is not None:
        frozen = place(params["tower"] if params is not None and "tower" in params else frozen, mesh)
    counts = [ids.count(processor.image_token_id) for part in parts.values() for ids in part.token_ids]
    encoder = ImageEncoder(processor, tower, frozen, max(counts), mesh)
    return {name: dataclasses.replace(part, add_images=encoder) for name, part in parts.items()}
