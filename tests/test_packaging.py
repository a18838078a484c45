"""The wheel, the source distribution and the version bounds of the dependencies."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = sorted((ROOT / "constraints").glob("*.txt"))
LEFT_BEHIND = ("__pycache__", "runs", ".ipynb_checkpoints")  # by Python, scripts and notebooks


def test_wheel_and_source_distribution_contents(tmp_path):
    """The wheel contains the whole library and nothing else; the source distribution contains the files of a clone."""
    if Version(pytest.importorskip("setuptools").__version__) < Version("77"):
        pytest.skip("setuptools is older than pyproject.toml requires")
    copy, out = tmp_path / "copy", tmp_path / "dist"
    unwanted = shutil.ignore_patterns(*LEFT_BEHIND, "*.egg-info", ".git", ".venv*", "build", "dist", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=unwanted)
    (copy / "experiments/runs").mkdir()
    (copy / "experiments/runs/report.html").write_text("")  # left by a script
    out.mkdir()
    code = f"from setuptools import build_meta as b; b.build_wheel({str(out)!r}); b.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)

    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"grpo_jax", f"grpo_jax-{PROJECT['version']}.dist-info"}
    assert {path.relative_to(copy).as_posix() for path in (copy / "grpo_jax").rglob("*.py")} <= names
    assert {name.rpartition(".")[2] for name in names if name.startswith("grpo_jax/")} == {"py", "typed", "html"}

    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for folder in ("grpo_jax", "experiments", "tests", "docs", "constraints"):
        here = [path.relative_to(copy) for path in (copy / folder).rglob("*.*")]
        assert {path.as_posix() for path in here if not {*LEFT_BEHIND} & {*path.parts}} <= names
    assert not [name for name in names if "/runs/" in name]
    assert {"README.md", "pyproject.toml", "setup.cfg", "mkdocs.yml"} <= names


def bounds(requirements):
    """Map the name of each requirement to its version specifier."""
    found = [Requirement(line) for line in requirements]
    return {requirement.name: requirement.specifier for requirement in found}


LOWEST = bounds(PROJECT["dependencies"])


def lines_of(path):
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def lowest(specifier):
    (least,) = (Version(part.version) for part in specifier if part.operator == ">=")
    return least


@pytest.mark.quick
@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "tpu"])
def test_accelerator_extra_requires_jax_with_that_extra_and_bound(extra):
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"][extra])
    assert (requirement.name, requirement.extras) == ("jax", {extra})
    assert requirement.specifier == LOWEST["jax"]


@pytest.mark.quick
@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_limit_jax_and_agree_with_the_bounds(path):
    named = bounds(lines_of(path))
    assert set(named) == {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex"}
    assert "://" not in path.read_text(encoding="utf-8")
    assert path.stem == f"jax-{lowest(named['jax'])}"
    assert named["jax"] == named["jaxlib"]
    for name, specifier in named.items():
        assert {part.operator for part in specifier} in ({">=", "<"}, {">=", "<="})
        assert lowest(specifier) >= lowest(LOWEST.get(name, LOWEST["jax"]))
    assert path.name in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.quick
def test_constraints_cover_all_older_jax_versions():
    """The constraints files cover all supported jax versions below 0.10, the version that the latest flax requires."""
    ranges = sorted((bounds(lines_of(path))["jax"] for path in CONSTRAINTS), key=lowest)
    ends = [next(part.version for part in specifier if part.operator == "<") for specifier in ranges]
    assert [lowest(specifier) for specifier in ranges] == [lowest(LOWEST["jax"]), *map(Version, ends[:-1])]
    assert ends[-1] == "0.10"
