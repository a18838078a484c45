"""Environments in processes of their own, with limits that hold whatever they do.

```
isolated(Game) ──► a process that imports Game ──fork──► one environment ◄── calls of its methods, one at a time
                                               ──fork──► one environment     timeout passed: that fork is killed
```

A fork shares what was imported with the others and costs milliseconds; its end concerns nobody else. As with reward
functions, these are limits and not a sandbox.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import inspect
import json
import os
import pickle
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from grpo_jax.rewards.contract import RewardError, function_name
from grpo_jax.rewards.processes import (
    START_SECONDS,
    exception_of,
    fault_of,
    kill_group,
    refuse_in_worker,
    setup_of,
    start_process,
    start_trouble,
)

CALLED_BY_TRAINER = ("reset", "respond", "get_reward")
"""Methods that an environment may have, and that are no tools."""

_REPLY_BYTES = 2**27  # more than a worker's own bounds let a reply have


class ProcessLost(RuntimeError):
    """The process of an environment was killed at a limit, or has ended; its text is the end of a sentence."""


def makes_environments(fn: Any) -> bool:
    """Whether something makes environments: a class, or a function without arguments. A reward function has some."""
    if isinstance(fn.func if isinstance(fn, functools.partial) else fn, type):
        return True
    try:
        return callable(fn) and not inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False


class IsolatedEnvironment:
    """What `isolated` makes of a class of environments, or of a function that makes them: call it for an environment.

    An environment is an object with the public methods of the class, which are carried out in its process.
    """

    def __init__(self, factory: Callable[[], Any], *, timeout: float, memory_mb: int | None, max_output_bytes: Any):
        self.__name__ = function_name(factory)
        self._limits = {"timeout": timeout, "memory_mb": memory_mb, "max_output_bytes": max_output_bytes}
        self._setup = setup_of(factory, memory_mb, max_output_bytes, instances=True)
        self._origin: _Origin | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Any:
        """Make an environment.

        Raises:
          ProcessLost: its process reached a limit.
          Exception: what making it raised.
        """
        refuse_in_worker()
        with self._lock:
            if self._origin is None or not self._origin.is_alive:
                self._origin = _Origin(self._setup)
            pid, connection = self._origin.fork()
        instance = _Instance(self._origin, pid, connection, self._limits)
        return _class_of(*instance.ask("make"))(instance)

    def close(self) -> None:
        """End all processes; a later call starts new ones."""
        with self._lock:
            if self._origin is not None:
                self._origin.close()
            self._origin = None


class _Origin:
    """The process that environments are forks of."""

    def __init__(self, setup: bytes):
        self._process, self._connection = start_process(setup)
        self._lock, self._ready = threading.Lock(), False
        self._left: collections.deque[int] = collections.deque()  # forks that nobody needs any more
        # Not a method of self, which would keep it alive. At exit too.
        self._finalizer = weakref.finalize(self, _close, self._process, self._connection)

    @property
    def is_alive(self) -> bool:
        return self._finalizer.alive and self._process.poll() is None

    def fork(self) -> tuple[int, Connection]:
        """A new fork, and the connection to it; those that were left are ended before."""
        with self._lock:
            if not self._ready:
                reply = self._receive()
                if "ready" not in reply:
                    raise RewardError(start_trouble(reply))
                self._ready = True
            left = [self._left.popleft() for _ in range(len(self._left))]
            self._request(left, fork=True)
            reply = self._receive()
            if "pid" not in reply:
                raise ProcessLost("lost the process that makes its processes")
            return reply["pid"], Connection(reduction.recv_handle(self._connection))

    def end(self, pid: int) -> int:
        """End a fork with all that it started; how it ended."""
        with self._lock:
            try:
                return self._request([pid], fork=False)["codes"][0]
            except (OSError, KeyError):  # the origin has ended, and took nobody along
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                return -signal.SIGKILL

    def leave(self, pid: int, connection: Connection) -> None:
        """Let go of a fork, from any thread at any time: it ends by itself, and its group with the next request."""
        connection.close()
        self._left.append(pid)

    def close(self) -> None:
        """End this process and its forks."""
        self._finalizer()

    def _request(self, pids: Sequence[int], *, fork: bool) -> dict[str, Any]:
        self._connection.send_bytes(json.dumps({"end": list(pids), "fork": fork}).encode())
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        """What the process says; how it ended if it says nothing."""
        try:
            if not self._connection.poll(START_SECONDS):
                return {"late": True}
            return json.loads(self._connection.recv_bytes(_REPLY_BYTES))
        except (EOFError, OSError):
            return {"ended": kill_group(self._process)}


def _close(process: Any, connection: Connection) -> None:
    """End an origin: it ends its forks when the connection is closed."""
    connection.close()
    with contextlib.suppress(Exception):
        process.wait(timeout=2.0)
    kill_group(process)


class _Instance:
    """The process of one environment: one call at a time."""

    def __init__(self, origin: _Origin, pid: int, connection: Connection, limits: dict[str, Any]):
        self._origin, self._pid, self._connection, self._limits = origin, pid, connection, limits
        self._lock, self._lost = threading.Lock(), ""
        self._finalizer = weakref.finalize(self, origin.leave, pid, connection)

    def ask(self, what: str, name: str = "", args: Sequence[Any] = (), keywords: Any = None) -> Any:
        """What a call returned.

        Args:
          what: "make", "call" or "read".
          name: of the method, or of the attribute.
          args, keywords: of the call.

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
            if reply.keys() & {"late", "limit", "ended"}:
                self._lost = str(fault_of(reply, **self._limits))
                self._finalizer.detach()
                self._connection.close()
                raise ProcessLost(self._lost)
        if "error" in reply:
            kind, *_ = reply["error"]
            raise AttributeError(reply["error"][1]) if kind == "AttributeError" else exception_of(*reply["error"])
        return _value_of(reply)

    def _reply(self, request: bytes) -> dict[str, Any]:
        """The reply to a request; one that comes too late, or not at all, is the end of the process."""
        try:
            self._connection.send_bytes(request)
            late = not self._connection.poll(self._limits["timeout"])
            reply = {"late": True} if late else json.loads(self._connection.recv_bytes(_REPLY_BYTES))
            if late or "limit" in reply:  # its memory is in pieces, or its buffers hold what cannot be written
                self._origin.end(self._pid)
            return reply
        except (EOFError, OSError, ValueError, RecursionError):
            return {"ended": self._origin.end(self._pid)}


class _Remote:
    """An environment whose methods are carried out in its process; `_class_of` adds them."""

    def __init__(self, instance: _Instance):
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in CALLED_BY_TRAINER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._instance.ask("read", name)


def _class_of(module: str, name: str) -> type:
    """The class of an environment as this process has it."""
    # A script that runs goes by another name in the process that imported it.
    module = "__main__" if module == "__mp_main__" else module
    try:
        kind: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise RewardError(
            f"it makes environments of the class {module}.{name}, which cannot be found there: define it at the top"
            " level of a module, under its own name"
        ) from error
    return _remote(kind)


@functools.cache
def _remote(kind: type) -> type:
    """A class with the public methods of another one, to be carried out elsewhere."""
    members = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    methods: dict[str, Any] = {
        name: _forwarding(name, member)
        for name, member in members.items()
        if isinstance(member, (types.FunctionType, staticmethod, classmethod))
    }
    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    bases = tuple(_remote(base) for base in kind.__bases__ if base is not object) or (_Remote,)
    return type(kind.__name__, bases, methods | about)


def _forwarding(name: str, member: Any) -> Callable[..., Any]:
    """A method with the face of another one."""
    function = member if isinstance(member, types.FunctionType) else member.__func__

    @functools.wraps(function)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        return self._instance.ask("call", name, args, keywords)

    parameters = list(inspect.signature(function).parameters.values())
    if isinstance(member, staticmethod):
        parameters.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD))
    face: Any = call
    face.__signature__ = inspect.Signature(parameters)
    return call


def _value_of(reply: dict[str, Any]) -> Any:
    """What a method returned: what JSON has as it is, anything else as an object that reads and counts as it did."""
    if "bytes" in reply:
        return reply["bytes"].encode("latin-1")
    value = reply["value"]
    if not reply.get("other"):
        return value
    members = {"__repr__": lambda self: value["repr"], "__str__": lambda self: value["text"]}
    if value["number"] is not None:
        members["__float__"] = lambda self: value["number"]
    return type(value["type"], (), members)()
