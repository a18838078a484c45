"""Images in prompts: features from the vision tower, and their places among the prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.types import ImageTiles, PromptImages


def encode(tower: Callable[[dict[str, jax.Array]], jax.Array], tiles: ImageTiles) -> jax.Array:
    """Compute features [B, N, D] for the images in B prompts. `tower` maps inputs for tiles to [tiles, M, D]."""
    b = len(tiles.order)
    features = tower(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tiles.inputs))
    return jnp.take_along_axis(features.reshape(b, -1, features.shape[-1]), tiles.order[..., None], axis=1)


def insert_features(x: jax.Array, images: PromptImages) -> jax.Array:
    """Replace the embeddings x [B, 1, P, D] of image tokens with the images' features."""
    assert not isinstance(images.features, ImageTiles), "`Transformer.prefill` encodes images"
    chosen = jnp.take_along_axis(images.features, jnp.maximum(images.places, 0)[..., None], axis=1)
    return jnp.where((images.places >= 0)[:, None, :, None], chosen[:, None].astype(x.dtype), x)


def last_of_image(places: jax.Array) -> jax.Array:
    """Return the index of the last token of each token's image, or of the token itself for text, [B, P] int32.

    Consecutive image tokens belong to one image.

    Example:
      >>> last_of_image(jnp.array([[-1, 0, 1, -1, 2, -1]])).tolist()
      [[0, 2, 2, 3, 4, 5]]
    """
    index = jnp.broadcast_to(jnp.arange(places.shape[1]), places.shape)
    next_text = jax.lax.cummin(jnp.where(places < 0, index, places.shape[1]), axis=1, reverse=True)
    return jnp.where(places < 0, index, next_text - 1)
