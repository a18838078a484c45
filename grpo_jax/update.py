"""The update: scoring a batch, and one optimizer step on it, as pure functions.

An optimizer batch may be cut into micro-batches. Losses are numerators over the counts of the whole batch, so the sum
over the pieces is the loss of the whole, and so are the gradients, however it is cut.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import GRPOConfig
from grpo_jax.kl import kl_divergence
from grpo_jax.log_probs import score_completions
from grpo_jax.losses import (
    MetricSums,
    batch_totals,
    finalize_metrics,
    grpo_loss_terms,
    merge_metrics,
    update_entropy_coef,
)
from grpo_jax.state import TrainState, finish_update
from grpo_jax.streams import count_streams, run_in_streams
from grpo_jax.types import Batch, Model, Params, Prompts, as_argument

__all__ = ["loss_settings", "sampling_settings", "score", "train_step"]


def loss_settings(config: GRPOConfig) -> dict[str, Any]:
    """The keywords of `grpo_loss` that a config decides."""
    names = inspect.signature(grpo_loss_terms).parameters.keys() & {field.name for field in dataclasses.fields(config)}
    # The coefficient of the entropy bonus may move during the run: it lives in the state.
    names -= {"entropy_coef"}
    return {name: getattr(config, name) for name in sorted(names)}


def sampling_settings(config: GRPOConfig) -> dict[str, Any]:
    """The keywords that sampler and scorer share."""
    return {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def cut(batch: Batch, prompts: int, completions: int) -> Batch:
    """A batch [B, G, ...] as micro-batches [pieces, prompts, completions, ...]; prompts are repeated as needed."""
    b, g = batch.mask.shape[:2]

    def rows(x):
        x = x.reshape(b // prompts, prompts, g // completions, completions, *x.shape[2:])
        return x.swapaxes(1, 2).reshape(-1, prompts, completions, *x.shape[4:])

    once = jax.tree.map(lambda x: jnp.repeat(x[:, None], g, axis=1), batch.prompts)
    pieces = jax.tree.map(rows, batch.replace(prompts=once, counted=None))
    return pieces.replace(prompts=jax.tree.map(lambda x: x[:, :, 0], pieces.prompts))


def _over_pieces(function: Any, batch: Batch, micro: tuple[int, int]) -> Any:
    """Results of `function(piece)` for each micro-batch, stacked on a new leading axis, computed one at a time."""
    return jax.lax.map(function, cut(batch, *micro))


def score(
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    model: Model,
    config: GRPOConfig,
    micro: tuple[int, int],
) -> jax.Array:
    """Log-probs [B, G, T] of completions under any params (reference, initial policy), micro-batch by micro-batch."""
    streams = count_streams(params, tokens.shape[0] // micro[0], tokens.shape[0] * tokens.shape[1])
    size = tokens.shape[0] // streams

    def part(i: int) -> jax.Array:
        some = jax.tree.map(lambda x: x[i * size : (i + 1) * size], (prompts, tokens, mask))
        return jax.block_until_ready(_score(params, *some, as_argument(model), config=config, micro=micro))

    done = run_in_streams(part, range(streams))
    return done[0] if streams == 1 else jnp.concatenate(done)


@functools.partial(jax.jit, static_argnames=("config", "micro"))
def _score(params, prompts, tokens, mask, model, *, config, micro):
    zeros = jnp.zeros(tokens.shape[:2])
    batch = Batch(prompts, tokens, mask, zeros, jnp.zeros(tokens.shape))

    def one(piece):
        settings = sampling_settings(config)
        return score_completions(
            model, params, piece.prompts, piece.tokens, piece.mask, with_entropy=False, **settings
        )[0]

    log_probs = _over_pieces(one, batch, micro)
    return join(log_probs, *tokens.shape[:2])


def join(pieces: jax.Array, b: int, g: int) -> jax.Array:
    """The inverse of `cut` for one array: [pieces, prompts, completions, ...] → [B, G, ...]."""
    _, prompts, completions = pieces.shape[:3]
    x = pieces.reshape(b // prompts, g // completions, prompts, completions, *pieces.shape[3:])
    return x.swapaxes(1, 2).reshape(b, g, *pieces.shape[3:])


def _accumulate(
    loss_fn: Any, params: Params, batch: Batch, micro: tuple[int, int], first: jax.Array | int
) -> tuple[Params, MetricSums]:
    """Gradient and metric sums of a batch, one micro-batch at a time; they are numbered from `first` on."""
    gradient = jax.grad(loss_fn, has_aux=True)
    pieces = cut(batch, *micro)
    if batch.mask.shape[:2] == micro:
        return gradient(params, jax.tree.map(lambda x: x[0], pieces), first)

    def step(total, numbered):
        grads, sums = gradient(params, *numbered)
        return jax.tree.map(jnp.add, total, grads), sums

    numbered = (pieces, first + jnp.arange(pieces.mask.shape[0]))
    grads, sums = jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), numbered)
    return grads, MetricSums(
        sums=jax.tree.map(lambda x: x.sum(0), sums.sums), maxes=jax.tree.map(lambda x: x.max(0), sums.maxes)
    )


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    optimizer: optax.GradientTransformation,
    config: GRPOConfig,
    on_policy: bool = True,
    micro: tuple[int, int] | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step of GRPO.

    g = ∇ grpo_loss over the whole batch;  θ ← optimizer(θ, g);  the reference follows where the config says so

    Pure: jit it with `static_argnames=("optimizer", "config", "on_policy", "micro")` and `donate_argnames="state"`, and
    pass the model through `types.as_argument`.

    Args:
      state: the present `TrainState`.
      batch: a `Batch` [B, G, T].
      model: a model of this package, or any `apply` by `types.Model`.
      optimizer: the transformation that made `state.opt_state`.
      config: a `GRPOConfig`.
      on_policy: True if this is the only update of these completions: the ratio is then 1 in value
        (`old_log_probs=None`). False takes the sampler's log-probs as the old ones.
      micro: (prompts, completions a prompt) of one micro-batch, divisors of B and G; None for the whole batch at once.

    Returns:
      The next state, and metrics: those of `grpo_loss`, and `grad_norm` (before clipping), `update_skipped` (1 if loss
      or gradient was not finite), `sampler_gap` (largest |l − l_sampling|: 1e-5 or less at an iteration's first update
      in float32) and `kl_initial` where the initial policy's log-probs are in the batch.
    """
    micro = (batch.mask.shape[0], batch.mask.shape[1]) if micro is None else micro
    totals = _totals(state, batch, model=model, config=config, micro=micro)
    grads, sums = _gradients(state, batch, totals, 0, model=model, config=config, on_policy=on_policy, micro=micro)
    return _apply(state, [grads], [sums], optimizer=optimizer, config=config)


_train_step = jax.jit(
    train_step, static_argnames=("optimizer", "config", "on_policy", "micro"), donate_argnames=("state",)
)


def update(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    optimizer: optax.GradientTransformation,
    config: GRPOConfig,
    on_policy: bool,
    micro: tuple[int, int],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`train_step`, compiled; on a CPU its micro-batches are shared out to several threads. `state` is consumed."""
    prompts, rows = batch.mask.shape[0], batch.mask.shape[0] * batch.mask.shape[1]
    streams = count_streams(state.params, prompts // micro[0], rows)
    model = as_argument(model)
    if streams == 1:
        return _train_step(
            state, batch, model=model, optimizer=optimizer, config=config, on_policy=on_policy, micro=micro
        )
    totals = _jit_totals(state, batch, model=model, config=config, micro=micro)
    size = prompts // streams
    pieces = rows // streams // (micro[0] * micro[1])

    def part(i: int) -> tuple[Params, MetricSums]:
        some = jax.tree.map(lambda x: x[i * size : (i + 1) * size], batch)
        settings: dict[str, Any] = {"model": model, "config": config, "on_policy": on_policy, "micro": micro}
        return jax.block_until_ready(_jit_gradients(state, some, totals, i * pieces, **settings))

    grads, sums = zip(*run_in_streams(part, range(streams)), strict=True)
    return _jit_apply(state, list(grads), list(sums), optimizer=optimizer, config=config)


def _bonus(config: GRPOConfig) -> bool:
    return config.entropy_coef > 0 or config.use_adaptive_entropy


def _scored(
    params: Params, piece: Batch, *, model: Model, config: GRPOConfig, rngs: dict[str, jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of a micro-batch."""
    log_probs, entropies = score_completions(
        model, params, piece.prompts, piece.tokens, piece.mask, rngs=rngs, **sampling_settings(config)
    )
    # Without a bonus the entropy is a metric: its gradient would cost a pass over the vocabulary for nothing.
    return log_probs, entropies if _bonus(config) else jax.lax.stop_gradient(entropies)


def _totals(
    state: TrainState, batch: Batch, *, model: Model, config: GRPOConfig, micro: tuple[int, int]
) -> dict[str, Any]:
    """The counts of the whole optimizer batch that the loss of any part of it is divided by."""
    totals: dict[str, Any] = dict(batch_totals(batch.mask))
    if batch.counted is not None:
        totals["num_rows"] = jnp.maximum(batch.counted.sum() * batch.mask.shape[1], 1)
    if config.top_entropy_quantile < 1:
        # The quantile is over the whole optimizer batch, so it has to be known before the first piece.
        scored = functools.partial(_scored, model=model, config=config)
        entropies = _over_pieces(lambda piece: scored(state.params, piece)[1], batch, micro)
        entropies = join(entropies, *batch.mask.shape[:2])
        totals = {**batch_totals(batch.mask, entropies, config.top_entropy_quantile), **totals}
    return totals


def _gradients(
    state: TrainState,
    batch: Batch,
    totals: dict[str, Any],
    first: jax.Array | int,
    *,
    model: Model,
    config: GRPOConfig,
    on_policy: bool,
    micro: tuple[int, int],
) -> tuple[Params, MetricSums]:
    """Gradient and metric sums of a part of an optimizer batch, whose first micro-batch is number `first` of it."""
    settings = loss_settings(config)
    dropout = jax.random.fold_in(jax.random.fold_in(state.key, 1), state.step) if getattr(model, "dropout", 0) else None

    def loss_fn(params, piece, number):
        rngs = None if dropout is None else {"dropout": jax.random.fold_in(dropout, number)}
        log_probs, entropies = _scored(params, piece, model=model, config=config, rngs=rngs)
        loss, metrics = grpo_loss_terms(
            log_probs,
            None if on_policy else piece.sampling_log_probs,
            piece.ref_log_probs,
            piece.advantages,
            piece.mask,
            entropies=entropies,
            entropy_coef=state.entropy_bonus if _bonus(config) else 0.0,
            sampling_log_probs=piece.sampling_log_probs,
            **settings,
            **totals,
        )
        l = jax.lax.stop_gradient(log_probs)
        gap = jnp.where(piece.mask, jnp.abs(l - piece.sampling_log_probs), 0)
        metrics.maxes["sampler_gap"] = gap.max()
        if piece.initial_log_probs is not None:
            kl = jnp.where(piece.mask, kl_divergence(l, piece.initial_log_probs), 0)
            metrics.sums["kl_initial_sum"] = kl.sum()
        if piece.ref_log_probs is None:
            # A KL that nobody measured is no KL of zero.
            metrics = metrics._replace(sums={k: v for k, v in metrics.sums.items() if not k.startswith("kl")})
        return loss, metrics

    return _accumulate(loss_fn, state.params, batch, micro, first)


def _apply(
    state: TrainState,
    grads: list[Params],
    sums: list[MetricSums],
    *,
    optimizer: optax.GradientTransformation,
    config: GRPOConfig,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The optimizer step, from the gradients and metric sums of the parts of a batch."""
    total = jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *grads)
    metrics = finalize_metrics(functools.reduce(merge_metrics, sums))
    metrics["grad_norm"] = optax.tree.norm(total)
    ok = jnp.isfinite(metrics["grad_norm"]) & jnp.isfinite(metrics["loss"])
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
        state = state.replace(entropy_coef=coef, entropy_bonus=applied)
        metrics["entropy_coef"] = coef
    state = finish_update(
        state,
        total,
        ok,
        optimizer,
        sync_every=config.ref_model_sync_steps if config.sync_ref_model else None,
        sync_alpha=config.ref_model_mixup_alpha,
    )
    return state, metrics


_jit_totals = jax.jit(_totals, static_argnames=("config", "micro"))
_jit_gradients = jax.jit(_gradients, static_argnames=("config", "on_policy", "micro"))
_jit_apply = jax.jit(_apply, static_argnames=("optimizer", "config"), donate_argnames=("state",))
