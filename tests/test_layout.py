"""The rings of the house: pure modules import JAX alone, imports point inwards, and importing the package is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_jax

PACKAGE = Path(grpo_jax.__file__).parent
PURE = [
    "types",
    "sampling",
    "advantages",
    "log_probs",
    "kl",
    "losses",
    "reference",
    "packing",
    "sharding",
    "models.attention",
    "models.matmul",
    "models.transformer",
    "models.lora",
    "bounds",
]
COMPOSED = ["rollout", "state", "streams", "objective", "update", "packed"]
OUTSIDE = {"jax", "flax", "chex", "optax", "numpy"}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path


def imports(path: Path) -> set[str]:
    """Top-level imports only: what a function imports when it runs is no dependency of the module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_jax_and_each_other_only(name):
    path = PACKAGE / (name.replace(".", "/") + ".py")
    for module in imports(path):
        top = module.split(".")[0]
        if top == "grpo_jax":
            assert module.removeprefix("grpo_jax.") in PURE, f"{name} is pure and imports {module}"
        else:
            assert top in {"jax", "flax", "chex", "numpy"} or top in sys.stdlib_module_names, f"{name}: {module}"


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_modules_import_inwards(name):
    allowed = {*PURE, *COMPOSED, "config"}  # config is plain dataclasses; the update reads its settings from one
    for module in imports(PACKAGE / f"{name}.py"):
        top = module.split(".")[0]
        if top == "grpo_jax":
            assert module.removeprefix("grpo_jax.") in allowed, f"{name} imports {module}, which lies further out"
        else:
            assert top in OUTSIDE or top in sys.stdlib_module_names, f"{name}: {module}"


def test_no_module_imports_heavy_packages_at_its_top():
    heavy = {"transformers", "orbax", "matplotlib", "rich", "safetensors", "huggingface_hub", "torch", "tokenizers"}
    heavy |= {"tensorboardX", "wandb", "trackio"}
    for name, path in modules():
        assert not {module.split(".")[0] for module in imports(path)} & heavy, name


def test_importing_the_package_does_no_work():
    code = (
        "import sys, grpo_jax\n"
        "heavy = {'transformers', 'orbax', 'matplotlib', 'safetensors', 'huggingface_hub', 'torch'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import jax._src.xla_bridge as bridge\n"
        "assert not bridge._backends, 'a device was touched'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_says_what_it_does():
    for name in grpo_jax.__all__:
        assert getattr(grpo_jax, name).__doc__, name


def test_a_function_is_not_hidden_by_its_module():
    code = "import grpo_jax.train, grpo_jax.evaluate; assert callable(grpo_jax.train) and callable(grpo_jax.evaluate)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_module_has_a_test_beside_it():
    names = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    without = [name for name, _ in modules() if f"test_{name.split('.')[-1]}.py" not in names]
    # what is tested with the module that it is a part of
    covered = {"__init__", "models.__init__", "types", "fields", "trl_fields", "reward_worker_main"}
    covered |= {"prepare", "bounds", "plan.__init__", "plan.__main__"}  # by test_bad_inputs, test_benchmark, test_plan
    assert set(without) <= covered, sorted(set(without) - covered)
