"""The layout: layers of sub-packages, imports that point downwards without cycles, and a light package."""

import ast
import functools
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_jax

PACKAGE = Path(grpo_jax.__file__).parent
# Sub-packages from the lowest layer up; one may import from the layers before its own and nothing else.
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
HOST = {"ends", "episodes", "interaction", "played", "tools"}
PACKAGES = set.union(*LAYERS)
OUTSIDE = {"pure": {"jax", "flax", "chex", "numpy"}, "composed": {"jax", "flax", "chex", "numpy", "optax"}}
HEAVY = {"transformers", "orbax", "matplotlib", "rich", "safetensors", "huggingface_hub", "torch", "tokenizers"}
HEAVY |= {"tensorboardX", "wandb", "trackio", "reasoning_gym", "verifiers", "openenv", "math_verify", "pebble"}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(("grpo_jax", *path.relative_to(PACKAGE).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


@functools.cache
def imports(name: str, *, anywhere: bool = False) -> frozenset[str]:
    """Modules that a module imports at its top: what a function imports when it runs is no dependency of the module.

    With `anywhere` also those that a function imports, and a type checker.
    """
    found, tree = set(), ast.parse(modules()[name].read_text())
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in modules() else node.module or "" for full in whole}
    return frozenset(found)


@pytest.mark.quick
def test_every_package_has_a_layer():
    assert {package_of(name) for name in modules()} == PACKAGES | {"grpo_jax"}
    assert sum(map(len, LAYERS)) == len(PACKAGES)


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_downwards(name):
    """Sub-packages import from the layers below and without cycles (also inside functions and for type checkers), the
    inner rings import nothing of the outer ones, and importing the package does no work.
    """
    if name == "grpo_jax":
        return
    package = package_of(name)
    layer = next(i for i, packages in enumerate(LAYERS) if package in packages)
    below = set.union(set(), *LAYERS[:layer])
    for module in imports(name):
        if module.startswith("grpo_jax"):
            assert package_of(module) in below | {package}, f"{name} imports {module}, which does not lie below it"


@pytest.mark.quick
def test_no_module_imports_itself_by_way_of_others():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done and name in modules():
            for module in imports(name, anywhere=True):
                visit(module, (*path, name))
            done.add(name)

    for name in modules():
        visit(name, ())


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in sorted(modules()) if package_of(name) in PURE | COMPOSED])
def test_rings(name):
    if name.removeprefix("grpo_jax.rollout.") in HOST or "rollout.engine" in name:
        return
    ring = "pure" if package_of(name) in PURE else "composed"
    # The config is plain dataclasses: the composed ring reads its settings from one.
    inner = PURE if ring == "pure" else PURE | COMPOSED | {"config"}
    for module in imports(name):
        top = module.split(".")[0]
        if top == "grpo_jax":
            assert package_of(module) in inner, f"{name} is {ring} and imports {module}"
        else:
            assert top in OUTSIDE[ring] or top in sys.stdlib_module_names, f"{name} is {ring} and imports {module}"


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(modules()))
def test_no_module_imports_heavy_packages_at_its_top(name):
    assert not {module.split(".")[0] for module in imports(name)} & HEAVY


@pytest.mark.quick
@pytest.mark.parametrize(
    "package", sorted(PACKAGES - {"types", "messages", "policy", "planning", "engines", "__main__"})
)
def test_a_package_describes_itself_and_exports_names(package):
    face = modules()[f"grpo_jax.{package}"]
    assert ast.get_docstring(ast.parse(face.read_text()))
    module = sys.modules.get(f"grpo_jax.{package}") or __import__(f"grpo_jax.{package}", fromlist=["__all__"])
    for name in module.__all__:
        value = getattr(module, name)
        assert not inspect.isroutine(value) or value.__doc__, name


@pytest.mark.quick
def test_files_are_short():
    """Files and functions are short, and every sub-package describes itself."""
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert not {name: count for name, count in lines.items() if count > 400}
    assert sorted(lines.values())[len(lines) // 2] <= 230
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 8


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(modules()))
def test_functions_are_short(name):
    functions = [x for x in ast.walk(ast.parse(modules()[name].read_text())) if isinstance(x, ast.FunctionDef)]
    assert not {x.name: lines_of(x) for x in functions if lines_of(x) > 60}


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(modules()))
def test_calls_can_be_read(name):
    """No dict of arguments under a name that says nothing, no lambda with a name, no docstring that is a riddle."""
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            assert not names & {"how", "given"}, f"{name}:{node.lineno}: say what it holds"
            assert not isinstance(node.value, ast.Lambda), f"{name}:{node.lineno}: use def"
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            first = (ast.get_docstring(node) or "").split(" ")[0]
            assert first not in ("Of", "What"), f"{name}:{getattr(node, 'lineno', 1)}: say what it is or does"


@pytest.mark.quick
def test_one_name_stands_for_one_thing():
    """Names that other modules may import. Commands are named as what they run, and `compat` has TRL's own words."""
    homes: dict[str, set[str]] = {}
    for module, path in modules().items():
        if module != "grpo_jax.cli.commands" and package_of(module) != "compat":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, set()).add(module)
    homes.pop("main")  # of two scripts
    assert not {name: where for name, where in homes.items() if len(where) > 1}


@pytest.mark.quick
def test_arguments_are_named_and_typed_all_over_the_package():
    """What of calls and types may stay open: a caller's own keywords, JSON, and what another library leaves untyped."""
    nodes = [node for path in modules().values() for node in ast.walk(ast.parse(path.read_text()))]
    splats = sum(keyword.arg is None for node in nodes if isinstance(node, ast.Call) for keyword in node.keywords)
    anything = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
    assert splats <= 45
    assert anything <= 410


def test_importing_the_package_does_no_work():
    code = (
        "import sys, grpo_jax\n"
        "assert 'jax' not in sys.modules\n"
        "heavy = {'transformers', 'orbax', 'matplotlib', 'safetensors', 'huggingface_hub', 'torch'}\n"
        "every = {name: getattr(grpo_jax, name) for name in grpo_jax.__all__}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import jax._src.xla_bridge as bridge\n"
        "assert not bridge._backends, 'a device was touched'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.quick
def test_what_a_type_checker_reads_is_what_the_program_finds():
    (guarded,) = [x for x in ast.parse(Path(grpo_jax.__file__).read_text()).body if isinstance(x, ast.If)][:1]
    read = {alias.name: node.module for node in guarded.body for alias in node.names}
    assert read == grpo_jax._HOME
    assert sorted(read) == grpo_jax.__all__


@pytest.mark.parametrize(
    "code",
    [
        "import grpo_jax; assert inspect.isfunction(grpo_jax.plan) and inspect.isfunction(grpo_jax.planning.programs)",
        "from grpo_jax.planning import programs; from grpo_jax import plan; assert inspect.isfunction(plan)",
        "from grpo_jax import *; assert train and plan and GRPOConfig",
        "import grpo_jax; assert grpo_jax.rewards.number_reward; assert 'train' in dir(grpo_jax)",
        "import grpo_jax; assert not hasattr(grpo_jax, 'nonsense') and not hasattr(grpo_jax, '__wrapped__')",
    ],
)
def test_names_come_when_they_are_asked_for(code):
    subprocess.run([sys.executable, "-c", f"import inspect\n{code}"], check=True)


@pytest.mark.quick
def test_every_public_name_is_there_and_says_what_it_does():
    for name in grpo_jax.__all__:
        assert getattr(grpo_jax, name).__doc__, name


@pytest.mark.quick
def test_each_file_of_tests_has_a_quick_one():
    """`-m quick` runs the core of every module while editing."""
    files = Path(__file__).parent.rglob("test_*.py")
    slow = {path.name for path in files if "pytest.mark.quick" not in path.read_text()}
    assert slow == {"test_two_processes.py", "test_training_variants.py", "test_rehearse.py"}, "whole runs"


@pytest.mark.quick
def test_no_two_files_of_tests_have_one_name():
    """pytest collects them all as modules without a package, and refuses the second of a name."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py")]
    assert sorted(set(names)) == sorted(names)
