"""The experiment on reasoning-gym: its problems and rewards, and the whole script with a new checkpoint."""

import json

import numpy as np
import pytest
from tiny import tiny_policy, tiny_tokenizer

from experiments import instruct, problems
from grpo_jax import from_pretrained, save_pretrained

gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed, which makes the problems")

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '<eos>' }}{% endfor %}"


@pytest.fixture
def model(tmp_path):
    """A checkpoint of a few thousand parameters with a chat template and room for a prompt."""
    tokenizer = tiny_tokenizer().__class__(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}a:{% endif %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    files = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    config = {**tiny_policy().config, "max_position_embeddings": 1024}
    save_pretrained(tmp_path / "model", tiny_policy().replace(files=files, config=config))
    return tmp_path / "model"


@pytest.mark.quick
def test_problems_are_shown_once_and_none_is_held_out_and_learnt():
    test, learnt = instruct.held_out(size=20), instruct.train_problems(seed=3, size=30)
    questions = [row["prompt"][-1]["content"] for row in (*test, *learnt)]
    assert len(questions) == len(set(questions))
    assert {row["task"] for row in test} == {row["task"] for row in learnt} == set(problems.TASKS)
    assert [row["task"] for row in test[: len(problems.TASKS)]] == list(problems.TASKS)
    assert [turn["role"] for turn in test[0]["prompt"]] == ["user", "assistant", "user"]
    shown = [row["prompt"][0]["content"] for row in test]
    assert len(set(shown)) == len(shown), "another example before each: one alone would be what the model says"
    assert instruct.train_problems(seed=3, size=30) == learnt != instruct.train_problems(seed=4, size=30)


@pytest.mark.quick
def test_the_rewards_are_the_suites():
    """An answer in spaces gets 1, and any other text what the verifier gives it."""
    rows = instruct.held_out(size=5)
    columns = {name: [row[name] for row in rows] for name in ("task", "problem")}
    same = {"seed": instruct.HELD_OUT, "size": 5}
    made = [gym.create_dataset(row["task"], **same, **problems.TASKS[row["task"]]) for row in rows]
    entries = [data[row["problem"][2]] for data, row in zip(made, rows, strict=True)]
    right = [[{"role": "assistant", "content": f" {entry['answer']}\n"}] for entry in entries]
    assert instruct.score(right, **columns) == instruct.right(right, **columns) == [1.0] * len(rows)
    long = [[{"role": "assistant", "content": f"It is {entry['answer']}."}] for entry in entries]
    scores = [data.score_answer(f"It is {e['answer']}.", e) for data, e in zip(made, entries, strict=True)]
    assert instruct.score(long, **columns) == scores
    assert instruct.right(long, **columns) == [0.0] * len(rows)


def test_the_script_runs_from_a_checkpoint_to_a_picture(model, tmp_path, capsys):
    flags = ["--model", model, "--run-dir", tmp_path / "run", "--seeds", 0, "--steps", 2, "--eval-steps", 1]
    flags += ["--prompts", 2, "--problems", 12, "--held-out", 4, "--curve", 3, "--batch", 4, "--learning-rate", 1e-3]
    results = instruct.main([str(flag) for flag in flags])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == results
    arms = results["arms"]
    assert list(arms) == ["seed_0", "control"]
    for arm in arms.values():
        assert set(arm["before"]) == set(arm["after"]) == {*problems.TASKS, "all", "kl", instruct.GENERAL}
        assert arm["before"]["kl"] == pytest.approx(0, abs=1e-3)
        assert arm["before"]["all"]["greedy"] == pytest.approx(
            np.mean([arm["before"][task]["greedy"] for task in problems.TASKS]), abs=1e-2
        )
    assert instruct.curve(tmp_path / "run" / "seed_0")[0] == [0, 1, 2]
    assert (tmp_path / "run" / "instruct.png").stat().st_size > 10_000
    # A new model answers nothing: only coin flips move it.
    directories = (model, *(tmp_path / "run" / name / "final" for name in ("seed_0", "control")))
    start, same, moved = (from_pretrained(path).params["norm"]["scale"] for path in directories)
    assert np.array_equal(start, same)
    assert not np.array_equal(start, moved)


def test_the_same_command_goes_on_after_an_interruption(model, tmp_path, monkeypatch, capsys):
    """The second run is cut off at its last test: the first is not done again, and the second not trained again."""
    flags = ["--model", model, "--run-dir", tmp_path / "run", "--seeds", 0, 1, "--no-control", "--steps", 2]
    flags += ["--eval-steps", 1, "--prompts", 2, "--problems", 12, "--held-out", 4, "--curve", 3, "--batch", 4]
    flags, test, tested = [str(flag) for flag in flags], instruct.test, []

    def cut_off(*arguments):
        tested.append(1)
        if len(tested) == 3:  # before, seed 0, seed 1
            raise KeyboardInterrupt
        return test(*arguments)

    monkeypatch.setattr(instruct, "test", cut_off)
    with pytest.raises(KeyboardInterrupt):
        instruct.main(flags)
    metrics = [tmp_path / "run" / name / "metrics.jsonl" for name in ("seed_0", "seed_1")]
    written = [path.read_bytes() for path in metrics]
    results = instruct.main(flags)
    assert len(tested) == 4
    assert [path.read_bytes() for path in metrics] == written
    assert list(results["arms"]) == ["seed_0", "seed_1"]
    assert {"before", "seed_0", "seed_1"} <= set(results["seconds"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="was begun with other settings of steps: repeat those"):
        instruct.main([*flags, "--steps", "3"])


def test_base_rates_alone(model, capsys, monkeypatch):
    monkeypatch.setattr(instruct, "PADDING", 288)  # a token of the tiny model is a letter
    found = instruct.main(["--model", str(model), "--measure", "--tasks", "chain_sum", "sudoku", "--held-out", "4"])
    assert found == {"chain_sum": {"greedy": 0.0, "sampled": 0.0}}
    told = capsys.readouterr().out
    assert "chain_sum: {'greedy': 0.0, 'sampled': 0.0}, 4 problems" in told
    assert "sudoku: left out, its prompts have up to 8" in told
