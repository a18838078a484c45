"""Reward functions made of others: weighted, clipped, gated, and row by row.

A combinator is asynchronous where the function inside is, and hands on every fault that it meets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.rewards.contract import (
    Faults,
    PartialRewards,
    RewardError,
    arguments_of,
    call_selected,
    check_rows,
    describe_fault,
    function_name,
    give_scores,
    is_async,
    read_outcome,
    split_inputs,
)
from grpo_jax.rewards.shipped import completion_text

if TYPE_CHECKING:
    from grpo_jax.types import Json, Messages, RewardFn, Rewards, Row

Judge = Callable[[str, dict[str, Any]], float | Awaitable[float | None] | None]
"""Scores one completion, given its text and its row."""


def from_row(fn: Judge) -> RewardFn:
    """Make a reward function of a function that looks at one completion and its row.

    Args:
      fn: `fn(completion, row)` → float or None. `completion` is text also in conversations; `row` is a dict of the
        columns of its dataset row, `prompt` among them. It may be `async`: then all completions are judged together.

    Returns:
      A reward function. An exception is the fault of one completion, and the others keep their scores.

    Example:
      >>> correct = from_row(lambda completion, row: float(completion == row["answer"]))
      >>> correct(prompts=["1+1=", "2+2="], completions=["2", "5"], answer=["2", "4"])
      [1.0, 0.0]
    """
    return _FromRow(fn)


@dataclasses.dataclass(frozen=True)
class _FromRow:
    """The reward function that `from_row` returns."""

    fn: Judge

    @property
    def __name__(self) -> str:
        return function_name(self.fn)

    def __call__(
        self, *, completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> Rewards | Awaitable[Rewards]:
        columns.pop("completion_ids", None)
        columns = {"prompt": columns.pop("prompts")} | columns if "prompts" in columns else columns
        rows = [{name: values[index] for name, values in columns.items()} for index in range(len(completions))]
        calls = list(zip(map(completion_text, completions), rows, strict=True))
        if is_async(self.fn):
            return self._judge_together(calls)
        outcomes: list[Any] = []
        for text, row in calls:
            try:
                outcomes.append(self.fn(text, row))
            except (Exception, SystemExit) as error:
                outcomes.append(error)
        return _without_exceptions(outcomes)

    async def _judge_together(self, calls: Sequence[tuple[str, Row]]) -> list[Any]:
        judged: list[Any] = [self.fn(text, row) for text, row in calls]
        return _without_exceptions(await asyncio.gather(*judged, return_exceptions=True))


def _without_exceptions(outcomes: Sequence[Any]) -> list[Any]:
    """Return outcomes if none of them is an exception; raise them together if any is."""
    faults: Faults = {index: outcome for index, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}
    if faults:
        raise PartialRewards([None if index in faults else outcome for index, outcome in enumerate(outcomes)], faults)
    return list(outcomes)


def weighted(fn: RewardFn, weight: float) -> RewardFn:
    """Multiply the scores of a reward function: r = weight · fn.

    Not for the balance of whole functions, which is `reward_weights` in the config, but for parts of combined ones.

    Args:
      fn: a reward function.
      weight: any finite number, negative for a penalty.

    Example:
      >>> from grpo_jax.rewards import format_reward
      >>> weighted(format_reward(r"<a>.*</a>"), -0.5)(completions=["<a>1</a>", "1"])
      [-0.5, 0.0]
    """
    if not np.isfinite(weight):
        raise ValueError(f"weight is {weight}: give a finite number")
    return _Mapped(fn, functools.partial(np.multiply, float(weight)))


def clipped(fn: RewardFn, low: float = -np.inf, high: float = np.inf) -> RewardFn:
    """Bound the scores of a reward function: r = min(max(fn, low), high).

    An infinite score stays a fault: clipping would hide it.

    Args:
      fn: a reward function.
      low: the least score.
      high: the greatest score, ≥ low.

    Example:
      >>> def length(completions):
      ...     return [len(text) for text in completions]
      >>> clipped(length, 2, 3)(completions=["a", "abc", "abcdef"])
      [2.0, 3.0, 3.0]
    """
    if not low <= high:
        raise ValueError(f"low is {low} and high is {high}: give low ≤ high")
    return _Mapped(fn, functools.partial(np.clip, a_min=float(low), a_max=float(high)))


def gated(gate: RewardFn, fn: RewardFn, *, threshold: float = 0.0, otherwise: float | None = 0.0) -> RewardFn:
    """Score by a second function only where a first one passes: r = fn if gate > threshold, else otherwise.

    The second function is called with the completions that passed, and not at all if none did: a cheap check of the
    format in front of an expensive judge.

    Args:
      gate: a reward function. Where it has no score, neither has the result.
      fn: a reward function.
      threshold: the gate passes above it.
      otherwise: the score of a completion that did not pass; None for no score, and then nothing tells the policy to
        pass the gate unless the gate is a reward function of its own as well.

    Example:
      >>> def length(completions):
      ...     return [len(text) for text in completions]
      >>> from grpo_jax.rewards import format_reward
      >>> gated(format_reward("a+"), length)(completions=["aaa", "b", "a"])
      [3.0, 0.0, 1.0]
    """
    return _Gated(fn, gate, float(threshold), otherwise)


@dataclasses.dataclass(frozen=True)
class _Combinator:
    """A reward function made of others: it is called as `fn` is and asks for what they ask for."""

    fn: RewardFn

    @property
    def __name__(self) -> str:
        return function_name(self.fn)

    @property
    def parts(self) -> tuple[RewardFn, ...]:
        """The functions inside."""
        return (self.fn,)

    @property
    def reward_arguments(self) -> dict[str, bool]:
        """The arguments of the functions inside, and whether any of them requires it."""
        arguments: dict[str, bool] = {}
        for part in self.parts:
            for name, required in arguments_of(part).items():
                arguments[name] = required or arguments.get(name, False)
        return arguments

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        """Raise ValueError if a function inside cannot judge some rows."""
        check_rows(self.parts, rows, argument=argument)


@dataclasses.dataclass(frozen=True)
class _Mapped(_Combinator):
    """The reward function that `weighted` and `clipped` return: each score is replaced by a function of it."""

    function: Callable[[np.ndarray], np.ndarray]

    def __call__(self, **inputs: Any) -> Rewards | Awaitable[Rewards]:
        return _scores_then(self.fn, inputs, lambda values, faults: give_scores(self.function(values), faults))


@dataclasses.dataclass(frozen=True)
class _Gated(_Combinator):
    """The reward function that `gated` returns."""

    gate: RewardFn
    threshold: float
    otherwise: float | None

    @property
    def parts(self) -> tuple[RewardFn, ...]:
        return (self.gate, self.fn)

    def __call__(self, **inputs: Any) -> Rewards | Awaitable[Rewards]:
        def second(gate_values: np.ndarray, gate_faults: Faults) -> Rewards | Awaitable[Rewards]:
            otherwise = np.nan if self.otherwise is None else self.otherwise
            scores = np.where(np.isnan(gate_values), np.nan, otherwise)
            passed = np.flatnonzero(gate_values > self.threshold)
            if passed.size == 0:
                return give_scores(scores, gate_faults)

            def fill(values: np.ndarray, faults: Faults) -> list[float | None]:
                scores[passed] = values
                own = {None if index is None else int(passed[index]): fault for index, fault in faults.items()}
                return give_scores(scores, {**gate_faults, **own})

            lists, extras = split_inputs(inputs)
            some = {name: [values[index] for index in passed.tolist()] for name, values in lists.items()}
            return _scores_then(self.fn, some | extras, fill)

        return _scores_then(self.gate, inputs, second)


def _scores_then(
    fn: RewardFn, inputs: Json, use: Callable[[np.ndarray, Faults], Rewards | Awaitable[Rewards]]
) -> Rewards | Awaitable[Rewards]:
    """Call a function, read its scores strictly, and use them: now, or in a coroutine if the function is async."""

    def finish(outcome: object) -> Rewards | Awaitable[Rewards]:
        values, faults = read_outcome(outcome, len(inputs["completions"]))
        if None in faults:
            fault = faults[None]
            cause = fault if isinstance(fault, BaseException) else None
            raise RewardError(f"{function_name(fn)!r} {describe_fault(fault)}") from cause
        return use(values, faults)

    async def later(awaitable: Awaitable[Rewards]) -> Rewards:
        outcome: object
        try:
            outcome = await awaitable
        except PartialRewards as partial:
            outcome = partial
        result = finish(outcome)
        return await result if inspect.isawaitable(result) else result

    lists, extras = split_inputs(inputs)
    outcome: object
    try:
        outcome = call_selected(fn, lists, extras)
    except PartialRewards as partial:
        outcome = partial
    return later(outcome) if inspect.isawaitable(outcome) else finish(outcome)
