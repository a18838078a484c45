"""One run at a time in a directory: in one process, between processes, and whatever ends the first one."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import pytest

from grpo_jax.run.run_dir import check_shared, locked

pytestmark = pytest.mark.quick

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("by process 1 on mars")
file.flush()
print("held", flush=True)
time.sleep(600)
"""


def test_another_process_holds_it_until_it_is_killed(tmp_path):
    """One process at a time in a directory."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / ".lock"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match="in use by process 1 on mars"), locked(tmp_path):
            pytest.fail("two at a time")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"by process {os.getpid()} on {socket.gethostname()}"


def test_without_support_for_locks_nothing_is_held(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("grpo_jax.run.run_dir.fcntl.flock", unsupported)
    with locked(None), locked(tmp_path), locked(tmp_path):
        pass


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match=r"run_dir = '.*file/run' cannot be written to \(Not a directory\)"),
        locked(str(tmp_path / "file" / "run")),
    ):
        pytest.fail("made")


def refuse(path, *_, **__):
    raise OSError(13, "Permission denied")


def test_a_directory_that_one_process_cannot_write_to_is_refused(tmp_path, monkeypatch):
    """Real processes with two directories are in test_two_processes."""
    (tmp_path / ".token-7").touch()
    answers = iter([[7], [[True, ""]]])
    monkeypatch.setattr("grpo_jax.run.run_dir.gather_objects", lambda own: next(answers, [own]))
    monkeypatch.setattr("grpo_jax.run.run_dir._appears", pathlib.Path.exists)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(pathlib.Path, "touch", refuse)
    with pytest.raises(ValueError, match=r"process 1: run_dir = '.*' cannot be written to \(Permission denied\)"):
        check_shared(tmp_path)
