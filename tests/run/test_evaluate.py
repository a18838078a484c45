"""Evaluation averages rewards over all completions, whatever the batch size."""

import importlib

import jax
import numpy as np
import pytest
from tiny import tiny_policy

from grpo_jax import GRPOConfig, evaluate, train
from grpo_jax.models.sharding import make_mesh, place
from grpo_jax.rewards import number_reward
from grpo_jax.rollout import decode as decode_module
from grpo_jax.run import collect as collect_module

ROWS = [{"prompt": text, "answer": text} for text in ["ab", "c", "def", "gh", "i"]]


def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def test_evaluation_reward_equals_training_reward():
    """With functions that return None for some rows, the reward is the mean weighted sum per row, as in training."""

    def early(answer):
        return [1.0 if text == "ab" else None for text in answer]

    def reward(answer):
        return [0.5 if text in "gh" else None for text in answer]

    weights, settings = [2.0, 0.4], {"max_completion_length": 4, "temperature": 1.0}
    metrics, rows = evaluate(tiny_policy(), ROWS[:4], [early, reward], reward_weights=weights, **settings)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS[:4]]
    assert metrics["clipped_ratio"] == pytest.approx(np.mean([not row["ended"] for row in rows]))
    assert rows != evaluate(tiny_policy(), ROWS[:4], [early, reward], seed=1, **settings)[1]
    assert metrics["reward"] == pytest.approx((2.0 * 1.0 + 0.4 * 0.5) / 2), "c and def have no score"
    assert (metrics["early"], metrics["rewards/reward/mean"]) == (1.0, 0.5), "the total keeps the name 'reward'"
    sizes = {"per_device_train_batch_size": 8, "num_generations": 2, "max_steps": 1}
    config = GRPOConfig(shuffle_dataset=False, reward_weights=weights, **sizes, **settings)
    lines = []
    rows, log = ROWS[:4], lambda step, line: lines.append(line)
    several = {"same": rows, "part": [rows[0]] * 4}
    train(tiny_policy(), rows, [early, reward], config, eval_dataset=several, callbacks=[log])
    (trained,) = [line["reward"] for line in lines if "reward" in line]
    found = [(line["eval/same/reward"], line["eval/part/reward"]) for line in lines if "eval/same/reward" in line]
    assert found == [pytest.approx((trained, 2.0))] * 2


def test_unknown_metric_for_best_model_is_rejected_at_the_first_evaluation():
    how = {"metric_for_best_model": "eval/a/short", "eval_steps": 1, "max_completion_length": 4, "max_steps": 1}
    names = "eval/a/length, eval/a/reward, eval/a/mean_length, eval/a/clipped_ratio"
    with pytest.raises(ValueError, match=rf"='eval/a/short' is not an evaluation metric; available: {names}"):
        train(tiny_policy(), ROWS, length, GRPOConfig(**how), eval_dataset={"a": ROWS})


def test_evaluation_and_training_share_no_random_key(monkeypatch):
    """Evaluation and training with the same seed share no random key for prompts, completions or tokens."""
    keys = []

    def noted(*args, **how):
        keys.append(args[3])
        return generate(*args, **how)

    generate = collect_module.generate
    monkeypatch.setattr(collect_module, "generate", noted)
    settings = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 4, "max_steps": 1}
    config = GRPOConfig(**settings, num_generations_eval=2, seed=3)
    train(tiny_policy(), ROWS, length, config, eval_dataset=ROWS[:2])
    evaluation, training, again = keys

    def tree(key, depth):
        below = () if depth == 0 else (tree(jax.random.fold_in(key, n), depth - 1) for n in range(3))
        return {tuple(np.asarray(jax.random.key_data(key)).tolist())}.union(*below)

    assert tree(evaluation, 0) == tree(again, 0), "all evaluations of a run use the same key"
    assert len(tree(training, 3)) == len(tree(evaluation, 3)) == 1 + 3 + 9 + 27
    assert not tree(evaluation, 3) & tree(training, 3)


def test_evaluation_on_a_mesh_equals_one_device(monkeypatch):
    """Two batches on four devices, the last one padded, give the same results as one batch on one device."""
    dataset = [{"prompt": "abcdefgh"[: 1 + i % 8]} for i in range(15)]
    sizes, prefill, policy = [], decode_module.prefill, tiny_policy()
    settings = {"temperature": 1.0, "num_generations": 2, "max_completion_length": 4}
    alone = evaluate(policy, dataset, length, batch_size=64, **settings)
    generate_module = importlib.import_module("grpo_jax.rollout.generate")
    monkeypatch.setattr(generate_module, "prefill", lambda *x, **how: sizes.append(x[3].shape[0]) or prefill(*x, **how))
    placed = policy.replace(params=place(policy.params, make_mesh({"data": 2, "fsdp": 2, "tensor": 2})))
    assert evaluate(placed, dataset, length, batch_size=2, **settings) == alone
    assert sizes == [8, 8]


def test_batches_have_few_shapes(monkeypatch):
    """Prompts are padded to a multiple, and five of them are split into batches of 3 and 2, not 4 and 1. Dropped rows
    are reported.
    """
    shapes = []
    monkeypatch.setattr(collect_module, "generate", lambda *args, **_: shapes.append(args[2].tokens.shape) or 1 / 0)
    for multiple in (32, 5):
        with pytest.raises(ZeroDivisionError):
            evaluate(tiny_policy(), ROWS, length, batch_size=4, max_completion_length=2, pad_to_multiple_of=multiple)
    short = {"max_prompt_length": 2, "on_long_prompt": "drop"}
    with pytest.warns(UserWarning, match="dropped rows with prompts .*: 1$"), pytest.raises(ZeroDivisionError):
        evaluate(tiny_policy(), ROWS, length, batch_size=4, max_completion_length=2, **short)
    assert shapes == [(3, 32), (3, 5), (4, 16)]


@pytest.mark.quick
@pytest.mark.parametrize(("call", "message"), [
    (lambda: evaluate(tiny_policy(), ROWS, lambda completions, truth: [0.0]), "'truth', which is not a column"),
    (lambda: evaluate(tiny_policy(), {"a": ROWS, "b": [{"prompt": "ab"}]}, lambda completions, answer: 1 / 0),
        r"'answer', which is not a column of dataset\['b'\]"),
    (lambda: evaluate(tiny_policy(), ROWS, number_reward()), "5 of 5 rows of the dataset, the column 'answer' has no"),
    (lambda: evaluate(tiny_policy(), ROWS, length, pad_to_multiple_of=0), "pad_to_multiple_of = 0"),
    (lambda: evaluate(tiny_policy(), ROWS, length, reward_weights=[1, 2], max_completion_length=4),
        "got 2 weights for 1 reward function; pass one weight per function"),
])  # fmt: skip
def test_invalid_arguments_are_rejected_before_sampling(call, message):
    with pytest.raises(ValueError, match=message):
        call()
