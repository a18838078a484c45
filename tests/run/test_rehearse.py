"""A dry run executes every phase once, reports problems and leaves no trace."""

import dataclasses
import importlib
import os

import chex
import jax
import numpy as np
import pytest
from test_train import SMALL
from tiny import tiny_policy

from grpo_jax import GRPOConfig, rehearse
from grpo_jax.run.rehearse import DryRun, _group_problems
from grpo_jax.update import packed

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh"]]
module = importlib.import_module("grpo_jax.run.rehearse")  # the package exports the function under this name


def test_dry_run_without_problems(tmp_path, capsys, monkeypatch):
    """A dry run executes every phase, writes no files and leaves the policy unchanged."""
    # Half of all tokens end a completion, because completions that never end would be reported.
    policy = tiny_policy().replace(generation_config={"eos_token_id": list(range(1, 130))})
    before = jax.tree.map(np.array, policy.params)
    config = GRPOConfig(**SMALL, max_steps=50, beta=0.1, num_iterations=2)
    seen = []

    def reward(completions):
        seen.append(len(completions))
        return [float(len(text)) for text in completions]

    monkeypatch.chdir(tmp_path)
    report = rehearse(policy, ROWS, reward, config)
    assert isinstance(report, DryRun)
    assert os.listdir() == []
    assert seen == [4], "a dry run scores one group, once"
    assert report.suspicious == ()
    chex.assert_trees_all_equal(policy.params, before)

    text = capsys.readouterr().out
    assert text == f"{report}\n"
    assert "each iteration: 2 prompts × 4 = 8 completions of up to 4 tokens" in text
    assert text.endswith("nothing suspicious\n")
    phases = {"load and tokenize", "state", "rollout", "rewards", "reference", "update", "memory analysis", "total"}
    assert {name.removeprefix("seconds/") for name in report.seconds} == phases
    # State: policy, old policy, reference and two moments. Decode: one policy. Update: one policy and its gradient.
    one = sum(x.nbytes for x in jax.tree.leaves(before))
    assert report.memory["policy"] == one
    assert report.memory["training state"] == pytest.approx(5 * one, rel=0.01)
    assert report.memory["decode"] > one
    assert report.memory["update"] > 2 * one
    assert len(report.rows) == 4
    assert np.isfinite(report.metrics["grad_norm"])
    # The params are counted in the state and in the update's arguments, so one of them stands for the caller's policy.
    peak = report.memory["training state"] + report.memory["update"]
    for memory, suspicious in ((peak, 0), (peak - 1, 1)):
        monkeypatch.setattr(module, "memory_of", lambda device, memory=memory: memory)
        assert len(rehearse(policy, ROWS, reward, config).suspicious) == suspicious


def test_dry_run_reports_problems(monkeypatch):
    """Problems are reported; a group with equal rewards, which a run would skip, still gets a backward pass."""
    trained, program = [], packed.add_gradients
    watched = lambda *given: trained.append(int(given[3].num_with_grad)) or program(*given)
    monkeypatch.setattr(packed, "add_gradients", watched)
    monkeypatch.setattr(module, "_programs", lambda run, state: {})
    config = GRPOConfig(
        **SMALL | {"max_completion_length": 1, "per_device_train_batch_size": 24}, max_steps=50,
        on_reward_error="none", max_prompt_length=2, on_long_prompt="drop",
    )  # fmt: skip

    def same(completions):
        return [0.5] * len(completions)

    def nothing(completions):
        return [None] * len(completions)

    def fails(completions):
        raise KeyError("gold")

    rows = [*ROWS, {"prompt": "ab"}]
    with pytest.warns(RuntimeWarning, match="'fails' raised KeyError"):
        report = rehearse(tiny_policy(), rows, [same, same, nothing, fails], config)
    # A tiny policy may sample an EOS as its only token; with this seed it does not.
    assert report.suspicious == (
        "all 4 completions were truncated at max_completion_length = 1, and none ended with an id in "
        "policy.eos_token_ids = [1]; increase the limit, or check the EOS token and the chat template",
        "reward function 'same' gave all scored completions (4/4) the reward 0.5",
        "reward function 'same_2' gave all scored completions (4/4) the reward 0.5",
        "reward function 'nothing' returned no reward for any of the 4 completions",
        "reward function 'fails' returned no reward for any of the 4 completions",
        "all advantages are 0, so the group has no training signal",
        "1 of 5 prompts are longer than max_prompt_length = 2 and are dropped",
    )
    assert sum(trained)
    assert "suspicious:\n  - all 4 completions were truncated" in str(report)
    donated = dataclasses.replace(report, memory={"training state": 10**9, "policy": 0})
    assert "memory: training state 1 GB\n" in str(donated), "parts with zero bytes are not shown"


def test_dry_run_reports_suspicious_numbers(monkeypatch):
    """Suspicious numbers in a dry run's rows and metrics, here set by hand, are reported."""
    seen = {}
    monkeypatch.setattr(module, "_programs", lambda run, state: {})
    monkeypatch.setattr(module, "_group_problems", lambda run, *what: seen.update(run=run, what=what) or ["looked"])
    config = GRPOConfig(**SMALL, max_steps=50, reward_weights=[1e30])
    report = rehearse(tiny_policy(), ROWS, lambda completions: [0.0, 1e30, 0.0, 0.0], config)
    assert report.suspicious[0] == "looked"
    assert report.suspicious[1].startswith(
        "the update was skipped: the advantage is nan at prompt 0, completion 0 of the batch"
    )

    batch, rollout, rows, metrics = seen["what"]
    metrics = metrics | {"sampler_gap": 0.1, "grad_norm": 0.0}
    slow = {"rewards/lambda/seconds": 20.0, "completions/max_length": 1.0}
    row = rows[0] | {"completion": "", "ended": True, "advantage": 1.0}
    rows = [row | {"rewards": {"lambda": float(i)}} for i in range(4)]
    assert list(_group_problems(seen["run"], batch, rollout | slow, rows, metrics)) == [
        "all 4 completions are empty: the first sampled token ends each of them; check policy.eos_token_ids",
        "all 4 completions are identical: ''; increase temperature",
        "reward function 'lambda' would take about 40 s per iteration; make it async, run it in worker processes "
        "with `isolated`, or set rollout_ahead=True to sample in the meantime",
        "the gradient is 0 despite a training signal; check masks, clipping and top_entropy_quantile",
        "the trainer's log-probs differ from the sampler's by up to 0.1 nats; check that the model computes the "
        "same logits with and without a cache",
    ]
    engine = dataclasses.replace(seen["run"], sampler=print)
    *_, last = _group_problems(engine, batch, rollout | slow | {"sampler/importance_weight_mean": 0.2}, rows, metrics)
    assert last.startswith("the mean importance weight of the sampler's completions is 0.2")
