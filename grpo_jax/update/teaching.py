"""The teacher in an update: its distributions next to the policy's, chunk by chunk.

A teacher model reads the same tokens as the policy, in the same program; only its states [tokens, D] are kept for the
chunk in which both make their logits. Log-probs of an engine are in the batch.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import Config, SFTConfig
from grpo_jax.maths.sampling import process_logits
from grpo_jax.maths.supervised import divergence, top_k_divergence
from grpo_jax.models.packing import PackedSequence
from grpo_jax.models.scoring import Comparison, ReadPrompts, packed_states, predicting_states, unembed_of
from grpo_jax.types import Batch, Model, Params, is_cached
from grpo_jax.update.objective import sampling_of


class Teacher(flax.struct.PyTreeNode):
    """A model whose distributions an update compares with the policy's; its params are no part of the gradient.

    Attributes:
      model: a model, as an argument of a compiled function.
      params: its params.
    """

    model: Model
    params: Params


def compare_padded(teacher: Teacher | None, part: Batch, config: Config) -> Comparison | None:
    """The comparison of the completions [B, G, T] of a micro-batch; None where there is none."""
    if isinstance(config, SFTConfig):
        return _compare_tokens(part.tokens)
    if teacher is None:
        return _compare_top(part.teacher_top_ids, part.teacher_top_log_probs, config)
    states, _ = predicting_states(teacher.model, _constant(teacher), part.prompts, part.tokens)
    return _compare_states(teacher, states, config)


def compare_packed(
    teacher: Teacher | None,
    read: ReadPrompts | None,
    lengths: jax.Array,
    sequence: PackedSequence,
    part: Batch,
    config: Config,
) -> Comparison | None:
    """The comparison of the tokens of a packed sequence; None where there is none.

    `read` are the batch's prompts, read by the teacher, with their `lengths`; `part` is the sequence's part, [A, S, T].
    """
    if isinstance(config, SFTConfig):
        return _compare_tokens(sequence.tokens)
    if teacher is None or read is None:
        ids, log_probs = (
            None if x is None else sequence.by_token(x) for x in (part.teacher_top_ids, part.teacher_top_log_probs)
        )
        return _compare_top(ids, log_probs, config)
    assert is_cached(teacher.model), "or the updater would not be packed"
    states, _ = packed_states(teacher.model, _constant(teacher), read, lengths, sequence)
    return _compare_states(teacher, states, config)


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
