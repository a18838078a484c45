"""Rewards of the parts of a completion: one number for each turn, or one for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.messages import show
from grpo_jax.rewards.contract import read_number


class RewardParts(NamedTuple):
    """The rewards of the parts of one completion by one reward function; JSON has a form for it.

    Attributes:
      completion: its index, prompt-major.
      function: k, of the reward function.
      of_tokens: whether there is a number for each token, of the policy and of what it observed; else for each turn.
      values: the numbers.
    """

    completion: int
    function: int
    of_tokens: bool
    values: list[float]


class PartReader:
    """Reads what a reward function returned for a completion: a number, or numbers of its parts, whose sum counts.

    A list has one number for each turn, an array one for each token. `parts` holds the parts that were read so far.
    """

    def __init__(self, function: int, turns: Sequence[int], tokens: Sequence[int]):
        self._function, self._turns, self._tokens = function, turns, tokens
        self.parts: list[RewardParts] = []

    def __call__(self, index: int, item: object) -> float | str:
        """Return the reward of a completion, NaN for None; or what is wrong with it."""
        as_list = getattr(item, "tolist", None)  # of arrays, and of numbers that are none of Python's
        plain = item if as_list is None else as_list()
        if not isinstance(plain, (list, tuple)):
            return read_number(item)
        of_tokens = as_list is not None
        kind, unit, wanted = ("an array", "token", self._tokens) if of_tokens else ("a list", "turn", self._turns)
        numbers = [read_number(one) for one in plain]
        if len(numbers) != wanted[index]:
            return f"{read_number(item)}, or {kind} with one for each {unit} ({wanted[index]})"
        bad = next((i for i, one in enumerate(numbers) if isinstance(one, str) or np.isnan(one)), None)
        if bad is not None:
            return f"returned {show(item)}, and its number of {unit} {bad} is none that is finite"
        values = [float(one) for one in numbers]
        self.parts.append(RewardParts(index, self._function, of_tokens, values))
        return read_number(float(np.sum(values)))


def place_rewards(
    rewards: np.ndarray, parts: Sequence[RewardParts], turns: np.ndarray, present: np.ndarray
) -> np.ndarray:
    """Return each reward at the token that it was given for, [B, G, T, K] float32; NaN where a function has not scored.

    The reward of a completion stands at its last drawn token, that of a turn at the turn's last.

    Args:
      rewards: [B, G, K] float32, NaN for "not scored".
      parts: the parts of rewards that are sums.
      turns: [B, G, T] int32, the turn of each drawn token; −1 elsewhere.
      present: [B, G, T] bool, all tokens of a completion.
    """
    b, g, t = turns.shape
    turns, present = turns.reshape(-1, t), present.reshape(-1, t)
    flat = rewards.reshape(b * g, -1)
    placed = np.zeros((b * g, t, flat.shape[1]), np.float32)
    last = t - 1 - np.argmax(turns[:, ::-1] >= 0, axis=1)
    placed[np.arange(b * g), last] = flat
    for part in parts:
        row = turns[part.completion]
        if part.of_tokens:
            at = np.flatnonzero(present[part.completion])
        else:
            at = np.array([np.flatnonzero(row == n)[-1] for n in range(len(part.values))])
        placed[part.completion, :, part.function] = 0
        placed[part.completion, at, part.function] = part.values
    placed = np.where(np.isnan(flat)[:, None], np.float32(np.nan), placed)
    return placed.reshape(b, g, t, -1)
