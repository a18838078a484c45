"""Two processes on loopback train what one does, write one checkpoint together, and survive the loss of one of them."""

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.watch.writer import read_lines

SCRIPT = Path(__file__).parent / "two_processes.py"
RUNNING = []


class Process(subprocess.Popen):
    """A process whose output goes to files: a pipe that is not read makes it wait after 64 KiB."""

    def __init__(self, *command):
        self.words = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        super().__init__([sys.executable, *command], stdout=self.words[0], stderr=self.words[1])
        RUNNING.append(self)

    def communicate(self, timeout=None):
        """What it said to stdout and stderr, once it has ended."""
        self.wait(timeout)
        RUNNING.remove(self)
        said = []
        for words in self.words:
            with words:
                words.seek(0)
                said.append(words.read())
        return said


@pytest.fixture(autouse=True)
def _ended():
    """No process outlives its test."""
    yield
    for process in [*RUNNING]:
        process.kill()
        process.communicate()


def start(run_dir, steps, *flags):
    return Process(str(SCRIPT), str(run_dir), str(steps), *flags)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def finish(processes):
    """What the processes printed of their calls."""
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.rpartition("CALLS ")[2]) for out, _ in outputs]


def together(run_dir, steps, *flags):
    told = f"--coordinator 127.0.0.1:{free_port()} --num-processes 2 --process-id".split()
    return [start(run_dir, steps, *flags, *told, str(process)) for process in (0, 1)]


def arrays(run_dir):
    with np.load(f"{run_dir}.npz") as found:
        return [found[name] for name in found.files]


def assert_same_turns(alone, run_dir):
    """Two runs of several turns: the same was said, and learned."""
    for one, other in zip(arrays(alone), arrays(run_dir), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    lines, others = (list(read_lines(where / "metrics.jsonl")) for where in (alone, run_dir))
    names = ["turns/mean", "turns/max", "completions/observation_tokens", "rewards/Game/mean", "eval/Game", "reward"]
    for line, other in zip(lines, others, strict=True):
        assert {name: line.get(name) for name in names} == {name: other.get(name) for name in names}
        assert line.get("loss") == pytest.approx(other.get("loss"), abs=1e-6)
    assert max(line.get("turns/mean", 0) for line in lines) > 1.5
    rows, other_rows = (list(read_lines(where / "completions.jsonl")) for where in (alone, run_dir))
    assert len(rows) == 3 * 32
    for row, other in zip(rows, other_rows, strict=True):
        for name in ("prompt", "completion", "turns", "rewards", "ended"):
            assert row[name] == other[name]
    assert all(" so " in row["prompt"] for row in rows)


def test_two_processes_train_what_one_does(tmp_path):
    """With a rollout ahead, whose collectives run in a thread beside the rewards, and an evaluation at either end.

    Then the same with environments, of which each process has those of its own rows.
    """
    alone, run_dir, flags = tmp_path / "alone", tmp_path / "run", ("--rollout-ahead", "--evaluate", "--environments")
    (one,) = finish([start(alone, 6, *flags)])
    # Five prompts held out are played at either end, in rollouts of 3 and of 2 prompts with one that fills it up.
    assert one == {"training": 3 * 32, "evaluation": 2 * 20, "played": 3 * 32 + 2 * 24}
    calls = finish(together(run_dir, 6, *flags))
    assert [some["training"] for some in calls] == [3 * 16, 3 * 16], "each calls the reward for its own half of 32"
    # Five prompts × 4 completions in rollouts of 3 and 2 prompts, of which the second process has 2 and 1.
    assert [some["evaluation"] for some in calls] == [2 * 8, 2 * 12], "and for its own of 20 held-out completions"
    assert [some["played"] for some in calls] == [3 * 16 + 2 * 8, 3 * 16 + 2 * 16]
    assert_same_turns(tmp_path / "alone-turns", tmp_path / "run-turns")
    for one, other in zip(arrays(alone), arrays(run_dir), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    lines, others = (list(read_lines(where / "metrics.jsonl")) for where in (alone, run_dir))
    held_out = [[line for line in some if "eval/lower_case" in line] for some in (lines, others)]
    assert [line["step"] for line in held_out[0]] == [0, 6]
    assert held_out[0] == held_out[1]
    lines, others = ([line for line in some if "loss" in line] for some in (lines, others))
    assert [line["step"] for line in others] == [1, 2, 3, 4, 5, 6], "one process logs"
    for line, other in zip(lines, others, strict=True):
        for name in [name for name in line if re.fullmatch("rewards/.+/(mean|std|missing|errors)", name)]:
            assert line[name] == pytest.approx(other[name], rel=1e-6), name
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert line.get("reward") == pytest.approx(other.get("reward"))
    assert len(list(read_lines(run_dir / "completions.jsonl"))) == 3 * 32


def until(happened, processes):
    """Wait for something that the processes do; they must not end before it."""
    deadline = time.monotonic() + 240
    while not happened.exists() and time.monotonic() < deadline:
        assert all(process.poll() is None for process in processes), processes[0].communicate()[1][-3000:]
        time.sleep(0.1)
    assert happened.exists()


def test_an_exception_in_one_or_its_loss_ends_both_and_one_process_resumes_the_run(tmp_path):
    """With an engine that draws other tokens in each process: the completions of the first one count."""
    alone, run_dir = tmp_path / "alone", tmp_path / "run"
    finish([start(alone, 8, "--sampler")])
    for flags, happened in ((["--raise-in", "1"], "raised"), ([], "checkpoints/6")):
        processes = together(run_dir, 1000, "--sampler", *flags)
        until(run_dir / happened, processes)
        if not flags:
            processes[1].kill()
        begun = time.monotonic()
        (_, words), (_, reason) = (process.communicate(timeout=60) for process in processes)
        assert time.monotonic() - begun < 60, "one waited for the other"
        assert processes[0].returncode != 0, "it ended as if all were well"
        assert "another process was lost" in words or "another task died" in words, words[-3000:]
        if flags:
            assert processes[1].returncode == 1
            assert "of one process alone" in reason
    step = max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())
    finish([start(run_dir, step + 2, "--sampler")])
    lines, others = (list(read_lines(where / "metrics.jsonl")) for where in (run_dir, alone))
    assert [line["step"] for line in lines] == list(range(1, step + 3))
    for line, other in zip(lines, others, strict=False):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-6)
        for name in ("sampler/importance_weight_mean", "sampler/log_prob_difference_mean"):
            assert line.get(name) == (pytest.approx(other[name], rel=1e-4) if name in other else None)
    rows = [list(read_lines(where / "completions.jsonl")) for where in (run_dir, alone)]
    texts, others = ([row["completion"] for row in some] for some in rows)
    assert len(others) == 4 * 32
    assert texts[: len(others)] == others[: len(texts)]
