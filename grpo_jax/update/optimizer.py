"""Schedule and optimizer of a config: plain optax."""

from __future__ import annotations

import functools

import optax

from grpo_jax.config.config import GRPOConfig


def make_schedule(config: GRPOConfig, total_steps: int) -> optax.Schedule:
    """Learning rate at each optimizer step: linear warm-up from 0, then linear or cosine to 0, or flat.

    Example:
      >>> schedule = make_schedule(GRPOConfig(learning_rate=1.0, warmup_steps=2), total_steps=6)
      >>> [float(schedule(step)) for step in range(7)]
      [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    peak, warmup = config.learning_rate, config.total_warmup_steps(total_steps)
    rest = max(1, total_steps - warmup)
    if config.lr_scheduler_type == "linear":
        after = optax.linear_schedule(peak, 0.0, rest)
    elif config.lr_scheduler_type == "cosine":
        after = optax.cosine_decay_schedule(peak, rest)
    else:
        after = optax.constant_schedule(peak)
    if warmup == 0 or config.lr_scheduler_type == "constant":
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


@functools.lru_cache(maxsize=8)
def make_optimizer(config: GRPOConfig, total_steps: int) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip. The same config gives the same object, so that `jit` knows it again."""
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    adamw = optax.adamw(
        make_schedule(config, total_steps),
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )
    return optax.chain(clip, adamw)
