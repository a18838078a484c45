"""Rewards across processes: each process scores its own rows, and statistics cover all rows."""

import json

import jax
import numpy as np
import pytest
from tiny import tiny_tokenizer

from grpo_jax.rewards.calls import Rewards, means_of
from grpo_jax.rewards.contract import RewardError
from grpo_jax.rewards.outcomes import RewardParts
from grpo_jax.rollout.episode_setup import EpisodeRecord
from grpo_jax.run import rollout_result as gathering
from grpo_jax.run.collect import call_reward_fns
from grpo_jax.run.rollout_result import RolloutResult, completion_records, gather_rewards
from grpo_jax.text.prompts import make_prompts
from grpo_jax.types import Completions
from grpo_jax.watch.page import RUN_COLUMNS

pytestmark = pytest.mark.quick

G, T = 3, 4
ROWS = [{"prompt": text, "number": i} for i, text in enumerate(["ab", "c", "def", "gh", "i"])]


PROMPTS = make_prompts([[1]] * len(ROWS))


def completions(rows):
    tokens = np.random.default_rng(0).integers(30, 90, (len(ROWS), G, T))[:rows]
    mask = np.arange(T) < 1 + np.arange(rows * G).reshape(rows, G, 1) % T
    return Completions(tokens, mask, np.zeros(mask.shape, np.float32), np.ones((rows, G), bool))


def run(monkeypatch, processes, rows, *fns, on_error="raise"):
    """Return `gather_rewards`' result on each process, and per process the completions passed to each function."""
    calls = []

    def counted(fn):
        def call(completions, completion_ids, number, log_metric, log_extra):
            calls[-1].append(len(completions))
            return fn(completion_ids, number, log_metric, log_extra)

        call.__name__ = fn.__name__
        return call

    fns, parts = [counted(fn) for fn in fns], []
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for process in range(processes):
        calls.append([])
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        sampled = RolloutResult(ROWS[:rows], PROMPTS, completions(rows))
        parts.append(call_reward_fns(tiny_tokenizer(), fns, sampled, on_error=on_error))
    sent = [json.loads(json.dumps([*part], default=lambda x: x.tolist())) for part in parts]
    monkeypatch.setattr(gathering, "gather_objects", lambda own: json.dumps(own) and sent)
    return [gather_rewards(part, fns) for part in parts], calls


def length(completion_ids, number, log_metric, log_extra):
    for ids in completion_ids:
        log_metric("a_length", len(ids))
    log_extra("number_of_row", np.array(number))
    return [len(ids) / 7 for ids in completion_ids]


def of_few(completion_ids, number, log_metric, log_extra):
    return [0.1 * n if n in (0, 3) else None for n in number]


@pytest.mark.parametrize(("processes", "rows"), [(2, 4), (2, 5), (3, 5), (3, 2), (2, 1)])
def test_several_processes_give_the_same_rewards_as_one(monkeypatch, processes, rows):
    (one,), _ = run(monkeypatch, 1, rows, length, of_few)
    several, calls = run(monkeypatch, processes, rows, length, of_few)
    sizes = [sum(some) for some in calls]
    assert sum(sizes) == 2 * rows * G, "each function scores each completion once"
    assert max(sizes) - min(sizes) <= 2 * G, "parts differ by at most one row"
    timeless = lambda stats: {name: value for name, value in stats.items() if not name.endswith("/seconds")}
    for found in several:
        np.testing.assert_array_equal(found.values, one.values)
        assert found.completions == one.completions
        assert found.logged_columns == one.logged_columns
        assert means_of(found.logged_metrics) == means_of(one.logged_metrics)
        assert timeless(found.stats) == timeless(one.stats)
        assert found.stats.keys() == one.stats.keys()


def test_errors_are_summed_and_the_slowest_seconds_are_reported(monkeypatch):
    def fails_on_odd_rows(completion_ids, number, log_metric, log_extra):
        return [float("nan") if n % 2 else 1.0 for n in number]

    with pytest.warns(RuntimeWarning, match="no score for"):
        (found, _), _ = run(monkeypatch, 2, 5, fails_on_odd_rows, on_error="none")
    assert found.stats["rewards/fails_on_odd_rows/errors"] == 2 * G
    assert found.stats["rewards/fails_on_odd_rows/missing"] == pytest.approx(2 / 5)
    slow = found._replace(stats={"rewards/f/seconds": 3.0}, values=found.values[:2])
    fast = found._replace(stats={"rewards/f/seconds": 1.0}, values=found.values[2:])
    monkeypatch.setattr(gathering, "gather_objects", lambda own: [fast, slow])
    assert gather_rewards(fast, len).stats["rewards/f/seconds"] == 3.0
    with pytest.raises(RewardError, match="'fails_on_odd_rows' returned nan"):
        run(monkeypatch, 2, 5, fails_on_odd_rows)


def test_batch_without_reward_functions_is_gathered(monkeypatch):
    """A run that only distills from a teacher has K = 0."""
    for processes in (2, 4):
        found, _ = run(monkeypatch, processes, 3)
        assert [one.values.shape for one in found] == [(3, G, 0)] * processes
        assert found[-1].stats == {}
        assert len(found[0].completions) == len(found[0].logged_columns) == 3 * G


def test_reward_parts_cover_the_completions_of_all_processes(monkeypatch):
    def by_token(completion_ids, number, log_metric, log_extra):
        return [np.full(len(ids), n, np.float32) if n else None for n, ids in zip(number, completion_ids, strict=True)]

    found, _ = run(monkeypatch, 2, 5, by_token)
    alone, _ = run(monkeypatch, 1, 5, by_token)
    lengths = completions(5).mask.sum(-1).ravel()
    expected = [RewardParts(i, 0, True, [float(i // G)] * lengths[i]) for i in range(G, 5 * G)]
    assert found[0].parts == found[1].parts == alone[0].parts == expected
    np.testing.assert_array_equal(found[0].values.ravel()[G:], [sum(part.values) for part in expected])


def test_completion_records_have_the_columns_of_a_run():
    played = [EpisodeRecord([(True, str(i))], lengths=[1], reward=0.0) for i in range(2 * G)]
    rows = [{**row, "image": "digit.png"} for row in ROWS[:2]]
    sampled = RolloutResult(rows, PROMPTS, completions(2), played)
    parts = [RewardParts(i, 0, False, [0.0]) for i in range(2 * G)]
    columns = [{"number": i, "prompt": i} for i in range(2 * G)]
    scores = Rewards(np.zeros((2, G, 1), np.float32), {}, parts, {}, columns, [""] * 2 * G)
    for row in completion_records(scores, ["length"], sampled, np.zeros((2, G))):
        assert {"step", *row} == {"number", *RUN_COLUMNS}
        assert row["prompt"] in [x["prompt"] for x in rows], "the run's columns replace those of reward functions"
