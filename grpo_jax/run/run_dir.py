"""Run directories: the lock, a check that all processes share the directory, and the policy's files without params."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
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
NETWORK_DELAY = 10
"""Seconds after which a file created by one process must be visible to all others, even on a network file system."""


def write_policy_files(run_dir: str | os.PathLike[str] | None, policy: Policy) -> None:
    """Write the files that `grpo-jax chat`, `evaluate` and `export` need. No-op with adapters or with a `run.yaml`."""
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


def check_processes_share_run_dir(run_dir: str | os.PathLike[str] | None) -> None:
    """Raise ValueError unless all processes share a writable run directory or have none, as saving would deadlock."""
    if jax.process_count() == 1:
        return
    index, message = jax.process_index(), ""
    started_at = gather_objects(time.time_ns())[0]
    tokens = [Path(str(run_dir), f".token-{started_at}-{i}") for i in range(jax.process_count())]
    try:
        if run_dir is not None:
            with reject_unwritable(run_dir):
                tokens[index].parent.mkdir(parents=True, exist_ok=True)
                tokens[index].touch()
    except ValueError as error:
        message = f"process {index}: {error}"
    results = gather_objects([run_dir is not None, message])  # after this, the tokens exist
    message = next((error for _, error in results if error), "")
    if not message:
        shared = _all_exist(tokens) if run_dir is not None else not any(has_directory for has_directory, _ in results)
        if not all(gather_objects(shared)):
            message = (
                f"run_dir = {run_dir and str(run_dir)!r} is not the same directory in all processes. All processes"
                " write checkpoints together; pass each of them the same directory on a shared file system"
            )
    if run_dir is not None:
        tokens[index].unlink(missing_ok=True)
    if message:
        raise ValueError(message)


def _all_exist(paths: Sequence[Path]) -> bool:
    """Return whether all files exist. Waits up to `NETWORK_DELAY` seconds for missing files."""
    deadline = time.monotonic() + NETWORK_DELAY
    while not (all_exist := all(path.exists() for path in paths)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return all_exist


@contextlib.contextmanager
def locked(run_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """Create a run directory and hold its lock (`flock`, if available) until the context exits.

    Does nothing if `run_dir` is None. Raises ValueError if the directory is not writable, RuntimeError if it is locked.
    """
    if run_dir is None:
        yield
        return
    with reject_unwritable(run_dir):
        os.makedirs(run_dir, exist_ok=True)
        file = open(os.path.join(run_dir, ".lock"), "a")  # noqa: SIM115 (open while the lock is held)
    with file:  # the file is never deleted, since another process could then lock a new one
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise RuntimeError(
                        f"run_dir = {str(run_dir)!r} is in use by another process. Wait for that run to finish, stop"
                        " it, or use a different run_dir"
                    ) from None
        yield
