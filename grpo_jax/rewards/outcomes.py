"""Validation of returned rewards for completions, turns or tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.messages import show
from grpo_jax.rewards.contract import RewardError

if TYPE_CHECKING:
    from grpo_jax.types import RewardValues

# A Python float, since a comparison with a NumPy float32 would convert the other operand, which may overflow.
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Failures = dict[int | None, BaseException | str]
"""Exceptions or messages, keyed by completion index. The key None means that the whole call failed."""


class PartialRewards(RewardError):
    """Raised by a reward function that could score only some of its completions.

    `values` contains a reward or None for each completion, and `failures` the reasons for missing values.
    """

    def __init__(self, values: RewardValues, failures: Failures):
        index, failure = next(iter(failures.items()))
        which, at = ("all", "") if index is None else (f"{len(failures)} of {len(values)}", f"for completion {index}, ")
        super().__init__(f"missing rewards for {which} completions: {at}the function {describe_failure(failure)}")
        self.values = list(values)
        self.failures: Failures = dict(failures)


def describe_failure(failure: BaseException | str) -> str:
    """Return a verb phrase that describes an error, to follow the function's name in a message."""
    return failure if isinstance(failure, str) else f"raised {type(failure).__name__}: {failure}"


def as_scores(values: np.ndarray, failures: Failures) -> list[float | None]:
    """Convert scores to a list with None for NaN. Raises `PartialRewards` if there are errors."""
    scores = [None if np.isnan(value) else float(value) + 0.0 for value in values]  # + 0.0 turns −0 into 0
    if failures:
        raise PartialRewards(scores, failures)
    return scores


def read_outcome(
    outcome: object, count: int, read_item: Callable[[int, object], float | str] | None = None
) -> tuple[np.ndarray, Failures]:
    """Validate a reward function's result or exception. Returns scores [count] float64 (NaN if missing) and errors.

    `read_item(index, value)` converts a completion's value to a float or an error message (default: `read_number`).
    """
    if isinstance(outcome, PartialRewards):
        values, failures = read_outcome(outcome.values, count, read_item)
        return values, failures | outcome.failures
    values, failures = np.full(count, np.nan), {}
    items = _items(outcome, count)
    if not isinstance(items, list):
        return values, {None: items}
    for index, item in enumerate(items):
        value = read_number(item) if read_item is None else read_item(index, item)
        if isinstance(value, str):
            failures[index] = value
        else:
            values[index] = value
    return values, failures


def _items(outcome: Any, count: int) -> list[Any] | BaseException | str:
    """Convert a result to a list of `count` values. Returns an exception or error message if the result is invalid."""
    if isinstance(outcome, BaseException):
        return outcome
    try:
        if hasattr(outcome, "tolist"):  # NumPy, JAX and PyTorch arrays: one transfer instead of one per element
            outcome = outcome.tolist()  # raises if the array's asynchronous computation failed
        listed = isinstance(outcome, Iterable) and not isinstance(outcome, (str, bytes, Mapping, set, frozenset))
        items = list(itertools.islice(outcome, count + 1)) if listed else None  # a generator may be infinite
    except Exception as error:
        return error
    if outcome is None:
        return "returned None instead of a list; check that it has a return statement"
    if items is None:
        return f"must return a list with a float or None per completion, {count} in total; got {show(outcome)}"
    if len(items) != count:
        length = len(outcome) if isinstance(outcome, Sized) else f"more than {count}" if items[count:] else len(items)
        return f"must return one value per completion, {count} in total; got {length}"
    return items


def read_number(item: Any) -> float | str:
    """Convert one reward to a float (NaN for None). Returns an error message if the reward is invalid."""
    if item is None:
        return np.nan
    try:
        # NumPy cannot read PyTorch scalars that have dtype bfloat16, are on a GPU, or require a gradient.
        scalar = item.tolist() if hasattr(item, "tolist") else item
        is_invalid = isinstance(scalar, (str, bytes)) or np.ndim(scalar) or np.iscomplexobj(scalar)
        number = None if is_invalid else float(scalar)
    except OverflowError:
        number = np.inf
    except (TypeError, ValueError):
        number = None
    if number is None:
        return f"returned {show(item)} of type {type(item).__name__} instead of a number or None"
    if np.isnan(number):
        return "returned nan instead of a number or None"
    if abs(number) > _FLOAT32_MAX:
        return f"returned {number}, which is not finite in float32"
    return number


class RewardParts(NamedTuple):
    """Rewards from one function for the turns of one completion, or for its tokens if `per_token` is True."""

    completion: int  # prompt-major index
    function: int  # index in 0..K−1
    per_token: bool
    values: list[float]


def read_reward(
    completion: int,
    item: object,
    *,
    function: int,
    turn_counts: Sequence[int],
    token_counts: Sequence[int],
    parts: list[RewardParts],
) -> float | str:
    """Return a completion's reward (NaN for None) or an error message. Appends rewards for its parts to `parts`.

    `item` is a number, None, a list with one reward per turn, or an array with one reward per token. The completion's
    reward is their sum. `turn_counts` and `token_counts` have one entry per completion.
    """
    to_list = getattr(item, "tolist", None)  # NumPy and JAX arrays and scalars
    items = item if to_list is None else to_list()
    if not isinstance(items, (list, tuple)):
        return read_number(item)
    per_token = to_list is not None
    kind, unit, sizes = ("an array", "token", token_counts) if per_token else ("a list", "turn", turn_counts)
    if len(items) != (wanted := sizes[completion]):
        return f"{read_number(item)}, or {kind} with one reward per {unit} ({wanted})"
    values = [read_number(x) for x in items]
    invalid = next((i for i, x in enumerate(values) if isinstance(x, str) or np.isnan(x)), None)
    if invalid is not None:
        return f"returned {show(item)}; the reward for {unit} {invalid} must be a finite number"
    rewards = [float(x) for x in values]
    parts.append(RewardParts(completion, function, per_token, rewards))
    return read_number(float(np.sum(rewards)))


def place_rewards(
    rewards: np.ndarray, parts: Sequence[RewardParts], turns: np.ndarray, attended: np.ndarray
) -> np.ndarray:
    """Convert rewards [B, G, K] and their parts to rewards per token [B, G, T, K] float32. NaN means "not scored".

    The reward for a completion or a turn is placed at its last sampled token, and rewards per token at the attended
    tokens. `turns` [B, G, T] contains the turn index of each sampled token, and −1 elsewhere. `attended` [B, G, T] is
    True for all tokens in a completion.
    """
    b, g, t = turns.shape
    turns, attended = turns.reshape(-1, t), attended.reshape(-1, t)
    flat = rewards.reshape(b * g, -1)
    placed = np.zeros((b * g, t, flat.shape[1]), np.float32)
    last = t - 1 - np.argmax(turns[:, ::-1] >= 0, axis=1)
    placed[np.arange(b * g), last] = flat
    for part in parts:
        row = turns[part.completion]
        if part.per_token:
            positions = np.flatnonzero(attended[part.completion])
        else:
            positions = np.array([np.flatnonzero(row == n)[-1] for n in range(len(part.values))])
        placed[part.completion, :, part.function] = 0
        placed[part.completion, positions, part.function] = part.values
    placed = np.where(np.isnan(flat)[:, None], np.float32(np.nan), placed)
    return placed.reshape(b, g, t, -1)
