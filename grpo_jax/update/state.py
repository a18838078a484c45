"""The training state (params, optimizer state, counters, PRNG key), and pure functions that create and update it."""

from __future__ import annotations

import math
from collections.abc import Callable

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.maths.reference import sync_reference
from grpo_jax.models.layers import UNTRAINED
from grpo_jax.models.lora import reference_adapters
from grpo_jax.types import Params


class TrainState(flax.struct.PyTreeNode):
    """Policy, old policy, reference and optimizer state of a run.

    The state is immutable, and its trees do not share buffers. Trees that are not needed are None.

    Attributes:
      params: policy params θ, a pytree of float arrays.
      old_params: θ at the start of the iteration, from which the iteration's completions are sampled (or, with
        `rollout_ahead`, the next iteration's). None if an iteration has one update and no engine samples during it.
      ref_params: reference params for the KL term; None if beta is 0.
      initial_params: params at the start of the run; None unless the reference is synced.
      opt_state: state of the optax transformation.
      step: [] int32 number of optimizer steps.
      key: [] typed PRNG key of the run. Sampling keys are derived from it and prompt, completion and token indices.
      entropy_coef: [] float32 coefficient for the entropy bonus, which changes during training if it is adaptive.
      entropy_bonus: [] float32 coefficient for the next update: `entropy_coef`, or 0 while an adaptive bonus is
        disabled because the entropy is above its target.
      skipped: [] int32 number of updates skipped because the loss or the gradient was not finite.
      master_params: float32 copy of θ, which is updated and then rounded to `params`. None if params are float32.
    """

    params: Params
    old_params: Params | None
    ref_params: Params | None
    initial_params: Params | None
    opt_state: optax.OptState
    step: jax.Array
    key: jax.Array
    entropy_coef: jax.Array
    entropy_bonus: jax.Array
    skipped: jax.Array
    master_params: Params | None = None

    def __repr__(self) -> str:
        kept = [name for name in ("old_params", "ref_params", "initial_params") if getattr(self, name) is not None]
        concrete = isinstance(self.step, jax.Array) and not isinstance(self.step, jax.core.Tracer)
        step = "deleted" if concrete and self.step.is_deleted() else self.step
        count = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(self.params))
        return f"TrainState({', '.join([f'step={step}', f'{count:,} parameters', *kept])})"


def _unshared(tree: TrainState, seen: set[int]) -> TrainState:
    """Copy NumPy arrays and arrays that occur twice or have an id in `seen`: donated buffers must not be shared."""

    def copy_if_shared(x: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        if isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and id(x) in seen):
            x = jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(copy_if_shared, tree)


def create_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    keep_old: bool = False,
    keep_reference: bool = False,
    keep_initial: bool = False,
    adapter_mixup_alpha: float | None = None,
    entropy_coef: float = 0.0,
    entropy_bonus: float | None = None,
    donate: bool = False,
) -> TrainState:
    """Create the state at step 0 from `params`, which are copied unless `donate` is True, and a copy of `key`.

    Args:
      params: pytree of float arrays.
      optimizer: optax transformation.
      key: [] typed PRNG key of the run.
      keep_old: whether to keep the policy that sampled the completions, for several updates per iteration.
      keep_reference: whether to keep a reference, for beta > 0.
      keep_initial: whether to keep the initial policy, for a synced reference.
      adapter_mixup_alpha: mixing weight α for a synced reference if params are LoRA adapters, else None.
      entropy_coef: initial coefficient for the entropy bonus, ≥ 0.
      entropy_bonus: coefficient for the first update; defaults to `entropy_coef`.
      donate: whether to use the arrays in `params` without a copy. The first update then deletes the caller's arrays.

    Returns:
      A `TrainState` at step 0.

    Raises:
      ValueError: if a leaf of params is not a float array (for example, if it is a quantized weight).

    Example:
      >>> state = create_state({"w": jnp.ones(2)}, optax.sgd(0.1), jax.random.key(0), keep_reference=True)
      >>> int(state.step), state.old_params is None, state.ref_params["w"].tolist()
      (0, True, [1.0, 1.0])
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} must have a float dtype to be trained; got {leaf.dtype}. If the"
                " model is quantized, train adapters instead: `add_lora(policy, key)`."
            )
    masters = None
    if any(jnp.finfo(x.dtype).bits < 32 for x in jax.tree.leaves(params)):
        masters = jax.tree.map(lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32)), params)
    reference = params if adapter_mixup_alpha is None else reference_adapters(params, adapter_mixup_alpha)
    state = TrainState(
        params=params,
        old_params=params if keep_old else None,
        ref_params=reference if keep_reference else None,
        initial_params=params if keep_initial else None,
        opt_state=optimizer.init(params if masters is None else masters),
        step=jnp.zeros((), jnp.int32),
        key=key,
        entropy_coef=jnp.asarray(entropy_coef, jnp.float32),
        entropy_bonus=jnp.asarray(entropy_coef if entropy_bonus is None else entropy_bonus, jnp.float32),
        skipped=jnp.zeros((), jnp.int32),
        master_params=masters,
    )
    # The optimizer state may contain references to the params.
    callers_arrays = (key, entropy_coef, entropy_bonus, None if donate else params)
    return _unshared(state, {id(x) for x in jax.tree.leaves(callers_arrays)})


def begin_iteration(state: TrainState) -> TrainState:
    """Copy params to old_params, the policy to sample from. If old_params is None, return the state unchanged."""
    return state if state.old_params is None else state.replace(old_params=jax.tree.map(jnp.copy, state.params))


def apply_optimizer(
    state: TrainState,
    grads: Params,
    is_finite: jax.Array,
    optimizer: optax.GradientTransformation,
    *,
    has_tokens: jax.Array | bool = True,
    sync_every: int | None = None,
    sync_alpha: float = 1.0,
    sync: Callable[..., Params] = sync_reference,
) -> TrainState:
    """Apply one optimizer step, then sync the reference if it is due.

    θ ← θ + update(g);  step ← step + 1;  θ_ref ← α·θ + (1 − α)·θ_ref  if step % sync_every == 0

    Here, g is `grads` and α is `sync_alpha`. If there are master params, the update is added to them, and θ is set to
    their rounded values. Params and optimizer state do not change if `is_finite` is False (the loss or the gradient is
    not finite) or `has_tokens` is False (no token contributes to the loss). `step` is always incremented, so that
    skipped updates do not affect the schedule, the data or the keys. A `sync_every` of None freezes the reference.
    Pass `lora.sync_adapter_products` as `sync` for a reference from `lora.reference_adapters`.
    """
    chex.assert_trees_all_equal_structs(grads, state.params)
    update = optax.with_extra_args_support(optimizer).update

    def apply_update(
        params: Params, masters: Params | None, opt_state: optax.OptState
    ) -> tuple[Params, Params | None, optax.OptState]:
        full = params if masters is None else masters  # full-precision params
        updates, opt_state = update(optax.tree.cast_like(grads, full), opt_state, full, step=state.step)
        full = optax.apply_updates(full, _zero_untrained(updates))
        return (full, None, opt_state) if masters is None else (optax.tree.cast_like(full, params), full, opt_state)

    # `cond` updates a donated state in place, while `where` would need a second copy.
    params, masters, opt_state = jax.lax.cond(
        is_finite & has_tokens, apply_update, lambda *same: same, state.params, state.master_params, state.opt_state
    )
    step, ref_params = state.step + 1, state.ref_params
    if ref_params is not None and sync_every is not None:
        ref_params = sync(ref_params, params, step, every=sync_every, alpha=sync_alpha)
    return state.replace(
        params=params,
        master_params=masters,
        opt_state=opt_state,
        ref_params=ref_params,
        step=step,
        skipped=state.skipped + jnp.where(is_finite, 0, 1),
    )


def _zero_untrained(updates: Params) -> Params:
    """Set updates for untrained params to zero, since weight decay would otherwise change these params."""

    def zero_if_untrained(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x) if path and getattr(path[-1], "key", None) in UNTRAINED else x

    return jax.tree_util.tree_map_with_path(zero_if_untrained, updates)
