"""Numbers as people and models write them: found in a text, read exactly, and compared with the truth of a dataset.

A unit, a currency and a percent sign do not count: `$18`, `18 apples`, `18 %` and `18.00` are the number 18.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from grpo_jax.messages import show
from grpo_jax.rewards.shipped import ColumnReward, completion_text

LONGEST = 60
"""Characters of a number at most; what is longer is no answer, and would be slow to read."""

_LONGEST_ANSWER = 200  # characters in which the number of an answer is looked for
_JUDGES = (
    "Leave such rows out, set the column to None for them and judge them by another reward function: accuracy_reward"
    " compares text, and formula_reward compares formulas by math_verify."
)

_DIGITS = r"""(?:
    \d{1,3}(?:,\d{3}){1,12}+(?!\d)(?:\.\d++)?     # 1,234,567.5
  | \d{1,3}(?:[\ \u00a0\u2009\u202f]\d{3}){1,12}+(?!\d)(?:\.\d++)?  # 1 234 567
  | \d++(?:\.\d++)?
  | \.\d++
)"""
_NUMBER = re.compile(
    rf"""
    (?<![^\W_])(?<![a-z\d]_)(?<!\.)          # no part of a word or of a number, no index
    (?<!\^)(?<!\^[-+{{])(?<!\^\{{[-+])          # no exponent
    (?<!√)(?<!√[{{(])                         # no root
    (?:(?<![)\]}}%])(?P<sign>-))?            # after a bracket a minus is an operation, as after a number
    (?:[$€£¥₹]\s?(?P<inner_sign>-)?)?
    (?>                                      # whole, or not at all: 2.5^2 is not 2
        (?:
            (?:(?P<whole>\d++)\ (?:and\ )?)?(?P<above>\d++)\s?/\s?(?P<below>\d++)(?![\d/])  # 3/4, 2 3/4
          | (?P<plain>{_DIGITS})
        )
        (?:e(?P<e>[-+]?\d\d?)\b | \s?[×x*·]\s?10\s?\^\s?\{{?(?P<power>[-+]?\d\d?)\}}?)?
        (?:\s?(?P<scale>thousand|million|billion|trillion)\b | (?P<k>k\b))?
    )
    (?!\s?\^|_[\d{{]|(?:st|nd|rd|th)\b)        # 2^5, 101_2 and 3rd are no amounts
    (?!\s?[*·×]?\s?[√π])                     # nor are 3√13 and 7π
    """,
    re.VERBOSE | re.IGNORECASE,
)

if TYPE_CHECKING:
    from grpo_jax.types import Messages, RewardFn, Row
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# Marks of a final answer. `####` also begins a heading: it counts before a number, "#### 2. Add" does not.
_MARK = re.compile(
    r"####[^\w\n.\-]{0,6}(?=[-.\d$€£¥₹])(?!\d+[.):][ \t]+[a-z*])(?P<line>[^\n]*)"
    r"|<answer>(?P<tag>(?:(?!<answer>).)*?)</answer>",
    re.DOTALL | re.IGNORECASE,
)
_BOX = re.compile(r"\\boxed\s*\{|[{}]")
# "The answer to both is 18", "Answer (in dollars): 18"; but not "express the answer as a percentage: 50 / 200",
# "2 points/answer = 48", "if you answer every question".
_PHRASE = re.compile(
    r"(?<!/)\banswer\b(?!\s(?:every|each|all|any|the|a|questions?)\b)"
    r"(?:[^\d\n.:=]{0,80}?\b(?:is|are|be)\b(?!\s+not\b)"
    r"|(?:\s(?:to|for)\s(?:the|this|part|question|problem|both)\b[^\d\n.:=]{0,60})?"
    r"[\s*_]*(?:\([^()\n]{0,40}\)[\s*_]*)?[:=])"
    r"[\s*_:$]*(?=(?P<rest>[^\n]{0,200}))",
    re.IGNORECASE,
)
# 5 + 3 = 8, 15 gallons * 8 pints / gallon = 120, f(2) = 18: the value of a chain is what stands at its end.
_TERM = r"[$€£(]*+(?:\d[\d.,]*+%?(?:\s?[a-z]++){0,3}+|[a-z]++)[)%]*+\s*+"
_CHAIN = re.compile(
    r"[^\w]*+(?:[\d\s.,$€£()+\-*/×÷·%√{}]*="
    r"|[a-z]\w*(?:\{[^{}=]{0,20}\}|\([^()=]{0,20}\))?[\s})]*="
    rf"|(?=[^=\n]{{1,99}}[-+*/×÷·][\s$(]*\d){_TERM}(?:[-+*/×÷·]\s*+{_TERM})++=)",
    re.IGNORECASE,
)

# Behind a number, signs that it is more than an amount: a sum, a product, a relation, a list, a variable.
_GOES_ON = re.compile(
    r"\s*(?:\\?%|°)?\s*(?:[-+±*×·<>≤≥]\s*[-\\$({]*\s*(?:\d|[√π∞]|[a-z](?!\s?[a-z]))"
    r"|/\s*\(?(?:\d|[√π]|[nxyz](?![a-z]))|:\s?\d"
    r"|(?:[,;](?:\s|\\[,;:! ])*|(?:\\text\w*\{\s*)?\b(?:or|and)\b[\s}]*)[-+\\$(]*[\d∞√π]"
    r"|\.?\\(?:over(?:line)?|[dtc]?frac|binom|log|ln)|(?<=\d)[abeinqr](?![a-z])|[xyz](?![a-z]))",
    re.IGNORECASE,
)
# Harmless beside the number of a truth: words, units, a name for it. Of what is left, `_FORMULA` is not.
_HARMLESS = re.compile(
    r"\\(?:text\w*|[mh]box|math(?:rm|bf|it)|rm|bf|left|right|q?quad|angle|displaystyle)(?![a-z])|\\[,;:! ]"
    r"|(?<=[a-z}])\s?\^\s?\{?-?\d\}?|\b[ckm]?m[23]\b|(?:^|=)\s*\+$",
    re.IGNORECASE,
)
_FORMULA = re.compile(r"[\\^√π∞∪∩<>≤≥±|+\d]|[-/]\s*$|^!")

_SIGNS = {
    **{"times": "×", "cdot": "·", "div": "÷", "pm": "±", "mp": "±", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥"},
    **{"infty": "∞", "pi": "π", "sqrt": "√", "degree": "°", "degrees": "°"},
}
_PART = r"(?:\{\s*([-+]?\s*(?:\d[\d,]{0,60}(?:\.\d{1,60})?|\.\d{1,60}))\s*\}|(\d))"
_FRACTION = re.compile(rf"(-?)\\[dtc]?frac\s*{_PART}\s*{_PART}")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
# Signs of a spelling that is brought to one form below. Most texts have none of them.
_SPELLED = re.compile(
    "[\\\\^_√\u2010-\u2013\u2212\u00bc-\u00be\u2150-\u215e¹²³\u2070-\u2089]|\\{,\\}|[=({][ \t]?-[ \t]|\\$-[ \t]"
)
_RING = r"(?:\\circ(?![a-z])|o(?![a-z])|[∘°])"
_SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile("[¹²³\u2070-\u207b]+"), lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}"),
    (re.compile("[\u2010\u2011\u2012\u2013\u2212]"), "-"),
    (re.compile(r"(?<=\d)(?:\{,\}(?:\\!)?|,?\\!\s?|\\[,;: ]\s?)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(rf"\s?\^\s?(?:\{{(?:\\[,;:! ]|\s)?(?:{_RING}|\\[a-z]{{2,6}}\{{o\}})\s?\}}|{_RING})"), "°"),
    (re.compile("[\u2080-\u2089]+"), "_{}"),
    (re.compile(rf"\\({'|'.join(_SIGNS)})(?![a-z])"), lambda match: _SIGNS[match[1]]),
    (re.compile(r"√\s?(?:\[[^\]\n]{0,9}\])?\s?([{(]?)\s?"), r"√\1"),
    (re.compile(r"(?:(?<=[=({])[ \t]?|(?<=\$))-[ \t](?=[\d.$\\])"), "-"),  # x = - 5
    (_FRACTION, lambda match: _divided(match)),
    (_VULGAR, lambda match: _joined(match, unicodedata.normalize("NFKC", match[0]).replace("⁄", "/"))),
    # Indices and exponents; a whole exponent may be that of a power of ten.
    (re.compile(r"_\{[^{}\n]{0,40}\}"), "_{}"),
    (re.compile(r"\^\s?\{(?!\s?[-+]?\d\d?\s?\})[^{}\n]{0,40}\}"), "^{}"),
)


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
    answer, marked = _answer(text)
    if answer is not None:
        number = _first_number(answer)
        return None if number is None or (marked and _is_more(answer, number)) else _value(number)
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def sole_number(text: str) -> Fraction | None:
    """Read a text that stands for one number and for nothing else, as the truth of a row has to.

    Args:
      text: what is marked or announced as its answer (see `final_number`), or else all of it, is a number, and at most
        its unit and other words beside it, or a name before it (`x = 5`). A chain of sums stands for its end.

    Returns:
      The number; None where there is none, several of them, a formula, an interval, or a numeral with its base.

    Example:
      >>> [str(sole_number(text)) for text in (r"\\frac{-100}{9}", r"90^\\circ", r"12\\text{ cm}^2", "3 + 15 = 18")]
      ['-100/9', '90', '12', '18']
      >>> [sole_number(text) for text in (r"3\\sqrt{13}", "(3, 4)", "x + 2", "1011_2", "B")]
      [None, None, None, None, None]
    """
    text = _plain(text)
    answer, _ = _answer(text)
    answer = _signed(text) if answer is None else answer
    number = _first_number(answer)
    if number is None or _is_more(answer, number) or _is_formula(answer[number.end() :]):
        return None
    return _value(number)


def number_reward(column: str = "answer") -> RewardFn:
    """Score 1 where the number that a completion ends in is that of a column of the dataset, else 0.

    The completion is read by `final_number`, the column by `sole_number`: it may hold a number, its text, or a whole
    solution of GSM8K with `#### 18` at its end. A row whose column is None has no score.

    Args:
      column: the column with the truth.

    Returns:
      A reward function, named "accuracy". Its `check_rows` is called by a run before anything is sampled, and refuses
      all rows at once whose column is no single number (3√13, an interval, a word), which it would judge wrongly.

    Raises:
      ValueError: by the reward function, for such a row.

    Example:
      >>> right = number_reward()
      >>> right(completions=["The answer is 1,018 apples.", "1018 or 1019"], answer=["1018", 1018])
      [1.0, 0.0]
      >>> right.check_rows([{"answer": "18"}, {"answer": r"3\\sqrt{13}"}])
      Traceback (most recent call last):
      ValueError: reward function 'accuracy' compares numbers, and 1 of 2 rows of the dataset have no single one in ...
    """
    return _NumberReward(column)


@dataclasses.dataclass(frozen=True)
class _NumberReward(ColumnReward):
    """The reward function that `number_reward` returns."""

    def __call__(self, *, completions: Sequence[str | Messages], **columns: Sequence[Any]) -> list[float | None]:
        return [
            None if truth is None else float(final_number(completion_text(completion)) == self._truth(truth))
            for completion, truth in zip(completions, columns[self.column], strict=True)
        ]

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        """Raise ValueError if there are rows that this function cannot judge."""
        self.refuse_rows(rows, _truth_of, argument, compares="numbers", without="no single one", mend=_JUDGES)

    def _truth(self, value: object) -> Fraction:
        truth = _truth_of(str(value))
        if truth is None:
            raise ValueError(f"column {self.column!r} holds {show(value, 60)}, which is no single number. {_JUDGES}")
        return truth


# A group has one truth for all of its completions.
_truth_of = functools.lru_cache(1024)(sole_number)


def _answer(text: str) -> tuple[str | None, bool]:
    """Return the answer that a text marks or announces, None if there is none; and whether it is marked."""
    marks = [(m.start(), m["line"] if m["tag"] is None else m["tag"]) for m in _MARK.finditer(text)]
    marks += _boxes(text)
    if marks:
        return _signed(max(marks)[1][:_LONGEST_ANSWER]), True
    announced = [match["rest"] for match in _PHRASE.finditer(text) if _NUMBER.search(match["rest"])]
    return (announced[-1] if announced else None), False


def _signed(answer: str) -> str:
    """An answer whose sign, if it begins with one, stands at its number."""
    return re.sub(r"^\s*-\s+(?=[\d.$])", "-", answer)


def _plain(text: str) -> str:
    """Bring typographic and LaTeX spellings to one form."""
    if _SPELLED.search(text):
        for pattern, plain in _SPELLINGS:
            text = pattern.sub(plain, text)
    return text


def _divided(match: re.Match[str]) -> str:
    """A fraction of LaTeX in one line: of whole numbers, with its signs as one before it."""
    minus, *parts = match.groups()
    above, below = (Fraction(re.sub(r"[\s,]", "", part) or 0) for part in parts if part is not None)
    value = (-above if minus else above) / below if below else None
    if value is None:
        return f"{abs(above)}/0"
    written = f"{abs(value.numerator)}/{value.denominator}"
    return _joined(match, "-" * (value < 0) + written) if not minus else ("-" if value < 0 else "+") + written


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
                # Within a formula an exclamation mark is a factorial: more than the number before it.
                yield box[0], re.sub(r"(?<=[\d)}])\s?!", "^{}", text[box[1] : match.start()])
        else:
            opened.append((match.start(), match.end()) if match[0] != "{" else None)


def _first_number(text: str) -> re.Match[str] | None:
    """The first number of an answer, or that at the end of the chain of sums that the answer begins with."""
    return _NUMBER.search(text, _after_chain(text))


def _is_more(answer: str, number: re.Match[str]) -> bool:
    """Whether the first number of an answer is a part of what the answer is: a formula, a list, a relation."""
    before = answer[_after_chain(answer) : number.start()]
    return _is_formula(before) or _GOES_ON.match(answer, number.end()) is not None


def _is_formula(part: str) -> bool:
    """Whether what stands beside a number is more than its unit, words, or a name for it."""
    return _FORMULA.search(_HARMLESS.sub("", part)) is not None


def _after_chain(text: str) -> int:
    """Where the chain of sums ends that a text begins with."""
    start = 0
    while chain := _CHAIN.match(text, start):
        start = chain.end()
    return start


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
