"""What is installed: the library alone, beside the jax that is there; and what PyPI shows of it."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = sorted((ROOT / "constraints").glob("*.txt"))
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


LEFT_BEHIND = ("__pycache__", "runs", ".ipynb_checkpoints")  # by Python, scripts and notebooks, where they ran


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A wheel and a source distribution of a copy of what is here; built without a network."""
    if Version(pytest.importorskip("setuptools").__version__) < Version("77"):
        pytest.skip("setuptools is older than what pyproject.toml asks for")
    copy, out = (tmp_path_factory.mktemp(name) for name in ("copy", "dist"))
    # As git would: nothing that a build, an editor or a run has left.
    unwanted = shutil.ignore_patterns(*LEFT_BEHIND, "*.egg-info", ".git", ".venv*", "build", "dist", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=unwanted, dirs_exist_ok=True)
    for folder in ("experiments/runs", "experiments/notebooks/runs"):  # what running a notebook leaves
        (copy / folder / "quickstart").mkdir(parents=True)
        (copy / folder / "quickstart" / "report.html").write_text("")
    code = f"from setuptools import build_meta as b; b.build_wheel({str(out)!r}); b.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    return out


def test_the_wheel_holds_the_library_alone_and_all_of_it(dist):
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"grpo_jax", f"grpo_jax-{PROJECT['version']}.dist-info"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "grpo_jax").rglob("*.py")}
    assert sources <= names
    assert {name.rpartition(".")[2] for name in names if name.startswith("grpo_jax/")} == {"py", "typed", "html"}


@pytest.mark.quick
def test_the_source_distribution_has_what_a_clone_has(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    folders = ("grpo_jax", "experiments", "tests", "docs", "constraints")
    here = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert {path.as_posix() for path in here if not {*LEFT_BEHIND} & {*path.parts}} <= names
    assert not [name for name in names if "/runs/" in name]
    assert {"README.md", "README.zh-CN.md", "pyproject.toml", "setup.py", "setup.cfg", "mkdocs.yml"} <= names


@pytest.mark.quick
def test_what_pypi_is_told(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        told = BytesParser().parsebytes(file.read(f"grpo_jax-{PROJECT['version']}.dist-info/METADATA"))
    assert told["Author"] == "The grpo_jax authors"
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Description-Content-Type"] == "text/markdown"
    assert set(told.get_all("Provides-Extra")) >= {"cuda12", "cuda13", "tpu"}
    text = told.get_payload()
    assert "GRPO" in text
    assert [target for target in links(text) if not target.startswith(("https://", "#"))] == []


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.quick
def test_the_links_of_the_description_lead_into_the_repository():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    address = "https://example.org/me/grpo_jax"
    made = SETUP["description"](text, address + "/")
    targets = links(made)
    assert len(targets) == len(links(text)) + 1 > 15  # the picture, which is HTML in the README
    files = [re.sub(rf"^{address}/(blob|raw)/main/", "", target).partition("#")[0] for target in targets]
    assert not [name for name in files if name and not (ROOT / name).exists()]
    assert f"({address}/raw/main/docs/sort_digits.png)" in made
    assert f"[Design]({address}/blob/main/docs/design.md)" in made
    assert SETUP["urls"](address)["Changelog"] == f"{address}/blob/main/CHANGELOG.md"


@pytest.mark.quick
def test_without_an_address_no_link_leads_nowhere():
    made = SETUP["description"]("[a](docs/a.md) ![b](b.png) [c](https://c.org) [d](#d)", "")
    assert made == "a  [c](https://c.org) [d](#d)"
    assert SETUP["urls"]("") == {}


@pytest.mark.quick
def test_the_version_stands_in_one_place():
    version = PROJECT["version"]
    sources = [*(ROOT / "grpo_jax").rglob("*.py"), ROOT / "setup.py", ROOT / "setup.cfg", ROOT / "mkdocs.yml"]
    assert not [path for path in sources if f'"{version}"' in path.read_text(encoding="utf-8")]


@pytest.mark.quick
def test_the_changelog_is_in_form():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", text, flags=re.M)
    assert heads[0] == "[Unreleased]"
    for head in heads[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", head)
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for section in re.split(r"^## .*\n", text, flags=re.M)[1:]:
        named = re.findall(r"^### (.*)$", section, flags=re.M)
        assert named == [kind for kind in kinds if kind in named]
        assert not section.split("### ")[0].strip()


# Beside the jax that is there -----------------------------------------------------------------------------------------


def bounds(requirements):
    """Name → the versions that are asked for."""
    found = [Requirement(line) for line in requirements]
    return {requirement.name: requirement.specifier for requirement in found}


FLOORS = bounds(PROJECT["dependencies"])


def lines_of(path):
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def floor(specifier):
    (least,) = (Version(part.version) for part in specifier if part.operator == ">=")
    return least


@pytest.mark.quick
@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "tpu"])
def test_an_accelerator_has_jaxs_own_extra_from_the_same_floor(extra):
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"][extra])
    assert (requirement.name, requirement.extras) == ("jax", {extra})
    assert requirement.specifier == FLOORS["jax"]


@pytest.mark.quick
@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_hold_a_jax_back_and_agree_with_the_floors(path):
    named = bounds(lines_of(path))
    assert set(named) == {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex"}
    assert "://" not in path.read_text(encoding="utf-8")
    assert path.stem == f"jax-{floor(named['jax'])}"
    assert named["jax"] == named["jaxlib"]
    for name, specifier in named.items():
        assert {part.operator for part in specifier} in ({">=", "<"}, {">=", "<="})
        assert floor(specifier) >= floor(FLOORS.get(name, FLOORS["jax"]))
    assert path.name in (ROOT / "README.md").read_text(encoding="utf-8")
    assert path.name in (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


@pytest.mark.quick
def test_constraints_leave_no_gap_below_the_jax_that_needs_none():
    """flax 0.12.7 asks for jax 0.10, and nothing that pip takes beside it does for more."""
    ranges = sorted((bounds(lines_of(path))["jax"] for path in CONSTRAINTS), key=floor)
    ends = [next(part.version for part in specifier if part.operator == "<") for specifier in ranges]
    assert [floor(specifier) for specifier in ranges] == [floor(FLOORS["jax"]), *map(Version, ends[:-1])]
    assert ends[-1] == "0.10"
