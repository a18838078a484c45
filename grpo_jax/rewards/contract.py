"""The contract of reward functions: their names, the arguments they take, and what is checked before a run."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_jax.messages import nearest, problems_of, raise_all

if TYPE_CHECKING:
    from grpo_jax.types import RewardFn, Row

SAMPLED = ("prompts", "completions", "completion_ids")
"""Arguments with one entry for each completion; so are the columns of the dataset."""

EXTRAS = ("trainer_state", "log_metric", "log_extra")
"""Arguments that are not lists, passed only to functions that name them."""

Inputs = Mapping[str, Any]
"""The arguments of reward functions by name: lists with one entry for each completion, and `EXTRAS`."""

_Returned = TypeVar("_Returned")


class RewardError(ValueError):
    """A reward function failed, or returned something other than a list of rewards."""


class SetupError(RewardError):
    """A mistake in the program rather than in a completion: it ends the run for every `on_reward_error`."""


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """The progress of a run, for reward functions that depend on it. A part of TRL's `trainer_state`.

    Attributes:
      global_step: optimizer steps done.
      max_steps: optimizer steps of the whole run; 0 outside a run.
      epoch: passes over the dataset.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


# Names and arguments --------------------------------------------------------------------------------------------------


def as_list(reward_fns: RewardFn | Sequence[RewardFn]) -> list[RewardFn]:
    """Return one or several reward functions as a list."""
    fns = [reward_fns] if callable(reward_fns) or isinstance(reward_fns, str) else list(reward_fns)
    for fn in fns:
        if not callable(fn):
            raise ValueError(f"reward_fns contains {fn!r}, which is not callable: give functions")
    return fns


def function_name(fn: Callable[..., object]) -> str:
    """Return the name of a function, of a partial's function, or of an object's class."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")


def reward_names(reward_fns: RewardFn | Sequence[RewardFn]) -> list[str]:
    """Return distinct names of reward functions, used as keys of metrics: a second `name` is called `name_2`."""
    names: list[str] = []
    for fn in as_list(reward_fns):
        name = function_name(fn)
        copies = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        names.append(next(candidate for candidate in copies if candidate not in names))
    return names


def parameters_of(fn: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters of a function; `**kwargs` for a builtin without a signature."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def takes_everything(fn: Callable[..., object]) -> bool:
    """Return whether a function has `**kwargs`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(fn))


def arguments_of(fn: Callable[..., object]) -> dict[str, bool]:
    """Return the keywords that a function names, each with whether it is required.

    A callable object with `**kwargs` can declare further ones in an attribute `reward_arguments` of the same form.
    """
    bound = _bound(fn)
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters_of(fn)
        if parameter.kind not in variadic and parameter.name not in bound
    }
    return named | getattr(fn, "reward_arguments", {})


def _bound(fn: Callable[..., object]) -> Mapping[str, object]:
    """Return the keywords that a partial has bound, which a column of the same name must not replace."""
    return fn.keywords if isinstance(fn, functools.partial) else {}


def is_async(fn: Callable[..., object]) -> bool:
    """Return whether a call of `fn` returns an awaitable, by its declaration or its attribute `is_async`."""
    if isinstance(fn, functools.partial):
        return is_async(fn.func)
    declared = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
    return declared or bool(getattr(fn, "is_async", False))


# Checks before a run --------------------------------------------------------------------------------------------------


def check_reward_fns(
    reward_fns: RewardFn | Sequence[RewardFn],
    columns: Iterable[str] | None,
    *,
    argument: str = "the dataset",
    rows: Sequence[Row] = (),
) -> None:
    """Raise ValueError for reward functions that cannot be called, or that cannot judge some rows.

    Reported are all of: no function, an object that is not callable, a column with the name of another argument, and a
    required argument that is not available.

    Args:
      reward_fns: K reward functions, or one.
      columns: the names of the dataset's columns. None: unknown, arguments are not checked.
      argument: the caller's name for the dataset, for messages.
      rows: rows of the dataset, passed to `check_rows`.
    """
    fns = as_list(reward_fns)
    if not fns:
        raise ValueError("reward_fns is empty: give at least one reward function")
    if columns is None:
        return
    columns = [column for column in columns if column != "prompt"]
    taken = sorted({*columns} & {*SAMPLED, *EXTRAS})
    problems = [f"{argument} has a column {name!r}, which the trainer itself passes: rename it" for name in taken]
    for fn, name in zip(fns, reward_names(fns), strict=True):
        problems += _signature_problems(fn, name, columns, argument)
    _raise_problems(problems)
    check_rows(fns, rows, argument=argument)


def check_rows(
    reward_fns: RewardFn | Sequence[RewardFn], rows: Sequence[Row], *, argument: str = "the dataset"
) -> None:
    """Call the method `check_rows(rows, argument=...)` of the functions that have one, and raise all their ValueErrors.

    Combinators and isolated functions pass the call on to the functions inside.
    """
    problems = []
    for fn in as_list(reward_fns):
        check = getattr(fn.func if isinstance(fn, functools.partial) else fn, "check_rows", None)
        try:
            if check is not None:
                check(rows, argument=argument)
        except ValueError as error:
            problems += problems_of(error)
    _raise_problems(problems)


def _raise_problems(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ValueError(problems[0])
    raise_all("reward_fns", problems)


def _signature_problems(fn: RewardFn, name: str, columns: list[str], argument: str) -> Iterator[str]:
    """Yield the reasons for which a function cannot be called."""
    known, named = [*SAMPLED, *columns, *EXTRAS], arguments_of(fn)
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters_of(fn)):
        yield f"reward function {name!r} has positional-only arguments, but arguments are passed by keyword"
        return
    unknown = [wanted for wanted, required in named.items() if required and wanted not in known]
    for wanted in unknown:
        near = nearest(wanted, known)
        yield (
            f"reward function {name!r} needs the argument {wanted!r}, which is not a column of {argument} "
            f"(columns: {', '.join(columns) or 'none'}; also available: {', '.join([*SAMPLED, *EXTRAS])})"
            + (f"; did you mean {near!r}?" if near else "")
        )
    if not unknown and not takes_everything(fn) and not named.keys() & {*known}:
        yield (
            f"reward function {name!r} takes none of the available arguments "
            f"({', '.join(known)}): if it returns a reward function, call it first: {name}(...)"
        )


# Arguments of one call ------------------------------------------------------------------------------------------------

_IMMUTABLE = frozenset((str, int, float, bool, complex, bytes, type(None)))


def copy_containers(value: Any) -> Any:
    """Copy the lists, dicts, tuples, sets and arrays in a value, at every depth.

    Other objects are shared: a client or an image may be large, may not be copyable, and may be shared on purpose.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if isinstance(value, (list, dict)):
        new = copy.copy(value)  # a subclass, such as a defaultdict, copies itself
        items = value.values() if isinstance(value, dict) else value
        if not _IMMUTABLE.issuperset(map(type, items)):  # a list of token ids takes one step, not one per token
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                new[key] = copy_containers(item)
        return new
    if isinstance(value, tuple):
        copies = map(copy_containers, value)
        return kind._make(copies) if hasattr(kind, "_make") else kind(copies)
    mutable = isinstance(value, (set, bytearray, collections.deque)) or hasattr(kind, "__array__")
    return copy.deepcopy(value) if mutable else value


def select_inputs(fn: Callable[..., object], inputs: Inputs) -> Inputs:
    """Return the inputs that a function takes; lists are copied, so that functions cannot change each other's."""
    named, bound, everything = arguments_of(fn), _bound(fn), takes_everything(fn)
    extras = {name: value for name, value in inputs.items() if name in EXTRAS and name in named}
    lists = {
        name: copy_containers(list(values))
        for name, values in inputs.items()
        if name not in EXTRAS and (name in named or (everything and name not in bound))
    }
    return lists | extras


def call_selected(fn: Callable[..., _Returned], inputs: Inputs) -> _Returned:
    """Call a function with the inputs that it takes."""
    return fn(**select_inputs(fn, inputs))


# Logging --------------------------------------------------------------------------------------------------------------

RUN_METRICS = {"step", "num_tokens", "num_prompts", "tokens_per_second", "tokens", "rows", "padding_share"}
RUN_METRICS |= {"reward", "reward_std", "frac_reward_zero_std", "learning_rate", "update_skipped"}
RUN_METRICS |= {"loss", "policy_loss", "aux_loss", "grad_norm", "sampler_gap", "ratio_mean", "ratio_max"}
RUN_METRICS |= {"kl", "kl_in_loss", "kl_initial", "kl_bounded_tokens", "approx_kl_old"}
RUN_METRICS |= {"entropy", "entropy_bonus", "entropy_coef", "selected_entropy", "selected_tokens"}
RUN_METRICS |= {"clip_fraction", "clip_fraction_low", "clip_fraction_high", "clip_fraction_delta"}
"""Metrics that a run logs after the reward functions were called; a rollout's own are compared in `check_metrics`."""

RUN_METRIC_KINDS = ("eval/", "seconds/", "sampler/", "dynamic_sampling/")
RUN_COLUMNS = ("step", "prompt", "completion", "turns", "rewards", "turn_rewards", "advantage", "ended")
"""Columns of `completions.jsonl`."""


class Log:
    """Metrics and columns that the functions of one batch log."""

    def __init__(self, count: int):
        self.metrics: dict[str, list[float]] = {}
        self.columns: list[Row] = [{} for _ in range(count)]

    def metric(self, name: str, value: float) -> None:
        """Log a number with the metrics of the step, where the mean of all numbers of a name appears."""
        check_metrics([name], [name] if name.startswith(RUN_METRIC_KINDS) else RUN_METRICS)
        self.metrics.setdefault(name, []).append(float(value))

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Log a value for each completion in `completions.jsonl`."""
        if column in RUN_COLUMNS:
            raise SetupError(f"log_extra({column!r}, ...): completions.jsonl has this column, choose another name")
        values = copy_containers(list(values))
        if len(values) != len(self.columns):
            raise RewardError(
                f"log_extra({column!r}, ...) has {len(values)} values for {len(self.columns)} completions"
            )
        for row, value in zip(self.columns, values, strict=True):
            row[column] = value


def check_metrics(logged: Iterable[str], own: Iterable[str]) -> None:
    """Raise SetupError if a metric logged by a reward function has the name of a metric of the run."""
    taken = sorted({*logged} & {*own})
    if taken:
        raise SetupError(f"log_metric({taken[0]!r}, ...): the run has a metric of this name, choose another one")
