"""An engine that samples during the update: weight versions, learned params, synchronization and resuming."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest
from stand_in import StandIn, serving
from test_sampler import POLICY, SMALL, G, T, canned, rewards
from test_turns_run import ROWS, Game
from tiny import logged

from grpo_jax import GRPOConfig, train
from grpo_jax.engines import EngineError, vllm
from grpo_jax.run.prepare import prepare
from grpo_jax.watch.monitor import StopRun
from grpo_jax.watch.writer import read_lines

server = serving(POLICY)


def run(sampler, policy=POLICY, run_dir=None, callbacks=(), environment_factory=None, **settings):
    config = GRPOConfig(**SMALL | {"rollout_ahead": True, "max_steps": 4} | settings)
    how = {"run_dir": run_dir, "callbacks": callbacks, "environment_factory": environment_factory, "sampler": sampler}
    return logged(train, policy, ROWS, rewards if environment_factory is None else [], config, **how)


def waited_for(engine):
    """Return the engine without `set_params`, so that prefetched completions are awaited before the update."""

    def sampler(policy, next_observation, **how):
        how.pop("model"), how.pop("batch_size")
        return engine(policy, next_observation=next_observation, **how)

    return sampler


@functools.cache
def undisturbed():
    """Return the state and the server's requests of an uninterrupted run."""
    with StandIn(POLICY) as one:
        return run(vllm(one.url))[0], one.drawn


def same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), found.params, expected.params)


@pytest.mark.quick
def test_background_sampling_needs_a_single_process(monkeypatch):
    """Background sampling needs a single process: several would need one order for their threads' collectives."""
    config = GRPOConfig(**SMALL | {"rollout_ahead": True})
    found = prepare(POLICY, ROWS, rewards, config, sampler=vllm("http://127.0.0.1:1"))
    assert found.samples_during_updates
    assert not dataclasses.replace(found, sampler=waited_for(found.sampler)).samples_during_updates
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not found.samples_during_updates


def test_prefetched_completions_are_exactly_one_version_old():
    """The completions of iterations 1, 2, 3 and 4 are sampled with the weights of iterations 1, 1, 2 and 3."""
    requests = undisturbed()[1]
    drawn = [version for version, body in requests if body["max_tokens"] == T]
    assert len(drawn) == 4 * 2 * G
    of_iteration = [set(drawn[i : i + 2 * G]) for i in range(0, len(drawn), 2 * G)]
    assert [len(versions) for versions in of_iteration] == [1] * 4
    order = list(dict.fromkeys(drawn))
    assert [order.index(*versions) for versions in of_iteration] == [0, 0, 1, 2]


def test_background_sampling_does_not_change_the_params(server):
    """`rollout_ahead` with and without a thread give bitwise equal versions, old log-probs and weights."""
    how = {"environment_factory": Game, "max_completion_length": 40, "max_steps": 3}
    found, lines = run(vllm(server.url), **how)
    expected, others = run(waited_for(vllm(server.url)), **how)
    same(found, expected)
    for line, other in zip(lines, others, strict=True):
        for name in ("loss", "reward", "sampler/log_prob_difference_max", "sampler_gap", "ratio_max"):
            assert line.get(name) == other.get(name), name
        gap = line.get("sampler/log_prob_difference_max", 0.0)
        assert gap < 1e-4, "old log-probs are not from the policy that sampled"
    assert lines[-1]["ratio_max"] > 1.001, "the policy has not changed since sampling"


def test_engine_samples_during_the_update(server, tmp_path):
    """The engine samples during an update: its requests are held until the update ends, so waiting would deadlock."""
    updated, held = threading.Event(), []

    def fault(path, body, n):
        sampling = path == "/v1/completions" and body["max_tokens"] == T
        if sampling and len(server.drawn) >= 2 * G + 1 and len(held) < 2 * G:
            held.append(updated.wait(60))

    server.fault = fault
    _, lines = run(vllm(server.url), run_dir=tmp_path, callbacks=[lambda step, metrics: updated.set()], max_steps=2)
    assert held == [True] * 2 * G
    kept = read_lines(tmp_path / "metrics.jsonl")
    for line in kept:
        assert line["sampler/seconds/sample"] > 0
        assert line["sampler/probe_gap_max"] < 1e-4
        assert line["seconds/rollout"] > 0
    assert len(lines) == 2


def test_resumed_engine_run_has_the_same_params(server, tmp_path):
    """A resumed run repeats the requests that were in progress at the checkpoint, with the policy of that time."""
    server.fault = lambda path, body, n: 400 if len(server.posts("/collective_rpc")) > 2 else None
    with pytest.raises(EngineError, match="told to answer 400"):
        run(vllm(server.url), run_dir=tmp_path, save_steps=1)
    server.fault = lambda *_: None
    found, lines = run(vllm(server.url), run_dir=tmp_path, save_steps=1)
    assert 0 < len(lines) < 4
    same(found, undisturbed()[0])


def test_resumed_run_logs_the_metrics_of_prefetched_completions(tmp_path):
    """The engine's metrics of completions that were prefetched before a checkpoint are logged after a resume."""
    calls = []

    def sampler(num_generations):
        calls.append(None)
        sampler.last_metrics = {"sampler/call": np.float32(len(calls))}
        return canned(num_generations)

    def stop(step, metrics):
        raise StopRun

    run(sampler, run_dir=tmp_path, callbacks=[stop])
    run(sampler, run_dir=tmp_path)
    assert [line["sampler/call"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_stopped_run_does_not_wait_for_pending_completions(server, tmp_path):
    """A stopped run saves and ends despite a hanging server; the resumed run repeats the requests."""
    released = threading.Event()

    def fault(path, body, n):
        if path == "/v1/completions" and body["max_tokens"] == T and len(server.drawn) > 2 * G:
            released.wait(60)

    def stop(step, metrics):
        raise StopRun

    server.fault = fault
    run(vllm(server.url), run_dir=tmp_path, callbacks=[stop], save_steps=None, max_steps=2)
    assert not released.is_set()
    released.set()
    found, _ = run(vllm(server.url), run_dir=tmp_path, save_steps=None, max_steps=2)
    assert int(found.step) == 2
