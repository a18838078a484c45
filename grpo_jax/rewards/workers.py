"""Reward functions in worker processes, with limits that hold whatever the function does.

```
isolated(fn)(completions=...)  ──► calls of some completions each ──► pebble.ProcessPool: one call at a time per worker
                               ◄── scores and faults, as JSON ──────
```

This is not a sandbox: a worker may read and write files, use the network and start processes like any program of yours.
Run code that you do not trust in a container, and let the reward function talk to it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
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
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.rewards import processes
from grpo_jax.rewards.contract import (
    Faults,
    RewardError,
    SetupError,
    arguments_of,
    check_rows,
    function_name,
    give_scores,
    read_number,
    read_outcome,
    select_inputs,
    split_inputs,
)
from grpo_jax.rewards.processes import OUT_OF_MEMORY, WorkerContext, sendable, serve, start_worker

if TYPE_CHECKING:
    from pebble import ProcessPool

    from grpo_jax.types import Row

_Request = tuple[int, dict[str, bytes]]  # the number of completions, and the arguments; 0 only loads the function
_Outcome = tuple[np.ndarray, Faults]

START_SECONDS = 60.0
"""Seconds that a worker may take to import what its function needs."""

_NO_REPLY = "sent something else than the reply to this call, or ended its worker process"
_GUARD = "put what starts the training under if __name__ == '__main__':, since workers import the script of a function"


def isolated(
    fn: Callable[..., Any],
    *,
    timeout: float,
    memory_mb: int | None = None,
    workers: int = 1,
    completions_per_call: int | None = None,
) -> Callable[..., Any]:
    """Run a reward function in worker processes that are killed when a call takes too long.

    The workers start at the first call as fresh interpreters, import what the function needs (JAX uses the CPU there),
    stay for later calls, and end with this process. The function is imported by name: define it at the top level of a
    module. If that is the script itself, put what starts the training under `if __name__ == "__main__":`.

    A batch is cut into calls, which the workers share. A fault (an exception, the timeout, the memory limit, a worker
    that died) concerns the completions of its call; the others keep their scores, and `on_reward_error` says whether
    the run stops. A function that workers cannot import ends the run in either case.

    This protects a run from calls that hang, crashes and leaks of memory; processes that a call has started are killed
    with it. Replies are JSON with a random number of their call, so a function cannot answer for another call. It does
    not restrict what a function reads, writes, sends or starts: see SECURITY.md.

    Args:
      fn: a reward function, sync or async.
      timeout: seconds for one call, from when a worker has the request. A batch of n calls ends after
        ceil(n / workers) · timeout at the latest, plus the time in which workers start again.
      memory_mb: MiB of address space for the function, in addition to its worker's after the imports. Linux only.
        None: no limit.
      workers: number of processes.
      completions_per_call: completions of one call, to which the limits apply. None cuts the batch evenly among the
        workers, so that with one worker the function gets the whole batch, as one that compares completions needs.

    Returns:
      A reward function with the name and the arguments of `fn`, to be used where `fn` would be, also in combinators.

    Raises:
      ValueError: a limit that is not positive; a function that cannot be sent to another process.

    Example:
      >>> isolated(lambda completions: [0.0] * len(completions), timeout=5.0)
      Traceback (most recent call last):
      ValueError: fn is 'lambda', which cannot be sent to a worker process ...
    """
    if not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
        raise ValueError(f"timeout is {timeout!r}: give a positive number of seconds")
    counts = {"workers": workers, "memory_mb": memory_mb, "completions_per_call": completions_per_call}
    for name, value in counts.items():
        left_out = value is None and name != "workers"
        if not left_out and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{name} is {value!r}: give a positive whole number")
    if inspect.isclass(fn):
        raise ValueError(f"fn is the class {fn.__name__!r}: give a reward function (environments cannot be isolated)")
    if not hasattr(os, "killpg"):
        raise ValueError("isolated needs a POSIX system (Linux, macOS); this one cannot kill a group of processes")
    if memory_mb is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"memory_mb is {memory_mb}, but only Linux enforces it: leave it out on {sys.platform}")
    return _IsolatedFunction(fn, timeout, memory_mb, workers, completions_per_call)


class _IsolatedFunction:
    """A reward function whose calls are carried out by worker processes."""

    def __init__(
        self, fn: Callable[..., Any], timeout: float, memory_mb: int | None, workers: int, per_call: int | None
    ):
        self.fn = fn
        self.__name__ = function_name(fn)
        self.reward_arguments = arguments_of(fn)
        self._timeout, self._memory_mb, self._workers, self._per_call = timeout, memory_mb, workers, per_call
        self._setup = (*sendable(fn), memory_mb)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def __call__(self, **inputs: Any) -> list[float | None]:
        if processes.served is not None:
            raise RewardError(f"an isolated function was called in a worker process: {_GUARD}")
        lists, extras = split_inputs(inputs)
        count = len(next(iter(lists.values())))
        lists, extras = split_inputs(select_inputs(self.fn, lists, extras))
        size = self._per_call or math.ceil(count / self._workers)
        spans = [range(start, min(start + size, count)) for start in range(0, count, size)]
        parts = [{name: values[span.start : span.stop] for name, values in lists.items()} for span in spans]
        requests = [(len(span), self._pickled(part | extras)) for span, part in zip(spans, parts, strict=True)]
        values, faults = np.full(count, np.nan), Faults()
        with self._lock:
            for span, (scores, found) in zip(spans, self._run(requests), strict=True):
                values[span.start : span.stop] = scores
                faults |= _place(found, span, count)
        return give_scores(values, faults)

    def check_rows(self, rows: Sequence[Row], *, argument: str = "the dataset") -> None:
        """Raise ValueError if the function inside cannot judge some rows; no worker is used."""
        check_rows(self.fn, rows, argument=argument)

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._pool is not None:
            self._finalizer.detach()
            _stop(self._pool)
            self._pool = None

    def _pickled(self, inputs: dict[str, Any]) -> dict[str, bytes]:
        """Return the arguments of a call as they are sent to a worker."""
        pickled: dict[str, bytes] = {}
        for name, value in inputs.items():
            try:
                pickled[name] = pickle.dumps(value)
            except Exception as error:
                raise RewardError(
                    f"argument {name!r} cannot be sent to the worker process of {self.__name__!r} ({error}): use plain "
                    "values, or a function that does not take it"
                ) from error
        return pickled

    def _run(self, requests: Sequence[_Request]) -> list[_Outcome]:
        """Return the scores and faults of each call."""
        outcomes: list[_Outcome | None] = [None] * len(requests)
        try:
            # Pebble gives up a pool if a worker dies while it is idle, or before it has reported its call. Again then.
            for _ in range(3):
                lost = [index for index, outcome in enumerate(outcomes) if outcome is None]
                if lost:
                    found = self._ask(self._started(), [requests[index] for index in lost], self._timeout)
                    for index, outcome in zip(lost, found, strict=True):
                        outcomes[index] = outcome
        except BaseException:  # Ctrl-C too: no reply to these calls is left for later ones
            self.close()
            raise
        none: list[_Outcome] = [(np.full(count, np.nan), {None: _NO_REPLY}) for count, _ in requests]
        return [outcome or lost for outcome, lost in zip(outcomes, none, strict=True)]

    def _started(self) -> ProcessPool:
        """Return a pool of which a worker has loaded the function."""
        if self._pool is not None and self._pool.active:
            return self._pool
        from pebble import ProcessPool

        self.close()
        setup = (*self._setup, os.getpid())
        self._pool = pool = ProcessPool(self._workers, 0, start_worker, setup, WorkerContext())
        # In a thread, since the garbage collector may run in one of the pool's. At exit pebble ends the workers itself.
        self._finalizer = weakref.finalize(self, lambda: threading.Thread(target=_stop, args=(pool,)).start())
        self._finalizer.atexit = False
        if self._ask(pool, [(0, {})], 0.0) == [None]:
            end = f"had not loaded it after {START_SECONDS:g} s" if pool.active else "ended while it loaded it"
            raise SetupError(f"reward function {self.__name__!r}: its worker process {end}. {_GUARD.capitalize()}")
        return pool

    def _ask(self, pool: ProcessPool, requests: Sequence[_Request], timeout: float) -> list[_Outcome | None]:
        """Return the scores and faults of each call, None if the pool broke before it ended."""
        calls = [(secrets.token_hex(8), count, inputs) for count, inputs in requests]
        try:
            futures = [pool.schedule(serve, call, timeout=timeout) for call in calls]
        except RuntimeError:
            return [None] * len(calls)
        # Longer than the limits allow, as loading the function in a new worker has none.
        end = time.monotonic() + math.ceil(len(calls) / self._workers) * (timeout + START_SECONDS)
        while concurrent.futures.wait(futures, timeout=1.0).not_done and pool.active and time.monotonic() < end:
            pass
        return [self._read(future, nonce, count) for future, (nonce, count, _) in zip(futures, calls, strict=True)]

    def _read(self, future: concurrent.futures.Future[str], nonce: str, count: int) -> _Outcome | None:
        """Return scores and faults of a call, None if the pool broke before it ended; SetupError if loading failed."""
        unscored = np.full(count, np.nan)
        error = future.exception() if future.done() else concurrent.futures.BrokenExecutor()
        if isinstance(error, concurrent.futures.BrokenExecutor):
            return None
        if error is not None:
            return unscored, {None: self._fault(error)}
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
            return unscored, {None: _NO_REPLY}
        if not loaded:
            raise SetupError(
                f"reward function {self.__name__!r}: its worker process could not load it ({kind}: {message})\n{lines}"
            )
        if isinstance(fault, Exception):
            fault.add_note(f"In the worker process:\n{lines}")
        return unscored, {None: fault}

    def _fault(self, error: BaseException) -> str:
        """Return why a call has no reply, as the end of a sentence about the function."""
        from pebble import ProcessExpired

        if isinstance(error, TimeoutError):
            return f"took longer than its timeout of {self._timeout:g} s and was killed"
        if not isinstance(error, ProcessExpired):
            return _NO_REPLY
        with contextlib.suppress(OSError):  # what the function has started and left
            os.killpg(error.pid, signal.SIGKILL)
        code, limit = error.exitcode, f": more than its memory_mb of {self._memory_mb}" if self._memory_mb else ""
        if code == OUT_OF_MEMORY:
            return f"ran out of memory{limit}"
        return f"ended its worker process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def _read_score(_: int, item: object) -> float | str:
    """Return a score of a reply, or the fault that stands for it."""
    return str(item["fault"]) if isinstance(item, dict) and "fault" in item else read_number(item)


def _place(found: Faults, span: range, count: int) -> Faults:
    """Return the faults of one call by their place in the batch."""
    if None not in found:
        return {span.start + index: fault for index, fault in found.items() if index is not None}
    return dict.fromkeys([None] if len(span) == count else span, found[None])


def _stop(pool: ProcessPool) -> None:
    """End all workers of a pool."""
    pool.stop()
    pool.join()
