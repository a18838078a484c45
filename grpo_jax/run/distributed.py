"""Several processes as one run: `jax.distributed`, started by flags, and ended soon when one of them ends by an error.

```
my_run.py --distributed auto                                              on Slurm, TPU pods, Kubernetes, MPI
my_run.py --coordinator host0:8476 --num-processes 2 --process-id 0       anywhere; on the second host --process-id 1
```
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import sys
from types import TracebackType

import jax

SILENCE = 30
"""Seconds without a sign of life after which a process counts as dead (JAX's default is 100)."""

_statuses: list[int] = []  # of the errors that end this process


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a script the flags that `start` reads.

    Args:
      parser: of the script.

    Example:
      >>> parser = argparse.ArgumentParser()
      >>> add_flags(parser)
      >>> parser.parse_args("--coordinator host0:8476 --num-processes 2 --process-id 1".split()).process_id
      1
    """
    group = parser.add_argument_group("several processes as one run")
    group.add_argument("--distributed", choices=["auto"], help="found out from Slurm, TPU pod, Kubernetes or MPI")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens; on all the same")
    group.add_argument("--num-processes", type=int, metavar="N", help="with --coordinator: how many there are")
    group.add_argument("--process-id", type=int, metavar="I", help="with --coordinator: this one, from 0 to N - 1")


def start(arguments: argparse.Namespace) -> None:
    """`initialize` as the flags of `add_flags` say; without any of them nothing happens.

    Args:
      arguments: what the parser returned.

    Raises:
      SystemExit: flags that do not go together, or no cluster was found.

    Example:
      >>> parser = argparse.ArgumentParser()
      >>> add_flags(parser)
      >>> start(parser.parse_args([]))
    """
    told = arguments.coordinator, arguments.num_processes, arguments.process_id
    if arguments.distributed is None and told == (None, None, None):
        return
    try:
        if arguments.distributed is not None and told != (None, None, None):
            raise ValueError("--distributed auto finds out what --coordinator, --num-processes and --process-id say")
        initialize(*told)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Make this process one of a run of several; call it before anything else of JAX, in each of them.

    An exception that nobody catches ends its process at once, and that ends the others: where they exchange numbers
    with it, at once on CPUs, and elsewhere when it has given no sign of life for `SILENCE` seconds.

    Args:
      coordinator: "host:port" where process 0 listens. None: Slurm, TPU pod, Kubernetes or MPI say all three.
      num_processes: how many there are.
      process_id: which one this is, 0 … num_processes − 1.

    Raises:
      ValueError: one of the three without the others, or none of them and no cluster around.

    Example:
      >>> initialize("host0:8476", num_processes=2)
      Traceback (most recent call last):
      ValueError: process_id is missing: coordinator, num_processes and process_id are given together, or none of them
    """
    told = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in told.items() if value is None]
    if 0 < len(missing) < 3:
        are = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"{' and '.join(missing)} {are} missing: coordinator, num_processes and process_id are given together, or"
            " none of them"
        )
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator is {coordinator!r}: write host:port, such as host0:8476")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"process_id is {process_id}: of {num_processes} processes it is 0 to {num_processes - 1}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=SILENCE)
    except (ValueError, RuntimeError) as error:
        if coordinator is None:
            raise ValueError(
                f"no cluster was found (Slurm, TPU pod, Kubernetes, MPI): {error} Give coordinator, num_processes and"
                " process_id (--coordinator HOST:PORT --num-processes N --process-id I)"
            ) from error
        raise
    sys.excepthook = _explained
    atexit.register(_leave)  # before JAX's own, which is registered already


def end_by_error(status: int = 1) -> None:
    """Note that an error ends this process: its exit is not to wait for the others, since they wait for it.

    JAX ends all processes together: at its exit each waits for the others, five minutes by default. A run whose first
    process has work to do after the others needs these minutes; after an error they are lost.
    """
    if jax.distributed.is_initialized():
        _statuses.append(status)


def _leave() -> None:
    """End the process now if an error has ended it; exit functions that were registered later have run."""
    if not _statuses:
        return
    with contextlib.suppress(OSError, ValueError):  # a stream may be closed
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(_statuses[0])


def _explained(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an error as Python does, and what it may stand for: the first to know of a lost process is a collective."""
    end_by_error(130 if issubclass(kind, KeyboardInterrupt) else 1)
    sys.__excepthook__(kind, error, traceback)
    print(
        f"process {jax.process_index()} of {jax.process_count()} has ended by the error above. If it is of the network"
        " (gloo, NCCL, connection, heartbeat), another process was lost: look at its last lines. Start all again with"
        " the same run_dir, on as many devices as you like: the run goes on from its last checkpoint.",
        file=sys.stderr,
    )
