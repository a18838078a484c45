"""Training step: a minibatch's gradient, the optimizer step and the metrics.

`train_step` is a pure function that works with any model and mesh. It processes micro-batches [prompts, completions]
of equal shape. For this package's own models, `packed` computes the same gradient without padding. Runs use an
`Updater`, or its subclass `packed.PackedUpdater`, for log-probs and updates.
"""

from __future__ import annotations

import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax

from grpo_jax.config.sft import GRPOOrSFTConfig
from grpo_jax.maths.metrics import MetricSums, finalize_metrics, top_entropy_mask
from grpo_jax.maths.reference import sync_reference
from grpo_jax.maths.sampling import Sampling
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.models.lora import LoraModel, sync_adapter_products
from grpo_jax.models.scoring import FnOfLogits, completion_hidden_states, score_completions
from grpo_jax.models.sharding import constrain_params, shard
from grpo_jax.types import Batch, Model, Params, Prompts
from grpo_jax.update.objective import (
    Teacher,
    adapt_entropy_coef,
    compute_loss,
    count_totals,
    make_fn_of_logits,
    router_loss_coef_of,
    sampling_distribution,
    zero_advantage_has_no_gradient,
)
from grpo_jax.update.state import TrainState, apply_optimizer


class Updater(flax.struct.PyTreeNode):
    """Updater that processes padded micro-batches and works with any model.

    An updater is a pytree, so that it can be passed to compiled functions. The model's and the teacher's arrays are
    leaves, and the settings are static.

    Attributes:
      model: result of `types.as_jit_argument`.
      config: training settings.
      micro_shape: shape (prompts, completions per prompt) of a micro-batch. Packing uses it to limit a sequence's size.
      optimizer: transformation that created `state.opt_state`, or None if only log-probs are computed.
      on_policy: whether the params before each update are the ones that sampled its completions; the ratio is then 1.
      mesh: device mesh that the params are sharded over, or None for one device.
      surrogate: as in `train_step`.
      teacher: as in `train_step`.
      skip_zero_signal: whether to skip the backward pass of zero-signal prompts, whose advantages are all 0, if nothing
        else gives them a gradient. Has no effect without packing.
    """

    model: Model
    config: GRPOOrSFTConfig = flax.struct.field(pytree_node=False)
    micro_shape: tuple[int, int] = flax.struct.field(pytree_node=False)
    optimizer: optax.GradientTransformation | None = flax.struct.field(pytree_node=False, default=None)
    on_policy: bool = flax.struct.field(pytree_node=False, default=True)
    mesh: jax.sharding.Mesh | None = flax.struct.field(pytree_node=False, default=None)
    surrogate: Surrogate | None = flax.struct.field(pytree_node=False, default=None)
    teacher: Teacher | None = None
    skip_zero_signal: bool = flax.struct.field(pytree_node=False, default=True)

    @property
    def omits_zero_signal_backward(self) -> bool:
        """Whether the backward pass of zero-signal groups is skipped, because they do not have a gradient."""
        return self.skip_zero_signal and zero_advantage_has_no_gradient(self.model, self.config, self.surrogate)

    @property
    def sampling(self) -> Sampling:
        """Temperature and filters of the distribution that completions are sampled from and scored with."""
        return sampling_distribution(self.config)

    @property
    def router_loss_coef(self) -> float:
        """Coefficient of the load-balancing loss; 0 if the model does not have experts."""
        return router_loss_coef_of(self.model, self.config)

    def padded_length(self, min_length: int) -> int:
        """Halve `max_completion_length` while it is even and the result is at least 8 and at least `min_length`."""
        length = self.config.max_completion_length
        while length % 2 == 0 and length // 2 >= max(min_length, 8):
            length //= 2
        return length

    def log_probs(self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Return log-probs [B, G, T] of completions under `params`, 0 where mask is 0, without blocking."""
        return score_padded(self, params, *shard((prompts, tokens, mask), self.mesh))

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Run one optimizer step and return the new state and the metrics. Donates `state`."""
        return update_padded(self, state, shard(batch, self.mesh))

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums]:
        """Compute a minibatch's gradient and metric sums, like `update` without the optimizer step."""
        return _jit_gradients(self, state, shard(batch, self.mesh))


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    optimizer: optax.GradientTransformation,
    config: GRPOOrSFTConfig,
    on_policy: bool = True,
    micro_shape: tuple[int, int] | None = None,
    surrogate: Surrogate | None = None,
    teacher: Teacher | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Run one optimizer step of GRPO or SFT.

    Computes the gradient g of the loss over the whole batch, sets θ ← optimizer(θ, g), and syncs the reference if due.

    This is a pure function. To compile it, use `jax.jit` with `static_argnames=("optimizer", "config", "on_policy",
    "micro_shape", "surrogate")` and `donate_argnames="state"`, and convert the model with `types.as_jit_argument`.

    Args:
      state: the current `TrainState`.
      batch: a `Batch` [B, G, T].
      model: one of this package's models, or any model with the `apply` method of `types.Model`.
      optimizer: the transformation that created `state.opt_state`.
      config: a `GRPOConfig` or `SFTConfig`.
      on_policy: whether the current params sampled these completions. If True, `grpo_loss` does not use old log-probs
        and the ratio is 1. If False, it uses the batch's `old_log_probs`, or `sampling_log_probs` if they are None.
      micro_shape: (prompts, completions per prompt) in a micro-batch, which must divide (B, G). Defaults to (B, G).
      surrogate: custom surrogate to use instead of the config's `loss_type`, as in `grpo_loss`.
      teacher: `Teacher` model to distill from. None without a teacher, or if `batch` contains the teacher's log-probs.

    Returns:
      The next state and the metrics: `grad_norm` (before clipping), `update_skipped` (1 if the loss or the gradient was
      not finite), `aux_loss` (the router loss, if used) and, for SFT, `loss`, `entropy` and `mean_token_accuracy`. For
      GRPO, the `grpo_loss` metrics (KL needs `ref_log_probs`), `kl_initial` (needs `initial_log_probs`), `distillation`
      and `distillation_loss` with a teacher, and `sampler_gap` (maximum difference from the log-probs recorded during
      sampling, about 1e-5 in float32 in an iteration's first update). If no token contributes to the loss, all metrics
      are NaN except counts, `entropy_coef` and `update_skipped`, and only `step` (and the reference, if due) changes.

    Example:
      One step makes token 2 more likely after token 1 in a bigram model with nine params:

      >>> from grpo_jax import GRPOConfig, as_jit_argument, create_state
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
      >>> state, metrics = step(state, batch, model=as_jit_argument(Pairs()), optimizer=optimizer, config=config)
      >>> state.params["logits"][1].tolist()  # after token 1, the last token of the prompt
      [-0.25, 0.0, 0.25]
    """
    b, g, _ = batch.mask.shape
    updater = Updater(model, config, micro_shape or (b, g), optimizer, on_policy, None, surrogate, teacher)
    return apply_gradients(updater, state, *gradients(updater, state, batch))


def gradients(updater: Updater, state: TrainState, batch: Batch) -> tuple[Params, MetricSums]:
    """Compute a minibatch's gradient and metric sums, like `train_step` without the optimizer step."""
    model, config = updater.model, updater.config
    sampling, dropout_rng = updater.sampling, dropout_key(model, state)
    micro_batches, selected = split_batch(batch, updater.micro_shape), None

    if config.top_entropy_quantile < 1:

        def entropies_of(part: Batch) -> jax.Array:
            return score_completions(model, state.params, part.prompts, part.tokens, part.mask, sampling).entropies

        entropies = join_array(jax.lax.map(entropies_of, micro_batches), batch.mask.shape)
        selected = top_entropy_mask(entropies, batch.mask, config.top_entropy_quantile)
    totals = count_totals(batch, selected)

    def loss_fn(
        params: Params, part: Batch, selected: jax.Array | None, index: jax.Array | int
    ) -> tuple[jax.Array, MetricSums]:
        scores = score_completions(
            model,
            params,
            part.prompts,
            part.tokens,
            part.mask,
            sampling,
            with_router_loss=updater.router_loss_coef != 0,
            rngs=None if dropout_rng is None else {"dropout": jax.random.fold_in(dropout_rng, index)},
            fn_of_logits=_fn_of_logits(updater, part),
        )
        return compute_loss(
            scores,
            part,
            state,
            totals,
            config=config,
            on_policy=updater.on_policy,
            surrogate=updater.surrogate,
            selected=selected,
            router_loss_coef=updater.router_loss_coef,
        )

    gradient = jax.grad(loss_fn, has_aux=True)
    xs = micro_batches, None if selected is None else split_array(selected, updater.micro_shape)
    num_micro_batches = len(micro_batches.mask)
    if num_micro_batches == 1:
        part, part_selected = jax.tree.map(lambda x: x[0], xs)
        return gradient(state.params, part, part_selected, 0)

    def add(total: Params, part: tuple[Batch, jax.Array | None, jax.Array]) -> tuple[Params, MetricSums]:
        micro_batch, selected, index = part
        grads, sums = gradient(state.params, micro_batch, selected, index)
        return jax.tree.map(jnp.add, total, grads), sums

    grads, sums = jax.lax.scan(add, float32_zeros(state.params), (*xs, jnp.arange(num_micro_batches)))
    return grads, MetricSums(jax.tree.map(lambda x: x.sum(0), sums.sums), jax.tree.map(lambda x: x.max(0), sums.maxes))


def _fn_of_logits(updater: Updater, part: Batch) -> FnOfLogits | None:
    """Return the function of the logits, if any: the divergence from the teacher, or SFT's token accuracy."""
    teacher, states = updater.teacher, None
    if teacher is not None:
        tokens = teacher.clip_to_vocab(part.tokens)
        states, _router_loss = completion_hidden_states(teacher.model, teacher.params, part.prompts, tokens)
    return make_fn_of_logits(
        updater.config,
        part.tokens,
        teacher=teacher,
        states=states,
        top_ids=part.teacher_top_ids,
        top_log_probs=part.teacher_top_log_probs,
    )


def float32_zeros(params: Params) -> Params:
    """Return zeros for accumulating gradients, in float32 even if the params are bfloat16."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)


def dropout_key(model: Model, state: TrainState, *indices: jax.typing.ArrayLike) -> jax.Array | None:
    """Return the dropout key for an update, or for the part at `indices`. Returns None for a model without dropout."""
    folded = (1, state.step, *indices)
    return functools.reduce(jax.random.fold_in, folded, state.key) if getattr(model, "dropout", 0) else None


def apply_gradients(
    updater: Updater, state: TrainState, grads: Params, sums: MetricSums
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Apply the gradient, unless it is not finite or no token is in the loss. Returns the new state and the metrics."""
    assert updater.optimizer is not None, "update requires an updater with an optimizer"
    config, metrics = updater.config, finalize_metrics(sums)
    metrics["grad_norm"] = optax.tree.norm(optax.tree.cast(grads, jnp.float32))
    is_finite = jnp.isfinite(metrics["grad_norm"]) & jnp.isfinite(metrics["loss"])
    has_tokens = metrics["tokens"] > 0
    count_names = ("tokens", "rows", "selected_tokens", "kl_bounded_tokens")  # rows are completions
    metrics = {name: x if name in count_names else jnp.where(has_tokens, x, jnp.nan) for name, x in metrics.items()}
    metrics["update_skipped"] = jnp.where(is_finite, 0.0, 1.0)
    if config.use_adaptive_entropy:
        # The entropy from a skipped update is not reliable.
        state = adapt_entropy_coef(state, metrics["selected_entropy"], is_finite & has_tokens, config)
        metrics["entropy_coef"] = state.entropy_coef
    mixes_lora_products = isinstance(updater.model, LoraModel) and config.ref_model_mixup_alpha < 1  # A·B, not A and B
    state = apply_optimizer(
        state,
        grads,
        is_finite,
        updater.optimizer,
        has_tokens=has_tokens,
        sync_every=config.ref_model_sync_steps if config.sync_ref_model else None,
        sync_alpha=config.ref_model_mixup_alpha,
        sync=sync_adapter_products if mixes_lora_products else sync_reference,
    )
    return constrain_params(state, updater.mesh), metrics


def compute_log_probs(
    updater: Updater, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array
) -> jax.Array:
    """Return log-probs [B, G, T] of completions under `params`, computed one micro-batch at a time."""
    model, sampling = updater.model, updater.sampling
    batch = Batch(prompts, tokens, mask, jnp.zeros(tokens.shape[:2]), jnp.zeros(tokens.shape))

    def score(part: Batch) -> jax.Array:
        scores = score_completions(model, params, part.prompts, part.tokens, part.mask, sampling, with_entropy=False)
        return scores.log_probs

    return join_array(jax.lax.map(score, split_batch(batch, updater.micro_shape)), tokens.shape)


score_padded, _jit_gradients = jax.jit(compute_log_probs), jax.jit(gradients)


@functools.partial(jax.jit, donate_argnames=("state",))
def update_padded(updater: Updater, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """Run one optimizer step, compiled like `train_step` under `jax.jit`. Donates `state`."""
    return apply_gradients(updater, state, *gradients(updater, state, batch))


def split_batch(batch: Batch, micro_shape: tuple[int, int]) -> Batch:
    """Split a batch [B, G, ...] into micro-batches [N, prompts, completions, ...], repeating prompts as needed.

    A micro-batch contains prompts i, i + n, i + 2n, …, where n = B / prompts. Each device therefore has an equal share
    of it, and no data moves between devices.
    """
    chex.assert_equal_shape([batch.tokens, batch.mask, batch.sampling_log_probs])
    repeated = jax.tree.map(lambda x: jnp.repeat(x[:, None], batch.mask.shape[1], axis=1), batch.prompts)
    split_one = functools.partial(split_array, micro_shape=micro_shape)
    micro_batches = jax.tree.map(split_one, batch.replace(prompts=repeated, counted=None))
    return micro_batches.replace(prompts=jax.tree.map(lambda x: x[:, :, 0], micro_batches.prompts))


def split_array(x: jax.Array, micro_shape: tuple[int, int]) -> jax.Array:
    """Split one array like `split_batch`: [B, G, ...] → [N, prompts, completions, ...]."""
    b, g = x.shape[:2]
    prompts, completions = micro_shape
    x = x.reshape(prompts, b // prompts, g // completions, completions, *x.shape[2:])
    return jnp.moveaxis(x, 0, 2).reshape(-1, prompts, completions, *x.shape[4:])


def join_array(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert `split_array`: [N, prompts, completions, ...] → [B, G, ...], where `shape` starts with B and G."""
    _, prompts, completions = parts.shape[:3]
    x = parts.reshape(shape[0] // prompts, shape[1] // completions, prompts, completions, *parts.shape[3:])
    return jnp.moveaxis(x, 2, 0).reshape(shape)
