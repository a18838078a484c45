"""Image encoders: SigLIP with the projectors of Gemma 3 and Idefics 3, and the vision transformer of Qwen2.5-VL."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.layers import ACTIVATIONS, MLP, RMSNorm, linear, norm
from grpo_jax.models.matmul import matmul
from grpo_jax.models.rope import Rope, rope_frequencies, rotate


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """Configuration of a `SiglipTower`, which encodes square images."""

    encoder: TransformerConfig  # the layers; `rms_norm_eps` is the epsilon of all norms, `vocab_size` is unused
    image_size: int  # height and width of an image in pixels
    patch_size: int  # height and width of a patch in pixels
    block_size: int  # r, number of patches per side of the square that becomes one feature
    out_hidden_size: int  # D, width of the text model
    pool: bool  # whether a block's patches are averaged (Gemma 3) or concatenated (Idefics 3)

    @property
    def side(self) -> int:
        """Number of patches per side of an image. Pixels beyond the last whole patch are ignored."""
        return self.image_size // self.patch_size

    @property
    def num_features(self) -> int:
        """M, number of features per tile (one square image)."""
        return (self.side // self.block_size) ** 2

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the inputs for one tile."""
        return {"pixels": jax.ShapeDtypeStruct((1, self.image_size, self.image_size, 3), jnp.float32)}


class SiglipTower(nn.Module):
    """Encodes square images with SigLIP (Zhai et al. 2023) and projects them to the text model's width.

    `inputs` contains `pixels` [tiles, H, W, 3], and the result is [tiles, M, D], with a feature for each block of r × r
    patches in raster order: norm(mean(x over the block)) W for Gemma 3, and concat(x over the block) W for Idefics 3
    (pixel shuffle; Shi et al. 2016), where W is a projection. Patches have learned position embeddings.
    """

    config: SiglipConfig

    @nn.compact
    def __call__(self, inputs: Mapping[str, jax.Array]) -> jax.Array:
        c, encoder, pixels = self.config, self.config.encoder, inputs["pixels"]
        n, side, p, width = len(pixels), c.side, c.patch_size, encoder.hidden_size
        chex.assert_shape(pixels, (n, c.image_size, c.image_size, 3))
        patches = pixels[:, : side * p, : side * p].reshape(n, side, p, side, p, 3).transpose(0, 1, 3, 5, 2, 4)
        x = linear(encoder, "patch_embedding", width, True)(patches.reshape(n, side**2, 3 * p**2))
        positions = nn.Embed(side**2, width, name="position_embedding").embedding
        x = x + positions[None].astype(x.dtype)
        for i in range(encoder.num_layers):
            x = _SiglipLayer(encoder, name=f"layers_{i}")(x)
        x = _layer_norm(encoder, "post_layernorm", x)
        rows, r = side // c.block_size, c.block_size
        x = x.reshape(n, rows, r, rows, r, width).transpose(0, 1, 3, 2, 4, 5).reshape(n, rows**2, r**2, width)
        if not c.pool:
            return linear(encoder, "proj", c.out_hidden_size)(x.reshape(n, rows**2, r**2 * width))
        x = x.mean(axis=2, dtype=jnp.float32).astype(x.dtype)
        x = RMSNorm(encoder.rms_norm_eps, 1.0, name="mm_soft_emb_norm")(x)
        # Checkpoints store this matrix as [in, out], unlike the kernels of linear layers.
        init = nn.initializers.normal(encoder.initializer_range)
        w = self.param("mm_input_projection_weight", init, (width, c.out_hidden_size))
        x = matmul(x.reshape(-1, width), w, None, encoder.uses_float32_sums)
        return x.reshape(n, rows**2, c.out_hidden_size)


class _SiglipLayer(nn.Module):
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


@dataclasses.dataclass(frozen=True)
class QwenVisionConfig:
    """Configuration of a `QwenTower`."""

    encoder: TransformerConfig  # the layers and their rotary embedding; `vocab_size` is unused
    patch_dim: int  # F, number of values per patch
    merge_size: int  # number of patches per side of the square that becomes one feature
    window_size: int  # number of features per side of an attention window
    full_attention_layers: tuple[int, ...]  # indices of the layers that attend to the whole image
    out_hidden_size: int  # D, width of the text model

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the inputs for one image of merge_size × merge_size patches."""
        patches = np.zeros((self.merge_size**2, self.patch_dim), np.float32)
        return jax.eval_shape(lambda: window_inputs(patches, (self.merge_size, self.merge_size), self))


class QwenTower(nn.Module):
    """Encodes images with Qwen2.5-VL's vision transformer (Bai et al. 2025, section 2.1.1).

    `inputs` contains the arrays from `window_inputs`, concatenated for several images (one tile each) and padded with
    zeros to W windows of S patches. Returns features [tiles, M, D] with M = W · S / merge_size², in raster order.
    Features after an image's last one must be ignored.
    """

    config: QwenVisionConfig

    @nn.compact
    def __call__(self, inputs: Mapping[str, jax.Array]) -> jax.Array:
        c, encoder = self.config, self.config.encoder
        x = linear(encoder, "patch_embed", encoder.hidden_size)(inputs["patches"])
        table = _axial_table(inputs["positions"], encoder.rope, encoder.head_dim)
        for i in range(encoder.num_layers):
            x = _QwenBlock(encoder, i in c.full_attention_layers, name=f"blocks_{i}")(x, table, inputs["valid"])
        width = c.merge_size**2 * encoder.hidden_size
        x = norm(encoder, "merger_ln_q")(x).reshape(len(x), -1, width)
        x = ACTIVATIONS["gelu"](linear(encoder, "merger_mlp_0", width, True)(x))
        x = linear(encoder, "merger_mlp_2", c.out_hidden_size, True)(x)
        return jnp.take_along_axis(x, inputs["raster_index"][:, :, None], axis=1)


class _QwenBlock(nn.Module):
    config: TransformerConfig
    full_attention: bool  # whether patches attend to the whole image, not only to their window

    @nn.compact
    def __call__(self, x: jax.Array, table: tuple[jax.Array, jax.Array], valid: jax.Array) -> jax.Array:
        c, (n, windows, size, width) = self.config, x.shape
        qkv = linear(c, "attn_qkv", 3 * width, True)(norm(c, "norm1")(x))
        q, k, v = jnp.moveaxis(qkv.reshape(n, windows, size, 3, c.num_heads, c.head_dim), 3, 0)
        b, t = (n, windows * size) if self.full_attention else (n * windows, size)
        q, k, v = (y.reshape(b, t, c.num_heads, c.head_dim) for y in (rotate(q, table), rotate(k, table), v))
        # Queries of windows without patches attend to all keys equally; their features are not used.
        y = jax.nn.dot_product_attention(q, k, v, mask=valid.reshape(b, 1, 1, t)).reshape(x.shape)
        x = x + linear(c, "attn_proj", width, True)(y)
        return x + MLP(c, c.intermediate_size, name="mlp")(norm(c, "norm2")(x))


def _axial_table(positions: jax.Array, rope: Rope, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return a `rope_table` for positions [tiles, W, S, 2]: half the angles depend on the row, half on the column."""
    frequencies, _ = rope_frequencies(rope, head_dim // 2)
    angles = positions[..., None].astype(jnp.float32) * frequencies.reshape(1, 1, 1, 1, -1)
    angles = angles.reshape(*positions.shape[:-1], -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def window_inputs(pixel_values: np.ndarray, grid: tuple[int, int], config: QwenVisionConfig) -> dict[str, np.ndarray]:
    """Group an image's patches by attention window, as inputs to `QwenTower`.

    Args:
      pixel_values: [h · w, F] patches from transformers' image processor, ordered by merge_size × merge_size square.
      grid: (h, w), number of rows and columns of patches. Both are multiples of `config.merge_size`.
      config: configuration of the tower.

    Returns:
      For W windows of S patches, some of which are padding: `patches` [1, W, S, F] float32; `positions` [1, W, S, 2]
      int32, the row and column of each patch; `valid` [1, W, S] bool, False for padding; and `raster_index` [1, M]
      int32, for each feature in raster order its index among the M = W · S / merge_size² squares, followed by zeros.
    """
    m, size = config.merge_size, config.window_size
    height, width = grid[0] // m, grid[1] // m
    rows, columns = -(-height // size), -(-width // size)

    def group(x: np.ndarray) -> np.ndarray:
        x = x.reshape(height, width, m * m, -1)
        x = np.pad(x, [(0, rows * size - height), (0, columns * size - width), (0, 0), (0, 0)])
        x = x.reshape(rows, size, columns, size, m * m, -1).swapaxes(1, 2)
        return x.reshape(1, rows * columns, (m * size) ** 2, -1)

    positions = np.indices(grid, np.int32).reshape(2, height, m, width, m).transpose(1, 3, 2, 4, 0)
    slots = np.arange(rows * columns * size**2, dtype=np.int32).reshape(rows, columns, size, size).swapaxes(1, 2)
    raster_index = slots.reshape(rows * size, columns * size)[:height, :width].ravel()
    return {
        "patches": group(pixel_values.astype(np.float32)),
        "positions": group(positions),
        "valid": group(np.ones(len(pixel_values), bool))[..., 0],
        "raster_index": np.pad(raster_index, (0, slots.size - len(raster_index)))[None],
    }
