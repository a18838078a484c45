"""Hints: each speaks once, at the line where its sign is there, names fields that exist, and is silent in good runs."""

import json
import math
import re
from pathlib import Path

import jax
import pytest

from grpo_jax import GRPOConfig
from grpo_jax.watch.hints import FIRST, HINTS, KL_WINDOW, LAST, SAMPLER_GAP, Hints, sampler_gap_limit

CONFIG = GRPOConfig(beta=0.1)
# Two real runs of this library, ten optimizer steps a line: `experiments.sort_digits` and `experiments.countdown`.
HEALTHY = [json.loads(line) for line in Path(__file__).with_name("healthy_runs.jsonl").read_text().splitlines()]


def said(lines, config=CONFIG):
    """(index of the line, message) of every hint."""
    hints = Hints(config)
    return [(i, message) for i, line in enumerate(lines) for message in hints(line)]


def series(name, values, **others):
    return [{"num_tokens": i, name: value, **others} for i, value in enumerate(values)]


def rewards(right, style, std=0.4):
    return [
        {"rewards/right/mean": a, "rewards/right/std": std, "rewards/style/mean": b, "rewards/style/std": std}
        for a, b in zip(right, style, strict=True)
    ]


def speeds(rates, rollout):
    return [
        {"tokens_per_second": rate, "seconds/rollout": s, "seconds/update": 1.0, "seconds/total": s + 1}
        for rate, s in zip(rates, rollout, strict=True)
    ]


def played(completions=8, rollouts=10, **changed):
    """Lines of a run of several turns that goes well, 50 tokens per completion, but for what is changed from 20 on."""
    usual = {
        "turns/mean": 3.0,
        "turns/clipped_ratio": 0.1,
        "tools/calls": 16.0,
        "tools/failures": 4.0,
        "completions/clipped_ratio": 0.1,
        "completions/mean_length": 50.0,
        "completions/observation_tokens": 20.0,
        "environment/errors": 0.0,
        "environment/seconds": 4.0,
        "seconds/rollout": 2.0 * rollouts,
    }
    changed = {name.replace("__", "/"): value for name, value in changed.items()}
    assert changed.keys() <= usual.keys()
    tokens = 50 * completions * rollouts
    return [{"num_tokens": tokens * (i + 1), **usual, **(changed if i >= 20 else {})} for i in range(40)]


# name of the hint, the lines, the line at which it speaks (by hand), and what it says.
SIGNS = [
    ("equal rewards", series("frac_reward_zero_std", [0.0] * 5 + [1.0] * 40), 14, ["100 %", "dynamic_sampling=True"]),
    ("all truncated", series("completions/clipped_ratio", [0.0] + [1.0] * 40), 10, ["max_completion_length = 512"]),
    (
        "KL rising",
        series("kl", [0.01 * i for i in range(200)]),
        KL_WINDOW - 1,
        ["sync_ref_model=True", "beta (now 0.1)"],
    ),
    # 19 is the first line with two windows; the mean of the last ten is below a twentieth from then on.
    ("entropy collapse", series("entropy", [2.0] * 6 + [0.01] * 40), 19, ["from 2 to 0.01", "entropy_coef"]),
    ("much clipped", series("clip_fraction", [0.1] * 10 + [0.5] * 40), 14, ["share of 0.30", "num_iterations (now 1)"]),
    ("sampler mismatch", series("sampler_gap", [1e-6] * 9 + [2.0] * 40), 9, ["up to 0.2 nats", "compute_dtype"]),
    # With k lines of the new kind in ten, right has risen by 0.06 k and style fallen by 0.03 k: past half of the spread
    # of 0.4 for k = 7.
    (
        "reward hacking",
        rewards([0.2] * 30 + [0.8] * 30, [0.7] * 30 + [0.4] * 30),
        36,
        ["'right' has risen from 0.2 to 0.62 while 'style' has fallen from 0.7 to 0.49", "reward_weights"],
    ),
    # The median of ten is halfway, 55 of 100, with five slow lines, and 10 with six.
    (
        "slower",
        speeds([1.0] + [100.0] * 20 + [10.0] * 20, [9.0] + [1.0] * 20 + [12.0] * 20),
        26,
        [
            "10 completion tokens per second",
            "100 at the beginning",
            "'rollout' has grown most",
            "max_completion_length",
        ],
    ),
    # 3 − 2k/10 is 1.02 or less for k = 10 only.
    ("never answered", played(turns__mean=1.0), 29, ["had 1.00 turns on average", "temperature (now 1)"]),
    # Of 16 calls 4 fail, then 16: (4 (10 − k) + 16 k) / 160 is 0.9 or more from k = 9 on.
    ("tools fail", played(tools__failures=16.0), 28, ["92 % of the tool calls", "environment_timeout = 300 s"]),
    # 0.1 + 0.09 k is 0.9 or more from k = 9 on.
    (
        "no room for turns",
        played(completions__clipped_ratio=1.0),
        28,
        ["91 % of the completions", "with 3.0 turns", "20 of their 50 tokens", "max_completion_length (now 512)"],
    ),
    # 0.1 + 0.09 k is 0.5 or more from k = 5 on.
    ("out of turns", played(turns__clipped_ratio=1.0), 24, ["55 % of the completions", "iterations (now None)"]),
    # Of 8 completions at a time 4 s are a quarter of 2 s, and 16 s all of it: 0.25 + 0.075 k is 0.55 for k = 4.
    ("slow environments", played(environment__seconds=16.0), 23, ["during 55 % of the rollouts", "at most 8 calls"]),
    # 0.1 of 8 is 0.8: k = 4 of 10 lines with 2.
    (
        "environment errors",
        played(environment__errors=2.0),
        23,
        ["failed 0.8 times per rollout of 8 completions", 'on_environment_error="raise"'],
    ),
    # 2e-6 a step is 1e-4 at step 50, and the reward goes up and down by 0.02 around 0.1.
    (
        "hardly moved",
        [{"num_tokens": i, "step": 10 * (i + 1), "kl": 2e-7 * i, "reward": 0.1 + 0.01 * (-1) ** i} for i in range(10)],
        4,
        ["hardly moved in 50 steps: KL to the start 8e-07 nats", "reward 0.1 → 0.103", "learning_rate (now 1e-06)"],
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "lines", "at", "parts"), SIGNS, ids=[sign[0] for sign in SIGNS])
def test_a_hint_speaks_at_its_sign_and_once(name, lines, at, parts):
    ((index, message),) = said(lines)
    assert index == at
    assert message == HINTS[name](lines[: at + 1], CONFIG)
    for part in parts:
        assert part in message


@pytest.mark.quick
def test_groups_without_any_reward_are_not_said_to_be_learned():
    lines = series("frac_reward_zero_std", [0.0] * 5 + [1.0] * 40, **{"rewards/unscored": 0.9})
    ((at, message),) = said(lines, GRPOConfig())
    assert at == 14
    assert message.startswith("90 % of the completions of the last 10 logged steps have no reward")
    assert "learned;" not in message


@pytest.mark.quick
def test_every_hint_has_a_sign_here_and_names_fields_that_there_are():
    assert [sign[0] for sign in SIGNS] == list(HINTS)
    fields = set(GRPOConfig.__dataclass_fields__)
    for _, lines, *_ in SIGNS:
        ((_, message),) = said(lines)
        named = {word for word in re.findall(r"[a-z]+(?:_[a-z]+)+", message)}
        assert named <= fields, named - fields
        assert named & fields


@pytest.mark.quick
def test_a_policy_that_moves_or_has_nothing_to_learn_gets_no_hint_to_raise_its_learning_rate():
    def lines(**changed):
        usual = {"kl": 1e-6, "reward": 0.1, "frac_reward_zero_std": 0.2}
        return [
            {"num_tokens": i, "step": 10 * (i + 1)}
            | {name: f(i) if callable(f) else f for name, f in {**usual, **changed}.items()}
            for i in range(8)
        ]

    assert len(said(lines())) == 1
    assert not said(lines(kl=lambda i: 1e-5 * 3**i))
    assert not said(lines(reward=lambda i: 0.1 * i)), "it learns"
    assert not said(lines(frac_reward_zero_std=0.94)), "nothing is taught"
    assert not said([line | {"kl_initial": 0.1} for line in lines()]), "a synced reference is near, not the start"
    # Without a reference the learning rates tell: 80 steps of 1e-6 and of 1e-5.
    without = [{name: x for name, x in line.items() if name != "kl"} for line in lines()]
    assert not said(without)
    for rate, hints in ((1e-6, 1), (1e-5, 0)):
        assert len(said([line | {"learning_rate": rate} for line in without], GRPOConfig())) == hints


@pytest.mark.quick
@pytest.mark.parametrize("run", ["sort_digits", "countdown"])
def test_a_healthy_run_gets_none(run):
    lines = [line for line in HEALTHY if line["run"] == run]
    assert len(lines) >= 25
    assert said(lines) == []
    assert said(lines + lines[-5:] * 4) == []  # and it may stay where it ended


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lines", "config"),
    [
        (series("kl", [0.01 * i for i in range(KL_WINDOW - 1)]), CONFIG),
        (series("kl", [0.3] * 200), CONFIG),
        (series("kl", [0.1 + 0.05 * (i % 20) for i in range(200)]), CONFIG),
        (series("kl", [1 + 0.001 * i for i in range(200)]), CONFIG),
        (series("kl", [0.01 * i for i in range(200)]), GRPOConfig(beta=0.1, sync_ref_model=True)),
        (series("completions/clipped_ratio", [1.0] * 9), CONFIG),
        (series("completions/clipped_ratio", [0.98] * 50), CONFIG),
        (series("entropy", [0.3] * 20 + [0.02] * 50), CONFIG),
        (series("sampler_gap", [2.0] * 50), GRPOConfig(num_iterations=2)),
        (series("sampler_gap", [1.4] * 50), GRPOConfig(compute_dtype="bfloat16")),
        (rewards([0.2] * 30 + [0.8] * 30, [0.7] * 30 + [0.6] * 30), CONFIG),
        (rewards([0.7 - 0.01 * i for i in range(40)], [0.7 - 0.01 * i for i in range(40)]), CONFIG),
        (rewards([0.5] * 40, [0.5] * 40, std=0.0), CONFIG),
        (speeds([1000.0] + [100.0] * 40, [1.0] * 41), CONFIG),
        (played(), CONFIG),
        (played(turns__mean=1.1), CONFIG),
        (played(tools__failures=13.0), CONFIG),
        (played(tools__calls=0.0, tools__failures=0.0), CONFIG),
        (played(completions__clipped_ratio=0.8), CONFIG),
        (played(turns__clipped_ratio=0.49), CONFIG),
        (played(environment__errors=0.7), CONFIG),
        (played(environment__seconds=7.9), CONFIG),
        # The same 60 s are shared by 256 completions of which 64 are answered at a time.
        (played(completions=256, environment__seconds=60.0), CONFIG),
        # Lines that have no rollout: those of the later updates of an iteration.
        ([x for line in played(environment__seconds=7.9) for x in (line, {"num_tokens": line["num_tokens"]})], CONFIG),
        (series("frac_reward_zero_std", [None, math.nan] * 30), CONFIG),
    ],
)
def test_no_hint_where_none_is_due(lines, config):
    assert said(lines, config) == []


@pytest.mark.quick
def test_completions_of_several_turns_get_one_hint_about_their_end():
    (message,) = (message for _, message in said(played(turns__mean=1.5, completions__clipped_ratio=1.0)))
    assert "with 1.6 turns" in message
    lines = played(turns__mean=1.0, completions__clipped_ratio=1.0)
    assert [HINTS["all truncated"](lines, CONFIG) is None, HINTS["no room for turns"](lines, CONFIG)] == [False, None]


@pytest.mark.quick
def test_seconds_of_environments_count_as_many_rollouts_as_a_line_has():
    """Of 64 completions at a time, 70 s are 1.1 s of a rollout of 2 s, where a line has ten of them."""
    lines = played(completions=64, environment__seconds=70.0)
    (message,) = (message for _, message in said(lines))
    assert "at most 64 calls at a time" in message
    assert said(lines, GRPOConfig(num_iterations=10)) == [], "one rollout of 20 s per line, of 640 completions"
    assert len(said(played(64, 1, environment__seconds=70.0), GRPOConfig(num_iterations=10))) == 1
    several = [
        x for line in played(64, 1, environment__seconds=70.0) for x in (line, {"num_tokens": line["num_tokens"]})
    ]
    assert len(said(several, GRPOConfig(num_iterations=20))) == 1, "every second line has a rollout"
    assert len(said(played(256, environment__seconds=80.0))) == 1, "never more than 64 calls"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("dtype", "platform", "precision", "limit"),
    [
        ("float32", "cpu", None, "float32"),
        ("float32", "gpu", None, "tensorfloat32"),
        ("float32", "gpu", "highest", "float32"),
        ("float32", "tpu", None, "bfloat16"),
        ("float32", "tpu", "high", "tensorfloat32"),
        ("float32", "tpu", "float32", "float32"),
        ("bfloat16", "cpu", "highest", "bfloat16"),
        ("bfloat16", "tpu", None, "bfloat16"),
    ],
)
def test_the_gap_that_rounding_explains_is_that_of_the_products(monkeypatch, dtype, platform, precision, limit):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with jax.default_matmul_precision(precision):
        assert sampler_gap_limit(dtype) == SAMPLER_GAP[limit]
        config = GRPOConfig(compute_dtype=dtype)
        assert said(series("sampler_gap", [0.99 * SAMPLER_GAP[limit]] * 20), config) == []
        assert len(said(series("sampler_gap", [1.01 * SAMPLER_GAP[limit]] * 20), config)) == 1


def test_a_long_run_keeps_its_beginning_and_little_else():
    hints = Hints(CONFIG)
    for line in series("entropy", [2.0] * FIRST + [0.2] * 3000 + [0.0] * 7):
        assert hints(line) == []
    assert len(hints._history) == FIRST + LAST
    (message,) = hints({"entropy": 0.0})
    assert "from 2 to 0.04 nats" in message
