"""Metrics and columns logged by reward functions, and the names reserved for the run."""

import functools

import pytest

from grpo_jax.rewards.calls import compute_rewards
from grpo_jax.rewards.contract import RUN_COLUMNS, RewardError, SetupError, TrainerState, check_names
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


def logs(completions, log_metric, name):
    log_metric(name, 1000)
    return [float(len(text)) for text in completions]


async def keeps(completions, log_extra, name):
    log_extra(name, completions)
    return [float(len(text)) for text in completions]


@pytest.mark.quick
@pytest.mark.parametrize("on_error", ["raise", "none"])
def test_reserved_names_are_refused(on_error):
    metrics = [(logs, name, "the run logs a metric") for name in ("kl", "reward", "eval/accuracy", "seconds/all")]
    columns = [(keeps, name, "the run writes a column") for name in RUN_COLUMNS]
    for fn, name, message in metrics + columns:
        with pytest.raises(SetupError, match=rf"log_\w+\('{name}', ...\): {message}"):
            compute_rewards(functools.partial(fn, name=name), on_error=on_error, **INPUTS)
    with pytest.raises(SetupError, match=r"log_metric\('rewards/logs/mean', ...\): the run logs a metric"):
        check_names(["mine", "rewards/logs/mean"], ["rewards/logs/mean", "completions/mean_length"])
    check_names(["mine"], ["rewards/logs/mean"])
