"""The programs of one packed sequence: its gradient, its metrics alone, its scores.

Each is called for one sequence after another, as `packed` orders them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config.sft import Config
from grpo_jax.maths.metrics import MetricSums
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.models.packing import PackedSequence
from grpo_jax.models.scoring import ReadPrompts, score_packed
from grpo_jax.models.sharding import constrain
from grpo_jax.models.streams import shared
from grpo_jax.types import Batch, CachedModel
from grpo_jax.update.objective import loss_of, router_coef, sampling_of
from grpo_jax.update.prompts import place_gradients, rngs_of
from grpo_jax.update.state import TrainState
from grpo_jax.update.teaching import Teacher, compare_packed


class Minibatch(NamedTuple):
    """The arguments that all packed sequences of an update share: arrays on the device, or their shapes.

    Attributes:
      state: at whose params the gradient is.
      read: its prompts, read.
      batch: its completions.
      totals: `count_totals` of it.
      selected: its `top_entropy_mask` [B, G, T]; None where all tokens are trained.
      dropout: `dropout_key`.
      teacher: a model whose distributions the policy's are compared with; None where there is none.
      teacher_read: its prompts, read by the teacher.
    """

    state: TrainState
    read: ReadPrompts
    batch: Batch
    totals: dict[str, jax.Array]
    selected: jax.Array | None
    dropout: jax.Array | None
    teacher: Teacher | None = None
    teacher_read: ReadPrompts | None = None


_STATIC = ("config", "on_policy", "surrogate", "shards")


@shared
@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnums=(0,))
def add_gradients(grads, minibatch, sequence, number, *, model, config, on_policy, surrogate, shards):
    """Gradients of the params and of the read prompts, with those of one packed sequence added; and its metric sums."""

    def loss_fn(params, read):
        asked = minibatch._replace(state=minibatch.state.replace(params=params), read=read)
        return _loss(asked, sequence, number, model, config, on_policy=on_policy, surrogate=surrogate)

    more, sums = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(minibatch.state.params, minibatch.read)
    total = jax.tree.map(lambda total, x: total + x.astype(total.dtype), grads, more)
    return place_gradients(total, shards), sums


@shared
@functools.partial(jax.jit, static_argnames=_STATIC[:3])
def measure(minibatch, sequence, number, *, model, config, on_policy, surrogate):
    """The metric sums of one packed sequence: all that there is of completions that have no gradient."""
    return _loss(minibatch, sequence, number, model, config, on_policy=on_policy, surrogate=surrogate)[1]


def _loss(
    minibatch: Minibatch,
    sequence: PackedSequence,
    number: jax.Array | int,
    model: CachedModel,
    config: Config,
    *,
    on_policy: bool,
    surrogate: Surrogate | None,
) -> tuple[jax.Array, MetricSums]:
    """`loss_of` the completions of a packed sequence."""
    state, read, batch, totals, selected, dropout, teacher, teacher_read = minibatch
    part = jax.tree.map(sequence.take, batch.replace(prompts=None, counted=None))
    part, coef = part.replace(mask=part.mask & sequence.mask), router_coef(model, config)
    selected = None if selected is None else sequence.take(selected)
    lengths, counted, rngs = batch.prompts.lengths, part.mask if coef else None, rngs_of(dropout, 1, number)
    compared = compare_packed(teacher, teacher_read, lengths, sequence, part, config)
    scores = score_packed(
        model, state.params, read, lengths, sequence, sampling_of(config), counted=counted, rngs=rngs, compared=compared
    )
    return loss_of(
        scores,
        part,
        state,
        totals,
        config=config,
        on_policy=on_policy,
        surrogate=surrogate,
        selected=selected,
        router_coef=coef,
    )


@shared
@functools.partial(jax.jit, static_argnames=("sampling", "with_entropy", "shards"), donate_argnums=(0,))
def add_scores(scores, params, read, lengths, mask, sequence, *, model, sampling, with_entropy, shards):
    """Log-probs and entropies [B, G, T] with those of one packed sequence in their places."""
    new = score_packed(model, params, read, lengths, sequence, sampling, with_entropy=with_entropy)[:2]
    seen = sequence.take(mask)

    def put(old: jax.Array, x: jax.Array) -> jax.Array:
        # A segment that only fills the shape adds zeros to the first completion.
        return constrain(sequence.add_to(old, jnp.where(seen, x, 0)), shards.mesh)

    return jax.tree.map(put, scores, new)
