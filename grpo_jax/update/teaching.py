"""The teacher in an update: its distributions beside the policy's, chunk by chunk, and never all of them.

A teacher that is a model reads the same tokens as the policy, in the same program, and of what it read only the states
[tokens, D] wait for the chunk in which both make their logits. One that only tells log-probs (an engine's) has told
them before the update; they are in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import Config, SFTConfig
from grpo_jax.maths.distillation import divergence, top_k_divergence
from grpo_jax.maths.sampling import process_logits
from grpo_jax.models.packing import PackedSequence
from grpo_jax.models.scoring import Comparison, ReadPrompts, packed_states, predicting_states, unembed_of
from grpo_jax.types import Batch, Model, Params, Prompts, is_cached
from grpo_jax.update.objective import sampling_of
from grpo_jax.update.state import TrainState


class Teacher(flax.struct.PyTreeNode):
    """A model whose distributions an update compares with the policy's; its params are no part of the gradient.

    Attributes:
      model: a model, as an argument of a compiled function.
      params: its params; None: those that the state has for the policy as its own teacher.
    """

    model: Model
    params: Params | None = None

    def held(self, state: TrainState) -> Teacher:
        """With its params: of the policy as its own teacher those that are kept, or else the present ones."""
        if self.params is not None:
            return self
        return self.replace(params=state.params if state.teacher_params is None else state.teacher_params)


class Reader(NamedTuple):
    """A teacher that has read the prompts of a minibatch, as `update.sequences` takes it.

    Attributes:
      teacher: with params.
      read: its prompts, in the order of the batch's.
      lengths: [B] int32, of these prompts.
    """

    teacher: Teacher
    read: ReadPrompts
    lengths: jax.Array


def teacher_prompts(batch: Batch) -> Prompts:
    """The prompts that a teacher reads before the completions: its own, or those of the policy."""
    if batch.teacher_prompts is None:
        return batch.prompts
    return jax.tree.map(lambda x: x[:, 0], batch.teacher_prompts)


def apart(batch: Batch) -> Batch:
    """The batch with each completion as a group of its own, B·G of one, where a teacher has a prompt for each."""
    if batch.teacher_prompts is None:
        return batch
    b, g = batch.mask.shape[:2]

    def each(x: jax.Array) -> jax.Array:
        return (np if isinstance(x, np.ndarray) else jnp).repeat(x, g, axis=0)

    alone = jax.tree.map(lambda x: x.reshape(b * g, 1, *x.shape[2:]), batch.replace(prompts=None, counted=None))
    return alone.replace(
        prompts=jax.tree.map(each, batch.prompts), counted=None if batch.counted is None else each(batch.counted)
    )


def compare_padded(teacher: Teacher | None, part: Batch, config: Config) -> Comparison | None:
    """The comparison of the completions [B, G, T] of a micro-batch; None where there is none."""
    if isinstance(config, SFTConfig):
        return _compare_tokens(part.tokens)
    if teacher is None:
        return _compare_top(part.teacher_top_ids, part.teacher_top_log_probs, config)
    states, _ = predicting_states(teacher.model, _constant(teacher), teacher_prompts(part), part.tokens)
    return _compare_states(teacher, states, config)


def compare_packed(reader: Reader | None, sequence: PackedSequence, part: Batch, config: Config) -> Comparison | None:
    """The comparison of the tokens of a packed sequence; `part` is the batch's part of it, [A, S, T]."""
    if isinstance(config, SFTConfig):
        return _compare_tokens(sequence.tokens)
    if reader is None:
        ids, log_probs = (
            None if x is None else sequence.by_token(x) for x in (part.teacher_top_ids, part.teacher_top_log_probs)
        )
        return _compare_top(ids, log_probs, config)
    model = reader.teacher.model
    assert is_cached(model), "or the updater would not be packed"
    states, _ = packed_states(model, _constant(reader.teacher), reader.read, reader.lengths, sequence)
    return _compare_states(reader.teacher, states, config)


def _constant(teacher: Teacher) -> Params:
    return jax.lax.stop_gradient(teacher.params)


def _compare_tokens(tokens: jax.Array) -> Comparison:
    """1 where the token [...] is the likeliest one, else 0; held constant in the gradient."""

    def compare(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        own = jnp.take_along_axis(logits, tokens, axis=-1)[..., 0]
        return (own >= logits.max(axis=-1)).astype(jnp.float32)

    return Comparison(compare, (tokens[..., None],))


def _compare_states(teacher: Teacher, states: jax.Array, config: Config) -> Comparison:
    """The divergence of whole distributions, by the teacher's states."""
    assert isinstance(config, GRPOConfig), "only it has a teacher"
    unembed, sampling = unembed_of(teacher.model), sampling_of(config)
    kind, alpha, params = config.distillation_divergence, config.distillation_alpha, _constant(teacher)

    def compare(logits: jax.Array, states: jax.Array) -> jax.Array:
        theirs = process_logits(unembed(params, states), sampling)
        shared = min(logits.shape[-1], theirs.shape[-1])  # beyond the tokenizer's ids vocabularies are padded
        log_p, log_q = (jax.nn.log_softmax(x[..., :shared]) for x in (logits, theirs))
        return divergence(log_p, log_q, kind=kind, alpha=alpha)

    return Comparison(compare, (jax.lax.stop_gradient(states),))


def _compare_top(ids: jax.Array | None, log_probs: jax.Array | None, config: Config) -> Comparison | None:
    """The divergence of k tokens and the rest, by ids and log-probs [..., k] that the teacher has told."""
    if ids is None or log_probs is None:
        return None
    assert isinstance(config, GRPOConfig), "only it has a teacher"
    kind, alpha = config.distillation_divergence, config.distillation_alpha

    def compare(logits: jax.Array, ids: jax.Array, log_probs: jax.Array) -> jax.Array:
        ours = jnp.take_along_axis(logits, ids, axis=-1) - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return top_k_divergence(ours, log_probs, kind=kind, alpha=alpha)

    return Comparison(compare, (ids, log_probs))
