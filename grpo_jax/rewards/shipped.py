"""Built-in reward functions and `from_row`, implemented as classes so that they can be pickled for workers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.messages import import_extra, show
from grpo_jax.rewards.contract import function_name
from grpo_jax.rewards.outcomes import Failures, PartialRewards, as_scores
from grpo_jax.rewards.workers import isolated

if TYPE_CHECKING:
    from grpo_jax.types import Messages, RewardFn, RewardValues, Row

ScoreFn = Callable[[str, "Row"], float | Awaitable[float | None] | None]
"""A function that maps (completion, dataset row) to a reward, or to None if the completion is not scored."""


def completion_text(completion: str | Messages) -> str:
    """Return a completion's text: the string itself, or the concatenated contents of its messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


def from_row(fn: ScoreFn) -> RewardFn:
    """Build a reward function from `fn(completion, row)`, which scores one completion.

    `completion` is a string, even in conversations, and `row` is the dataset row with its `prompt`. An exception
    from `fn` affects only that call's completion. If `fn` is asynchronous, all completions are scored concurrently.

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

    def __call__(
        self, *, completions: Sequence[str | Messages], **columns: Sequence[Any]
    ) -> RewardValues | Awaitable[RewardValues]:
        columns.pop("completion_ids", None)
        columns = {"prompt": columns.pop("prompts")} | columns if "prompts" in columns else columns
        outcomes = list[object]()
        for index, completion in enumerate(completions):
            row = {name: values[index] for name, values in columns.items()}
            try:
                outcomes.append(self.fn(completion_text(completion), row))
            except (Exception, SystemExit) as error:
                outcomes.append(error)
        return _awaited(outcomes) if any(map(inspect.isawaitable, outcomes)) else _without_exceptions(outcomes)


async def _awaited(outcomes: Sequence[object]) -> RewardValues:
    async def result(outcome: object) -> object:
        return await outcome if inspect.isawaitable(outcome) else outcome

    return _without_exceptions(await asyncio.gather(*map(result, outcomes), return_exceptions=True))


def _without_exceptions(outcomes: Sequence[Any]) -> RewardValues:
    failures: Failures = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}
    if failures:
        raise PartialRewards([None if i in failures else outcome for i, outcome in enumerate(outcomes)], failures)
    return outcomes


def accuracy_reward(column: str = "answer", extract: str | Callable[[str], str | None] | None = None) -> RewardFn:
    """Return a reward function that gives 1 if a completion's answer equals `str(row[column])`, else 0.

    Both strings are stripped of whitespace. If the value is None, the completion is not scored. `extract` selects the
    answer: a regular expression selects the first group in its last match, or the whole match if it has no groups (`.`
    matches line breaks); a function returns the answer or None. If `extract` is None, the whole text is used.

    Example:
      >>> correct = accuracy_reward("answer", r"<answer>(.*?)</answer>")
      >>> correct(completions=["<answer> 4 </answer>", "4"], answer=["4", "4"])
      [1.0, 0.0]
    """
    return _Accuracy(column, _compiled(extract, "extract") if isinstance(extract, str) else extract)


@dataclasses.dataclass(frozen=True)
class ColumnReward:
    """A reward function that compares completions with a dataset column."""

    column: str
    __name__ = "accuracy"

    @property
    def reward_arguments(self) -> dict[str, bool]:
        return {self.column: True}

    def reject_rows(
        self, rows: Sequence[Row], read: Callable[[str], object], argument: str, kind: str, advice: str
    ) -> None:
        """Raise ValueError if `read` does not find an answer of this `kind` in a row's value. None values are valid."""
        truths = [row.get(self.column) for row in rows]
        bad = [i for i, truth in enumerate(truths) if truth is not None and read(str(truth)) in (None, [])]
        if bad:
            shown = ", ".join(f"row {i} has {show(truths[i], 60)}" for i in bad[:5]) + ", …" * (len(bad) > 5)
            raise ValueError(
                f"reward function {self.__name__!r}: in {len(bad)} of {len(rows)} rows of {argument}, the column"
                f" {self.column!r} has no {kind}: {shown}. {advice}"
            )


@dataclasses.dataclass(frozen=True)
class _Accuracy(ColumnReward):
    extract: re.Pattern[str] | Callable[[str], str | None] | None

    def __call__(self, *, completions: Sequence[str | Messages], **columns: Sequence[object]) -> list[float | None]:
        return [
            None if truth is None else float(self._answer(completion_text(completion)) == str(truth).strip())
            for completion, truth in zip(completions, columns[self.column], strict=True)
        ]

    def _answer(self, text: str) -> str | None:
        if self.extract is None:
            return text.strip()
        if isinstance(self.extract, re.Pattern):
            matches = list(self.extract.finditer(text))
            answer = matches[-1][1 if self.extract.groups else 0] if matches else None
        else:
            answer = self.extract(text)
        return None if answer is None else answer.strip()


def format_reward(pattern: str) -> RewardFn:
    """Return a reward function that gives 1 if the whole completion matches `pattern`, where `.` matches line breaks.

    Example:
      >>> thinks_first = format_reward(r"<think>(?!.*<think>).*?</think>.*")  # TRL's `think_format_reward`
      >>> thinks_first(completions=["<think>hm</think> 4", "4"])
      [1.0, 0.0]
    """
    return _Format(_compiled(pattern, "pattern"))


@dataclasses.dataclass(frozen=True)
class _Format:
    pattern: re.Pattern[str]
    __name__ = "format"

    def __call__(self, *, completions: Sequence[str | Messages], **_: object) -> list[float]:
        return [float(self.pattern.fullmatch(completion_text(completion)) is not None) for completion in completions]


def _compiled(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{argument} must be a regular expression; got {pattern!r} ({error})") from error


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> RewardFn:
    """Return a reward function that penalizes long completions: r = min(max((L_max − L_cache − |y|) / L_cache, −1), 0).

    L_max is `max_completion_len`, L_cache is `soft_punish_cache`, and |y| is the number of tokens including the EOS. If
    L_cache is 0, r is −1 for |y| > L_max. See DAPO (arXiv 2503.14476, eq. 13).
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache must be between 0 and max_completion_len={max_completion_len}; got {soft_punish_cache}"
        )
    return _SoftOverlong(max_completion_len, soft_punish_cache)


@dataclasses.dataclass(frozen=True)
class _SoftOverlong:
    longest: int
    cache: int
    __name__ = "soft_overlong"

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        over = [len(ids) - (self.longest - self.cache) for ids in completion_ids]
        return [max(-tokens / max(self.cache, 1), -1.0) if tokens > 0 else 0.0 for tokens in over]


def formula_reward(column: str = "answer", *, timeout: float | None = 5.0) -> RewardFn:
    """Return a reward function that gives 1 if math-verify finds the correct answer in a completion, else 0.

    [math-verify](https://github.com/huggingface/Math-Verify) compares formulas; `number_reward` compares only numbers
    (see docs/suites.md). The column contains a number, a LaTeX formula with or without dollar signs, a string with
    `\\boxed{…}`, or a solution that ends in `#### 18` (GSM8K). If the value is None, the completion is not scored.

    math-verify may not terminate, so each completion is scored in a worker process (see `isolated`), which is killed
    if this takes more than `timeout` seconds. If `timeout` is None, the calling process scores completions, without a
    limit. Before sampling, a run calls the function's `check_rows`, which rejects rows that math-verify cannot parse.
    """
    package = import_extra("math_verify", "math-verify")
    reward = _FormulaReward(column, package.parse, package.verify)
    return reward if timeout is None else isolated(reward, timeout=timeout, completions_per_call=1)


@dataclasses.dataclass(frozen=True)
class _FormulaReward(ColumnReward):
    """See `formula_reward`. Unpickling `parse` in a worker imports math-verify before the timeout starts."""

    parse: Callable[..., list[object]]
    verify: Callable[..., bool]
    __name__ = "formula"

    def __call__(self, *, completions: Sequence[str | Messages], **columns: Sequence[object]) -> RewardValues:
        values, failures = np.full(len(completions), np.nan), Failures()
        for index, (completion, truth) in enumerate(zip(completions, columns[self.column], strict=True)):
            if truth is None:
                continue
            gold = _truth_of(self.parse, str(truth))
            if gold:
                # math-verify's timeouts use signals, which work only in the main thread.
                answer = self.parse(completion_text(completion), parsing_timeout=None)
                values[index] = float(self.verify(gold, answer, timeout_seconds=None))
            else:
                failures[index] = f"cannot parse {show(truth, 60)} with math-verify"
        return as_scores(values, failures)

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        advice = "Remove these rows, or set their values to None and score them with a different reward function"
        read = functools.partial(_truth_of, self.parse)
        self.reject_rows(rows, read, argument, "formula that math-verify can parse", advice)


@functools.lru_cache(1024)  # all completions in a group have the same answer
def _truth_of(parse: Callable[..., list[object]], text: str) -> list[object]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify warns about disabled timeouts
    text = text.rpartition("####")[2].strip()  # GSM8K
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    return parse(marked, parsing_timeout=None) or parse(text, parsing_timeout=None)
