"""A run directory: it belongs to one run at a time, and holds what its checkpoints do not say of the policy."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from grpo_jax.hub.policy import files_of
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.watch.writer import refused_if_unusable

if sys.platform != "win32":
    import fcntl


POLICY = "policy"
"""Folder of a run directory with config.json, generation_config.json and the tokenizer of its policy."""


def keep_policy(run_dir: str | os.PathLike[str] | None, policy: Policy) -> None:
    """Write what makes a policy of a checkpoint's params, for `grpo-jax chat`, `evaluate` and `export`.

    Nothing where a `run.yaml` says it already, where there is no directory, of a model of the caller's own, and of
    adapters or towers, whose other weights are elsewhere.
    """
    known = run_dir is None or (Path(run_dir) / "run.yaml").exists()
    if known or policy.beside or not policy.config or not isinstance(policy.model, Transformer):
        return
    folder = Path(str(run_dir)) / POLICY
    folder.mkdir(exist_ok=True)
    for name, content in files_of(policy).items():
        (folder / name).write_bytes(content)
    for name, values in (("config.json", policy.config), ("generation_config.json", policy.generation_config)):
        (folder / name).write_text(json.dumps(values, indent=2), encoding="utf-8")


@contextlib.contextmanager
def locked(run_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """Make a run directory and hold its lock (`flock` on `.lock`, which the kernel frees when the process ends).

    Where there is no such lock (Windows, some network file systems), nothing is held.

    Raises:
      ValueError: the directory cannot be made or written to.
      RuntimeError: another run holds it; the message names its process and machine.
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
