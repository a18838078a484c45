"""Worker processes: how they are started, asked, kept to their limits, and ended.

```
Pool of one function      ──start──► workers, one call at a time; timeout passed: one is killed, a new one is started
Origin of environments    ──start──► imports their class ──fork──► one process for each environment
```

The worker's side is `worker_main`, a script. Requests go there as pickles, and replies come back as JSON. The standard
library's forkserver is not used: it imports the script that runs, and so JAX, in every process that it forks.
"""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

from grpo_jax.rewards.contract import RewardError, function_name

START_SECONDS = 60.0
"""Seconds that a process may take to import what it needs."""

_SCRIPT = Path(__file__).with_name("worker_main.py")
_IN_WORKER = "GRPO_JAX_REWARD_WORKER"

Reply = dict[str, Any]
"""A worker's reply; in place of one that was lost, {"late": True} or {"ended": exit code of the process}."""


class Limits(NamedTuple):
    """Seconds for a call, MiB of address space on top of the imports, bytes of output; None: no limit."""

    timeout: float
    memory_mb: int | None
    max_output_bytes: int | None


class ProcessLost(RuntimeError):
    """The process of an environment was killed at a limit, or has ended; its text is the end of a sentence."""


def start_process(setup: bytes, output: IO[bytes] | None = None) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a worker process and return it with the connection to it.

    Args:
      output: a file that it prints to; None: where this process does.
    """
    connection, there = multiprocessing.Pipe()
    with there:
        process = subprocess.Popen(
            # -P: without the folder of the script on the path, whose modules are not those that a function imports.
            [sys.executable, "-P", str(_SCRIPT), str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a group of its own: what the function starts is killed with it
            env=os.environ | {_IN_WORKER: "1", "JAX_PLATFORMS": "cpu"},
        )
    with contextlib.suppress(OSError):  # one that ended at once is found out by who reads its reply
        connection.send_bytes(setup)
    return process, connection


def refuse_in_worker() -> None:
    """Raise in a worker process, which has imported a script that starts a training."""
    if _IN_WORKER in os.environ:
        raise RewardError(
            "a worker process has come upon a call of an isolated function: put what starts the training under "
            "if __name__ == '__main__':, since workers import the script of the function"
        )


def kill_group(process: subprocess.Popen[bytes]) -> int:
    """End a process and all that it started; return its exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def receive(connection: Connection, seconds: float, most_bytes: int, end: Callable[[], int]) -> Reply:
    """Return the reply that arrives within `seconds`; `end` ends a process that sends none and returns its code."""
    try:
        if not connection.poll(seconds):
            return {"late": True}
        return json.loads(connection.recv_bytes(most_bytes))
    except (EOFError, OSError, ValueError, RecursionError):
        return {"ended": end()}


def setup_of(fn: Callable[..., object], limits: Limits, *, instances: bool = False) -> bytes:
    """Return what a worker needs to begin.

    Args:
      fn: a function; it goes there by reference.
      limits: its limits, of which the worker itself sets those of memory and output.
      instances: whether the process is to make instances by `fn`, each in a fork of it.

    Raises:
      ValueError: it cannot be sent.
    """
    try:
        payload = pickle.dumps(fn)
    except Exception as error:
        raise ValueError(
            f"fn is {function_name(fn)!r}, which cannot be sent to a worker process ({error}): define it at the top "
            "level of a module, under its own name (no lambda, no inner function, isolated(fn, ...) not as a decorator)"
        ) from error
    # A pickle holds the names of the modules that it needs.
    main = _main_source(fn) if b"__main__" in payload else None
    setup = {"fn": payload, "main": main, "path": sys.path, "parent": os.getpid(), "instances": instances}
    return pickle.dumps(setup | {"memory_mb": limits.memory_mb, "max_output_bytes": limits.max_output_bytes})


def _main_source(fn: Callable[..., object]) -> tuple[str, str]:
    """Return where the script that runs can be imported from."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise ValueError(
            f"fn is {function_name(fn)!r}, defined in a notebook or at a prompt, where a worker process cannot import "
            "it from: write it into a file (%%writefile my_rewards.py) and import it"
        )
    return "file", os.path.abspath(path)


def exception_of(name: str, message: str, lines: str) -> Exception:
    """Return an exception that reads as the worker's; its own class may not exist here."""
    error = type(name, (Exception,), {})(message)
    error.add_note(f"In the worker process:\n{lines}")
    return error


def fault_of(reply: Reply, limits: Limits) -> BaseException | str:
    """Return the fault that ended a call without a result: an exception, or the end of a sentence."""
    if "error" in reply:
        return exception_of(*reply["error"])
    if "late" in reply:
        return f"took longer than its timeout of {limits.timeout:g} s and was killed"
    if reply.get("limit") == "memory":
        bound = f": more than its memory_mb of {limits.memory_mb}" if limits.memory_mb is not None else ""
        return f"ran out of memory{bound}"
    if reply.get("limit") == "output":
        return f"wrote more than its max_output_bytes of {limits.max_output_bytes}"
    code = reply["ended"]
    return f"ended its worker process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def start_error(reply: Reply) -> RewardError:
    """Return the error that says why a worker did not get ready, and what to do about it."""
    if "error" in reply:
        name, message, lines = reply["error"]
        return RewardError(f"its worker process could not load it ({name}: {message}); in the worker:\n{lines}")
    end = f"was not ready after {START_SECONDS:g} s" if "late" in reply else f"ended with code {reply.get('ended')}"
    return RewardError(
        f"its worker process {end}: if the function stands in the script that runs, put what starts the training under "
        "if __name__ == '__main__':, since the worker imports the script"
    )


class Worker:
    """A process that runs one function, the connection to it, and the call it is busy with."""

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

    def answer(self, reply_bytes: int) -> Reply | None:
        """Return the reply to its request, of `reply_bytes` at most; None while there is none."""
        if not self.connection.poll() and time.monotonic() < self.deadline:
            return None
        reply = receive(self.connection, 0.0, reply_bytes, self._end)
        if "ready" in reply:
            self.ready = True
            return None
        if not self.ready:
            raise start_error(reply)
        if "begun" in reply:
            self.begun = True
            return None
        return reply

    def _end(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.5)
        return kill_group(self.process)

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

    def close(self) -> None:
        """End the process with all that it started, and let go of what belongs to it."""
        kill_group(self.process)
        self.connection.close()
        if self.output is not None:
            self.output.close()


class Pool:
    """Workers for one function, and the calls that they share."""

    def __init__(self, setup: bytes, size: int, limits: Limits):
        self.size = size
        self._setup = setup
        self._limits = limits
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        # Not a method of self, which would keep it alive. At exit too.
        self._finalizer = weakref.finalize(self, _close_all, self._workers)

    def close(self) -> None:
        """End all workers; a later call starts new ones."""
        with self._lock:
            _close_all(self._workers)

    def run(self, requests: Sequence[bytes], *, reply_bytes: int) -> list[Reply]:
        """Return the reply to each request."""
        refuse_in_worker()
        with self._lock:
            try:
                return self._share(requests, reply_bytes)
            except BaseException:  # a stop in the middle: what the workers would still answer belongs to nobody
                _close_all(self._workers)
                raise

    def _share(self, requests: Sequence[bytes], reply_bytes: int) -> list[Reply]:
        """Give each request to a worker that is free, and take what comes back, until all are answered."""
        replies: list[Reply | None] = [None] * len(requests)
        waiting = collections.deque(range(len(requests)))
        sent_again: set[int] = set()
        while None in replies:
            self._fill()
            for worker in self._workers:
                if waiting and worker.ready and worker.job is None:
                    worker.begin(waiting.popleft(), requests, self._limits.timeout)
            busy = [worker for worker in self._workers if worker.job is not None or not worker.ready]
            pause = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            multiprocessing.connection.wait([worker.connection for worker in busy], timeout=pause)
            for worker in busy:
                reply = worker.answer(reply_bytes)
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
                lost = not reply.keys().isdisjoint({"late", "ended", "limit"})
                if lost:
                    kill_group(worker.process)
                worker.pass_output_on()
                if lost:
                    self._drop(worker)
        self._fill()  # those that were lost start anew while the model trains
        return [reply for reply in replies if reply is not None]

    def _fill(self) -> None:
        """Replace the workers that have ended by new ones."""
        for worker in list(self._workers):
            if worker.ready and worker.job is None and worker.process.poll() is not None:
                self._drop(worker)
        while len(self._workers) < self.size:
            self._workers.append(Worker(self._setup, self._limits.max_output_bytes is not None))

    def _drop(self, worker: Worker) -> None:
        worker.close()
        self._workers.remove(worker)


def _close_all(workers: list[Worker]) -> None:
    """End workers and forget them."""
    while workers:
        workers.pop().close()


class Origin:
    """A process that imports what makes environments, and forks for each of them."""

    def __init__(self, setup: bytes):
        self.process, self._connection = start_process(setup)
        self._lock, self._ready = threading.Lock(), False
        self._left: collections.deque[int] = collections.deque()  # forks that nobody needs any more
        # Not a method of self, which would keep it alive. At exit too.
        self._finalizer = weakref.finalize(self, _close_origin, self.process, self._connection)

    @property
    def is_alive(self) -> bool:
        return self._finalizer.alive and self.process.poll() is None

    def fork(self) -> tuple[int, Connection]:
        """Return the number of a new fork and the connection to it; those that were left are ended before."""
        with self._lock:
            if not self._ready:
                reply = self._receive()
                if "ready" not in reply:
                    raise start_error(reply)
                self._ready = True
            reply = self._request([self._left.popleft() for _ in range(len(self._left))], fork=True)
            if "pid" not in reply:
                raise ProcessLost("lost the process that makes its processes")
            return reply["pid"], Connection(reduction.recv_handle(self._connection))

    def end(self, pid: int) -> int:
        """End a fork with all that it started; return its exit code."""
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

    def _request(self, ended: Sequence[int], *, fork: bool) -> Reply:
        self._connection.send_bytes(json.dumps({"end": ended, "fork": fork}).encode())
        return self._receive()

    def _receive(self) -> Reply:
        return receive(self._connection, START_SECONDS, 2**20, lambda: kill_group(self.process))


def _close_origin(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """End an origin: it ends its forks when the connection is closed."""
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2.0)
    kill_group(process)
