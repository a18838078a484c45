"""Processes that run other people's code: how they are started, what they are told first, and how they end.

The worker's side is `worker_main`, a script. What goes there is pickled, and what comes back is JSON.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_jax.rewards.contract import RewardError, function_name

START_SECONDS = 60.0
"""That a process may take to import what it needs."""

_SCRIPT = Path(__file__).with_name("worker_main.py")
_IN_WORKER = "GRPO_JAX_REWARD_WORKER"


def start_process(setup: bytes, output: Any = None) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a worker process and return it with the connection to it.

    Args:
      setup: from `setup_of`.
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
    """End a process and all that it started; return how it ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def setup_of(
    fn: Callable[..., Any], memory_mb: int | None, max_output_bytes: int | None, *, instances: bool = False
) -> bytes:
    """Return what a worker needs to begin.

    Args:
      fn: a function; it goes there by reference.
      memory_mb, max_output_bytes: the limits of `isolated`.
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
    return pickle.dumps(setup | {"memory_mb": memory_mb, "max_output_bytes": max_output_bytes})


def _main_source(fn: Callable[..., Any]) -> tuple[str, str]:
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


def revived(item: Any) -> Any:
    """Return an item of a reply; one that was no number as an object that prints as the original did."""
    if not isinstance(item, dict):
        return item
    return type(item["type"], (), {"__repr__": lambda self: item["repr"]})()


def exception_of(name: str, message: str, lines: str) -> Exception:
    """Return an exception that reads as the worker's; its own class may not exist here."""
    error = type(name, (Exception,), {})(message)
    error.add_note(f"In the worker process:\n{lines}")
    return error


def fault_of(
    reply: dict[str, Any], *, timeout: float, memory_mb: int | None, max_output_bytes: int | None
) -> BaseException | str:
    """Return what ended a call without a result; the limits are those of `isolated`."""
    if "error" in reply:
        return exception_of(*reply["error"])
    if "late" in reply:
        return f"took longer than its timeout of {timeout:g} s and was killed"
    if reply.get("limit") == "memory":
        return "ran out of memory" + (f": more than its memory_mb of {memory_mb}" if memory_mb is not None else "")
    if reply.get("limit") == "output":
        return f"wrote more than its max_output_bytes of {max_output_bytes}"
    code = reply["ended"]
    return f"ended its worker process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def start_trouble(reply: dict[str, Any]) -> str:
    """Return why a worker did not get ready, and what to do about it."""
    if "error" in reply:
        name, message, lines = reply["error"]
        return f"its worker process could not load it ({name}: {message}); in the worker:\n{lines}"
    how = f"was not ready after {START_SECONDS:g} s" if "late" in reply else f"ended with code {reply.get('ended')}"
    return (
        f"its worker process {how}: if the function stands in the script that runs, put what starts the training under "
        "if __name__ == '__main__':, since the worker imports the script"
    )
