"""Mutation testing of `grpo_jax.maths`: check that a test fails for every small change to the code.

    python tests/mutation.py                      # all modules
    python tests/mutation.py losses --list        # list the mutants without running them
    python tests/mutation.py losses --only 12 40  # run selected mutants, with pytest's output

At least 95 % should be killed. The survivors are printed; each should be listed in `EQUIVALENT` below, with the reason
why no test can fail for it.

Mutants are made in the syntax tree: comparisons, arithmetic, logic, constants, defaults, min/max, `where` branches,
dropped keyword arguments, dropped stop_gradient, bounds and casts. An import hook serves the mutated module; nothing is
written to the source tree. A worker process runs several mutants, which share JAX's compilation cache.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib
import importlib.abc
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

ROOT = Path(__file__).resolve().parent.parent
SIGNATURES = ["tests/maths/test_signatures.py"]
LOSSES = "tests/maths/test_losses.py"
# The comparison with NumPy in float32 kills most mutants and runs first. The slow one in float64 runs last.
LOSS_TESTS = [
    [LOSSES, "-k", "float32"],
    [LOSSES, "-k", "not (float32 or numpy or variants)"],
    [LOSSES, "-k", "numpy_in_float64"],
    ["tests/maths/test_correction.py"],
]
TESTS = {
    "advantages": [["tests/maths/test_advantages.py"], SIGNATURES],
    "checks": [SIGNATURES, ["tests/maths/test_kl.py"], *LOSS_TESTS],
    "kl": [SIGNATURES, ["tests/maths/test_kl.py"], *LOSS_TESTS[:2]],
    "reference": [["tests/maths/test_reference.py"], SIGNATURES],
    "surrogates": [SIGNATURES, *LOSS_TESTS],
    "metrics": [SIGNATURES, *LOSS_TESTS],
    "losses": [SIGNATURES, *LOSS_TESTS],
}

# Reasons why no test can fail for a mutant. `EQUIVALENT` lists (module, start of the line, change, reason).
EMPTY = "matters only for an empty selection, whose value is never used"
ALREADY = "the value already has that type; the line is for callers that pass lists or other dtypes"
SAME_AXIS = "axis −1 equals axis 1 for [B, G] and [B, K]"
CLAMPED = "JAX clamps an out-of-range index on an axis of size 1"
ZERO = "the surrogate is 0 at A = 0 in both cases"
UNDER = "finite masked values have no effect"
AXIS_1 = [
    "centered, std = _center(r,", "centered, _ = _center",
    "_, std = _center(_weighted_sum", "_, std = _center(r, scored", "_, std = _center(centered",
    "count = jnp.sum(scored, axis=1", "mean = jnp.mean(r, axis", "total = jnp.sum(tokens", "baseline = jnp.sum(tokens",
    "return jnp.all(std[",
]  # fmt: skip
EQUIVALENT = [
    ("advantages", "mean = jnp.sum(shifted", "1 → 2", "a single value is its own minimum, so the sum is 0"),
    ("advantages", "mean = jnp.sum(shifted", "1 → -1", EMPTY),
    ("advantages", "rewards = jnp.asarray", "asarray(x) → x", ALREADY),
    ("advantages", "return jnp.where(weights", "astype(x) → x", ALREADY),
    *(("advantages", line, "1 → -1", SAME_AXIS) for line in AXIS_1),
    ("advantages", "tokens = jnp.where(scored", "asarray(x) → x", ALREADY),
    ("advantages", "return jnp.all(std[", "0 → 1", CLAMPED),
    ("advantages", "return std[:, 0] == 0", "0 → 1", CLAMPED),
    ("surrogates", "return jnp.broadcast_to", "broadcast_to(x) → x", "[..., 1] broadcasts to the documented shape"),
    ("surrogates", "mask = jnp.asarray(mask)", "asarray(x) → x", ALREADY),
    ("surrogates", "tau = jnp.where(A > 0", "Gt → GtE", ZERO),
    ("surrogates", "k = jnp.where(A >= 0", "GtE → Gt", ZERO),
    ("surrogates", "lambda_ = jnp.where(A", "GtE → Gt", ZERO),
    ("metrics", "last = jnp.maximum(jnp", "1 → -1", EMPTY),
    ("metrics", "while (length := values", "1 → 2", "the final sum adds the two remaining values"),
    ("metrics", "values = jnp.concatenate", "Mod → Mult", "with an even length, no value remains after the pairs"),
    ("metrics", "values = jnp.concatenate", "2 → -2", "an odd length modulo −2 is −1, which is also true"),
    ("metrics", "return dict(zip(metrics", "True → False", "there is always one value per metric"),
    ("metrics", "return dict(zip(metrics", "zip: strict= dropped", "there is always one value per metric"),
    ("checks", "return ste_clip(jnp.where", "0 → 1", UNDER),
    ("losses", "A = jnp.where(mask, with_token_axis", "0 → 1", UNDER),
    ("losses", "p = p * jnp.where(mask", "1 → 2", UNDER),
    ("losses", "p = p * jnp.where(mask", "1 → -1", UNDER),
]

OPERATORS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SWAPS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "floor": "ceil", "any": "all",
         "all": "any", "expm1": "exp", "add": "subtract", "k3": "k2"}  # fmt: skip
# f(x, ...) → x
TRANSPARENT = {"sg", "stop_gradient", "ste_clip", "clip", "masked", "astype", "asarray", "broadcast_to", "sqrt", "flip"}


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def edited(node: ast.AST, **fields) -> ast.AST:
    new = copy.copy(node)
    vars(new).update(fields)
    return new


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield every (description, replacement) for a node."""
    if isinstance(node, ast.Compare):
        if new := OPERATORS.get(type(node.ops[0])):
            yield f"{type(node.ops[0]).__name__} → {new.__name__}", edited(node, ops=[new(), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp | ast.BinOp):
        if (new := OPERATORS.get(type(node.op))) and "Array" not in ast.unparse(node):
            yield f"{type(node.op).__name__} → {new.__name__}", edited(node, op=new())
    elif isinstance(node, ast.UnaryOp):
        yield f"{type(node.op).__name__} dropped", node.operand
    elif isinstance(node, ast.IfExp):
        yield "branches swapped", edited(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.If):
        yield "condition negated", edited(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} → {not node.value}", edited(node, value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        for value in [node.value + 1] + [-node.value] * bool(node.value):
            yield f"{node.value} → {value}", edited(node, value=value)
    elif isinstance(node, ast.Call):
        yield from call_changes(node)


def call_changes(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    function = name_of(node.func)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            rest = node.keywords[:i] + node.keywords[i + 1 :]
            yield f"{function}: {keyword.arg}= dropped", edited(node, keywords=rest)
    if function in SWAPS:
        field = "attr" if isinstance(node.func, ast.Attribute) else "id"
        yield f"{function} → {SWAPS[function]}", edited(node, func=edited(node.func, **{field: SWAPS[function]}))
    if function == "where":
        condition, a, b = node.args
        yield "where: branches swapped", edited(node, args=[condition, b, a])
        yield "where → first", a
        yield "where → second", b
    if function in TRANSPARENT:
        method = isinstance(node.func, ast.Attribute) and name_of(node.func.value) not in ("jnp", "jax", "lax")
        yield f"{function}(x) → x", node.func.value if method else node.args[0]


class Change(ast.NodeTransformer):
    """A visitor that lists all changes in order and makes change number `target`; with -1 it makes none."""

    def __init__(self, target: int = -1):
        self.target, self.found = target, []

    def visit(self, node):
        for description, replacement in changes(node):
            self.found.append((getattr(node, "lineno", 0), description))
            if len(self.found) - 1 == self.target:
                return replacement
        return super().visit(node)

    def unchanged(self, node):
        return node

    visit_Raise = visit_arg = visit_ClassDef = unchanged  # error messages, annotations and settings

    def visit_AnnAssign(self, node):
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node):
        # Annotations and decorators are not mutated.
        node.args = self.visit(node.args)
        node.body = [x for x in (self.visit(statement) for statement in node.body) if x is not None]
        return node


def module_path(module: str) -> Path:
    return ROOT / "grpo_jax" / "maths" / f"{module}.py"


def mutate(module: str, target: int) -> tuple[ast.Module, list[tuple[int, str]]]:
    """Return a module's syntax tree with change number `target`, and the (line, description) of each change."""
    change = Change(target)
    return change.visit(ast.parse(module_path(module).read_text())), change.found


class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that loads one mutated module."""

    def __init__(self, module: str, target: int):
        self.name, self.path = f"grpo_jax.maths.{module}", str(module_path(module))
        self.code = compile(ast.fix_missing_locations(mutate(module, target)[0]), self.path, "exec")

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(self.code, module.__dict__)


def import_mutant(module: str, target: int) -> None:
    """Make later imports load this mutant, or the unchanged code if `target` is -1."""
    for name in list(sys.modules):
        if name in {f"grpo_jax.maths.{module}" for module in TESTS} or name.startswith("test_") or name == "conftest":
            del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Hook)]
    if target >= 0:
        sys.meta_path.insert(0, Hook(module, target))


def survives(module: str, verbose: bool, target: int) -> bool:
    """Run a mutant's tests (-1: the unchanged code) in this process and return whether all pass."""
    import pytest

    if not verbose:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    for arguments in TESTS[module]:
        import_mutant(module, target)
        # Use -n 0: a pytest-xdist worker process would import the unchanged code.
        options = ["-x", "-q", "-n", "0", "--no-header", "-p", "no:cacheprovider", "--tb=short"]
        if pytest.main([*options, *arguments]) not in (0, 5):
            return False
    return True


def run(module: str, targets: list[int], timeout: float, verbose: bool) -> Iterator[tuple[int, str]]:
    """Yield (target, "killed" | "survived" | "timeout" | "crashed") for each target, in order."""
    context = multiprocessing.get_context("fork")  # without importing JAX again
    with ProcessPool(max_workers=1, max_tasks=60, context=context) as pool:
        results = pool.map(functools.partial(survives, module, verbose), targets, timeout=timeout).result()
        for target in targets:
            try:
                yield target, "survived" if next(results) else "killed"
            except TimeoutError:
                yield target, "timeout"
            except ProcessExpired:
                yield target, "crashed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="*", type=int)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per mutant; a timeout counts as killed")
    arguments = parser.parse_args()

    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    importlib.import_module("conftest")
    # Import these once, before forking. None of them starts a JAX backend; the child does, after the fork.
    for name in ("absl.testing.parameterized", "chex", "jax.numpy", "pytest"):
        importlib.import_module(name)

    total = killed = unexplained = 0
    start = time.monotonic()
    for module in arguments.modules:
        found = mutate(module, -1)[1]
        lines = module_path(module).read_text().splitlines()
        if arguments.list:
            for i, (line, description) in enumerate(found):
                print(f"{module} {i} line {line}: {description}: {lines[line - 1].strip()}")
            continue
        targets = [i for i in range(len(found)) if not arguments.only or i in arguments.only]
        for i, result in run(module, [-1, *targets], arguments.timeout, verbose=bool(arguments.only)):
            if i == -1:
                if result != "survived":
                    sys.exit(f"The tests of {module} fail on the unchanged code.")
                continue
            line, description = found[i]
            total += 1
            killed += result != "survived"
            if result != "killed":
                text = lines[line - 1].strip()
                same = (e for e in EQUIVALENT if (e[0], e[2]) == (module, description) and text.startswith(e[1]))
                reason = next((e[3] for e in same), "")
                unexplained += result == "survived" and not reason
                print(f"{result}: {module} {i} line {line}: {description}: {text}  {reason}", flush=True)
        print(f"{module}: {len(found)} mutants, {time.monotonic() - start:.0f} s so far", flush=True)
    if total:
        print(f"{killed} of {total} killed ({100 * killed / total:.1f} %)")
        print(f"{total - killed} survived, {unexplained} of them without a reason")


if __name__ == "__main__":
    main()
