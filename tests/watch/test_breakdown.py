"""Rewards by turn and by column, and an iteration in time: counted by hand."""

import pytest

from grpo_jax.watch.breakdown import column_tables, iteration, turn_table


@pytest.mark.quick
def test_rewards_by_turn_are_means_over_the_completions_that_got_so_far():
    rows = [
        {"turn_rewards": {"near": [0.5, 1.0, 0.25], "polite": [1.0, None, 0.0]}},
        {"turn_rewards": {"near": [0.0, 0.5]}},
        {"completion": "of one turn"},
        {"turn_rewards": 3},  # a column of the user's own
    ]
    (table,) = turn_table(rows)
    assert table.head == ["turn", "completions", "near", "polite"]
    assert table.rows == [["1", "2", "0.25", "1"], ["2", "2", "0.75", "–"], ["3", "1", "0.25", "0"]]
    assert turn_table(rows[2:]) == turn_table([]) == []
    assert len(turn_table([{"turn_rewards": {"near": [1.0] * 100}}])[0].rows) == 24


def completion(task, right, **more):
    return {"task": task, "rewards": {"right": right, "short": 1.0}, **more}


@pytest.mark.quick
def test_rewards_by_a_column_that_sorts_completions():
    rows = [completion("sum", 1.0), completion("sort", 0.0), completion("sum", 0.0), completion("sort", None)]
    (table,) = column_tables(rows, ["task"])
    assert (table.title, table.head) == ("Rewards by task", ["task", "completions", "right", "short"])
    assert table.rows == [["sort", "2", "0", "1"], ["sum", "2", "0.5", "1"]]


@pytest.mark.quick
@pytest.mark.parametrize(
    "values",
    [
        ["a", "a", "a", "a"],  # one kind
        ["a", "b", "c", "d"],  # texts of their own
        ["a", "a", 1.0, 1.0],
        ["a", "a", "b" * 61, "b" * 61],
        ["a", "a", "", ""],
    ],
)
def test_other_columns_make_no_table(values):
    assert column_tables([completion(value, 1.0) for value in values], ["task"]) == []


def lanes(*lines, updates=1):
    found = {}
    for lane, name, _, begin, end in iteration(lines, updates):
        found.setdefault(lane, []).append((name, begin, end))
    return found


@pytest.mark.quick
def test_phases_stand_in_their_order_for_their_seconds():
    first = {"step": 10, "seconds/rollout": 100.0, "seconds/update": 50.0, "seconds/total": 200.0}
    times = {"update": 16.0, "rollout": 8.0, "rewards": 2.0, "reference": 4.0, "evaluation": 5.0, "total": 36.0}
    last = {"step": 18, **{f"seconds/{name}": value for name, value in times.items()}}
    after = {"step": 18, "eval/right": 0.5, "seconds/evaluation": 2.0}  # no iteration
    trainer = [("rewards", 1.0, 1.25), ("reference", 1.25, 1.75), ("update", 1.75, 3.75), ("other", 3.75, 3.875)]
    assert lanes(first, last, after) == {"engine": [("rollout", 0.0, 1.0)], "trainer": trainer}
    twice = lanes(first, last, updates=2)  # two optimizer steps of an iteration: four iterations
    assert twice["trainer"][0] == ("rewards", 2.0, 2.5)
    assert lanes({"step": 1, "loss": 1.0}) == lanes() == {}


@pytest.mark.quick
def test_another_engines_time_ends_with_the_rollout():
    times = {"seconds/rollout": 2.0, "seconds/update": 3.0, "seconds/total": 5.0}
    engine = {"sampler/seconds/sample": 4.0, "sampler/seconds/hand_over": 0.5, "sampler/seconds/write": 0.25}
    found = lanes({"step": 1, **times, **engine})
    # 4.75 seconds of which the trainer waited for two: it was sampled ahead.
    assert found["engine"] == [("write", -2.75, -2.5), ("hand over", -2.5, -2.0), ("sample", -2.0, 2.0)]
    assert found["trainer"] == [("update", 2.0, 5.0)]
