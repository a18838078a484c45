"""The contract of reward functions: what they are called with, and what they may return."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from grpo_jax.messages import nearest, problems_of, raise_all, show

if TYPE_CHECKING:
    from grpo_jax.types import Json, RewardFn, Rewards, Row

SAMPLED = ("prompts", "completions", "completion_ids")


EXTRAS = ("trainer_state", "log_metric", "log_extra")
"""Arguments besides lists, as in TRL; functions that name them get them from `extras.Extras.given`."""


ON_ERROR = ("raise", "none")


_Returned = TypeVar("_Returned")
# As a Python float: against NumPy's own scalar a greater number would be rounded to float32 first, and overflow.
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class RewardError(ValueError):
    """A reward function failed, or returned something that is no list of rewards."""


class SetupError(RewardError):
    """A mistake of the program, not of a completion: it ends the run whatever `on_reward_error` is."""


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame that is none of this package's: where the caller's own code begins."""
    package = Path(__file__).parent.parent
    while trace is not None and package in Path(trace.tb_frame.f_code.co_filename).parents:
        trace = trace.tb_next
    return trace


class ShortTraceback:
    """A context that an error of a reward function leaves without the frames in between, which say nothing of it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RewardError):
            error.__traceback__ = None


Faults = dict[int | None, BaseException | str]
"""A fault by the index of its completion; under None one that concerns all of them."""


class PartialRewards(RewardError):
    """Some completions could not be scored: `values` has one float or None per completion, `faults` what happened."""

    def __init__(self, values: Rewards, faults: Faults):
        index, fault = next(iter(faults.items()))
        which = "all" if index is None else f"{len(faults)} of {len(values)}; completion {index}"
        super().__init__(f"completions without a score because of a fault: {which} {describe_fault(fault)}")
        self.values = list(values)
        self.faults: Faults = dict(faults)


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """How far a run is, for reward functions that change on the way: TRL's `trainer_state`, as far as it is used.

    Attributes:
      global_step: optimizer steps done.
      max_steps: those of the whole run; 0 outside of one.
      epoch: times the dataset has been gone through.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


def reward_names(reward_fns: RewardFn | Sequence[RewardFn]) -> list[str]:
    """Return one name for each reward function, distinct and fit to be the key of a metric.

    Of several functions with one name the second is called `name_2`, and so on.
    """
    names: list[str] = []
    for fn in as_list(reward_fns):
        name = function_name(fn)
        copies = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        names.append(next(candidate for candidate in copies if candidate not in names))
    return names


def check_reward_fns(
    reward_fns: RewardFn | Sequence[RewardFn],
    columns: Iterable[str] | None,
    *,
    extras: Iterable[str] = (),
    argument: str = "the dataset",
    rows: Sequence[Row] = (),
) -> None:
    """Raise ValueError for reward functions that cannot be called, or that cannot judge some rows; before any sampling.

    Refused are: no function at all, something that is not callable, a column named like what was sampled, an argument
    without a default that is neither sampled, nor a column, nor an extra. Of several faults, all are reported.

    Args:
      reward_fns: K reward functions, or one.
      columns: the names of the dataset's columns; None: not known, and arguments are not looked at.
      extras: the names of further arguments, such as `trainer_state`.
      argument: the caller's name for the dataset, for the messages.
      rows: of the dataset, which `check_rows` is called with.
    """
    fns = as_list(reward_fns)
    if not fns:
        raise ValueError("reward_fns is empty: give at least one reward function")
    if columns is None:
        return
    columns, extras = [column for column in columns if column != "prompt"], list(extras)
    taken = sorted({*columns} & {*SAMPLED, *extras})
    problems = [f"{argument} has a column {name!r}, which the trainer itself gives: rename it" for name in taken]
    for fn, name in zip(fns, reward_names(fns), strict=True):
        problems += _signature_problems(fn, name, columns, extras, argument)
    if len(problems) == 1:
        raise ValueError(problems[0])
    raise_all("reward_fns", problems)
    check_rows(fns, rows, argument=argument)


def check_rows(
    reward_fns: RewardFn | Sequence[RewardFn], rows: Sequence[Row], *, argument: str = "the dataset"
) -> None:
    """Raise ValueError if reward functions say that there are rows they cannot judge; of several functions, all.

    A function says so by a method `check_rows(rows, argument=...)` that raises ValueError for all such rows at once;
    combinators and isolated functions ask the functions inside.
    """
    problems = []
    for fn in as_list(reward_fns):
        check = getattr(fn.func if isinstance(fn, functools.partial) else fn, "check_rows", None)
        try:
            if check is not None:
                check(rows, argument=argument)
        except ValueError as error:
            problems += problems_of(error)
    if len(problems) == 1:
        raise ValueError(problems[0])
    raise_all("reward_fns", problems)


def _signature_problems(fn: RewardFn, name: str, columns: list[str], extras: list[str], argument: str) -> Iterator[str]:
    """Yield what keeps a function from being called."""
    known = [*SAMPLED, *columns, *extras]
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters_of(fn)):
        yield f"reward function {name!r} has positional-only arguments: they are given by keyword"
        return
    unknown = [wanted for wanted, required in arguments_of(fn).items() if required and wanted not in known]
    for wanted in unknown:
        near = nearest(wanted, known)
        yield (
            f"reward function {name!r} needs the argument {wanted!r}, which is no column of {argument} "
            f"(columns: {', '.join(columns) or 'none'}; also given: {', '.join([*SAMPLED, *extras])})"
            + (f"; did you mean {near!r}?" if near else "")
        )
    if not unknown and not takes_everything(fn) and not {*arguments_of(fn)} & {*known}:
        yield (
            f"reward function {name!r} takes nothing that it could be given "
            f"({', '.join(known)}): if it makes a reward function, call it first: {name}(...)"
        )


def as_list(reward_fns: RewardFn | Sequence[RewardFn]) -> list[RewardFn]:
    """Return one or several reward functions as a list, all of them callable."""
    fns = [reward_fns] if callable(reward_fns) or isinstance(reward_fns, str) else list(reward_fns)
    for fn in fns:
        if not callable(fn):
            raise ValueError(
                f"reward_fns holds {fn!r}, which cannot be called: give functions (a reward model is wrapped in one)"
            )
    return fns


def function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function, of a partial's function, or of an object's class."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")


def parameters_of(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function; of a builtin without a signature, `**kwargs`."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def is_async(fn: Callable[..., Any]) -> bool:
    """Return whether a function, what a partial binds, or an object's `__call__` is declared `async`."""
    if isinstance(fn, functools.partial):
        return is_async(fn.func)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def takes_everything(fn: Callable[..., Any]) -> bool:
    """Return whether a function has `**kwargs`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(fn))


def arguments_of(fn: Callable[..., Any]) -> dict[str, bool]:
    """Return the keywords that a function names, and whether each is required.

    What hides behind `**kwargs` is said by an attribute `reward_arguments` of the same form.
    """
    # A keyword that a partial has bound is the user's choice; a column of that name must not replace it.
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters_of(fn)
        if parameter.kind not in variadic and parameter.name not in bound
    }
    return named | dict(getattr(fn, "reward_arguments", {}))


_UNCHANGEABLE = frozenset((str, int, float, bool, complex, bytes, type(None)))


def own_copy(value: Any) -> Any:
    """Copy what a row or a completion holds, for somebody who may change it: lists, dicts, sets and arrays, all deep.

    Text and numbers stay as they are, and so does any other object: a callable, a client or a picture may be large, may
    refuse to be copied, and may be one for all rows on purpose. An object that stands in two places becomes two.
    """
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if isinstance(value, (list, dict)):
        new: Any = copy.copy(value)  # which a subclass answers in its own way: a defaultdict stays one
        items = value.values() if isinstance(value, dict) else value
        if not _UNCHANGEABLE.issuperset(map(type, items)):  # a list of token ids is one step, and not one for each
            for place, item in value.items() if isinstance(value, dict) else enumerate(value):
                new[place] = own_copy(item)
        return new
    if isinstance(value, tuple):
        copies = map(own_copy, value)
        return kind._make(copies) if hasattr(kind, "_make") else kind(copies)
    changeable = isinstance(value, (set, bytearray, collections.deque)) or hasattr(kind, "__array__")
    return copy.deepcopy(value) if changeable else value


def select_inputs(
    fn: Callable[..., object], inputs: Mapping[str, Sequence[object]], extras: Json | None = None
) -> dict[str, Any]:
    """Return the keywords to call a function with: `own_copy` of each, which the next function never sees."""
    named = arguments_of(fn)
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    everything = takes_everything(fn)
    chosen = {
        name: own_copy(list(values))
        for name, values in inputs.items()
        if name in named or (everything and name not in bound)
    }
    return chosen | {name: value for name, value in (extras or {}).items() if name in named}


def call_selected(
    fn: Callable[..., _Returned], inputs: Mapping[str, Sequence[object]], extras: Json | None = None
) -> _Returned:
    """Call a function with what it takes of them (`select_inputs`)."""
    return fn(**select_inputs(fn, inputs, extras))


def split_inputs(inputs: Json) -> tuple[dict[str, list[Any] | tuple[Any, ...]], dict[str, Any]]:
    """Part what has one entry per completion, which comes as a list, from the extras, which come as they are."""
    lists = {name: values for name, values in inputs.items() if isinstance(values, (list, tuple))}
    return lists, {name: value for name, value in inputs.items() if name not in lists}


def read_outcome(
    outcome: object, count: int, read: Callable[[int, object], float | str] | None = None
) -> tuple[np.ndarray, Faults]:
    """Read what a reward function returned into [count] float64, NaN for None, and what is wrong with it.

    `read` reads the value of one completion, by its index: `parts.PartReader`; None: only numbers are taken.
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
    """Return the `count` values that a function returned, as a list; or why there are none."""
    if isinstance(outcome, BaseException):
        return outcome
    try:
        if hasattr(outcome, "tolist"):  # arrays of NumPy, JAX, PyTorch: one transfer, not one for each element
            outcome = outcome.tolist()  # an array may be a promise, and its computation fail only now
        some = isinstance(outcome, Iterable) and not isinstance(outcome, (str, bytes, Mapping, set, frozenset))
        items = list(itertools.islice(outcome, count + 1)) if some else None  # bounded: a generator may have no end
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
    """Return one reward as a float, NaN for None; or what is wrong with it."""
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
        return "returned nan; None is how a function says 'not scored'"
    if abs(number) > _FLOAT32_MAX:
        return f"returned {number}; rewards are finite, in the range of float32"
    return number


def give_scores(values: np.ndarray, faults: Faults) -> list[float | None]:
    """Return scores as a reward function does, NaN as None; faults travel on as an exception."""
    scores = [None if np.isnan(value) else float(value) + 0.0 for value in values]  # + 0.0: a reward of −0 puzzles
    if faults:
        raise PartialRewards(scores, faults)
    return scores


def describe_fault(fault: BaseException | str) -> str:
    """Return a fault as the end of a sentence about a function."""
    return fault if isinstance(fault, str) else f"raised {type(fault).__name__}: {fault}"
