"""A trace of some steps: it is there, of the steps that were asked for, and whole when a run ends early."""

import jax
import pytest
from test_train import run

from grpo_jax.watch.profile import FOLDER, Profile


@pytest.fixture
def calls(monkeypatch):
    """What the profiler was asked to do."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", None)))
    return calls


@pytest.mark.quick
@pytest.mark.parametrize(("last", "expected"), [(9, {"start": 4, "stop": 7}), (5, {"start": 4, "stop": None}), (3, {})])
def test_the_steps_that_were_asked_for(tmp_path, calls, last, expected):
    seen = {}
    with Profile(tmp_path, 3) as profile:
        profile.begins_at(4)
        for step in range(last + 1):
            before = len(calls)
            profile.at(step)
            seen.update({name: step for name, _ in calls[before:]})
    names = [name for name, _ in calls]
    assert names == list(expected), "begun once and ended once, also where the run ends first"
    assert seen == {name: step for name, step in expected.items() if step is not None}


@pytest.mark.quick
def test_no_trace_where_none_is_asked_for(tmp_path, calls):
    for given in ((tmp_path, None), (None, 2)):
        with Profile(*given) as profile:
            profile.at(0)
    assert not calls


def test_a_run_leaves_a_trace_that_tensorboard_finds(tmp_path):
    run(run_dir=tmp_path, max_steps=5, profile_steps=2)
    traces = list((tmp_path / FOLDER).glob("plugins/profile/*/*.xplane.pb"))
    assert len(traces) == 1
    assert traces[0].stat().st_size > 10_000


@pytest.mark.quick
def test_a_trace_without_a_directory_is_refused():
    with pytest.raises(ValueError, match="profile_steps = 2: there is nowhere to write the trace; give run_dir"):
        run(profile_steps=2)
