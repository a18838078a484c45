"""A batch [B, G, ...] as micro-batches of one shape, and back."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from grpo_jax.types import Batch


def cut(batch: Batch, prompts: int, completions: int) -> Batch:
    """A batch [B, G, ...] as micro-batches [N, prompts, completions, ...]; prompts are repeated as needed.

    A micro-batch takes every (B / prompts)-th prompt. So where the prompts are cut over devices, each device has its
    share of every micro-batch, and nothing moves.
    """
    chex.assert_equal_shape([batch.tokens, batch.mask, batch.sampling_log_probs])
    once = jax.tree.map(lambda x: jnp.repeat(x[:, None], batch.mask.shape[1], axis=1), batch.prompts)
    parts = functools.partial(cut_array, prompts=prompts, completions=completions)
    micro_batches = jax.tree.map(parts, batch.replace(prompts=once, counted=None))
    return micro_batches.replace(prompts=jax.tree.map(lambda x: x[:, :, 0], micro_batches.prompts))


def cut_array(x: jax.Array, prompts: int, completions: int) -> jax.Array:
    """`cut` for one array: [B, G, ...] → [N, prompts, completions, ...]."""
    b, g = x.shape[:2]
    x = x.reshape(prompts, b // prompts, g // completions, completions, *x.shape[2:])
    return jnp.moveaxis(x, 0, 2).reshape(-1, prompts, completions, *x.shape[4:])


def join(parts: jax.Array, b: int, g: int) -> jax.Array:
    """The inverse of `cut` for one array: [N, prompts, completions, ...] → [B, G, ...]."""
    _, prompts, completions = parts.shape[:3]
    x = parts.reshape(b // prompts, g // completions, prompts, completions, *parts.shape[3:])
    return jnp.moveaxis(x, 2, 0).reshape(b, g, *parts.shape[3:])
