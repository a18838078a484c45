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
    block: int  # r, number of patches per side of the square that becomes one feature
    features: int  # D, width of the text model
    pooled: bool  # whether a block's patches are averaged (Gemma 3) or concatenated (Idefics 3)

    @property
    def side(self) -> int:
        """Number of patches per side of an image. Pixels beyond the last whole patch are ignored."""
        return self.image_size // self.patch_size

    @property
    def num_features(self) -> int:
        """M, number of features per image."""
        return (self.side // self.block) ** 2

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the inputs for one image."""
        return {"pixels": jax.ShapeDtypeStruct((1, self.image_size, self.image_size, 3), jnp.float32)}


class SiglipTower(nn.Module):
    """Encode images with SigLIP (Zhai et al. 2023) and project them to the text model's width.

    `inputs` contains `pixels` [N, H, W, 3], and the result is [N, M, D] with M = (side / r)² for blocks of r × r
    patches, in raster order:

        Gemma 3:    norm(mean(x over a block)) W
        Idefics 3:  concat(x over a block) W       (pixel shuffle; Shi et al. 2016)

    Patches have learned positions in raster order. In transformers, rounding gives some patches of Idefics 3 their
    neighbor's position for some sides (19, 25, 29, 31, …), but not for the published ones (26, 27 and 32).

    Raises:
      ValueError: if the images do not have the config's size.

    Example:
      >>> layers = TransformerConfig(0, 16, 24, 1, 2, 2, 8, activation="gelu_tanh")
      >>> tower = SiglipTower(SiglipConfig(layers, image_size=28, patch_size=7, block=2, features=32, pooled=True))
      >>> features, _ = tower.init_with_output(jax.random.key(0), {"pixels": jnp.zeros((3, 28, 28, 3))})
      >>> features.shape
      (3, 4, 32)
    """

    config: SiglipConfig

    @nn.compact
    def __call__(self, inputs: Mapping[str, jax.Array]) -> jax.Array:
        c, pixels = self.config, inputs["pixels"]
        if pixels.shape[1:3] != (c.image_size, c.image_size):
            raise ValueError(f"pixels must have shape [N, {c.image_size}, {c.image_size}, 3]; got {pixels.shape}.")
        x = _Encoder(c, name="encoder")(pixels)
        n, d, side = len(x), x.shape[-1], c.side // c.block
        blocks = x.reshape(n, side, c.block, side, c.block, d).transpose(0, 1, 3, 2, 4, 5)
        return _Projector(c, name="projector")(blocks.reshape(n, side**2, c.block**2, d))


class _Encoder(nn.Module):
    config: SiglipConfig

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        c, layer, p = self.config, self.config.encoder, self.config.patch_size
        n, length = len(pixels), c.side * p
        patches = pixels[:, :length, :length].reshape(n, c.side, p, c.side, p, 3).transpose(0, 1, 3, 5, 2, 4)
        x = linear(layer, "patch_embedding", layer.hidden_size, True)(patches.reshape(n, c.side**2, 3 * p * p))
        embed = nn.Embed(c.side**2, layer.hidden_size, name="position_embedding")
        x = x + embed.embedding[None].astype(x.dtype)
        for i in range(layer.num_layers):
            x = _Layer(layer, name=f"layers_{i}")(x)
        return _layer_norm(layer, "post_layernorm", x)


class _Layer(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        x = x + _Attention(c, name="self_attn")(_layer_norm(c, "layer_norm1", x))
        return x + _MLP(c, name="mlp")(_layer_norm(c, "layer_norm2", x))


class _Attention(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, width = self.config, self.config.hidden_size
        q, k, v = (
            linear(c, name, width, True)(x).reshape(*x.shape[:2], c.num_heads, c.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        return linear(c, "out_proj", width, True)(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


class _MLP(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        return linear(c, "fc2", c.hidden_size, True)(
            ACTIVATIONS[c.activation](linear(c, "fc1", c.intermediate_size, True)(x))
        )


class _Projector(nn.Module):
    config: SiglipConfig

    @nn.compact
    def __call__(self, blocks: jax.Array) -> jax.Array:
        """Project blocks [N, M, r², width] to features [N, M, D]."""
        c, layer = self.config, self.config.encoder
        if not c.pooled:
            return linear(layer, "proj", c.features)(blocks.reshape(*blocks.shape[:2], -1))
        x = blocks.astype(jnp.float32).mean(axis=2).astype(blocks.dtype)
        x = RMSNorm(layer.rms_norm_eps, 1.0, name="mm_soft_emb_norm")(x)
        init = nn.initializers.normal(layer.initializer_range)
        # A checkpoint stores this matrix [in, out], unlike those of linear layers.
        w = self.param("mm_input_projection_weight", init, (x.shape[-1], c.features))
        return matmul(x.reshape(-1, x.shape[-1]), w, None, layer.uses_float32_sums).reshape(*x.shape[:2], -1)


def _layer_norm(config: TransformerConfig, name: str, x: jax.Array) -> jax.Array:
    """Apply a `LayerNorm` submodule in float32."""
    normed = nn.LayerNorm(config.rms_norm_eps, dtype=jnp.float32, use_fast_variance=False, name=name)(x)
    return normed.astype(x.dtype)
