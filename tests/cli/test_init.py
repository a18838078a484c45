"""The folder that `grpo-jax init` writes is a run that works; existing files are not overwritten."""

import json
from pathlib import Path

import pytest
import yaml
from cli_files import run

from grpo_jax.cli.init import write_start


def test_a_first_run_works_at_once_without_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("init", "first").splitlines()[-1] == f"start: grpo-jax train {Path('first/my_run.yaml')}"
    found = json.loads(run("evaluate", "first/my_run.yaml", "--num_generations_eval", 2))
    assert 0 < found["in_word"] < 1, "there is something to learn from the first step on"
    with pytest.raises(SystemExit, match=r"my_run.yaml is there already: give a new folder, or move it away"):
        run("init", "first")


@pytest.mark.quick
def test_an_instruct_model_gets_messages_and_sums(tmp_path):
    files = write_start(tmp_path, model="Qwen/Qwen3-0.6B")
    assert [path.name for path in files] == ["my_run.yaml", "rows.jsonl", "rewards.py"]
    assert not (tmp_path / "model").exists()
    stated = yaml.safe_load(files[0].read_text())
    assert (stated["model"], stated["prompt"][0]["role"]) == ("Qwen/Qwen3-0.6B", "user")
    assert len([json.loads(line) for line in files[1].read_text().splitlines()]) == 10
    names: dict = {}
    exec(files[2].read_text(), names)
    texts = [[{"role": "assistant", "content": text}] for text in ("42", " 42\n", "It is 42", "17 + 25 = 43")]
    assert names["right"](completions=texts, answer=["42"] * 4, question=["17 + 25"] * 4) == [1.0, 1.0, 0.3, 0.0]
