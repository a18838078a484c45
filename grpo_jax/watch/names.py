"""Names of metrics as a person reads them, and forms of what is written down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_NO_SCORE = {
    "mean_length",
    "min_length",
    "max_length",
    "clipped_ratio",
    "seconds",
    "std",
    "missing",
    "errors",
    "unscored",
}


def held_out(name: str) -> str | None:
    """Return what an `eval/` metric is a score of; None for one that is no score, or not of an evaluation.

    Example:
      >>> [held_out(name) for name in ("eval/accuracy", "eval/rewards/accuracy/mean", "eval/mean_length", "kl")]
      ['accuracy', 'accuracy', None, None]
    """
    if not name.startswith("eval/") or name.rpartition("/")[2] in _NO_SCORE:
        return None
    return name.removeprefix("eval/").removeprefix("rewards/").removesuffix("/mean")


def is_dialogue(value: Any) -> bool:
    """Return whether the `turns` of a row of `completions.jsonl` are who said what in a completion of several turns.

    Example:
      >>> is_dialogue([{"by": "policy", "text": "32"}, {"by": "environment", "text": "higher"}]), is_dialogue([2])
      (True, False)
    """
    return (
        isinstance(value, list)
        and value != []
        and all(isinstance(turn, dict) and turn.keys() == {"by", "text"} for turn in value)
    )


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: arrays as lists, their scalars as numbers, NaN and infinities as None.

    Example:
      >>> import numpy as np
      >>> plain({"loss": np.float32(0.5), "kl": float("nan"), "lengths": np.arange(2)})
      {'loss': 0.5, 'kl': None, 'lengths': [0, 1]}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def many(count: int, noun: str, plural: str = "s") -> str:
    """Return a count with its noun: "1 prompt", "2 prompts"."""
    return f"{count} {noun}{plural if count != 1 else ''}"


def short(number: float, unit: str = "") -> str:
    """Return a number to three digits with its SI prefix: "1.23 M", "14.8 GB"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()
