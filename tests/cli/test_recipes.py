"""The recipes: each runs from its file, on a small checkpoint, with fewer and shorter completions."""

import json
from pathlib import Path

import pytest
import yaml
from cli_files import lines_of, run
from tiny import tiny_policy, tiny_tokenizer

from experiments import gsm8k, instruct, stories
from grpo_jax import from_pretrained, save_pretrained
from grpo_jax.cli.runfile import read_run
from grpo_jax.models.lora import LoraModel

RECIPES = Path(__file__).parents[2] / "experiments" / "recipes"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '<eos>' }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint with a chat template and room for the longest prompt."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer().__class__(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}a:{% endif %}"
    tokenizer.save_pretrained(directory)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    policy = tiny_policy().replace(files=files)
    save_pretrained(directory, policy.replace(config={**policy.config, "max_position_embeddings": 1024}))
    return directory


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "gsm8k.jsonl"
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1\n#### {n + 1}"} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.quick
def test_there_are_five():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {"stories", "gsm8k", "countdown", "agent", "instruct"}
    page = (RECIPES.parents[1] / "docs" / "cli.md").read_text()
    assert all(f"| {path.name} | " in page for path in RECIPES.glob("*.yaml"))


@pytest.mark.quick
def test_the_recipe_of_stories_is_the_experiment():
    config = stories.make_config(seed=0, steps=100, prompts=16).to_dict()
    recipe = read_run(RECIPES / "stories.yaml", wanted=("data", "rewards"))
    ours = recipe.config.to_dict()
    assert {name for name in config if config[name] != ours[name]} == {"temperature_eval", "per_device_eval_batch_size"}
    assert (recipe.rows, recipe.eval_rows) == stories.make_rows()
    assert recipe.rewards == [stories.uses_word]


@pytest.mark.quick
def test_the_recipe_of_instruct_is_the_experiment():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed, which makes the problems")
    config = instruct.make_config(instruct.parse([]), seed=0).to_dict()
    recipe = read_run(RECIPES / "instruct.yaml", wanted=("data", "eval_data", "rewards"))
    ours = recipe.config.to_dict()
    assert {name for name in config if config[name] != ours[name]} <= {"save_steps", "seed"}
    assert recipe.rewards == [instruct.score, instruct.right]
    assert len(recipe.eval_rows) == 96


@pytest.mark.quick
def test_the_recipe_of_gsm8k_asks_and_rewards_as_the_experiment(problems):
    where = {"data": str(problems), "eval_data": str(problems)}
    recipe = read_run(RECIPES / "gsm8k.yaml", where, wanted=("data", "rewards"))
    problem = json.loads(problems.read_text().splitlines()[0])
    assert recipe.rows[0]["prompt"] == gsm8k.make_row(problem, chat=True)["prompt"]
    assert recipe.rewards == [gsm8k.accuracy, gsm8k.well_formed]
    assert recipe.config.reward_weights == (1.0, 0.2)


SMALLER = ["--max_steps", 1, "--num_generations", 2, "--per_device_train_batch_size", 4, "--logging_steps", 1]
SMALLER += [
    "--gradient_accumulation_steps",
    1,
    "--max_completion_length",
    8,
    "--warmup_steps",
    0,
    "--eval_steps",
    "null",
]
REWARDS = {"stories": ["uses_word"], "gsm8k": ["accuracy", "format"], "countdown": ["accuracy", "follows_rules"]}
REWARDS |= {"agent": ["few_guesses", "found"], "instruct": ["score", "right"]}


@pytest.mark.parametrize("name", REWARDS)
def test_a_recipe_runs(name, model, problems, tmp_path, monkeypatch):
    if name == "instruct":
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed, which makes the problems")
    monkeypatch.chdir(tmp_path)  # it finds its modules from anywhere
    own = ["--data", problems, "--eval_data", f"{{path: {problems}, rows: 2}}"] if name == "gsm8k" else []
    own += ["--eval_data", "null"] if name in ("countdown", "stories", "instruct") else []
    run("train", RECIPES / f"{name}.yaml", "--model", model, *SMALLER, *own)
    run_dir = tmp_path / "runs" / name
    (line,) = [line for line in lines_of((run_dir / "metrics.jsonl").read_text().splitlines()) if "reward" in line]
    assert [f"rewards/{function}/mean" in line for function in REWARDS[name]] == [True] * len(REWARDS[name])
    assert line["step"] == 1
    assert ("turns/mean" in line) == (name == "agent")
    kept = yaml.safe_load((run_dir / "run.yaml").read_text())
    assert (kept["model"], kept["max_steps"]) == (str(model), 1)
    if name == "countdown":
        run("export", run_dir, "out", "--merge")
        assert not isinstance(from_pretrained("out").model, LoraModel)
