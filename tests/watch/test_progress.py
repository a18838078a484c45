"""Progress: counters that survive JSON, and means that one NaN cannot hide."""

import dataclasses
import json
import math

import pytest

from grpo_jax.watch.progress import Progress


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
