"""Placement of a policy on a run's devices: mesh, compute dtype, attention and activation checkpointing."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import GRPOOrSFTConfig, SFTConfig
from grpo_jax.models.attention import mosaic_error
from grpo_jax.models.attention_tiles import attention_implementation, triton_or_tiles
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.devices import compute_dtype, has_fast_float32_sums, platform_of
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import AXES, check_fits, make_mesh, mesh_of, place
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.types import Model, Params, is_builtin

_Config = TypeVar("_Config", GRPOConfig, SFTConfig)


def run_mesh(policy: Policy, config: _Config) -> tuple[jax.sharding.Mesh | None, _Config]:
    """Return the run's mesh (the config's, or else the mesh of the policy's params, if any) and the config with it."""
    mesh = mesh_of(policy.params) if config.mesh is None else make_mesh(config.mesh)
    if mesh is None:
        return None, config
    if not set(mesh.axis_names) <= set(AXES):
        raise ValueError(
            f"policy must be placed on a mesh whose axes are all in {', '.join(AXES)}; got {mesh.axis_names}"
        )
    axes = dict(mesh.shape) if config.mesh is None else config.mesh
    if (shape := shape_of(policy)) is not None:
        channels = math.gcd(shape.intermediate_size, shape.expert_size if shape.num_experts else 0)
        check_fits(axes, width=shape.hidden_size, heads=shape.num_heads, channels=channels)
    return mesh, dataclasses.replace(config, mesh=axes)


def shape_of(policy: Policy) -> TransformerConfig | None:
    """Return the `TransformerConfig` of a policy's decoder, or None for a custom model."""
    return policy.model.config if isinstance(policy.model, Transformer | LoraModel) else None


def vocab_size(model: Model, params: Params) -> int:
    """Return V, the size of the last axis of the model's logits."""
    if is_builtin(model):
        return int(model.config.vocab_size)

    def logits(params: Params) -> jax.Array:
        return model.apply({"params": params}, jnp.zeros((1, 1), jnp.int32))

    return int(jax.eval_shape(logits, params).shape[-1])


def with_settings(
    model: Model, config: GRPOOrSFTConfig, devices: Sequence[jax.Device] = (), mesh: jax.sharding.Mesh | None = None
) -> Model:
    """Return the model with a run's dtype, checkpointing, attention and mesh. A custom model is returned unchanged."""
    if not isinstance(model, Transformer | LoraModel):
        return model
    dtype = compute_dtype(config.compute_dtype, devices)
    return with_shape(
        model,
        dtype=dtype,
        remat=bool(config.gradient_checkpointing),
        # Disabled on a mesh, where the zero that `cpu_remat` adds would come from a different device.
        remat_on_cpu=(mesh is None or mesh.size == 1) and platform_of(devices)[0] == "cpu",
        attention=_attention(dataclasses.replace(model.config, dtype=dtype), devices),
        mesh=mesh if mesh is not None and mesh.size > 1 else None,
        float32_sums=has_fast_float32_sums(devices) if model.config.float32_sums is None else model.config.float32_sums,
        # On TPU, compilation takes at least a second per unrolled layer.
        loop_layers=any(device.platform == "tpu" for device in devices),
    )


def _attention(config: TransformerConfig, devices: Sequence[jax.Device]) -> str:
    """Return the attention implementation. Warns and falls back if "auto" selects Hopper kernels that do not work."""
    kernels = attention_implementation(config.attention, devices)
    local = [device for device in devices or jax.local_devices() if device in jax.local_devices()]  # of this process
    if kernels != "mosaic" or config.attention == kernels or not config.fits_mosaic or not local:
        return kernels
    errors = [error for width in config.attention_widths if (error := mosaic_error(local[0], width)) is not None]
    if errors:
        warnings.warn(
            f"falling back to slower attention kernels: the kernels for {local[0].device_kind} do not work with jax "
            f"{jax.__version__} and this version of CUDA: {errors[0]}. Try another version of CUDA",
            stacklevel=2,
        )
    return triton_or_tiles() if errors else kernels


def place_policy(policy: Policy, mesh: jax.sharding.Mesh | None) -> Policy:
    """Place a policy's params and frozen base model on a mesh, according to `sharding.TABLE`. No-op without a mesh."""
    model = policy.model if mesh is None else with_shape(policy.model, mesh=mesh if mesh.size > 1 else None)
    frozen = not jax.tree_util.all_leaves([model])
    return policy.replace(model=place(model, mesh) if frozen else model, params=place(policy.params, mesh))


def with_shape(model: Model, **changes: Any) -> Model:
    """Return a model with changed fields in its `TransformerConfig`. A custom model is returned unchanged."""
    if not isinstance(model, Transformer | LoraModel):
        return model
    config = dataclasses.replace(model.config, **changes)
    if isinstance(model, LoraModel):
        return dataclasses.replace(model, model=model.model.clone(config=config))
    if model.tower is not None:
        encoder = dataclasses.replace(model.tower.config.encoder, dtype=config.dtype)
        tower = model.tower.clone(config=dataclasses.replace(model.tower.config, encoder=encoder))
        model = model.clone(tower=tower)
    return model.clone(config=config)
