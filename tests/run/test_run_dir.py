"""A run directory is used by one run at a time, within a process and across processes, even after a kill."""

import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from grpo_jax.run.run_dir import check_processes_share_run_dir, locked

pytestmark = pytest.mark.quick

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_lock_is_held_until_the_process_is_killed(tmp_path):
    """A run directory is locked by one process at a time, until that process ends."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / ".lock"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match="in use by another process"), locked(tmp_path):
            pytest.fail("locked twice")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with locked(tmp_path), pytest.raises(RuntimeError, match="in use"), locked(tmp_path):
        pytest.fail("locked twice")


def test_file_systems_without_locks_are_not_locked_and_unwritable_ones_rejected(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("grpo_jax.run.run_dir.fcntl.flock", unsupported)
    with locked(None), locked(tmp_path), locked(tmp_path):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match=r"run_dir = '.*file/run' cannot be written to \(Not a directory\)"),
        locked(str(tmp_path / "file" / "run")),
    ):
        pytest.fail("the directory was created")


def refuse(path, *_, **__):
    raise OSError(13, "Permission denied")


def test_directory_that_one_process_cannot_write_to_is_rejected(tmp_path, monkeypatch):
    """A run directory that one process cannot write to is rejected (test_two_processes.py uses real processes)."""
    monkeypatch.setattr("grpo_jax.run.run_dir.gather_objects", lambda own: [own])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(pathlib.Path, "touch", refuse)
    with pytest.raises(ValueError, match=r"process 1: run_dir = '.*' cannot be written to \(Permission denied\)"):
        check_processes_share_run_dir(tmp_path)
