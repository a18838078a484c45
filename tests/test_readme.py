"""The README's quick start runs as it stands, on a small checkpoint in the place of the hub's."""

import re
from pathlib import Path

import jax
import pytest
from chat_families import family
from tiny import tiny_policy, tiny_tokenizer

from grpo_jax import from_pretrained, init_policy, save_pretrained
from grpo_jax.watch.lines import read_lines

README = Path(__file__).parent.parent / "README.md"
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


def chat_checkpoint(directory):
    tokenizer = tiny_tokenizer().__class__(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory / "tokenizer")
    files = {path.name: path.read_bytes() for path in (directory / "tokenizer").iterdir()}
    save_pretrained(directory / "model", tiny_policy().replace(files=files))
    return str(directory / "model")


def test_quick_start(tmp_path, monkeypatch):
    (code,) = re.findall(r"## Quick start.*?```python\n(.*?)```", README.read_text(), flags=re.S)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 15
    monkeypatch.chdir(tmp_path)
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", chat_checkpoint(tmp_path)).replace("max_steps=50", "max_steps=2")
    exec(compile(code, "README.md", "exec"), {})
    assert from_pretrained(tmp_path / "runs/sums/model").eos_token_ids == tiny_policy().eos_token_ids
    assert (tmp_path / "runs/sums/report.png").exists()
    assert (tmp_path / "runs/sums/report.html").exists()


def several_turns(readme):
    """The blocks of Python with the two examples."""
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), flags=re.M | re.S)
    return [code for code in blocks if "environment_factory=" in code]


@pytest.mark.quick
def test_both_readmes_have_the_same_examples_of_several_turns():
    assert several_turns(README) == several_turns(README.with_name("README.zh-CN.md"))


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_several_turns(name, tmp_path, monkeypatch):
    """Both examples run, on a small model whose template has tools; what it draws hardly ever is a number or a call."""
    tokenizer, _ = family("hermes")
    config = tiny_policy().config | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    directory = tmp_path / "checkpoint"
    tokenizer.save_pretrained(directory)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    config |= {"pad_token_id": 0, "max_position_embeddings": 1024}
    policy = init_policy(config, jax.random.key(0), tokenizer=tokenizer)
    save_pretrained(directory, policy.replace(files=files))
    (code,) = several_turns(README.with_name(name))
    monkeypatch.chdir(tmp_path)
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(directory)).replace("max_steps=50", "max_steps=1")
    names: dict = {}
    exec(compile(code.replace("max_completion_length=256", "max_completion_length=32"), name, "exec"), names)
    for run, reward in (("guess", "Guess"), ("sums-with-a-tool", "right")):
        (line,) = read_lines(tmp_path / "runs" / run / "metrics.jsonl")
        assert f"rewards/{reward}/mean" in line
        assert line["turns/mean"] >= 1
    game, secret = names["Guess"](), 37
    game.reset(secret, prompt="")
    assert [game.respond(text) for text in ("32", "48", "x", " 37\n")] == ["higher", "lower", "higher", None]
    assert game.get_reward() == 1 - 0.2


def tables_of_the_house() -> tuple[list[list[str]], list[list[str]]]:
    """The rooms and the reading lists of the README's map, line by line."""
    (section,) = re.findall(r"^## The house\n(.*?)^## ", README.read_text(), flags=re.S | re.M)
    rooms, trails = re.findall(r"^\|---\|---\|\n((?:\|.*\n)+)", section, flags=re.M)
    cells = lambda table: [line.strip("| ").split(" | ") for line in table.splitlines()]
    return cells(rooms), cells(trails)


@pytest.mark.quick
def test_the_map_has_every_room():
    rooms, _ = tables_of_the_house()
    package = README.parent / "grpo_jax"
    there = sorted(f"`{path.parent.name}/`" for path in package.glob("*/__init__.py"))
    assert sorted(room for room, _ in rooms) == there


@pytest.mark.quick
def test_train_generate_and_a_step_are_read_in_four_files_each():
    _, trails = tables_of_the_house()
    steps = ["one optimizer step, without the padding", "one optimizer step, for any model"]
    assert [what for what, _ in trails] == ["`train`", "`generate`", *steps]
    for _, files in trails:
        assert 1 <= len(re.findall(r"`[a-z_/]+\.py`", files)) <= 4


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", README.read_text()))))
def test_every_file_that_the_map_names_is_there(name):
    root = README.parent
    assert (root / "grpo_jax" / name).exists() or (root / name).exists(), name
