"""The README's quick start runs as it stands, on a small checkpoint in the place of the hub's."""

import re
from pathlib import Path

import pytest
from tiny import tiny_policy, tiny_tokenizer

from grpo_jax import from_pretrained, save_pretrained

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
