"""Run directories: the lock, a check that all processes share the directory, and the policy's files without params."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from grpo_jax.models.sharding import gather_objects
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.watch.writer import reject_unwritable

if sys.platform != "win32":
    import fcntl


POLICY = "policy"
"""Subdirectory of a run directory with the policy's config.json, generation_config.json and tokenizer."""


def write_policy_files(run_dir: str | os.PathLike[str] | None, policy: Policy) -> None:
    """Write the files that `grpo-jax chat`, `evaluate` and `export` need in addition to a checkpoint's params.

    Nothing is written if a `run.yaml` specifies the model, or for custom models, adapters or vision towers.
    """
    unneeded = run_dir is None or (Path(run_dir) / "run.yaml").exists()
    if unneeded or policy.extra_tensors or not policy.config or not isinstance(policy.model, Transformer):
        return
    from grpo_jax.hub.policy import files_of

    folder = Path(str(run_dir)) / POLICY
    folder.mkdir(exist_ok=True)
    for name, content in files_of(policy).items():
        (folder / name).write_bytes(content)
    for name, values in (("config.json", policy.config), ("generation_config.json", policy.generation_config)):
        (folder / name).write_text(json.dumps(values, indent=2), encoding="utf-8")


def check_shared_run_dir(run_dir: str | os.PathLike[str] | None) -> None:
    """Raise ValueError in all processes unless each of them can write to process 0's run directory.

    All processes write each checkpoint together. With separate directories, they would deadlock.
    """
    if jax.process_count() == 1:
        return
    index, message = jax.process_index(), ""
    token = Path(str(run_dir), f".token-{gather_objects(time.time_ns())[0]}")
    if index == 0 and run_dir is not None:
        message = _write_error(token)
    expected, failed = gather_objects([run_dir is not None, message])[0]  # after this, process 0's token exists
    if index > 0 and not failed:
        if (run_dir is not None) != expected or (expected and not _appears(token)):
            message = (
                f"run_dir = {str(run_dir)!r}: process {index} does not find the file that process 0 wrote to its"
                " run_dir. All processes write checkpoints together; pass each of them the same directory on a shared"
                " file system"
            )
        elif run_dir is not None:
            local = token.with_name(f"{token.name}-{index}")
            message = _write_error(local)
            local.unlink(missing_ok=True)
    message = next(filter(None, gather_objects(message)), "")
    if index == 0 and run_dir is not None:
        token.unlink(missing_ok=True)
    if message:
        raise ValueError(message)


def _write_error(path: Path) -> str:
    """Create an empty file. Returns an error message, or "" on success."""
    try:
        with reject_unwritable(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    except ValueError as error:
        return f"process {jax.process_index()}: {error}"
    return ""


def _appears(path: Path) -> bool:
    """Wait for another process's file, which a network file system may delay. Returns whether it exists."""
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return path.exists()


@contextlib.contextmanager
def locked(run_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """Create a run directory and hold its lock (`flock` on `.lock`, released by the kernel when the process ends).

    Windows and file systems without locks are not protected. Raises ValueError if the directory is not writable, and
    RuntimeError if another run holds the lock. The message names the other run's process and host.
    """
    if run_dir is None:
        yield
        return
    with reject_unwritable(run_dir):
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
                        f"run_dir = {str(run_dir)!r} is in use {holder}. Wait for that run to finish, stop it, or use a"
                        " different run_dir"
                    ) from None
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
        # Never delete the file: a third process could then lock a new file while a second waits for this one.
        file.truncate(0)
        file.write(f"by process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
