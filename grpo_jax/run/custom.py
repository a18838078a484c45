"""Advantage functions and surrogates of the caller, checked before a run starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.credit import in_units_of_rewards, turn_advantages
from grpo_jax.maths.surrogates import Surrogate, Tokens
from grpo_jax.messages import nearest, one_line, show
from grpo_jax.rewards.calls import Rewards
from grpo_jax.rewards.contract import arguments_of, function_name, parameters_of, takes_everything
from grpo_jax.rewards.outcomes import RewardParts, place_rewards
from grpo_jax.run.sample import RolloutResult
from grpo_jax.types import AdvantageFn, Batch
from grpo_jax.update.objective import loss_settings
from grpo_jax.update.state import TrainState

Context = dict[str, jax.Array | np.ndarray | jax.ShapeDtypeStruct | None]
"""Keyword of an `AdvantageFn` → its array, or the shape of that."""


def _shapes_of_context(b: int, g: int, t: int, functions: int, *, reference: bool) -> Context:
    """The shapes of `CheckedAdvantageFn.context`."""

    def array(shape: tuple[int, ...], dtype: type = np.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    return {
        "weights": array((functions,)),
        "lengths": array((b, g), np.int32),
        "ended": array((b, g), bool),
        "tokens": array((b, g, t), np.int32),
        "turns": array((b, g, t), np.int32),
        "token_rewards": array((b, g, t, functions)),
        "log_probs": array((b, g, t)),
        "ref_log_probs": array((b, g, t)) if reference else None,
        "step": array((), np.int32),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
    }


@dataclasses.dataclass(frozen=True)
class CheckedAdvantageFn:
    """An `AdvantageFn` that has been checked on the shapes of a batch.

    Attributes:
      function: the caller's function, or `turn_credit`'s.
      config: the config that it may read.
      names: the keywords that it takes.
      per_token: whether it returns [B, G, T].
    """

    function: AdvantageFn
    config: GRPOConfig
    names: frozenset[str]
    per_token: bool

    @classmethod
    def of(
        cls, function: AdvantageFn, config: GRPOConfig, functions: int, argument: str = "advantage_fn"
    ) -> CheckedAdvantageFn:
        """Check a function by tracing it with the shapes of a batch.

        Raises:
          ValueError: not a function; an unknown keyword; an error while tracing; a result that is not [B, G] or
            [B, G, T] of floats.
        """
        if not callable(function):
            raise ValueError(f"{argument} is {show(function)}: give a function of rewards and mask, or None")
        name, g, t = function_name(function), config.num_generations, config.max_completion_length
        b = g + 1  # not G, so that a function that confuses the axes fails
        context = _shapes_of_context(b, g, t, functions, reference=config.beta > 0)
        known = [*context, "config"]
        wanted = _keywords(function)
        unknown = [key for key, required in wanted.items() if required and key not in known]
        if unknown:
            near = nearest(unknown[0], known)
            raise ValueError(
                f"{argument} {name!r} needs the argument {unknown[0]!r}, which is not available (available: rewards,"
                f" mask, {', '.join(known)})" + (f"; did you mean {near!r}?" if near else "")
            )
        names = frozenset(key for key in known if key in wanted or takes_everything(function))
        own = cls(function, config, names, per_token=False)
        rewards, mask = jax.ShapeDtypeStruct((b, g, functions), jnp.float32), jax.ShapeDtypeStruct((b, g, t), bool)
        shapes = f"rewards [B, G, K] = {rewards.shape} and mask [B, G, T] = {mask.shape}"
        try:
            found = jax.eval_shape(own.call, rewards, mask, own.chosen(context))
        except Exception as error:
            raise ValueError(f"{argument} {name!r} fails on {shapes}: {one_line(error)}") from error
        _check_result(found, argument, name, {"[B, G]": (b, g), "[B, G, T]": (b, g, t)}, shapes)
        return dataclasses.replace(own, per_token=found.ndim == 3)

    def call(self, rewards: jax.Array, mask: jax.Array, context: Context) -> jax.Array:
        """Call the function with a context, and with the config if it takes that."""
        config = {"config": self.config} if "config" in self.names else {}
        return self.function(rewards, mask, **(context | config))

    @functools.cached_property
    def program(self) -> Callable[[np.ndarray, jax.Array, Context], jax.Array]:
        """The compiled function."""
        return jax.jit(self.call)

    def chosen(self, context: Context) -> Context:
        """The part of a context that the function takes."""
        return {name: value for name, value in context.items() if name in self.names}

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        rollout: RolloutResult,
        rewards: Rewards,
        counted: np.ndarray,
        names: Sequence[str],
    ) -> np.ndarray:
        """Advantages [B, G] or [B, G, T] float32 of a batch on the host, 0 where nothing is trained.

        `counted` is [B] bool, False for groups that only fill the batch; `names` are the reward functions'.
        """
        scores = np.where(counted[:, None, None], rewards.values, np.float32(np.nan))
        _check_parts(rewards.parts, names, self.config)
        context = self._context(state, batch, rollout, rewards, counted)
        found = np.asarray(self.program(scores, batch.mask, self.chosen(context)), np.float32)
        trained = np.asarray(batch.mask) if self.per_token else np.broadcast_to(counted[:, None], found.shape)
        return np.where(trained, found, np.float32(0))

    def _context(
        self, state: TrainState, batch: Batch, rollout: RolloutResult, rewards: Rewards, counted: np.ndarray
    ) -> Context:
        """The keywords that an `AdvantageFn` may name, except `config`."""
        t, turns, token_rewards = batch.mask.shape[2], rollout.turns, None
        if "token_rewards" in self.names:
            placed = place_rewards(rewards.values, rewards.parts, turns, rollout.present)
            token_rewards = np.where(counted[:, None, None, None], placed[:, :, :t], np.float32(np.nan))
        weights = self.config.reward_weights or [1.0] * rewards.values.shape[2]
        return {
            "weights": np.asarray(weights, np.float32),
            "lengths": np.asarray(rollout.completions.mask).sum(axis=-1, dtype=np.int32),
            "ended": rollout.completions.ended,
            "tokens": batch.tokens,
            "turns": turns[:, :, :t],
            "token_rewards": token_rewards,
            "log_probs": batch.sampling_log_probs if batch.old_log_probs is None else batch.old_log_probs,
            "ref_log_probs": batch.ref_log_probs,
            "step": np.int32(state.step),
            "key": jax.random.fold_in(jax.random.fold_in(state.key, 2), state.step),
        }


def _keywords(function: AdvantageFn) -> dict[str, bool]:
    """The keywords behind rewards and mask, and whether each is required."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    free = [x for x in parameters_of(function) if x.name not in bound]
    first = [x.name for x in free if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)][:2]
    return {name: required for name, required in arguments_of(function).items() if name not in first}


def credit_of_turns(
    rewards: jax.Array,
    mask: jax.Array,
    *,
    token_rewards: jax.Array,
    turns: jax.Array,
    weights: jax.Array,
    config: GRPOConfig,
) -> jax.Array:
    """The `AdvantageFn` of turn_credit="to_go"."""
    return turn_advantages(
        token_rewards,
        turns,
        weights=weights,
        scale_rewards=config.scale_rewards,
        multi_objective_aggregation=config.multi_objective_aggregation,
        estimator=config.advantage_estimator,
    )


def check_advantage_fn(function: AdvantageFn | None, config: GRPOConfig, functions: int) -> CheckedAdvantageFn | None:
    """The function that replaces `compute_advantages`: the caller's, or `turn_credit`'s; a `ValueError` for both."""
    if config.turn_credit == "episode":
        return None if function is None else CheckedAdvantageFn.of(function, config, functions)
    if function is not None:
        raise ValueError(
            f"advantage_fn: turn_credit = {config.turn_credit!r} makes the advantages; leave one of the two out (a"
            " function of your own gets token_rewards and turns, which maths.credit.turn_advantages takes)"
        )
    return CheckedAdvantageFn.of(credit_of_turns, config, functions, argument="turn_credit")


def _check_parts(parts: Sequence[RewardParts], names: Sequence[str], config: GRPOConfig) -> None:
    """Raise a `ValueError` for rewards of tokens if advantages have another unit than rewards."""
    if config.turn_credit == "episode" or in_units_of_rewards(config.scale_rewards, config.advantage_estimator):
        return
    for part in parts:
        if part.per_token:
            raise ValueError(
                f"reward function {names[part.function]!r} returned an array, a reward for each token, and with"
                f" turn_credit = {config.turn_credit!r} these are added to advantages in the unit of a reward: set"
                ' scale_rewards="none" with advantage_estimator="grpo" or "rloo", or return a list, one for each turn'
            )


def check_surrogate(surrogate: Surrogate | None, config: GRPOConfig) -> None:
    """Check a caller's surrogate by the shapes of some tokens: a hashable function that returns [..., T] floats."""
    if surrogate is None:
        return
    if not callable(surrogate):
        raise ValueError(
            f"surrogate is {show(surrogate)}: give a function of Tokens and LossSettings, or None; the name of one that"
            " is in the package is loss_type"
        )
    name = function_name(surrogate)
    try:
        hash(surrogate)
    except TypeError as error:
        raise ValueError(
            f"surrogate {name!r} cannot be hashed ({error}), as a static argument of a compiled program must be: give a"
            " function, or an object of a frozen dataclass"
        ) from error
    shape = (2, 3, 5)
    settings = loss_settings(config, surrogate)

    def of_zeros() -> jax.Array:
        x = jnp.zeros(shape)
        return surrogate(Tokens(x, x, x, x, jnp.ones(shape, bool), x[..., 0]), settings)

    try:
        found = jax.eval_shape(of_zeros)
    except Exception as error:
        raise ValueError(f"surrogate {name!r} fails on tokens [..., T] = {shape}: {one_line(error)}") from error
    _check_result(found, "surrogate", name, {"[..., T]": shape}, f"tokens of that shape {shape}")


def _check_result(found: object, argument: str, name: str, shapes: dict[str, tuple[int, ...]], given: str) -> None:
    """Raise a `ValueError` unless a result is an array of floats of one of these shapes."""
    wanted = " or ".join(f"{axes} = {shape}" for axes, shape in shapes.items())
    if not isinstance(found, jax.ShapeDtypeStruct):
        raise ValueError(f"{argument} {name!r} returns {show(found)} for {given}: return an array {wanted}")
    if found.shape not in shapes.values() or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(
            f"{argument} {name!r} returns {found.dtype.name} {found.shape} for {given}: return floats {wanted}"
        )
