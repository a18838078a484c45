"""Stages: SFT, then GRPO from its params; both resume, and invalid stages are rejected before anything runs."""

import json
from types import SimpleNamespace

import chex
import pytest
from cli_files import run, write_run
from tiny import tiny_policy

from grpo_jax import SFTConfig
from grpo_jax.cli import commands
from grpo_jax.cli.runfile import read_run
from grpo_jax.run.checkpoint_reader import load_params

LESSONS = [{"prompt": "say a: ", "completion": "a"}, {"prompt": "say b: ", "completion": "b"}]
SFT = {"data": "lessons.jsonl", "max_steps": 2, "learning_rate": 0.01, "per_device_train_batch_size": 3}
ALONE = {"stages": ["sft"], "rewards": None, "data": None, "eval_data": None}


def write(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lessons.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LESSONS))
    return write_run(folder, **({"stages": ["sft", "grpo"], "sft": SFT, "beta": 0.1} | changes))


def test_grpo_starts_from_the_sft_params_and_both_stages_resume(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(
        commands, "train_policy", lambda policy, *_, **how: given.append((how["resume"], policy.params))
    )
    run("train", write(tmp_path))
    kept, (first, params) = tmp_path / "run", given.pop()
    assert first == "auto"
    chex.assert_trees_all_equal(params, load_params(kept / "sft", tiny_policy().params)[1])
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(params, tiny_policy().params, atol=1e-3)

    # The stage's directory is read like one from `sft` in Python, although 3 rows do not form whole groups.
    run("export", kept / "sft", tmp_path / "out")

    # On resume, SFT is resumed unless GRPO has a checkpoint, and GRPO starts from SFT's params.
    monkeypatch.setattr(commands, "sft", lambda *_, **how: given.append(("sft", how["resume"])) or final)
    final = SimpleNamespace(params="SFT params")
    (kept / "checkpoints" / "1.orbax-checkpoint-tmp").mkdir(parents=True)  # left by a process killed while saving
    run("resume", kept)
    (kept / "checkpoints" / "1").mkdir()
    run("resume", kept)
    *before, (resumed, _) = given
    assert (before, resumed) == ([("sft", "must"), ("auto", "SFT params")], "must")


@pytest.mark.quick
def test_plan_has_both_stages(tmp_path, monkeypatch):
    """`grpo-jax plan` prints a plan for each stage."""
    configs = []
    monkeypatch.setattr(commands, "plan_run", lambda _, config, **rest: configs.append(config) or "a plan")
    assert run("plan", write(tmp_path, seed=7)) == "stage sft:\na plan\nstage grpo:\na plan\n"
    sft, grpo = configs
    assert (type(sft), sft.learning_rate, sft.seed, grpo.beta) == (SFTConfig, 0.01, 7, 0.1)
    assert run("plan", write(tmp_path, **ALONE)) == "a plan\n"


@pytest.mark.quick
def test_sft_alone_needs_no_rewards_and_uses_the_seed_of_the_run(tmp_path):
    for sft, seed in ((SFT, 7), ({**SFT, "seed": 3}, 3)):
        found = read_run(write(tmp_path, seed=7, sft=sft, **ALONE), load=("model", "data", "rewards")).sft
        assert (found.config.seed, found.config.max_steps, len(found.rows)) == (seed, 2, 2)


@pytest.mark.quick
@pytest.mark.parametrize(("changes", "message"), [
    ({"stages": ["grpo", "sft"]}, "stages must be .sft, grpo., .sft. or .grpo.; got"),
    ({"sft": None}, "sft must be a mapping with data and SFTConfig fields; got None"),
    ({"stages": None}, "sft is set, but stages does not include it"),
    ({"sft": {**SFT, "beta": 0.1}}, "sft.beta: no such field"),
    ({"sft": {**SFT, "max_length": 1}}, "sft.max_length = 1: must be at least 2"),
    ({"sft": {"max_steps": 2}}, "sft.data is missing"),
    ({"sft": {**SFT, "data": "none.jsonl"}}, "none.jsonl"),
])  # fmt: skip
def test_invalid_stages_are_rejected(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_run(write(tmp_path, **changes), load=("model", "data", "rewards"))
