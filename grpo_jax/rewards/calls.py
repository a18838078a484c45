"""Calling reward functions, validating what they return, and the metrics of a batch of rewards.

A reward function has TRL's contract (`grpo_jax.types.RewardFn`). All lists have B·G entries in prompt-major order:

```
prompts          p0    p0    p1    p1          the G completions of a prompt are adjacent
completions      c00   c01   c10   c11         text, or [{"role": "assistant", "content": text}]
completion_ids   [..]  [..]  [..]  [..]        without padding, with the EOS
answer           a0    a0    a1    a1          each column of the dataset, under its own name
returned         1.0   0.0   None  1.0         None: the completion is not scored by this function
```
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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.messages import show
from grpo_jax.rewards.contract import (
    Log,
    RewardError,
    SetupError,
    TrainerState,
    as_list,
    call_selected,
    check_reward_fns,
    reward_names,
)
from grpo_jax.rewards.outcomes import Faults, RewardParts, describe_fault, read_outcome, read_parts

if TYPE_CHECKING:
    from grpo_jax.types import Messages, RewardFn, Row

LOUD_SHARE = 0.1
"""A warning is issued if more than this share of a function's completions has a fault."""


class Rewards(NamedTuple):
    """The rewards of a batch of completions by K functions, and everything that the functions logged.

    Attributes:
      values: [B, G, K] float32, finite, or NaN for "not scored".
      stats: for each function `rewards/<name>/mean` and `/std` over the scored completions (ddof 1 as in TRL; left out
        if there are too few), `/missing` (share without a score, faults included), `/errors` (completions with a
        fault) and `/seconds`; and `rewards/unscored`, the share of completions that no function scored.
      parts: the rewards that are sums over turns or tokens.
      metrics: the numbers that functions logged by `log_metric`, by name.
      columns: B·G dicts of the values that functions logged by `log_extra`.
      completions: B·G completions as the functions received them.
    """

    values: np.ndarray
    stats: dict[str, float]
    parts: list[RewardParts]
    metrics: dict[str, list[float]]
    columns: list[Row]
    completions: list[str | Messages]


def compute_rewards(
    reward_fns: RewardFn | Sequence[RewardFn],
    *,
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    num_generations: int,
    turns: Sequence[int] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    trainer_state: TrainerState | None = None,
    on_error: str = "raise",
) -> Rewards:
    """Score completions by every reward function.

    Each function is called once, with the keywords that it takes, among them `trainer_state`, `log_metric(name, value)`
    and `log_extra(column, values)`. Asynchronous functions run concurrently, after the others, on one event loop that
    lives as long as the process, so clients and locks that they keep stay usable.

    Args:
      reward_fns: K reward functions, or one.
      prompts: B·G prompts in prompt-major order, each repeated for its completions.
      completions: B·G completions, text or lists of messages.
      completion_ids: B·G lists of token ids, without padding.
      num_generations: G.
      turns: B·G, the number of turns of each completion. None: functions return one number for each completion.
      columns: the other columns of the dataset, each B·G long.
      trainer_state: the progress of the run; None: step 0.
      on_error: "raise" stops at the first fault. "none" counts faults and scores them as missing: one completion if the
        fault is in one value, all completions if the function failed as a whole.

    Raises:
      RewardError: on_error="raise", and a function raised, did not return a list of B·G values, or returned a value
        that is neither a finite number (as float32) nor None. NaN is a fault; None means "not scored".
      SetupError: for every `on_error`: a function logs under a name that the run uses, or worker processes cannot
        import an isolated function.
      ValueError: arguments of different lengths, or as `check_reward_fns`.
    """
    fns, columns = as_list(reward_fns), dict(columns or {})
    columns.pop("prompt", None)
    check_reward_fns(fns, columns)
    inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
    count = len(completions)
    for name, values in inputs.items():
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries and completions has {count}: all are B·G long")
    if num_generations < 1 or count == 0 or count % num_generations:
        raise ValueError(f"num_generations is {num_generations}, which does not divide the {count} completions")

    names, log = reward_names(fns), Log(count)
    extras = {"trainer_state": trainer_state or TrainerState(), "log_metric": log.metric, "log_extra": log.extra}
    outcomes, seconds = _call_all(fns, inputs | extras)
    rewards = np.empty((count, len(fns)), np.float32)
    counted: dict[str, float] = {}
    parts: list[RewardParts] = []
    lengths = [len(ids) for ids in completion_ids]
    for k, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
        read = None
        if turns is not None:
            read = functools.partial(read_parts, function=k, turns=turns, tokens=lengths, found=parts)
        rewards[:, k], faults = read_outcome(outcome, count, read)
        errors = count if None in faults else len(faults)
        if faults and (on_error == "raise" or errors > LOUD_SHARE * count):
            explanation, first = _explain(name, faults, inputs, num_generations), next(iter(faults.values()))
            if on_error == "raise":
                fix = "Fix it, or score such completions as missing: on_error='none' (on_reward_error in GRPOConfig)"
                raise RewardError(f"{explanation}. {fix}") from (first if isinstance(first, BaseException) else None)
            message = f"{errors} of {count} completions scored as missing: {explanation}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        counted |= {f"rewards/{name}/errors": float(errors), f"rewards/{name}/seconds": seconds[k]}
    return Rewards(
        values=rewards.reshape(-1, num_generations, len(fns)),
        stats=reward_stats(names, rewards) | counted,
        parts=parts,
        metrics=log.metrics,
        columns=log.columns,
        completions=list(completions),
    )


def _call_all(fns: Sequence[RewardFn], inputs: Mapping[str, object]) -> tuple[list[object], list[float]]:
    """Call every function; return the result of each, or its exception, and its seconds."""
    outcomes: list[object] = []
    seconds: list[float] = []
    for fn in fns:
        started = time.perf_counter()
        try:
            outcomes.append(call_selected(fn, inputs))
        except (Exception, SystemExit) as error:
            outcomes.append(error)
        seconds.append(time.perf_counter() - started)
    waiting = {k: outcome for k, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)}
    if waiting:
        for k, (outcome, elapsed) in zip(waiting, _run_together(list(waiting.values())), strict=True):
            outcomes[k] = outcome
            seconds[k] += elapsed
    for outcome in outcomes:
        if isinstance(outcome, SetupError):
            raise outcome
    return outcomes, seconds


def _run_together(awaitables: Sequence[Awaitable[object]]) -> list[tuple[object, float]]:
    """Await all of them on the event loop; return each result or exception, and its seconds."""

    async def outcome(awaitable: Awaitable[object]) -> tuple[object, float]:
        started = time.perf_counter()
        result: object
        try:
            result = await awaitable
        except BaseException as error:  # a SystemExit would end the loop's thread, and this one would wait forever
            result = error
        return result, time.perf_counter() - started

    async def together() -> list[tuple[object, float]]:
        return await asyncio.gather(*map(outcome, awaitables))

    future = asyncio.run_coroutine_threadsafe(together(), event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of asynchronous rewards, in its own thread: a notebook's thread already runs a loop."""
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


def _explain(name: str, faults: Faults, inputs: Mapping[str, Sequence[object]], num_generations: int) -> str:
    """Describe the first fault: the function, the fault, and the prompt and completion if it concerns one."""
    index, fault = next(iter(faults.items()))
    message = f"reward function {name!r} {describe_fault(fault)}"
    if index is None:
        return message
    prompt, generation = divmod(index, num_generations)
    message += f" for prompt {prompt} of the batch, completion {generation} of its group"
    message += f" (prompt {show(inputs['prompts'][index])}, completion {show(inputs['completions'][index])})"
    return message + (f", and has faults in {len(faults) - 1} more" if len(faults) > 1 else "")


# Statistics -----------------------------------------------------------------------------------------------------------


def reward_stats(names: Sequence[str], rewards: np.ndarray) -> dict[str, float]:
    """Return `Rewards.stats` for rewards [B·G, K], without faults and seconds."""
    stats: dict[str, float] = {}
    for name, scores in zip(names, rewards.T.astype(np.float64), strict=True):
        scored = scores[~np.isnan(scores)]
        stats |= {f"rewards/{name}/mean": float(scored.mean())} if scored.size > 0 else {}
        stats |= {f"rewards/{name}/std": float(scored.std(ddof=1))} if scored.size > 1 else {}
        stats[f"rewards/{name}/missing"] = 1.0 - scored.size / len(scores)
    stats["rewards/unscored"] = float(np.isnan(rewards).all(axis=1).mean())
    return stats


def total_rewards(rewards: np.ndarray, weights: Sequence[float] | None = None) -> np.ndarray:
    """Return Σ_k w_k R_k over the functions that scored a completion, [..., K] → [...] float64; NaN if none did.

    `weights` None: ones. The metric `reward` of a rollout and of an evaluation is the mean of these.
    """
    weighted = rewards * np.array([1.0] * rewards.shape[-1] if weights is None else weights)
    return np.where(np.isnan(rewards).all(axis=-1), np.nan, np.nansum(weighted, axis=-1))


def mean_of_scored(totals: np.ndarray) -> float:
    """Return the mean of the numbers that are not NaN; NaN if there are none."""
    scored = totals[~np.isnan(totals)]
    return float(scored.mean()) if scored.size else float("nan")


def means_of(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of the numbers under each name."""
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}
