"""Counters that survive JSON, means that one NaN cannot hide, seconds that add up, and a trace of some steps."""

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
    progress.updated({"loss": 1.0})
    progress.updated({"loss": 3.0})
    assert (progress.step, progress.updates_done, progress.cursor) == (2, 2, 8)
    assert progress.log_line() == {"num_tokens": 100, "reward": 0.25, "loss": 2.0, "num_prompts": 8}
    progress.collected(16, {"num_tokens": 50, "reward": 0.75})
    assert progress.log_line() == {"num_tokens": 150, "reward": 0.75, "num_prompts": 16}


@pytest.mark.quick
def test_a_value_that_is_not_finite_leaves_the_others_their_mean():
    progress = Progress()
    for value in (1.0, math.nan, 3.0, math.inf):
        progress.updated({"loss": value, "kl": math.nan})
    line = progress.log_line()
    assert line["loss"] == 2.0
    assert math.isnan(line["kl"])


@pytest.mark.quick
def test_json_gives_the_same_progress_back_in_the_middle_of_a_window():
    progress = Progress(step=3, cursor=24, updates_done=1, evaluated=2, tokens=7)
    progress.updated({"loss": 0.1})
    again = Progress(**json.loads(json.dumps(dataclasses.asdict(progress))))
    assert again == progress
    assert again.log_line() == progress.log_line()


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.quick
def test_phases_count_each_second_once():
    clock = Clock()
    phases = Phases(clock)
    clock.now += 1  # in no phase
    with phases("rollout"):
        clock.now += 2
        with phases("rewards"):
            clock.now += 4
        clock.now += 8
    with phases("update"):
        clock.now += 16
    with phases("rollout"):
        clock.now += 32
    assert phases.take() == {"seconds/rollout": 42, "seconds/rewards": 4, "seconds/update": 16, "seconds/total": 63}
    clock.now += 3
    assert phases.take() == {"seconds/total": 3}


@pytest.mark.quick
def test_a_phase_that_raises_is_closed_and_one_that_is_open_is_split():
    clock = Clock()
    phases = Phases(clock)

    def fail():
        with phases("rewards"):
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with phases("update"):
        clock.now += 2
        assert phases.take() == {"seconds/rewards": 1, "seconds/update": 2, "seconds/total": 3}
        clock.now += 4
    clock.now += 8
    assert phases.take() == {"seconds/update": 4, "seconds/total": 12}


@pytest.fixture
def calls(monkeypatch):
    """What the profiler was asked to do."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", None)))
    return calls


@pytest.mark.quick
@pytest.mark.parametrize(("last", "expected"), [(9, {"start": 4, "stop": 7}), (5, {"start": 4, "stop": None}), (3, {})])
def test_the_steps_that_were_asked_for(tmp_path, calls, last, expected):
    seen = {}
    with Profile(tmp_path, 3) as profile:
        profile.begins_at(4)
        for step in range(last + 1):
            before = len(calls)
            profile.at(step)
            seen.update({name: step for name, _ in calls[before:]})
    names = [name for name, _ in calls]
    assert names == list(expected), "begun once and ended once, also where the run ends first"
    assert seen == {name: step for name, step in expected.items() if step is not None}


@pytest.mark.quick
def test_no_trace_where_none_is_asked_for(tmp_path, calls):
    for given in ((tmp_path, None), (None, 2)):
        with Profile(*given) as profile:
            profile.at(0)
    assert not calls


def test_a_run_leaves_a_trace_that_tensorboard_finds(tmp_path):
    run(run_dir=tmp_path, max_steps=5, profile_steps=2)
    traces = list((tmp_path / FOLDER).glob("plugins/profile/*/*.xplane.pb"))
    assert len(traces) == 1
    assert traces[0].stat().st_size > 10_000


@pytest.mark.quick
def test_a_trace_without_a_directory_is_refused():
    with pytest.raises(ValueError, match="profile_steps = 2: there is nowhere to write the trace; give run_dir"):
        run(profile_steps=2)
