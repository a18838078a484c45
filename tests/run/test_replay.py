"""A skipped update changes nothing, its batch is kept and can be run again alone, and too many of them end the run."""

import importlib
import itertools
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from tiny import tiny_policy

from grpo_jax import GRPOConfig, replay, train
from grpo_jax.run import collect
from grpo_jax.run.replay import BadBatches, NotFiniteError
from grpo_jax.update.packed import PackedUpdater
from grpo_jax.watch.writer import read_lines

ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh"]]
SMALL = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 4,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "seed": 0,
}


def lengths(completions):
    return [float(len(text)) for text in completions]


def bytes_of(state):
    return jax.tree.map(np.array, (state.params, state.opt_state))


@pytest.fixture
def states(monkeypatch):
    """Params and optimizer before and after each update."""
    seen, update = [], PackedUpdater.update

    def watched(updater, state, batch):
        before = bytes_of(state)
        state, metrics = update(updater, state, batch)
        seen.append((before, bytes_of(state)))
        return state, metrics

    monkeypatch.setattr(PackedUpdater, "update", watched)
    return seen


def test_a_skipped_update_is_kept_and_replayed(tmp_path, states, capsys):
    calls = itertools.count(1)

    def reward(completions):
        # Finite by itself; its weight makes it too large for float32.
        return [3e38 if i == 5 else 0.0 for i in range(8)] if next(calls) == 2 else lengths(completions)

    config = GRPOConfig(**SMALL, max_steps=3, reward_weights=[2.0], num_iterations=1)
    with pytest.warns(RuntimeWarning, match="step 2 was skipped.*a reward, inf, at prompt 1, completion 1.*is kept"):
        state = train(tiny_policy(), ROWS, reward, config, run_dir=tmp_path)
    assert int(state.skipped) == 1
    chex.assert_trees_all_equal(*states[1])
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(*states[2])
    assert [line["update_skipped"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 0]
    assert [path.name for path in (tmp_path / "bad_batches").iterdir()] == ["step-2"]

    capsys.readouterr()
    found = replay(tmp_path, tiny_policy())
    assert (found.term, found.prompt, found.completion) == ("reward", 1, 1)
    assert found.row["rewards"] == {"reward": float(np.float32(3e38))}
    assert "bad_batches/step-2: the first number that is not finite is a reward, inf" in capsys.readouterr().out
    assert replay(tmp_path / "bad_batches/step-2", tiny_policy(), config).term == "reward"
    # The kept params are those that the update began with.
    with np.load(tmp_path / "bad_batches/step-2/arrays.npz") as arrays:
        for i, leaf in enumerate(jax.tree.leaves(states[1][0][0])):
            np.testing.assert_array_equal(arrays[f"params/{i}"], leaf)
    with pytest.raises(ValueError, match="policy: its params have other shapes"):
        replay(tmp_path, tiny_policy(layers=2))


def test_too_many_in_a_row_end_the_run_with_nothing_lost(tmp_path, states, monkeypatch):
    """Two passes over each batch; all of the second and third iteration are bad."""
    calls, advantages = itertools.count(1), collect._jit_advantages

    def spoilt(rewards, **settings):
        a = advantages(rewards, **settings)
        return a.at[0, 3].set(np.nan) if next(calls) in (2, 3) else a

    monkeypatch.setattr(collect, "_jit_advantages", spoilt)
    config = GRPOConfig(**SMALL, max_steps=7, num_iterations=2, max_skipped_updates=3)
    words = "step 5: 3 updates in a row were skipped .*an? advantage, nan, at prompt 0, completion 3 of.*bad_batches"
    with pytest.warns(RuntimeWarning, match="step 3 was skipped") as warned, pytest.raises(NotFiniteError, match=words):
        train(tiny_policy(), ROWS, lengths, config, run_dir=tmp_path)
    assert len(warned) == 1, "said once"
    assert sorted(path.name for path in (tmp_path / "bad_batches").iterdir()) == ["step-3", "step-4", "step-5"]
    for before, after in states[2:]:
        chex.assert_trees_all_equal(before, after, states[1][1])
    assert replay(tmp_path, tiny_policy()).term == "advantage"

    # It goes on from there: the second pass over the bad batch, then good ones.
    del states[:]
    with pytest.warns(RuntimeWarning, match="step 6 was skipped"):
        state = train(tiny_policy(), ROWS, lengths, config, run_dir=tmp_path)
    assert (int(state.step), int(state.skipped)) == (7, 4)
    assert len(states) == 2
    assert len(list((tmp_path / "bad_batches").iterdir())) == 3, "no more are kept"


@pytest.mark.quick
def test_a_full_disk_costs_the_evidence_and_not_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(importlib.import_module("grpo_jax.run.replay"), "_write", full)
    monkeypatch.setattr(BadBatches, "_explain", lambda *_: None)
    monkeypatch.setattr(BadBatches, "_rows", lambda *_: None)
    with pytest.warns(RuntimeWarning, match=r"could not be kept in '.*step-3' \(No space left on device\)"):
        BadBatches(tmp_path, SimpleNamespace(config=None)).note(None, None, step=3, index=0)


@pytest.mark.quick
def test_replay_says_where_it_looked(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no bad batch is kept in '.*': give a run directory"):
        replay(tmp_path, tiny_policy())
