"""An iteration of a real model beside TRL: both sides on a checkpoint of a few thousand parameters."""

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


@pytest.mark.quick
def test_a_reward_that_one_side_never_reaches_has_no_multiple():
    ours = {"first_line_seconds": 30.0, "step_seconds": [9.0] * 6, "rewards": [0.0] * 6, "peak_rss_gb": 5.0}
    theirs = {**ours, "step_seconds": [36.0] * 6, "rewards": [0.0, *[1.0] * 5]}
    assert real_model.reached(theirs, 1.0) == 30 + 5 * 36
    assert real_model.table({"grpo_jax": ours, "trl": theirs}).endswith("| reward 1.000, s | None | 210.0 | |")
