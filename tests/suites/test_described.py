"""Suites in a RUN.yaml: `data: {reasoning_gym: chain_sum, size: 2000, seed: 1}`, and the settings it provides."""

import sys

import pytest

from grpo_jax.cli.runfile import read_run
from grpo_jax.cli.yaml12 import dump_yaml
from grpo_jax.suites import SUITES, Suite, suite_of

pytestmark = pytest.mark.quick

ALL = ("data", "rewards")


def judge(completions, **_):
    """A reward function that does not belong to a suite."""
    return [0.5] * len(completions)


def answers(completions, answer, **_):
    return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]


def made(name, *, size=2, seed=0):
    """Make a suite with two weighted reward functions, which needs no package."""
    if size < 1:
        raise ValueError(f"size = {size}: give more")
    rows = [{"prompt": f"{name} {seed + i}: ", "answer": "a"} for i in range(size)]
    return Suite(rows=rows, reward_fns=[answers, judge], reward_weights=[1.0, 0.25], tools=[sorted])


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setitem(SUITES, "made", made)


def written(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    return tmp_path / "run.yaml"


def test_a_run_takes_its_defaults_from_the_suite(tmp_path):
    """Rewards, weights, tools and environments that a RUN.yaml omits come from the suite; a suite is imported only if
    it is used.
    """
    path = written(tmp_path, "data: {made: sums, size: 3, seed: 1}\neval_data: {made: sums, seed: 9}")
    run = read_run(path, load=ALL)
    assert [row["prompt"] for row in run.rows] == ["sums 1: ", "sums 2: ", "sums 3: "]
    assert [row["prompt"] for row in run.eval_rows] == ["sums 9: ", "sums 10: "]
    assert (run.rewards, run.config.reward_weights, run.tools) == ([answers, judge], (1.0, 0.25), [sorted])
    (tmp_path / "again.yaml").write_text(dump_yaml({**run.values, "folder": str(run.folder)}))
    assert read_run(tmp_path / "again.yaml", load=ALL).rows == run.rows


def test_settings_of_a_run_override_those_of_its_suite(tmp_path):
    text = "data: {made: sums}\nprompt: '{answer}?'\n"
    run = read_run(
        written(tmp_path, text + "rewards: [suite, test_described:judge]\nreward_weights: [1, 0, 1]"), load=ALL
    )
    assert [fn.__name__ for fn in run.rewards] == ["answers", "judge", "judge"]
    assert run.config.reward_weights == (1, 0, 1)
    assert run.rows[0]["prompt"] == "a?"
    run = read_run(written(tmp_path, text + "rewards: test_described:judge"), load=ALL)
    assert ([fn.__name__ for fn in run.rewards], run.config.reward_weights) == (["judge"], None)


@pytest.mark.parametrize(("text", "message"), [
    ("data: {made: sums, size: 0}", "data: made: size = 0: give more"),
    ("data: {made: sums, sead: 0}", r"data: made: made\(\) got an unexpected keyword argument 'sead'"),
    ("data: {openenv: 'http://127.0.0.1:1'}", r"data: openenv: openenv\(\) missing 1 required .*argument: 'prompt'"),
    ("data: {made: sums, reasoning_gym: acre}", "must name exactly one suite; got made and reasoning_gym"),
    ("data: {path: rows.jsonl}\nrewards: [suite]", "unknown reward function"),
])  # fmt: skip
def test_errors_name_the_key(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_run(written(tmp_path, text), load=ALL)


def test_package_of_a_missing_suite_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", None)
    with pytest.raises(ValueError, match=r"data: reasoning_gym: reasoning-gym is required .*pip install reasoning-gym"):
        suite_of({"reasoning_gym": "chain_sum"})
