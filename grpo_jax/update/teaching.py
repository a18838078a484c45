"""Comparison of the policy's next-token distributions with a teacher's, computed on chunks of logits.

A teacher model runs on the same tokens in the same program as the policy. Its hidden states [tokens, D] are stored, and
its logits are computed one chunk at a time, like the policy's. For an external teacher, the batch contains log-probs.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from grpo_jax.config.sft import Config, SFTConfig
from grpo_jax.maths.checks import MIN_LOG_PROB
from grpo_jax.maths.sampling import process_logits
from grpo_jax.maths.supervised import divergence, top_k_divergence
from grpo_jax.models.scoring import LogitStatistic, unembed_of
from grpo_jax.types import Model, Params
from grpo_jax.update.objective import sampling_of


class Teacher(flax.struct.PyTreeNode):
    """A teacher model and its params, which are not differentiated.

    Attributes:
      model: teacher model, converted with `types.as_argument`.
      params: the teacher's params.
    """

    model: Model
    params: Params


def logit_statistic(
    config: Config,
    tokens: jax.Array,
    *,
    teacher: Teacher | None = None,
    states: jax.Array | None = None,
    top_ids: jax.Array | None = None,
    top_log_probs: jax.Array | None = None,
) -> LogitStatistic | None:
    """Return the `LogitStatistic` for tokens [..., T], or None if the loss and metrics do not need one.

    SFT checks whether each token has the largest logit. GRPO computes the divergence from the teacher's distributions,
    given either its hidden `states` [..., T, D] or an external teacher's k most probable tokens [..., T, k].
    """
    if isinstance(config, SFTConfig):
        return LogitStatistic(_is_most_probable, (tokens[..., None],))
    kind, alpha = config.distillation_divergence, config.distillation_alpha
    if teacher is not None and states is not None:
        unembed, params = unembed_of(teacher.model), teacher.params

        def compare_all(logits: jax.Array, states: jax.Array) -> jax.Array:
            teacher_logits = process_logits(unembed(params, states), sampling_of(config))
            shared = min(logits.shape[-1], teacher_logits.shape[-1])  # vocabularies are padded to different sizes
            log_p, log_q = (jax.nn.log_softmax(x[..., :shared]) for x in (logits, teacher_logits))
            return divergence(log_p, log_q, kind=kind, alpha=alpha)

        return LogitStatistic(compare_all, (states,))
    if top_ids is None or top_log_probs is None:
        return None

    def compare_top(logits: jax.Array, ids: jax.Array, log_probs: jax.Array) -> jax.Array:
        policy = jnp.take_along_axis(logits, ids, axis=-1, mode="clip")
        policy -= jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        # Ids beyond the policy's vocabulary (the teacher's may have more padding) are merged with all other tokens.
        policy, log_probs = (jnp.where(ids < logits.shape[-1], x, MIN_LOG_PROB) for x in (policy, log_probs))
        return top_k_divergence(policy, log_probs, kind=kind, alpha=alpha)

    return LogitStatistic(compare_top, (top_ids, top_log_probs))


def _is_most_probable(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return 1.0 where the token [..., 1] has the largest logit, else 0.0."""
    chosen = jnp.take_along_axis(logits, tokens, axis=-1)[..., 0]
    return (chosen >= logits.max(axis=-1)).astype(jnp.float32)
