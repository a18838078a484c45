"""Reward functions in worker processes, with limits of time and memory.

A batch is split into calls for a `pebble.ProcessPool`, which return scores and faults as JSON. This is not a sandbox: a
worker can read and write files, use the network and start processes. Run untrusted code in a container.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import io
import json
import math
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.rewards import contract
from grpo_jax.rewards.contract import EXTRAS, Inputs, RewardError, SetupError, arguments_of, function_name
from grpo_jax.rewards.outcomes import Faults, describe_fault, give_scores, read_number, read_outcome

if TYPE_CHECKING:
    from pebble import ProcessPool

    from grpo_jax.types import RewardFn, Row

START_SECONDS = 60.0  # in which a worker may import what its function needs
OUT_OF_MEMORY = 86  # exit code of a worker whose function raised MemoryError
_LONGEST_TEXT = 2000  # characters of a fault, and of its traceback
_NO_REPLY = "sent a reply that does not belong to this call, or ended its worker process"

_Outcome = tuple[np.ndarray, Faults]


def isolated(
    fn: RewardFn,
    *,
    timeout: float,
    memory_mb: int | None = None,
    workers: int = 1,
    completions_per_call: int | None = None,
) -> RewardFn:
    """Run a reward function in worker processes that are killed when a call takes too long.

    The workers start at the first call as fresh interpreters, import the function by name (JAX uses the CPU there), and
    end with this process. Define the function at the top level of a module other than the script that runs. A function
    that workers cannot import ends the run.

    A fault (an exception, the timeout, the memory limit, a worker that died) concerns the completions of its call; the
    others keep their scores. Processes that a call has started are killed with it. Replies contain a random number of
    their call, so a function cannot answer for another one. Nothing else is restricted: see SECURITY.md.

    Args:
      fn: a reward function, sync or async, without `log_metric` and `log_extra`.
      timeout: seconds for one call. A batch of n calls takes at most ceil(n / workers) · timeout, plus restarts.
      memory_mb: MiB of address space, in addition to the worker's after the imports. Linux only. None: no limit.
      workers: number of processes.
      completions_per_call: completions of one call, to which the limits apply. None splits the batch evenly among the
        workers; with one worker the function gets the whole batch.

    Returns:
      A reward function with the name and the arguments of `fn`.

    Raises:
      ValueError: a limit that is not positive; a function that cannot be sent to another process.

    Example:
      >>> isolated(lambda completions: [0.0] * len(completions), timeout=5.0)
      Traceback (most recent call last):
      ValueError: fn is 'lambda', which cannot be sent to a worker process ...
    """
    if not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
        raise ValueError(f"timeout is {timeout!r}: give a positive number of seconds")
    sizes = {"workers": workers, "memory_mb": memory_mb, "completions_per_call": completions_per_call}
    for name, value in sizes.items():
        if not (isinstance(value, int) and value >= 1) and (name == "workers" or value is not None):
            raise ValueError(f"{name} is {value!r}: give a positive whole number")
    if inspect.isclass(fn):
        raise ValueError(f"fn is the class {fn.__name__!r}: give a reward function (environments cannot be isolated)")
    if loggers := [name for name in ("log_metric", "log_extra") if name in arguments_of(fn)]:
        raise ValueError(
            f"fn is {function_name(fn)!r}, which takes {loggers[0]}: workers cannot log, return scores only"
        )
    if not hasattr(os, "killpg"):
        raise ValueError("isolated needs a POSIX system (Linux, macOS); this one cannot kill a group of processes")
    if memory_mb is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"memory_mb is {memory_mb}, but only Linux enforces it: leave it out on {sys.platform}")
    return _IsolatedFunction(fn, timeout, memory_mb, workers, completions_per_call)


class _IsolatedFunction:
    """A reward function whose calls are carried out by worker processes."""

    def __init__(self, fn: RewardFn, timeout: float, memory_mb: int | None, workers: int, per_call: int | None):
        self.fn = fn
        self.__name__ = function_name(fn)
        self.reward_arguments = arguments_of(fn)
        self._timeout, self._memory_mb, self._workers, self._per_call = timeout, memory_mb, workers, per_call
        self._payload = _sendable(fn)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def __call__(self, **inputs: Any) -> list[float | None]:
        taken = contract.select_inputs(self.fn, inputs)
        count = len(next(values for name, values in taken.items() if name not in EXTRAS))
        size = self._per_call or math.ceil(count / self._workers)
        spans = [range(count)[start : start + size] for start in range(0, count, size)]
        requests = [(len(span), self._pickled(taken, span)) for span in spans]
        values, faults = np.full(count, np.nan), Faults()
        with self._lock:
            for span, (scores, found) in zip(spans, self._run(requests), strict=True):
                values[span] = scores
                if None in found and len(span) < count:  # a fault of the whole call, which is a part of the batch
                    found = dict.fromkeys(range(len(span)), found[None])
                faults |= {None if index is None else span[index]: fault for index, fault in found.items()}
        return give_scores(values, faults)

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        contract.check_rows(self.fn, rows, argument=argument)

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._pool is not None:
            _stop(self._pool).join()
            self._finalizer.detach()
            self._pool = None

    def _pickled(self, inputs: Inputs, span: range) -> bytes:
        """Return the inputs for a part of the batch."""
        part = {name: x if name in EXTRAS else x[span.start : span.stop] for name, x in inputs.items()}
        try:
            return pickle.dumps(part)
        except Exception as error:
            problem = f"the arguments of {self.__name__!r} cannot be sent to a worker process ({error})"
            raise RewardError(f"{problem}: use columns of plain values") from error

    def _run(self, requests: Sequence[tuple[int, bytes]]) -> list[_Outcome]:
        """Return the scores and faults of calls, each a number of completions and their pickled arguments."""
        outcomes: dict[int, _Outcome] = {}
        try:
            # Pebble gives up a pool if a worker dies while it is idle, or before it has reported its call: try again.
            for _ in range(3):
                if lost := [index for index in range(len(requests)) if index not in outcomes]:
                    found = self._ask(self._started(), [requests[index] for index in lost], self._timeout)
                    outcomes |= {index: outcome for index, outcome in zip(lost, found, strict=True) if outcome}
        except BaseException:  # Ctrl-C too: later calls must not get replies to these
            self.close()
            raise
        return [outcomes.get(i, _unscored(count, _NO_REPLY)) for i, (count, _) in enumerate(requests)]

    def _started(self) -> ProcessPool:
        """Return a pool in which a worker has loaded the function."""
        if self._pool is not None and self._pool.active:
            return self._pool
        from pebble import ProcessPool

        self.close()
        setup = (self._payload, self._memory_mb, os.getpid())
        self._pool = pool = ProcessPool(self._workers, 0, _start_worker, setup, _WorkerContext())
        self._finalizer = weakref.finalize(self, _stop, pool)
        self._finalizer.atexit = False  # pebble ends the workers itself then
        if self._ask(pool, [(0, b"")], 0.0) == [None]:  # only loads the function
            problem = f"its worker process ended, or did not load it in {START_SECONDS:g} s"
            raise SetupError(f"reward function {self.__name__!r}: {problem}")
        return pool

    def _ask(self, pool: ProcessPool, requests: Sequence[tuple[int, bytes]], timeout: float) -> list[_Outcome | None]:
        """Return the scores and faults of each call, None if the pool broke before the call ended."""
        calls = [(secrets.token_hex(8), count, inputs) for count, inputs in requests]
        try:
            futures = [pool.schedule(_serve, call, timeout=timeout) for call in calls]
        except RuntimeError:
            return [None] * len(calls)
        # Longer than the limits allow: loading the function in a new worker is not limited by them.
        end = time.monotonic() + math.ceil(len(calls) / self._workers) * (timeout + START_SECONDS)
        while concurrent.futures.wait(futures, timeout=1.0).not_done and pool.active and time.monotonic() < end:
            pass
        return [self._read(future, nonce, count) for future, (nonce, count, _) in zip(futures, calls, strict=True)]

    def _read(self, future: concurrent.futures.Future[str], nonce: str, count: int) -> _Outcome | None:
        """Return the scores and faults of a call as `_ask` does; raise SetupError if loading the function failed."""
        error = future.exception() if future.done() else concurrent.futures.BrokenExecutor()
        if isinstance(error, concurrent.futures.BrokenExecutor):
            return None
        if error is not None:
            return _unscored(count, self._fault(error))
        try:
            reply = json.loads(future.result())
            if reply["nonce"] != nonce:
                raise ValueError("a reply to another call")
            if "failure" not in reply:
                return read_outcome(reply["scores"], count, _read_score)
            kind, message, lines = map(str, reply["failure"])
            fault = type(kind, (Exception,), {})(message) if kind else message  # its own class may not exist here
            loaded = reply["loaded"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return _unscored(count, _NO_REPLY)
        if not loaded:
            problem = f"its worker process could not load it ({kind}: {message})\n{lines}"
            raise SetupError(f"reward function {self.__name__!r}: {problem}")
        if isinstance(fault, Exception):
            fault.add_note(f"In the worker process:\n{lines}")
        return _unscored(count, fault)

    def _fault(self, error: BaseException) -> str:
        """Return why a call was not answered, as the end of a sentence about the function."""
        from pebble import ProcessExpired

        if isinstance(error, TimeoutError):
            return f"took longer than its timeout of {self._timeout:g} s and was killed"
        if not isinstance(error, ProcessExpired):
            return _NO_REPLY
        with contextlib.suppress(OSError):  # processes that the function has started
            os.killpg(error.pid, signal.SIGKILL)
        code, limit = error.exitcode, f": more than its memory_mb of {self._memory_mb}" if self._memory_mb else ""
        if code == OUT_OF_MEMORY:
            return f"ran out of memory{limit}"
        return f"ended its worker process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def _unscored(count: int, fault: BaseException | str) -> _Outcome:
    return np.full(count, np.nan), {None: fault}


def _read_score(_: int, item: object) -> float | str:
    return str(item["fault"]) if isinstance(item, dict) and "fault" in item else read_number(item)


def _stop(pool: ProcessPool) -> threading.Thread:
    """End all workers in a thread, since the garbage collector may run in one of the pool's own threads."""
    thread = threading.Thread(target=lambda: (pool.stop(), pool.join()))
    thread.start()
    return thread


# Starting processes and reading their messages ------------------------------------------------------------------------

# The classes that pebble's messages consist of.
_MESSAGES = {("pebble.pool.process", "Acknowledgement"), ("pebble.pool.process", "TaskResult")}
_MESSAGES |= {("pebble.common.types", "Result"), ("pebble.common.types", "ResultStatus")}


def _sendable(fn: Callable[..., object]) -> bytes:
    """Return a function as a pickle."""
    try:
        payload = pickle.dumps(fn)
    except Exception as error:
        raise ValueError(
            f"fn is {function_name(fn)!r}, which cannot be sent to a worker process ({error}): define it at the top "
            "level of a module, under its own name (no lambda, no inner function, isolated(fn, ...) not as a decorator)"
        ) from error
    if b"__main__" in payload:  # a pickle contains the names of the modules that it imports
        raise ValueError(
            f"fn is {function_name(fn)!r}, defined in the running script or notebook, which workers do not import:"
            " write it into a module (%%writefile my_rewards.py) and import it"
        )
    return payload


class _WorkerProcess(SpawnProcess):
    """A process that does not import the running script, and is killed together with the processes it has started."""

    _starting = threading.Lock()

    def start(self) -> None:
        def without_main(name: str) -> dict[str, object]:
            data = prepare(name)
            return {key: data[key] for key in data if name != self.name or not key.startswith("init_main_from_")}

        # Multiprocessing lacks an option for this. The script would run its top level again, and import JAX.
        with self._starting:
            prepare, spawn.get_preparation_data = spawn.get_preparation_data, without_main
            try:
                super().start()
            finally:
                spawn.get_preparation_data = prepare

    def terminate(self) -> None:
        try:
            os.killpg(self.pid or 0, signal.SIGKILL)
        except OSError:  # it has not created its process group yet
            self.kill()


class _WorkerContext(SpawnContext):
    """The worker processes of a pool, and pipes that read only pebble's messages from them."""

    Process = _WorkerProcess

    def Pipe(self, duplex: bool = True) -> tuple[Any, Any]:
        reader, writer = super().Pipe(duplex)
        # In this process only: a worker gets a plain connection.
        reader.recv = functools.partial(_receive, reader)  # type: ignore[method-assign]
        return reader, writer


def _receive(reader: Connection) -> object:
    """Return a message of a worker; an OSError, which makes pebble give up the pool, for anything else."""
    try:
        return _Message(io.BytesIO(reader.recv_bytes(2**27))).load()
    except Exception as error:
        raise OSError(f"a worker did not send a message of pebble ({error})") from error


class _Message(pickle.Unpickler):
    """Unpickles plain values and `_MESSAGES` only: a pickle from a worker could execute code in this process."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _MESSAGES:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong to a message")
        return super().find_class(module, name)


# In a worker process --------------------------------------------------------------------------------------------------

# The function in its worker process, or the exception that loading it raised; None in other processes.
_served: Callable[..., object] | BaseException | None = None
_event_loop = functools.cache(
    asyncio.new_event_loop
)  # one for all calls: clients that a function keeps are bound to it


def _start_worker(payload: bytes, memory_mb: int | None, parent: int) -> None:
    """Prepare a worker process, and load the function."""
    global _served
    os.setsid()
    # A batch system sends SIGTERM to all processes of a run, which then finishes its step and needs the rewards.
    # Unlike SIG_IGN, a handler is not inherited by the processes that the function starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        _served = pickle.loads(payload)
    except BaseException as error:
        _served = error
    if memory_mb is not None:  # after the imports: a limit for the function, not for the libraries that it needs
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            limit = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _serve(nonce: str, count: int, inputs: bytes) -> str:
    """Call the function, and return its scores and faults as JSON."""
    outcome: object = []
    try:
        if not callable(_served):
            outcome = _served
        elif count:
            outcome = _served(**pickle.loads(inputs))
            outcome = _event_loop().run_until_complete(outcome) if inspect.isawaitable(outcome) else outcome
    except BaseException as error:
        outcome = error
    values, faults = read_outcome(outcome, count)
    if isinstance(faults.get(None), MemoryError):
        os._exit(OUT_OF_MEMORY)  # objects that the function keeps would fail later calls too
    sys.stdout.flush()
    sys.stderr.flush()
    reply: dict[str, object] = {"nonce": nonce, "loaded": callable(_served)}
    if (fault := faults.get(None)) is not None:
        lines = "".join(traceback.format_exception(fault)) if isinstance(fault, BaseException) else ""
        texts = [type(fault).__name__ if lines else "", str(fault)[:_LONGEST_TEXT], lines[-_LONGEST_TEXT:]]
        return json.dumps(reply | {"failure": texts})
    bad = {index: {"fault": describe_fault(fault)[:_LONGEST_TEXT]} for index, fault in faults.items()}
    scores = [bad.get(i, None if np.isnan(value) else value) for i, value in enumerate(values.tolist())]
    return json.dumps(reply | {"scores": scores})
