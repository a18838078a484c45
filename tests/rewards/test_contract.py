"""Metrics and columns logged by reward functions."""

import pytest

from grpo_jax.rewards.calls import compute_rewards
from grpo_jax.rewards.contract import RewardError, TrainerState
from grpo_jax.rewards.workers import isolated

INPUTS = {"prompts": ["p", "p"], "completions": ["a", "bc"], "completion_ids": [[1], [2, 3]], "num_generations": 2}


@pytest.mark.quick
def test_metrics_and_columns_are_logged():
    seen = [[1], [2]]

    def by_the_book(completions, trainer_state, log_metric, log_extra):
        log_metric("at", trainer_state.global_step)
        log_metric("at", trainer_state.max_steps)
        log_extra("length", [len(text) for text in completions])
        log_extra("seen", seen)
        seen[0].append(2)
        return [0.0] * len(completions)

    state = TrainerState(global_step=3, max_steps=10, epoch=0.5)
    rewards = compute_rewards(by_the_book, trainer_state=state, **INPUTS)
    assert rewards.logged_metrics == {"at": [3.0, 10.0]}
    assert rewards.logged_columns == [{"length": 1, "seen": [1]}, {"length": 2, "seen": [2]}], (
        "logged values must be copied"
    )
    with pytest.raises(RewardError, match=r"log_extra\('length', ...\): got 1 values for 2 completions"):
        compute_rewards(lambda completions, log_extra: log_extra("length", [1]), **INPUTS)
    with pytest.raises(ValueError, match="fn='by_the_book' takes log_metric, but workers cannot log"):
        isolated(by_the_book, timeout=1.0)
