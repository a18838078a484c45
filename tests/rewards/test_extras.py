"""What reward functions log beside their rewards, and the names that are the run's own."""

import functools
import pickle

import pytest
from tiny import tiny_policy

from grpo_jax import GRPOConfig, train
from grpo_jax.rewards.calls import compute_rewards, means_of
from grpo_jax.rewards.contract import EXTRAS, RewardError, TrainerState
from grpo_jax.rewards.extras import OWN_COLUMNS, Extras, NameTaken

ROWS = [{"prompt": text, "topic": "letters"} for text in ("ab", "c", "def", "gh")]


@pytest.mark.quick
def test_extras_take_metrics_and_columns_once_as_they_were():
    extras = Extras(TrainerState(global_step=3, max_steps=10, epoch=0.5))

    def by_the_book(completions, trainer_state, log_metric, log_extra):
        log_metric("at", trainer_state.global_step)
        log_metric("at", trainer_state.max_steps)
        log_extra("length", [len(text) for text in completions])
        return [0.0] * len(completions)

    inputs = {"prompts": ["p", "p"], "completions": ["a", "bc"], "completion_ids": [[1], [2, 3]]}
    assert set(extras.given()) == set(EXTRAS)
    compute_rewards(by_the_book, **inputs, num_generations=2, extras=extras.given())
    assert means_of(extras.values()) == {"at": 6.5}
    assert extras.rows(2) == [{"length": 1}, {"length": 2}]
    assert extras.rows(3) == [{}, {}, {}]
    extras.log_extra("length", [1])
    with pytest.raises(RewardError, match=r"log_extra\('length', ...\) has 1 values for 2 completions"):
        extras.rows(2)
    with pytest.raises(TypeError, match="work in the process that trains"):
        pickle.dumps(extras.log_metric)
    extras, seen = Extras(), [[1], [2]]
    extras.log_extra("seen", seen)
    seen[0].append(2)
    assert extras.rows(2) == [{"seen": [1]}, {"seen": [2]}]


def logs(completions, log_metric, name):
    log_metric(name, 1000)
    return [float(len(text)) for text in completions]


async def keeps(completions, log_extra, name):
    log_extra(name, completions)
    return [float(len(text)) for text in completions]


@pytest.mark.quick
@pytest.mark.parametrize("on_error", ["raise", "none"])
def test_a_name_of_the_runs_own_is_refused(on_error):
    inputs = {"prompts": ["p", "p"], "completions": ["a", "bc"], "completion_ids": [[1], [2, 3]], "num_generations": 2}
    metrics = [
        (logs, name, "this is the name of a metric") for name in ("kl", "reward", "eval/accuracy", "seconds/all")
    ]
    for fn, name, message in (*metrics, *((keeps, name, "completions.jsonl has this column") for name in OWN_COLUMNS)):
        with pytest.raises(NameTaken, match=rf"log_\w+\('{name}', ...\): {message}"):
            compute_rewards(functools.partial(fn, name=name), extras=Extras().given(), on_error=on_error, **inputs)


def test_a_run_refuses_the_names_of_all_that_it_logs(tmp_path):
    """Names of the rollout and of an evaluation are compared with what these have logged; the others are listed."""

    def length(completions):
        return [float(i) for i, _ in enumerate(completions)]

    settings = {"per_device_train_batch_size": 8, "num_generations": 2, "max_completion_length": 4, "max_steps": 2}
    settings |= {"beta": 0.1, "sync_ref_model": True, "delta": 2.0, "num_iterations": 2, "dynamic_sampling": True}
    settings |= {"entropy_coef": 0.1, "use_adaptive_entropy": True, "top_entropy_quantile": 0.5}
    names, config = {"step"}, GRPOConfig(**settings)
    callbacks = [lambda step, line: names.update(line)]
    train(tiny_policy(), ROWS, length, config, eval_dataset=ROWS, callbacks=callbacks, run_dir=tmp_path)
    assert {"loss", "num_prompts", "seconds/total", "eval/length", "clip_fraction_delta", "entropy_coef"} <= names
    for name in names:
        if not name.startswith(("rewards/", "completions/")):
            with pytest.raises(NameTaken):
                Extras().log_metric(name, 0.0)
    for name, evaluated in (("rewards/logs/mean", None), ("logs", ROWS)):  # the second of the first evaluation
        with pytest.raises(NameTaken, match=rf"log_metric\('{name}', ...\)"):
            train(tiny_policy(), ROWS, functools.partial(logs, name=name), config, eval_dataset=evaluated)
