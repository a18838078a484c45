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
import dataclasses
import difflib
import functools
import inspect
import itertools
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from grpo_jax.fields import raise_all

SAMPLED = ("prompts", "completions", "completion_ids")
EXTRAS = ("trainer_state", "log_metric", "log_extra")
"""What TRL gives besides lists; functions that name them get them from `Extras.given`."""
ON_ERROR = ("raise", "none")
# As a Python float: against NumPy's own scalar a greater number would be rounded to float32 first, and overflow.
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class RewardError(ValueError):
    """A reward function failed, or returned something that is no list of rewards."""


class PartialRewards(RewardError):
    """Some completions could not be scored: the scores of the others, and what happened to each of these.

    Attributes:
      values: one float or None a completion.
      faults: what went wrong, by the index of the completion; under None what concerns all of them.
    """

    def __init__(self, values: Sequence[float | None], faults: Mapping[Any, BaseException | str]):
        index, fault = next(iter(faults.items()))
        which = "all" if index is None else f"{len(faults)} of {len(values)}; completion {index}"
        super().__init__(f"completions without a score because of a fault: {which} {describe_fault(fault)}")
        self.values = list(values)
        self.faults = dict(faults)


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """How far a run is, for reward functions that change on the way: TRL's `trainer_state`, as far as it is used.

    Attributes:
      global_step: optimizer steps done.
      max_steps: those of the whole run; 0 outside of one.
      epoch: times the dataset has been gone through.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


class Extras:
    """What reward functions are given besides lists, and what they leave there; one for each batch.

    Example:
      >>> extras = Extras(TrainerState(global_step=3))
      >>> extras.log_metric("length", 2.0)
      >>> extras.log_metric("length", 4.0)
      >>> means_of(extras.values()), extras.given()["trainer_state"].global_step
      ({'length': 3.0}, 3)
    """

    def __init__(self, state: TrainerState | None = None):
        self._state = state or TrainerState()
        self._values: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def given(self) -> dict[str, Any]:
        """The extras by their names, for `compute_rewards`."""
        return {"trainer_state": self._state, "log_metric": self.log_metric, "log_extra": self.log_extra}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number with the metrics of the step; of several under one name the mean."""
        self._values.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a value for each completion beside it, in `completions.jsonl`."""
        self._columns[column] = list(values)

    def values(self) -> dict[str, list[float]]:
        """All numbers that were logged, by their names."""
        return {name: list(values) for name, values in self._values.items()}

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Take what was kept since the last call, as one dict for each of `count` completions."""
        columns, self._columns = self._columns, {}
        for column, values in columns.items():
            if len(values) != count:
                raise RewardError(f"log_extra({column!r}, ...) has {len(values)} values for {count} completions.")
        return [{column: values[index] for column, values in columns.items()} for index in range(count)]

    def __reduce__(self) -> Any:
        raise TypeError(
            "log_metric and log_extra work in the process that trains: a reward function in workers cannot take them."
        )


def means_of(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of the numbers under each name."""
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


def reward_names(reward_fns: Callable[..., Any] | Sequence[Callable[..., Any]]) -> list[str]:
    """Return one name for each reward function, distinct, fit to be the key of a metric.

    Args:
      reward_fns: functions, partials of them, or objects with `__call__`.

    Returns:
      K names; of several functions with one name the second is called `name_2`, and so on.

    Example:
      >>> reward_names([len, lambda completions: 0, lambda completions: 1, functools.partial(len)])
      ['len', 'lambda', 'lambda_2', 'len_2']
    """
    names: list[str] = []
    for fn in _as_list(reward_fns):
        name = function_name(fn)
        copies = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        names.append(next(candidate for candidate in copies if candidate not in names))
    return names


def check_reward_fns(
    reward_fns: Callable[..., Any] | Sequence[Callable[..., Any]],
    columns: Iterable[str] | None,
    *,
    extras: Iterable[str] = (),
    argument: str = "the dataset",
) -> None:
    """Raise if a reward function needs an argument that nobody gives; to be called before anything is sampled.

    Args:
      reward_fns: K reward functions, or one.
      columns: the names of the dataset's columns; None: not known, and arguments are not looked at.
      extras: the names of what else is at hand, such as `trainer_state`.
      argument: what the caller calls the dataset, for the messages.

    Raises:
      ValueError: no function at all; something that is not callable; a column named like what was sampled; an argument
        without a default that is neither sampled, nor a column, nor an extra. Of several faults, all.

    Example:
      >>> check_reward_fns(lambda completions, anwser: [0.0], ["prompt", "answer"])
      Traceback (most recent call last):
      ValueError: reward function 'lambda' needs the argument 'anwser', which is no column of the dataset ...
    """
    fns = _as_list(reward_fns)
    if not fns:
        raise ValueError("reward_fns is empty: give at least one reward function")
    if columns is None:
        return
    columns, extras = [column for column in columns if column != "prompt"], list(extras)
    taken = sorted({*columns} & {*SAMPLED, *extras})
    problems = [f"{argument} has a column {name!r}, which the trainer itself gives: rename it" for name in taken]
    for fn, name in zip(fns, reward_names(fns), strict=True):
        problems += _signature_problems(fn, name, columns, extras, argument)
    if len(problems) == 1:
        raise ValueError(problems[0])
    raise_all("reward_fns", problems)


def _signature_problems(
    fn: Callable[..., Any], name: str, columns: list[str], extras: list[str], argument: str
) -> Iterator[str]:
    """Yield what keeps a function from being called."""
    given = [*SAMPLED, *columns, *extras]
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in _parameters(fn)):
        yield f"reward function {name!r} has positional-only arguments: they are given by keyword"
        return
    unknown = [wanted for wanted, required in arguments_of(fn).items() if required and wanted not in given]
    for wanted in unknown:
        near = difflib.get_close_matches(wanted, given, n=1)
        yield (
            f"reward function {name!r} needs the argument {wanted!r}, which is no column of {argument} "
            f"(columns: {', '.join(columns) or 'none'}; also given: {', '.join([*SAMPLED, *extras])})"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if not unknown and not _takes_everything(fn) and not {*arguments_of(fn)} & {*given}:
        yield (
            f"reward function {name!r} takes nothing that it could be given "
            f"({', '.join(given)}): if it makes a reward function, call it first: {name}(...)"
        )


def compute_rewards(
    reward_fns: Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    num_generations: int,
    columns: Mapping[str, Sequence[Any]] | None = None,
    extras: Mapping[str, Any] | None = None,
    on_error: str = "raise",
    loud_share: float = 0.1,
) -> tuple[np.ndarray, dict[str, float]]:
    """Score completions by every reward function.

    Each function is called once, with those keywords that it takes. Asynchronous functions run together, after the
    others, on one event loop that lives as long as the process (so that clients and locks that they keep stay usable).

    Args:
      reward_fns: K reward functions, or one.
      prompts: B·G prompts in prompt-major order, each repeated for its completions.
      completions: B·G completions, text or lists of messages.
      completion_ids: B·G lists of token ids, without padding.
      num_generations: G.
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

    Raises:
      RewardError: on_error="raise", and a function raised, returned no list of B·G values, or a value that is not a
        finite number (as float32) or None. NaN is a fault: None is how a function says "not scored".
      ValueError: arguments of different lengths, or as `check_reward_fns`.

    Example:
      >>> inputs = {"prompts": ["2+2=", "2+2="], "completions": ["4", "5"], "completion_ids": [[4], [5]]}
      >>> def correct(completions, answer):
      ...     return [float(text == truth) for text, truth in zip(completions, answer)]
      >>> rewards, stats = compute_rewards(correct, **inputs, columns={"answer": ["4", "4"]}, num_generations=2)
      >>> rewards.shape, rewards.ravel().tolist(), stats["rewards/correct/mean"]
      ((1, 2, 1), [1.0, 0.0], 0.5)
    """
    fns, columns, extras = _as_list(reward_fns), dict(columns or {}), dict(extras or {})
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
    for k, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
        scores, faults = read_outcome(outcome, count)
        if faults and on_error == "raise":
            first = next(iter(faults.values()))
            raise RewardError(
                f"{_explain(name, faults, inputs, num_generations)}. Mend it, or let such completions be scored as "
                "missing with on_error='none' (on_reward_error in GRPOConfig)"
            ) from (first if isinstance(first, BaseException) else None)
        errors = count if None in faults else len(faults)
        if errors > loud_share * count:
            explanation = _explain(name, faults, inputs, num_generations)
            warnings.warn(
                f"{errors} of {count} completions scored as missing: {explanation}", RuntimeWarning, stacklevel=2
            )
        rewards[:, k] = scores
        stats[f"rewards/{name}/errors"] = float(errors)
        stats[f"rewards/{name}/seconds"] = seconds[k]
    return rewards.reshape(-1, num_generations, len(fns)), reward_stats(names, rewards) | stats


def reward_stats(names: Sequence[str], rewards: np.ndarray) -> dict[str, float]:
    """Return what `compute_rewards` says of rewards [B·G, K], but for faults and seconds."""
    stats: dict[str, float] = {}
    for name, scores in zip(names, rewards.T, strict=True):
        scored = scores[~np.isnan(scores)]
        stats |= {f"rewards/{name}/mean": float(scored.mean())} if scored.size > 0 else {}
        stats |= {f"rewards/{name}/std": float(scored.std(ddof=1))} if scored.size > 1 else {}
        stats[f"rewards/{name}/missing"] = 1.0 - scored.size / len(scores)
    stats["rewards/unscored"] = float(np.isnan(rewards).all(axis=1).mean())
    return stats


def _as_list(reward_fns: Any) -> list[Callable[..., Any]]:
    """Return one or several reward functions as a list, all of them callable."""
    fns = [reward_fns] if callable(reward_fns) or isinstance(reward_fns, str) else list(reward_fns)
    for fn in fns:
        if not callable(fn):
            raise ValueError(
                f"reward_fns holds {fn!r}, which cannot be called: give functions (a reward model is wrapped in one)"
            )
    return fns


def function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function, of a partial's function, or of an object's class."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function; of a builtin without a signature, `**kwargs`."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def is_async(fn: Callable[..., Any]) -> bool:
    """Return whether a function, what a partial binds, or an object's `__call__` is declared `async`."""
    if isinstance(fn, functools.partial):
        return is_async(fn.func)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _takes_everything(fn: Callable[..., Any]) -> bool:
    """Return whether a function has `**kwargs`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(fn))


def arguments_of(fn: Callable[..., Any]) -> dict[str, bool]:
    """Return the keywords that a function names, and whether each is required.

    What hides behind `**kwargs` is said by an attribute `reward_arguments` of the same form.
    """
    # A keyword that a partial has bound is the user's choice; a column of that name must not replace it.
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {
        parameter.name: parameter.default is parameter.empty
        for parameter in _parameters(fn)
        if parameter.kind not in variadic and parameter.name not in bound
    }
    return named | dict(getattr(fn, "reward_arguments", {}))


def select_inputs(fn: Callable[..., Any], inputs: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> dict:
    """Return the keywords to call a function with: fresh lists, so that no function can change another's."""
    named = arguments_of(fn)
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    everything = _takes_everything(fn)
    chosen = {
        name: list(values) for name, values in inputs.items() if name in named or (everything and name not in bound)
    }
    return chosen | {name: value for name, value in (extras or {}).items() if name in named}


def split_inputs(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part what has one entry a completion, which comes as a list, from the extras, which come as they are."""
    lists = {name: values for name, values in inputs.items() if isinstance(values, (list, tuple))}
    return lists, {name: value for name, value in inputs.items() if name not in lists}


def _call_all(
    fns: Sequence[Callable[..., Any]], inputs: Mapping[str, Any], extras: Mapping[str, Any]
) -> tuple[list[Any], list[float]]:
    """Call every function; return what each returned, or the exception it raised, and its seconds."""
    outcomes, seconds = [], []
    for fn in fns:
        started = time.perf_counter()
        try:
            outcomes.append(fn(**select_inputs(fn, inputs, extras)))
        except (Exception, SystemExit) as error:
            outcomes.append(error)
        seconds.append(time.perf_counter() - started)
    waiting = [k for k, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    if waiting:
        for k, (outcome, elapsed) in zip(waiting, _run_together([outcomes[k] for k in waiting]), strict=True):
            outcomes[k] = outcome
            seconds[k] += elapsed
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

    future = asyncio.run_coroutine_threadsafe(together(), _event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
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


Faults = dict[int | None, BaseException | str]
"""What went wrong, by the index of the completion; under None what concerns all of them."""


def read_outcome(outcome: Any, count: int) -> tuple[np.ndarray, Faults]:
    """Read what a reward function returned into [count] float64, NaN for None, and what is wrong with it."""
    nothing = np.full(count, np.nan)
    if hasattr(outcome, "tolist"):  # arrays of NumPy, JAX, PyTorch: one transfer, not one for each element
        try:
            outcome = outcome.tolist()
        except Exception as error:  # an array may be a promise, and its computation fail only now
            outcome = error
    if isinstance(outcome, PartialRewards):
        values, faults = read_outcome(outcome.values, count)
        return values, faults | outcome.faults
    if isinstance(outcome, BaseException):
        return nothing, {None: outcome}
    if outcome is None:
        return nothing, {None: "returned None instead of a list (is its `return` missing?)"}
    if isinstance(outcome, (str, bytes, Mapping, set, frozenset)) or not isinstance(outcome, Iterable):
        wanted = f"a list with one float or None for each of the {count} completions is needed"
        return nothing, {None: f"returned {_short(outcome)}, a {type(outcome).__name__}; {wanted}"}
    try:
        items = list(itertools.islice(outcome, count + 1))  # bounded: a generator may have no end
    except Exception as error:
        return nothing, {None: error}
    if len(items) != count:
        length: Any = (
            len(outcome) if isinstance(outcome, Sized) else f"more than {count}" if items[count:] else len(items)
        )
        return nothing, {None: f"returned {length} values for {count} completions; exactly one for each is needed"}
    values, faults = nothing, {}
    for index, item in enumerate(items):
        value = _number(item)
        if isinstance(value, str):
            faults[index] = value
        else:
            values[index] = value
    return values, faults


def _number(item: Any) -> float | str:
    """Return one reward as a float, NaN for None; or what is wrong with it."""
    if item is None:
        return np.nan
    try:
        number = None if isinstance(item, (str, bytes)) or np.ndim(item) or np.iscomplexobj(item) else float(item)
    except OverflowError:
        number = np.inf
    except (TypeError, ValueError):
        number = None
    if number is None:
        return f"returned {_short(item)}, a {type(item).__name__}; rewards are numbers, or None for 'not scored'"
    if np.isnan(number):
        return "returned nan; None is how a function says 'not scored'"
    if abs(number) > _FLOAT32_MAX:
        return f"returned {number}; rewards are finite, in the range of float32"
    return number


def give_scores(values: np.ndarray, faults: Faults) -> list[float | None]:
    """Return scores as a reward function does, NaN as None; faults travel on as an exception."""
    scores = [None if np.isnan(value) else float(value) + 0.0 for value in values]  # + 0.0: a reward of −0 puzzles
    if faults:
        raise PartialRewards(scores, faults)
    return scores


def _explain(name: str, faults: Faults, inputs: Mapping[str, Any], num_generations: int) -> str:
    """Return what went wrong first: the function, the fault, and the prompt and completion if it concerns one."""
    index, fault = next(iter(faults.items()))
    message = f"reward function {name!r} {describe_fault(fault)}"
    if index is None:
        return message
    prompt, generation = divmod(index, num_generations)
    message += f" for prompt {prompt} of the batch, completion {generation} of its group"
    message += f" (prompt {_short(inputs['prompts'][index])}, completion {_short(inputs['completions'][index])})"
    return message + (f", and has faults in {len(faults) - 1} more" if len(faults) > 1 else "")


def describe_fault(fault: BaseException | str) -> str:
    """Return a fault as the end of a sentence about a function."""
    return fault if isinstance(fault, str) else f"raised {type(fault).__name__}: {fault}"


def _short(value: Any, limit: int = 120) -> str:
    """Return the repr of a value, cut for a message."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
