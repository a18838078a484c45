"""The recipes: each is read with its data, rewards and environments."""

import json
from pathlib import Path

import pytest

from grpo_jax.cli.runfile import read_run

pytestmark = pytest.mark.quick

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
