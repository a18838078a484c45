"""Learning rate schedule and optax optimizer, built from a config."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config.sft import GRPOOrSFTConfig
from grpo_jax.types import Params

# Follows transformers' `Trainer.get_decay_parameter_names`, which also excludes PyTorch layer norms by class. Here,
# flax.linen norms are recognized by their parameter name "scale".
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|/)norm(/|$)|_norm(/|$)|(^|/)scale$")


def make_schedule(config: GRPOOrSFTConfig, total_steps: int) -> optax.Schedule:
    """Return the schedule: constant, or linear or cosine decay to 0. All types but "constant" may warm up from 0."""
    peak, warmup = config.learning_rate, config.total_warmup_steps(total_steps)
    rest = max(1, total_steps - warmup)
    if config.lr_scheduler_type == "linear":
        decay = optax.linear_schedule(peak, 0.0, rest)
    elif config.lr_scheduler_type == "cosine":
        decay = optax.cosine_decay_schedule(peak, rest)
    else:
        decay = optax.constant_schedule(peak)
    if warmup == 0 or config.lr_scheduler_type == "constant":
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup])


def is_decayed(path: str) -> bool:
    """Return whether weight decay applies to the parameter at `path`. Returns False for norms and biases."""
    return _NOT_DECAYED.search(path.lower()) is None


def _add_decay(weight: float) -> optax.GradientTransformation:
    """Add weight·θ to the updates for params θ that `is_decayed` selects. The state is empty, as in `optax.adamw`."""

    def add_to_leaf(path: jax.tree_util.KeyPath, update: jax.Array, param: jax.Array) -> jax.Array:
        decays = is_decayed(jax.tree_util.keystr(path, simple=True, separator="/"))
        return update + weight * param if decays else update

    def add(updates: Params, params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(add_to_leaf, updates, params)

    return optax.stateless(add)


def _clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clip by global norm like `optax.clip_by_global_norm`, but compute a product, g · min(1, max_norm / ‖g‖).

    Both of Adam's moments use the clipped gradient. XLA recomputes a product for each moment, but would store the
    result of a division, which is as large as the gradient.
    """

    def clip(updates: Params, params: Params | None = None) -> Params:
        norm = optax.tree.norm(updates)
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates)

    return optax.stateless(clip)


@functools.lru_cache(maxsize=8)
def make_optimizer(config: GRPOOrSFTConfig, total_steps: int) -> optax.GradientTransformation:
    """Return AdamW with global-norm clipping. Equal arguments give the same object, so that `jit` does not recompile.

    The learning rate depends on `TrainState.step`. Adam's bias correction counts only applied updates.
    """
    clip = _clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    adamw = optax.chain(  # has the same transformations and state as `optax.adamw`
        optax.scale_by_adam(b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_epsilon),
        _add_decay(config.weight_decay),
        _scale_by_rate_of_step(make_schedule(config, total_steps)),
    )
    return optax.chain(clip, adamw)


def _scale_by_rate_of_step(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Scale by the learning rate at the `step` passed to `update`. Without `step`, use the number of updates so far."""
    by_count = optax.scale_by_learning_rate(schedule)

    def update(
        updates: Params, state: Any, params: Params = None, *, step: jax.Array | None = None, **_: Any
    ) -> tuple[Params, Any]:
        return by_count.update(updates, state if step is None else state._replace(count=step), params)

    return optax.GradientTransformationExtraArgs(by_count.init, update)
