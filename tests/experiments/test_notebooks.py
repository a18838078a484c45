"""The quickstart notebook runs in its shortened form; the others parse, and the names that they use exist."""

import ast
import base64
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
from experiments import kit

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\]\(([^)\s]+\.\w+)\)")
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
code_cells = lambda path: [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def pictures(cell):
    """Return the PNG images in a cell's outputs as bytes."""
    data = [output.get("data", {}) for output in cell.outputs]
    return [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]


def test_quickstart(tmp_path):
    notebook = nbformat.read(ROOT / "experiments/notebooks/quickstart.ipynb", as_version=4)
    settings = {"JAX_PLATFORMS": "cpu", "GRPO_JAX_NOTEBOOK_SMALL": "1", "PYTHONPATH": str(ROOT)}
    # Without MPLBACKEND, the kernel chooses a backend that displays figures inline.
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
    assert live[:8] == b"\x89PNG\r\n\x1a\n"  # there is a single image, which is updated in place


@pytest.mark.quick
@named
def test_names_used_by_notebooks_exist(path):
    """Names imported from the package and the experiments exist, as do the keywords passed to their functions."""
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
def test_notebooks_were_run_in_order_are_small_and_have_valid_links(path):
    nbformat.validate(nbformat.read(path, as_version=4))
    code = code_cells(path)
    if path.stem == "gsm8k":  # not run yet: results from a CPU would be meaningless
        assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]
    else:
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]
    assert all(len(picture) < 150_000 for cell in code for picture in pictures(cell))
    text = path.read_text(encoding="utf-8")
    links = [target for cell in nbformat.read(path, as_version=4).cells for target in LINK.findall(cell.source)]
    assert not [target for target in links if not (path.parent / target).is_file()]
    assert len(text) < 500_000
    assert not re.search(r"/(home|tmp|root|work)/|Traceback|Warning", text)


@pytest.mark.quick
def test_first_cell_installs_the_clone_and_keeps_jax(tmp_path, monkeypatch):
    (install,) = {code_cells(path)[0].source for path in NOTEBOOKS}
    clone = tmp_path / "clone"
    for folder in (clone / "grpo_jax", clone / "experiments" / "notebooks"):
        folder.mkdir(parents=True)
    (clone / "grpo_jax" / "__init__.py").touch()
    find, commands, installed = importlib.util.find_spec, [], {"jax": "0.7.2"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "experiments" else find(name))

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    def run(command, **_):
        """Install the package like pip. The second call replaces jax."""
        commands.append(command[3:])
        installed.update(grpo_jax="0.1.0", jax="0.7.2" if len(commands) == 1 else "0.10.2")
        return types.SimpleNamespace(returncode=0)

    monkeypatch.chdir(clone / "experiments" / "notebooks")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(subprocess, "run", run)
    exec(compile(install, "install", "exec"), {})
    assert commands == [["install", str(clone), "jax==0.7.2", "--quiet"]]
    assert sys.path[-1] == str(clone)
    monkeypatch.chdir(tmp_path)  # the clone is in the current directory
    del installed["grpo_jax"]
    with pytest.raises(RuntimeError, match=r"pip has replaced jax 0\.7\.2 by 0\.10\.2"):
        exec(compile(install, "install", "exec"), {})


KIT = {
    "v5e-8": ROOT / "experiments/notebooks/kaggle_tpu.ipynb",
    "T4-2": ROOT / "experiments/notebooks/kaggle_gpu.ipynb",
}


@pytest.mark.quick
@pytest.mark.parametrize("name", KIT)
def test_notebook_contains_the_compiled_figures(name):
    figures = json.loads(kit.FIGURES.read_text(encoding="utf-8"))[name]
    assert kit.table(name, figures) in nbformat.read(KIT[name], as_version=4).cells[0].source
    assert all(one["peak_bytes"] < one["memory_bytes"] and not one["note"] for one in figures.values())
    machine = kit.MACHINES[name]
    assert machine.grpo.mesh == machine.sft.mesh
    assert (
        machine.grpo.sizes().prompts_per_iteration * machine.grpo.max_steps / machine.grpo.sizes().updates_per_iteration
        > 1000
    )


@pytest.mark.quick
def test_kaggle_notebooks_differ_only_in_the_hours():
    tpu, gpu = ([cell.source for cell in code_cells(KIT[name])] for name in KIT)
    assert tpu == [cell.replace("HOURS = 10.5", "HOURS = 7.5") for cell in gpu]
