"""The worker processes of isolated reward functions: how pebble starts them and reads their messages, what they run.

Requests go to a worker as pickles, which this process has made. Replies come back as JSON.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import numpy as np

from grpo_jax.rewards.contract import SetupError, describe_fault, function_name, read_outcome

OUT_OF_MEMORY = 86
"""The exit code of a worker whose function has raised MemoryError."""

_LONGEST_REPLY = 2**27  # bytes
_LONGEST_TEXT = 2000  # characters of a fault, and of its traceback
_MAIN = "init_main_from_"  # begins the names of the items by which multiprocessing says what `__main__` is

# Of pebble's classes those that its messages are made of.
_MESSAGES = {("pebble.pool.process", "Acknowledgement"), ("pebble.pool.process", "TaskResult")}
_MESSAGES |= {("pebble.common.types", "Result"), ("pebble.common.types", "ResultStatus")}


def sendable(fn: Callable[..., object]) -> tuple[bytes, dict[str, Any]]:
    """Return a function as a pickle, and what a worker needs to import the script that runs, {} if it need not."""
    try:
        payload = pickle.dumps(fn)
    except Exception as error:
        raise ValueError(
            f"fn is {function_name(fn)!r}, which cannot be sent to a worker process ({error}): define it at the top "
            "level of a module, under its own name (no lambda, no inner function, isolated(fn, ...) not as a decorator)"
        ) from error
    if b"__main__" not in payload:  # a pickle holds the names of the modules that it needs
        return payload, {}
    main = {name: value for name, value in spawn.get_preparation_data("").items() if name.startswith(_MAIN)}
    if not main or not os.path.isfile(main.get("init_main_from_path", __file__)):
        raise ValueError(
            f"fn is {function_name(fn)!r}, defined in a notebook or at a prompt, where a worker process cannot import "
            "it from: write it into a file (%%writefile my_rewards.py) and import it"
        )
    return payload, main


def _without_main(prepare: Callable[[str], dict[str, Any]], ours: str, name: str) -> dict[str, Any]:
    """Return what a process is prepared by; in those of the name `ours`, `__main__` is not imported."""
    return {key: value for key, value in prepare(name).items() if name != ours or not key.startswith(_MAIN)}


class _WorkerProcess(SpawnProcess):
    """A process that does not import the script of this one, and is killed with what it has started."""

    _starting = threading.Lock()

    def start(self) -> None:
        # Multiprocessing has no setting for it, and the script would bring JAX along, which few functions need.
        with self._starting:
            prepare = spawn.get_preparation_data
            spawn.get_preparation_data = functools.partial(_without_main, prepare, self.name)
            try:
                super().start()
            finally:
                spawn.get_preparation_data = prepare

    def terminate(self) -> None:
        try:
            os.killpg(self.pid or 0, signal.SIGKILL)
        except OSError:  # it has not made its group yet
            self.kill()


class WorkerContext(SpawnContext):
    """Gives pebble its worker processes, and the pipes to them."""

    Process = _WorkerProcess

    def Pipe(self, duplex: bool = True) -> tuple[Any, Any]:
        reader, writer = super().Pipe(duplex)
        # In this process only: a worker gets a plain connection.
        reader.recv = functools.partial(_receive, reader)  # type: ignore[method-assign]
        return reader, writer


def _receive(reader: Connection) -> object:
    """Return a message of a worker; OSError, by which pebble gives up the pool, if it is not one."""
    try:
        return _Message(io.BytesIO(reader.recv_bytes(_LONGEST_REPLY))).load()
    except Exception as error:
        raise OSError(f"a worker sent something else than a message of pebble ({error})") from error


class _Message(pickle.Unpickler):
    """Reads a message of pebble, which is made of plain values and `_MESSAGES`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _MESSAGES:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a message")
        return super().find_class(module, name)


# In a worker process --------------------------------------------------------------------------------------------------

served: Callable[..., object] | BaseException | None = None
"""In a worker process its function, or what loading it raised."""


def start_worker(payload: bytes, main: dict[str, Any], memory_mb: int | None, parent: int) -> None:
    """Prepare a worker process, and load the function."""
    global served
    os.setsid()
    # A batch system sends SIGTERM to all processes of a run, which then finishes its step and needs the rewards.
    # Unlike SIG_IGN, a handler is not inherited by the processes that the function starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"
    served = SetupError("the function is not loaded yet")
    try:
        spawn.prepare(main)
        served = pickle.loads(payload)
    except BaseException as error:
        served = error
    if memory_mb is not None:  # after the imports: a limit of the function, not of the libraries that it needs
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            limit = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _end_with_parent(parent: int) -> None:
    """End this process when its parent was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def serve(nonce: str, count: int, inputs: dict[str, bytes]) -> str:
    """Call the function, and return its scores and faults as JSON."""
    outcome: object = []
    try:
        if not callable(served):
            outcome = served
        elif count:
            outcome = served(**{name: pickle.loads(value) for name, value in inputs.items()})
            outcome = _runner().run(_awaited(outcome)) if inspect.isawaitable(outcome) else outcome
    except BaseException as error:
        outcome = error
    values, faults = read_outcome(outcome, count)
    if isinstance(faults.get(None), MemoryError):
        os._exit(OUT_OF_MEMORY)  # what the function has kept would fail the calls after it too
    sys.stdout.flush()
    sys.stderr.flush()
    reply: dict[str, object] = {"nonce": nonce, "loaded": callable(served)}
    if (fault := faults.get(None)) is not None:
        lines = "".join(traceback.format_exception(fault)) if isinstance(fault, BaseException) else ""
        kind = type(fault).__name__ if lines else ""
        return json.dumps(reply | {"failure": [kind, str(fault)[:_LONGEST_TEXT], lines[-_LONGEST_TEXT:]]})
    bad = {index: {"fault": describe_fault(fault)[:_LONGEST_TEXT]} for index, fault in faults.items()}
    scores = [bad.get(i, None if np.isnan(value) else value) for i, value in enumerate(values.tolist())]
    return json.dumps(reply | {"scores": scores})


@functools.cache
def _runner() -> asyncio.Runner:
    """Return the event loop for the calls of an async function: one for all, as the clients that it keeps need."""
    return asyncio.Runner()


async def _awaited(awaitable: Awaitable[object]) -> object:
    """Await anything that can be awaited; a runner takes coroutines only."""
    return await awaitable
