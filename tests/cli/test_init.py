"""The folder that `grpo-jax init` writes is a run that works; existing files are not overwritten."""

import json
from pathlib import Path

import pytest
from cli_files import run


@pytest.mark.quick
def test_a_first_run_works_at_once_without_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("init", "first").splitlines()[-1] == f"start: grpo-jax train {Path('first/my_run.yaml')}"
    found = json.loads(run("evaluate", "first/my_run.yaml", "--num_generations_eval", 2))
    assert 0 < found["in_word"] < 1, "there is something to learn from the first step on"
    with pytest.raises(SystemExit, match=r"my_run.yaml exists already: give a new folder, or move it away"):
        run("init", "first")
