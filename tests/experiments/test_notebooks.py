"""The notebooks run from top to bottom, shortened by their own switch, and learn; what is committed is whole."""

import base64
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
CHINESE = [path for path in NOTEBOOKS if path.stem.endswith("_zh")]  # their code is run in the English ones
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
TOOL = runpy.run_path(str(ROOT / "docs" / "notebooks.py"), run_name="notebooks")


def run(notebook, directory):
    """Execute a notebook in a directory, in a kernel of its own, and return it with its outputs."""
    settings = {"JAX_PLATFORMS": "cpu", "GRPO_JAX_NOTEBOOK_SMALL": "1", "PYTHONPATH": str(ROOT)}
    # Not MPLBACKEND: the kernel chooses that by itself, and so shows its figures.
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | settings
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(directory)}})
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    return client.execute(env=env)


def pictures(notebook):
    """The pictures in the outputs of each cell that has any, as bytes."""
    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    found = [[o["data"]["image/png"] for o in cell if "image/png" in o.get("data", {})] for cell in outputs]
    return [[base64.b64decode(picture) for picture in cell] for cell in found if cell]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_quickstart(tmp_path):
    notebook = run(nbformat.read(ROOT / "experiments/notebooks/quickstart.ipynb", as_version=4), tmp_path)
    rewards = [line["reward"] for line in lines(tmp_path / "runs/quickstart/metrics.jsonl")]
    assert rewards[-1] > rewards[0] + 0.05
    assert (tmp_path / "runs/quickstart/final/model.safetensors").is_file()
    ((live,),) = pictures(notebook)  # redrawn in one place
    assert live[:8] == b"\x89PNG\r\n\x1a\n"


def test_grpo_from_scratch(tmp_path):
    notebook = run(nbformat.read(ROOT / "experiments/notebooks/grpo_from_scratch.ipynb", as_version=4), tmp_path)
    # What each claim is, its cell has checked; here, that each has drawn its plot.
    assert len(pictures(notebook)) == 11
    assert sum(cell.source.count("## Claim ") for cell in notebook.cells) == 5


def test_gsm8k(tmp_path):
    notebook = run(nbformat.read(ROOT / "experiments/notebooks/gsm8k.ipynb", as_version=4), tmp_path)
    results = json.loads((tmp_path / "runs/gsm8k/results.json").read_text())
    assert results["arms"]["grpo"]["after"].keys() == {"greedy", "sampled", "format", "pass@2"}
    assert len(lines(tmp_path / "runs/gsm8k-20/test.jsonl")) == 20
    assert lines(tmp_path / "runs/gsm8k/metrics.jsonl")[-1]["step"] == 3
    assert len(pictures(notebook)) == 1


def test_kaggle(tmp_path):
    # The other one, for GPUs, has the same code (test_kit.py).
    notebook = run(nbformat.read(ROOT / "experiments/notebooks/kaggle_tpu.ipynb", as_version=4), tmp_path)
    assert lines(tmp_path / "runs/kit/sft/metrics.jsonl")[-1]["step"] == 4
    assert lines(tmp_path / "runs/kit/grpo/metrics.jsonl")[-1]["step"] == 4
    assert (tmp_path / "runs/kit/final/model.safetensors").is_file()
    assert len(pictures(notebook)) == 1


def test_agents(tmp_path):
    notebook = run(nbformat.read(ROOT / "experiments/notebooks/agents.ipynb", as_version=4), tmp_path)
    assert len(notebook.cells) == 10
    assert lines(tmp_path / "runs/agents/metrics.jsonl")[-1]["step"] == 10
    assert len(pictures(notebook)) == 1


@pytest.mark.quick
def test_a_cell_that_raises_fails(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in ("import os", "assert os.environ['PYTHONPATH'] == ''")]
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(nbformat.v4.new_notebook(cells=cells), tmp_path)


# The first cell -----------------------------------------------------------------------------------------------------


def install_cell(path):
    return next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code").source


class Machine:
    """Where the first cell runs: what is installed on it, and pip, which does what it is told."""

    def __init__(self, monkeypatch, directory, installed, *, release=None):
        self.installed, self.release, self.asked = dict(installed), release, []
        self.pip_brings = {}
        directory.mkdir(exist_ok=True)
        monkeypatch.chdir(directory)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(importlib.metadata, "version", self.version)
        found = importlib.util.find_spec
        hidden = lambda name: None if name == "experiments" else found(name)
        monkeypatch.setattr(importlib.util, "find_spec", hidden)
        monkeypatch.setattr(subprocess, "run", self.run)

    def version(self, name):
        if name not in self.installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.installed[name]

    def run(self, command, **_):
        if command[:2] == ["git", "clone"]:
            self.cloned = command[-2]
            make_clone(Path(command[-1]))
            return types.SimpleNamespace(returncode=0)
        assert command[:3] == [sys.executable, "-m", "pip"]
        self.asked.append(command[3:])
        if command[3] == "download":
            if self.release is None:
                return types.SimpleNamespace(returncode=1)
            Path("grpo_jax-release").mkdir()
            shutil.copy(self.release, "grpo_jax-release")
        if command[3] == "install":
            self.installed |= {"grpo_jax": "0.1.0", **self.pip_brings}
        return types.SimpleNamespace(returncode=0)

    def run_cell(self, **settings):
        code = install_cell(NOTEBOOKS[0])
        for name, value in settings.items():
            code, changed = re.subn(rf'^{name} = (None|".*?")', f"{name} = {value!r}", code, flags=re.M)
            assert changed == 1
        exec(compile(code, "install", "exec"), {})

    def installs(self):
        return [arguments[1:] for arguments in self.asked if arguments[0] == "install"]


def make_clone(directory):
    """What the cell knows a clone by."""
    for name in ("grpo_jax", "experiments/notebooks"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").touch()
    return directory


@pytest.mark.quick
def test_the_first_cell_is_the_same_in_all_notebooks():
    assert len({install_cell(path) for path in NOTEBOOKS}) == 1
    assert [path.stem for path in CHINESE] == ["grpo_from_scratch_zh", "quickstart_zh"]
    assert len(NOTEBOOKS) == 8


@pytest.mark.quick
def test_the_first_cell_takes_the_clone_that_it_lies_in_or_beside(tmp_path, monkeypatch):
    clone = make_clone(tmp_path / "clone")
    for place in (clone / "experiments" / "notebooks", tmp_path):
        with monkeypatch.context() as patch:
            machine = Machine(patch, place, {"jax": "0.7.2"})
            machine.run_cell()
            assert machine.installs() == [[str(clone), "jax==0.7.2", "--quiet"]]
            assert sys.path[-1] == str(clone)


@pytest.mark.quick
def test_the_first_cell_takes_the_clone_that_it_is_told(tmp_path, monkeypatch):
    clone = make_clone(tmp_path / "clone")
    machine = Machine(monkeypatch, tmp_path / "elsewhere", {})
    with pytest.raises(RuntimeError, match="SOURCE = '/' is no clone of the library"):
        machine.run_cell(SOURCE="/")
    machine.run_cell(SOURCE=str(clone))
    assert machine.installs() == [[str(clone), "--quiet"]]  # there was no jax to be kept


@pytest.mark.quick
def test_the_first_cell_takes_the_release_where_there_is_no_clone(tmp_path, monkeypatch):
    make_clone(tmp_path / "release" / "grpo_jax-0.1.0")
    release = shutil.make_archive(str(tmp_path / "grpo_jax-0.1.0"), "gztar", tmp_path / "release")
    machine = Machine(monkeypatch, tmp_path / "content", {"jax": "0.10.2"}, release=release)
    machine.run_cell(REPOSITORY="")
    unpacked = tmp_path / "content" / "grpo_jax-release" / "grpo_jax-0.1.0"
    assert machine.asked[0][0] == "download"
    assert machine.asked[0][-2:] == ["grpo_jax", "--quiet"]
    assert machine.installs() == [[str(unpacked), "jax==0.10.2", "--quiet"]]
    assert sys.path[-1] == str(unpacked)


@pytest.mark.quick
def test_the_first_cell_clones_the_repository_where_its_address_is_set(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path / "content", {"jax": "0.10.2"})
    machine.run_cell(REPOSITORY="https://github.com/me/grpo_jax")
    clone = tmp_path / "content" / "grpo_jax-clone"
    assert machine.cloned == "https://github.com/me/grpo_jax"
    assert machine.installs() == [[str(clone), "jax==0.10.2", "--quiet"]]
    assert sys.path[-1] == str(clone)


@pytest.mark.quick
def test_the_first_cell_stops_where_there_is_neither(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path / "content", {"jax": "0.10.2"})
    with pytest.raises(RuntimeError, match="pip download failed: clone the repository and set SOURCE, above"):
        machine.run_cell(REPOSITORY="")
    assert machine.installs() == []


@pytest.mark.quick
def test_the_first_cell_stops_if_jax_is_another_one(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, make_clone(tmp_path / "clone"), {"jax": "0.7.2"})
    machine.pip_brings = {"jax": "0.10.2"}
    with pytest.raises(RuntimeError, match=r"pip has replaced jax 0\.7\.2 by 0\.10\.2: restart the runtime"):
        machine.run_cell()


@pytest.mark.quick
def test_the_first_cell_installs_nothing_where_all_is_there(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path, {"jax": "0.10.2", "grpo_jax": "0.1.0"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    machine.run_cell()
    assert machine.asked == []


@pytest.mark.quick
@named
def test_what_is_committed_was_run_in_order_and_is_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if path.stem == "gsm8k":  # to be measured: what a CPU would put out is noise
        assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]
    else:
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]
    assert not [cell for cell in notebook.cells if cell.metadata]  # such as a tag that lets a cell raise
    assert all(len(picture) < 150_000 for cell in pictures(notebook) for picture in cell)
    text = path.read_text(encoding="utf-8")
    assert len(text) < 500_000
    assert not re.search(r"/(home|tmp|root|work)/|Traceback|Warning", text)


@pytest.mark.quick
@named
def test_links_of_a_notebook_lead_somewhere(path):
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    assert not [target for target in targets if not (path.parent / target).is_file()]


# In Chinese, and with an address ------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.stem)
def test_a_notebook_in_chinese_has_the_code_and_the_outputs_of_the_english_one(path):
    english = path.with_name(path.name.replace("_zh", ""))
    ours, theirs = (nbformat.read(each, as_version=4).cells for each in (path, english))
    assert [cell.cell_type for cell in ours] == [cell.cell_type for cell in theirs]
    named_code = lambda text: sorted(set(re.findall(r"`([^`\n]+)`", text)))
    for own, other in zip(ours, theirs, strict=True):
        if own.cell_type == "code":
            assert own == other
        else:
            assert re.search(r"[\u4e00-\u9fff]", own.source)
            assert re.findall(r"^#+ ", own.source, flags=re.M) == re.findall(r"^#+ ", other.source, flags=re.M)
            assert named_code(own.source) == named_code(other.source)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["grpo_from_scratch", "grpo_from_scratch_zh"])
def test_figures_in_the_text_are_those_that_the_cell_before_has_put_out(name):
    cells = nbformat.read(ROOT / f"experiments/notebooks/{name}.ipynb", as_version=4).cells
    (place,) = (i for i, cell in enumerate(cells) if cell.source.startswith("synced = "))
    put_out = "".join(output.get("text", "") for output in cells[place].outputs)
    figures = re.findall(r"\d\.\d\d", put_out)
    assert len(figures) == 4
    assert sorted(re.findall(r"\b\d\.\d\d\b", cells[place + 1].source)) == sorted(figures)


@pytest.mark.quick
@named
def test_the_address_of_the_repository_is_set_in_one_place(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    again = TOOL["addressed"](json.loads(json.dumps(notebook)), path.stem, TOOL["repository"]())
    assert again == notebook, "python docs/notebooks.py makes them so"
    made = TOOL["addressed"](json.loads(json.dumps(notebook)), path.stem, "https://github.com/me/grpo_jax")
    badge = f"(https://colab.research.google.com/github/me/grpo_jax/blob/main/experiments/notebooks/{path.name})"
    assert "".join(made["cells"][0]["source"]).splitlines()[2].endswith(badge)
    code = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    assert sum('\nREPOSITORY = "https://github.com/me/grpo_jax"' in source for source in code) == 1
    assert TOOL["addressed"](json.loads(json.dumps(made)), path.stem, "https://github.com/me/grpo_jax") == made
    assert TOOL["addressed"](made, path.stem, TOOL["repository"]()) == notebook


@pytest.mark.quick
def test_a_translation_takes_code_and_keeps_its_text():
    cell = lambda kind, source: {"cell_type": kind, "source": source}
    original = {"cells": [cell("markdown", "text"), cell("code", "new")], "nbformat": 4}
    translation = {"cells": [cell("markdown", "文字"), cell("code", "old")], "nbformat": 4}
    made = TOOL["with_code_of"](translation, original)
    assert [each["source"] for each in made["cells"]] == ["文字", "new"]
    with pytest.raises(ValueError, match="has other cells than the original"):
        TOOL["with_code_of"](translation, {"cells": original["cells"][:1]})
