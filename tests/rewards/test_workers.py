"""Reward functions in worker processes: every fault, either way to meet it, and never much longer than the limit."""

import functools
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import worker_functions as functions

from grpo_jax.rewards import processes
from grpo_jax.rewards.calls import compute_rewards
from grpo_jax.rewards.combine import from_row, gated, weighted
from grpo_jax.rewards.contract import PartialRewards, RewardError, check_reward_fns
from grpo_jax.rewards.shipped import format_reward
from grpo_jax.rewards.workers import isolated

TIMEOUT = 2.0
COMPLETIONS = ["a", "bb", "ccc", "dddd"]


def score(fn, *, completions=COMPLETIONS, on_error="raise", **columns):
    rewards, stats = compute_rewards(
        fn,
        prompts=[f"p{index // 2}" for index in range(len(completions))],
        completions=completions,
        completion_ids=[[1]] * len(completions),
        num_generations=2,
        columns={name: [value] * len(completions) for name, value in columns.items()},
        on_error=on_error,
    )
    return rewards.ravel(), stats


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between open and read
        return False
    # A zombie that its new parent has not collected yet has ended too.
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


# --- the fault matrix

FAULTS = {
    "raise": "raised KeyError: 'gold'",
    "hang": r"took longer than its timeout of 2 s and was killed",
    "hang in C": r"took longer than its timeout of 2 s and was killed",
    "hang deaf": r"took longer than its timeout of 2 s and was killed",
    "slow async": r"took longer than its timeout of 2 s and was killed",
    "async raise": "raised KeyError: 'gold'",
    "wrong count": "returned 11 values for 4 completions; exactly one for each is needed",
    "returns None": r"returned None instead of a list",
    "nan": r"returned nan; None is how a function says 'not scored' for prompt 0 of the batch, completion 0",
    "inf": r"returned inf; rewards are finite.* for prompt 0 of the batch, completion 0",
    "huge int": r"returned inf; rewards are finite.* for prompt 0 of the batch, completion 0",
    "string": r"returned '1.0', a str; rewards are numbers.* for prompt 0 of the batch, completion 0",
    "scalar": "returned 1.0, a float; a list with one float or None for each of the 4 completions is needed",
    "complex": "returned 1j, a complex; rewards are numbers",
    "print without end": "wrote more than its max_output_bytes of 4000",
    "print a little too much": "wrote more than its max_output_bytes of 4000",
    "huge text": "returned 'xxxxxxxxxx.*, a str; a list with one float or None",
    "huge values": "returned 'xxxxxxxxxx.*, a str; rewards are numbers",
    "message without end": "raised ValueError: yyyyyyyyyy",
    "generator without end": "returned 5 values for 4 completions",
    "memory": "ran out of memory: more than its memory_mb of 400",
    "sys.exit": "raised SystemExit: 3",
    "exit": r"ended its worker process \(exit code 3\)",
    "kill": r"ended its worker process \(signal 9\)",
    "crash": r"ended its worker process \(signal 11\)",
}
OF_ONE_COMPLETION = {"nan", "inf", "huge int", "string", "complex", "huge values"}


@pytest.fixture(scope="module")
def misbehaving():
    fn = isolated(functions.misbehave, timeout=TIMEOUT, memory_mb=400, max_output_bytes=4000)
    assert score(fn, how="well")[0].tolist() == [1, 2, 3, 4]
    yield fn
    fn.close()


@pytest.mark.parametrize("on_error", ["raise", "none"])
@pytest.mark.parametrize("how", FAULTS)
def test_fault_matrix(misbehaving, how, on_error, capfd):
    started = time.monotonic()
    if on_error == "raise":
        with pytest.raises(RewardError, match=f"^reward function 'misbehave' {FAULTS[how]}"):
            score(misbehaving, how=how)
    else:
        with pytest.warns(RuntimeWarning, match=f"completions scored as missing: .*'misbehave' {FAULTS[how]}"):
            scores, stats = score(misbehaving, how=how, on_error="none")
        expected = [np.nan, 2, 3, 4] if how in OF_ONE_COMPLETION else [np.nan] * 4
        np.testing.assert_array_equal(scores, expected)
        assert stats["rewards/misbehave/errors"] == (1 if how in OF_ONE_COMPLETION else 4)
    assert time.monotonic() - started < TIMEOUT + 2.0
    # What it printed came here, within the limit, and the next call is as good as the first, in the worker and in JAX.
    printed = capfd.readouterr().err
    assert len(printed) <= 4000
    assert ("xxx" in printed) == how.startswith("print")
    assert score(misbehaving, how="well")[0].tolist() == [1, 2, 3, 4]
    assert int(jax.jit(lambda x: x + 1)(1)) == 2


@pytest.mark.quick
def test_none_from_a_worker_is_no_fault(misbehaving):
    scores, stats = score(misbehaving, how="a None")
    np.testing.assert_array_equal(scores, [np.nan, 2, 3, 4])
    assert stats["rewards/misbehave/errors"] == 0


@pytest.mark.quick
def test_the_matrix_has_all_there_is():
    assert FAULTS.keys() | {"a None"} == functions.ACTIONS.keys()


@pytest.mark.quick
def test_the_workers_traceback_is_kept(misbehaving):
    with pytest.raises(RewardError) as caught:
        score(misbehaving, how="raise")
    cause = caught.value.__cause__
    assert type(cause).__name__ == "KeyError"
    assert 'raise KeyError("gold")' in "".join(cause.__notes__)


# --- calls and workers


@pytest.mark.quick
@pytest.mark.parametrize(
    ("keywords", "sizes"),
    [
        ({}, [4, 4, 4, 4]),
        ({"workers": 2}, [2, 2, 2, 2]),
        ({"workers": 3}, [2, 2, 2, 2]),
        ({"completions_per_call": 3}, [3, 3, 3, 1]),
        ({"completions_per_call": 9}, [4, 4, 4, 4]),
    ],
)
def test_the_batch_is_cut_as_asked(keywords, sizes):
    fn = isolated(functions.whole_batch, timeout=10, **keywords)
    scores, _ = score(fn, answer=0.5)
    np.testing.assert_array_equal(
        scores, [100 * size + len(text) + 0.5 for size, text in zip(sizes, COMPLETIONS, strict=True)]
    )


def test_workers_run_side_by_side_and_scores_keep_their_places():
    fn = isolated(functions.slow_when_long, timeout=10, workers=2, completions_per_call=1)
    texts = ["a" * length for length in (6, 1, 2, 1, 3, 1)]
    assert fn(completions=texts) == [6, 1, 2, 1, 3, 1]
    both = isolated(functions.sleeps, timeout=10, workers=2)
    both(completions=["a", "b"])  # started
    started = time.monotonic()
    both(completions=["a", "b"])
    assert time.monotonic() - started < 1.5, "one after the other they sleep 1.6 s"


def test_a_fault_costs_the_completions_of_its_call_only():
    fn = isolated(functions.by_text, timeout=1.5, workers=2, completions_per_call=1, max_output_bytes=1000)
    texts = ["fine", "hang", "raise", "ok", "exit", "a", "nan", "bb"]
    with pytest.warns(RuntimeWarning, match="4 of 8 completions scored as missing: .* for prompt 0 of the batch"):
        scores, _ = score(fn, completions=texts, on_error="none")
    np.testing.assert_array_equal(scores, [4, np.nan, np.nan, 2, np.nan, 1, np.nan, 2])
    with pytest.raises(
        RewardError, match=r"'by_text' ended its .* for prompt 1 of the batch, completion 1 of its group"
    ):
        score(fn, completions=["fine", "a", "ok", "exit"])


@pytest.mark.quick
def test_faults_stand_where_their_completions_do_whatever_the_cut():
    fn = isolated(functions.by_text, timeout=10, completions_per_call=2)
    with pytest.raises(RewardError, match=r"'by_text' returned nan; .* for prompt 1 of the batch, completion 1 of its"):
        score(fn, completions=["a", "bb", "c", "nan"])


@pytest.mark.quick
def test_extras_reach_every_call_whole():
    fn = isolated(functions.by_state, timeout=10, completions_per_call=1)
    inputs = {"prompts": ["p"] * 2, "completions": ["a", "bb"], "completion_ids": [[1]] * 2, "num_generations": 2}
    rewards, _ = compute_rewards(fn, **inputs, extras={"trainer_state": {"step": 7}})
    assert rewards.ravel().tolist() == [8, 9]


@pytest.mark.quick
def test_the_worker_is_a_fresh_interpreter_without_jax(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    fn = isolated(functions.in_the_worker, timeout=10)
    has_jax, pid, group, on_cpu = fn(completions=COMPLETIONS)
    assert (has_jax, on_cpu) == (0, 1)
    assert pid == group != os.getpgid(0)
    assert fn(completions=COMPLETIONS)[1] == pid, "the worker stays for later calls"


@pytest.mark.quick
def test_no_fork_of_this_process(monkeypatch):
    # JAX warns of os.fork by a hook that runs at it, and warnings are errors here; so is this.
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    assert isolated(functions.length, timeout=10)(completions=["a"]) == [1]


@pytest.mark.quick
def test_what_the_function_prints_goes_to_standard_error(capsys):
    fn = isolated(functions.prints, timeout=10, max_output_bytes=1000)
    for text in ("the first", "one"):
        fn(completions=[text])
        assert capsys.readouterr().err == f"said {text}\n"


@pytest.mark.quick
def test_a_worker_that_died_while_idle_is_replaced_without_a_fault():
    fn = isolated(functions.in_the_worker, timeout=10)
    pid = int(fn(completions=COMPLETIONS)[1])
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not is_alive(pid))
    assert fn(completions=COMPLETIONS)[1] != pid


@pytest.mark.quick
def test_a_worker_that_dies_before_it_has_read_the_request_is_replaced_without_a_fault(monkeypatch):
    """Stopped, it looks alive when the request is sent, and is killed before it reads it."""
    fn = isolated(functions.in_the_worker, timeout=10)
    pid = int(fn(completions=COMPLETIONS)[1])
    os.kill(pid, signal.SIGSTOP)
    begin = processes.Worker.begin

    def begin_and_kill(self, *args):
        begin(self, *args)
        if self.process.pid == pid:
            os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(processes.Worker, "begin", begin_and_kill)
    assert fn(completions=COMPLETIONS)[1] != pid


@pytest.mark.quick
def test_workers_that_die_before_each_request_are_a_fault_after_the_second(monkeypatch):
    fn = isolated(functions.in_the_worker, timeout=10)
    killed = []

    def kill_and_begin(self, job, requests, timeout):
        killed.append(self.process.pid)
        os.kill(self.process.pid, signal.SIGKILL)
        self.job, self.begun, self.deadline = job, False, time.monotonic() + timeout

    monkeypatch.setattr(processes.Worker, "begin", kill_and_begin)
    with pytest.raises(PartialRewards, match="signal 9"):
        fn(completions=COMPLETIONS)
    assert len(set(killed)) == 2


@pytest.mark.quick
def test_a_signal_to_all_processes_of_a_run_lets_the_workers_finish():
    """The run finishes its step, for which it needs the rewards; what the function starts ends as ever."""
    assert isolated(functions.is_told_to_end, timeout=10)(completions=["a"]) == [-signal.SIGTERM]


def test_processes_that_the_function_started_are_killed_with_it(tmp_path):
    pid_file = tmp_path / "pid"
    fn = isolated(functions.starts_a_process, timeout=1.5)
    with pytest.raises(RewardError, match="took longer"):
        score(fn, pid_file=str(pid_file))
    assert wait_for(lambda: not is_alive(int(pid_file.read_text())))


def test_workers_end_with_the_function():
    fn = isolated(functions.in_the_worker, timeout=10)
    pid = int(fn(completions=COMPLETIONS)[1])
    assert is_alive(pid)
    del fn
    gc.collect()
    assert not is_alive(pid)


@pytest.mark.quick
def test_closing_ends_the_workers_and_a_later_call_starts_new_ones():
    fn = isolated(functions.in_the_worker, timeout=10)
    pid = int(fn(completions=COMPLETIONS)[1])
    fn.close()
    assert not is_alive(pid)
    assert fn(completions=COMPLETIONS)[1] != pid


def test_ctrl_c_leaves_no_reply_behind_for_the_next_call(monkeypatch):
    fn = isolated(functions.slow_when_long, timeout=10)
    assert fn(completions=["a"]) == [1]

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("multiprocessing.connection.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fn(completions=["aaaa"])
    monkeypatch.undo()
    assert fn(completions=["aa"]) == [2]


def test_workers_end_when_the_parent_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "from worker_functions import writes_its_pid_and_hangs as fn; from grpo_jax.rewards.workers import isolated; "
        f"isolated(fn, timeout=600)(completions=['a'], pid_file=[{str(pid_file)!r}])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        assert wait_for(lambda: pid_file.exists() and pid_file.read_text(), seconds=30)
        assert is_alive(int(pid_file.read_text()))
    finally:
        parent.kill()
        parent.wait()
    assert wait_for(lambda: not is_alive(int(pid_file.read_text())))


# --- as a reward function among others


@pytest.mark.quick
def test_it_asks_for_what_the_function_asks_for():
    fn = isolated(functions.whole_batch, timeout=10)
    with pytest.raises(ValueError, match="'whole_batch' needs the argument 'answer'"):
        check_reward_fns(fn, ["prompt"])
    check_reward_fns(fn, ["prompt", "answer"])


def test_inside_and_around_combinators():
    fn = isolated(functions.length, timeout=10)
    assert score(weighted(gated(format_reward("[bc]+"), fn), 2.0))[0].tolist() == [0, 4, 6, 0]
    around = isolated(weighted(functions.length, 3.0), timeout=10)
    assert score(around)[0].tolist() == [3, 6, 9, 12]


def test_from_row_inside_keeps_the_scores_beside_a_fault():
    fn = isolated(from_row(functions.row_of_worker), timeout=10)
    with pytest.raises(PartialRewards) as caught:
        fn(prompts=["p"] * 3, completions=["x"] * 3, by=[1, 0, 3])
    assert caught.value.values == [6, None, 2]
    assert caught.value.faults == {1: "raised ZeroDivisionError: division by zero"}
    together = isolated(from_row(functions.row_of_worker_async), timeout=1.4)
    assert together(prompts=["p"] * 8, completions=["x"] * 8, by=list(range(8))) == list(range(8))


# --- what cannot be


def decorated(fn):
    @functools.wraps(fn)
    def wrapper(**inputs):
        return fn(**inputs)

    return wrapper


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fn", "keywords", "message"),
    [
        (lambda completions: 0, {}, "fn is 'lambda', which cannot be sent .*: define it at the top level of a module"),
        (decorated(functions.length), {}, "fn is 'length', which cannot be sent .* not as a decorator"),
        (functions.length, {"timeout": 0}, "timeout is 0: give a positive number of seconds"),
        (functions.length, {"timeout": float("nan")}, "timeout is nan: give"),
        (functions.length, {"timeout": float("inf")}, "timeout is inf: give"),
        (functions.length, {"timeout": None}, "timeout is None: give"),
        (functions.length, {"memory_mb": -1}, "memory_mb is -1: give a positive whole number"),
        (functions.length, {"max_output_bytes": 0.5}, "max_output_bytes is 0.5: give a positive whole number"),
        (functions.length, {"workers": 0}, "workers is 0: give a positive whole number"),
        (functions.length, {"completions_per_call": 0}, "completions_per_call is 0: give"),
    ],
)
def test_isolated_refuses(fn, keywords, message):
    with pytest.raises(ValueError, match=message):
        isolated(fn, **({"timeout": 1.0} | keywords))


@pytest.mark.quick
def test_an_argument_that_cannot_be_sent_is_named():
    fn = isolated(functions.whole_batch, timeout=10)
    with pytest.raises(RewardError, match="argument 'answer' cannot be sent to the worker process of 'whole_batch'"):
        fn(completions=["a"], answer=[lambda: 1])


def test_a_function_that_the_worker_cannot_import(tmp_path, monkeypatch):
    module = tmp_path / "here_and_gone.py"
    module.write_text("def reward(completions):\n    return [0.0]\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    fn = isolated(importlib.import_module("here_and_gone").reward, timeout=10)
    module.write_text("raise OSError('no such thing on this machine')", encoding="utf-8")
    with pytest.raises(RewardError, match="could not load it \\(OSError: no such thing on this machine\\)"):
        fn(completions=["a"])
    module.write_text("import os; os._exit(5)", encoding="utf-8")
    with pytest.raises(RewardError, match="worker process ended with code 5: if the function stands in the script"):
        fn(completions=["a"])


SCRIPT = """
from grpo_jax.rewards.workers import isolated

def reward(completions):
    return [len(text) for text in completions]

{guard}
print("scored", isolated(reward, timeout=10)(completions=["a", "bb"]))
"""


def run_python(*arguments, cwd):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(cwd), *sys.path])}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("how", ["file", "module"])
def test_functions_of_the_script_itself(tmp_path, how):
    (tmp_path / "my_script.py").write_text(
        SCRIPT.format(guard="if __name__ == '__main__':\n  ").replace("\nprint", "print")
    )
    done = run_python(*(["my_script.py"] if how == "file" else ["-m", "my_script"]), cwd=tmp_path)
    assert done.stdout == "scored [1.0, 2.0]\n", done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path):
    (tmp_path / "my_script.py").write_text(SCRIPT.format(guard=""))
    done = run_python("my_script.py", cwd=tmp_path)
    assert done.returncode != 0
    assert "put what starts the training under if __name__ == '__main__':" in done.stderr


def test_functions_of_a_notebook_are_refused_with_the_way_out(tmp_path):
    done = run_python("-c", SCRIPT.format(guard=""), cwd=tmp_path)
    assert "ValueError: fn is 'reward', defined in a notebook or at a prompt" in done.stderr
    assert "%%writefile my_rewards.py" in done.stderr


def test_nothing_is_left_open():
    fn = isolated(functions.length, timeout=10, max_output_bytes=100)
    fn(completions=["a"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        fn.close()
        del fn
        gc.collect()
