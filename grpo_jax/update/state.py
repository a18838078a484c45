"""The training state: every array that decides the future of a run, and the pure functions that move it on."""

from __future__ import annotations

import math

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.maths.reference import sync_reference
from grpo_jax.models.layers import UNTRAINED
from grpo_jax.models.lora import reference_of, sync_adapters
from grpo_jax.types import Params


class TrainState(flax.struct.PyTreeNode):
    """Policy, old policy, reference, optimizer: frozen, and no two of its trees share a buffer.

    A tree that the objective never reads is None, not a copy: one update a rollout needs no old policy, beta = 0 needs
    no reference, and a reference that never moves is the initial policy itself.

    Attributes:
      params: the policy θ, a pytree of float arrays: what samples and what is differentiated.
      old_params: θ at the start of the iteration, which this iteration's completions are sampled from, or with
        `rollout_ahead` the next iteration's. Their log-probs are kept from the sampler, or computed where another
        engine samples. None where an iteration is a single update and params themselves serve, unless an engine samples
        beside that update.
      ref_params: the reference of the KL; None where beta is 0.
      initial_params: the policy that the run began with; None unless the reference moves away from it.
      opt_state: of the optax transformation.
      step: [] int32, optimizer steps done.
      key: [] typed PRNG key, never consumed: every draw folds in what it counts (prompt, completion, token).
      entropy_coef: [] float32, the coefficient of the entropy bonus; the adaptive one moves.
      entropy_bonus: [] float32, the coefficient that the next update applies: the same, or 0 while the adaptive one
        finds the entropy high enough.
      skipped: [] int32, updates that were not made because loss or gradient was not finite.
      master_params: θ in float32, which the optimizer moves, and which `params` are rounded from after every step; None
        where params are float32 themselves.
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
        deleted = isinstance(self.step, jax.Array) and not isinstance(self.step, jax.core.Tracer)
        step = "deleted" if deleted and self.step.is_deleted() else self.step
        count = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(self.params))
        return f"TrainState({', '.join([f'step={step}', f'{count:,} parameters', *kept])})"


def _unshared(tree: TrainState, held: set[int]) -> TrainState:
    """The tree with copies of the arrays that stand in it twice or in `held` (ids), as a donated state needs it."""

    def one(x: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        if isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and id(x) in held):
            x = jnp.copy(x)
        held.add(id(x))
        return x

    return jax.tree.map(one, tree)


def create_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    keep_old: bool = False,
    keep_reference: bool = False,
    keep_initial: bool = False,
    mix_adapters: float | None = None,
    entropy_coef: float = 0.0,
    entropy_bonus: float | None = None,
    donate: bool = False,
) -> TrainState:
    """Start a run from `params`, which are copied, or with `donate` become those of the state.

    Args:
      params: pytree of float arrays.
      optimizer: an optax transformation.
      key: [] typed PRNG key of the whole run.
      keep_old: hold the policy that sampled (more than one update an iteration).
      keep_reference: hold a reference (beta > 0).
      keep_initial: hold the initial policy beside a reference that moves.
      mix_adapters: where params are adapters and the reference is synced, the weight of the policy in a sync.
      entropy_coef: ≥ 0, first coefficient of the entropy bonus.
      entropy_bonus: what the first update applies of it; None: all of it.
      donate: the state holds the arrays of `params` themselves, which its first update takes from the caller.

    Returns:
      A `TrainState` at step 0, no two of whose arrays are one.

    Raises:
      ValueError: params with a leaf that is not of floats, such as a quantized base's.

    Example:
      >>> state = create_state({"w": jnp.ones(2)}, optax.sgd(0.1), jax.random.key(0), keep_reference=True)
      >>> int(state.step), state.old_params is None, state.ref_params["w"].tolist()
      (0, True, [1.0, 1.0])
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has dtype {leaf.dtype}; only floats are trained. A quantized base"
                " stays as it is, and its adapters are trained: `add_lora(policy, key)`."
            )
    masters = None
    if any(jnp.finfo(x.dtype).bits < 32 for x in jax.tree.leaves(params)):
        masters = jax.tree.map(lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32)), params)
    reference = params if mix_adapters is None else reference_of(params, mix_adapters)
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
    # An optimizer too may keep the params that it begins with.
    return _unshared(state, set() if donate else {id(x) for x in jax.tree.leaves(params)})


def same_shapes(first: Params, second: Params) -> bool:
    """Whether the arrays of two trees have the same shapes: adapters and a reference that is synced to them do not."""
    return jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, second)


def begin_iteration(state: TrainState) -> TrainState:
    """Take the snapshot that this iteration samples from: old_params ← params, where an old policy is kept."""
    return state if state.old_params is None else state.replace(old_params=jax.tree.map(jnp.copy, state.params))


def finish_update(
    state: TrainState,
    grads: Params,
    ok: jax.Array,
    optimizer: optax.GradientTransformation,
    *,
    trained: jax.Array | bool = True,
    sync_every: int | None = None,
    sync_alpha: float = 1.0,
) -> TrainState:
    """One optimizer step, then the reference's own step.

    θ ← θ + update(g);  step ← step + 1;  θ_ref ← α·θ + (1 − α)·θ_ref  if step % sync_every == 0

    The θ of the first formula are the masters where there are any; params are then what they round to. Of adapters the
    last is about the products A B: the weights are mixed, and not the factors (`lora.sync_adapters`).

    Where `ok` ([] bool: loss and gradient are finite) is False, params and optimizer stay as they are to the last bit,
    and `skipped` counts one. The step is counted all the same, so that schedules, the data and the keys of a run do not
    depend on it: the config's schedule is that of the extra argument `step`, and only an optimizer given to `train`
    whose optax schedule counts its own updates lags behind. Where `trained` (a token of the minibatch is trained at
    all) is False they stay too, and `skipped` counts nothing: the gradient is 0, and moments of earlier ones would move
    them. `sync_every` is None for a reference that stays; `sync_alpha` is α.
    """
    chex.assert_trees_all_equal_structs(grads, state.params)
    update = optax.with_extra_args_support(optimizer).update

    def move(
        params: Params, masters: Params | None, opt_state: optax.OptState
    ) -> tuple[Params, Params | None, optax.OptState]:
        held = params if masters is None else masters
        updates, opt_state = update(optax.tree.cast_like(grads, held), opt_state, held, step=state.step)
        held = optax.apply_updates(held, _trained(updates))
        return (held, None, opt_state) if masters is None else (optax.tree.cast_like(held, params), held, opt_state)

    # A branch, not a choice between two trees: a donated state is changed where it stands, with none beside it.
    params, masters, opt_state = jax.lax.cond(
        ok & trained, move, lambda *same: same, state.params, state.master_params, state.opt_state
    )
    step, ref_params = state.step + 1, state.ref_params
    if ref_params is not None and sync_every is not None:
        # A copy of other shapes is that of adapters.
        sync = sync_reference if same_shapes(ref_params, params) else sync_adapters
        ref_params = sync(ref_params, params, step, every=sync_every, alpha=sync_alpha)
    return state.replace(
        params=params,
        master_params=masters,
        opt_state=opt_state,
        ref_params=ref_params,
        step=step,
        skipped=state.skipped + jnp.where(ok, 0, 1),
    )


def _trained(updates: Params) -> Params:
    """Updates that leave alone what is not trained, whatever an optimizer would do to it."""

    def one(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x) if path and getattr(path[-1], "key", None) in UNTRAINED else x

    return jax.tree_util.tree_map_with_path(one, updates)
