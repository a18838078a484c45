"""The experiments: their data and rewards, lengths in docs/accelerators.md, reduced runs, and command-line flags."""

import functools
import importlib
import inspect
import json
import random
from pathlib import Path

import numpy as np
import pytest

from experiments import benchmark, gsm8k, instruct, problems, sort_digits, stories, targets


@pytest.mark.quick
def test_training_and_test_digits_are_distinct_and_unsorted():
    train, held_out = sort_digits.make_rows(0)
    prompts = [row["prompt"] for row in [*train, *held_out]]
    assert (len(train), len(held_out)) == (4000, 1000)
    assert len(set(prompts)) == len(prompts)
    for row in [*train, *held_out]:
        assert row["prompt"] == f"sort {row['digits']}:"
        assert row["answer"] == "".join(sorted(row["digits"])) != row["digits"]
    assert sort_digits.make_rows(0) == (train, held_out) != sort_digits.make_rows(1)


@pytest.mark.quick
def test_teacher_is_right_one_time_in_eight():
    draw, count = random.Random(0), 20_000
    rows, _ = sort_digits.make_rows(0)
    rows = [draw.choice(rows) for _ in range(count)]
    replies = [sort_digits.teach(row["digits"], draw) for row in rows]
    answers = [row["answer"] for row in rows]
    right = sort_digits.accuracy(completions=replies, answer=answers)
    well_formed = sort_digits.well_formed(completions=replies)
    # Four standard errors of a fraction of 20,000 are at most 0.014.
    assert np.mean(right) == pytest.approx(0.128, abs=0.0095)
    assert np.mean(well_formed) == pytest.approx(0.8, abs=0.012)
    assert all(ok for ok, right in zip(well_formed, right, strict=True) if right)


def test_sort_digits_prints_json_and_writes_its_files(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    arguments = f"--seed 3 --steps 2 --warm-up-steps 40 --held-out 100 --run-dir {run_dir}".split()
    monkeypatch.setattr(sort_digits, "make_policy", functools.partial(sort_digits.make_policy, width=32, layers=1))
    monkeypatch.setattr(sort_digits, "BATCH", 64)
    results = sort_digits.main([*arguments, "--picture", str(tmp_path / "docs.png")])
    printed, written = capsys.readouterr().out.splitlines()[-1], (run_dir / "results.json").read_text()
    assert json.loads(printed) == results == json.loads(written)
    assert results["arms"]["grpo"].keys() == {"before", "after"}
    for name in ("metrics.jsonl", "completions.jsonl", "run.json", "report.png", "hero.png", "base/model.safetensors"):
        assert (run_dir / name).stat().st_size > 0, name
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in metrics} == {0, 1, 2}
    logged = set().union(*metrics)
    assert {"rewards/accuracy/mean", "rewards/format/mean", "eval/accuracy", "eval/format"} <= logged
    assert len((run_dir / "completions.jsonl").read_text().splitlines()) == 2 * 256


@pytest.mark.quick
def test_stories_are_rewarded_for_whole_words_and_prompts_are_held_out():
    train, held_out = stories.make_rows()
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    completions = ["He had a hat.", "Hat! he said", "He had hats.", "He had a cat", ""]
    assert stories.uses_word(completions=completions, word=["hat"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


PROBLEMS = [
    {"question": f"Tom has {n} apples and buys {n + 1}.", "answer": f"{n} + {n + 1}\n#### {2 * n + 1}"} for n in (1, 7)
]


@pytest.mark.quick
def test_gsm8k_problem_and_the_format_of_its_answer():
    chat, text = (gsm8k.make_row(PROBLEMS[0], chat=chat) for chat in (True, False))
    assert [message["role"] for message in chat["prompt"]] == ["system", "user"]
    assert chat["prompt"][1]["content"] == PROBLEMS[0]["question"] in text["prompt"]
    assert gsm8k.INSTRUCTION in text["prompt"] == text["prompt"].strip()
    for row in (chat, text):
        found = gsm8k.accuracy(completions=["He has 3.", "#### 3", "#### 4"], answer=[row["answer"]] * 3)
        assert found == [1.0, 1.0, 0.0]
    right = ["1 + 2 = 3\n#### 3", "a\nb\n#### -$1,234.50\n"]
    wrong = ["#### 3", "1 + 2\n#### 3\nDone", "1 + 2\n### 3", "1 + 2\n#### three", "1 + 2 #### 3", "1\n#### 3 apples"]
    assert gsm8k.well_formed(completions=right + wrong) == [1.0] * 2 + [0.0] * 6
    assert gsm8k.well_formed(completions=[problem["answer"] for problem in PROBLEMS]) == [1.0] * len(PROBLEMS)


@pytest.mark.quick
def test_training_and_held_out_problems_are_distinct():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym, which makes the problems, is not installed")
    test, learnt = instruct.held_out(size=20), instruct.train_problems(seed=3, size=30)
    questions = [row["prompt"][-1]["content"] for row in (*test, *learnt)]
    assert len(questions) == len(set(questions))
    assert {row["task"] for row in test} == {row["task"] for row in learnt} == set(problems.TASKS)
    assert [row["task"] for row in test[: len(problems.TASKS)]] == list(problems.TASKS)
    assert [turn["role"] for turn in test[0]["prompt"]] == ["user", "assistant", "user"]
    shown = [row["prompt"][0]["content"] for row in test]
    assert len(set(shown)) == len(shown), "with one example for all, the model would repeat its answer"
    assert instruct.train_problems(seed=3, size=30) == learnt != instruct.train_problems(seed=4, size=30)


def cell(rollout, update, *, memory=80e9):
    peaks = {"rollout": rollout * 1e9, "update": update * 1e9}
    return {"memory": memory, "held": 5e9, "peaks": peaks, "seconds": 12.4}


@pytest.mark.quick
def test_longest_completion_is_where_a_phase_reaches_the_memory():
    """The longest completion is interpolated: with 40 GB at 1,024 and 120 GB at 8,192 tokens, 80 GB allow 4,608."""
    assert targets.longest_that_fits({1024: cell(40, 10), 8192: cell(120, 20)}) == "4,608"
    assert targets.longest_that_fits({1024: cell(40, 10), 8192: cell(120, 290)}) == "2,816"  # 1/4, by the update
    assert targets.longest_that_fits({1024: cell(40, 10), 8192: cell(60, 220)}) == "3,392"  # 1,024 + 7,168 / 3, by 64
    assert targets.longest_that_fits({t: cell(40, 10) for t in targets.LENGTHS}) == "≥ 32,768"
    assert targets.longest_that_fits({1024: cell(81, 10)}) == "none"
    assert targets.longest_that_fits({1024: {"error": "refused"}}) == "?"


def test_page_has_the_stored_results():
    """The tables of docs/accelerators.md are the stored results; writing them again changes nothing else."""
    docs = Path(targets.__file__).parents[1] / "docs"
    page, results = (docs / "accelerators.md").read_text(), json.loads((docs / "accelerators.json").read_text())
    assert targets.with_tables(page, results) == page
    assert targets.with_tables(page.replace("| 6.6 |", "| 6.7 |"), results) == page


def test_workload_reports_its_shares_of_the_peak_rates(tmp_path, monkeypatch):
    """A reduced GPU workload reports the shares of peak FLOPs and bandwidth that follow from counts by hand."""
    shape = {**benchmark.GPU_WORKLOAD["presets"]["0.5B"], "vocab_size": 20, "hidden_size": 16, "head_dim": 8}
    shape |= {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    small = {**benchmark.GPU_WORKLOAD, "num_prompts": 2, "group_size": 4, "micro_batch": 4, "presets": {"tiny": shape}}
    small["variants"] = {"short": {"prompt_len": [5, 5], "max_new_tokens": 6}}
    (tmp_path / "workload.json").write_text(json.dumps(small))
    monkeypatch.setattr(benchmark, "peaks_of", lambda kind: (1e9, 1e8))
    options = ["--preset", "tiny", "--variant", "short", "--steps", "2", "--drop", "1"]
    result = benchmark.main([*options, "--workload", str(tmp_path / "workload.json")])
    length, median = result["mean_len"], result["median"]
    weights = 16 * (16 + 2 * 8 + 16 + 3 * 32)
    prompt = 5 * (weights + 2 * 16 * 3)
    completions = 4 * length * (weights + 16 * 20 + 2 * 16 * (5 + (length + 1) / 2))
    operations = 6 * 2 * (prompt + completions)
    assert result["update_flops_share"] == pytest.approx(operations / median["update"] / 1e9, rel=0.02, abs=1e-4)
    keys = 2 * (5 + 4 * (length + 1) / 2) * 2 * 8 * 2
    read = length * (2 * (weights + 16 * 20) + keys)
    assert result["decode_bandwidth_share"] == pytest.approx(read / median["rollout"] / 1e8, rel=0.02, abs=1e-4)


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(sort_digits.__file__).parent.glob("[a-z]*.py")))
def test_each_experiment_can_be_imported_and_describes_its_flags(name, capsys):
    module = importlib.import_module(f"experiments.{name}")
    if hasattr(module, "main") and inspect.signature(module.main).parameters:
        assert module.__doc__.count(f"python -m experiments.{name}") >= 1
        with pytest.raises(SystemExit) as ended:
            module.main(["--help"])
        assert ended.value.code == 0
        assert "--" in capsys.readouterr().out
