"""An iteration of a real model, compared with TRL: its table."""

import pytest

from experiments import real_model


@pytest.mark.quick
def test_a_reward_that_one_side_never_reaches_has_no_multiple():
    ours = {"first_line_seconds": 30.0, "step_seconds": [9.0] * 6, "rewards": [0.0] * 6, "peak_rss_gb": 5.0}
    theirs = {**ours, "step_seconds": [36.0] * 6, "rewards": [0.0, *[1.0] * 5]}
    assert real_model.reached(theirs, 1.0) == 30 + 5 * 36
    assert real_model.table({"grpo_jax": ours, "trl": theirs}).endswith("| reward 1.000, s | None | 210.0 | |")
