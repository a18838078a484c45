"""Counters that survive JSON, means without values that are not finite, seconds that add up, a trace of some steps."""

import contextlib
import dataclasses
import json
import math

import jax
import pytest
from test_train import run

from grpo_jax.watch.progress import FOLDER, Phases, Profile, Progress


@pytest.mark.quick
def test_counts_and_means_of_a_window():
    progress = Progress()
    progress.collected(8, {"num_tokens": 100, "reward": 0.25})
    for value in (1.0, math.nan, 3.0):
        progress.updated({"loss": value, "kl": math.nan})
    again = Progress(**json.loads(json.dumps(dataclasses.asdict(progress))))
    assert again == progress, "also in the middle of a window"
    assert (progress.step, progress.updates_done, progress.cursor) == (3, 3, 8)
    line = progress.log_line()
    assert math.isnan(line.pop("kl"))
    assert line == {"num_tokens": 100, "reward": 0.25, "loss": 2.0, "num_prompts": 8}
    progress.collected(16, {"num_tokens": 50, "reward": 0.75})
    assert progress.log_line() == {"num_tokens": 150, "reward": 0.75, "num_prompts": 16}


@pytest.mark.quick
def test_phases_count_each_second_once():
    now = [100.0]
    phases = Phases(lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    spend(1)  # outside any phase
    with phases("rollout"):
        spend(2)
        with contextlib.suppress(KeyError), phases("rewards"):
            spend(4)
            raise KeyError
        spend(8)
    with phases("rollout"):
        spend(32)
    assert phases.take() == {"seconds/rollout": 42, "seconds/rewards": 4, "seconds/total": 47}
    with phases("update"):
        spend(2)
        assert phases.take() == {"seconds/update": 2, "seconds/total": 2}
        spend(4)
    spend(8)
    assert phases.take() == {"seconds/update": 4, "seconds/total": 12}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("last", "given", "expected"),
    [
        (9, 3, [("start", 4), ("stop", 7)]),
        (5, 3, [("start", 4), ("stop", 6)]),  # the run ends first
        (3, 3, []),
        (9, None, []),
    ],
)
def test_the_trace_covers_the_steps_that_were_requested(tmp_path, monkeypatch, last, given, expected):
    calls, now = [], [0]
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("start", now[0])))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", now[0])))
    with Profile(tmp_path, given) as profile:
        profile.begins_at(4)
        for now[0] in range(last + 1):
            profile.at(now[0])
        now[0] = last + 1
    assert calls == expected


def test_a_run_leaves_a_trace_that_tensorboard_finds(tmp_path):
    with pytest.raises(ValueError, match="profile_steps = 2: there is nowhere to write the trace; give run_dir"):
        run(profile_steps=2)
    run(run_dir=tmp_path, max_steps=5, profile_steps=2)
    (trace,) = (tmp_path / FOLDER).glob("plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 10_000
