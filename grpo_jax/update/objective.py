"""Loss for a part of a minibatch, and comparison of the policy's distributions with a teacher's.

Each loss is a sum divided by a count over the whole minibatch. The parts' losses and gradients therefore add up to the
minibatch's loss and gradient, no matter how it is split. Only the router loss depends on the split.
"""

from __future__ import annotations

import dataclasses

import chex
import flax.struct
import jax
import jax.numpy as jnp

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import GRPOOrSFTConfig, SFTConfig
from grpo_jax.maths.checks import MIN_LOG_PROB
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.losses import grpo_loss_terms
from grpo_jax.maths.metrics import MetricSums, batch_totals, update_entropy_coef
from grpo_jax.maths.sampling import Sampling, process_logits
from grpo_jax.maths.supervised import (
    distillation_loss_terms,
    divergence,
    likelihood_loss_terms,
    sampled_divergence,
    top_k_divergence,
)
from grpo_jax.maths.surrogates import LossSettings, Surrogate, sampler_weights, weights_and_log_sums
from grpo_jax.models.scoring import FnOfLogits, Scores, unembed_of
from grpo_jax.types import Batch, Model, Params, is_builtin
from grpo_jax.update.state import TrainState


def loss_settings(config: GRPOConfig, surrogate: Surrogate | None = None) -> LossSettings:
    """Build the static settings for `grpo_loss`. The entropy coefficient can change, so it is part of the state."""
    names = {field.name for field in dataclasses.fields(LossSettings)} - {"surrogate"}
    return LossSettings(**{name: getattr(config, name) for name in names}, surrogate=surrogate)


def sampling_distribution(config: GRPOOrSFTConfig) -> Sampling:
    """Return the temperature and filters that define the distribution for both sampling and log-probs."""
    return Sampling(config.temperature, config.top_k, config.top_p, config.min_p)


def has_entropy_bonus(config: GRPOOrSFTConfig) -> bool:
    """Return whether the loss includes an entropy term."""
    return config.entropy_coef > 0 or config.use_adaptive_entropy


def zero_advantage_has_no_gradient(model: Model, config: GRPOOrSFTConfig, surrogate: Surrogate | None = None) -> bool:
    """Return whether completions with advantage 0 have no gradient. Returns False for a custom surrogate."""
    other_terms = (config.beta, has_entropy_bonus(config), config.distillation_coef, router_loss_coef_of(model, config))
    return surrogate is None and not any(other_terms)


def router_loss_coef_of(model: Model, config: GRPOOrSFTConfig) -> float:
    """Return the load-balancing coefficient: the config's, else the checkpoint's, or 0 for a model without experts."""
    if not is_builtin(model) or not model.config.num_experts:
        return 0.0
    coef = config.router_aux_loss_coef
    return model.config.router_loss_coef if coef is None else coef


def sampler_correction_weights(batch: Batch, config: GRPOConfig) -> jax.Array | None:
    """Return importance weights [..., T] or [...] for an engine's completions, or None without a correction."""
    if batch.old_log_probs is None or config.sampler_correction is None:
        return None
    return sampler_weights(
        batch.old_log_probs,
        batch.sampling_log_probs,
        batch.mask,
        mode=config.sampler_correction,
        clip_max=config.sampler_correction_max,
        clip_min=config.sampler_correction_min,
    )


def count_totals(batch: Batch, selected: jax.Array | None = None) -> dict[str, jax.Array]:
    """Return the loss normalizers: counts over a whole minibatch. `selected` is its `top_entropy_mask`."""
    totals = batch_totals(batch.mask, selected)
    if batch.counted is not None:
        totals["num_rows"] = jnp.maximum(batch.counted.sum() * batch.mask.shape[1], 1)
    return totals


def compute_loss(
    scores: Scores,
    batch: Batch,
    state: TrainState,
    totals: dict[str, jax.Array],
    *,
    config: GRPOOrSFTConfig,
    on_policy: bool,
    surrogate: Surrogate | None = None,
    selected: jax.Array | None = None,
    router_loss_coef: float = 0.0,
) -> tuple[jax.Array, MetricSums]:
    """Compute the loss (`likelihood_loss` in SFT, else `grpo_loss`) and metrics of a micro-batch or packed sequence.

    `scores` are [..., T] under the current params. `totals` are the whole minibatch's `count_totals`, and `selected` is
    a slice of its `top_entropy_mask`, True for the tokens with the highest entropies. If `on_policy`, the current
    params sampled the completions, so the ratio is 1 and old log-probs are not used. `router_loss_coef` multiplies the
    load-balancing loss in `scores`.
    """
    chex.assert_equal_shape([scores.log_probs, scores.entropies, batch.mask, batch.sampling_log_probs])
    chex.assert_shape(batch.advantages, scores.log_probs.shape[: batch.advantages.ndim])
    if isinstance(config, SFTConfig):
        assert scores.fn_of_logits_values is not None, "SFT requires scores with fn_of_logits_values"
        loss, metrics = likelihood_loss_terms(
            scores.log_probs,
            scores.entropies,
            scores.fn_of_logits_values,
            batch.mask,
            loss_type=config.loss_type,
            num_tokens=totals["num_tokens"],
        )
    else:
        loss, metrics = _grpo_terms(
            scores, batch, state, totals, config=config, on_policy=on_policy, surrogate=surrogate, selected=selected
        )
    if scores.router_loss is not None:
        # Unlike the other terms, the router loss is not a sum over tokens, so its token-weighted average depends on how
        # the minibatch is split.
        router_loss_part = scores.router_loss * batch.mask.sum() / jnp.maximum(totals["num_tokens"], 1)
        loss = loss + router_loss_coef * router_loss_part
        metrics.sums["loss"] = jax.lax.stop_gradient(loss)
        metrics.sums["aux_loss"] = jax.lax.stop_gradient(router_loss_part)
    return loss, metrics


def _grpo_terms(
    scores: Scores,
    batch: Batch,
    state: TrainState,
    totals: dict[str, jax.Array],
    *,
    config: GRPOConfig,
    on_policy: bool,
    surrogate: Surrogate | None,
    selected: jax.Array | None,
) -> tuple[jax.Array, MetricSums]:
    """Compute `grpo_loss` plus any distillation loss, and the metric sums for both."""
    log_probs, old_log_probs = scores.log_probs, None
    if not on_policy:  # log-probs under the policy that sampled the completions, the denominator of the ratio
        old_log_probs = batch.sampling_log_probs if batch.old_log_probs is None else batch.old_log_probs
    importance_weights = sampler_correction_weights(batch, config)
    has_bonus = has_entropy_bonus(config)
    loss, metrics = grpo_loss_terms(
        log_probs,
        old_log_probs,
        batch.ref_log_probs,
        batch.advantages,
        batch.mask,
        loss_settings(config, surrogate),
        # Without a bonus, the entropy is only a metric. Its gradient would cost a second pass over the vocabulary.
        entropies=scores.entropies if has_bonus else jax.lax.stop_gradient(scores.entropies),
        entropy_coef=state.entropy_bonus if has_bonus else 0.0,  # effective coefficient
        sampling_log_probs=batch.sampling_log_probs,
        importance_weights=importance_weights,
        selected=selected,
        num_rows=totals["num_rows"],
        num_tokens=totals["num_tokens"],
        num_selected_tokens=totals.get("num_selected_tokens"),
    )
    fixed_log_probs = jax.lax.stop_gradient(log_probs)
    metrics.maxes["sampler_gap"] = jnp.where(batch.mask, jnp.abs(fixed_log_probs - batch.sampling_log_probs), 0).max()
    if batch.ref_log_probs is None:  # omit the KL metrics instead of reporting 0
        metrics = metrics._replace(sums={k: v for k, v in metrics.sums.items() if not k.startswith("kl")})
    if batch.initial_log_probs is not None:
        metrics.sums["kl_initial_sum"] = jnp.where(
            batch.mask, kl_divergence(fixed_log_probs, batch.initial_log_probs), 0
        ).sum()
    divergences = scores.fn_of_logits_values
    if batch.teacher_log_probs is not None:
        divergences = sampled_divergence(log_probs, old_log_probs, batch.teacher_log_probs, batch.mask)
        weights, _ = weights_and_log_sums(importance_weights, log_probs, batch.mask)
        divergences = divergences if weights is None else weights * divergences
    if divergences is None:
        return loss, metrics
    distillation, sums = distillation_loss_terms(
        divergences,
        batch.mask,
        coef=config.distillation_coef,
        loss_type=config.loss_type,
        max_completion_length=config.max_completion_length,
        num_rows=totals["num_rows"],
        num_tokens=totals["num_tokens"],
    )
    loss = loss + distillation
    return loss, metrics._replace(sums=metrics.sums | sums | {"loss": jax.lax.stop_gradient(loss)})


def adapt_entropy_coef(state: TrainState, entropy: jax.Array, is_valid: jax.Array, config: GRPOConfig) -> TrainState:
    """Update the adaptive coefficient of the entropy bonus from the entropy if `is_valid` ([] bool) is True."""
    coef, effective = update_entropy_coef(  # the effective coefficient is 0 above the target
        state.entropy_coef,
        entropy,
        target=config.entropy_target,
        delta=config.entropy_coef_delta,
        minimum=config.entropy_coef_min,
        maximum=config.entropy_coef_max,
    )
    return state.replace(
        entropy_coef=jnp.where(is_valid, coef, state.entropy_coef),
        entropy_bonus=jnp.where(is_valid, effective, state.entropy_bonus),
    )


# Teachers -------------------------------------------------------------------------------------------------------------


class Teacher(flax.struct.PyTreeNode):
    """A teacher model, converted with `types.as_jit_argument`, and its params, which are not differentiated."""

    model: Model
    params: Params

    def clip_to_vocab(self, tokens: jax.Array) -> jax.Array:
        """Clip token ids to the teacher's vocabulary, since larger ids would give NaN.

        The policy's vocabulary may have more padding.
        """
        return tokens.clip(max=self.model.config.vocab_size - 1) if is_builtin(self.model) else tokens


def make_fn_of_logits(
    config: GRPOOrSFTConfig,
    tokens: jax.Array,
    *,
    teacher: Teacher | None = None,
    states: jax.Array | None = None,
    top_ids: jax.Array | None = None,
    top_log_probs: jax.Array | None = None,
) -> FnOfLogits | None:
    """Return the `FnOfLogits` for tokens [..., T], or None if the loss and metrics do not need one.

    In SFT, its value is 1 where the token is the most probable one. In GRPO, it is the divergence from the teacher,
    given the teacher's hidden `states` [..., T, D] or its k most probable tokens `top_ids` [..., T, k].
    """
    if isinstance(config, SFTConfig):
        return FnOfLogits(_is_most_probable, (tokens[..., None],))
    kind, alpha = config.distillation_divergence, config.distillation_alpha
    if teacher is not None and states is not None:
        unembed, params = unembed_of(teacher.model), teacher.params

        def compare_all(logits: jax.Array, states: jax.Array) -> jax.Array:
            teacher_logits = process_logits(unembed(params, states), sampling_distribution(config))
            shared = min(logits.shape[-1], teacher_logits.shape[-1])  # vocabularies are padded to different sizes
            log_p, log_q = (jax.nn.log_softmax(x[..., :shared]) for x in (logits, teacher_logits))
            return divergence(log_p, log_q, kind=kind, alpha=alpha)

        return FnOfLogits(compare_all, (states,))
    if top_ids is None or top_log_probs is None:
        return None

    def compare_top(logits: jax.Array, ids: jax.Array, log_probs: jax.Array) -> jax.Array:
        policy_log_probs = jnp.take_along_axis(logits, ids, axis=-1, mode="clip")
        policy_log_probs -= jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        # Ids beyond the policy's vocabulary (the teacher's may have more padding) are treated as outside the top k.
        policy_log_probs, log_probs = (
            jnp.where(ids < logits.shape[-1], x, MIN_LOG_PROB) for x in (policy_log_probs, log_probs)
        )
        return top_k_divergence(policy_log_probs, log_probs, kind=kind, alpha=alpha)

    return FnOfLogits(compare_top, (top_ids, top_log_probs))


def _is_most_probable(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return 1.0 where the token [..., 1] has the largest logit, else 0.0."""
    chosen = jnp.take_along_axis(logits, tokens, axis=-1)[..., 0]
    return (chosen >= logits.max(axis=-1)).astype(jnp.float32)
