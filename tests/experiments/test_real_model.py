"""An iteration of a real model beside TRL: both sides on a checkpoint of a few thousand parameters."""

import json
import sys

import pytest
from test_instruct import model  # noqa: F401

from experiments import real_model

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed, which makes the problems")

TRL = """
import importlib.util, json, sys
model, rows, reward, *flags = sys.argv[1:]
more = []
assert flags == ["--steps", "3", "--length", "4", "--seed", "0", "--lr", "0.001", *more], flags
assert json.load(open(model + "/config.json"))["vocab_size"]
path, name = reward.rsplit(":", 1)
spec = importlib.util.spec_from_file_location("rewards", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
row = json.loads(open(rows).readline())
scores = getattr(module, name)(["no idea"], task=[row["task"]], problem=[row["problem"]])
assert "jax" not in sys.modules
print("RESULT", json.dumps({"first_line_seconds": 2.0, "step_seconds": [1.0] * 3, "rewards": scores * 3,
                            "peak_rss_gb": 1.0}))
"""
"""In the place of TRL's script: it reads what that would, without JAX."""


def test_both_sides_and_their_table(model, tmp_path, capsys):  # noqa: F811
    (tmp_path / "trl.py").write_text(TRL)
    flags = ["--model", model, "--steps", 3, "--length", 4, "--learning-rate", 1e-3, "--run-dir", tmp_path / "run"]
    results = real_model.main([*map(str, flags), "--trl", f"{sys.executable} {tmp_path / 'trl.py'}"])
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    ours = results["grpo_jax"]
    assert len(ours["step_seconds"]) == len(ours["rewards"]) == 3
    assert ours["first_line_seconds"] > ours["step_seconds"][0] > 0
    assert results["trl"]["rewards"] == [0.0] * 3
    assert "| later iterations, median, s |" in capsys.readouterr().out


def test_the_clock_ends_both_sides(model, tmp_path):  # noqa: F811
    (tmp_path / "trl.py").write_text(TRL.replace("more = []", 'more = ["--minutes", "1e-06"]'))
    flags = ["--model", model, "--steps", 3, "--length", 4, "--learning-rate", 1e-3, "--run-dir", tmp_path / "run"]
    clock = ["--minutes", "1e-6", "--trl", f"{sys.executable} {tmp_path / 'trl.py'}"]
    results = real_model.main([*map(str, flags), *clock])
    assert len(results["grpo_jax"]["step_seconds"]) == 1


def test_only_our_side_is_told_to_recompute(model, tmp_path, monkeypatch):  # noqa: F811
    commands, result = [], {"first_line_seconds": 2.0, "step_seconds": [1.0], "rewards": [0.0], "peak_rss_gb": 1.0}
    monkeypatch.setattr(real_model, "measure", lambda command: commands.append(command) or result)
    real_model.main(["--model", str(model), "--recompute", "--run-dir", str(tmp_path / "run"), "--trl", "trl.py"])
    assert ["--recompute" in command for command in commands] == [True, False]
    kept, recomputed = (real_model.make_config(real_model.parse(flags)) for flags in ([], ["--recompute"]))
    assert (kept.gradient_checkpointing, recomputed.gradient_checkpointing) == (False, True)


@pytest.mark.quick
def test_a_reward_that_one_side_never_reaches_has_no_multiple():
    ours = {"first_line_seconds": 30.0, "step_seconds": [9.0] * 6, "rewards": [0.0] * 6, "peak_rss_gb": 5.0}
    theirs = {**ours, "step_seconds": [36.0] * 6, "rewards": [0.0, *[1.0] * 5]}
    assert real_model.reached(theirs, 1.0) == 30 + 5 * 36
    assert real_model.table({"grpo_jax": ours, "trl": theirs}).endswith("| reward 1.000, s | None | 210.0 | |")
