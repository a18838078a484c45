"""The update as one pure function: any model, any mesh, micro-batches [prompts, completions] of one shape.

`packed.update` is the same step without the padding, for the models of this package on one device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.metrics import MetricSums
from grpo_jax.models.scoring import score_completions
from grpo_jax.types import Batch, Model, Params, Prompts
from grpo_jax.update.objective import apply_gradients, count_totals, loss_of_rows, sampling_settings
from grpo_jax.update.state import TrainState

__all__ = ["gradients", "score_batch", "train_step"]


def cut(batch: Batch, prompts: int, completions: int) -> Batch:
    """A batch [B, G, ...] as micro-batches [pieces, prompts, completions, ...]; prompts are repeated as needed.

    A micro-batch takes every (B / prompts)-th prompt. So where the prompts are cut over devices, each device has its
    share of every micro-batch, and nothing moves.
    """
    b, g = batch.mask.shape[:2]

    def rows(x):
        x = x.reshape(prompts, b // prompts, g // completions, completions, *x.shape[2:])
        return jnp.moveaxis(x, 0, 2).reshape(-1, prompts, completions, *x.shape[4:])

    once = jax.tree.map(lambda x: jnp.repeat(x[:, None], g, axis=1), batch.prompts)
    pieces = jax.tree.map(rows, batch.replace(prompts=once, counted=None))
    return pieces.replace(prompts=jax.tree.map(lambda x: x[:, :, 0], pieces.prompts))


def _over_pieces(function: Any, batch: Batch, micro: tuple[int, int]) -> Any:
    """Results of `function(piece)` for each micro-batch, stacked on a new leading axis, computed one at a time."""
    return jax.lax.map(function, cut(batch, *micro))


def score_batch(
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    model: Model,
    config: GRPOConfig,
    micro: tuple[int, int],
) -> jax.Array:
    """Log-probs [B, G, T] of completions under any params, micro-batch by micro-batch; pure, as `train_step`."""
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
    return jnp.moveaxis(x, 2, 0).reshape(b, g, *pieces.shape[3:])


def zeros_like(params: Params) -> Params:
    """Where gradients are summed: float32, though the params may be bfloat16 and with them the gradient of a part."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)


def _accumulate(loss_fn: Any, params: Params, batch: Batch, micro: tuple[int, int]) -> tuple[Params, MetricSums]:
    """Gradient and metric sums of a batch, one micro-batch at a time."""
    gradient = jax.grad(loss_fn, has_aux=True)
    pieces = cut(batch, *micro)
    if batch.mask.shape[:2] == micro:
        return gradient(params, jax.tree.map(lambda x: x[0], pieces), 0)

    def step(total, numbered):
        grads, sums = gradient(params, *numbered)
        return jax.tree.map(jnp.add, total, grads), sums

    numbered = (pieces, jnp.arange(pieces.mask.shape[0]))
    grads, sums = jax.lax.scan(step, zeros_like(params), numbered)
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
      or gradient was not finite), `sampler_gap` (largest |l − l_sampling|: about 1e-5 at an iteration's first update
      in float32) and `kl_initial` where the initial policy's log-probs are in the batch.

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
) -> tuple[Params, list[MetricSums]]:
    """The first half of `train_step`: the gradient of a batch, and the metric sums of its parts; pure."""
    micro = (batch.mask.shape[0], batch.mask.shape[1]) if micro is None else micro
    entropies = None
    if config.top_entropy_quantile < 1:
        pieces = _over_pieces(lambda piece: _scored(state.params, piece, model, config)[1], batch, micro)
        entropies = join(pieces, *batch.mask.shape[:2])
    totals = count_totals(batch, config, entropies)
    dropout = jax.random.fold_in(jax.random.fold_in(state.key, 1), state.step) if getattr(model, "dropout", 0) else None

    def loss_fn(params, piece, number):
        rng = None if dropout is None else jax.random.fold_in(dropout, number)
        log_probs, entropies = _scored(params, piece, model, config, rng)
        return loss_of_rows(log_probs, entropies, piece, state, totals, config=config, on_policy=on_policy)

    grads, sums = _accumulate(loss_fn, state.params, batch, micro)
    return grads, [sums]


def _scored(
    params: Params, piece: Batch, model: Model, config: GRPOConfig, rng: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of a micro-batch."""
    rngs = None if rng is None else {"dropout": rng}
    return score_completions(
        model, params, piece.prompts, piece.tokens, piece.mask, rngs=rngs, **sampling_settings(config)
    )
