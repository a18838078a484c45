"""Execution of reward functions in worker processes, with limits on time and memory.

A batch is split into calls, which run in a `pebble.ProcessPool`. This is not a sandbox: a worker can read and write
files, use the network and start processes. Run untrusted code in a container.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing import spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.rewards import contract
from grpo_jax.rewards.contract import EXTRAS, RewardError, RewardWorkerError, arguments_of, function_name
from grpo_jax.rewards.outcomes import Failures, as_scores, describe_failure, read_outcome

if TYPE_CHECKING:
    from pebble import ProcessPool

    from grpo_jax.types import RewardFn, Row

START_SECONDS = 60.0  # time limit for a worker's imports
ATTEMPTS = 3  # limit per batch; pebble abandons a pool if a worker dies while idle or before it acknowledges a call
OUT_OF_MEMORY = 86  # exit code of a worker whose function raised MemoryError
_MAX_TEXT = 2000  # maximum length of an error message, and of a traceback, in characters

_Outcome = tuple[np.ndarray, Failures]
_Reply = tuple[list[float], dict[int | None, str], tuple[str, str, str] | None]
"""Scores and errors of a call. If an exception was raised, also its type's name, its message and its traceback."""


def isolated(
    fn: RewardFn,
    *,
    timeout: float,
    memory_mb: int | None = None,
    workers: int = 1,
    completions_per_call: int | None = None,
) -> RewardFn:
    """Return a reward function that calls `fn` in worker processes, which are killed if a call takes too long.

    Workers start as new interpreters on the first call, import the function by name (with JAX on the CPU) and exit when
    this process exits. The function must be defined at the top level of a module other than the running script.

    An error in a call (an exception, an exceeded limit or a crashed worker) affects only that call's completions.
    Processes started by a killed call are also killed. Nothing else is restricted; see SECURITY.md.

    Args:
      fn: a sync or async reward function without the arguments `log_metric` and `log_extra`.
      timeout: time limit per call in seconds. A batch that is split into n calls takes at most
        ceil(n / workers) · timeout, plus the time to start workers.
      memory_mb: limit on the growth of a worker's address space after imports, in MiB (Linux only). None disables it.
      workers: number of worker processes.
      completions_per_call: number of completions per call. If None, the batch is divided evenly among the workers.

    Returns:
      A reward function with the same name and arguments as `fn`.

    Raises:
      ValueError: if a limit is not positive and finite, if `fn` logs values or cannot be sent to a worker process, or
        if the system does not support the limits.

    Example:
      >>> isolated(lambda completions: [0.0] * len(completions), timeout=5.0)
      Traceback (most recent call last):
      ValueError: fn='lambda' cannot be sent to a worker process ...
    """
    limits = {"timeout": timeout, "memory_mb": memory_mb, "workers": workers}
    for name, value in (limits | {"completions_per_call": completions_per_call}).items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite; got {value!r}")
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
            problem = f"the arguments to {self.__name__!r} cannot be sent to a worker process ({error})"
            raise RewardError(f"{problem}; use columns with built-in types") from error
        with self._lock:
            outcomes = self._call_all([(s.stop - s.start, part) for s, part in zip(spans, parts, strict=True)])
        values, failures = np.full(count, np.nan), Failures()
        for span, (scores, errors) in zip(spans, outcomes, strict=True):
            values[span] = scores
            if None in errors and len(spans) > 1:  # the whole call failed, but it contained only part of the batch
                errors = dict.fromkeys(range(len(scores)), errors[None])
            failures |= {None if index is None else span.start + index: failure for index, failure in errors.items()}
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
            for _ in range(ATTEMPTS):
                pool, futures = self._running_pool(), dict[Future[_Reply], int]()
                with contextlib.suppress(RuntimeError):  # the pool is broken
                    for i in range(len(calls)):
                        if i not in outcomes:
                            futures[pool.schedule(_serve, calls[i], timeout=self._timeout)] = i
                for future in self._replies(pool, futures):
                    outcomes[futures[future]] = self._read(future, calls[futures[future]][0])
                if len(outcomes) == len(calls):
                    return [outcomes[i] for i in range(len(calls))]
            problem = f"ended or did not load the function within {START_SECONDS:g} s"
            raise RewardWorkerError(f"reward function {self.__name__!r}: the worker process {problem}")
        except BaseException:  # including Ctrl-C
            self.close()
            raise

    def _running_pool(self) -> ProcessPool:
        """Return the running pool. Starts a new pool if none is running."""
        from pebble import ProcessPool

        if self._pool is None or not self._pool.active:
            self.close()
            setup = (self._payload, self._memory_mb, os.getpid())
            self._pool = ProcessPool(self._workers, 0, _start_worker, setup, _CONTEXT)
            self._finalizer = weakref.finalize(self, _stop, self._pool)
            self._finalizer.atexit = False  # pebble stops the workers at exit
        return self._pool

    def _replies(self, pool: ProcessPool, futures: Iterable[Future[_Reply]]) -> Iterator[Future[_Reply]]:
        """Yield the future of each call that ended. Calls that a broken pool lost are omitted."""
        limit = self._timeout + START_SECONDS  # the timeout excludes the time new workers take to load the function
        waiting, end = {*futures}, time.monotonic() + limit
        while waiting and pool.active and time.monotonic() < end:
            done, waiting = concurrent.futures.wait(waiting, 1.0, concurrent.futures.FIRST_COMPLETED)
            end = time.monotonic() + limit if done else end
            yield from (x for x in done if not isinstance(x.exception(), concurrent.futures.BrokenExecutor))

    def _read(self, future: Future[_Reply], count: int) -> _Outcome:
        """Return a finished call's scores and errors. Raises RewardWorkerError if the function could not be loaded."""
        error = future.exception()
        if isinstance(error, RewardWorkerError):
            raise RewardWorkerError(f"reward function {self.__name__!r}: {error}")
        if error is not None:
            return np.full(count, np.nan), {None: self._describe(error)}
        scores, failures, exception = future.result()
        errors: Failures = {**failures}
        if exception is not None:
            kind, message, lines = exception
            errors[None] = failure = type(kind, (Exception,), {})(message)  # its class may not be importable here
            failure.add_note(f"In the worker process:\n{lines}")
        return np.array(scores), errors

    def _describe(self, error: BaseException) -> str:
        """Return a verb phrase that describes a worker failure, to follow the function's name in a message."""
        from pebble import ProcessExpired

        if isinstance(error, TimeoutError):
            return f"took longer than its timeout of {self._timeout:g} s and was killed"
        assert isinstance(error, ProcessExpired), error
        with contextlib.suppress(OSError):  # also kill processes that the function started
            os.killpg(error.pid, signal.SIGKILL)
        code, limit = error.exitcode, f" (memory_mb={self._memory_mb})" if self._memory_mb else ""
        if code == OUT_OF_MEMORY:
            return f"ran out of memory{limit}"
        return f"ended its worker process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


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


class _WorkerProcess(SpawnProcess):
    """A worker process that does not import the running script and is killed together with its child processes."""

    _starting = threading.Lock()

    def start(self) -> None:
        def without_main(name: str) -> dict[str, object]:
            data = prepare(name)
            return {key: data[key] for key in data if not key.startswith("init_main_from_")}

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


_CONTEXT = SpawnContext()
_CONTEXT.Process = _WorkerProcess  # type: ignore[misc]


# In a worker process --------------------------------------------------------------------------------------------------

# The worker's function, or the exception raised while loading it.
_served: Callable[..., object] | BaseException | None = None
_event_loop = functools.cache(asyncio.new_event_loop)  # shared by all calls, since async clients are bound to a loop


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


def _serve(count: int, inputs: bytes) -> _Reply:
    """Call the function and return its scores and errors."""
    if isinstance(_served, BaseException):
        lines, problem = "".join(traceback.format_exception(_served)), f"({type(_served).__name__}: {_served})"
        raise RewardWorkerError(f"a worker process could not load the function {problem}\n{lines}")
    assert _served is not None
    outcome: object
    try:
        outcome = _served(**pickle.loads(inputs))
        outcome = _event_loop().run_until_complete(outcome) if inspect.isawaitable(outcome) else outcome
    except BaseException as error:
        outcome = error
    values, failures = read_outcome(outcome, count)
    whole = failures.get(None)
    if isinstance(whole, MemoryError):
        os._exit(OUT_OF_MEMORY)  # memory held by the function could make later calls fail
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(whole, BaseException):
        lines = "".join(traceback.format_exception(whole))
        return values.tolist(), {}, (type(whole).__name__, str(whole)[:_MAX_TEXT], lines[-_MAX_TEXT:])
    return values.tolist(), {i: describe_failure(failure)[:_MAX_TEXT] for i, failure in failures.items()}, None
