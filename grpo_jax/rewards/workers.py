"""Reward functions in processes of their own, with limits that hold whatever the function does.

Environments have theirs in `instances`.

```
isolated(fn)(completions=...)  ──► calls of some completions each ──► workers, one call at a time
                                     timeout passed: the worker is killed, a new one is started
```

These are limits, not a sandbox: a worker may read and write files, use the network and start processes like any program
of yours. Run code that you do not trust in a container, and let the reward function talk to it.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
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
from grpo_jax.rewards.instances import IsolatedEnvironment, makes_environments
from grpo_jax.rewards.processes import (
    START_SECONDS,
    fault_of,
    kill_group,
    refuse_in_worker,
    revived,
    setup_of,
    start_process,
    start_trouble,
)

_REPLY_BYTES_EACH = 16_384  # more than a worker's own bounds let a reply have for one completion


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
    optional = {
        "memory_mb": memory_mb,
        "max_output_bytes": max_output_bytes,
        "completions_per_call": completions_per_call,
    }
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {"workers": workers, **given}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a positive whole number")
    if not hasattr(os, "killpg"):
        raise ValueError("isolated needs a POSIX system (Linux, macOS); this one cannot kill a group of processes")
    if memory_mb is not None and not sys.platform.startswith("linux"):
        raise ValueError(f"memory_mb is {memory_mb}, but only Linux holds it: leave it out on {sys.platform}")
    if makes_environments(fn):
        if workers != 1 or completions_per_call is not None:
            raise ValueError(
                f"{function_name(fn)} makes environments, and each has a process of its own: leave out workers and"
                " completions_per_call"
            )
        return IsolatedEnvironment(fn, timeout=timeout, memory_mb=memory_mb, max_output_bytes=max_output_bytes)
    return _Isolated(fn, timeout, memory_mb, max_output_bytes, workers, completions_per_call)


class _Isolated:
    """The reward function that `isolated` returns."""

    def __init__(
        self,
        fn: Callable[..., Any],
        timeout: float,
        memory_mb: int | None,
        max_output_bytes: int | None,
        workers: int,
        completions_per_call: int | None,
    ):
        self.fn = fn
        self.__name__ = function_name(fn)
        self.reward_arguments = arguments_of(fn)
        self._limits: dict[str, Any] = {
            "timeout": timeout,
            "memory_mb": memory_mb,
            "max_output_bytes": max_output_bytes,
        }
        self._completions_per_call = completions_per_call
        self._pool = _Pool(setup_of(fn, memory_mb, max_output_bytes), workers, timeout, max_output_bytes is not None)

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

    def _judge(self, reply: dict[str, Any], count: int) -> tuple[np.ndarray, Faults]:
        """Read a worker's reply as if the function had returned it here."""
        if "values" in reply:
            outcome: Any = [revived(item) for item in reply["values"]]
            if "faults" in reply:
                outcome = PartialRewards(outcome, dict(reply["faults"]))
        elif "length" in reply:
            outcome = range(reply["length"])  # all that matters of it is how long it is
        elif "whole" in reply:
            outcome = revived(reply["whole"])
        else:
            return np.full(count, np.nan), {None: fault_of(reply, **self._limits)}
        return read_outcome(outcome, count)

    def check_rows(self, rows: Sequence[Mapping[str, Any]], *, argument: str = "the dataset") -> None:
        """Raise ValueError if the function inside cannot judge some rows; no worker is asked."""
        check_rows(self.fn, rows, argument=argument)

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        self._pool.close()


def _place(found: Faults, span: range, count: int) -> Faults:
    """Return the faults of one call by their place in the batch."""
    if None not in found:
        return {span.start + index: fault for index, fault in found.items() if index is not None}
    return dict.fromkeys([None] if len(span) == count else span, found[None])


def _can_pickle(value: Any) -> bool:
    """Return whether a value can be sent to a worker."""
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


class _Pool:
    """Workers for one function, and the calls that they share."""

    def __init__(self, setup: bytes, size: int, timeout: float, own_output: bool):
        self.size = size
        self._setup = setup
        self._timeout = timeout
        self._own_output = own_output
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        # Not a method of self, which would keep it alive. At exit too.
        self._finalizer = weakref.finalize(self, _close_all, self._workers)

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            _close_all(self._workers)

    def run(self, requests: Sequence[bytes], *, reply_bytes: int) -> list[dict[str, Any]]:
        """Return the reply to each request; `late` and `ended` stand for those of a worker that was lost."""
        refuse_in_worker()
        with self._lock:
            try:
                return self._share(requests, reply_bytes)
            except BaseException:  # a stop in the middle: what the workers would still answer belongs to nobody
                _close_all(self._workers)
                raise

    def _share(self, requests: Sequence[bytes], reply_bytes: int) -> list[dict[str, Any]]:
        """Give each request to a worker that is free, and take what comes back, until all are answered."""
        replies: list[dict[str, Any] | None] = [None] * len(requests)
        waiting = collections.deque(range(len(requests)))
        sent_again: set[int] = set()
        while None in replies:
            self._fill()
            for worker in self._workers:
                if waiting and worker.ready and worker.job is None:
                    worker.begin(waiting.popleft(), requests, self._timeout)
            busy = [worker for worker in self._workers if worker.job is not None or not worker.ready]
            pause = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            arrived = multiprocessing.connection.wait([worker.connection for worker in busy], timeout=pause)
            for worker in busy:
                reply = worker.answer(reply_bytes, arrived=worker.connection in arrived)
                if reply is None:
                    continue
                job, worker.job = worker.job, None
                if job is not None and "ended" in reply and not worker.begun and job not in sent_again:
                    # It died while it was idle (the system was out of memory, say), which a look at the process
                    # just before the request need not have shown: no fault of this call.
                    waiting.append(job)
                    sent_again.add(job)
                elif job is not None:
                    replies[job] = reply
                # After a limit too: its memory is in pieces, or its buffers hold what cannot be written.
                lost = bool(reply.keys() & {"late", "ended", "limit"})
                if lost:
                    worker.kill()
                worker.pass_output_on()
                if lost:
                    worker.close()
                    self._workers.remove(worker)
        self._fill()  # those that were lost start anew while the model trains
        return [reply for reply in replies if reply is not None]

    def _fill(self) -> None:
        """Replace the workers that have ended by new ones."""
        for worker in list(self._workers):
            if worker.ready and worker.job is None and worker.process.poll() is not None:
                worker.close()
                self._workers.remove(worker)
        while len(self._workers) < self.size:
            self._workers.append(_Worker(self._setup, self._own_output))


class _Worker:
    """One worker process, the connection to it, and the call it is busy with."""

    def __init__(self, setup: bytes, own_output: bool):
        self.output = tempfile.TemporaryFile() if own_output else None  # noqa: SIM115 — closed by close
        self.process, self.connection = start_process(setup, self.output)
        self.ready = False
        self.job: int | None = None
        self.begun = False  # whether the process has said that it has the request
        self.deadline = time.monotonic() + START_SECONDS

    def begin(self, job: int, requests: Sequence[bytes], timeout: float) -> None:
        """Send a request."""
        self.job, self.begun = job, False
        self.deadline = time.monotonic() + timeout
        with contextlib.suppress(OSError):
            self.connection.send_bytes(requests[job])

    def answer(self, reply_bytes: int, *, arrived: bool) -> dict[str, Any] | None:
        """Return the reply to its request, which is `late` after the deadline; None while there is none.

        Args:
          reply_bytes: the most that a reply may have.
          arrived: whether something can be read from the connection.
        """
        if not arrived and time.monotonic() < self.deadline:
            return None
        reply = self.receive(reply_bytes) if arrived else {"late": True}
        if "ready" in reply:
            self.ready = True
            return None
        if not self.ready:
            raise RewardError(start_trouble(reply))
        if "begun" in reply:
            self.begun = True
            return None
        return reply

    def receive(self, reply_bytes: int) -> dict[str, Any]:
        """Return the reply that has arrived, or how the process ended."""
        try:
            return json.loads(self.connection.recv_bytes(reply_bytes))
        except (EOFError, OSError, ValueError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.5)
            return {"ended": self.kill()}

    def pass_output_on(self) -> None:
        """Print what the function printed, and forget it."""
        if self.output is not None:
            self.output.seek(0)
            text = self.output.read().decode(errors="replace")
            # The worker writes at the same position: it is one open file.
            self.output.seek(0)
            self.output.truncate()
            if text:
                print(text, end="", file=sys.stderr)

    def kill(self) -> int:
        """End the process and all that it started; return how it ended."""
        return kill_group(self.process)

    def close(self) -> None:
        """End the process and let go of what belongs to it."""
        self.kill()
        self.connection.close()
        if self.output is not None:
            self.output.close()


def _close_all(workers: list[_Worker]) -> None:
    """End workers and forget them."""
    while workers:
        workers.pop().close()
