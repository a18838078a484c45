"""Reward functions and environments in processes of their own, with limits that hold whatever they do.

```
isolated(fn)(completions=...)  ──► calls of some completions each ──► `processes.Pool`: one call at a time per worker
isolated(Game)().respond(...)  ──► one call at a time ──► the process of that environment, a fork of `processes.Origin`
```

These are limits, not a sandbox: a worker may read and write files, use the network and start processes like any program
of yours. Run code that you do not trust in a container, and let the reward function talk to it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from grpo_jax.rewards.contract import (
    Faults,
    PartialRewards,
    RewardError,
    arguments_of,
    check_rows,
    function_name,
    give_scores,
    read_outcome,
    select_inputs,
    split_inputs,
)
from grpo_jax.rewards.processes import (
    Limits,
    Origin,
    Pool,
    ProcessLost,
    Reply,
    exception_of,
    fault_of,
    receive,
    refuse_in_worker,
    setup_of,
)
from grpo_jax.types import Row

CALLED_BY_TRAINER = ("reset", "respond", "answer_calls", "get_reward")
"""Methods that an environment may have, and that are no tools."""

# More than a worker's own bounds let a reply have: for one completion, and from an environment.
_REPLY_BYTES_EACH = 16_384
_REPLY_BYTES = 2**27


def isolated(
    fn: Callable[..., Any],
    *,
    timeout: float,
    memory_mb: int | None = None,
    max_output_bytes: int | None = None,
    workers: int = 1,
    completions_per_call: int | None = None,
) -> Callable[..., Any]:
    """Run a reward function, or environments, in worker processes that are killed when they take too long.

    The workers start at the first use (fresh interpreters without an accelerator, no fork of this process), import
    what the function needs and no more, stay for later calls, and end with this process. The function goes there by
    reference: it stands at the top level of a module. If that is the script itself, what starts the training stands
    under `if __name__ == "__main__":`, since the workers import the script too.

    A batch is cut into calls of `completions_per_call` completions, which the workers share; a fault (an exception, a
    limit that was reached, the end of the worker) concerns the completions of its call, and the others keep theirs.

    An environment class, or a function without arguments that makes environments, is what `environment_factory` takes,
    isolated or not. One process imports it, and each environment lives in a fork of that process, so that the end of
    one is the end of its episode alone: an environment that reached a limit, or whose process ended, has failed, as
    `on_environment_error` has it. Its signatures and docstrings are the tools' own; methods may be async; what they
    return comes back as JSON has it, anything else as text. Attributes that a reward function reads of `environments`
    are asked for, and lists and dicts are copies.

    Args:
      fn: a reward function, sync or async; or what makes environments.
      timeout: seconds for one call, from when the worker has the request. A batch of n calls ends after
        ceil(n / workers) · timeout at the latest, and a moment.
      memory_mb: what the function, or each environment, may use on top of what its worker has after the imports, in MiB
        of address space. Linux only.
      max_output_bytes: what a call may print, which is then passed on to standard error, and the size of any file that
        it writes. None: no limit, and it prints where this process does.
      workers: number of processes; environments have one each.
      completions_per_call: None cuts the batch evenly among the workers; with one worker, the function gets the whole
        batch. 1 holds the limits for each completion alone. A function that compares completions needs the whole batch.

    Returns:
      A reward function with the name and the arguments of `fn`, to be used where `fn` would be, also in combinators; or
      a function that makes environments, for `environment_factory`.

    Raises:
      ValueError: a limit that is not positive; a function that cannot be sent to another process.

    Example:
      >>> isolated(lambda completions: [0.0] * len(completions), timeout=5.0)
      Traceback (most recent call last):
      ValueError: fn is 'lambda', which cannot be sent to a worker process ...
    """
    if not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
        raise ValueError(f"timeout is {timeout!r}: give a positive number of seconds")
    counts = {
        "workers": workers,
        "memory_mb": memory_mb,
        "max_output_bytes": max_output_bytes,
        "completions_per_call": completions_per_call,
    }
    for name, value in counts.items():
        left_out = value is None and name != "workers"
        if not left_out and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{name} is {value!r}: give a positive whole number")
    if not hasattr(os, "killpg"):
        raise ValueError("isolated needs a POSIX system (Linux, macOS); this one cannot kill a group of processes")
    if memory_mb is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"memory_mb is {memory_mb}, but only Linux holds it: leave it out on {sys.platform}")
    limits = Limits(timeout, memory_mb, max_output_bytes)
    if not makes_environments(fn):
        return _IsolatedFunction(fn, limits, workers, completions_per_call)
    if workers != 1 or completions_per_call is not None:
        raise ValueError(
            f"{function_name(fn)} makes environments, and each has a process of its own: leave out workers and"
            " completions_per_call"
        )
    return _IsolatedEnvironment(fn, limits)


def makes_environments(fn: Callable[..., object]) -> bool:
    """Return whether `fn` makes environments: a class, or a function without arguments. A reward function has some."""
    if isinstance(fn.func if isinstance(fn, functools.partial) else fn, type):
        return True
    try:
        return callable(fn) and not inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False


class _IsolatedFunction:
    """A reward function whose calls are carried out by worker processes."""

    def __init__(self, fn: Callable[..., Any], limits: Limits, workers: int, completions_per_call: int | None):
        self.fn = fn
        self.__name__ = function_name(fn)
        self.reward_arguments = arguments_of(fn)
        self._limits = limits
        self._completions_per_call = completions_per_call
        self._pool = Pool(setup_of(fn, limits), workers, limits)

    def __call__(self, **inputs: Any) -> list[float | None]:
        lists, extras = split_inputs(inputs)
        count = len(next(iter(lists.values())))
        lists, extras = split_inputs(select_inputs(self.fn, lists, extras))
        size = self._completions_per_call or math.ceil(count / self._pool.size)
        spans = [range(start, min(start + size, count)) for start in range(0, count, size)]
        parts = [{name: values[span.start : span.stop] for name, values in lists.items()} for span in spans]
        requests = [self._request(len(span), part | extras) for span, part in zip(spans, parts, strict=True)]
        replies = self._pool.run(requests, reply_bytes=_REPLY_BYTES_EACH * (size + 4))
        values = np.full(count, np.nan)
        faults: Faults = {}
        for span, reply in zip(spans, replies, strict=True):
            values[span.start : span.stop], found = self._judge(reply, len(span))
            faults |= _place(found, span, count)
        return give_scores(values, faults)

    def _request(self, count: int, inputs: dict[str, Any]) -> bytes:
        """Return one call as bytes."""
        try:
            return pickle.dumps((count, inputs))
        except Exception as error:
            bad = next((name for name, value in inputs.items() if not _can_pickle(value)), "?")
            raise RewardError(
                f"argument {bad!r} cannot be sent to the worker process of {self.__name__!r} ({error}): use plain "
                "values, or a function that does not take it"
            ) from error

    def _judge(self, reply: Reply, count: int) -> tuple[np.ndarray, Faults]:
        """Read a worker's reply as if the function had returned it here."""
        if "values" in reply:
            values = [_revived(item) for item in reply["values"]]
            outcome: object = PartialRewards(values, dict(reply["faults"])) if "faults" in reply else values
        elif "length" in reply:
            outcome = range(reply["length"])  # all that matters of it is how long it is
        elif "whole" in reply:
            outcome = _revived(reply["whole"])
        else:
            return np.full(count, np.nan), {None: fault_of(reply, self._limits)}
        return read_outcome(outcome, count)

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        """Raise ValueError if the function inside cannot judge some rows; no worker is asked."""
        check_rows(self.fn, rows, argument=argument)

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        self._pool.close()


def _revived(item: Any) -> Any:
    """Return an item of a reply; one that was no number as an object that prints as the original did."""
    if not isinstance(item, dict):
        return item
    return type(item["type"], (), {"__repr__": lambda self: item["repr"]})()


def _place(found: Faults, span: range, count: int) -> Faults:
    """Return the faults of one call by their place in the batch."""
    if None not in found:
        return {span.start + index: fault for index, fault in found.items() if index is not None}
    return dict.fromkeys([None] if len(span) == count else span, found[None])


def _can_pickle(value: object) -> bool:
    """Return whether a value can be sent to a worker."""
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


class _IsolatedEnvironment:
    """A maker of environments: call it for one, whose public methods are carried out in a process of its own."""

    def __init__(self, factory: Callable[[], object], limits: Limits):
        self.__name__ = function_name(factory)
        self._limits = limits
        self._setup = setup_of(factory, limits, instances=True)
        self._origin: Origin | None = None
        self._lock = threading.Lock()

    def __call__(self) -> _Remote:
        """Make an environment.

        Raises:
          ProcessLost: its process reached a limit.
          Exception: what making it raised.
        """
        refuse_in_worker()
        with self._lock:
            if self._origin is None or not self._origin.is_alive:
                self._origin = Origin(self._setup)
            pid, connection = self._origin.fork()
        instance = _Instance(self._origin, pid, connection, self._limits)
        module, name = instance.ask("make")
        return _remote(_class_of(module, name))(instance)

    def close(self) -> None:
        """End all processes; a later call starts new ones."""
        with self._lock:
            if self._origin is not None:
                self._origin.close()
            self._origin = None


class _Instance:
    """The process of one environment, which carries out one call at a time."""

    def __init__(self, origin: Origin, pid: int, connection: Connection, limits: Limits):
        self._origin, self._pid, self._connection, self._limits = origin, pid, connection, limits
        self._lock, self._lost = threading.Lock(), ""
        self._finalizer = weakref.finalize(self, origin.leave, pid, connection)

    def ask(
        self, what: str, name: str = "", args: Sequence[object] = (), keywords: Mapping[str, object] | None = None
    ) -> Any:
        """Return what a call returned.

        Args:
          what: "make", "call" or "read".
          name: of the method, or of the attribute.

        Raises:
          ProcessLost: a limit was reached, or the process has ended, now or before.
          Exception: what the call raised, by its name.
        """
        try:
            request = pickle.dumps((what, name, tuple(args), keywords or {}))
        except Exception as error:
            raise TypeError(f"{name} was given what cannot be sent to a worker process: {error}") from error
        with self._lock:
            if self._lost:
                raise ProcessLost(self._lost)
            reply = self._reply(request)
            if printed := reply.pop("printed", ""):
                print(printed, end="", file=sys.stderr)
            if not reply.keys().isdisjoint({"late", "limit", "ended"}):
                self._lost = str(fault_of(reply, self._limits))
                self._finalizer.detach()
                self._connection.close()
                raise ProcessLost(self._lost)
        if "error" in reply:
            kind, message, lines = reply["error"]
            raise AttributeError(message) if kind == "AttributeError" else exception_of(kind, message, lines)
        return _value_of(reply)

    def _reply(self, request: bytes) -> Reply:
        """Return the reply to a request; one that comes too late, or not at all, is the end of the process."""
        try:
            self._connection.send_bytes(request)
        except OSError:
            return {"ended": self._end()}
        reply = receive(self._connection, self._limits.timeout, _REPLY_BYTES, self._end)
        if not reply.keys().isdisjoint({"late", "limit"}):  # its memory is in pieces, or its buffers cannot be written
            self._end()
        return reply

    def _end(self) -> int:
        return self._origin.end(self._pid)


class _Remote:
    """An environment whose methods are carried out in its process; `_remote` adds them."""

    def __init__(self, instance: _Instance):
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in CALLED_BY_TRAINER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._instance.ask("read", name)


def _class_of(module: str, name: str) -> type:
    """Return the class of an environment as this process has it."""
    # A script that runs goes by another name in the process that imported it.
    module = "__main__" if module == "__mp_main__" else module
    try:
        kind: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise RewardError(
            f"it makes environments of the class {module}.{name}, which cannot be found there: define it at the top"
            " level of a module, under its own name"
        ) from error
    return kind


@functools.cache
def _remote(kind: type) -> type[_Remote]:
    """Return a class with the public methods of another one, to be carried out elsewhere."""
    members: dict[str, object] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        if not name.startswith("_") and isinstance(member, (types.FunctionType, staticmethod, classmethod)):
            members[name] = _forwarding(name, member)
    bases = tuple(_remote(base) for base in kind.__bases__ if base is not object) or (_Remote,)
    return type(kind.__name__, bases, members)


def _forwarding(name: str, member: types.FunctionType | staticmethod | classmethod) -> Callable[..., Any]:
    """Return a method with the signature of another one, that asks the environment's process for it."""
    function = member if isinstance(member, types.FunctionType) else member.__func__

    @functools.wraps(function)
    def call(self: _Remote, *args: object, **keywords: object) -> Any:
        return self._instance.ask("call", name, args, keywords)

    parameters = list(inspect.signature(function).parameters.values())
    if isinstance(member, staticmethod):
        parameters.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD))
    face: Any = call  # a type checker knows of no signature that is set
    face.__signature__ = inspect.Signature(parameters)
    return call


def _value_of(reply: Reply) -> Any:
    """Return a method's value: as it is if JSON has it, anything else as an object that reads and counts as it did."""
    if "bytes" in reply:
        return reply["bytes"].encode("latin-1")
    value = reply["value"]
    if not reply.get("other"):
        return value
    members = {"__repr__": lambda self: value["repr"], "__str__": lambda self: value["text"]}
    number = {} if value["number"] is None else {"__float__": lambda self: value["number"]}
    return type(value["type"], (), members | number)()
