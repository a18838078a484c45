"""The handwritten digits: fixed images and answers, the model's checkpoint, and a shortened run."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn, which contains the images, is not installed")

from experiments import digits
from grpo_jax.watch.writer import read_lines


@pytest.mark.quick
def test_digits_are_split_in_the_same_way_and_lessons_have_one_image_of_each():
    rows, held_out = digits.make_rows()
    pixels = [np.asarray(row["image"]).tobytes() for row in (*rows, *held_out)]
    assert (len(rows), len(held_out)) == (1297, 500)
    assert len(set(pixels)) == len(pixels), "an image is in both parts"
    assert [row["answer"] for row in digits.make_rows()[1]] == [row["answer"] for row in held_out]
    taught = [digits.sft_rows(rows, seed, passes=2) for seed in (0, 1)]
    for lessons in taught:
        assert [row["completion"][0]["content"] for row in lessons] == list("0123456789") * 2
    assert not {id(row["image"]) for row in taught[0]} & {id(row["image"]) for row in taught[1]}


def test_digits_prints_json_and_writes_its_files(tmp_path, monkeypatch, capsys):
    """Two steps on handwritten digits. One arm gets random rewards."""
    monkeypatch.setattr(digits, "PROMPTS", 4)
    run_dir, picture = tmp_path / "run", tmp_path / "docs" / "digits.png"
    options = ["--seed", "3", "--steps", "2", "--warm-up-steps", "40", "--held-out", "40", "--control"]
    results = digits.main([*options, "--run-dir", str(run_dir), "--picture", str(picture)])
    printed, written = capsys.readouterr().out.splitlines()[-1], (run_dir / "results.json").read_text()
    assert json.loads(printed) == results == json.loads(written)
    assert results["arms"].keys() == {"grpo, seed 3", "random, seed 3"}
    for arm in results["arms"].values():
        assert arm["before"].keys() == arm["after"].keys() == {"greedy", "sampled"}
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for name in ("completions.jsonl", "final/model.safetensors", "random/metrics.jsonl"):
        assert (run_dir / name).stat().st_size > 0, name
    assert [step for step, _ in digits.held_out_curve(run_dir / "random")] == [0, 2]
    for run, rewarded in (("", "accuracy"), ("random", "random_reward")):
        lines = [line for line in read_lines(run_dir / run / "metrics.jsonl") if "reward" in line]
        assert [line["reward"] for line in lines] == [line[f"rewards/{rewarded}/mean"] for line in lines]
        assert any(line["reward"] for line in lines)
