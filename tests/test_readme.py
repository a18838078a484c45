"""The examples in the README and the recipes run, with a small local checkpoint instead of the one from the hub."""

import re
from pathlib import Path

import jax
import pytest
from chat_families import family
from tiny import chat_checkpoint, tiny_policy

from grpo_jax import from_pretrained, init_policy, save_pretrained
from grpo_jax.run.prepare import prepare
from grpo_jax.watch.writer import read_lines

README = Path(__file__).parent.parent / "README.md"
TURNS = README.parent / "docs" / "turns.md"


def blocks(page):
    """Return the Python code blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_quick_start(tmp_path, monkeypatch):
    code = blocks(README)[0]
    monkeypatch.chdir(tmp_path)
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", chat_checkpoint(tmp_path)).replace("max_steps=50", "max_steps=2")
    exec(compile(code, "README.md", "exec"), {})
    assert from_pretrained(tmp_path / "runs/sums/model").eos_token_ids == tiny_policy().eos_token_ids
    assert (tmp_path / "runs/sums/report.png").exists()
    assert (tmp_path / "runs/sums/report.html").exists()


def test_your_own_loop():
    names = {}
    exec(compile(blocks(README)[1], "README.md", "exec"), names)
    assert float(names["rewards"].mean()) > 0.9


@pytest.fixture
def small_model(tmp_path, monkeypatch):
    """Save a small model whose chat template supports tools, and return its directory."""
    tokenizer, _ = family("hermes")
    config = tiny_policy().config | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    files = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}
    config |= {"pad_token_id": 0, "max_position_embeddings": 1024}
    policy = init_policy(config, jax.random.key(0), tokenizer=tokenizer)
    save_pretrained(tmp_path / "checkpoint", policy.replace(files=files))
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "checkpoint")


def run_code(page, model, part, **names):
    """Run the page's example that contains `part` for one short step with `model`, and return the names it defines."""
    (code,) = [code for code in blocks(page) if part in code]
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", model).replace("max_steps=50", "max_steps=1")
    exec(compile(code.replace("max_completion_length=256", "max_completion_length=32"), page.name, "exec"), names)
    return names


def test_several_turns(small_model, tmp_path):
    names = run_code(TURNS, small_model, "class Guess")
    (line,) = read_lines(tmp_path / "runs/guess/metrics.jsonl")
    assert "rewards/Guess/mean" in line
    assert line["turns/mean"] >= 1
    game = names["Guess"]()
    game.reset(37, prompt="")
    assert [game.respond(text) for text in ("32", "48", "x", " 37\n")] == ["higher", "lower", "higher", None]
    assert game.get_reward() == 1 - 0.2


@pytest.mark.quick
def test_tool_recipe(small_model, monkeypatch):
    """The tool of the recipe works, and a run can be prepared from the recipe's arguments to `train`."""
    monkeypatch.setattr("grpo_jax.train", lambda *given, run_dir, **more: prepare(*given, **more))
    names = run_code(TURNS, small_model, "tools=")
    assert names["multiply"](417, 283) == 118011
