"""Two processes on localhost train the same params as one, share a checkpoint, and both end if one is lost."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import two_processes

from grpo_jax.watch.writer import read_lines

RUNNING = []


@pytest.fixture(autouse=True, scope="module")
def _ended():
    """Kill the processes that are still running after the tests."""
    yield
    for process in RUNNING:
        process.kill()
        process.wait()


def start(run_dir, fault):
    """Start two processes that write to files, because an unread pipe would block them after 64 KiB."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        flags = f"--coordinator 127.0.0.1:{s.getsockname()[1]} --num-processes 2 --process-id".split()
    for i in range(2):
        with open(run_dir / f"{fault}-{i}.out", "w") as out, open(run_dir / f"{fault}-{i}.err", "w") as errors:
            command = [sys.executable, two_processes.__file__, str(run_dir), fault, *flags, str(i)]
            RUNNING.append(subprocess.Popen(command, stdout=out, stderr=errors))
    return RUNNING[-2:]


def ended_by_the_second(processes, run_dir, fault):
    """Wait until the second process fails and the first one ends as a result; return the second's status and stderr."""
    status = processes[1].wait(timeout=300)
    started = time.monotonic()
    assert processes[0].wait(timeout=60) != 0, "the first process ended without an error"
    assert time.monotonic() - started < 60, "the first process kept waiting for the second"
    first, second = (Path(run_dir, f"{fault}-{i}.err").read_text() for i in range(2))
    assert "another process was lost" in first or "another task died" in first, first[-3000:]
    return status, second


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The multi-turn run in one process: its directory, its arrays and its call counts."""
    run_dir = tmp_path_factory.mktemp("alone") / "turns"
    two_processes.CALLS.clear()
    state = two_processes.play(run_dir)
    arrays = jax.tree.leaves(jax.device_get({"params": state.params, "ref": state.ref_params}))
    return run_dir, arrays, dict(two_processes.CALLS)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The directory of the same run in two processes, and of a second run that an exception in one process ends."""
    run_dir = tmp_path_factory.mktemp("together")
    status, reason = ended_by_the_second(start(run_dir, "raise"), run_dir, "raise")
    assert status == 1
    assert "failed on one process" in reason
    return run_dir


def test_losing_one_process_ends_the_other(tmp_path):
    """If one process is killed, the other ends too (for an exception, see the fixture `together`)."""
    status, _ = ended_by_the_second(start(tmp_path, "kill"), tmp_path, "kill")
    assert status == -signal.SIGKILL


def test_two_processes_train_the_same_params_as_one(alone, together):
    """Two processes train the same params as one with `rollout_ahead`, evaluations and environments for their own rows.
    A complete run, called again, returns its state; different run directories are rejected.
    """
    (one, expected, calls), run_dir = alone, together
    # Fifteen held-out prompts are played at the start and end, in rollouts of 8 prompts; the last prompt is repeated.
    assert calls == {"training": 3 * 32, "evaluation": 2 * 60, "played": 3 * 32 + 2 * 64}
    outputs = [(run_dir / f"raise-{i}.out").read_text().rpartition("CALLS ")[2] for i in range(2)]
    calls = [json.loads(some) for some in outputs]
    assert all(some["refused"] for some in calls), "different directories were accepted"
    assert [some["training"] for some in calls] == [3 * 16, 3 * 16], "each process scores its own half of 32"
    assert [some["evaluation"] for some in calls] == [2 * 32, 2 * 28], "each process scores its part of 60"
    assert [some["played"] for some in calls] == [3 * 16 + 2 * 32] * 2
    assert [some["drawn"] for some in calls] == [[-0.5, 7]] * 2, "a custom sampler's completions come from process 0"
    with np.load(run_dir / "turns.npz") as found:
        for name, like in zip(found.files, expected, strict=True):
            np.testing.assert_allclose(found[name], like, atol=1e-6)
    assert_same_files(one, run_dir / "turns")


def test_one_process_resumes_a_two_process_run(alone, together):
    """One process resumes a two-process run from its checkpoint, including the prefetched completions."""
    run_dir = together / "failing"
    assert max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit()) == 1
    state = two_processes.play(run_dir)
    for x, like in zip(jax.tree.leaves({"params": state.params, "ref": state.ref_params}), alone[1], strict=True):
        np.testing.assert_allclose(x, like, atol=1e-6)
    assert_same_files(alone[0], run_dir)


def assert_same_files(one, other):
    """Assert that two run directories have the same metrics and completions, up to rounding and timings."""
    lines, others = (list(read_lines(where / "metrics.jsonl")) for where in (one, other))
    assert [line["step"] for line in others] == [0, 1, 2, 3, 3], "only one process logs"
    for line, like in zip(lines, others, strict=True):
        names = [name for name in line if re.fullmatch("rewards/.+/(mean|std|missing|errors)|(turns|eval)/.+", name)]
        assert line.keys() == like.keys()
        for name in {*names, "completions/observation_tokens", "reward", "loss"} & {*line}:
            assert line[name] == pytest.approx(like[name], rel=1e-6, abs=1e-6), name
    assert max(line.get("turns/mean", 0) for line in lines) > 1.5
    rows, others = (list(read_lines(where / "completions.jsonl")) for where in (one, other))
    assert len(rows) == 3 * 32
    for row, like in zip(rows, others, strict=True):
        for name in ("prompt", "completion", "turns", "rewards", "ended"):
            assert row[name] == like[name]
    assert all(" so " in row["prompt"] for row in rows)
