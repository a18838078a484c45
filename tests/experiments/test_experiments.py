"""The experiments: the data of two, a reduced run of sort_digits, and the flags of all."""

import functools
import importlib
import inspect
import json
import random
from pathlib import Path

import numpy as np
import pytest

from experiments import sort_digits, stories

HELD_OUT = 100


@pytest.fixture(scope="module")
def sorted_run(tmp_path_factory):
    """The directory of a short run of sort_digits with its controls, and all that it printed."""
    run_dir = tmp_path_factory.mktemp("sort_digits") / "run"
    arguments = f"--seed 3 --steps 2 --warm-up-steps 40 --held-out {HELD_OUT} --run-dir {run_dir}".split()
    arguments += ["--picture", str(run_dir.parent / "docs.png")]
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *texts, **_: printed.append(" ".join(map(str, texts))))
        patch.setattr(sort_digits, "make_policy", functools.partial(sort_digits.make_policy, width=32, layers=1))
        patch.setattr(sort_digits, "BATCH", 64)
        results = sort_digits.main(arguments)
    return run_dir, printed, results


@pytest.mark.quick
def test_digits_to_train_on_and_to_test_with_are_distinct_and_not_sorted():
    train, held_out = sort_digits.make_rows(0)
    prompts = [row["prompt"] for row in [*train, *held_out]]
    assert (len(train), len(held_out)) == (4000, 1000)
    assert len(set(prompts)) == len(prompts)
    for row in [*train, *held_out]:
        assert row["prompt"] == f"sort {row['digits']}:"
        assert row["answer"] == "".join(sorted(row["digits"])) != row["digits"]
    assert sort_digits.make_rows(0) == (train, held_out)
    assert sort_digits.make_rows(1)[1] != held_out


@pytest.mark.quick
def test_teacher_is_right_one_time_in_eight():
    draw, count = random.Random(0), 20_000
    rows, _ = sort_digits.make_rows(0)
    rows = [draw.choice(rows) for _ in range(count)]
    replies = [sort_digits.teach(row["digits"], draw) for row in rows]
    answers = [row["answer"] for row in rows]
    right = sort_digits.accuracy(completions=replies, answer=answers)
    well_formed = sort_digits.well_formed(completions=replies)
    # Four standard errors of a share of 20,000 are 0.014 at most.
    assert np.mean(right) == pytest.approx(0.128, abs=0.0095)
    assert np.mean(well_formed) == pytest.approx(0.8, abs=0.012)
    assert all(ok for ok, right in zip(well_formed, right, strict=True) if right)


def test_sort_digits_ends_in_one_json_object_and_leaves_its_files(sorted_run):
    run_dir, printed, results = sorted_run
    assert json.loads(printed[-1]) == results == json.loads((run_dir / "results.json").read_text())
    assert results["arms"]["grpo"].keys() == {"before", "after"}
    for rates in results["arms"]["grpo"].values():
        assert rates.keys() == {"greedy", "sampled", "format"}
        assert all(0 <= rate <= 1 for rate in rates.values())
    for name in ("metrics.jsonl", "completions.jsonl", "run.json", "report.png", "hero.png", "base/model.safetensors"):
        assert (run_dir / name).stat().st_size > 0, name
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in metrics} == {0, 1, 2}
    logged = set().union(*metrics)
    assert {"rewards/accuracy/mean", "rewards/format/mean", "eval/accuracy", "eval/format"} <= logged
    assert len((run_dir / "completions.jsonl").read_text().splitlines()) == 2 * 256


@pytest.mark.quick
def test_stories_has_the_task_of_the_run_it_is_compared_with():
    train, held_out = stories.make_rows()
    assert (len(train), len(held_out)) == (256, 64)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in [*train, *held_out]:
        assert row["prompt"].startswith(f"{row['word']}. Once upon a time, there was a ")
    completions = ["He had a hat.", "Hat! he said", "He had hats.", "He had a cat", ""]
    assert stories.uses_word(completions=completions, word=["hat"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(sort_digits.__file__).parent.glob("[a-z]*.py")))
def test_each_experiment_is_imported_and_describes_its_flags(name, capsys):
    module = importlib.import_module(f"experiments.{name}")
    if hasattr(module, "main") and inspect.signature(module.main).parameters:
        assert module.__doc__.count(f"python -m experiments.{name}") >= 1
        with pytest.raises(SystemExit) as ended:
            module.main(["--help"])
        assert ended.value.code == 0
        assert "--" in capsys.readouterr().out
