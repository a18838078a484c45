"""One update: the gradient of a minibatch → the optimizer's updates → params → metrics.

`train_step` is all of it as a pure function, for any model and mesh: micro-batches [prompts, completions] of one shape.
`packed` computes the same gradient without the padding, for the models of this package. A run scores and updates by an
`Updater` or its subclass `packed.PackedUpdater`.
"""

from __future__ import annotations

import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import Config
from grpo_jax.maths.metrics import MetricSums, finalize_metrics, top_entropy_mask
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.models.scoring import score_completions
from grpo_jax.models.sharding import keep_placed, split
from grpo_jax.types import Batch, Model, Params, Prompts
from grpo_jax.update.objective import adapt_entropy_coef, count_totals, loss_of, router_coef, sampling_of
from grpo_jax.update.state import TrainState, finish_update
from grpo_jax.update.teaching import Teacher, compare_padded


class Updater(flax.struct.PyTreeNode):
    """Scores completions and makes the updates of a run with any model, in padded micro-batches.

    A pytree, the argument of its own compiled functions: the model's and the teacher's arrays are leaves, and the
    settings are static.

    Attributes:
      model: by `types.as_argument`.
      config: the settings.
      micro: (prompts, completions per prompt) of a micro-batch.
      optimizer: the transformation that made `state.opt_state`; None if nothing is updated.
      on_policy: True if params are those that sampled when an update begins, so that the ratio is 1 in value.
      mesh: where params are; None for one device.
      surrogate: a function that replaces that of the config's `loss_type`, or None.
      teacher: a model whose distributions the policy's are compared with; None: no teacher, or only its log-probs.
      skip: leave out the backward pass of zero-signal groups if they have no gradient and completions are packed.
    """

    model: Model
    config: Config = flax.struct.field(pytree_node=False)
    micro: tuple[int, int] = flax.struct.field(pytree_node=False)
    optimizer: optax.GradientTransformation | None = flax.struct.field(pytree_node=False, default=None)
    on_policy: bool = flax.struct.field(pytree_node=False, default=True)
    mesh: jax.sharding.Mesh | None = flax.struct.field(pytree_node=False, default=None)
    surrogate: Surrogate | None = flax.struct.field(pytree_node=False, default=None)
    teacher: Teacher | None = None
    skip: bool = flax.struct.field(pytree_node=False, default=True)

    def columns(self, longest: int) -> int:
        """Length of a batch's arrays when its longest completion has `longest` tokens.

        The smallest of T, T/2, T/4, … that is not shorter: few shapes, so few compilations.
        """
        most = self.config.max_completion_length
        while most % 2 == 0 and most // 2 >= max(longest, 8):
            most //= 2
        return most

    def score(self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Log-probs [B, G, T] of completions under any params, 0 where mask is 0; they may not be computed yet."""
        return score_padded(self, params, *split((prompts, tokens, mask), self.mesh))

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state` is consumed."""
        return update_padded(self, state, split(batch, self.mesh))

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums]:
        """The first half of `update`: the gradient of a minibatch, and its metric sums."""
        return _jit_gradients(self, state, split(batch, self.mesh))


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    optimizer: optax.GradientTransformation,
    config: Config,
    on_policy: bool = True,
    micro: tuple[int, int] | None = None,
    surrogate: Surrogate | None = None,
    teacher: Teacher | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step of GRPO.

    g = ∇ grpo_loss over the whole batch;  θ ← optimizer(θ, g);  the reference follows where the config says so

    Pure: jit it with `static_argnames=("optimizer", "config", "on_policy", "micro", "surrogate")` and
    `donate_argnames="state"`, and pass the model through `types.as_argument`.

    Args:
      state: the present `TrainState`.
      batch: a `Batch` [B, G, T].
      model: a model of this package, or any `apply` by `types.Model`.
      optimizer: the transformation that made `state.opt_state`.
      config: a `GRPOConfig` or `SFTConfig`.
      on_policy: True if the params are still those that sampled these completions: `grpo_loss` is then given no old
        log-probs, whatever the batch holds, and the ratio is 1 in value. False gives it the batch's `old_log_probs`,
        or if there are none `sampling_log_probs`.
      micro: (prompts, completions per prompt) of one micro-batch, divisors of B and G; None for all at once.
      surrogate: a function in the place of that of the config's `loss_type`, as in `grpo_loss`.
      teacher: whose distributions the policy's are compared with; None: nobody's, or only by log-probs in the batch.

    Returns:
      The next state, and metrics: those of `grpo_loss`, and `grad_norm` (before clipping), `update_skipped` (1 if loss
      or gradient was not finite), `sampler_gap` (largest |l − l_sampling|: about 1e-5 at an iteration's first update
      in float32) and `kl_initial` where the initial policy's log-probs are in the batch. Of a batch without one trained
      token all but the counts are NaN, and nothing but `step` moves (and the reference, where its sync is due).

    Example:
      A model of nine numbers, one for each pair of tokens, and one step towards token 2:

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
    b, g, _ = batch.mask.shape
    updater = Updater(model, config, micro or (b, g), optimizer, on_policy, None, surrogate, teacher)
    grads, sums = gradients(updater, state, batch)
    return apply_gradients(state, grads, sums, optimizer=optimizer, config=config)


def gradients(updater: Updater, state: TrainState, batch: Batch) -> tuple[Params, MetricSums]:
    """The first half of `train_step`: the gradient of a minibatch, and its metric sums; pure."""
    model, config = updater.model, updater.config
    sampling, dropout, coef = sampling_of(config), dropout_key(model, state), router_coef(model, config)
    micro_batches, selected = cut(batch, *updater.micro), None

    if config.top_entropy_quantile < 1:

        def entropies_of(part: Batch) -> jax.Array:
            return score_completions(model, state.params, part.prompts, part.tokens, part.mask, sampling).entropies

        entropies = join(jax.lax.map(entropies_of, micro_batches), *batch.mask.shape[:2])
        selected = top_entropy_mask(entropies, batch.mask, config.top_entropy_quantile)
    totals = count_totals(batch, selected)

    def loss_fn(
        params: Params, part: Batch, selected: jax.Array | None, number: jax.Array | int
    ) -> tuple[jax.Array, MetricSums]:
        scores = score_completions(
            *(model, params, part.prompts, part.tokens, part.mask, sampling),
            with_router=coef != 0,
            rngs=None if dropout is None else {"dropout": jax.random.fold_in(dropout, number)},
            compared=compare_padded(updater.teacher, part, config),
        )
        return loss_of(
            *(scores, part, state, totals),
            config=config,
            on_policy=updater.on_policy,
            surrogate=updater.surrogate,
            selected=selected,
            router_coef=coef,
        )

    gradient = jax.grad(loss_fn, has_aux=True)
    parts = micro_batches, None if selected is None else cut_array(selected, *updater.micro)
    count = len(micro_batches.mask)
    if count == 1:
        return gradient(state.params, *jax.tree.map(lambda x: x[0], parts), 0)

    def add(total: Params, numbered: tuple[Batch, jax.Array | None, jax.Array]) -> tuple[Params, MetricSums]:
        grads, sums = gradient(state.params, *numbered)
        return jax.tree.map(jnp.add, total, grads), sums

    grads, sums = jax.lax.scan(add, zeros_like(state.params), (*parts, jnp.arange(count)))
    return grads, MetricSums(jax.tree.map(lambda x: x.sum(0), sums.sums), jax.tree.map(lambda x: x.max(0), sums.maxes))


def zeros_like(params: Params) -> Params:
    """Where gradients are summed: float32, though the params may be bfloat16 and with them the gradient of a part."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)


def dropout_key(model: Model, state: TrainState) -> jax.Array | None:
    """The key of an update's dropouts; None for a model without one."""
    return jax.random.fold_in(jax.random.fold_in(state.key, 1), state.step) if getattr(model, "dropout", 0) else None


_COUNTS = ("tokens", "rows", "selected_tokens", "kl_bounded_tokens")


def apply_gradients(
    state: TrainState, grads: Params, sums: MetricSums, *, optimizer: optax.GradientTransformation, config: Config
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
    # A skipped update has measured nothing that could be relied on.
    if isinstance(config, GRPOConfig) and config.use_adaptive_entropy:
        state = adapt_entropy_coef(state, metrics["selected_entropy"], ok & trained, config)
        metrics["entropy_coef"] = state.entropy_coef
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


def score_batch(updater: Updater, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Log-probs [B, G, T] of completions under any params, one micro-batch at a time; pure."""
    model, sampling = updater.model, sampling_of(updater.config)
    batch = Batch(prompts, tokens, mask, jnp.zeros(tokens.shape[:2]), jnp.zeros(tokens.shape))

    def score(part: Batch) -> jax.Array:
        scores = score_completions(model, params, part.prompts, part.tokens, part.mask, sampling, with_entropy=False)
        return scores.log_probs

    return join(jax.lax.map(score, cut(batch, *updater.micro)), *tokens.shape[:2])


score_padded, _jit_gradients = jax.jit(score_batch), jax.jit(gradients)


@functools.partial(jax.jit, donate_argnames=("state",))
def update_padded(updater: Updater, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """`train_step`, compiled, with the next state where the last one was."""
    assert updater.optimizer is not None, "an updater without one only scores"
    grads, sums = gradients(updater, state, batch)
    state, metrics = apply_gradients(state, grads, sums, optimizer=updater.optimizer, config=updater.config)
    return keep_placed(state, updater.mesh), metrics


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
