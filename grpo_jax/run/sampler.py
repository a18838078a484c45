"""Completions by an engine instead of `generate`: called, validated, and scored by the trainer's own scorer.

```
engine ─► tokens, log π_sampler ─► checked ─► log π_old, of the same params by the trainer's own scorer
                                                  │
                                                  ├─► ratio π / π_old of the policy loss
                                                  └─► importance weights π_old / π_sampler (`maths.sampler_weights`)
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
from grpo_jax.models.packing import lengths_of
from grpo_jax.models.sharding import fetch
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import parameters_of, takes_everything
from grpo_jax.rollout.ends import BY_EOS, TurnEnds
from grpo_jax.rollout.generate import generate
from grpo_jax.rollout.interaction import Interaction
from grpo_jax.rollout.turns import Answers
from grpo_jax.run.placement import vocab_size
from grpo_jax.run.rollout_result import RolloutResult
from grpo_jax.types import Batch, Completions, Model, Params, Prompts
from grpo_jax.update.objective import sampler_correction_weights
from grpo_jax.update.step import Updater

ARGUMENTS = tuple(
    name for name in inspect.signature(generate).parameters if name not in ("answers", "watch", "on_host")
)
"""Names of the arguments of `generate` that every sampler may take."""
ROUNDING = 1e-2
"""Nats by which a log-prob may be above 0, due to rounding."""


class Sampler(Protocol):
    """An engine that samples: a function that takes any of `generate`'s arguments, by name.

    Two more arguments may be named: `policy`, for its config and tokenizer, and `answers`, the function that answers
    the turns of a completion (`rollout.turns.Answers`; None for one turn), which several turns need. `**kwargs`
    receives all arguments except these two. `engines.vllm` makes a sampler.

    A sampler returns `Completions` of NumPy, JAX or PyTorch arrays on the host. Values where `mask` is False are
    ignored:

      tokens: [B, G, T] integers, T ≤ `max_completion_length`.
      mask: [B, G, T] bool, True from the first token of a completion to its last, which is the EOS if one was sampled.
      log_probs: [B, G, T] floats ≤ 0 of the distribution that was sampled from: after `temperature`, `top_k`, `top_p`
        and `min_p`, as in the trainer's log-probs.
      ended: [B, G] bool, True if the completion ends with an EOS or a stop id (both are among `eos_token_ids`), or with
        a text of `stop`.
      present: for several turns [B, G, T] bool, True from the first token of a completion to its last; `mask` is True
        on the sampled ones, and `ended` where `answers` returned None.

    Every call receives the `params` to sample from. All calls of a run receive the same `key`, which together with
    `prompt_indices` determines samples that a resumed run reproduces. With `rollout_ahead` the engine is called from
    another thread. With several processes each of them calls it, and the first process's result is used.

    Two attributes are optional. `follow(policy, params)` sets the params of later calls. With `rollout_ahead` it is
    called first, and the engine then gets only shapes as `params`, because the trainer's update changes the arrays in
    place. `measured` is a dict of numbers about the last call, which become metrics of the run.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Completions: ...


def check_sampler(sampler: object, interaction: Interaction | None = None, ends: TurnEnds = BY_EOS) -> None:
    """Raise a `ValueError` unless a run can call this sampler with `generate`'s arguments by name.

    Tools and environments need an argument `answers` and one process; stop texts and a turn length need their
    arguments.
    """
    wanted = f"give a function with arguments of generate ({', '.join(ARGUMENTS)}), or None for generate itself"
    if not callable(sampler):
        raise ValueError(f"sampler is {show(sampler)}: {wanted}")
    parameters, takes_all = parameters_of(sampler), takes_everything(sampler)
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    unknown = [
        p.name for p in required if p.name not in (*ARGUMENTS, "policy", "answers") or p.kind is p.POSITIONAL_ONLY
    ]
    if unknown:
        raise ValueError(f"sampler requires {', '.join(unknown)}, which is not passed by name: {wanted}")
    named, needed = {p.name for p in parameters}, {"stop": ends.stop, "max_turn_length": ends.max_turn_length}
    untaken = [name for name, value in needed.items() if value and name not in named and not takes_all]
    if untaken:
        raise ValueError(f"sampler does not take {' and '.join(untaken)}: give one that does, or None")
    if interaction is not None and "answers" not in named:
        raise ValueError(
            "tools and environment_factory: sampler makes completions of one turn; give one that takes `answers`, such"
            " as engines.vllm, or None"
        )
    if interaction is not None and jax.process_count() > 1:
        raise ValueError("tools and environment_factory: sampler works with one process only; leave it out")


def generate_by(
    sampler: Sampler,
    policy: Policy,
    model: Model,
    params: Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    answers: Answers | None = None,
    on_host: bool = True,
    **settings: Any,
) -> Completions:
    """`generate` by an engine: its completions, validated and on the host. All processes return the first one's."""
    every = {"model": model, "params": params, "prompts": prompts, "key": key, "answers": answers, "policy": policy}
    every |= settings | {"eos_token_ids": (*policy.eos_token_ids, *settings["stop_token_ids"])}
    named = {p.name for p in parameters_of(sampler)} | ({*ARGUMENTS} if takes_everything(sampler) else set())
    returned = sampler(**{name: value for name, value in every.items() if name in named})
    completions = read_completions(
        returned,
        (prompts.tokens.shape[0], settings["num_generations"], settings["max_completion_length"]),
        vocab_size=vocab_size(model, params),
        pad_token_id=policy.pad_token_id,
        turns=answers is not None,
    )
    if jax.process_count() > 1:
        completions = jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x))[0], completions)
    return completions


def with_old_log_probs(result: RolloutResult, updater: Updater, params: Params) -> RolloutResult:
    """An engine's completions with their log-probs under the params they were sampled from, by the trainer's scorer."""
    completions = result.completions
    t = updater.columns(int(lengths_of(np.asarray(completions.mask)).max()))
    old = fetch(updater.score(params, result.prompts, completions.tokens[:, :, :t], completions.mask[:, :, :t]))
    padded = _padded(old, completions.mask.shape[-1], 0)
    return result._replace(completions=completions.replace(old_log_probs=padded))


def read_completions(
    returned: object, shape: tuple[int, int, int], *, vocab_size: int, pad_token_id: int, turns: bool = False
) -> Completions:
    """An engine's completions, validated, padded to `shape` [B, G, T], and zero where the mask is False."""
    if not isinstance(returned, Completions):
        raise ValueError(f"sampler returned {show(returned)}: return grpo_jax.Completions, as generate does")
    tokens, log_probs = _array(returned, "tokens", "iu"), _array(returned, "log_probs", "f")
    mask, ended = _array(returned, "mask", "b"), _array(returned, "ended", "b")
    b, g, longest = shape
    t = tokens.shape[-1] if tokens.ndim == 3 else 0
    if tokens.shape != (b, g, t) or not 1 <= t <= longest:
        raise ValueError(
            f"sampler returned tokens of the shape {tokens.shape}: make it ({b}, {g}, T), with T from 1 to"
            f" max_completion_length = {longest}"
        )
    present = _array(returned, "present", "b") if turns and returned.present is not None else mask
    arrays = {"mask": mask, "log_probs": log_probs, "ended": ended, "present": present}
    for name, value in arrays.items():
        right = (b, g) if name == "ended" else (b, g, t)
        if value.shape != right:
            raise ValueError(f"sampler returned {name} of the shape {value.shape}: make it {right}, as tokens has it")
    lengths = present.sum(axis=-1)
    _refuse(
        (present != (np.arange(t) < lengths[..., None])) | (mask & ~present) | ~mask[..., :1],
        mask,
        "a mask that is not True from the first token of a completion to its last, with one token at least"
        if present is mask
        else "a completion whose first token it did not sample, or with a gap in present",
    )
    _refuse(
        present & ((tokens < 0) | (tokens >= vocab_size)), tokens, f"a token outside of the vocabulary of {vocab_size}"
    )
    bad = ~np.isfinite(log_probs) | (log_probs > ROUNDING)
    _refuse(mask & bad, log_probs, "a log-prob that is not a finite number ≤ 0: give the natural log of a probability")
    return Completions(
        tokens=_padded(np.where(present, tokens, pad_token_id).astype(np.int32), longest, pad_token_id),
        mask=_padded(mask, longest, False),
        log_probs=_padded(np.where(mask, log_probs, 0).astype(np.float32), longest, 0),
        ended=ended,
        present=_padded(present, longest, False) if turns else None,
    )


def mismatch(batch: Batch, config: GRPOConfig) -> dict[str, float]:
    """Metrics of |log π_old − log π_sampler| and of the importance weights; {} for a batch of the built-in sampler.

    Weights are counted over tokens in the token modes of `sampler_correction`, and over completions in the others.
    """
    mask = np.asarray(batch.mask)
    if batch.old_log_probs is None or not mask.any():
        return {}
    gaps = np.abs(np.asarray(batch.old_log_probs) - np.asarray(batch.sampling_log_probs))[mask]
    found = {"log_prob_difference_mean": gaps.mean(), "log_prob_difference_max": gaps.max()}
    weights = sampler_correction_weights(batch, config)
    if weights is not None:
        w = np.asarray(weights)[mask if weights.ndim == mask.ndim else mask.any(axis=-1)]
        found |= {f"importance_weight_{kind}": getattr(w, kind)() for kind in ("mean", "min", "max")}
    return {f"sampler/{name}": float(value) for name, value in found.items()}


def _array(returned: Completions, name: str, kinds: str) -> Any:
    """A field of the completions as a NumPy array; raises a `ValueError` unless its dtype is of one of these kinds."""
    value, wanted = getattr(returned, name), {"iu": "integers", "f": "floats", "b": "bool"}[kinds]
    try:
        value = np.asarray(fetch(value))
    except Exception as error:
        raise ValueError(
            f"sampler returned {name} that is not an array on the host ({error}): give {wanted}"
        ) from error
    if value.dtype.kind not in kinds and not (kinds == "f" and jnp.issubdtype(value.dtype, jnp.floating)):
        raise ValueError(f"sampler returned {name} of the dtype {value.dtype}: make it {wanted}")
    return value


def _refuse(bad: np.ndarray, values: np.ndarray, what: str) -> None:
    """Raise a `ValueError` with the place of the first bad value, if there is one."""
    if bad.any():
        b, g, t = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"sampler returned {what}; prompt {b}, completion {g}, token {t} has {values[b, g, t]}")


def _padded(x: np.ndarray, length: int, value: Any) -> Any:
    """[B, G, T] padded to T = `length`."""
    return np.pad(x, ((0, 0), (0, 0), (0, length - x.shape[-1])), constant_values=value)
