"""Validation of custom `advantage_fn` and `surrogate` functions, by tracing them before a run starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.surrogates import Surrogate, SurrogateInputs
from grpo_jax.messages import one_line, show
from grpo_jax.rewards.calls import Rewards
from grpo_jax.rewards.contract import accepts_any_keyword, arguments_of, function_name
from grpo_jax.rewards.outcomes import place_rewards
from grpo_jax.run.rollout_result import RolloutResult
from grpo_jax.types import AdvantageFn, Batch
from grpo_jax.update.objective import loss_settings
from grpo_jax.update.state import TrainState

ADVANTAGES = 3
"""Value folded into the run's PRNG key for an `AdvantageFn`. `run.evaluate.EVALUATION` lists the other values."""

Context = dict[str, jax.Array | np.ndarray | np.integer | jax.ShapeDtypeStruct | None]
"""Keyword arguments that an `AdvantageFn` can take, except `config`, as arrays or abstract arrays."""


@dataclasses.dataclass(frozen=True)
class CheckedAdvantageFn:
    """A validated `AdvantageFn`, its keywords, and the config. `per_token` is True if the result is [B, G, T]."""

    function: AdvantageFn
    config: GRPOConfig
    keywords: frozenset[str]
    per_token: bool = False

    @functools.cached_property
    def program(self) -> Callable[..., jax.Array]:
        """Jitted function (rewards, mask, selected context) -> advantages."""
        bound = {"config": self.config} if "config" in self.keywords else {}
        return jax.jit(lambda rewards, mask, context: self.function(rewards, mask, **(context | bound)))

    def select(self, context: Context) -> Context:
        """Return the context entries that the function takes as keywords."""
        return {name: value for name, value in context.items() if name in self.keywords}

    def __call__(
        self, state: TrainState, batch: Batch, rollout: RolloutResult, rewards: Rewards, counted: np.ndarray
    ) -> np.ndarray:
        """Compute a batch's advantages and return them as a NumPy array.

        Advantages are 0 where `counted` [B] is False (padding) and, if they are [B, G, T], where the mask is False.
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
            "key": jax.random.fold_in(jax.random.fold_in(state.key, ADVANTAGES), state.step),
        }
        advantages = np.asarray(self.program(rewards.values, batch.mask, self.select(context)), np.float32)
        included = np.asarray(batch.mask) if self.per_token else np.broadcast_to(counted[:, None], advantages.shape)
        return np.where(included, advantages, np.float32(0))


def check_advantage_fn(function: AdvantageFn | None, config: GRPOConfig, num_fns: int) -> CheckedAdvantageFn | None:
    """Validate an advantage function by tracing it with abstract rewards from K = `num_fns` reward functions."""
    if function is None:
        return None
    if config.turn_credit != "episode":
        raise ValueError(
            f"advantage_fn and turn_credit={config.turn_credit!r} both compute the advantages; omit advantage_fn or"
            " set turn_credit='episode' (advantage_fn can pass token_rewards and turns to maths.credit.turn_advantages)"
        )
    if not callable(function):
        raise ValueError(f"advantage_fn must be a function of rewards and mask, or None; got {show(function)}")
    name, g, t = function_name(function), config.num_generations, config.max_completion_length
    b = g + 1  # differs from G, so that a function that swaps the axes fails
    context = _abstract_context(b, g, t, num_fns, reference=config.beta > 0)
    keywords = {*context, "config"}
    if not accepts_any_keyword(function):
        keywords &= arguments_of(function).keys()
    checked = CheckedAdvantageFn(function, config, frozenset(keywords))
    rewards, mask = jax.ShapeDtypeStruct((b, g, num_fns), jnp.float32), jax.ShapeDtypeStruct((b, g, t), bool)
    arguments = f"rewards [B, G, K] = {rewards.shape} and mask [B, G, T] = {mask.shape}"
    try:
        result = jax.eval_shape(checked.program, rewards, mask, checked.select(context))
    except Exception as error:
        raise ValueError(
            f"advantage_fn {name!r} failed on {arguments} with {one_line(error)}. The function can take"
            f" the keywords {', '.join(context)} and config"
        ) from error
    _check_result(result, f"advantage_fn {name!r}", {"[B, G]": (b, g), "[B, G, T]": (b, g, t)}, arguments)
    return dataclasses.replace(checked, per_token=result.ndim == 3)


def _abstract_context(b: int, g: int, t: int, num_fns: int, *, reference: bool) -> Context:
    """Return the context for `CheckedAdvantageFn` as abstract arrays."""
    shape, per_token = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((b, g, t), np.float32)
    return {
        "weights": shape((num_fns,), np.float32),
        "lengths": shape((b, g), np.int32),
        "ended": shape((b, g), bool),
        "tokens": shape((b, g, t), np.int32),
        "turns": shape((b, g, t), np.int32),
        "token_rewards": shape((b, g, t, num_fns), np.float32),
        "log_probs": per_token,
        "ref_log_probs": per_token if reference else None,
        "step": shape((), np.int32),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
    }


def check_surrogate(surrogate: Surrogate | None, config: GRPOConfig) -> None:
    """Raise ValueError unless `surrogate` is None or a hashable function that returns a float array [..., T]."""
    if surrogate is None:
        return
    if not callable(surrogate):
        raise ValueError(
            f"surrogate must be a function of SurrogateInputs and LossSettings, or None; got {show(surrogate)}. Set"
            " loss_type to select a built-in surrogate by name"
        )
    name, shape, settings = function_name(surrogate), (2, 3, 5), loss_settings(config, surrogate)

    def of_zeros() -> jax.Array:
        x = jnp.zeros(shape)
        return surrogate(SurrogateInputs(x, x, x, x, jnp.ones(shape, bool), x[..., 0]), settings)

    try:
        hash(surrogate)  # must be hashable because it is a static argument to jitted functions
        result = jax.eval_shape(of_zeros)
    except Exception as error:
        raise ValueError(f"surrogate {name!r} failed on inputs [..., T] = {shape} with {one_line(error)}") from error
    _check_result(result, f"surrogate {name!r}", {"[..., T]": shape}, f"inputs of shape {shape}")


def _check_result(result: object, function: str, shapes: dict[str, tuple[int, ...]], arguments: str) -> None:
    """Raise ValueError unless a result is a float array of one of the given shapes."""
    requirement = (
        f"must return a float array of shape {' or '.join(f'{axes} = {shape}' for axes, shape in shapes.items())}"
    )
    if not isinstance(result, jax.ShapeDtypeStruct):
        raise ValueError(f"{function} {requirement} for {arguments}; got {show(result)}")
    if result.shape not in shapes.values() or not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(f"{function} {requirement} for {arguments}; got {result.dtype.name} {result.shape}")
