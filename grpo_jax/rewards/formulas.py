"""Formulas as answers, compared by math-verify: 3√13, intervals, sets, matrices, equations."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from grpo_jax.messages import import_extra, show
from grpo_jax.rewards.contract import Faults, give_scores
from grpo_jax.rewards.shipped import ColumnReward, completion_text
from grpo_jax.rewards.workers import isolated

if TYPE_CHECKING:
    from grpo_jax.types import Messages, RewardFn, Rewards, Row

_GSM8K = "####"
_MEND = "Leave such rows out, or set the column to None for them and judge them by another reward function"


def formula_reward(column: str = "answer", *, timeout: float | None = 5.0) -> RewardFn:
    """Score 1 where [math-verify](https://github.com/huggingface/Math-Verify) finds the truth in a completion, else 0.

    Both are read by its `parse`, with its own settings, and compared by its `verify`, which knows formulas where
    `number_reward` knows numbers only; docs/suites.md has a table of where the two differ. A row whose column is None
    has no score.

    Args:
      column: the column with the truth: a number, a formula of LaTeX with its dollars or without, a text with
        `\\boxed{…}`, or a solution of GSM8K with `#### 18` at its end.
      timeout: seconds for each completion, in a worker process that is killed after them (`isolated`): a formula may be
        written that takes for ever. None: in this process, and however long it takes.

    Returns:
      A reward function, named "formula". Its `check_rows` is called by a run before anything is sampled, and refuses
      the rows whose truth math-verify cannot read.

    Raises:
      ValueError: math-verify is not installed (`pip install math-verify`).

    Example:
      >>> right = formula_reward(timeout=None)  # doctest: +SKIP
      >>> right(completions=[r"So $x = \\sqrt{117}$.", "about 10.8"], answer=[r"3\\sqrt{13}"] * 2)  # doctest: +SKIP
      [1.0, 0.0]
    """
    package = import_extra("math_verify", "math-verify")
    made = _FormulaReward(column, package.parse, package.verify)
    return made if timeout is None else isolated(made, timeout=timeout, completions_per_call=1)


@dataclasses.dataclass(frozen=True)
class _FormulaReward(ColumnReward):
    """The reward function that `formula_reward` returns; its functions take the package along to a worker."""

    parse: Callable[..., list[object]]
    verify: Callable[..., bool]
    __name__ = "formula"

    def __call__(self, *, completions: Sequence[str | Messages], **columns: Sequence[object]) -> Rewards:
        values, faults = np.full(len(completions), np.nan), Faults()
        for index, (completion, truth) in enumerate(zip(completions, columns[self.column], strict=True)):
            if truth is None:
                continue
            gold = _truth_of(self.parse, str(truth))
            if gold:
                # Its own limits of time are signals, which only a main thread has.
                found = self.parse(completion_text(completion), parsing_timeout=None)
                values[index] = float(self.verify(gold, found, timeout_seconds=None))
            else:
                faults[index] = f"cannot compare with {show(truth, 60)}, which math-verify does not read"
        return give_scores(values, faults)

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        """Raise ValueError if there are rows that this function cannot judge."""
        read, without = functools.partial(_truth_of, self.parse), "none that math-verify reads"
        self.refuse_rows(rows, read, argument, compares="formulas", without=without, mend=_MEND)


@functools.lru_cache(1024)  # a group has one truth for all of its completions
def _truth_of(parse: Callable[..., list[object]], text: str) -> list[object]:
    """Return what math-verify reads in a truth, [] for nothing."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every limit that is not set
    text = text.rpartition(_GSM8K)[2].strip()
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    return parse(marked, parsing_timeout=None) or parse(text, parsing_timeout=None)
