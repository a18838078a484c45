"""The best checkpoint, and those that are kept, do not depend on where a run was interrupted."""

import pytest
from test_checkpoint import state_at
from test_resume import about

from grpo_jax import GRPOConfig
from grpo_jax.run.checkpoint import Checkpoints
from grpo_jax.run.schedule import best_of, kept_of
from grpo_jax.watch.monitor import Progress

pytestmark = pytest.mark.quick

LIMITED = {"save_steps": 4, "save_total_limit": 2, "metric_for_best_model": "reward"}


SCHEDULES = [
    ({}, [4, 8, 12], {"4": 0.5, "8": 0.1, "12": 0.2}, (4, 0.5), {4, 8, 12}),
    ({}, [4, 8, 12], {"4": 0.1, "8": 0.5, "12": 0.5}, (12, 0.5), {8, 12}),
    ({"greater_is_better": False}, [4, 8, 12], {"4": 0.1, "8": 0.5, "12": 0.2}, (4, 0.1), {4, 8, 12}),
    ({}, [4, 8, 9], {"4": 0.5, "8": 0.1, "9": 0.9}, (4, 0.5), {4, 8, 9}),
    ({}, [4, 8, 9, 12], {"4": 0.1, "8": 0.1}, (8, 0.1), {8, 12}), ({}, [1, 2, 3], {}, None, {2, 3}),
    ({}, [4, 8, 12, 14], {"14": 0.9}, (14, 0.9), {12, 14}), ({}, [4, 6, 8], {"6": 0.9}, None, {4, 8}),
    ({"save_total_limit": None}, [4, 5, 8], {"5": 0.9}, None, {4, 8}),
    ({"save_total_limit": None}, [4, 5, 8, 9, 10], {}, None, {4, 8, 10}),
    ({"save_total_limit": None, "save_steps": None}, [3, 5, 9], {}, None, {9}),
    ({"save_total_limit": None, "save_steps": None}, [9, 14], {}, None, {14}),
    ({"save_steps": None}, [3, 5, 9, 14], {"5": 0.9, "14": 0.1}, (14, 0.1), {9, 14}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "steps", "metrics", "best", "kept"), SCHEDULES)
def test_which_is_best_and_which_are_kept(settings, steps, metrics, best, kept):
    config = GRPOConfig(**{**LIMITED, **settings})
    assert best_of(config, steps, metrics, 14) == best
    assert kept_of(config, steps, metrics, 14) == kept


REWARD, KL = (GRPOConfig(save_steps=1, metric_for_best_model=name) for name in ("reward", "kl"))


def restored(run_dir, config):
    with Checkpoints(run_dir, config, about(config=config)) as checkpoints:
        progress = checkpoints.restore(state_at(0))[1]
        return progress.metric, progress.metrics, checkpoints.best(progress)


def test_metrics_of_another_name_are_not_compared(tmp_path):
    with Checkpoints(tmp_path, REWARD, about(config=REWARD)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state_at(step), Progress(step=step, metric=1 / step, metrics={"1": 1.0}), None)
    assert restored(tmp_path, REWARD) == (0.5, {"1": 1.0, "2": 0.5}, (1, 1.0))
    assert restored(tmp_path, KL) == (None, {}, None)
