"""Each hint is reported once, when its condition is first met, names existing fields, and is silent in good runs."""

import json
import math
import re
from pathlib import Path

import jax
import pytest

from grpo_jax import GRPOConfig
from grpo_jax.watch.hints import FIRST, HINTS, KL_WINDOW, SAMPLER_GAP, SAMPLER_GAP_FLOAT32, MetricHints

pytestmark = pytest.mark.quick

CONFIG = GRPOConfig(beta=0.1)
# Logs of two real runs, `experiments.sort_digits` and `experiments.countdown`, with ten optimizer steps per line.
HEALTHY = [json.loads(line) for line in Path(__file__).with_name("healthy_runs.jsonl").read_text().splitlines()]
series = lambda name, values, **others: [{"num_tokens": i, name: value, **others} for i, value in enumerate(values)]


def reported(lines, config=CONFIG):
    """Return (line index, message) for every hint reported for `lines`."""
    hints = MetricHints(config)
    return [(i, message) for i, line in enumerate(lines) for message in hints(line)]


def played(**changed):
    """Return 40 lines of a healthy multi-turn run, with the values in `changed` from line 20 on."""
    usual = {"turns/mean": 3.0, "turns/clipped_ratio": 0.1, "tools/calls": 16.0, "tools/failures": 4.0}
    usual |= {"completions/clipped_ratio": 0.1, "completions/mean_length": 50.0}
    changed = {name.replace("__", "/"): value for name, value in changed.items()}
    assert changed.keys() <= usual.keys()
    return [{"num_tokens": i, **usual, **(changed if i >= 20 else {})} for i in range(40)]


def engine_lines(gap, weight):
    """Return lines of a run with an engine, where a large sampler_gap does not indicate a KV-cache bug."""
    others = {"sampler/importance_weight_mean": weight, "sampler_gap": 5.0}
    return series("sampler/log_prob_difference_mean", [gap] * 20, **others)


# Hint name, metric lines, index of the line at which the hint is reported (computed by hand).
SIGNS = [
    ("equal rewards", series("frac_reward_zero_std", [0.0] * 5 + [1.0] * 40), 14),
    ("equal rewards", series("frac_reward_zero_std", [0.0] * 5 + [1.0] * 40, **{"rewards/unscored": 0.9}), 14),
    ("truncated", series("completions/clipped_ratio", [0.0] + [1.0] * 40), 10),
    # 0.1 + 0.09 k is at least 0.9 from k = 9 on.
    ("truncated", played(completions__clipped_ratio=1.0), 28),
    ("KL rising", series("kl", [0.01 * i for i in range(200)]), KL_WINDOW - 1),
    # Line 19 is the first with two full windows; from then on the mean of the last ten is below a twentieth.
    ("entropy collapse", series("entropy", [2.0] * 6 + [0.01] * 40), 19),
    ("sampler mismatch", series("sampler_gap", [1e-6] * 9 + [2.0] * 40), 9),
    ("sampler mismatch", engine_lines(gap=0.4, weight=0.3), 9),
    # 3 − 2k/10 is at most 1.02 for k = 10 only.
    ("few turns", played(turns__mean=1.0), 29),
    # 0.1 + 0.09 k is at least 0.5 from k = 5 on.
    ("few turns", played(turns__clipped_ratio=1.0), 24),
    # Of 16 calls 4 fail, then 16: (4 (10 − k) + 16 k) / 160 is at least 0.9 from k = 9 on.
    ("failing tools", played(tools__failures=16.0), 28),
]


@pytest.mark.parametrize(("name", "lines", "at"), SIGNS)
def test_hint_is_reported_once(name, lines, at):
    ((index, message),) = reported(lines)
    assert index == at
    assert message == HINTS[name](lines[: at + 1], CONFIG)
    named = {word for word in re.findall(r"[a-z]+(?:_[a-z]+)+", message)}
    assert named <= {*GRPOConfig.__dataclass_fields__, CONFIG.sampler_correction}, "names a field that does not exist"


def test_equal_rewards_are_not_reported_in_distillation():
    """The teacher's divergence is a signal, and all rewards are equal if there are no reward functions."""
    distilled = GRPOConfig(distillation_coef=1.0)
    assert reported(series("frac_reward_zero_std", [1.0] * 40), distilled) == []
    unscored = series("frac_reward_zero_std", [1.0] * 40, **{"rewards/unscored": 0.9})
    assert len(reported(unscored, distilled)) == 1


@pytest.mark.parametrize("run", ["sort_digits", "countdown"])
def test_healthy_run_gets_no_hints(run):
    assert {sign[0] for sign in SIGNS} == set(HINTS), "every hint has a case in SIGNS"
    lines = [line for line in HEALTHY if line["run"] == run]
    assert len(lines) >= 25
    assert reported(lines) == []
    assert reported(lines + lines[-5:] * 4) == []  # nor if metrics stay at their final values


@pytest.mark.parametrize(("lines", "config"), [
    (series("kl", [0.01 * i for i in range(KL_WINDOW - 1)]), CONFIG),
    (series("kl", [0.1 + 0.05 * (i % 20) for i in range(200)]), CONFIG),
    (series("kl", [0.01 * i for i in range(200)]), GRPOConfig(beta=0.1, sync_ref_model=True)),
    (series("completions/clipped_ratio", [0.98] * 50), CONFIG),
    (series("entropy", [0.3] * 20 + [0.02] * 50), CONFIG),
    (series("sampler_gap", [2.0] * 50), GRPOConfig(num_iterations=2)),
    (engine_lines(gap=0.4, weight=0.9), CONFIG),
    (played(tools__failures=13.0), CONFIG),
    (played(tools__calls=0.0, tools__failures=0.0), CONFIG),
    (series("frac_reward_zero_std", [None, math.nan] * 30), CONFIG),
])  # fmt: skip
def test_borderline_metrics_get_no_hints(lines, config):
    assert reported(lines, config) == []


@pytest.mark.parametrize(("dtype", "platform", "limit"), [
    ("float32", "cpu", SAMPLER_GAP_FLOAT32),
    ("float32", "tpu", SAMPLER_GAP),
    ("bfloat16", "cpu", SAMPLER_GAP),
])  # fmt: skip
def test_gap_limit_depends_on_dtype_and_platform(monkeypatch, dtype, platform, limit):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    config = GRPOConfig(compute_dtype=dtype)
    assert reported(series("sampler_gap", [0.99 * limit] * 20), config) == []
    assert len(reported(series("sampler_gap", [1.01 * limit] * 20), config)) == 1


def test_long_run_is_compared_with_its_beginning():
    hints = MetricHints(CONFIG)
    for line in series("entropy", [2.0] * FIRST + [0.2] * 300 + [0.0] * 7):
        assert hints(line) == []
    (message,) = hints({"entropy": 0.0})
    assert "from 2 to 0.04 nats" in message
