"""Reading what reward functions return: numbers, numbers of turns or tokens, faults of some completions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.messages import show
from grpo_jax.rewards.contract import RewardError

if TYPE_CHECKING:
    from grpo_jax.types import Scores

# A Python float: NumPy would round the other operand of a comparison to float32, and overflow.
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Faults = dict[int | None, BaseException | str]
"""An exception or a message by the index of its completion; None is the key of a fault of all completions."""


class PartialRewards(RewardError):
    """Raised by a reward function that could not score some completions.

    Attributes:
      values: a float or None for each completion.
      faults: the faults of the others.
    """

    def __init__(self, values: Scores, faults: Faults):
        index, fault = next(iter(faults.items()))
        which = "all" if index is None else f"{len(faults)} of {len(values)}; completion {index}"
        super().__init__(f"completions without a score because of a fault: {which} {describe_fault(fault)}")
        self.values = list(values)
        self.faults: Faults = dict(faults)


def describe_fault(fault: BaseException | str) -> str:
    """Return a fault as the end of a sentence that begins with the name of the function."""
    return fault if isinstance(fault, str) else f"raised {type(fault).__name__}: {fault}"


def give_scores(values: np.ndarray, faults: Faults) -> list[float | None]:
    """Return scores as a reward function does, None for NaN; raise `PartialRewards` if there are faults."""
    scores = [None if np.isnan(value) else float(value) + 0.0 for value in values]  # + 0.0 turns −0 into 0
    if faults:
        raise PartialRewards(scores, faults)
    return scores


def read_outcome(
    outcome: object, count: int, read: Callable[[int, object], float | str] | None = None
) -> tuple[np.ndarray, Faults]:
    """Validate the result of a reward function, or its exception.

    Args:
      outcome: the result.
      count: the number of completions.
      read: returns the reward of one completion, or a fault, from its index and value. None: `read_number`.

    Returns:
      [count] float64, NaN for None and for faults; and the faults.
    """
    if isinstance(outcome, PartialRewards):
        values, faults = read_outcome(outcome.values, count, read)
        return values, faults | outcome.faults
    values, faults = np.full(count, np.nan), {}
    items = _items(outcome, count)
    if not isinstance(items, list):
        return values, {None: items}
    for index, item in enumerate(items):
        value = read_number(item) if read is None else read(index, item)
        if isinstance(value, str):
            faults[index] = value
        else:
            values[index] = value
    return values, faults


def _items(outcome: Any, count: int) -> list[Any] | BaseException | str:
    """Return the `count` values of a result as a list, or a fault."""
    if isinstance(outcome, BaseException):
        return outcome
    try:
        if hasattr(outcome, "tolist"):  # arrays of NumPy, JAX and PyTorch: one transfer instead of one per element
            outcome = outcome.tolist()  # raises here if the asynchronous computation of the array has failed
        some = isinstance(outcome, Iterable) and not isinstance(outcome, (str, bytes, Mapping, set, frozenset))
        items = list(itertools.islice(outcome, count + 1)) if some else None  # a generator may be infinite
    except Exception as error:
        return error
    if outcome is None:
        return "returned None instead of a list (is its `return` missing?)"
    if items is None:
        wanted = f"a list with one float or None for each of the {count} completions is needed"
        return f"returned {show(outcome)}, a {type(outcome).__name__}; {wanted}"
    if len(items) != count:
        many = f"more than {count}" if items[count:] else len(items)
        length = len(outcome) if isinstance(outcome, Sized) else many
        return f"returned {length} values for {count} completions; exactly one for each is needed"
    return items


def read_number(item: Any) -> float | str:
    """Return one reward as a float, NaN for None; or a fault."""
    if item is None:
        return np.nan
    try:
        number = None if isinstance(item, (str, bytes)) or np.ndim(item) or np.iscomplexobj(item) else float(item)
    except OverflowError:
        number = np.inf
    except (TypeError, ValueError):
        number = None
    if number is None:
        return f"returned {show(item)}, a {type(item).__name__}; rewards are numbers, or None for 'not scored'"
    if np.isnan(number):
        return "returned nan; return None for 'not scored'"
    if abs(number) > _FLOAT32_MAX:
        return f"returned {number}; rewards are finite, in the range of float32"
    return number


# Rewards of turns and tokens ------------------------------------------------------------------------------------------


class RewardParts(NamedTuple):
    """The rewards of the turns or tokens of one completion, by one reward function.

    Attributes:
      completion: index of the completion, prompt-major.
      function: index of the reward function, in 0..K−1.
      per_token: True: one number for each token, observed ones included. False: one for each turn.
      values: the numbers.
    """

    completion: int
    function: int
    per_token: bool
    values: list[float]


def read_parts(
    completion: int,
    item: object,
    *,
    function: int,
    turns: Sequence[int],
    tokens: Sequence[int],
    found: list[RewardParts],
) -> float | str:
    """Return the reward of a completion, NaN for None, or a fault; append rewards of turns or tokens to `found`.

    A list has one number for each turn, an array one for each token. The reward is their sum. `turns` and `tokens` are
    the numbers of them in each completion.
    """
    to_list = getattr(item, "tolist", None)  # arrays, and scalars of NumPy and JAX
    plain = item if to_list is None else to_list()
    if not isinstance(plain, (list, tuple)):
        return read_number(item)
    per_token = to_list is not None
    kind, unit, sizes = ("an array", "token", tokens) if per_token else ("a list", "turn", turns)
    if len(plain) != (wanted := sizes[completion]):
        return f"{read_number(item)}, or {kind} with one for each {unit} ({wanted})"
    values = [read_number(one) for one in plain]
    bad = next((i for i, one in enumerate(values) if isinstance(one, str) or np.isnan(one)), None)
    if bad is not None:
        return f"returned {show(item)}, whose number for {unit} {bad} is not finite"
    numbers = [float(one) for one in values]
    found.append(RewardParts(completion, function, per_token, numbers))
    return read_number(float(np.sum(numbers)))


def place_rewards(
    rewards: np.ndarray, parts: Sequence[RewardParts], turns: np.ndarray, present: np.ndarray
) -> np.ndarray:
    """Return each reward at the token that it was given for, [B, G, T, K] float32; NaN for "not scored".

    The reward of a completion is at its last sampled token, the reward of a turn at the turn's last.

    Args:
      rewards: [B, G, K] float32, NaN for "not scored".
      parts: the parts of rewards that are sums.
      turns: [B, G, T] int32, the turn of each sampled token; −1 elsewhere.
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
        if part.per_token:
            at = np.flatnonzero(present[part.completion])
        else:
            at = np.array([np.flatnonzero(row == n)[-1] for n in range(len(part.values))])
        placed[part.completion, :, part.function] = 0
        placed[part.completion, at, part.function] = part.values
    placed = np.where(np.isnan(flat)[:, None], np.float32(np.nan), placed)
    return placed.reshape(b, g, t, -1)
