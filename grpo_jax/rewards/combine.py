"""Reward functions built from functions that score one completion."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_jax.rewards.contract import function_name, is_async
from grpo_jax.rewards.outcomes import Failures, PartialRewards
from grpo_jax.rewards.shipped import completion_text

if TYPE_CHECKING:
    from grpo_jax.types import Messages, RewardFn, RewardValues, Row

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
    ) -> RewardValues | Awaitable[RewardValues]:
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
