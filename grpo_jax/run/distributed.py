"""Several processes as one run: start `jax.distributed` from flags, and end all processes soon after one fails.

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
"""Seconds without a heartbeat after which a process counts as dead (JAX's default is 100)."""

_statuses: list[int] = []  # exit status of the error that ends this process


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `start` reads to a script's parser."""
    group = parser.add_argument_group("several processes as one run")
    group.add_argument("--distributed", choices=["auto"], help="detected from Slurm, TPU pod, Kubernetes or MPI")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens; the same in all processes")
    group.add_argument("--num-processes", type=int, metavar="N", help="with --coordinator: number of processes")
    group.add_argument("--process-id", type=int, metavar="I", help="with --coordinator: of this one, from 0 to N - 1")


def start(arguments: argparse.Namespace) -> None:
    """Call `initialize` by the flags of `add_flags`, or do nothing if none is given; errors raise a `SystemExit`."""
    given = arguments.coordinator, arguments.num_processes, arguments.process_id
    if arguments.distributed is None and given == (None, None, None):
        return
    try:
        if arguments.distributed is not None and given != (None, None, None):
            raise ValueError(
                "--distributed auto detects --coordinator, --num-processes and --process-id: leave them out"
            )
        initialize(*given)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Make this process one of several of a run; each of them calls this before any other function of JAX.

    `coordinator` is the "host:port" where process 0 listens. Arguments of None come from Slurm, a TPU pod, Kubernetes
    or MPI. Raises a `ValueError` if only some are given, or without a cluster.

    An uncaught exception ends its process at once. The others end too: on CPUs when they next communicate with it,
    elsewhere after `SILENCE` seconds without its heartbeat.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        raise ValueError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: coordinator, num_processes and"
            " process_id are given together, or none of them"
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
    sys.excepthook = _explain
    atexit.register(_leave)  # runs before JAX's own, which is registered already


def end_by_error(status: int = 1) -> None:
    """Let this process exit without waiting for the others, as JAX's exit does for five minutes."""
    if jax.distributed.is_initialized():
        _statuses.append(status)


def _leave() -> None:
    """Exit at once if an error ends this process. Exit functions that were registered later have run."""
    if not _statuses:
        return
    with contextlib.suppress(OSError, ValueError):  # a stream may be closed
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(_statuses[0])


def _explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an error as Python does, with the advice to look for its cause in the other processes."""
    end_by_error(130 if issubclass(kind, KeyboardInterrupt) else 1)
    sys.__excepthook__(kind, error, traceback)
    print(
        f"process {jax.process_index()} of {jax.process_count()} was ended by the error above. If it is a network error"
        " (gloo, NCCL, connection, heartbeat), another process was lost: look at its last lines. Start all again with"
        " the same run_dir, on as many devices as you like: the run resumes from its last checkpoint.",
        file=sys.stderr,
    )
