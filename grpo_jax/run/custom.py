"""The caller's `advantage_fn` and `surrogate`, checked by tracing them on shapes before a run starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.surrogates import Surrogate, Tokens
from grpo_jax.messages import one_line, show
from grpo_jax.rewards.calls import Rewards
from grpo_jax.rewards.contract import arguments_of, function_name, takes_everything
from grpo_jax.rewards.outcomes import place_rewards
from grpo_jax.run.rollout_result import RolloutResult
from grpo_jax.types import AdvantageFn, Batch
from grpo_jax.update.objective import loss_settings
from grpo_jax.update.state import TrainState

Context = dict[str, jax.Array | np.ndarray | np.integer | jax.ShapeDtypeStruct | None]
"""The arrays of an `AdvantageFn`'s keywords, or their shapes."""


@dataclasses.dataclass(frozen=True)
class CheckedAdvantageFn:
    """An `AdvantageFn`, the config and the keywords it takes, and whether it returns [B, G, T]."""

    function: AdvantageFn
    config: GRPOConfig
    keywords: frozenset[str]
    per_token: bool = False

    @functools.cached_property
    def program(self) -> Callable[..., jax.Array]:
        """The compiled function of rewards, mask and the context that it takes."""
        bound = {"config": self.config} if "config" in self.keywords else {}
        return jax.jit(lambda rewards, mask, context: self.function(rewards, mask, **(context | bound)))

    def select(self, context: Context) -> Context:
        """The part of a context that the function takes."""
        return {name: value for name, value in context.items() if name in self.keywords}

    def __call__(
        self, state: TrainState, batch: Batch, rollout: RolloutResult, rewards: Rewards, counted: np.ndarray
    ) -> np.ndarray:
        """Return the advantages [B, G] or [B, G, T] float32 of a batch on the host, 0 where nothing is trained.

        `counted` is [B] bool, False for groups that only fill the batch, whose `rewards.values` are NaN.
        """
        t, turns, placed = batch.mask.shape[2], rollout.turns, None
        if "token_rewards" in self.keywords:
            placed = place_rewards(rewards.values, rewards.parts, turns, rollout.present)[:, :, :t]
        context: Context = {
            "weights": np.asarray(self.config.reward_weights or [1.0] * rewards.values.shape[2], np.float32),
            "lengths": np.asarray(rollout.completions.mask).sum(axis=-1, dtype=np.int32),
            "ended": rollout.completions.ended,
            "tokens": batch.tokens,
            "turns": turns[:, :, :t],
            "token_rewards": placed,
            "log_probs": batch.sampling_log_probs if batch.old_log_probs is None else batch.old_log_probs,
            "ref_log_probs": batch.ref_log_probs,
            "step": np.int32(state.step),
            "key": jax.random.fold_in(jax.random.fold_in(state.key, 2), state.step),
        }
        found = np.asarray(self.program(rewards.values, batch.mask, self.select(context)), np.float32)
        trained = np.asarray(batch.mask) if self.per_token else np.broadcast_to(counted[:, None], found.shape)
        return np.where(trained, found, np.float32(0))


def check_advantage_fn(function: AdvantageFn | None, config: GRPOConfig, functions: int) -> CheckedAdvantageFn | None:
    """Trace a caller's function on the shapes of a batch with K = `functions`; None passes.

    Raises a `ValueError` if it is not a function, fails (as with an unknown keyword), or does not return floats [B, G]
    or [B, G, T].
    """
    if function is None:
        return None
    if config.turn_credit != "episode":
        raise ValueError(
            f"advantage_fn: turn_credit = {config.turn_credit!r} makes the advantages; leave one of the two out (an"
            " advantage_fn can pass its token_rewards and turns to maths.credit.turn_advantages)"
        )
    if not callable(function):
        raise ValueError(f"advantage_fn is {show(function)}: give a function of rewards and mask, or None")
    name, g, t = function_name(function), config.num_generations, config.max_completion_length
    b = g + 1  # not G, so that a function that confuses the axes fails
    context = _context_shapes(b, g, t, functions, reference=config.beta > 0)
    known, named = {*context, "config"}, arguments_of(function).keys()
    checked = CheckedAdvantageFn(function, config, frozenset(known if takes_everything(function) else known & named))
    rewards, mask = jax.ShapeDtypeStruct((b, g, functions), jnp.float32), jax.ShapeDtypeStruct((b, g, t), bool)
    given = f"rewards [B, G, K] = {rewards.shape} and mask [B, G, T] = {mask.shape}"
    try:
        found = jax.eval_shape(checked.program, rewards, mask, checked.select(context))
    except Exception as error:
        keywords = ", ".join([*context, "config"])
        raise ValueError(
            f"advantage_fn {name!r} fails on {given}: {one_line(error)}; its keywords may be {keywords}"
        ) from error
    _check_result(found, f"advantage_fn {name!r}", {"[B, G]": (b, g), "[B, G, T]": (b, g, t)}, given)
    return dataclasses.replace(checked, per_token=found.ndim == 3)


def _context_shapes(b: int, g: int, t: int, functions: int, *, reference: bool) -> Context:
    """The shapes of the arrays that `CheckedAdvantageFn` passes."""
    shape, per_token = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((b, g, t), np.float32)
    return {
        "weights": shape((functions,), np.float32),
        "lengths": shape((b, g), np.int32),
        "ended": shape((b, g), bool),
        "tokens": shape((b, g, t), np.int32),
        "turns": shape((b, g, t), np.int32),
        "token_rewards": shape((b, g, t, functions), np.float32),
        "log_probs": per_token,
        "ref_log_probs": per_token if reference else None,
        "step": shape((), np.int32),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
    }


def check_surrogate(surrogate: Surrogate | None, config: GRPOConfig) -> None:
    """Raise a `ValueError` unless a caller's surrogate is hashable and returns [..., T] floats; None passes."""
    if surrogate is None:
        return
    if not callable(surrogate):
        raise ValueError(
            f"surrogate is {show(surrogate)}: give a function of Tokens and LossSettings, or None; the name of one that"
            " is in the package is loss_type"
        )
    name, shape, settings = function_name(surrogate), (2, 3, 5), loss_settings(config, surrogate)

    def of_zeros() -> jax.Array:
        x = jnp.zeros(shape)
        return surrogate(Tokens(x, x, x, x, jnp.ones(shape, bool), x[..., 0]), settings)

    try:
        hash(surrogate)  # it is a static argument of compiled programs: a function, or an object of a frozen dataclass
        found = jax.eval_shape(of_zeros)
    except Exception as error:
        raise ValueError(f"surrogate {name!r} fails on tokens [..., T] = {shape}: {one_line(error)}") from error
    _check_result(found, f"surrogate {name!r}", {"[..., T]": shape}, f"tokens of that shape {shape}")


def _check_result(found: object, what: str, shapes: dict[str, tuple[int, ...]], given: str) -> None:
    """Raise a `ValueError` unless a result is an array of floats of one of these shapes."""
    wanted = " or ".join(f"{axes} = {shape}" for axes, shape in shapes.items())
    if not isinstance(found, jax.ShapeDtypeStruct):
        raise ValueError(f"{what} returns {show(found)} for {given}: return an array {wanted}")
    if found.shape not in shapes.values() or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(f"{what} returns {found.dtype.name} {found.shape} for {given}: return floats {wanted}")
