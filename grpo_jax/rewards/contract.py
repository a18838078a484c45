"""The contract for reward functions: names, arguments, checks before a run, and logging."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_jax.messages import nearest, problems_of, raise_all, show

if TYPE_CHECKING:
    from grpo_jax.types import RewardFn, Row

COMPLETION_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments with one entry per completion, in addition to the dataset columns."""

EXTRAS = ("trainer_state", "log_metric", "log_extra")
"""Arguments that are not lists. They are passed only to functions that declare them."""

Inputs = Mapping[str, Any]
"""Arguments for reward functions, keyed by name: lists with one entry per completion, and `EXTRAS`."""


class RewardError(ValueError):
    """Raised if a reward function fails or returns an invalid value."""


class RewardWorkerError(RewardError):
    """Raised if a worker process cannot start or load the function. The run ends regardless of `on_reward_error`."""


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """Training progress, for reward functions that depend on it. A subset of TRL's `trainer_state`.

    `max_steps` is the total number of optimizer steps, or 0 outside a run. `epoch` counts passes over the dataset.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


def as_list(reward_fns: RewardFn | Sequence[RewardFn]) -> list[RewardFn]:
    """Convert one or more reward functions to a list. Raises ValueError for other values."""
    fns = [reward_fns] if callable(reward_fns) else reward_fns
    if not isinstance(fns, list | tuple):
        raise ValueError(f"reward_fns must be a function or a list of functions; got {show(reward_fns)}")
    for fn in fns:
        if not callable(fn):
            raise ValueError(f"reward_fns must contain only functions; got {fn!r}")
    return list(fns)


def function_name(fn: Callable[..., object]) -> str:
    """Return the name of a function, of a partial's wrapped function, or of a callable object's class."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")


def reward_names(reward_fns: RewardFn | Sequence[RewardFn]) -> list[str]:
    """Return unique names for use in metrics. The second function with the name `f` gets the name `f_2`."""
    names: list[str] = []
    for fn in as_list(reward_fns):
        name = function_name(fn)
        copies = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        names.append(next(candidate for candidate in copies if candidate not in names))
    return names


def parameters_of(fn: Callable[..., object]) -> list[inspect.Parameter]:
    """Return a function's parameters, or `**kwargs` for a builtin without a signature."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def accepts_any_keyword(fn: Callable[..., object]) -> bool:
    """Return whether a function has a `**kwargs` parameter."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(fn))


def arguments_of(fn: Callable[..., object]) -> dict[str, bool]:
    """Return a function's keyword arguments, each mapped to whether it is required.

    The function's attribute `reward_arguments`, if any, adds arguments.
    """
    parameters = [p for p in parameters_of(fn) if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    arguments = {p.name: p.default is p.empty for p in parameters if p.name not in _bound(fn)}
    return arguments | getattr(fn, "reward_arguments", {})


def _bound(fn: Callable[..., object]) -> Mapping[str, object]:
    """Return the arguments bound by a partial. Dataset columns with these names must not replace them."""
    return fn.keywords if isinstance(fn, functools.partial) else {}


def check_reward_fns(
    reward_fns: RewardFn | Sequence[RewardFn],
    columns: Iterable[str] | None,
    *,
    argument: str = "the dataset",
    rows: Sequence[Row] = (),
) -> None:
    """Raise ValueError if a reward function cannot be called with a dataset's `columns`, or if it rejects `rows`.

    If `columns` is None, only the number and the types of the functions are checked. `argument` is the name of the
    dataset in error messages.
    """
    fns = as_list(reward_fns)
    if not fns:
        raise ValueError("reward_fns is empty; pass at least one reward function")
    if columns is None:
        return
    columns = [column for column in columns if column != "prompt"]
    reserved = sorted({*columns} & {*COMPLETION_ARGUMENTS, *EXTRAS})
    problems = [f"{argument} has a column {name!r}, a reserved argument name; rename the column" for name in reserved]
    for fn, name in zip(fns, reward_names(fns), strict=True):
        problems += _signature_problems(fn, name, columns, argument)
    raise_all("reward_fns", problems)
    check_rows(fns, rows, argument=argument)


def check_rows(
    reward_fns: RewardFn | Sequence[RewardFn], rows: Sequence[Row], *, argument: str = "the dataset"
) -> None:
    """Call each function's `check_rows(rows, argument=...)`, if it exists. Raises one ValueError with all errors."""
    problems = []
    for fn in as_list(reward_fns):
        check = getattr(fn.func if isinstance(fn, functools.partial) else fn, "check_rows", None)
        try:
            if check is not None:
                check(rows, argument=argument)
        except ValueError as error:
            problems += problems_of(error)
    raise_all("reward_fns", problems)


def _signature_problems(fn: RewardFn, name: str, columns: list[str], argument: str) -> Iterator[str]:
    available, parameters = [*COMPLETION_ARGUMENTS, *columns, *EXTRAS], arguments_of(fn)
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters_of(fn)):
        yield f"reward function {name!r} has positional-only parameters; make them keyword parameters"
        return
    missing = [parameter for parameter, required in parameters.items() if required and parameter not in available]
    for parameter in missing:
        suggestion = nearest(parameter, available)
        yield (
            f"reward function {name!r} needs the argument {parameter!r}, which is not a column of {argument} "
            f"(columns: {', '.join(columns) or 'none'}; also available: {', '.join([*COMPLETION_ARGUMENTS, *EXTRAS])})"
            + (f"; did you mean {suggestion!r}?" if suggestion else "")
        )
    if not missing and not accepts_any_keyword(fn) and not parameters.keys() & {*available}:
        advice = f"if it is a factory, pass its result: {name}(...)"
        yield f"reward function {name!r} accepts none of the available arguments ({', '.join(available)}); {advice}"


_IMMUTABLE = frozenset((str, int, float, bool, type(None)))


def copy_containers(value: Any) -> Any:
    """Copy lists, dicts, tuples, sets and arrays recursively. Other objects may be large and are not copied."""
    kind = type(value)
    if kind is list and _IMMUTABLE.issuperset(map(type, value)):  # faster for token ids
        return value.copy()
    if kind in (list, tuple, set):
        return kind(map(copy_containers, value))
    if kind is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    return copy.deepcopy(value) if hasattr(kind, "__array__") else value


def select_inputs(fn: Callable[..., object], inputs: Inputs) -> Inputs:
    """Return the inputs that a function accepts. Lists are copied, so that functions cannot modify shared inputs."""
    arguments, bound, any_keyword = arguments_of(fn), _bound(fn), accepts_any_keyword(fn)
    selected = {}
    for name, value in inputs.items():
        if name in arguments or (any_keyword and name not in bound and name not in EXTRAS):
            selected[name] = value if name in EXTRAS else copy_containers(list(value))
    return selected


class Log:
    """Metrics and columns that reward functions log for a batch. Columns that the run itself writes take precedence."""

    def __init__(self, count: int):
        self.metrics: dict[str, list[float]] = {}
        self.columns: list[Row] = [{} for _ in range(count)]

    def metric(self, name: str, value: float) -> None:
        """Log a scalar. If several values are logged under the same name in a step, their mean is reported."""
        self.metrics.setdefault(name, []).append(float(value))

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Log one value per completion in `completions.jsonl`."""
        values = copy_containers(list(values))
        if len(values) != len(self.columns):
            expected = f"one value per completion, {len(self.columns)} in total"
            raise RewardError(f"log_extra({column!r}, ...) needs {expected}; got {len(values)}")
        for row, value in zip(self.columns, values, strict=True):
            row[column] = value
