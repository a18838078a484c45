"""Links, files and names in the documentation exist, its examples run, and public docstrings are complete."""

import copy
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_readme import blocks
from tiny import tiny_policy, tiny_tokenizer

import grpo_jax
from grpo_jax import GRPOConfig, SFTConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
GUIDES = [*READMES, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("zh/*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES = [*GUIDES, *OTHERS, ROOT / "CHANGELOG.md", *sorted(DOCS.glob("reference/*.md"))]
REFERENCE = {page: re.findall(r"^::: (\S+)", page.read_text(), flags=re.M) for page in DOCS.glob("reference/*.md")}
FUNCTIONS = [name for name in grpo_jax.__all__ if inspect.isfunction(getattr(grpo_jax, name))]
CLASSES = [name for name in grpo_jax.__all__ if dataclasses.is_dataclass(getattr(grpo_jax, name))]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def import_name(name: str) -> None:
    """Import a module or, for a name in a module, check that the module defines it."""
    module, _, attribute = name.rpartition(".")
    if not hasattr(importlib.import_module(module), attribute):
        importlib.import_module(name)


@functools.cache
def words_of_the_code() -> set[str]:
    """Return every word in the sources of the package and the experiments."""
    sources = [*(ROOT / "grpo_jax").rglob("*.py"), *(ROOT / "experiments").rglob("*.py"), ROOT / "tests/conftest.py"]
    return {word for source in sources for word in re.findall(r"\w+", source.read_text())}


def anchors(page: Path) -> set[str]:
    """Return the link anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def sections(name: str) -> dict[str, str]:
    """Return the sections of a docstring by name; "" is the part before the first section."""
    parts = re.split(r"^(\w+):\n(?=  )", inspect.getdoc(getattr(grpo_jax, name)) or "", flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


# Finds the names of a section's entries, "  name: description", at the first level of indentation.
listed = functools.partial(re.findall, r"^  (\w+): ", flags=re.M)


# Links, files, commands, fields ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.is_file(), f"{target}: no such file"
        assert not anchor or anchor in anchors(other), f"{target}: no such heading"


@pytest.mark.quick
@pytest.mark.parametrize("page", [*GUIDES, *OTHERS], ids=lambda page: page.name)
def test_files_modules_and_names_exist(page):
    text = page.read_text()
    places = (ROOT, ROOT / "grpo_jax", ROOT / "tests", ROOT / "experiments")
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        assert any((place / name).is_file() for place in places), name
    for name in re.findall(r"(?:python -m |`)(experiments\.\w+)", text):
        assert (ROOT / (name.replace(".", "/") + ".py")).is_file(), name
    for name in re.findall(r"`(grpo_jax(?:\.\w+)+)", text):
        import_name(name)
    for module, names in re.findall(r"^from (grpo_jax[\w.]*) import ([\w, ]+)", text, flags=re.M):
        assert not [name for name in names.strip().split(", ") if not hasattr(importlib.import_module(module), name)]


@pytest.mark.quick
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_names_and_fields_exist_in_the_code(page):
    functions = [getattr(grpo_jax, name) for name in FUNCTIONS]
    functions += [grpo_jax.rewards.workers.isolated, importlib.import_module("grpo_jax.engines").vllm_scorer]
    known = {field.name for config in (GRPOConfig, SFTConfig) for field in dataclasses.fields(config)}
    known = known.union(*(inspect.signature(function).parameters for function in functions))
    known |= set(importlib.import_module("grpo_jax.compat.trl_fields").TRL_ONLY)  # TRL's names, on its page
    code = "\n".join(re.findall(r"`([^`\n]+)`", prose(page)))
    assert not set(re.findall(r"\b([a-z_]+)=(?!=)", code)) - known
    if "trl" not in page.name:
        assert not set(re.findall(r"`((?:\w+_)+\w+)`", prose(page))) - words_of_the_code()


@pytest.mark.quick
def test_starting_settings_are_a_valid_config():
    code = blocks(DOCS / "recipes.md")[0]
    names: dict[str, GRPOConfig] = {}
    exec(compile(code, "recipes.md", "exec"), names)
    assert names["config"].sizes()[:2] == (16, 128)


def test_the_custom_algorithm_runs():
    (code,) = (block for block in blocks(DOCS / "recipes.md") if "advantage_fn=" in block)
    config = GRPOConfig(num_generations=4, per_device_train_batch_size=8, max_completion_length=4, max_steps=1)
    seen: dict[str, Any] = {}

    def length(completion_ids):
        seen["rewards"] = np.array([len(ids) for ids in completion_ids], np.float32).reshape(2, 4)
        return seen["rewards"].ravel()

    names = {"policy": tiny_policy(), "rows": [{"prompt": "a"}, {"prompt": "b"}], "rewards": length, "config": config}
    exec(compile(code, "recipes.md", "exec"), names)
    lengths = np.array([[1, 2, 4, 4], [3, 3, 3, 1]])
    rewards = np.array([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]], np.float32)
    expected = grpo_jax.compute_advantages(rewards, estimator="opo", scale_rewards="none", lengths=lengths)
    found = names["advantages"](rewards[..., None], None, lengths=lengths)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert seen["rewards"].max() > 1, "the reward function must see completions with several tokens"


def test_reward_model_recipe_scores_completions_after_their_prompts(tmp_path, monkeypatch):
    """The reward model of the recipe scores each completion after its prompt, in this process and in a worker."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, num_labels=1, initializer_range=0.3, **sizes)
    torch.manual_seed(0)
    for part in (tokenizer, Qwen2ForSequenceClassification(config)):
        part.save_pretrained(tmp_path / "model")
    (code,) = blocks(DOCS / "rewards.md")
    code = re.sub(r"^MODEL = .*$", f"MODEL = {str(tmp_path / 'model')!r}", code, flags=re.M)
    (tmp_path / "judge.py").write_text(code.replace("BATCH = 16", "BATCH = 3"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "judge", raising=False)
    judge = importlib.import_module("judge").judge

    prompts = [f"{i} and {i} is" for i in range(5)]
    completions = [" x" * length for length in (5, 1, 9, 2, 2)]
    scores = judge(prompts, completions)
    # One pair at a time is neither padded nor sorted.
    alone = [judge([p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    assert scores == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 4) for score in scores}) == len(scores)
    # Messages are rendered with the model's own template.
    chats = [[{"role": "user", "content": p}] for p in prompts], [[{"role": "me", "content": c}] for c in completions]
    as_text = judge([f"user: {p}\n" for p in prompts], [f"me: {c}\n" for c in completions])
    assert judge(*chats) == pytest.approx(as_text, abs=1e-5)
    isolated = importlib.import_module("grpo_jax.rewards.workers").isolated(judge, timeout=120.0)
    assert isolated(prompts=prompts, completions=completions) == pytest.approx(scores, abs=1e-5)


@pytest.mark.quick
def test_only_workers_unpickle():
    """Only a worker unpickles, and only data from its own run."""
    text = {path: path.read_text(encoding="utf-8") for path in (ROOT / "grpo_jax").rglob("*.py")}
    imports = re.compile(r"^\s*(?:import|from) (?:pickle|cloudpickle|dill|marshal|shelve)\b", flags=re.M)
    here = {path.name for path, code in text.items() if imports.search(code)}
    assert here == {"workers.py"}
    run, _, worker = text[ROOT / "grpo_jax/rewards/workers.py"].partition("# In a worker process")
    assert "pickle.loads(" in worker
    assert not re.search(r"pickle\.loads?\(", run)
    assert not [path for path, code in text.items() if re.search(r"allow_pickle|\btorch\.load|\.recv\(\)", code)]


# The reference --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_every_public_name_is_in_the_reference_once_and_every_page_in_the_navigation():
    named = [name for names in REFERENCE.values() for name in names]
    assert len(named) == len(set(named))
    for name in grpo_jax.__all__:
        assert f"grpo_jax.{name}" in named
    for name in named:
        import_name(name)
    nav = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M))
    made = {f"notebooks/{path.stem}.md" for path in (ROOT / "experiments" / "notebooks").glob("*.ipynb")}
    made |= {"index.md", "zh/index.md", "contributing.md", "security.md", "changelog.md"}  # docs/readmes.py
    assert nav == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | made


@pytest.mark.quick
@pytest.mark.parametrize("name", grpo_jax.__all__)
def test_docstrings_have_the_required_form(name):
    first, *rest = sections(name)[""].splitlines()
    assert first.endswith(".")
    assert len(first) < 116
    assert not rest or rest[0] == ""
    if name in CLASSES and not name.endswith("Config"):  # test_config and test_sft check configs
        fields = [field.name for field in dataclasses.fields(getattr(grpo_jax, name))]
        assert listed(sections(name)["Attributes"]) == fields
    if name not in FUNCTIONS:
        return
    signature, parts = inspect.signature(getattr(grpo_jax, name)), sections(name)
    described = listed(parts["Args"])
    assert described == [parameter for parameter in signature.parameters if parameter in described]
    if described != list(signature.parameters):  # "Arguments that are not listed here have the meaning of the field"
        fields = {field.name for field in dataclasses.fields(GRPOConfig)}
        assert {*signature.parameters} - {*described} <= fields
        assert "`GRPOConfig`" in parts[""]
    assert ("Returns" in parts) == (signature.return_annotation not in (None, "None"))
    assert ">>> " in parts["Example"]
    order = ["Args", "Returns", "Raises", "Gradient", "References", "Example"]
    assert [part for part in parts if part] == [part for part in order if part in parts]
