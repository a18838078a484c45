"""Reward functions in worker processes: failures, limits, their effect on other completions, and refused functions."""

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import worker_functions as functions

from grpo_jax.rewards.calls import compute_rewards
from grpo_jax.rewards.contract import RewardError, RewardWorkerError, TrainerState, check_reward_fns
from grpo_jax.rewards.outcomes import PartialRewards
from grpo_jax.rewards.shipped import from_row
from grpo_jax.rewards.workers import isolated

TIMEOUT = 1.0
COMPLETIONS = ["a", "bb", "ccc", "dddd"]


def score(fn, *, completions=COMPLETIONS, on_error="raise", trainer_state=None, **columns):
    rewards = compute_rewards(
        fn, prompts=[f"p{index // 2}" for index in range(len(completions))], completions=completions,
        completion_ids=[[1]] * len(completions), num_generations=2,
        columns={name: [value] * len(completions) for name, value in columns.items()}, on_error=on_error,
        trainer_state=trainer_state,
    )  # fmt: skip
    return rewards.values.ravel(), rewards.stats


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between open and read
        return False
    # A zombie that its new parent has not reaped yet has ended too.
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


LATE = r"took longer than its timeout of 1 s and was killed"
OF_ALL = {
    "raise": "raised KeyError: 'gold'", "hang in C": LATE, "hang deaf": LATE, "slow async": LATE,
    "huge text": "must return a list with a float or None .* got 'xxxxxxxxxx",
    "message without end": "raised ValueError: yyyyyyyyyy", "memory": r"ran out of memory \(memory_mb=400\)",
    "exit": r"ended its worker process \(exit code 3\)", "kill": r"ended its worker process \(signal 9\)",
    "crash": r"ended its worker process \(signal 11\)",
}  # fmt: skip
OF_ONE = {"nan": r"returned nan instead of a number or None for prompt 0 of the batch, completion 0"}


@pytest.fixture(scope="module")
def misbehaving():
    fn = isolated(functions.misbehave, timeout=TIMEOUT, memory_mb=400)
    assert score(fn, how="well")[0].tolist() == [1, 2, 3, 4]
    yield fn
    fn.close()


@pytest.mark.parametrize("how", [*OF_ALL, *OF_ONE])
def test_fault_matrix(misbehaving, how):
    """Every fault is named, respects the timeout, and leaves the next call unaffected."""
    message, started = (OF_ALL | OF_ONE)[how], time.monotonic()
    with pytest.warns(RuntimeWarning, match=f"no score for . of 4 completions: .*'misbehave' {message}"):
        scores, stats = score(misbehaving, how=how, on_error="none")
    assert time.monotonic() - started < TIMEOUT + 3.0
    np.testing.assert_array_equal(scores, [np.nan, 2, 3, 4] if how in OF_ONE else [np.nan] * 4)
    assert stats["rewards/misbehave/errors"] == (1 if how in OF_ONE else 4)
    assert score(misbehaving, how="well")[0].tolist() == [1, 2, 3, 4]


def test_exception_keeps_its_traceback_and_none_is_not_an_error(misbehaving):
    with pytest.raises(RewardError, match=r"^reward function 'misbehave' raised KeyError: 'gold'") as caught:
        score(misbehaving, how="raise")
    cause = caught.value.__cause__
    assert type(cause).__name__ == "KeyError"
    assert 'throw(KeyError("gold"))' in "".join(cause.__notes__)
    scores, stats = score(misbehaving, how="a None")
    np.testing.assert_array_equal(scores, [np.nan, 2, 3, 4])
    assert stats["rewards/misbehave/errors"] == 0


def test_fault_affects_only_the_completions_of_its_call():
    fn = isolated(functions.by_text, timeout=1.0, workers=2, completions_per_call=1)
    texts = ["fine", "hang deaf", "raise", "ok", "exit", "a", "nan", "bb"]
    with pytest.warns(RuntimeWarning, match="no score for 4 of 8 completions: .* for prompt 0 of the batch"):
        scores, _ = score(fn, completions=texts, on_error="none")
    np.testing.assert_array_equal(scores, [4, np.nan, np.nan, 2, np.nan, 1, np.nan, 2])
    with pytest.raises(RewardError, match=r"'by_text' ended its .* for prompt 1 of the batch, completion 1 of its gr"):
        score(fn, completions=["fine", "a", "ok", "exit"])
    fn.close()


def test_batch_is_split_and_each_call_receives_the_trainer_state():
    fn = isolated(functions.whole_batch, timeout=10, workers=2)
    for per_call, sizes in ((None, [2, 2, 2, 2]), (3, [3, 3, 3, 1])):
        fn._per_call = per_call  # `completions_per_call`, with the same workers
        scores, _ = score(fn, answer=0.5, trainer_state=TrainerState(global_step=7))
        expected = [100 * size + len(text) + 7.5 for size, text in zip(sizes, COMPLETIONS, strict=True)]
        np.testing.assert_array_equal(scores, expected)
    fn.close()


def test_workers_are_fresh_interpreters_without_jax_and_are_replaced(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    # JAX only warns about os.fork, from an at-fork hook; here the fork itself must fail the test.
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    fn = isolated(functions.in_the_worker, timeout=10)
    has_jax, pid, group, on_cpu = map(int, fn(completions=COMPLETIONS))
    assert (has_jax, on_cpu) == (0, 1)
    assert pid == group != os.getpgid(0)
    assert fn(completions=COMPLETIONS)[1] == pid, "later calls must reuse the worker"

    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not is_alive(pid))
    second = int(fn(completions=COMPLETIONS)[1])
    assert second != pid, "a worker that died while idle must be replaced"

    fn.close()
    assert not is_alive(second)
    third = int(fn(completions=COMPLETIONS)[1])
    assert third != second, "a call after close must start a new worker"
    del fn
    gc.collect()
    assert wait_for(lambda: not is_alive(third)), "the worker must end with its function"


def test_workers_ignore_termination_signals(misbehaving):
    """Workers ignore a SIGTERM, since the run needs their rewards to finish its step; their child processes do not."""
    assert score(misbehaving, how="told to end")[0].tolist() == [-signal.SIGTERM] * 4


def test_child_processes_are_killed_with_their_worker(tmp_path):
    fn = isolated(functions.starts_a_process, timeout=1.0)
    for text, message in (("hang", "took longer"), ("exit", "ended its worker process")):
        pid_file = tmp_path / text
        with pytest.raises(RewardError, match=message):
            score(fn, completions=[text, text], pid_file=str(pid_file))
        assert wait_for(lambda path=pid_file: not is_alive(int(path.read_text())))
    fn.close()


def test_ctrl_c_leaves_no_reply_for_the_next_call(misbehaving, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        misbehaving(completions=["aaaa"], how=["well"])
    monkeypatch.undo()
    assert misbehaving(completions=["aa"], how=["well"]) == [2]


def test_workers_end_when_the_parent_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "from worker_functions import writes_its_pid_and_hangs as fn; from grpo_jax.rewards.workers import isolated; "
        f"isolated(fn, timeout=600)(completions=['a'], pid_file=[{str(pid_file)!r}])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        assert wait_for(lambda: pid_file.exists() and pid_file.read_text(), seconds=60)
        assert is_alive(int(pid_file.read_text()))
    finally:
        parent.kill()
        parent.wait()
    assert wait_for(lambda: not is_alive(int(pid_file.read_text())))


@pytest.mark.quick
def test_isolated_takes_the_arguments_of_its_function():
    fn = isolated(functions.whole_batch, timeout=10)
    with pytest.raises(ValueError, match="'whole_batch' needs the argument 'answer'"):
        check_reward_fns(fn, ["prompt"])
    check_reward_fns(fn, ["prompt", "answer"])
    with pytest.raises(RewardError, match="the arguments to 'whole_batch' cannot be sent to a worker process"):
        fn(completions=["a"], answer=[lambda: 1])


def test_isolated_functions_of_rows_are_scored_concurrently():
    around = isolated(from_row(functions.row_of_worker), timeout=1.4)
    with pytest.raises(PartialRewards) as caught:
        around(prompts=["p"] * 8, completions=["x"] * 8, by=[1, 0, 3, 6, 1, 1, 1, 1])
    assert caught.value.values == [6, None, 2, 1, 6, 6, 6, 6]
    assert caught.value.failures == {1: "raised ZeroDivisionError: division by zero"}
    around.close()


@pytest.mark.quick
@pytest.mark.parametrize(("fn", "keywords", "message"), [
    (lambda completions: 0, {}, "fn='lambda' cannot be sent .*; define it at the top level"),
    (functions.length, {"timeout": 0}, "timeout must be positive and finite; got 0"),
    (functions.length, {"memory_mb": -1}, "memory_mb must be positive and finite; got -1"),
])  # fmt: skip
def test_isolated_refuses_invalid_arguments(fn, keywords, message):
    with pytest.raises(ValueError, match=message):
        isolated(fn, **({"timeout": 1.0} | keywords))


def test_a_function_that_workers_cannot_import_ends_the_run(tmp_path, monkeypatch):
    module = tmp_path / "here_and_gone.py"
    module.write_text("def reward(completions):\n    return [0.0]\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    fn = isolated(importlib.import_module("here_and_gone").reward, timeout=10)
    for source, message in (
        (
            "raise OSError('no such thing here')",
            r"a worker process could not load the function \(OSError: no such thing here\)\n.*Traceback",
        ),
        ("import os; os._exit(5)", "the worker process ended or did not load the function within 60 s"),
    ):
        module.write_text(source, encoding="utf-8")
        with pytest.raises(RewardWorkerError, match=rf"(?s)reward function 'reward': {message}"):
            score(fn, on_error="none")


@pytest.mark.quick
def test_function_defined_in_the_running_script_is_refused(monkeypatch):
    def reward(completions): ...

    reward.__module__, reward.__qualname__ = "__main__", "reward"
    monkeypatch.setattr(sys.modules["__main__"], "reward", reward, raising=False)
    with pytest.raises(ValueError, match="fn='reward' is defined in the running script or notebook"):
        isolated(reward, timeout=1.0)
