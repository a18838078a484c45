"""The README's quick start runs as it stands, on a small checkpoint in the place of the hub's."""

import re
from pathlib import Path

import jax
import pytest
from chat_families import family
from tiny import tiny_policy, tiny_tokenizer

from grpo_jax import from_pretrained, init_policy, save_pretrained
from grpo_jax.watch.writer import read_lines

README = Path(__file__).parent.parent / "README.md"
CHINESE = README.with_name("README.zh-CN.md")
SOURCE = README.parent / "docs" / "source.md"
RECIPES = README.parent / "docs" / "recipes.md"
MEASURED = [README, CHINESE, *(SOURCE.parent / f"{name}.md" for name in ("demonstrations", "speed", "zh/questions"))]
BILINGUAL = ["README", *(f"docs/{name}" for name in ("cli", "coming_from_trl", "design", "experiments", "recipes"))]
BILINGUAL += ["docs/runs", "docs/wrong"]
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


def sections(page):
    """The sections of a page by their headings, with what stands before the first."""
    return re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.M)


def blocks(page, language):
    """The blocks of a language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def tables(page):
    """The cells of each table of a page, row by row."""
    found = re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), flags=re.M)
    return [[list(map(str.strip, line.strip("|").split("|"))) for line in table.splitlines()] for table in found]


@pytest.mark.quick
def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 170


@pytest.mark.quick
@pytest.mark.parametrize("name", BILINGUAL)
def test_both_languages_have_the_same_commands_and_tables(name):
    page = README.parent / f"{name}.md"
    other = CHINESE if page == README else page.parent / "zh" / page.name
    assert f"]({other.relative_to(page.parent)})" in sections(page)[0]
    assert blocks(page, "python") == blocks(other, "python")
    assert blocks(page, "text") == blocks(other, "text")
    # What stands behind a "#" is said in the language of the page.
    for language in ("sh", "yaml"):
        mute = lambda text: re.sub(r" *#.*", "", "".join(blocks(text, language)))
        assert mute(page) == mute(other)
    indented = lambda text: re.findall(r"^    (python -m .*)$", text.read_text(encoding="utf-8"), flags=re.M)
    assert indented(page) == indented(other)
    pictures = lambda text: re.findall(
        r"!\[[^\]]+\]\((?:\.\./)?([^)]+)\)|(?:srcset|src)=\"([^\"]+)", text.read_text(encoding="utf-8")
    )
    assert pictures(page) == pictures(other)
    assert len(sections(page)) == len(sections(other)) >= 3
    ours, theirs = tables(page), tables(other)
    assert [(len(table), len(table[0])) for table in ours] == [(len(table), len(table[0])) for table in theirs]
    # Cell by cell the same code, figures and links (to the Chinese page, where there is one), whatever stands between.
    kept = re.compile(r"`[^`]+`|\]\([^)#]+|\d+(?:\.\d+)?")
    plain = lambda cell: re.sub(r"\]\((\.\./)*(docs/)?(zh/)?", "](", cell).replace("_zh.ipynb", ".ipynb")
    cells = lambda found: [sorted(kept.findall(plain(cell))) for table in found for row in table for cell in row]
    assert cells(ours) == cells(theirs)
    assert name == "docs/runs" or sum(map(len, cells(ours))) > 15


@pytest.mark.quick
def test_every_row_of_the_comparison_has_its_command():
    for page in (README, CHINESE):
        head, _, *rows = next(table for table in tables(page) if "Tunix" in table[0])
        assert len(rows) >= 4
        assert len(head) == 5
        for row in rows:
            assert re.match(r"`python -m experiments\.\w+`", row[-1])


@pytest.mark.quick
@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.name)
def test_what_was_measured_has_its_command(page):
    """A section that says what was measured has the command; "to be measured" and "not measured" are no figures."""
    nothing = r"(to be|not|no\w*|what others have) +(been )?measured|has been\s+measured yet|was measured on a GPU"
    claims = []
    for section in sections(page):
        text = re.sub(nothing, "", " ".join(section.split()))
        if re.search(r"\bmeasured\b|实测", text):
            claims.append(section)
            assert re.search(r"python -m (experiments|grpo_jax)\.\w+|grpo-jax \w+", section), section[:80]
    assert claims


def several_turns(page):
    """The blocks of Python with an example of several turns."""
    return [code for code in blocks(page, "python") if "environment_factory=" in code or "tools=" in code]


@pytest.mark.parametrize(("page", "run"), [(README, "guess"), (RECIPES, "sums-with-a-tool")], ids=["README", "recipe"])
def test_several_turns(page, run, tmp_path, monkeypatch):
    """The example runs, on a small model whose template has tools; what it draws hardly ever is a number or a call."""
    tokenizer, _ = family("hermes")
    config = tiny_policy().config | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    directory = tmp_path / "checkpoint"
    tokenizer.save_pretrained(directory)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    config |= {"pad_token_id": 0, "max_position_embeddings": 1024}
    policy = init_policy(config, jax.random.key(0), tokenizer=tokenizer)
    save_pretrained(directory, policy.replace(files=files))
    (code,) = several_turns(page)
    monkeypatch.chdir(tmp_path)
    code = code.replace("Qwen/Qwen2.5-0.5B-Instruct", str(directory)).replace("max_steps=50", "max_steps=1")
    names: dict = {}
    exec(compile(code.replace("max_completion_length=256", "max_completion_length=32"), page.name, "exec"), names)
    (line,) = read_lines(tmp_path / "runs" / run / "metrics.jsonl")
    assert f"rewards/{'Guess' if page is README else 'right'}/mean" in line
    assert line["turns/mean"] >= 1
    if page is not README:
        assert names["multiply"](417, 283) == 118011
        return
    game, secret = names["Guess"](), 37
    game.reset(secret, prompt="")
    assert [game.respond(text) for text in ("32", "48", "x", " 37\n")] == ["higher", "lower", "higher", None]
    assert game.get_reward() == 1 - 0.2


def tables_of_the_house() -> tuple[list[list[str]], list[list[str]]]:
    """The rooms and the reading lists of the map, line by line."""
    rooms, trails, _ = tables(SOURCE)
    return rooms[2:], trails[2:]


@pytest.mark.quick
def test_the_map_has_every_room():
    rooms, _ = tables_of_the_house()
    package = README.parent / "grpo_jax"
    there = sorted(f"`{path.parent.name}/`" for path in package.glob("*/__init__.py"))
    assert sorted(room for room, _ in rooms) == there


@pytest.mark.quick
def test_train_generate_and_a_step_are_read_in_four_files_each():
    _, trails = tables_of_the_house()
    runs = ["`train`", "the arguments of `train`"]
    rollouts = ["`generate`", "completions of several turns", "where a turn ends"]
    steps = ["one optimizer step, without the padding", "one optimizer step, for any model"]
    questions = ["old log-probs, of any turn", "the ratio exp(new − old), in any turn"]
    questions += ["which rows come next, after a kill too", "the score of an evaluation, and the training reward"]
    questions += ["the reference's log-probs, and the KL term", "a new `loss_type`"]
    questions += ["`advantage_fn`, `surrogate` of the caller's", "advantages of turns and tokens"]
    questions += ["a teacher", "what the device holds", "a checkpoint"]
    assert [what for what, _ in trails] == [*runs, "`sft`", *rollouts, *steps, *questions, "a GGUF file"]
    for _, files in trails:
        assert 1 <= len(re.findall(r"`[a-z_/]+\.py`", files)) <= 4


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", SOURCE.read_text()))))
def test_every_file_that_the_map_names_is_there(name):
    root = README.parent
    assert (root / "grpo_jax" / name).exists() or (root / name).exists(), name
