"""Streams: a batch shared out to threads is the same batch."""

import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_model, tiny_policy

from grpo_jax import Batch, GRPOConfig, add_lora, generate, make_prompts, rollout, streams
from grpo_jax import update as module
from grpo_jax.state import create_state
from grpo_jax.update import score, update

LISTS = [[3, 4, 5], [6], [7, 8], [9, 3]]


def shared_out(monkeypatch, into):
    """Make every batch go into this many streams."""
    for user in (rollout, module):
        monkeypatch.setattr(user, "count_streams", lambda *_: into)


def test_streams_divide_the_groups_and_leave_each_enough_rows(monkeypatch):
    monkeypatch.setattr(streams.os, "sched_getaffinity", lambda _: range(4), raising=False)
    params = {"w": jnp.ones(3)}
    assert streams.count_streams(params, 8, 128) == 4
    assert streams.count_streams(params, 6, 126) == 3
    assert streams.count_streams(params, 7, 700) == 1
    assert streams.count_streams(params, 8, 64) == 2
    assert streams.count_streams(params, 8, 63) == 1
    assert streams.count_streams(params, 1, 1000) == 1
    assert streams.count_streams(params, 8, 8, at_least=2) == 4


def test_params_on_several_devices_are_left_to_the_compiler():
    mesh = jax.make_mesh((4,), ("data",))
    spread = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P()))
    assert streams.count_streams({"w": spread}, 8, 10_000) == 1


def test_every_part_has_a_thread_of_its_own():
    meet = threading.Barrier(3, timeout=30)  # passes only if three parts are under way at once
    assert streams.run_in_streams(lambda i: (meet.wait() >= 0, i * i), [1, 2, 3]) == [(True, 1), (True, 4), (True, 9)]


def test_a_failure_in_a_part_is_a_failure_of_all():
    def part(i):
        if i == 1:
            raise ValueError("part 1")
        return i

    with pytest.raises(ValueError, match="part 1"):
        streams.run_in_streams(part, [0, 1])


@pytest.mark.parametrize("into", [2, 4])
def test_samples_are_those_of_one_stream(monkeypatch, into):
    model, params = tiny_model()
    results = []
    for n in (1, into):
        shared_out(monkeypatch, n)
        settings = {"num_generations": 4, "max_completion_length": 40, "eos_token_ids": (5, 7)}
        results.append(generate(model, params, make_prompts(LISTS), jax.random.key(0), **settings))
    one, many = results
    np.testing.assert_array_equal(one.tokens, many.tokens)
    np.testing.assert_array_equal(one.mask, many.mask)
    np.testing.assert_array_equal(one.ended, many.ended)
    np.testing.assert_allclose(one.log_probs, many.log_probs, atol=1e-5)


def make_batch(g=4, t=6):
    keys = jax.random.split(jax.random.key(0), 4)
    return Batch(
        prompts=make_prompts(LISTS),
        tokens=jax.random.randint(keys[0], (4, g, t), 0, 24),
        mask=jnp.arange(t).reshape(1, 1, t) < jax.random.randint(keys[1], (4, g, 1), 1, t + 1),
        advantages=jax.random.normal(keys[2], (4, g)),
        sampling_log_probs=-3 + 0.3 * jax.random.normal(keys[3], (4, g, t)),
        ref_log_probs=-3 + 0.3 * jax.random.normal(keys[1], (4, g, t)),
    )


@pytest.mark.parametrize("micro", [(1, 4), (1, 2)])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "entropy_coef": 0.1},
        {"loss_type": "bnpo", "top_entropy_quantile": 0.5},
        {"use_adaptive_entropy": True, "entropy_target": 5.0},
    ],
)
def test_an_update_is_that_of_one_stream(monkeypatch, settings, micro):
    model, params = tiny_model()
    config = GRPOConfig(beta=0.1, max_completion_length=6, max_grad_norm=0, **settings)
    optimizer = optax.sgd(1.0)
    results = []
    for n in (1, 2, 4):
        shared_out(monkeypatch, n)
        state = create_state(jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0), entropy_coef=0.1)
        keywords = {"model": model, "optimizer": optimizer, "config": config, "on_policy": False, "micro": micro}
        results.append(update(state, make_batch(), **keywords))
    for state, metrics in results[1:]:
        chex.assert_trees_all_close(results[0][0].params, state.params, atol=1e-6)
        assert set(metrics) == set(results[0][1])
        chex.assert_trees_all_close(results[0][1], metrics, rtol=1e-4, atol=1e-6)


def test_dropout_is_that_of_one_stream(monkeypatch):
    policy = add_lora(tiny_policy(), rank=4, dropout=0.5, key=jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.1, policy.params)  # a fresh adapter's B is zero: nothing would be dropped
    config = GRPOConfig(max_completion_length=6, max_grad_norm=0)
    optimizer = optax.sgd(1.0)
    results = []
    for n in (1, 2):
        shared_out(monkeypatch, n)
        state = create_state(jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0))
        keywords = {"model": policy.model, "optimizer": optimizer, "config": config, "on_policy": False}
        results.append(update(state, make_batch(), micro=(1, 4), **keywords)[0])
    chex.assert_trees_all_close(results[0].params, results[1].params, atol=1e-6)
    assert optax.tree.norm(optax.tree.sub(params, results[0].params)) > 1e-3


@pytest.mark.parametrize("into", [2, 4])
def test_scores_are_those_of_one_stream(monkeypatch, into):
    model, params = tiny_model()
    batch = make_batch()
    results = []
    for n in (1, into):
        shared_out(monkeypatch, n)
        arrays = (params, batch.prompts, batch.tokens, batch.mask)
        results.append(score(*arrays, model=model, config=GRPOConfig(max_completion_length=6), micro=(1, 4)))
    np.testing.assert_allclose(*results, atol=1e-5)
