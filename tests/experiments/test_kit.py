"""The kit for notebook machines: its figures in the notebooks."""

import json
from pathlib import Path

import nbformat
import pytest

from experiments import kit

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {"v5e-8": "kaggle_tpu", "T4-2": "kaggle_gpu"}


def read(name):
    return nbformat.read(ROOT / "experiments" / "notebooks" / f"{NOTEBOOKS[name]}.ipynb", as_version=4)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_says_what_its_machines_compiler_found(name):
    """The notebooks of the kit for notebook machines say what their machines' compilers found."""
    figures = json.loads(kit.FIGURES.read_text(encoding="utf-8"))[name]
    assert kit.table(name, figures) in read(name).cells[0].source
    assert all(one["peak_bytes"] < one["memory_bytes"] and not one["note"] for one in figures.values())
    machine = kit.MACHINES[name]
    devices = int(name.rpartition("-")[2])
    assert machine.grpo.mesh == machine.sft.mesh
    assert machine.grpo.sizes(devices).prompts * machine.grpo.max_steps / machine.grpo.sizes(devices).updates > 1000


def test_both_notebooks_have_the_same_code_but_for_the_hours():
    tpu, gpu = ([cell.source for cell in read(name).cells if cell.cell_type == "code"] for name in NOTEBOOKS)
    assert [
        one for one, other in zip(tpu, gpu, strict=True) if one != other.replace("HOURS = 10.5", "HOURS = 7.5")
    ] == []
