"""Flags for multi-process runs and their validation; test_two_processes.py starts real processes."""

import argparse

import jax
import pytest

from grpo_jax.cli.main import main
from grpo_jax.run import distributed

pytestmark = pytest.mark.quick


@pytest.fixture
def initialized(monkeypatch):
    """The arguments of calls to `jax.distributed.initialize`, which is replaced by a stub."""
    calls = []
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **how: calls.append((args, how)))
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setattr("atexit.register", lambda *_: None)
    return calls


def start(line):
    parser = argparse.ArgumentParser()
    distributed.add_flags(parser)
    distributed.start(parser.parse_args(line.split()))


@pytest.mark.parametrize(("line", "expected"), [
    ("", []),
    ("--distributed auto", [(None, None, None)]),
    ("--coordinator host0:8476 --num-processes 4 --process-id 3", [("host0:8476", 4, 3)]),
])  # fmt: skip
def test_flags_are_passed_to_jax_and_nothing_starts_without_them(line, expected, initialized):
    start(line)
    assert [args for args, _ in initialized] == expected
    assert all(how["heartbeat_timeout_seconds"] <= 30 for _, how in initialized), "loss is detected in a minute"


def test_coordinator_without_a_port_is_rejected(initialized):
    with pytest.raises(SystemExit, match="coordinator must be host:port, such as host0:8476; got 'host0'"):
        start("--coordinator host0 --num-processes 2 --process-id 0")
    assert initialized == []


def test_missing_cluster_raises_with_the_fix(monkeypatch, initialized):
    def nothing_found(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nothing_found)
    with pytest.raises(SystemExit, match=r"If no cluster was found \(Slurm, TPU pod, .*set coordinator"):
        start("--distributed auto")
    with pytest.raises(SystemExit, match=r"^coordinator_address should be defined"):
        start("--coordinator host0:1 --num-processes 2 --process-id 0")


@pytest.fixture
def exits(monkeypatch):
    """The statuses passed to `os._exit`, which is replaced by a stub."""
    statuses = []
    monkeypatch.setattr("os._exit", statuses.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    monkeypatch.setattr(distributed, "_statuses", [])
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    return statuses


@pytest.mark.parametrize(("error", "status"), [(ValueError("a reward"), 1), (KeyboardInterrupt(), 130)])
def test_process_that_fails_exits_without_waiting_for_the_others(error, status, exits):
    distributed._exit_on_error()
    assert exits == [], "without an error, JAX shuts down"
    distributed._explain(type(error), error, None)
    distributed._exit_on_error()
    assert exits == [status]


def test_command_line_error_exits_without_waiting(exits, tmp_path):
    with pytest.raises(SystemExit, match=r"grpo-jax resume: .* is not a run directory"):
        main(["resume", str(tmp_path)])
    distributed._exit_on_error()
    assert exits == [1]
