"""Counters that survive JSON, means that one NaN cannot hide, seconds that add up, and a trace of some steps."""

import dataclasses
import json
import math

import pytest

from grpo_jax.watch.progress import Phases, Progress


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
