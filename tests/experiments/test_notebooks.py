"""One notebook runs from top to bottom, shortened by its own switch; the others parse, and their names exist."""

import ast
import base64
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import grpo_jax

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def pictures(cell):
    """The pictures in the outputs of a cell, as bytes."""
    data = [output.get("data", {}) for output in cell.outputs]
    return [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]


def test_quickstart(tmp_path):
    notebook = nbformat.read(ROOT / "experiments/notebooks/quickstart.ipynb", as_version=4)
    settings = {"JAX_PLATFORMS": "cpu", "GRPO_JAX_NOTEBOOK_SMALL": "1", "PYTHONPATH": str(ROOT)}
    # Without MPLBACKEND: the kernel chooses a backend that shows its figures.
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | settings
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute(env=env)
    metrics = (tmp_path / "runs/quickstart/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(line)["reward"] for line in metrics]
    assert rewards[-1] > rewards[0] + 0.05
    assert (tmp_path / "runs/quickstart/final/model.safetensors").is_file()
    (live,) = (picture for cell in notebook.cells if cell.cell_type == "code" for picture in pictures(cell))
    assert live[:8] == b"\x89PNG\r\n\x1a\n"  # redrawn in one place


@pytest.mark.quick
@named
def test_names_that_a_notebook_uses_exist(path):
    """The names it imports from the package and the experiments, and the keywords of the package's functions."""
    tree = ast.parse(
        "\n".join(re.sub(r"^( *)[%!].*$", r"\1pass", cell.source, flags=re.M) for cell in code_cells(path))
    )
    found = {"grpo_jax": grpo_jax}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("grpo_jax", "experiments"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
    assert len(found) > 2 or path.stem.startswith("kaggle")
    calls = [(node, node.func.id) for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")]
    for node, name in calls:
        if callable(found.get(name)):
            parameters = inspect.signature(found[name]).parameters
            if not any(one.kind == one.VAR_KEYWORD for one in parameters.values()):
                assert {one.arg for one in node.keywords if one.arg} <= parameters.keys(), name
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and hasattr(node.value, "id")]
    for node in attributes:
        if isinstance(found.get(node.value.id), types.ModuleType):
            assert hasattr(found[node.value.id], node.attr), f"{node.value.id}.{node.attr}"


@pytest.mark.quick
@named
def test_what_is_committed_was_run_in_order_and_is_small(path):
    nbformat.validate(nbformat.read(path, as_version=4))
    code = code_cells(path)
    if path.stem == "gsm8k":  # to be measured: what a CPU would put out is noise
        assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]
    else:
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]
    assert all(len(picture) < 150_000 for cell in code for picture in pictures(cell))
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


@dataclasses.dataclass
class Machine:
    """A machine on which the first cell runs: its installed packages, and a pip that brings others."""

    installed: dict[str, str]
    pip_brings: dict[str, str] = dataclasses.field(default_factory=dict)
    asked: list[list[str]] = dataclasses.field(default_factory=list)

    def version(self, name):
        if name not in self.installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.installed[name]

    def run(self, command, **_):
        assert command[:3] == [sys.executable, "-m", "pip"]
        self.asked.append(command[3:])
        self.installed |= {"grpo_jax": "0.1.0", **self.pip_brings}
        return types.SimpleNamespace(returncode=int(command[3] == "download"))  # there is no release

    def run_cell(self, monkeypatch, directory):
        monkeypatch.chdir(directory)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(importlib.metadata, "version", self.version)
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "experiments" else find(name))
        monkeypatch.setattr(subprocess, "run", self.run)
        exec(compile(code_cells(NOTEBOOKS[0])[0].source, "install", "exec"), {})


@pytest.mark.quick
def test_the_first_cell_installs_the_clone_and_keeps_jax(tmp_path, monkeypatch):
    assert len({code_cells(path)[0].source for path in NOTEBOOKS}) == 1
    clone = tmp_path / "clone"
    for name in ("grpo_jax", "experiments/notebooks"):
        (clone / name).mkdir(parents=True)
        (clone / name / "__init__.py").touch()
    for place in (clone / "experiments" / "notebooks", tmp_path):  # in the clone, and next to it
        with monkeypatch.context() as patch:
            machine = Machine({"jax": "0.7.2"})
            machine.run_cell(patch, place)
            assert machine.asked == [["install", str(clone), "jax==0.7.2", "--quiet"]]
            assert sys.path[-1] == str(clone)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"pip has replaced jax 0\.7\.2 by 0\.10\.2"):
        Machine({"jax": "0.7.2"}, pip_brings={"jax": "0.10.2"}).run_cell(patch, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="pip download failed: clone the repository"):
        Machine({"jax": "0.7.2"}).run_cell(patch, elsewhere)
