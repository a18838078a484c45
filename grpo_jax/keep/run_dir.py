"""A run directory belongs to one run at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator

from grpo_jax.watch.writer import refused_if_unusable

if sys.platform != "win32":
    import fcntl


@contextlib.contextmanager
def locked(run_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """Make a run directory and hold it: a second run that wants it is refused.

    The lock is the kernel's (`flock` on the file `.lock`), so it ends with the process however that ends, `kill -9`
    included. Where there is no such lock (Windows, some network file systems), nothing is held.

    Raises:
      ValueError: the directory cannot be made or written to.
      RuntimeError: another run holds it; the message says which process on which machine.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory, locked(directory), locked(directory):
      ...     pass
      Traceback (most recent call last):
      RuntimeError: run_dir = ... is in use ...
    """
    if run_dir is None:
        yield
        return
    with refused_if_unusable(run_dir):
        os.makedirs(run_dir, exist_ok=True)
        file = open(os.path.join(run_dir, ".lock"), "a+", encoding="utf-8")  # noqa: SIM115 (open while the lock is held)
    with file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    file.seek(0)
                    holder = file.read().strip() or "by another process"
                    raise RuntimeError(
                        f"run_dir = {str(run_dir)!r} is in use {holder}: wait for that run to end or end it, or give"
                        " this one a directory of its own"
                    ) from None
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
        # Not deleted at the end: a third process would lock a new file while a second one waits for the old.
        file.truncate(0)
        file.write(f"by process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
