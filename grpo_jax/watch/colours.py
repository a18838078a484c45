"""The colours that a meaning has in every picture and page of a run, on white and on dark.

They begin with Okabe and Ito's, which colour-blind readers tell apart, darker where a line of the original would be too
pale on white, each with a lighter one for dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

COLOURS = {
    "policy": ("#0072b2", "#56b4e9"),
    "reference": ("#5c4d9e", "#a99be6"),
    "start": ("#52606d", "#b8c2cc"),
    "high": ("#d55e00", "#f28c4b"),
    "low": ("#b8578f", "#e08cba"),
    "rollout": ("#b87d00", "#f0bb45"),
    "evaluation": ("#1595b0", "#67d3e8"),
    "nothing": ("#8793a0", "#74808c"),
    "reward0": ("#009e73", "#2cc99b"),
    "reward1": ("#7c7f00", "#c6c94a"),
    "reward2": ("#7f5539", "#c29a7b"),
    "reward3": ("#9b1d64", "#f06aae"),
}
"""Meaning → colour on white and on dark.

`policy` is the policy that is trained, and its updates; `reference` the reference; `start` the state before training;
`high` and `low` are beyond a bound, or on the wrong side; `rollout` and `evaluation` those phases; `nothing` teaches or
says nothing; `reward0` … are the reward functions, the first also a right answer.
"""

SERIES = ("policy", "high", "reward0", "low", "rollout", "reference", "reward2", "evaluation", "start", "reward1")
"""The colours of curves that have no meaning of their own: runs beside each other, tasks of a suite."""

PHASES = {"rollout": "rollout", "reference": "reference", "rewards": "reward0", "update": "policy"}
PHASES |= {"evaluation": "evaluation", "other": "nothing"}
"""Phase of a run → meaning."""


class Theme(NamedTuple):
    """Colours of the page, of text, of quiet text and of the lines of a grid."""

    page: str
    ink: str
    grey: str
    grid: str


LIGHT = Theme("#ffffff", "#1f2933", "#5d6b7a", "#e4e7eb")
DARK = Theme("#1c2229", "#e6eaee", "#9aa7b4", "#333c46")


def colour(meaning: str, *, dark: bool = False) -> str:
    """Return the colour of a meaning.

    Example:
      >>> colour("policy"), colour("policy", dark=True)
      ('#0072b2', '#56b4e9')
    """
    return COLOURS[meaning][dark]


def reward_meanings(names: Iterable[str]) -> dict[str, str]:
    """Return name → meaning of reward functions; of more than there are colours for, some share one.

    Example:
      >>> reward_meanings(["accuracy", "format", "accuracy"])
      {'accuracy': 'reward0', 'format': 'reward1'}
    """
    colours = [meaning for meaning in COLOURS if meaning.startswith("reward")]
    return {name: colours[i % len(colours)] for i, name in enumerate(dict.fromkeys(names))}


def as_css(*, dark: bool) -> str:
    """Return the declarations of a style sheet: `--policy: #0072b2; …`."""
    return " ".join(f"--{meaning}: {colour(meaning, dark=dark)};" for meaning in COLOURS)
