"""Threads: a batch that is split across threads gives the same result."""

import contextlib
import importlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import assert_same
from tiny import tiny_model

from grpo_jax import generate, make_prompts
from grpo_jax.models import threads
from grpo_jax.rollout.decode import decode, prefill
from grpo_jax.rollout.decode_plan import decode_threads

generate_module = importlib.import_module("grpo_jax.rollout.generate")

LISTS = [[3, 4, 5], [6], [7, 8], [9, 3]]


@pytest.mark.quick
def test_number_of_threads_depends_on_cores_parts_and_params(monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(4), raising=False)
    params = {"w": jnp.ones(3)}
    assert [threads.count_threads(params, parts) for parts in (0, 1, 3, 4, 9)] == [1, 1, 3, 4, 4]
    shapes = [(8, 8), (6, 10), (7, 100), (8, 4), (9, 3), (1, 1000)]
    assert [decode_threads(params, *shape) for shape in shapes] == [4, 3, 1, 2, 1, 1]
    spread = jax.device_put(jnp.ones(4), jax.NamedSharding(jax.make_mesh((4,), ("data",)), jax.P()))
    assert threads.count_threads({"w": spread}, 8) == 1, "parallelism is left to the compiler"
    monkeypatch.setattr(threads, "CACHE_BYTES", 40)
    assert [threads.count_threads({"a": jnp.ones(4), "b": jnp.ones(n)}, 9) for n in (6, 7)] == [4, 1]


@pytest.mark.quick
def test_every_part_has_its_own_thread_and_failures_are_raised(monkeypatch):
    meet = threading.Barrier(3, timeout=30)  # passes only if three parts run at the same time
    assert threads.run_in_threads(lambda i: (meet.wait() >= 0, i * i), [1, 2, 3]) == [(True, 1), (True, 4), (True, 9)]
    with pytest.raises(ZeroDivisionError):
        threads.run_in_threads(lambda i: 1 // i, [1, 0])
    monkeypatch.setattr(jax, "block_until_ready", lambda _: pytest.fail("waited although there is one part"))
    assert threads.run_in_threads(lambda part: part + 1, [np.ones(())]) == [2]


def test_samples_equal_those_of_one_thread(monkeypatch):
    model, params = tiny_model()
    results = []
    for n in (1, 2):
        monkeypatch.setattr(generate_module, "decode_threads", lambda params, groups, width, n=n: min(n, groups))
        settings = {"num_generations": 4, "max_completion_length": 24, "eos_token_ids": (5, 7)}
        results.append(generate(model, params, make_prompts(LISTS), jax.random.key(0), **settings))
    assert_same(*results)


@pytest.mark.quick
def test_threads_that_share_a_program_compile_it_once():
    traced = []

    @threads.compile_once_across_threads
    @jax.jit
    def program(x):
        traced.append(x.shape)
        time.sleep(0.05)  # long enough for the other threads to arrive
        return x + 1

    results = threads.run_in_threads(program, [jnp.zeros(3), jnp.ones(3), jnp.zeros(3)])
    assert [x.tolist() for x in results] == [[1.0] * 3, [2.0] * 3, [1.0] * 3]
    assert traced == [(3,)]
    assert all(isinstance(of_a_rollout, threads.compile_once_across_threads) for of_a_rollout in (prefill, decode))


@pytest.mark.quick
def test_background_work_runs_immediately_and_its_failure_is_raised():
    meet, ended = threading.Barrier(2, timeout=30), []

    def work():
        meet.wait()
        ended.append(threading.current_thread() is not threading.main_thread())
        return 7

    with threads.in_background(work) as coming:
        meet.wait()  # passes only if both run at the same time
    assert (ended, coming.result()) == ([True], 7)
    with pytest.raises(ZeroDivisionError), threads.in_background(lambda: 1 // 0) as coming:
        coming.result()
    go = threading.Event()
    with contextlib.suppress(ValueError), threads.in_background(lambda: go.wait(30) and ended.append(1)):
        go.set()
        raise ValueError
    assert ended[-1] == 1, "all threads must end before their arrays are freed"


@pytest.mark.quick
def test_background_work_uses_the_settings_of_the_calling_thread():
    product = jax.jit(lambda x: x @ x)

    def lowered():
        return product.lower(jnp.ones((2, 2))).as_text().count("HIGHEST"), jnp.ones(1).devices()

    highest, third = jax.default_matmul_precision("highest"), jax.default_device(jax.devices()[3])
    with highest, third, threads.in_background(lowered) as coming:
        here = lowered()
    assert coming.result() == here == (2, {jax.devices()[3]})
