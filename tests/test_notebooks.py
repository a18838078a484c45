"""The notebooks run from top to bottom, shortened by their own switch, and learn; what is committed is whole."""

import base64
import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


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


def test_a_cell_that_raises_fails(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in ("import os", "assert os.environ['PYTHONPATH'] == ''")]
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(nbformat.v4.new_notebook(cells=cells), tmp_path)


@named
def test_what_is_committed_was_run_in_order_and_is_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]
    assert not [cell for cell in notebook.cells if cell.metadata]  # such as a tag that lets a cell raise
    assert all(len(picture) < 150_000 for cell in pictures(notebook) for picture in cell)
    text = path.read_text(encoding="utf-8")
    assert len(text) < 500_000
    assert not re.search(r"/(home|tmp|root|work)/|Traceback|Warning", text)


@named
def test_links_of_a_notebook_lead_somewhere(path):
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    assert not [target for target in targets if not (path.parent / target).is_file()]
