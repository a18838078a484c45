"""SigLIP's image encoder, with the projectors of Gemma 3 and Idefics 3 to the text model's width."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.layers import ACTIVATIONS, RMSNorm, linear
from grpo_jax.models.matmul import matmul


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """Configuration of a `SiglipTower`, which encodes square images."""

    encoder: TransformerConfig  # the layers; `rms_norm_eps` is the epsilon of all norms, `vocab_size` is unused
    image_size: int  # height and width of an image in pixels
    patch_size: int  # height and width of a patch in pixels
    block_size: int  # r, number of patches per side of the square that becomes one feature
    features: int  # D, width of the text model
    pool: bool  # whether a block's patches are averaged (Gemma 3) or concatenated (Idefics 3)

    @property
    def side(self) -> int:
        """Number of patches per side of an image. Pixels beyond the last whole patch are ignored."""
        return self.image_size // self.patch_size

    @property
    def num_features(self) -> int:
        """M, number of features per tile."""
        return (self.side // self.block_size) ** 2

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the inputs for one tile."""
        return {"pixels": jax.ShapeDtypeStruct((1, self.image_size, self.image_size, 3), jnp.float32)}


class SiglipTower(nn.Module):
    """Encodes square images with SigLIP (Zhai et al. 2023) and projects them to the text model's width.

    `inputs` contains `pixels` [tiles, H, W, 3], and the result is [tiles, M, D], with a feature for each block of r × r
    patches in raster order:

        Gemma 3:    norm(mean(x over the block)) W
        Idefics 3:  concat(x over the block) W       (pixel shuffle; Shi et al. 2016)

    Patches have learned positions in raster order. For a few grid sizes (19, 25, 29, … patches per side), transformers
    assigns some of Idefics 3's positions twice because of rounding, but not for the published 26, 27 and 32.

    Raises:
      ValueError: if the images do not have the config's size.

    Example:
      >>> layers = TransformerConfig(0, 16, 24, 1, 2, 2, 8, activation="gelu_tanh")
      >>> tower = SiglipTower(SiglipConfig(layers, image_size=28, patch_size=7, block_size=2, features=32, pool=True))
      >>> features, _ = tower.init_with_output(jax.random.key(0), {"pixels": jnp.zeros((3, 28, 28, 3))})
      >>> features.shape
      (3, 4, 32)
    """

    config: SiglipConfig

    @nn.compact
    def __call__(self, inputs: Mapping[str, jax.Array]) -> jax.Array:
        c, layer, pixels = self.config, self.config.encoder, inputs["pixels"]
        n, side, p, width = len(pixels), c.side, c.patch_size, layer.hidden_size
        if pixels.shape[1:] != c.inputs["pixels"].shape[1:]:
            raise ValueError(f"pixels must have shape [tiles, {c.image_size}, {c.image_size}, 3]; got {pixels.shape}.")
        patches = pixels[:, : side * p, : side * p].reshape(n, side, p, side, p, 3).transpose(0, 1, 3, 5, 2, 4)
        x = linear(layer, "patch_embedding", width, True)(patches.reshape(n, side**2, 3 * p**2))
        positions = nn.Embed(side**2, width, name="position_embedding").embedding
        x = x + positions[None].astype(x.dtype)
        for i in range(layer.num_layers):
            x = _Layer(layer, name=f"layers_{i}")(x)
        x = _layer_norm(layer, "post_layernorm", x)
        rows, r = side // c.block_size, c.block_size
        x = x.reshape(n, rows, r, rows, r, width).transpose(0, 1, 3, 2, 4, 5).reshape(n, rows**2, r**2, width)
        if not c.pool:
            return linear(layer, "proj", c.features)(x.reshape(n, rows**2, r**2 * width))
        x = x.mean(axis=2, dtype=jnp.float32).astype(x.dtype)
        x = RMSNorm(layer.rms_norm_eps, 1.0, name="mm_soft_emb_norm")(x)
        # Checkpoints store this matrix as [in, out], unlike the kernels of linear layers.
        init = nn.initializers.normal(layer.initializer_range)
        w = self.param("mm_input_projection_weight", init, (width, c.features))
        return matmul(x.reshape(-1, width), w, None, layer.uses_float32_sums).reshape(n, rows**2, c.features)


class _Layer(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, width = self.config, self.config.hidden_size
        y = _layer_norm(c, "layer_norm1", x)
        q, k, v = (
            linear(c, f"self_attn_{name}_proj", width, True)(y).reshape(*x.shape[:2], c.num_heads, c.head_dim)
            for name in "qkv"
        )
        y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + linear(c, "self_attn_out_proj", width, True)(y)
        y = linear(c, "mlp_fc1", c.intermediate_size, True)(_layer_norm(c, "layer_norm2", x))
        return x + linear(c, "mlp_fc2", width, True)(ACTIVATIONS[c.activation](y))


def _layer_norm(config: TransformerConfig, name: str, x: jax.Array) -> jax.Array:
    """Apply a `LayerNorm` submodule in float32."""
    normed = nn.LayerNorm(config.rms_norm_eps, dtype=jnp.float32, use_fast_variance=False, name=name)(x)
    return normed.astype(x.dtype)
