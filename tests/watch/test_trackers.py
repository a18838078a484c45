"""Each tracker receives the finite metrics of every logged step and is closed."""

import importlib.machinery
import math
import sys
import types

import pytest

from grpo_jax import GRPOConfig
from grpo_jax.watch import trackers

pytestmark = pytest.mark.quick


def fake(name):
    """Return a stand-in for a package with `init`, like wandb or trackio, that records calls in `done`."""
    package, done = types.ModuleType(name), []
    package.__spec__ = importlib.machinery.ModuleSpec(name, None)
    package.done, package.run, package.id, package.name = done, None, "id-7", "brave-sun"
    package.init = lambda **settings: done.append(("init", settings)) or package
    package.log = lambda metrics, step=None: done.append(("log", step, metrics))
    package.finish = lambda: done.append(("finish",))
    return package


@pytest.fixture
def packages(monkeypatch):
    """Fakes of the three tracker packages."""
    fakes = {name: fake(name) for name in ("tensorboardX", "wandb", "trackio")}
    done = fakes["tensorboardX"].done
    fakes["tensorboardX"].SummaryWriter = lambda **settings: types.SimpleNamespace(
        add_scalar=lambda *value: done.append(value), flush=lambda: None, close=lambda: done.append(("close", settings))
    )
    for name, package in fakes.items():
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fakes


def report(config, run_dir, step=0):
    opened = trackers.open_trackers(config, run_dir, step=step)
    for tracker in opened:
        tracker(step + 1, {"reward": 0.5, "kl": math.nan})
        tracker.__exit__()
    return len(opened)


@pytest.mark.parametrize("names", [["tensorboard", "wandb", "trackio"], "all"], ids=str)
def test_trackers_use_the_run_name_and_a_resumed_run_continues_it(names, packages, tmp_path):
    config = GRPOConfig(report_to=names, run_name="sums-1", project="sums")
    assert report(config, tmp_path) == 3
    same = {"project": "sums", "name": "sums-1", "config": config.to_dict()}
    logged, files = [("log", 1, {"reward": 0.5}), ("finish",)], str(tmp_path / "tensorboard")
    assert packages["wandb"].done == [("init", same | {"id": None, "resume": None}), *logged]
    assert packages["trackio"].done == [("init", same | {"resume": "allow"}), *logged]
    assert packages["tensorboardX"].done == [("reward", 0.5, 1), ("close", {"logdir": files, "purge_step": 0})]
    packages["wandb"].id, packages["trackio"].name = "another", "another"
    report(config, tmp_path, step=4)
    assert packages["wandb"].done[-3][1] == same | {"id": "id-7", "resume": "allow"}
    assert packages["trackio"].done[-3][1] == same | {"name": "brave-sun", "resume": "allow"}
    assert packages["tensorboardX"].done[-1] == ("close", {"logdir": files, "purge_step": 5})
    report(config, tmp_path)  # a new run
    assert packages["wandb"].done[-3][1]["id"] is None


def test_wandb_environment_and_unavailable_trackers(packages, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "from the shell")
    assert report(GRPOConfig(report_to="wandb", project="sums"), None) == 1
    assert packages["wandb"].done.pop(0)[1]["project"] == "from the shell"
    packages["wandb"].run = packages["wandb"]
    report(GRPOConfig(report_to="wandb"), tmp_path)
    assert packages["wandb"].done[-1] == ("log", 1, {"reward": 0.5}), "the active run is left open"
    with pytest.raises(ValueError, match="report_to = 'tensorboard' requires a directory"):
        trackers.check_trackers(GRPOConfig(report_to="tensorboard"), None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb is required but cannot be imported"):
        trackers.check_trackers(GRPOConfig(report_to=["trackio", "wandb"]), tmp_path)
    assert trackers.check_trackers(GRPOConfig(report_to="all"), tmp_path) == ["tensorboard", "trackio"]
    assert trackers.check_trackers(GRPOConfig(), None) == []
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(ValueError, match="ipython is required but cannot be imported"):
        trackers.live_plot()
