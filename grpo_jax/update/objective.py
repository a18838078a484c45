"""The objective on some completions of a minibatch.

Losses are numerators over the counts of the whole minibatch, so the sum over its parts is the loss of the whole, and so
are the gradients, however it is cut.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import Config, SFTConfig
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.losses import grpo_loss_terms
from grpo_jax.maths.metrics import MetricSums, batch_totals, update_entropy_coef
from grpo_jax.maths.sampling import Sampling
from grpo_jax.maths.supervised import distillation_loss_terms, likelihood_loss_terms, sampled_divergence
from grpo_jax.maths.surrogates import LossSettings, Surrogate, sampler_weights
from grpo_jax.models.scoring import Scores
from grpo_jax.types import Batch, Model, is_cached
from grpo_jax.update.state import TrainState


def loss_settings(config: GRPOConfig, surrogate: Surrogate | None = None) -> LossSettings:
    """The choices and numbers of `grpo_loss` that a config decides, with the caller's own `surrogate`.

    The coefficient of the entropy bonus may move during the run, and is part of the state.
    """
    names = {field.name for field in dataclasses.fields(LossSettings)} - {"surrogate"}
    return LossSettings(**{name: getattr(config, name) for name in names}, surrogate=surrogate)


def sampling_of(config: Config) -> Sampling:
    """The distribution that the sampler draws from and the scorer scores by; without a sampler the model's own."""
    return Sampling(config.temperature, config.top_k, config.top_p, config.min_p)


def has_bonus(config: GRPOConfig) -> bool:
    """Whether the entropy enters the loss."""
    return config.entropy_coef > 0 or config.use_adaptive_entropy


def learns_by_advantages(model: Model, config: Config, surrogate: Surrogate | None = None) -> bool:
    """Whether all of the loss is a product with advantages, so that a completion without one has no gradient.

    It is not known of the caller's own surrogate.
    """
    if isinstance(config, SFTConfig) or surrogate is not None:
        return False
    return not (config.beta or has_bonus(config) or config.distillation_coef or router_coef(model, config))


def router_coef(model: Model, config: Config) -> float:
    """The factor on the load-balancing loss: the config's, or else the checkpoint's own; 0 without experts."""
    if not is_cached(model) or not model.config.num_experts:
        return 0.0
    own, given = model.config.router_loss_coef, config.router_aux_loss_coef
    return own if given is None else given


def correction_of(batch: Batch, config: GRPOConfig) -> jax.Array | None:
    """Importance weights of another engine's completions, [..., T] or [...]; None where nothing is to be corrected.

    They depend on whole completions, and on nothing outside of them: any cut of the batch gives the same weights.
    """
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
    """The counts of the whole minibatch that the loss of any part of it is divided by.

    Args:
      selected: [B, G, T] bool, its `top_entropy_mask` where `top_entropy_quantile` < 1 (the quantile is over the whole
        minibatch, so the mask has to be made before the first part); else None.
    """
    totals = batch_totals(batch.mask, selected)
    if batch.counted is not None:
        totals["num_rows"] = jnp.maximum(batch.counted.sum() * batch.mask.shape[1], 1)
    return totals


def _old_log_probs(batch: Batch) -> jax.Array:
    """Log-probs [..., T] of the policy that sampled, which the ratio divides by; of later turns too.

    The sampler stores them (`rollout.draw.draw_next`), or the trainer scores an engine's completions with them.
    """
    return batch.sampling_log_probs if batch.old_log_probs is None else batch.old_log_probs


def loss_of(
    scores: Scores,
    part: Batch,
    state: TrainState,
    totals: dict[str, jax.Array],
    *,
    config: Config,
    on_policy: bool,
    surrogate: Surrogate | None = None,
    selected: jax.Array | None = None,
    router_coef: float = 0.0,
) -> tuple[jax.Array, MetricSums]:
    """Loss and metric sums of some completions of a minibatch.

    Args:
      scores: of these completions, [..., T], at the present params.
      part: the minibatch's arrays for these completions, [..., T] and [...]; advantages are [...] or [..., T].
      state: holds the coefficient of the entropy bonus.
      totals: `count_totals` of the whole batch.
      config: of an SFT run the loss is `likelihood_loss`, else `grpo_loss`.
      on_policy: True if the params are those that sampled: the ratio is 1 in value, and needs no old log-probs.
      surrogate: the caller's own, instead of that of `loss_type`; not for SFT.
      selected: the part of the `top_entropy_mask` of the whole batch, or None.
      router_coef: the factor on the load-balancing loss in `scores`.
    """
    log_probs, entropies, router_loss, compared = scores
    chex.assert_equal_shape([log_probs, entropies, part.mask, part.sampling_log_probs])
    chex.assert_shape(part.advantages, log_probs.shape[: part.advantages.ndim])
    if isinstance(config, SFTConfig):
        assert compared is not None, "the updater compares with the tokens"
        loss, metrics = likelihood_loss_terms(
            log_probs, entropies, compared, part.mask, loss_type=config.loss_type, num_tokens=totals["num_tokens"]
        )
    else:
        loss, metrics = _grpo_terms(
            log_probs,
            entropies,
            part,
            state,
            totals,
            config=config,
            on_policy=on_policy,
            surrogate=surrogate,
            selected=selected,
        )
        loss, metrics = _add_distillation(
            loss, metrics, log_probs, compared, part, totals, config=config, on_policy=on_policy
        )
    if router_loss is not None:
        # The mean over the parts, each weighed by its tokens. It is no sum over tokens: experts are balanced within a
        # part, so here, and only here, it matters how a batch is cut.
        share = router_loss * part.mask.sum() / jnp.maximum(totals["num_tokens"], 1)
        loss = loss + router_coef * share
        metrics.sums["loss"] = jax.lax.stop_gradient(loss)
        metrics.sums["aux_loss"] = jax.lax.stop_gradient(share)
    return loss, metrics


def _grpo_terms(
    log_probs: jax.Array,
    entropies: jax.Array,
    part: Batch,
    state: TrainState,
    totals: dict[str, jax.Array],
    *,
    config: GRPOConfig,
    on_policy: bool,
    surrogate: Surrogate | None,
    selected: jax.Array | None,
) -> tuple[jax.Array, MetricSums]:
    """`grpo_loss` of some completions with the config's settings, and the metrics that compare policies."""
    loss, metrics = grpo_loss_terms(
        log_probs,
        None if on_policy else _old_log_probs(part),
        part.ref_log_probs,
        part.advantages,
        part.mask,
        loss_settings(config, surrogate),
        # Without a bonus the entropy is a metric: its gradient would cost a pass over the vocabulary for nothing.
        entropies=entropies if has_bonus(config) else jax.lax.stop_gradient(entropies),
        entropy_coef=state.entropy_bonus if has_bonus(config) else 0.0,
        sampling_log_probs=part.sampling_log_probs,
        importance_weights=correction_of(part, config),
        selected=selected,
        num_rows=totals["num_rows"],
        num_tokens=totals["num_tokens"],
        num_selected_tokens=totals.get("num_selected_tokens"),
    )
    l = jax.lax.stop_gradient(log_probs)
    gap = jnp.where(part.mask, jnp.abs(l - part.sampling_log_probs), 0)
    metrics.maxes["sampler_gap"] = gap.max()
    if part.initial_log_probs is not None:
        kl = jnp.where(part.mask, kl_divergence(l, part.initial_log_probs), 0)
        metrics.sums["kl_initial_sum"] = kl.sum()
    if part.ref_log_probs is None:
        # A KL that nobody measured is no KL of zero.
        metrics = metrics._replace(sums={k: v for k, v in metrics.sums.items() if not k.startswith("kl")})
    return loss, metrics


def _add_distillation(
    loss: jax.Array,
    metrics: MetricSums,
    log_probs: jax.Array,
    divergences: jax.Array | None,
    part: Batch,
    totals: dict[str, jax.Array],
    *,
    config: GRPOConfig,
    on_policy: bool,
) -> tuple[jax.Array, MetricSums]:
    """Loss and metrics with what is learned from a teacher, by its distributions or by its log-probs in the batch."""
    if part.teacher_log_probs is not None:
        old_log_probs = None if on_policy else _old_log_probs(part)
        divergences = sampled_divergence(log_probs, old_log_probs, part.teacher_log_probs, part.mask)
    if divergences is None:
        return loss, metrics
    more, sums = distillation_loss_terms(
        divergences,
        part.mask,
        coef=config.distillation_coef,
        loss_type=config.loss_type,
        max_completion_length=config.max_completion_length,
        num_rows=totals["num_rows"],
        num_tokens=totals["num_tokens"],
    )
    loss = loss + more
    return loss, metrics._replace(sums=metrics.sums | sums | {"loss": jax.lax.stop_gradient(loss)})


def adapt_entropy_coef(state: TrainState, entropy: jax.Array, measured: jax.Array, config: GRPOConfig) -> TrainState:
    """One step of the adaptive coefficient of the entropy bonus, where the entropy has been `measured` ([] bool)."""
    coef, applied = update_entropy_coef(
        state.entropy_coef,
        entropy,
        target=config.entropy_target,
        delta=config.entropy_coef_delta,
        minimum=config.entropy_coef_min,
        maximum=config.entropy_coef_max,
    )
    coef = jnp.where(measured, coef, state.entropy_coef)
    return state.replace(entropy_coef=coef, entropy_bonus=jnp.where(measured, applied, state.entropy_bonus))
