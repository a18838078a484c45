"""The objective on some completions of a minibatch, and the optimizer step that follows from its gradient.

Losses are numerators over the counts of the whole minibatch, so the sum over its parts is the loss of the whole, and so
are the gradients, however it is cut.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.correction import sampler_weights
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.losses import grpo_loss_terms
from grpo_jax.maths.metrics import MetricSums, batch_totals, finalize_metrics, update_entropy_coef
from grpo_jax.maths.sampling import Sampling
from grpo_jax.maths.surrogates import LossSettings
from grpo_jax.types import Batch, Model, Params, is_cached
from grpo_jax.update.state import TrainState, finish_update


def loss_settings(config: GRPOConfig) -> LossSettings:
    """The choices and numbers of `grpo_loss` that a config decides.

    The coefficient of the entropy bonus is none of them: it may move during the run, and lives in the state.
    """
    return LossSettings(**{field.name: getattr(config, field.name) for field in dataclasses.fields(LossSettings)})


def sampling_of(config: GRPOConfig) -> Sampling:
    """The distribution that the sampler draws from and the scorer scores by."""
    return Sampling(config.temperature, config.top_k, config.top_p, config.min_p)


def has_bonus(config: GRPOConfig) -> bool:
    """Whether the entropy enters the loss."""
    return config.entropy_coef > 0 or config.use_adaptive_entropy


def router_coef(model: Model, config: GRPOConfig) -> float:
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
      batch: the minibatch, [B, G, T].
      selected: [B, G, T] bool, its `top_entropy_mask` where `top_entropy_quantile` < 1 (the quantile is over the whole
        minibatch, so the mask has to be made before the first part); else None.
    """
    totals = batch_totals(batch.mask, selected)
    if batch.counted is not None:
        totals["num_rows"] = jnp.maximum(batch.counted.sum() * batch.mask.shape[1], 1)
    return totals


def loss_of(
    log_probs: jax.Array,
    entropies: jax.Array,
    part: Batch,
    state: TrainState,
    totals: dict[str, jax.Array],
    *,
    config: GRPOConfig,
    on_policy: bool,
    selected: jax.Array | None = None,
    aux_loss: jax.Array | None = None,
    aux_coef: float = 0.0,
) -> tuple[jax.Array, MetricSums]:
    """Loss and metric sums of some completions of a minibatch.

    Args:
      log_probs, entropies: [..., T] at the present params.
      part: the minibatch's arrays for these completions, [..., T] and [...]; its prompts are not looked at.
      state: where the coefficient of the entropy bonus lives.
      totals: `count_totals` of the whole batch.
      config, on_policy: as in `train_step`.
      selected: what these completions have of the `top_entropy_mask` of the whole batch; None where there is none.
      aux_loss: [] load-balancing loss of these completions; None where there is none.
      aux_coef: the factor on it.
    """
    chex.assert_equal_shape([log_probs, entropies, part.mask, part.sampling_log_probs])
    chex.assert_shape(part.advantages, log_probs.shape[:-1])
    old_log_probs = part.sampling_log_probs if part.old_log_probs is None else part.old_log_probs
    loss, metrics = grpo_loss_terms(
        log_probs,
        None if on_policy else old_log_probs,
        part.ref_log_probs,
        part.advantages,
        part.mask,
        loss_settings(config),
        # Without a bonus the entropy is a metric: its gradient would cost a pass over the vocabulary for nothing.
        entropies=entropies if has_bonus(config) else jax.lax.stop_gradient(entropies),
        entropy_coef=state.entropy_bonus if has_bonus(config) else 0.0,
        sampling_log_probs=part.sampling_log_probs,
        importance_weights=correction_of(part, config),
        selected=selected,
        **totals,
    )
    if aux_loss is not None:
        # The mean over the parts, each weighed by its tokens. It is no sum over tokens: experts are balanced within a
        # part, so here, and only here, it matters how a batch is cut.
        share = aux_loss * part.mask.sum() / jnp.maximum(totals["num_tokens"], 1)
        loss = loss + aux_coef * share
        metrics.sums["loss"] = jax.lax.stop_gradient(loss)
        metrics.sums["aux_loss"] = jax.lax.stop_gradient(share)
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


_COUNTS = ("tokens", "rows", "selected_tokens", "kl_bounded_tokens")


def apply_gradients(
    state: TrainState, grads: Params, sums: MetricSums, *, optimizer: optax.GradientTransformation, config: GRPOConfig
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The optimizer step, from the gradient of a batch and its metric sums.

    A batch without one trained token has measured nothing and moves nothing: its means are NaN.
    """
    metrics = finalize_metrics(sums)
    metrics["grad_norm"] = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
    ok = jnp.isfinite(metrics["grad_norm"]) & jnp.isfinite(metrics["loss"])
    trained = metrics["tokens"] > 0
    metrics = {name: x if name in _COUNTS else jnp.where(trained, x, jnp.nan) for name, x in metrics.items()}
    metrics["update_skipped"] = jnp.where(ok, 0.0, 1.0)
    if config.use_adaptive_entropy:
        coef, applied = update_entropy_coef(
            state.entropy_coef,
            metrics["selected_entropy"],
            target=config.entropy_target,
            delta=config.entropy_coef_delta,
            minimum=config.entropy_coef_min,
            maximum=config.entropy_coef_max,
        )
        # A skipped update has measured nothing that could be relied on.
        measured = ok & trained
        coef = jnp.where(measured, coef, state.entropy_coef)
        state = state.replace(entropy_coef=coef, entropy_bonus=jnp.where(measured, applied, state.entropy_bonus))
        metrics["entropy_coef"] = coef
    state = finish_update(
        state,
        grads,
        ok,
        optimizer,
        trained=trained,
        sync_every=config.ref_model_sync_steps if config.sync_ref_model else None,
        sync_alpha=config.ref_model_mixup_alpha,
    )
    return state, metrics
