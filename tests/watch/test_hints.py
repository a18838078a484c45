"""Hints: each is reported once, at the line with its sign, names fields that exist, and is silent in good runs."""

import json
import math
import re
from pathlib import Path

import jax
import pytest

from grpo_jax import GRPOConfig
from grpo_jax.watch.hints import FIRST, HINTS, KL_WINDOW, SAMPLER_GAP, SAMPLER_GAP_FLOAT32, Hints, sampler_gap_limit

pytestmark = pytest.mark.quick

CONFIG = GRPOConfig(beta=0.1)
# Two real runs of this library, ten optimizer steps a line: `experiments.sort_digits` and `experiments.countdown`.
HEALTHY = [json.loads(line) for line in Path(__file__).with_name("healthy_runs.jsonl").read_text().splitlines()]


def said(lines, config=CONFIG):
    """(index of the line, message) of every hint."""
    hints = Hints(config)
    return [(i, message) for i, line in enumerate(lines) for message in hints(line)]


def series(name, values, **others):
    return [{"num_tokens": i, name: value, **others} for i, value in enumerate(values)]


def played(**changed):
    """Lines of a run of several turns that goes well, except for values that are changed from line 20 on."""
    usual = {"turns/mean": 3.0, "turns/clipped_ratio": 0.1, "tools/calls": 16.0, "tools/failures": 4.0}
    usual |= {"completions/clipped_ratio": 0.1, "completions/mean_length": 50.0}
    changed = {name.replace("__", "/"): value for name, value in changed.items()}
    assert changed.keys() <= usual.keys()
    return [{"num_tokens": i, **usual, **(changed if i >= 20 else {})} for i in range(40)]


def engine_lines(gap, weight):
    """Lines of a run with an engine, whose tokens' gap is not a fault of the cache."""
    others = {"sampler/importance_weight_mean": weight, "sampler_gap": 5.0}
    return series("sampler/log_prob_difference_mean", [gap] * 20, **others)


# The hint, the lines, the index of the line at which it is reported (computed by hand).
SIGNS = [
    ("equal rewards", series("frac_reward_zero_std", [0.0] * 5 + [1.0] * 40), 14),
    ("equal rewards", series("frac_reward_zero_std", [0.0] * 5 + [1.0] * 40, **{"rewards/unscored": 0.9}), 14),
    ("truncated", series("completions/clipped_ratio", [0.0] + [1.0] * 40), 10),
    # 0.1 + 0.09 k is at least 0.9 from k = 9 on.
    ("truncated", played(completions__clipped_ratio=1.0), 28),
    ("KL rising", series("kl", [0.01 * i for i in range(200)]), KL_WINDOW - 1),
    # 19 is the first line with two windows; the mean of the last ten is below a twentieth from then on.
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
def test_a_hint_is_reported_at_its_sign_and_once(name, lines, at):
    ((index, message),) = said(lines)
    assert index == at
    assert message == HINTS[name](lines[: at + 1], CONFIG)
    named = {word for word in re.findall(r"[a-z]+(?:_[a-z]+)+", message)}
    assert named <= {*GRPOConfig.__dataclass_fields__, CONFIG.sampler_correction}, "fields that exist, and a value"


@pytest.mark.parametrize("run", ["sort_digits", "countdown"])
def test_a_healthy_run_gets_none(run):
    assert {sign[0] for sign in SIGNS} == set(HINTS), "each of which has a sign above"
    lines = [line for line in HEALTHY if line["run"] == run]
    assert len(lines) >= 25
    assert said(lines) == []
    assert said(lines + lines[-5:] * 4) == []  # and it may stay where it ended


@pytest.mark.parametrize(
    ("lines", "config"),
    [
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
    ],
)
def test_no_hint_where_none_is_due(lines, config):
    assert said(lines, config) == []


@pytest.mark.parametrize(
    ("dtype", "platform", "precision", "limit"),
    [
        ("float32", "cpu", None, SAMPLER_GAP_FLOAT32),
        ("float32", "gpu", "highest", SAMPLER_GAP_FLOAT32),
        ("float32", "tpu", "high", SAMPLER_GAP),
        ("bfloat16", "cpu", "highest", SAMPLER_GAP),
    ],
)
def test_the_gap_limit_follows_the_precision_of_products(monkeypatch, dtype, platform, precision, limit):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with jax.default_matmul_precision(precision):
        assert sampler_gap_limit(dtype) == limit
        config = GRPOConfig(compute_dtype=dtype)
        assert said(series("sampler_gap", [0.99 * limit] * 20), config) == []
        assert len(said(series("sampler_gap", [1.01 * limit] * 20), config)) == 1


def test_a_long_run_keeps_its_beginning():
    hints = Hints(CONFIG)
    for line in series("entropy", [2.0] * FIRST + [0.2] * 300 + [0.0] * 7):
        assert hints(line) == []
    (message,) = hints({"entropy": 0.0})
    assert "from 2 to 0.04 nats" in message
