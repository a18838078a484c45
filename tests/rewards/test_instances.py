"""Environments in processes of their own: the same as at home, and every fault the end of one of them alone."""

import gc
import inspect
import os
import subprocess
import sys
import threading
import time

import isolated_environments as environments
import numpy as np
import pytest
from test_workers import is_alive, wait_for

from grpo_jax.rewards.processes import ProcessLost
from grpo_jax.rewards.workers import isolated, makes_environments
from grpo_jax.turns.tools import as_text, environment_tools

TIMEOUT = 3.0


@pytest.fixture(scope="module")
def desks():
    factory = isolated(environments.Desk, timeout=TIMEOUT)
    yield factory
    factory.close()


@pytest.fixture(scope="module")
def games():
    factory = isolated(environments.Game, timeout=1.0, memory_mb=300, max_output_bytes=10_000)
    yield factory
    factory.close()


@pytest.mark.quick
def test_an_environment_behaves_as_it_does_at_home(desks, games):
    for here, there in ((environments.Game(), games()), (environments.Desk(), desks())):
        assert type(there).__name__ == type(here).__name__
        assert here.reset(a=[1]) == there.reset(a=[1])
        assert [hasattr(there, name) for name in ("respond", "reset", "get_reward", "other")] == [
            hasattr(here, name) for name in ("respond", "reset", "get_reward", "other")
        ]
        own, tools = environment_tools(here), environment_tools(there)
        assert {name: tool.schema for name, tool in own.items()} == {name: tool.schema for name, tool in tools.items()}
        assert list(own) == list(tools)
        inspect.signature(there.reset).bind(target=3)
        assert float(there.get_reward()) == float(here.get_reward())
    assert there.add(n=2, times=3) == there.add(0) == there.total == 6
    assert there.later(text="ü") == "ü", "a method that is awaited there is not here"
    assert (there.double(n=4), there.named(what="is")) == (8, "Desk is")
    with pytest.raises(AttributeError, match="nothing"):
        _ = there.nothing
    game = games()
    game.reset(target=3, prompt="p")
    assert [game.respond(text) for text in ("a", "bye")] == ["1: a", None]
    assert (game.row, game.heard) == ({"target": 3, "prompt": "p"}, ["a", "bye"])


@pytest.mark.quick
@pytest.mark.parametrize("what", ["bytes", "half", "list", "number", "none", "text", "set", "long"])
def test_what_comes_back_reads_as_it_does_at_home(desks, what):
    here, there = environments.Desk().give(what), desks().give(what)
    assert as_text(there) == as_text(here)
    assert type(there).__name__ == {"Number": "float"}.get(type(here).__name__, type(here).__name__)


@pytest.mark.quick
def test_each_has_a_process_of_its_own_without_this_package(desks):
    some = [desks() for _ in range(3)]
    for place, desk in enumerate(some):
        desk.reset()
        desk.add(place)
    assert [desk.total for desk in some] == [0, 1, 2]
    pids, groups, packages, draws = zip(*(desk.process() for desk in some), strict=True)
    assert len({*pids, os.getpid()}) == 4
    assert pids == groups
    assert not any(packages)
    assert len(set(draws)) == 3, "forks of one process do not draw the same"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hang", "took longer than its timeout of 1 s and was killed"),
        ("spin", "took longer than its timeout of 1 s and was killed"),
        ("exit", r"ended its worker process \(exit code 3\)"),
        ("crash", r"ended its worker process \(signal 11\)"),
        ("print", "wrote more than its max_output_bytes of 10000"),
        ("memory", "ran out of memory: more than its memory_mb of 300"),
    ],
)
@pytest.mark.quick
def test_a_limit_ends_one_environment_and_no_other(games, text, message):
    game, other = games(), games()
    other.reset()
    game.reset()
    pid = game._instance._pid
    begin = time.monotonic()
    with pytest.raises(ProcessLost, match=message):
        game.respond(text)
    assert time.monotonic() - begin < 3
    for again in (lambda: game.respond("a"), game.get_reward, lambda: game.heard):
        with pytest.raises(ProcessLost, match=message):
            again()
    assert not is_alive(pid)
    assert other.respond("still here") == "1: still here"
    assert games().total == 0


@pytest.mark.quick
def test_an_exception_is_told_and_ends_nothing(games, capfd):
    game = games()
    game.reset()
    for text, kind in (("raise", "LookupError: lost my way"), ("quit", "SystemExit: 4")):
        with pytest.raises(Exception, match=kind.partition(": ")[2]) as caught:
            game.respond(text)
        assert f"{type(caught.value).__name__}: {caught.value}" == kind
    game.respond("said")
    assert capfd.readouterr().err == "hello from the game\n"
    assert game.heard == ["raise", "quit", "said"]
    with pytest.raises(TypeError, match="respond was given what cannot be sent"):
        game.respond(threading.Lock())


def test_what_it_started_ends_with_it(games, tmp_path):
    game = games()
    game.reset()
    with pytest.raises(ProcessLost):
        game.respond(f"child {tmp_path / 'pid'}")
    assert wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())))


def test_processes_end_when_nobody_needs_them(desks):
    desk = desks()
    pid = desk.process()[0]
    assert is_alive(pid)
    del desk
    gc.collect()
    assert wait_for(lambda: not is_alive(pid))
    own = isolated(environments.Desk, timeout=TIMEOUT)
    desk = own()
    pid = desk.process()[0]
    own.close()
    assert wait_for(lambda: not is_alive(pid))
    with pytest.raises(ProcessLost):
        desk.process()
    assert own().process()[0] != pid, "and the next one makes others"
    own.close()


def test_making_one_imports_nothing_of_the_script_that_runs(tmp_path):
    """Of which JAX would cost each environment two seconds; and a script without a guard may make them."""
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
import isolated_environments as environments
from grpo_jax.rewards.workers import isolated
open({str(tmp_path / "runs")!r}, "a").write("once ")
print(isolated(environments.Desk, timeout=50.0)().process()[2])
"""
    (tmp_path / "my_script.py").write_text(script)
    done = subprocess.run([sys.executable, str(tmp_path / "my_script.py")], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
    assert (tmp_path / "runs").read_text() == "once "


def test_they_end_with_this_process(tmp_path):
    """Killed, while one hangs."""
    code = f"""
import sys, threading, time
sys.path[:0] = {sys.path!r}
import isolated_environments as environments
from grpo_jax.rewards.workers import isolated, makes_environments
game = isolated(environments.Game, timeout=500.0)()
game.reset()
threading.Thread(target=game.respond, args=("hang",)).start()
print(game._instance._pid, game._instance._origin.process.pid, flush=True)
time.sleep(500)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert all(map(is_alive, pids))
    process.kill()
    process.wait()
    process.stdout.close()
    assert wait_for(lambda: not any(map(is_alive, pids)))


@pytest.mark.quick
def test_functions_and_partials_make_them_too():
    for factory, total in ((environments.make_game, 7), (environments.started, 3)):
        own = isolated(factory, timeout=TIMEOUT)
        game = own()
        assert (type(game).__name__, game.total) == ("Game", total)
        own.close()
    own = isolated(environments.Cursed, timeout=TIMEOUT)
    assert [kind.__name__ for kind in type(own()).__mro__[:2]] == ["Cursed", "Game"], "a Cursed is a Game too"
    own.close()
    assert not makes_environments(lambda completions: None)
    assert not makes_environments(np.mean)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (environments.Breaks, Exception, "no such level"),
        (environments.make_local, ValueError, "Local, which cannot be found there: define it at the top level"),
    ],
)
def test_what_cannot_be_made_is_told(factory, error, message):
    own = isolated(factory, timeout=TIMEOUT)
    with pytest.raises(error, match=message):
        own()
    own.close()


def test_what_does_not_go_with_environments_is_refused():
    class Local:
        pass

    with pytest.raises(ValueError, match="'Local', which cannot be sent to a worker process"):
        isolated(Local, timeout=1.0)
    for more in ({"workers": 2}, {"completions_per_call": 1}):
        with pytest.raises(ValueError, match="Game makes environments, and each has a process of its own: leave out"):
            isolated(environments.Game, timeout=1.0, **more)
