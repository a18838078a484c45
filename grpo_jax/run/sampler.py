"""Sampling with an engine instead of `generate`. Completions are validated, and the trainer recomputes log-probs.

```
engine ─► tokens, log π_sampler ─► validation ─► log π_old, recomputed by the trainer from the same params
                                                  │
                                                  ├─► ratio π / π_old of the policy loss
                                                  └─► importance weights π_old / π_sampler (`sampler_weights`)
```
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import show
from grpo_jax.models.packing import lengths_to_last_true
from grpo_jax.models.sharding import fetch
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import accepts_any_keyword, arguments_of
from grpo_jax.rollout.ends import BY_EOS, TurnEnds
from grpo_jax.rollout.episode_setup import EpisodeSetup
from grpo_jax.rollout.generate import generate
from grpo_jax.rollout.turns import NextObservation
from grpo_jax.run.placement import vocab_size
from grpo_jax.run.rollout_result import RolloutResult
from grpo_jax.types import Batch, Completions, Model, Params, Prompts
from grpo_jax.update.objective import sampler_correction_weights
from grpo_jax.update.step import Updater

ARGUMENTS = tuple(
    name for name in inspect.signature(generate).parameters if name not in ("next_observation", "on_tokens", "as_numpy")
)
"""Names of the arguments to `generate` that a sampler can take, apart from `next_observation`."""
ROUNDING = 1e-2
"""Largest positive log-prob, in nats, that is accepted as a rounding error of 0."""


class Sampler(Protocol):
    """A sampling engine: a function that takes any of the arguments to `generate` by keyword.

    A sampler can also take `policy`, for its config and tokenizer, and `next_observation` (None for single-turn
    completions), which returns a future of the observation after a turn. The future resolves to None after the last
    turn; see `rollout.turns.NextObservation`. `**kwargs` does not receive these two. `engines.vllm` returns a sampler.

    A sampler returns `Completions` of NumPy, JAX or PyTorch arrays on the host. Log-probs are ignored where `mask` is
    False, and tokens are ignored after the end of a completion. The fields are:

      tokens: token ids, [B, G, T] integers with T ≤ `max_completion_length`.
      mask: [B, G, T] bool, True from the first to the last token of a completion, including a sampled EOS.
      log_probs: [B, G, T] floats ≤ 0, log-probs under the distribution that tokens are sampled from, after
        `temperature`, `top_k`, `top_p` and `min_p`, like the trainer's log-probs.
      ended: [B, G] bool, True if the completion ends with an id in `eos_token_ids`, which includes stop ids, or with a
        string in `stop`. For multi-turn completions, True if the last observation's future resolved to None.
      present: only for multi-turn completions, [B, G, T] bool, True from the first to the last token of a completion.
        `mask` is then True only on sampled tokens.

    Each call receives the `params` to sample from. All calls in a training run receive the same `key`; calls from
    `evaluate` receive a different one. Random numbers should depend only on `key` and `prompt_indices`, so that a
    resumed run can reproduce the samples. With `rollout_ahead`, the sampler is called from a background thread. With
    several processes, it is called in each process, and process 0's result is used.

    Two attributes are optional. `set_params(policy, params)` sets the params for later calls. With `rollout_ahead` and
    one process, it is called before each background call to the sampler, which then receives `ShapeDtypeStruct`s as
    `params`, as the arrays may be updated in place. `last_metrics`, a dict of the last call's metrics, is logged.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Completions: ...


def check_sampler(sampler: object, episode_setup: EpisodeSetup | None = None, ends: TurnEnds = BY_EOS) -> None:
    """Raise ValueError if `sampler` is not a function or does not support the run's settings, tools or processes."""
    fix = f"Pass a function of any of {', '.join(ARGUMENTS)}, policy and next_observation, or None to use generate"
    if not callable(sampler):
        raise ValueError(f"sampler must be a function; got {show(sampler)}. {fix}")
    parameters, passed = arguments_of(sampler), (*ARGUMENTS, "policy", "next_observation")
    unknown = [name for name, required in parameters.items() if required and name not in passed]
    if unknown:
        raise ValueError(f"sampler requires arguments that are not passed: {', '.join(unknown)}. {fix}")
    for name, value in (("stop", ends.stop), ("max_turn_length", ends.max_turn_length)):
        if value and name not in parameters and not accepts_any_keyword(sampler):
            raise ValueError(f"sampler must take the argument {name}, which the config sets; add it, or unset {name}")
    if episode_setup is not None and "next_observation" not in parameters:
        raise ValueError(
            "tools and environment_factory need a sampler with an argument `next_observation`; pass one, such as"
            " engines.vllm(...), or None"
        )
    if episode_setup is not None and jax.process_count() > 1:
        raise ValueError(
            "sampler cannot be combined with tools or environment_factory in a run with several processes; omit sampler"
        )


def generate_with_engine(
    sampler: Sampler,
    policy: Policy,
    model: Model,
    params: Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    next_observation: NextObservation | None = None,
    as_numpy: bool = True,
    **settings: Any,
) -> Completions:
    """Call an engine with `generate`'s arguments, and validate its result. All processes return process 0's result."""
    size = vocab_size(model, params)
    arguments = {"model": model, "params": params, "prompts": prompts, "key": key}
    arguments |= {"next_observation": next_observation, "policy": policy}
    arguments |= settings | {"eos_token_ids": (*policy.eos_token_ids, *settings["stop_token_ids"])}
    accepted = {*arguments_of(sampler)} | ({*ARGUMENTS} if accepts_any_keyword(sampler) else set())
    returned = sampler(**{name: value for name, value in arguments.items() if name in accepted})
    shape = prompts.tokens.shape[0], settings["num_generations"], settings["max_completion_length"]
    if jax.process_index() > 0:  # replaced by process 0's result; only the shape must match
        mask = jnp.ones(shape, bool)
        returned = Completions(mask.astype(jnp.int32), mask, jnp.zeros(shape), mask[..., 0])
    completions = read_completions(
        returned, shape, vocab_size=size, pad_token_id=policy.pad_token_id, turns=next_observation is not None
    )
    if jax.process_count() > 1:
        completions = jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x))[0], completions)
    return completions


def with_old_log_probs(result: RolloutResult, updater: Updater, params: Params) -> RolloutResult:
    """Add the trainer's log-probs to an engine's completions as `old_log_probs`. The engine sampled from `params`."""
    completions = result.completions
    t = updater.padded_length(int(lengths_to_last_true(np.asarray(completions.mask)).max()))
    old = fetch(updater.log_probs(params, result.prompts, completions.tokens[:, :, :t], completions.mask[:, :, :t]))
    padded = _padded(old, completions.mask.shape[-1], 0)
    return result._replace(completions=completions.replace(old_log_probs=padded))


def read_completions(
    returned: object, shape: tuple[int, int, int], *, vocab_size: int, pad_token_id: int, turns: bool = False
) -> Completions:
    """Validate an engine's completions and pad them to `shape` [B, G, T]. Log-probs are 0 where the mask is False."""
    if not isinstance(returned, Completions):
        raise ValueError(f"sampler must return grpo_jax.Completions, as generate does; got {show(returned)}")
    tokens, log_probs = _array(returned, "tokens", "iu"), _array(returned, "log_probs", "f")
    mask, ended = _array(returned, "mask", "b"), _array(returned, "ended", "b")
    b, g, longest = shape
    t = tokens.shape[-1] if tokens.ndim == 3 else 0
    if tokens.shape != (b, g, t) or not 1 <= t <= longest:
        raise ValueError(
            f"sampler must return tokens of shape ({b}, {g}, T) with 1 ≤ T ≤ max_completion_length = {longest}; got"
            f" {tokens.shape}"
        )
    present = _array(returned, "present", "b") if turns and returned.present is not None else mask
    arrays = {"mask": mask, "log_probs": log_probs, "ended": ended, "present": present}
    for name, value in arrays.items():
        expected = (b, g) if name == "ended" else (b, g, t)
        if value.shape != expected:
            raise ValueError(f"sampler must return {name} of shape {expected}; got {value.shape}")
    lengths = present.sum(axis=-1)
    _raise_if_any(
        (present != (np.arange(t) < lengths[..., None])) | (mask & ~present) | ~mask[..., :1],
        mask,
        "a mask that is empty or not contiguous from the first token"
        if present is mask
        else "a completion whose first token is not sampled, or whose `present` has gaps or omits sampled tokens",
    )
    _raise_if_any(
        present & ((tokens < 0) | (tokens >= vocab_size)),
        tokens,
        f"a token id outside the vocabulary of size {vocab_size}",
    )
    invalid = ~np.isfinite(log_probs) | (log_probs > ROUNDING)
    _raise_if_any(mask & invalid, log_probs, "a log-prob that is > 0 or not finite (log-probs are natural logarithms)")
    return Completions(
        tokens=_padded(np.where(present, tokens, pad_token_id).astype(np.int32), longest, pad_token_id),
        mask=_padded(mask, longest, False),
        log_probs=_padded(np.where(mask, log_probs, 0).astype(np.float32), longest, 0),
        ended=ended,
        present=_padded(present, longest, False) if turns else None,
    )


def mismatch_metrics(batch: Batch, config: GRPOConfig) -> dict[str, float]:
    """Compute metrics of |log π_old − log π_sampler| and the importance weights. Returns {} without an engine."""
    mask = np.asarray(batch.mask)
    if batch.old_log_probs is None or not mask.any():
        return {}
    gaps = np.abs(np.asarray(batch.old_log_probs) - np.asarray(batch.sampling_log_probs))[mask]
    metrics = {"log_prob_difference_mean": gaps.mean(), "log_prob_difference_max": gaps.max()}
    weights = sampler_correction_weights(batch, config)
    if weights is not None:
        w = np.asarray(weights)[mask if weights.ndim == mask.ndim else mask.any(axis=-1)]
        metrics |= {f"importance_weight_{kind}": getattr(w, kind)() for kind in ("mean", "min", "max")}
    return {f"sampler/{name}": float(value) for name, value in metrics.items()}


def _array(returned: Completions, name: str, kinds: str) -> Any:
    """Return a field of the completions as a NumPy array. Raises ValueError unless its dtype's kind is in `kinds`."""
    value, kind = np.asarray(fetch(getattr(returned, name))), {"iu": "integers", "f": "floats", "b": "bool"}[kinds]
    if value.dtype.kind not in kinds and not (kinds == "f" and jnp.issubdtype(value.dtype, jnp.floating)):
        raise ValueError(f"sampler must return {name} as {kind}; got dtype {value.dtype}")
    return value


def _raise_if_any(invalid: np.ndarray, values: np.ndarray, problem: str) -> None:
    """Raise ValueError with the position of the first invalid value, if there is one."""
    if invalid.any():
        b, g, t = (int(i) for i in np.argwhere(invalid)[0])
        raise ValueError(f"sampler returned {problem}: {values[b, g, t]} at prompt {b}, completion {g}, token {t}")


def _padded(x: np.ndarray, length: int, value: Any) -> Any:
    """Pad an array [B, G, T] with `value` to T = `length`."""
    return np.pad(x, ((0, 0), (0, 0), (0, length - x.shape[-1])), constant_values=value)
