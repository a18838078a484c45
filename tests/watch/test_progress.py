"""Counters that survive JSON, means without values that are not finite, seconds that add up, a trace of some steps."""

import contextlib
import dataclasses
import json
import math

import pytest

from grpo_jax.watch.progress import Phases, Progress

pytestmark = pytest.mark.quick


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
