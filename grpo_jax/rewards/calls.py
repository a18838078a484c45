"""Calls to reward functions, validation of their results, and reward metrics.

Reward functions follow TRL's contract (`grpo_jax.types.RewardFn`). All lists have B·G entries in prompt-major order:

```
prompts          p0    p0    p1    p1          the G completions of a prompt are adjacent
completions      c00   c01   c10   c11         a string, or [{"role": "assistant", "content": string}]
completion_ids   [..]  [..]  [..]  [..]        token ids without padding, including the EOS, if any
answer           a0    a0    a1    a1          one argument per dataset column
returned         1.0   0.0   None  1.0         None: this function does not score the completion
```
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from grpo_jax.messages import show
from grpo_jax.rewards.contract import (
    Log,
    RewardError,
    RewardWorkerError,
    TrainerState,
    as_list,
    check_reward_fns,
    reward_names,
    select_inputs,
)
from grpo_jax.rewards.outcomes import Failures, RewardParts, describe_failure, read_outcome, read_reward

if TYPE_CHECKING:
    from grpo_jax.types import Messages, RewardFn, Row

_Result = TypeVar("_Result")

WARNING_FRACTION = 0.1
"""Maximum fraction of completions on which a reward function may fail without a warning."""


class Rewards(NamedTuple):
    """Rewards that K functions returned for a batch, and values that the functions logged.

    Attributes:
      values: rewards [B, G, K] float32, finite, or NaN for "not scored".
      stats: metrics. For each function, `rewards/<name>/mean` and `/std` (ddof 1, as in TRL) over scored completions,
        of which `/mean` needs at least one and `/std` two (otherwise it is omitted), `/missing` (fraction of
        completions without a score), `/errors` (number of completions affected by errors) and `/seconds`.
        `rewards/unscored` is the fraction of completions that no function scored.
      parts: rewards per turn or token, if a function returned them. `values` contains the sum for each completion.
      logged_metrics: values logged with `log_metric`, keyed by name.
      logged_columns: values logged with `log_extra`, one dict for each of the B·G completions.
      completions: the B·G completions as passed to the functions.
    """

    values: np.ndarray
    stats: Mapping[str, float] = {}
    parts: Sequence[RewardParts] = ()
    logged_metrics: Mapping[str, list[float]] = {}
    logged_columns: Sequence[Row] = ()
    completions: Sequence[str | Messages] = ()


def compute_rewards(
    reward_fns: RewardFn | Sequence[RewardFn],
    *,
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    num_generations: int,
    turn_counts: Sequence[int] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    trainer_state: TrainerState | None = None,
    on_error: str = "raise",
) -> Rewards:
    """Compute rewards for B·G completions with K reward functions.

    Each function is called once with the keyword arguments that it accepts, including `trainer_state`,
    `log_metric(name, value)` and `log_extra(column, values)`. Asynchronous functions run concurrently, after the
    synchronous functions, in one event loop per process, so they can reuse clients and locks. `turn_counts` is the
    number of turns in each completion; None means one turn each.

    Valid values are None, numbers that are finite in float32, lists with a number per turn, and arrays with a number
    per token. An error is an exception, an invalid value, or a result that does not have B·G values. If `on_error`
    is "raise", RewardError is raised for the first error. If it is "none", the function does not score the completion
    (or any completion, if the whole call failed). `RewardWorkerError` is raised in either case.
    """
    fns, columns = as_list(reward_fns), dict(columns or {})
    columns.pop("prompt", None)
    check_reward_fns(fns, columns)
    inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
    count = len(completions)
    for name, values in inputs.items():
        if len(values) != count:
            raise ValueError(f"{name} must have B·G={count} entries, one per completion; got {len(values)}")
    if num_generations < 1 or count == 0 or count % num_generations:
        raise ValueError(f"num_generations={num_generations} must divide the number of completions (> 0); got {count}")

    names, log = reward_names(fns), Log(count)
    extras = {"trainer_state": trainer_state or TrainerState(), "log_metric": log.metric, "log_extra": log.extra}
    outcomes, seconds = _call_all(fns, inputs | extras)
    rewards = np.empty((count, len(fns)), np.float32)
    call_stats: dict[str, float] = {}
    parts: list[RewardParts] = []
    lengths = [len(ids) for ids in completion_ids]
    for k, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
        read_item = functools.partial(
            read_reward, function=k, turn_counts=turn_counts or [1] * count, token_counts=lengths, parts=parts
        )
        rewards[:, k], failures = read_outcome(outcome, count, read_item)
        errors = count if None in failures else len(failures)
        if failures and (on_error == "raise" or errors > WARNING_FRACTION * count):
            explanation, first = _explain(name, failures, inputs, num_generations), next(iter(failures.values()))
            if on_error == "raise":
                fix = "Fix the error, or set on_reward_error='none' (on_error in compute_rewards) to count the affected"
                fix += " completions as not scored"
                raise RewardError(f"{explanation}. {fix}") from (first if isinstance(first, BaseException) else None)
            warnings.warn(f"no score for {errors} of {count} completions: {explanation}", RuntimeWarning, stacklevel=2)
        call_stats |= {f"rewards/{name}/errors": float(errors), f"rewards/{name}/seconds": seconds[k]}
    grouped, stats = rewards.reshape(-1, num_generations, len(fns)), reward_stats(names, rewards) | call_stats
    return Rewards(grouped, stats, parts, log.metrics, log.columns, list(completions))


def _call_all(fns: Sequence[RewardFn], inputs: Mapping[str, object]) -> tuple[list[object], list[float]]:
    """Call all functions. Returns each one's result or exception, and its time in seconds. Raises RewardWorkerError."""
    outcomes, seconds = list[object](), list[float]()
    for fn in fns:
        started = time.perf_counter()
        try:
            outcomes.append(fn(**select_inputs(fn, inputs)))
        except (Exception, SystemExit) as error:
            outcomes.append(error)
        seconds.append(time.perf_counter() - started)
    waiting = {k: outcome for k, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)}
    if waiting:
        for k, (outcome, elapsed) in zip(waiting, _await_all(list(waiting.values())), strict=True):
            outcomes[k] = outcome
            seconds[k] += elapsed
    for outcome in outcomes:
        if isinstance(outcome, RewardWorkerError):
            raise outcome
    return outcomes, seconds


def _await_all(awaitables: Sequence[Awaitable[object]]) -> list[tuple[object, float]]:
    """Await all awaitables concurrently. Returns pairs (result or exception, time in seconds)."""

    async def outcome(awaitable: Awaitable[object]) -> tuple[object, float]:
        started = time.perf_counter()
        result: object
        try:
            result = await awaitable
        except BaseException as error:  # also SystemExit and CancelledError
            result = error
        return result, time.perf_counter() - started

    async def together() -> list[tuple[object, float]]:
        return await asyncio.gather(*map(outcome, awaitables))

    return run_on_event_loop(together())


def run_on_event_loop(
    coroutine: Coroutine[Any, Any, _Result], wait: Callable[[Future[_Result]], _Result] = Future.result
) -> _Result:
    """Run a coroutine in the event loop's thread and return `wait(future)`. If `wait` raises, cancel the coroutine."""
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return wait(future)
    except BaseException:
        future.cancel()
        raise


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop for async code. It runs in a separate thread, since notebooks already run a loop."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # asyncio also raises a task's exception here
                return loop.run_forever()

    thread = threading.Thread(target=serve, name="grpo_jax-rewards", daemon=True)
    thread.start()

    def close() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=1.0)
        if not thread.is_alive():
            loop.close()

    atexit.register(close)
    return loop


def _explain(name: str, failures: Failures, inputs: Mapping[str, Sequence[object]], num_generations: int) -> str:
    """Describe the first error, with the prompt and completion if it affects a single completion."""
    index, failure = next(iter(failures.items()))
    message = f"reward function {name!r} {describe_failure(failure)}"
    if index is None:
        return message
    prompt, generation = divmod(index, num_generations)
    message += f" for prompt {prompt} of the batch, completion {generation} of its group"
    message += f" (prompt {show(inputs['prompts'][index])}, completion {show(inputs['completions'][index])})"
    return message + (f", the first of {len(failures)} errors" if len(failures) > 1 else "")


def reward_stats(names: Sequence[str], rewards: np.ndarray) -> dict[str, float]:
    """Compute `Rewards.stats` from rewards [B·G, K], without `/errors` and `/seconds`."""
    stats: dict[str, float] = {}
    for name, scores in zip(names, rewards.T.astype(np.float64), strict=True):
        scored = scores[~np.isnan(scores)]
        stats |= {f"rewards/{name}/mean": float(scored.mean())} if scored.size > 0 else {}
        stats |= {f"rewards/{name}/std": float(scored.std(ddof=1))} if scored.size > 1 else {}
        stats[f"rewards/{name}/missing"] = 1.0 - scored.size / len(scores)
    stats["rewards/unscored"] = float(np.isnan(rewards).all(axis=1).mean())
    return stats


def total_rewards(rewards: np.ndarray, weights: Sequence[float] | None = None) -> np.ndarray:
    """Compute Σ_k w_k R_k over the functions k that scored each completion. Maps [..., K] to [...] float64.

    The total is NaN if no function with a nonzero weight scored the completion. If `weights` is None, all weights are
    1. The metric `reward` is the mean of the totals that are not NaN.
    """
    w = np.array([1.0] * rewards.shape[-1] if weights is None else weights)
    weighted = np.where(w == 0, np.nan, rewards * w)
    return np.where(np.isnan(weighted).all(axis=-1), np.nan, np.nansum(weighted, axis=-1))


def mean_of_scored(totals: np.ndarray) -> float:
    """Average all values that are not NaN. Returns NaN if there are none."""
    scored = totals[~np.isnan(totals)]
    return float(scored.mean()) if scored.size else float("nan")


def means_of(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Compute the mean of each list. The result has the same keys."""
    return {name: float(np.mean(items)) for name, items in values.items()}
