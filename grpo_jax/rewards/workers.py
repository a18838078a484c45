"""Execution of reward functions in worker processes, with limits on time and memory.

A batch is split into calls to a `pebble.ProcessPool`, which return scores and errors as JSON. This is not a sandbox: a
worker can read and write files, use the network and start processes. Run untrusted code in a container.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
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
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.rewards import contract
from grpo_jax.rewards.contract import EXTRAS, RewardError, SetupError, arguments_of, function_name
from grpo_jax.rewards.outcomes import Failures, as_scores, describe_failure, read_number, read_outcome

if TYPE_CHECKING:
    from pebble import ProcessPool

    from grpo_jax.types import RewardFn, Row

START_SECONDS = 60.0  # time limit for a worker's imports
OUT_OF_MEMORY = 86  # exit code of a worker whose function raised MemoryError
_MAX_TEXT = 2000  # maximum length of an error message and of its traceback
_NO_REPLY = "sent a reply that does not belong to this call, or ended its worker process"

_Outcome = tuple[np.ndarray, Failures]


def isolated(
    fn: RewardFn,
    *,
    timeout: float,
    memory_mb: int | None = None,
    workers: int = 1,
    completions_per_call: int | None = None,
) -> RewardFn:
    """Return a reward function that calls `fn` in worker processes, which are killed if a call takes too long.

    Workers start as new interpreters at the first call, import the function by name (with JAX on the CPU) and exit when
    this process exits. The function must be defined at the top level of a module other than the running script.

    An error (exception, exceeded limit, crashed worker) affects only the completions in that call. Processes started by
    a killed call are also killed. Each reply must repeat a random number from its call, so a function cannot forge the
    reply to a different call. Nothing else is restricted; see SECURITY.md.

    Args:
      fn: a sync or async reward function without the arguments `log_metric` and `log_extra`.
      timeout: time limit per call in seconds. A batch that is split into n calls takes at most
        ceil(n / workers) · timeout, plus restarts.
      memory_mb: limit on the address space in MiB, in addition to its size after imports (Linux). None disables it.
      workers: number of worker processes.
      completions_per_call: number of completions per call. The limits apply to each call. If None, the batch is split
        evenly among the workers.

    Returns:
      A reward function with the same name and arguments as `fn`.

    Raises:
      ValueError: if a limit is not positive, if `fn` logs values, or if it cannot be sent to a worker process.

    Example:
      >>> isolated(lambda completions: [0.0] * len(completions), timeout=5.0)
      Traceback (most recent call last):
      ValueError: fn='lambda' cannot be sent to a worker process ...
    """
    if not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
        raise ValueError(f"timeout must be a positive number of seconds; got {timeout!r}")
    sizes = {"workers": workers, "memory_mb": memory_mb, "completions_per_call": completions_per_call}
    for name, value in sizes.items():
        if not (isinstance(value, int) and value >= 1) and (name == "workers" or value is not None):
            raise ValueError(f"{name} must be a positive integer; got {value!r}")
    if loggers := [name for name in ("log_metric", "log_extra") if name in arguments_of(fn)]:
        raise ValueError(f"fn={function_name(fn)!r} takes {loggers[0]}, but workers cannot log; remove the argument")
    if not hasattr(os, "killpg") or (memory_mb is not None and not sys.platform.startswith("linux")):
        raise ValueError(f"isolated requires a POSIX system, and memory_mb requires Linux; got {sys.platform}")
    return _IsolatedFunction(fn, timeout, memory_mb, workers, completions_per_call)


class _IsolatedFunction:
    def __init__(self, fn: RewardFn, timeout: float, memory_mb: int | None, workers: int, per_call: int | None):
        self.fn = fn
        self.__name__ = function_name(fn)
        self.reward_arguments = arguments_of(fn)
        self._timeout, self._memory_mb, self._workers, self._per_call = timeout, memory_mb, workers, per_call
        self._payload = _pickled_function(fn)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def __call__(self, **inputs: Any) -> list[float | None]:
        inputs = dict(contract.select_inputs(self.fn, inputs))
        count = len(next(values for name, values in inputs.items() if name not in EXTRAS))
        size = self._per_call or math.ceil(count / self._workers)
        spans = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        try:
            parts = [pickle.dumps({name: x if name in EXTRAS else x[s] for name, x in inputs.items()}) for s in spans]
        except Exception as error:
            problem = f"the arguments of {self.__name__!r} cannot be sent to a worker process ({error})"
            raise RewardError(f"{problem}; use columns with built-in types") from error
        with self._lock:
            outcomes = self._call_all([(s.stop - s.start, part) for s, part in zip(spans, parts, strict=True)])
        values, failures = np.full(count, np.nan), Failures()
        for span, (scores, found) in zip(spans, outcomes, strict=True):
            values[span] = scores
            if None in found and len(spans) > 1:  # the whole call failed, but it contained only part of the batch
                found = dict.fromkeys(range(len(scores)), found[None])
            failures |= {None if index is None else span.start + index: failure for index, failure in found.items()}
        return as_scores(values, failures)

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        contract.check_rows(self.fn, rows, argument=argument)

    def close(self) -> None:
        """Stop the workers. The next call starts new workers."""
        if self._pool is not None:
            _stop(self._pool).join()
            self._finalizer.detach()
            self._pool = None

    def _call_all(self, calls: Sequence[tuple[int, bytes]]) -> list[_Outcome]:
        """Run calls, given as (number of completions, pickled arguments). Returns scores and errors for each call."""
        outcomes: dict[int, _Outcome] = {}
        try:
            # Retry: pebble abandons a pool if a worker dies while it is idle or before it acknowledges its call.
            for _ in range(3):
                if lost := [index for index in range(len(calls)) if index not in outcomes]:
                    found = self._schedule(self._started_pool(), [calls[index] for index in lost], self._timeout)
                    outcomes |= {index: outcome for index, outcome in zip(lost, found, strict=True) if outcome}
        except BaseException:  # including Ctrl-C: later calls must not receive these replies
            self.close()
            raise
        return [outcomes.get(i, _unscored(count, _NO_REPLY)) for i, (count, _) in enumerate(calls)]

    def _started_pool(self) -> ProcessPool:
        """Return a running pool. If there is none, start one and load the function in a worker."""
        if self._pool is not None and self._pool.active:
            return self._pool
        from pebble import ProcessPool

        self.close()
        setup = (self._payload, self._memory_mb, os.getpid())
        self._pool = pool = ProcessPool(self._workers, 0, _start_worker, setup, _WorkerContext())
        self._finalizer = weakref.finalize(self, _stop, pool)
        self._finalizer.atexit = False  # pebble stops the workers at exit
        if self._schedule(pool, [(0, b"")], 0.0) == [None]:  # only loads the function
            problem = f"the worker process ended or did not load the function within {START_SECONDS:g} s"
            raise SetupError(f"reward function {self.__name__!r}: {problem}")
        return pool

    def _schedule(self, pool: ProcessPool, calls: Sequence[tuple[int, bytes]], timeout: float) -> list[_Outcome | None]:
        """Run calls in the pool. Returns scores and errors for each call, or None for calls that a broken pool lost."""
        requests = [(secrets.token_hex(8), count, inputs) for count, inputs in calls]
        try:
            futures = [pool.schedule(_serve, request, timeout=timeout) for request in requests]
        except RuntimeError:
            return [None] * len(calls)
        # The timeout excludes the time in which new workers load the function.
        end = time.monotonic() + math.ceil(len(calls) / self._workers) * (timeout + START_SECONDS)
        while concurrent.futures.wait(futures, timeout=1.0).not_done and pool.active and time.monotonic() < end:
            pass
        return [self._read(future, nonce, count) for future, (nonce, count, _) in zip(futures, requests, strict=True)]

    def _read(self, future: concurrent.futures.Future[str], nonce: str, count: int) -> _Outcome | None:
        """Return the outcome of a call, or None if the pool is broken. Raises SetupError if loading `fn` failed."""
        error = future.exception() if future.done() else concurrent.futures.BrokenExecutor()
        if isinstance(error, concurrent.futures.BrokenExecutor):
            return None
        if error is not None:
            return _unscored(count, self._describe(error))
        try:
            reply = json.loads(future.result())
            if reply["nonce"] != nonce:
                raise ValueError("a reply to a different call")
            if "failure" not in reply:
                return read_outcome(reply["scores"], count, _read_score)
            kind, message, lines = map(str, reply["failure"])
            loaded = reply["loaded"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return _unscored(count, _NO_REPLY)
        if not loaded:
            problem = f"the worker process could not load the function ({kind}: {message})\n{lines}"
            raise SetupError(f"reward function {self.__name__!r}: {problem}")
        if not kind:
            return _unscored(count, message)
        failure = type(kind, (Exception,), {})(message)  # the original class may not be importable here
        failure.add_note(f"In the worker process:\n{lines}")
        return _unscored(count, failure)

    def _describe(self, error: BaseException) -> str:
        """Return a verb phrase that describes a worker failure, to follow the function's name in a message."""
        from pebble import ProcessExpired

        if isinstance(error, TimeoutError):
            return f"took longer than its timeout of {self._timeout:g} s and was killed"
        if not isinstance(error, ProcessExpired):
            return _NO_REPLY
        with contextlib.suppress(OSError):  # processes started by the function
            os.killpg(error.pid, signal.SIGKILL)
        code, limit = error.exitcode, f" (memory_mb={self._memory_mb})" if self._memory_mb else ""
        if code == OUT_OF_MEMORY:
            return f"ran out of memory{limit}"
        return f"ended its worker process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def _unscored(count: int, failure: BaseException | str) -> _Outcome:
    return np.full(count, np.nan), {None: failure}


def _read_score(_: int, item: object) -> float | str:
    return str(item["failure"]) if isinstance(item, dict) and "failure" in item else read_number(item)


def _stop(pool: ProcessPool) -> threading.Thread:
    """Stop all workers from a new thread, since the garbage collector may call this function in a pool thread."""
    thread = threading.Thread(target=lambda: (pool.stop(), pool.join()))
    thread.start()
    return thread


def _pickled_function(fn: Callable[..., object]) -> bytes:
    fix = "define it at the top level of an importable module, without a decorator (no lambda, no inner function)"
    try:
        payload = pickle.dumps(fn)
    except Exception as error:
        raise ValueError(f"fn={function_name(fn)!r} cannot be sent to a worker process ({error}); {fix}") from error
    if b"__main__" in payload:  # a pickle contains the names of the modules that it imports
        raise ValueError(f"fn={function_name(fn)!r} is defined in the running script or notebook; {fix}")
    return payload


# Processes and messages -----------------------------------------------------------------------------------------------


class _WorkerProcess(SpawnProcess):
    """A worker process that does not import the running script and is killed together with its child processes."""

    _starting = threading.Lock()

    def start(self) -> None:
        def without_main(name: str) -> dict[str, object]:
            data = prepare(name)
            return {key: data[key] for key in data if name != self.name or not key.startswith("init_main_from_")}

        # multiprocessing has no option to skip the main script, which would run again and import JAX.
        with self._starting:
            prepare, spawn.get_preparation_data = spawn.get_preparation_data, without_main
            try:
                super().start()
            finally:
                spawn.get_preparation_data = prepare

    def terminate(self) -> None:
        try:
            os.killpg(self.pid or 0, signal.SIGKILL)
        except OSError:  # the worker has not created its process group yet
            self.kill()


class _WorkerContext(SpawnContext):
    Process = _WorkerProcess


# In a worker process --------------------------------------------------------------------------------------------------

# In a worker: the function, or the exception raised when loading it.
_served: Callable[..., object] | BaseException | None = None
_event_loop = functools.cache(asyncio.new_event_loop)  # shared by all calls, since clients are bound to a loop


def _start_worker(payload: bytes, memory_mb: int | None, parent: int) -> None:
    global _served
    os.setsid()
    # Ignore SIGTERM, which batch systems send to all processes of a run: the run needs the rewards to finish its step.
    # Unlike SIG_IGN, a handler is not inherited by child processes.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        _served = pickle.loads(payload)
    except BaseException as error:
        _served = error
    if memory_mb is not None:  # set after the imports, so that the limit excludes libraries
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            limit = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _serve(nonce: str, count: int, inputs: bytes) -> str:
    """Call the function and return its scores and errors as JSON."""
    outcome: object = []
    try:
        if not callable(_served):
            outcome = _served
        elif count:
            outcome = _served(**pickle.loads(inputs))
            outcome = _event_loop().run_until_complete(outcome) if inspect.isawaitable(outcome) else outcome
    except BaseException as error:
        outcome = error
    values, failures = read_outcome(outcome, count)
    if isinstance(failures.get(None), MemoryError):
        os._exit(OUT_OF_MEMORY)  # memory held by the function could make later calls fail
    sys.stdout.flush()
    sys.stderr.flush()
    reply: dict[str, object] = {"nonce": nonce, "loaded": callable(_served)}
    if (failure := failures.get(None)) is not None:
        lines = "".join(traceback.format_exception(failure)) if isinstance(failure, BaseException) else ""
        described = [type(failure).__name__ if lines else "", str(failure)[:_MAX_TEXT], lines[-_MAX_TEXT:]]
        return json.dumps(reply | {"failure": described})
    bad = {index: {"failure": describe_failure(failure)[:_MAX_TEXT]} for index, failure in failures.items()}
    scores = [bad.get(i, None if np.isnan(value) else value) for i, value in enumerate(values.tolist())]
    return json.dumps(reply | {"scores": scores})
