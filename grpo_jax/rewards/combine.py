"""Reward functions built from other functions: per row, clipped and gated.

A combined function reports errors from the functions it calls, and is asynchronous if any of them is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.rewards import contract
from grpo_jax.rewards.contract import Inputs, RewardError, arguments_of, function_name, is_async
from grpo_jax.rewards.outcomes import Failures, PartialRewards, as_scores, describe_failure, read_outcome
from grpo_jax.rewards.shipped import completion_text

if TYPE_CHECKING:
    from grpo_jax.types import Messages, RewardFn, Row, Scores

ScoreFn = Callable[[str, "Row"], float | Awaitable[float | None] | None]
"""A function that maps (completion, dataset row) to a reward, or to None if the completion is not scored."""


def from_row(fn: ScoreFn) -> RewardFn:
    """Build a reward function from `fn(completion, row)`, which scores one completion.

    `completion` is a string, even in conversations, and `row` is the dataset row with its `prompt`. An exception
    affects only the completion being scored. If `fn` is asynchronous, all completions are scored concurrently.

    Example:
      >>> correct = from_row(lambda completion, row: float(completion == row["answer"]))
      >>> correct(prompts=["1+1=", "2+2="], completions=["2", "5"], answer=["2", "4"])
      [1.0, 0.0]
    """
    return _FromRow(fn)


@dataclasses.dataclass(frozen=True)
class _FromRow:
    fn: ScoreFn

    @property
    def __name__(self) -> str:
        return function_name(self.fn)

    @property
    def is_async(self) -> bool:
        return is_async(self.fn)

    def __call__(
        self, *, completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> Scores | Awaitable[Scores]:
        columns.pop("completion_ids", None)
        columns = {"prompt": columns.pop("prompts")} | columns if "prompts" in columns else columns
        rows = [{name: values[index] for name, values in columns.items()} for index in range(len(completions))]
        calls = list(zip(map(completion_text, completions), rows, strict=True))
        if self.is_async:
            return self._score_together(calls)
        outcomes: list[Any] = []
        for text, row in calls:
            try:
                outcomes.append(self.fn(text, row))
            except (Exception, SystemExit) as error:
                outcomes.append(error)
        return _without_exceptions(outcomes)

    async def _score_together(self, calls: Sequence[tuple[str, Row]]) -> list[Any]:
        scoring: list[Any] = [self.fn(text, row) for text, row in calls]
        return _without_exceptions(await asyncio.gather(*scoring, return_exceptions=True))


def _without_exceptions(outcomes: list[Any]) -> list[Any]:
    failures: Failures = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}
    if failures:
        raise PartialRewards([None if i in failures else outcome for i, outcome in enumerate(outcomes)], failures)
    return outcomes


def clipped(fn: RewardFn, low: float = -np.inf, high: float = np.inf) -> RewardFn:
    """Return a reward function that clips rewards from `fn` to [low, high]. Infinite rewards are still errors."""
    if not low <= high:
        raise ValueError(f"low={low} must not exceed high={high}")
    return _Mapped(fn, functools.partial(np.clip, a_min=float(low), a_max=float(high)))


def gated(gate: RewardFn, fn: RewardFn, *, threshold: float = 0.0, otherwise: float | None = 0.0) -> RewardFn:
    """Return a reward function that uses `fn` for completions with gate > threshold, and `otherwise` for all others.

    `fn`, for example an expensive judge, is called only with the completions that pass. Completions for which the gate
    returns None are not scored. If `otherwise` is None, completions that fail are not scored either. The policy then
    learns to pass the gate only if the gate is also one of the run's reward functions.

    Example:
      >>> from grpo_jax.rewards import format_reward
      >>> length = lambda completions: [len(text) for text in completions]
      >>> gated(format_reward("a+"), length)(completions=["aaa", "b", "a"])
      [3.0, 0.0, 1.0]
    """
    return _Gated(fn, gate, float(threshold), otherwise)


@dataclasses.dataclass(frozen=True)
class _Combinator:
    """A reward function that calls other reward functions and accepts all of their arguments."""

    fn: RewardFn

    @property
    def __name__(self) -> str:
        return function_name(self.fn)

    @property
    def parts(self) -> tuple[RewardFn, ...]:
        return (self.fn,)

    @property
    def is_async(self) -> bool:
        return any(map(is_async, self.parts))

    @property
    def reward_arguments(self) -> dict[str, bool]:
        arguments = [arguments_of(part) for part in self.parts]
        return {name: any(part.get(name, False) for part in arguments) for part in arguments for name in part}

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        contract.check_rows(self.parts, rows, argument=argument)

    def __call__(self, **inputs: Any) -> Scores | Awaitable[Scores]:
        scoring = self.score(inputs)
        if self.is_async:
            return scoring
        try:
            scoring.send(None)  # runs to completion, since nothing is awaited
        except StopIteration as done:
            scores: Scores = done.value
            return scores
        raise RewardError(f"{self.__name__!r} returned an awaitable; define it with `async def`")

    def score(self, inputs: Inputs) -> Coroutine[None, None, list[float | None]]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _Mapped(_Combinator):
    function: Callable[[np.ndarray], np.ndarray]

    async def score(self, inputs: Inputs) -> list[float | None]:
        values, failures = await _call(self.fn, inputs)
        return as_scores(self.function(values), failures)


@dataclasses.dataclass(frozen=True)
class _Gated(_Combinator):
    gate: RewardFn
    threshold: float
    otherwise: float | None

    @property
    def parts(self) -> tuple[RewardFn, ...]:
        return (self.gate, self.fn)

    async def score(self, inputs: Inputs) -> list[float | None]:
        values, failures = await _call(self.gate, inputs)
        scores = np.where(np.isnan(values), np.nan, np.nan if self.otherwise is None else self.otherwise)
        passed = np.flatnonzero(values > self.threshold).tolist()
        if passed:
            selected = {name: x if name in contract.EXTRAS else [x[i] for i in passed] for name, x in inputs.items()}
            scores[passed], found = await _call(self.fn, selected)
            failures |= {None if index is None else passed[index]: failure for index, failure in found.items()}
        return as_scores(scores, failures)


async def _call(fn: RewardFn, inputs: Inputs) -> tuple[np.ndarray, Failures]:
    """Call a function. Returns scores (NaN for None) and errors for individual completions."""
    outcome: object
    try:
        outcome = contract.call_selected(fn, inputs)
        if inspect.isawaitable(outcome):
            outcome = await outcome
    except PartialRewards as partial:
        outcome = partial
    values, failures = read_outcome(outcome, len(inputs["completions"]))
    if None in failures:
        failure = failures[None]
        cause = failure if isinstance(failure, BaseException) else None
        raise RewardError(f"{function_name(fn)!r} {describe_failure(failure)}") from cause
    return values, failures
