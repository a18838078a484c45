"""Images in prompts: features from the vision tower, inserted at the image tokens."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.types import ImageTiles, PromptImages


def encode(tower: Callable[[dict[str, jax.Array]], jax.Array], tiles: ImageTiles) -> jax.Array:
    """Compute features [B, N, D] for the images in B prompts. `tower` maps inputs for tiles to [tiles, M, D]."""
    b = len(tiles.feature_index)
    features = tower(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tiles.inputs))
    return jnp.take_along_axis(features.reshape(b, -1, features.shape[-1]), tiles.feature_index[..., None], axis=1)


def insert_features(x: jax.Array, images: PromptImages) -> jax.Array:
    """Replace the embeddings of image tokens in x [B, 1, P, D] with image features."""
    assert not isinstance(images.features, ImageTiles), "images.features must be an array; `prefill` encodes tiles"
    chosen = jnp.take_along_axis(images.features, jnp.maximum(images.feature_index, 0)[..., None], axis=1)
    return jnp.where((images.feature_index >= 0)[:, None, :, None], chosen[:, None].astype(x.dtype), x)


def last_of_image(feature_index: jax.Array) -> jax.Array:
    """Return the index of the last token in each token's image, [B, P] int32. Text tokens return their own index.

    Consecutive image tokens count as one image.

    Example:
      >>> last_of_image(jnp.array([[-1, 0, 1, -1, 2, -1]])).tolist()
      [[0, 2, 2, 3, 4, 5]]
    """
    index = jnp.broadcast_to(jnp.arange(feature_index.shape[1]), feature_index.shape)
    next_text = jax.lax.cummin(jnp.where(feature_index < 0, index, feature_index.shape[1]), axis=1, reverse=True)
    return jnp.where(feature_index < 0, index, next_text - 1)
