"""The recipes: each is read with its data, rewards and environments, and one runs on a small checkpoint."""

import json
from pathlib import Path

import pytest
import yaml
from cli_files import lines_of, run
from tiny import tiny_policy, tiny_tokenizer

from grpo_jax import from_pretrained, save_pretrained
from grpo_jax.cli.runfile import read_run
from grpo_jax.models.lora import LoraModel

RECIPES = Path(__file__).parents[2] / "experiments" / "recipes"
REWARDS = {"agent": ["few_guesses", "found"], "countdown": ["accuracy", "follows_rules"], "stories": ["uses_word"]}
REWARDS |= {"instruct": ["score", "right"], "gsm8k": ["accuracy", "format"]}


@pytest.fixture
def problems(tmp_path):
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1\n#### {n + 1}"} for n in range(8)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "gsm8k.jsonl")


def read(name, problems):
    """A recipe with all but its model; rewards are tried on the columns of its rows."""
    data = {"data": problems, "eval_data": problems} if name == "gsm8k" else {}
    return read_run(RECIPES / f"{name}.yaml", data, wanted=("data", "rewards"))


@pytest.mark.quick
@pytest.mark.parametrize("name", REWARDS)
def test_a_recipe_is_read(name, problems):
    if name == "instruct":
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed, which makes the problems")
    recipe = read(name, problems)
    assert [function.__name__ for function in recipe.rewards] == REWARDS[name]
    assert (recipe.environment_factory is not None) == (name == "agent")
    assert recipe.rows
    page = (RECIPES.parents[1] / "docs" / "cli.md").read_text()
    assert f"| {name}.yaml | " in page
    assert {path.stem for path in RECIPES.glob("*.yaml")} == REWARDS.keys()


def test_a_recipe_with_adapters_runs_and_is_exported(tmp_path, monkeypatch):
    own = tiny_tokenizer()
    tokenizer = own.__class__(tokenizer_object=own.backend_tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '<eos>' }}{% endfor %}a:"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    policy = tiny_policy().replace(files={path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()})
    save_pretrained(tmp_path / "model", policy.replace(config={**policy.config, "max_position_embeddings": 1024}))
    monkeypatch.chdir(tmp_path)  # it finds its modules from any directory
    smaller = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    smaller |= {"max_completion_length": 8, "warmup_steps": 0, "logging_steps": 1, "eval_data": "null"}
    smaller |= {"eval_steps": "null", "model": tmp_path / "model"}
    run("train", RECIPES / "countdown.yaml", *(part for name, x in smaller.items() for part in (f"--{name}", x)))
    run_dir = tmp_path / "runs" / "countdown"
    (line,) = [line for line in lines_of((run_dir / "metrics.jsonl").read_text().splitlines()) if "reward" in line]
    assert {f"rewards/{name}/mean" for name in REWARDS["countdown"]} <= line.keys()
    kept = yaml.safe_load((run_dir / "run.yaml").read_text())
    assert (kept["model"], kept["max_steps"]) == (str(tmp_path / "model"), 1)
    run("export", run_dir, "out", "--merge")
    assert not isinstance(from_pretrained("out").model, LoraModel)
    run("export", run_dir, "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
