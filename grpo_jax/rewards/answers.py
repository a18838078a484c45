"""Numbers as people and models write them: found in a text, read exactly, and compared with the truth of a dataset.

A unit, a currency and a percent sign do not count: `$18`, `18 apples`, `18 %` and `18.00` are the number 18.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from grpo_jax.rewards.shipped import completion_text

LONGEST = 60
"""Characters of a number at most; what is longer is no answer, and would be slow to read."""

_DIGITS = r"""(?:
    \d{1,3}(?:,\d{3}){1,12}+(?!\d)(?:\.\d++)?     # 1,234,567.5
  | \d{1,3}(?:[\ \u00a0\u2009\u202f]\d{3}){1,12}+(?!\d)(?:\.\d++)?  # 1 234 567
  | \d++(?:\.\d++)?
  | \.\d++
)"""
_NUMBER = re.compile(
    rf"""
    (?<![^\W_])(?<![a-z]_)(?<![.^])(?<!\^\{{)  # no part of a word or of a number, no index, no exponent
    (?:(?<![)\]}}%])(?P<sign>-))?            # after a bracket a minus is an operation, as after a number
    (?:[$€£¥₹]\s?(?P<inner_sign>-)?)?
    (?:
        (?:(?P<whole>\d++)\ (?:and\ )?)?(?P<above>\d++)\s?/\s?(?P<below>\d++)(?![\d/])  # 3/4, 2 3/4
      | (?P<plain>{_DIGITS})
    )
    (?:e(?P<e>[-+]?\d\d?)\b | \s?(?:[×x*·]|\\times|\\cdot)\s?10\s?\^\s?\{{?(?P<power>[-+]?\d\d?)\}}?)?
    (?:\s?(?P<scale>thousand|million|billion|trillion)\b | (?P<k>k\b))?
    (?!\s?\^|(?:st|nd|rd|th)\b)              # 2^5 and 3rd are no amounts
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# What a final answer is announced by. `####` also begins a heading: it counts before a number, "#### 2. Add" does not.
_MARK = re.compile(
    r"####[^\w\n.\-]{0,6}(?=[-.\d$€£¥₹])(?!\d+[.):][ \t]+[a-z*])(?P<line>[^\n]*)"
    r"|<answer>(?P<tag>(?:(?!<answer>).)*?)</answer>",
    re.DOTALL | re.IGNORECASE,
)
_BOX = re.compile(r"\\boxed\s*\{|[{}]")
_PHRASE = re.compile(
    r"\banswer\b[^\d\n.]{0,80}?(?::|=|\b(?:is|are|be)\b(?!\s+not\b))[\s*_:$]*(?=(?P<rest>[^\n]{0,200}))", re.IGNORECASE
)
# 5 + 3 = 8: the value of a chain of sums is what stands at its end.
_CHAIN = re.compile(r"[^\w]*+(?:[\d\s.,$€£()+\-*/×÷·%]|\\times|\\div|\\cdot)*=")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*([\d,]+)\s*\}|(\d))\s*(?:\{\s*([\d,]+)\s*\}|(\d))")


def final_number(text: str) -> Fraction | None:
    """Read the number that a text gives as its answer, exactly.

    It is looked for in this order, and the last of each kind counts: what is marked, as `#### 18`, `\\boxed{18}` or
    `<answer>18</answer>`; what follows "the answer is"; any number. Commas, spaces and LaTeX between groups of digits,
    signs, decimals, fractions (`3/4`, `2 1/2`, `½`, `\\frac{3}{4}`), powers of ten and "million" are understood; number
    words are not.

    Args:
      text: a completion, or a solution of the dataset.

    Returns:
      The number, or None where there is none: in the text, or in what is marked as its answer.

    Example:
      >>> final_number("She pays 3 · $6 = **$1,018.50** in all.")
      Fraction(2037, 2)
      >>> final_number(r"So 3 of the 4 are left: \\boxed{\\frac{3}{4}}. Check: 1 - 1/4.")
      Fraction(3, 4)
      >>> final_number("I do not know.") is None
      True
    """
    text = _plain(text)
    marked = [(m.start(), m["line"] if m["tag"] is None else m["tag"]) for m in _MARK.finditer(text)]
    marked += _boxes(text)
    if marked:
        return _first_value(max(marked)[1])
    announced = [match["rest"] for match in _PHRASE.finditer(text) if _NUMBER.search(match["rest"])]
    if announced:
        return _first_value(announced[-1])
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def number_reward(column: str = "answer") -> Callable[..., Any]:
    """Score 1 where the number that a completion ends in is that of a column of the dataset, else 0.

    Both are read by `final_number`, so that the column may hold a number, its text, or a whole solution of GSM8K with
    `#### 18` at its end. A row whose column is None has no score.

    Args:
      column: the column with the truth.

    Returns:
      A reward function, named "accuracy".

    Raises:
      ValueError: by the reward function, for a row whose column holds no number.

    Example:
      >>> right = number_reward()
      >>> right(completions=["The answer is 1,018 apples.", "1018 or 1019"], answer=["1018", 1018])
      [1.0, 0.0]
    """
    return _NumberReward(column)


@dataclasses.dataclass(frozen=True)
class _NumberReward:
    """The reward function that `number_reward` returns."""

    column: str
    __name__ = "accuracy"

    @property
    def reward_arguments(self) -> dict[str, bool]:
        """The column hides behind `**columns`."""
        return {self.column: True}

    def __call__(self, *, completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
        return [
            None if truth is None else float(final_number(completion_text(completion)) == self._truth(truth))
            for completion, truth in zip(completions, columns[self.column], strict=True)
        ]

    def _truth(self, value: Any) -> Fraction:
        truth = final_number(str(value))
        if truth is None:
            raise ValueError(f"column {self.column!r} holds {str(value)[:80]!r}, in which there is no number.")
        return truth


def _plain(text: str) -> str:
    """Bring typographic and LaTeX spellings to one form: minus signs, separators, fractions."""
    text = re.sub("[\u2010\u2011\u2012\u2013\u2212]", "-", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!;:]\s?)(?=\d{3})", ",", text)
    text = re.sub(r"\\([$%])", r"\1", text)
    text = _FRACTION.sub(lambda m: _joined(m, f"{m[1] or m[2]}/{m[3] or m[4]}".replace(",", "")), text)
    return _VULGAR.sub(lambda m: _joined(m, unicodedata.normalize("NFKC", m[0]).replace("⁄", "/")), text)


def _joined(match: re.Match[str], fraction: str) -> str:
    """A fraction that follows a digit is the rest of a mixed number."""
    return " " * match.string[max(match.start() - 1, 0) : match.start()].isdigit() + fraction


def _boxes(text: str) -> Iterator[tuple[int, str]]:
    """Yield where each closed `\\boxed{…}` begins and what is in it."""
    opened: list[tuple[int, int] | None] = []
    for match in _BOX.finditer(text):
        if match[0] == "}":
            box = opened.pop() if opened else None
            if box is not None:
                yield box[0], text[box[1] : match.start()]
        else:
            opened.append((match.start(), match.end()) if match[0] != "{" else None)


def _first_value(text: str) -> Fraction | None:
    """The first number of an answer, or the end of the chain of sums that it begins with."""
    text, start = text[:200], 0
    while chain := _CHAIN.match(text, start):
        start = chain.end()
    match = _NUMBER.search(text, start)
    return _value(match) if match else None


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a number, None if it is too long or divides by 0."""
    if len(match[0]) > LONGEST:
        return None
    if match["plain"]:
        value = Fraction(re.sub(r"[^\d.]", "", match["plain"]))
    elif int(match["below"]) == 0:
        return None
    else:
        value = int(match["whole"] or 0) + Fraction(int(match["above"]), int(match["below"]))
    value *= Fraction(10) ** int(match["e"] or match["power"] or 0)
    value *= _SCALES[match["scale"].lower()] if match["scale"] else 1000 if match["k"] else 1
    return -value if match["sign"] or match["inner_sign"] else value
