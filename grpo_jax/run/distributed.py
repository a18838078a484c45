"""Multi-process runs: start `jax.distributed` from command-line flags, and stop all processes soon after one fails.

```
my_run.py --distributed auto                                              on Slurm, TPU pods, Kubernetes, MPI
my_run.py --coordinator host0:8476 --num-processes 2 --process-id 0       elsewhere; second host: --process-id 1
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

HEARTBEAT_TIMEOUT = 30
"""Seconds without a heartbeat after which a process is considered dead (JAX's default is 100)."""

_statuses: list[int] = []  # exit status, if an error ends this process


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add command-line flags for `start` to a script's parser."""
    detected = "use several processes, detected from Slurm, TPU pods, Kubernetes or MPI"
    parser.add_argument("--distributed", choices=["auto"], help=detected)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="use several processes; address of process 0")
    parser.add_argument("--num-processes", type=int, metavar="N", help="with --coordinator: number of processes")
    index = "with --coordinator: index of this process, from 0 to N - 1"
    parser.add_argument("--process-id", type=int, metavar="I", help=index)


def start(arguments: argparse.Namespace) -> None:
    """Call `initialize` with the flags from `add_flags`, if any are set. Raises SystemExit instead of ValueError."""
    given = arguments.coordinator, arguments.num_processes, arguments.process_id
    if arguments.distributed is None and given == (None, None, None):
        return
    try:
        initialize(*given)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Add this process to a multi-process run. Each process must call this before any other JAX function.

    `coordinator` is the "host:port" on which process 0 listens. Arguments that are None are detected from Slurm, a
    TPU pod, Kubernetes or MPI. Raises ValueError if an argument is invalid or no cluster is detected.

    A process with an uncaught exception ends immediately. The others end at their next communication with it (on
    CPUs) or after `HEARTBEAT_TIMEOUT` seconds without its heartbeat (on other platforms).
    """
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator must be host:port, such as host0:8476; got {coordinator!r}")
    import jax  # imported lazily, because `add_flags` must not import JAX

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        if coordinator is None:
            raise ValueError(
                f"{error} If no cluster was found (Slurm, TPU pod, Kubernetes or MPI), set coordinator, num_processes"
                " and process_id (--coordinator HOST:PORT --num-processes N --process-id I)"
            ) from error
        raise
    sys.excepthook = _explain
    atexit.register(_exit_on_error)  # runs before JAX's atexit handler, which was registered earlier


def end_by_error(status: int = 1) -> None:
    """In a multi-process run, make this process exit with `status`, without JAX's five-minute wait for the others."""
    import jax

    if jax.distributed.is_initialized():
        _statuses.append(status)


def _exit_on_error() -> None:
    """Exit immediately if an error is ending the process. Any atexit handlers registered later have already run."""
    if not _statuses:
        return
    with contextlib.suppress(OSError, ValueError):  # the streams may be closed
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(_statuses[0])


def _explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an uncaught exception as Python does, followed by a hint to check the other processes for the cause."""
    import jax

    end_by_error(130 if issubclass(kind, KeyboardInterrupt) else 1)
    sys.__excepthook__(kind, error, traceback)
    print(
        f"process {jax.process_index()} of {jax.process_count()} was ended by the error above. If it is a network error"
        " (gloo, NCCL, connection, heartbeat), another process was lost; check the end of its output. Restart all"
        " processes with the same run_dir to resume from the last checkpoint. The number of devices may change.",
        file=sys.stderr,
    )
