"""The flags of a run of several processes, and what is wrong with them; real processes are in test_two_processes."""

import argparse

import jax
import pytest

from grpo_jax.cli.main import main
from grpo_jax.run import distributed

pytestmark = pytest.mark.quick


@pytest.fixture
def begun(monkeypatch):
    """What JAX is told, and nothing is begun."""
    told = []
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **how: told.append((args, how)))
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setattr("atexit.register", lambda *_: None)
    return told


def start(line):
    parser = argparse.ArgumentParser()
    distributed.add_flags(parser)
    distributed.start(parser.parse_args(line.split()))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", []),
        ("--distributed auto", [(None, None, None)]),
        ("--coordinator host0:8476 --num-processes 4 --process-id 3", [("host0:8476", 4, 3)]),
    ],
)
def test_flags_are_handed_on_and_none_begins_nothing(line, told, begun):
    start(line)
    assert [args for args, _ in begun] == told
    assert all(how["heartbeat_timeout_seconds"] <= 30 for _, how in begun), "a loss shows within a minute"


ALL = "set all of coordinator, num_processes and process_id, or none of them"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-processes 2", f"coordinator and process_id are missing; {ALL}"),
        (
            "--coordinator host0 --num-processes 2 --process-id 0",
            "coordinator must be host:port, such as host0:8476; got 'host0'",
        ),
        (
            "--coordinator host0:1 --num-processes 2 --process-id 2",
            "process_id must be from 0 to 1 with 2 processes; got 2",
        ),
        ("--distributed auto --process-id 2", "--distributed auto excludes --coordinator, --num-processes and"),
    ],
)
def test_flags_that_cannot_be(line, message, begun):
    with pytest.raises(SystemExit, match=message):
        start(line)
    assert begun == []


def test_no_cluster_is_told_with_the_way_out(monkeypatch, begun):
    def nothing_found(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", nothing_found)
    with pytest.raises(SystemExit, match=r"no cluster was detected \(Slurm, TPU pod, .*Set coordinator, num_processes"):
        start("--distributed auto")
    with pytest.raises(SystemExit, match=r"^coordinator_address should be defined"):
        start("--coordinator host0:1 --num-processes 2 --process-id 0")


@pytest.fixture
def exits(monkeypatch):
    """With which status the process would have ended at once."""
    statuses = []
    monkeypatch.setattr("os._exit", statuses.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    monkeypatch.setattr(distributed, "_statuses", [])
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    return statuses


@pytest.mark.parametrize(("error", "status"), [(ValueError("a reward"), 1), (KeyboardInterrupt(), 130)])
def test_a_process_that_an_error_ends_does_not_wait_for_those_who_wait_for_it(error, status, exits):
    distributed._leave()
    assert exits == [], "an orderly end is JAX's"
    distributed._explain(type(error), error, None)
    distributed._leave()
    assert exits == [status]


def test_an_error_of_the_command_line_does_not_wait_either(exits, tmp_path):
    with pytest.raises(SystemExit, match=r"grpo-jax resume: .* is not a run directory"):
        main(["resume", str(tmp_path)])
    distributed._leave()
    assert exits == [1]
