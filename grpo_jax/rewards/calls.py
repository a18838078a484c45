"""Calling reward functions, and a close look at what they return.

A reward function has TRL's contract (`grpo_jax.types.RewardFn`). All lists are in prompt-major order, B·G long:

```
prompts          p0    p0    p1    p1          the G completions of a prompt stand together
completions      c00   c01   c10   c11         text, or [{"role": "assistant", "content": text}]
completion_ids   [..]  [..]  [..]  [..]        without padding, the EOS among them
answer           a0    a0    a1    a1          each column of the dataset, under its own name
returned         1.0   0.0   None  1.0         None: this function has no score for this completion
```

What a function returns is looked at closely, since it decides what is learned: a fault names the function, the prompt
and the completion.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import threading
import time
import warnings
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.messages import show
from grpo_jax.rewards.contract import (
    ON_ERROR,
    Faults,
    RewardError,
    SetupError,
    as_list,
    call_selected,
    check_reward_fns,
    describe_fault,
    own_frames,
    read_outcome,
    reward_names,
)
from grpo_jax.rewards.parts import PartReader, RewardParts

if TYPE_CHECKING:
    from grpo_jax.types import Json, Messages, RewardFn


def means_of(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of the numbers under each name."""
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


def total_rewards(rewards: np.ndarray, weights: Sequence[float] | None = None) -> np.ndarray:
    """Return Σ_k w_k R_k over the K functions that scored a completion, [..., K] → [...] float64; NaN where none did.

    `weights` None stands for ones. Its mean over the others is the metric `reward` of a rollout and of an evaluation.
    """
    weighted = rewards * np.array([1.0] * rewards.shape[-1] if weights is None else weights)
    return np.where(np.isnan(rewards).all(axis=-1), np.nan, np.nansum(weighted, axis=-1))


def mean_of_scored(totals: np.ndarray) -> float:
    """Return the mean of the numbers that are not NaN; NaN where all are."""
    scored = totals[~np.isnan(totals)]
    return float(scored.mean()) if scored.size else float("nan")


def compute_rewards(
    reward_fns: RewardFn | Sequence[RewardFn],
    *,
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    num_generations: int,
    turns: Sequence[int] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    extras: Json | None = None,
    on_error: str = "raise",
    loud_share: float = 0.1,
) -> tuple[np.ndarray, dict[str, float], list[RewardParts]]:
    """Score completions by every reward function.

    Each function is called once, with those keywords that it takes. Asynchronous functions run together, after the
    others, on one event loop that lives as long as the process (so that clients and locks that they keep stay usable).

    Args:
      reward_fns: K reward functions, or one.
      prompts: B·G prompts in prompt-major order, each repeated for its completions.
      completions: B·G completions, text or lists of messages.
      completion_ids: B·G lists of token ids, without padding.
      num_generations: G.
      turns: B·G, the number of turns of each completion; None: functions return one number for each completion.
      columns: the other columns of the dataset, each B·G long.
      extras: objects, not lists, given as they are to functions that name them among their arguments (a `**kwargs` does
        not): `Extras.given()`, in TRL's scripts by the same names.
      on_error: "raise" stops at the first fault. "none" scores what is at fault as missing (one completion where the
        fault is in one value, all of a function's completions where it failed as a whole) and counts it.
      loud_share: with "none", warn if more than this share of a function's completions is at fault.

    Returns:
      rewards: [B, G, K] float32, finite, or NaN for "not scored".
      stats: for each function `rewards/<name>/mean` and `/std` (over the scored completions, ddof 1 as in TRL; left out
        where there are too few), `/missing` (share without a score, faults included), `/errors` (number of completions
        at fault), `/seconds`; and `rewards/unscored`, the share of completions that no function scored.
      parts: of rewards that are sums over turns or tokens.

    Raises:
      RewardError: on_error="raise", and a function raised, returned no list of B·G values, or a value that is not a
        finite number (as float32) or None. NaN is a fault: None is how a function says "not scored".
      SetupError: whatever `on_error` is: a function logs a metric or a column under a name of the run's own, or worker
        processes cannot import an isolated function.
      ValueError: arguments of different lengths, or as `check_reward_fns`.
    """
    fns, columns, extras = as_list(reward_fns), dict(columns or {}), dict(extras or {})
    columns.pop("prompt", None)
    check_reward_fns(fns, columns, extras=extras)
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error is {on_error!r}: choose one of {', '.join(map(repr, ON_ERROR))}")
    inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
    count = len(completions)
    for name, values in inputs.items():
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries and completions has {count}: all are B·G long")
    if num_generations < 1 or count == 0 or count % num_generations:
        raise ValueError(f"num_generations is {num_generations}, which does not divide the {count} completions")

    names = reward_names(fns)
    outcomes, seconds = _call_all(fns, inputs, extras)
    rewards = np.empty((count, len(fns)), np.float32)
    stats: dict[str, float] = {}
    parts: list[RewardParts] = []
    for k, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
        read = None if turns is None else PartReader(k, turns, [len(ids) for ids in completion_ids])
        scores, faults = read_outcome(outcome, count, read)
        parts += [] if read is None else read.parts
        if faults and on_error == "raise":
            first = next(iter(faults.values()))
            if isinstance(first, BaseException):
                first.__traceback__ = own_frames(first.__traceback__)
            raise RewardError(
                f"{_explain(name, faults, inputs, num_generations)}. Fix it, or let such completions be scored as "
                "missing with on_error='none' (on_reward_error in GRPOConfig)"
            ) from (first if isinstance(first, BaseException) else None)
        errors = count if None in faults else len(faults)
        if errors > loud_share * count:
            explanation = _explain(name, faults, inputs, num_generations)
            warnings.warn(
                f"{errors} of {count} completions scored as missing: {explanation}", RuntimeWarning, stacklevel=3
            )
        rewards[:, k] = scores
        stats[f"rewards/{name}/errors"] = float(errors)
        stats[f"rewards/{name}/seconds"] = seconds[k]
    return rewards.reshape(-1, num_generations, len(fns)), reward_stats(names, rewards) | stats, parts


def reward_stats(names: Sequence[str], rewards: np.ndarray) -> dict[str, float]:
    """Return the stats of `compute_rewards` for rewards [B·G, K], but for faults and seconds."""
    stats: dict[str, float] = {}
    for name, scores in zip(names, rewards.T.astype(np.float64), strict=True):
        scored = scores[~np.isnan(scores)]
        stats |= {f"rewards/{name}/mean": float(scored.mean())} if scored.size > 0 else {}
        stats |= {f"rewards/{name}/std": float(scored.std(ddof=1))} if scored.size > 1 else {}
        stats[f"rewards/{name}/missing"] = 1.0 - scored.size / len(scores)
    stats["rewards/unscored"] = float(np.isnan(rewards).all(axis=1).mean())
    return stats


def _call_all(
    fns: Sequence[RewardFn], inputs: Mapping[str, Sequence[Any]], extras: Json
) -> tuple[list[Any], list[float]]:
    """Call every function; return the result of each, or its exception, and its seconds."""
    outcomes: list[Any] = []
    seconds: list[float] = []
    for fn in fns:
        started = time.perf_counter()
        try:
            outcomes.append(call_selected(fn, inputs, extras))
        except (Exception, SystemExit) as error:
            outcomes.append(error)
        seconds.append(time.perf_counter() - started)
    waiting = [k for k, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    if waiting:
        for k, (outcome, elapsed) in zip(waiting, _run_together([outcomes[k] for k in waiting]), strict=True):
            outcomes[k] = outcome
            seconds[k] += elapsed
    for outcome in outcomes:
        if isinstance(outcome, SetupError):
            raise outcome
    return outcomes, seconds


def _run_together(awaitables: Sequence[Awaitable[Any]]) -> list[tuple[Any, float]]:
    """Await all at once on the event loop for rewards; return each result or exception, and its seconds."""

    async def outcome(awaitable: Awaitable[Any]) -> tuple[Any, float]:
        started = time.perf_counter()
        result: Any
        try:
            result = await awaitable
        except BaseException as error:  # also SystemExit, which would end the thread of the loop and leave us waiting
            result = error
        return result, time.perf_counter() - started

    async def together() -> list[tuple[Any, float]]:
        return await asyncio.gather(*map(outcome, awaitables))

    future = asyncio.run_coroutine_threadsafe(together(), event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Start, at the first use, an event loop in a thread of its own: a notebook's thread has a running loop already."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="grpo_jax-rewards", daemon=True)
    thread.start()

    def close() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=1.0)
        if not thread.is_alive():
            loop.close()

    atexit.register(close)
    return loop


def _explain(name: str, faults: Faults, inputs: Mapping[str, Sequence[Any]], num_generations: int) -> str:
    """Describe the first fault: the function, the fault, and the prompt and completion if it concerns one."""
    index, fault = next(iter(faults.items()))
    message = f"reward function {name!r} {describe_fault(fault)}"
    if index is None:
        return message
    prompt, generation = divmod(index, num_generations)
    message += f" for prompt {prompt} of the batch, completion {generation} of its group"
    message += f" (prompt {show(inputs['prompts'][index])}, completion {show(inputs['completions'][index])})"
    return message + (f", and has faults in {len(faults) - 1} more" if len(faults) > 1 else "")
