r"""Numeric answers in completions and datasets: extraction, exact parsing and comparison.

Currency symbols, units and percent signs are ignored: `$18`, `18 apples` and `18 %` have the value 18, like `18.00`.
To compare formulas, use `formula_reward`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from grpo_jax.messages import show
from grpo_jax.rewards.shipped import ColumnReward, completion_text

if TYPE_CHECKING:
    from grpo_jax.types import Messages, RewardFn, Row

LONGEST = 60
"""Maximum length of a number in characters. The limit bounds the parsing time."""

_ADVICE = (
    "Remove such rows, or replace number_reward with accuracy_reward (compares strings) or formula_reward (compares"
    " formulas with math-verify)"
)

_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,12}(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"""
    (?<![\w.^/])                                     # not inside a word or a number, not an exponent or a denominator
    (?:(?<![)\]}}%])(?P<sign>[-+])(?=[$€£¥₹.\d]))?    # after a bracket or a number, - is an operator
    (?:[$€£¥₹]\s?(?P<inner>-)?)?
    (?<!\d,)(?>(?P<above>{_DIGITS})(?:\s?/\s?(?P<below>\d+)(?![\d/]))?(?:e(?P<power>[-+]?\d\d?)\b)?)
    (?![.,]\d|e[-+]?\d|\s?\^|_\d|(?:st|nd|rd|th|k)\b|\s?(?:thousand|million|billion|trillion)\b)  # 1.5.2, 2^5, 1e100
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SPELLINGS = (  # patterns and their replacements, for typographic and LaTeX spellings
    (re.compile("[\u2010-\u2013\u2212]"), "-"),
    (re.compile(r"\*\*|__"), " "),
    (re.compile(r"\{,\}|(?<=\d),?\\[,!](?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\(?:text|mbox|mathrm)\s?\{([^{}]{0,99})\}"), r"\1"),
    (re.compile(r"\s?\^\s?(?:\{\s?(?:\\circ|[°∘])\s?\}|\\circ(?![a-z])|[°∘])|\\degrees?(?![a-z])"), "°"),
    (re.compile(r"(?<=[a-z])\s?\^\s?(?:[23]|\{[23]\})"), ""),  # cm^2
    (re.compile(r"\\(?:[,;:! ]|(?:left|right|quad)(?![a-z]))"), " "),
    (re.compile(r"\\[dtc]?frac\s?\{\s?(-?[\d,.]{1,60})\s?\}\s?\{\s?(\d{1,60})\s?\}"), r"\1/\2"),
)
# Markers of a final answer. `####` also starts headings, so it must precede a number, but not a list item's number.
_MARK = re.compile(r"####\s?(?=[-.\d$€£¥₹])(?!\d+[.)] [a-z])([^\n]*)|<answer>([^<]*)</answer>", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\s?\{|[{}]")
_PHRASE = re.compile(
    r"(?<!/)\banswer\b(?!\s(?:every|each|all|any|the|a|questions?)\b)"
    r"(?:[^\d\n.:=]{0,60}?\b(?:is|are|be)\b(?!\s+not\b)|\s*(?:\([^()\n]{0,40}\)\s*)?[:=])(?=\s*([^\n]{1,200}))",
    re.IGNORECASE,
)
# Text allowed before and after an answer's number: words and units, but no digits or operators.
_BEFORE = re.compile(r"(?:[^\W\d_√π∞]|[\s.,:;'\"$*(`])*")
_AFTER = re.compile(r"(?![^\W\d_](?![^\W\d_])|[!*(/])(?:[^\W\d_√π∞]|[\s.,:;'\"$%°²³*()`]|/(?!\d))*")


def final_number(text: str) -> Fraction | None:
    r"""Return the final numeric answer in a completion or solution, or None if no answer is found.

    The answer is the last marked number (`#### 18`, `\boxed{18}` or `<answer>18</answer>`), else the first number
    after the last "the answer is" or "answer:", else the last number. Marked text must contain a single number or a
    chain such as `5 + 13 = 18`. In a chain, the number after the last `=` is the answer. Signs, decimals, commas
    between digit groups, fractions (`3/4`, `\frac{3}{4}`) and exponents (`1e6`) are supported; number words are not.

    Example:
      >>> final_number("She pays 3 · $6 = **$1,018.50** in all.")
      Fraction(2037, 2)
    """
    text = _plain(text)
    marked = _marked(text)
    if marked is not None:
        return _sole(marked)
    announced = [match[1] for match in _PHRASE.finditer(text) if _NUMBER.search(match[1])]
    if announced:
        clause = re.split(r"[,.;]\s", announced[-1])[0]
        match = _NUMBER.search(clause.rpartition("=")[2])
    else:
        match = next(iter([*_NUMBER.finditer(text)][-1:]), None)
    return None if match is None else _value(match)


def sole_number(text: str) -> Fraction | None:
    r"""Return the only number in a string, or in its last marked answer (see `final_number`).

    Words, units and text before the last `=` are ignored. Returns None for formulas, intervals, numerals with a base,
    and strings with several numbers or none.
    """
    text = _plain(text)
    marked = _marked(text)
    return _sole(text if marked is None else marked)


def number_reward(column: str = "answer") -> RewardFn:
    r"""Return a reward function that gives 1 if a completion's final number equals the value in a column, else 0.

    The column contains numbers, strings, or solutions that end in `#### 18` (GSM8K). Its values are parsed with
    `sole_number`, and completions with `final_number`. If the value is None, the completion is not scored. The function
    raises ValueError if a value is not a single number (3√13, an interval, a word). Before sampling, a run calls the
    function's `check_rows`, which reports the number of such rows and shows the first five.

    Example:
      >>> correct = number_reward()
      >>> correct(completions=["The answer is 1,018 apples.", "1018 or 1019"], answer=["1018", 1018])
      [1.0, 0.0]
      >>> correct.check_rows([{"answer": "18"}, {"answer": r"3\sqrt{13}"}])
      Traceback (most recent call last):
      ValueError: reward function 'accuracy': in 1 of 2 rows of the dataset, the column 'answer' has no single ...
    """
    return _NumberReward(column)


@dataclasses.dataclass(frozen=True)
class _NumberReward(ColumnReward):
    def __call__(self, *, completions: Sequence[str | Messages], **columns: Sequence[object]) -> list[float | None]:
        return [
            None if truth is None else float(final_number(completion_text(completion)) == self._truth(truth))
            for completion, truth in zip(completions, columns[self.column], strict=True)
        ]

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        self.reject_rows(rows, _truth_of, argument, "single number", _ADVICE)

    def _truth(self, value: object) -> Fraction:
        truth = _truth_of(str(value))
        if truth is None:
            raise ValueError(
                f"values in column {self.column!r} must be single numbers; got {show(value, 60)}. {_ADVICE}"
            )
        return truth


# Cached, since all completions in a group have the same answer.
_truth_of = functools.lru_cache(1024)(sole_number)


def _plain(text: str) -> str:
    """Return the text with typographic and LaTeX spellings normalized."""
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text


def _marked(text: str) -> str | None:
    """Return the text of the last marked answer, or None if no answer is marked."""
    marks = [(match.start(), match[1] if match[2] is None else match[2]) for match in _MARK.finditer(text)]
    marks += _boxes(text)
    return max(marks)[1] if marks else None


def _boxes(text: str) -> Iterator[tuple[int, str]]:
    r"""Yield the start index and the content of each complete `\boxed{…}`."""
    opened: list[tuple[int, int] | None] = []
    for match in _BOX.finditer(text):
        if match[0] != "}":
            opened.append((match.start(), match.end()) if match[0] != "{" else None)
        elif opened and (box := opened.pop()) is not None:
            yield box[0], text[box[1] : match.start()]


def _sole(text: str) -> Fraction | None:
    """Parse a string that consists of words, units and one number, or a chain `… = number`. Returns None otherwise."""
    if "|" in text:  # |x| = 5 has two solutions
        return None
    text = re.sub(r"^\s*-\s+(?=[\d.$])", "-", text.rpartition("=")[2])
    match = _NUMBER.search(text)
    if match is None or not _BEFORE.fullmatch(text, 0, match.start()) or not _AFTER.fullmatch(text, match.end()):
        return None
    return _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    """Convert a matched number to a fraction, or return None if it is too long or its denominator is 0."""
    if len(match[0]) > LONGEST or (match["below"] and int(match["below"]) == 0):
        return None
    value = Fraction(match["above"].replace(",", "")) / int(match["below"] or 1)
    value *= Fraction(10) ** int(match["power"] or 0)
    return -value if match["sign"] == "-" or match["inner"] else value
