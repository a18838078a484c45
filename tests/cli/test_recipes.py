"""Each file in experiments/recipes loads with its data, rewards and environments."""

import json
from pathlib import Path

import pytest

from grpo_jax.cli.runfile import read_run

RECIPES = Path(__file__).parents[2] / "experiments" / "recipes"
REWARDS = {"agent": ["few_guesses", "found"], "countdown": ["accuracy", "follows_rules"], "stories": ["uses_word"]}
REWARDS |= {"instruct": ["score", "right"], "gsm8k": ["accuracy", "format"]}
REWARDS |= {"clevr": ["accuracy"], "clevr_gemma": ["accuracy"]}


@pytest.mark.quick
@pytest.mark.parametrize("name", REWARDS)
def test_recipe_is_read(name, tmp_path):
    if name == "instruct":
        pytest.importorskip("reasoning_gym", reason="reasoning-gym, which generates the problems, is not installed")
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1\n#### {n + 1}"} for n in range(8)]
    if name.startswith("clevr"):
        rows = [{"image": f"{n}.png", "problem": "How many?", "solution": f"<answer> {n} </answer>"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from_hub = name == "gsm8k" or name.startswith("clevr")
    data = dict.fromkeys(("data", "eval_data"), str(tmp_path / "rows.jsonl")) if from_hub else {}
    recipe = read_run(RECIPES / f"{name}.yaml", data, load=("data", "rewards"))
    assert [function.__name__ for function in recipe.rewards] == REWARDS[name]
    assert (recipe.environment_factory is not None) == (name == "agent")
    assert recipe.rows
    assert f"| {name}.yaml | " in (RECIPES.parents[1] / "docs" / "cli.md").read_text()
    assert {path.stem for path in RECIPES.glob("*.yaml")} == REWARDS.keys()
