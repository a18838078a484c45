"""Layout of the package: layers, cycles, heavy imports, lengths of files and functions, types and public names."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_jax

pytestmark = pytest.mark.quick
PACKAGE = Path(grpo_jax.__file__).parent
# Sub-packages from the lowest layer up; each imports only from lower layers and from itself.
LAYERS = [
    {"types", "messages"},
    {"policy", "config"},
    {"maths"},
    {"models"},
    {"hub"},
    {"text"},
    {"rewards"},
    {"rollout"},
    {"update", "suites", "engines"},
    {"watch"},
    {"run"},
    {"compat", "planning"},
    {"cli"},
    {"__main__"},
]
PURE = {"types", "messages", "maths", "models"}
COMPOSED = {"rollout", "update"}
HOST = {"ends", "episodes", "episode_setup", "tools"}  # modules of `rollout` for text and other processes
OUTSIDE = {"pure": {"jax", "flax", "chex", "numpy"}, "composed": {"jax", "flax", "chex", "numpy", "optax"}}
HEAVY = {"transformers", "orbax", "matplotlib", "rich", "safetensors", "huggingface_hub", "torch", "tokenizers"}
HEAVY |= {"tensorboardX", "wandb", "trackio", "reasoning_gym", "verifiers", "openenv", "math_verify", "pebble"}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


@functools.cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Return the path and the syntax tree of each module by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(("grpo_jax", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = path, ast.parse(path.read_text())
    return found


@functools.cache
def imports(name: str, *, anywhere: bool = False) -> frozenset[str]:
    """Return the modules imported at a module's top level; with `anywhere`, also in functions and for type checkers."""
    found, tree = set(), modules()[name][1]
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in modules() else node.module or "" for full in names}
    return frozenset(found)


def test_imports_point_downwards():
    assert {package_of(name) for name in modules()} == set.union(*LAYERS) | {"grpo_jax"}
    layer_of = {package: i for i, packages in enumerate(LAYERS) for package in packages}
    for name in modules().keys() - {"grpo_jax"}:
        for module in imports(name):
            if module.startswith("grpo_jax") and package_of(module) != package_of(name):
                assert layer_of[package_of(module)] < layer_of[package_of(name)], f"{name} imports {module}"


def test_imports_have_no_cycles():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done and name in modules():
            for module in imports(name, anywhere=True):
                visit(module, (*path, name))
            done.add(name)

    for name in modules():
        visit(name, ())


def test_inner_layers_import_only_allowed_packages():
    for name in modules():
        ring = "pure" if package_of(name) in PURE else "composed" if package_of(name) in COMPOSED else "shell"
        host = name.removeprefix("grpo_jax.rollout.") in HOST or "rollout.engine" in name
        if ring == "shell" or host:
            continue
        inner = PURE if ring == "pure" else PURE | COMPOSED | {"config"}
        for module in imports(name):
            top = module.split(".")[0]
            allowed = top in OUTSIDE[ring] or top in sys.stdlib_module_names
            assert package_of(module) in inner if top == "grpo_jax" else allowed, f"{name} ({ring}) imports {module}"


def test_heavy_packages_are_imported_inside_functions():
    for name in modules():
        assert not {module.split(".")[0] for module in imports(name)} & HEAVY, name


def lines_of(function: ast.FunctionDef) -> int:
    """Count the lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for name, (_, tree) in modules().items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_files_and_functions_are_short_and_modules_have_docstrings():
    assert all(ast.get_docstring(tree) for _, tree in modules().values())
    lines = {name: len(path.read_text().splitlines()) for name, (path, _) in modules().items()}
    assert not {name: count for name, count in lines.items() if count > 400}
    assert len(lines) <= 157
    assert sum(lines.values()) <= 31_000
    assert not {(name, node.name): lines_of(node) for name, node in functions() if lines_of(node) > 60}


def test_calls_and_types_are_explicit():
    """`Any` and unpacked arguments are limited to callers' own keywords, JSON, and untyped libraries."""
    nodes = [node for _, tree in modules().values() for node in ast.walk(tree)]
    assert sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes) <= 215
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    assert sum(keyword.arg is None for call in calls for keyword in call.keywords) <= 30
    assert sum(isinstance(argument, ast.Starred) for call in calls for argument in call.args) <= 71


def test_public_names_of_modules_are_distinct():
    """Public names of modules are distinct, except commands named after functions, and TRL names in `compat`."""
    homes: dict[str, set[str]] = {}
    for module, (_, tree) in modules().items():
        if module != "grpo_jax.cli.commands" and package_of(module) != "compat":
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, set()).add(module)
    homes.pop("main")  # two scripts define it
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_importing_the_package_does_no_work():
    code = (
        "import sys, grpo_jax\n"
        "assert 'jax' not in sys.modules\n"
        "heavy = {'transformers', 'orbax', 'matplotlib', 'safetensors', 'huggingface_hub', 'torch'}\n"
        "every = {name: getattr(grpo_jax, name) for name in grpo_jax.__all__}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import jax._src.xla_bridge as bridge\n"
        "assert not bridge._backends, 'a device was initialized'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_and_programs_see_the_same_names():
    (guarded,) = [node for node in modules()["grpo_jax"][1].body if isinstance(node, ast.If)][:1]
    read = {alias.name: node.module for node in guarded.body for alias in node.names}
    assert read == grpo_jax._MODULE_OF
    assert sorted(read) == grpo_jax.__all__


@pytest.mark.parametrize("code", [
    "import grpo_jax; assert inspect.isfunction(grpo_jax.plan) and inspect.isfunction(grpo_jax.planning.programs)\n"
    "assert grpo_jax.rewards.number_reward and 'train' in dir(grpo_jax)\n"
    "assert not hasattr(grpo_jax, 'nonsense') and not hasattr(grpo_jax, '__wrapped__')",
    "from grpo_jax.planning import programs; from grpo_jax import plan; assert inspect.isfunction(plan)\n"
    "from grpo_jax import *; assert train and plan and GRPOConfig",
])  # fmt: skip
def test_names_are_imported_on_first_use(code):
    subprocess.run([sys.executable, "-c", f"import inspect\n{code}"], check=True)


def test_test_files_have_a_quick_test_and_distinct_names():
    """Every test file has a `-m quick` test and a distinct name; pytest refuses two modules with the same name."""
    files = [*Path(__file__).parent.rglob("*.py")]
    assert len({path.name for path in files}) == len(files)
    slow = {path.name for path in files if path.name.startswith("test_") and "mark.quick" not in path.read_text()}
    assert slow == {"test_two_processes.py", "test_rehearse.py"}, "whole runs"
