"""The update as one pure function: any model, any mesh, micro-batches [prompts, completions] of one shape.

`packed` is the same step without the padding, for the models of this package on one device.
"""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.metrics import MetricSums, top_entropy_mask
from grpo_jax.maths.sampling import Sampling
from grpo_jax.models.scoring import Scores, score_completions
from grpo_jax.types import Batch, Model, Params, Prompts
from grpo_jax.update.objective import apply_gradients, count_totals, loss_of, router_coef, sampling_of
from grpo_jax.update.state import TrainState


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


def score_batch(
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    model: Model,
    sampling: Sampling,
    micro: tuple[int, int],
) -> jax.Array:
    """Log-probs [B, G, T] of completions under any params, one micro-batch at a time; pure, as `train_step`."""
    batch = Batch(prompts, tokens, mask, jnp.zeros(tokens.shape[:2]), jnp.zeros(tokens.shape))
    score = functools.partial(_scored, params, model=model, sampling=sampling, with_entropy=False)
    return join(jax.lax.map(lambda part: score(part).log_probs, cut(batch, *micro)), *tokens.shape[:2])


def zeros_like(params: Params) -> Params:
    """Where gradients are summed: float32, though the params may be bfloat16 and with them the gradient of a part."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)


def dropout_key(model: Model, state: TrainState) -> jax.Array | None:
    """The key of an update's dropouts; None for a model without one."""
    return jax.random.fold_in(jax.random.fold_in(state.key, 1), state.step) if getattr(model, "dropout", 0) else None


def _accumulate(loss_fn: Any, params: Params, parts: Any, count: int) -> tuple[Params, MetricSums]:
    """Gradient and metric sums of a batch in so many parts, arrays [count, ...], one after another."""
    gradient = jax.grad(loss_fn, has_aux=True)
    if count == 1:
        return gradient(params, *jax.tree.map(lambda x: x[0], parts), 0)

    def step(total, numbered):
        grads, sums = gradient(params, *numbered)
        return jax.tree.map(jnp.add, total, grads), sums

    grads, sums = jax.lax.scan(step, zeros_like(params), (*parts, jnp.arange(count)))
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
        (`old_log_probs=None`). False takes the batch's `old_log_probs` as the old ones, or where there are none
        the sampler's.
      micro: (prompts, completions per prompt) of one micro-batch, divisors of B and G; None for all at once.

    Returns:
      The next state, and metrics: those of `grpo_loss`, and `grad_norm` (before clipping), `update_skipped` (1 if loss
      or gradient was not finite), `sampler_gap` (largest |l − l_sampling|: about 1e-5 at an iteration's first update
      in float32) and `kl_initial` where the initial policy's log-probs are in the batch. Of a batch without one trained
      token all but the counts are NaN, and nothing but `step` moves (and the reference, where its sync is due).

    Example:
      A model of nine numbers, one for each pair of tokens, and one step towards token 2:

      >>> import optax
      >>> from grpo_jax.update.state import create_state
      >>> from grpo_jax.types import as_argument
      >>> class Pairs:
      ...     def apply(self, variables, tokens):
      ...         return variables["params"]["logits"][tokens]
      >>> optimizer, config = optax.sgd(1.0), GRPOConfig()
      >>> state = create_state({"logits": jnp.zeros((3, 3))}, optimizer, jax.random.key(0))
      >>> prompts = Prompts(tokens=jnp.array([[0, 1]]), lengths=jnp.array([2]))  # [B, P]
      >>> tokens = jnp.array([[[2, 2], [0, 1]]])  # [B, G, T]
      >>> mask, log_probs = jnp.ones(tokens.shape, bool), jnp.full(tokens.shape, -jnp.log(3.0))
      >>> batch = Batch(prompts, tokens, mask, jnp.array([[1.0, -1.0]]), log_probs)
      >>> step = jax.jit(train_step, static_argnames=("optimizer", "config"))
      >>> state, metrics = step(state, batch, model=as_argument(Pairs()), optimizer=optimizer, config=config)
      >>> state.params["logits"][1].tolist()  # after token 1, the prompt's last: more of 2, less of 0
      [-0.25, 0.0, 0.25]
    """
    grads, sums = gradients(state, batch, model=model, config=config, on_policy=on_policy, micro=micro)
    return apply_gradients(state, grads, sums, optimizer=optimizer, config=config)


def gradients(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    config: GRPOConfig,
    on_policy: bool = True,
    micro: tuple[int, int] | None = None,
) -> tuple[Params, MetricSums]:
    """The first half of `train_step`: the gradient of a batch, and its metric sums; pure."""
    micro = (batch.mask.shape[0], batch.mask.shape[1]) if micro is None else micro
    scored = functools.partial(_scored, model=model, sampling=sampling_of(config))
    micro_batches, selected = cut(batch, *micro), None
    if config.top_entropy_quantile < 1:
        parts = jax.lax.map(lambda part: scored(state.params, part).entropies, micro_batches)
        entropies = join(parts, *batch.mask.shape[:2])
        selected = top_entropy_mask(entropies, batch.mask, config.top_entropy_quantile)
    totals = count_totals(batch, selected)
    dropout, aux_coef = dropout_key(model, state), router_coef(model, config)

    def loss_fn(params, part, selected, number):
        rngs = None if dropout is None else {"dropout": jax.random.fold_in(dropout, number)}
        scores = scored(params, part, rngs=rngs, with_router=aux_coef != 0)
        return loss_of(
            scores.log_probs,
            scores.entropies,
            part,
            state,
            totals,
            config=config,
            on_policy=on_policy,
            selected=selected,
            aux_loss=scores.router_loss,
            aux_coef=aux_coef,
        )

    parts = micro_batches, None if selected is None else cut_array(selected, *micro)
    return _accumulate(loss_fn, state.params, parts, micro_batches.mask.shape[0])


def _scored(params: Params, part: Batch, *, model: Model, **how: Any) -> Scores:
    """`Scores` of a micro-batch."""
    return score_completions(model, params, part.prompts, part.tokens, part.mask, **how)
