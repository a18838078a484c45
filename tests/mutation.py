"""Mutation testing of `grpo_jax.maths`: check that a test fails for every small change to the code.

    python tests/mutation.py                      # all modules, 2 to 8 seconds per mutant
    python tests/mutation.py losses --list        # list the mutants without running them
    python tests/mutation.py losses --only 12 40  # run selected mutants, with pytest's output

At least 95 % should be killed. The survivors are printed; each should be listed in `EQUIVALENT` below, with the reason
why no test can fail for it.

Mutants are made in the syntax tree: comparisons, arithmetic, logic, constants, defaults, min/max, `where` branches,
dropped keyword arguments, dropped stop_gradient, bounds and casts. An import hook serves the mutated module; nothing is
written to the source tree. A worker process runs mutants one after another, so that they share JAX's compilation cache.
It is replaced after `WORKER_LIFE` mutants, and when a mutant takes too long.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import importlib.abc
import importlib.util
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIGNATURES = "tests/maths/test_signatures.py"
# Order after the quick check: the cheap tests that kill most mutants, the other tests, the comparison with NumPy.
CHEAP = (
    "edge_of or batch_totals or merge_by or update_entropy or top_entropy or threshold or masked_rows"
    " or overflowing or bounded_tokens or bounds_its or half_precision or no_evidence or a_nan or no_gradient"
    " or dtype_of or hole or excluded"
)
LOSSES = "tests/maths/test_losses.py"
OF_THE_LOSS = [
    [SIGNATURES],
    [LOSSES, "-k", CHEAP],
    [LOSSES, "-k", f"not ({CHEAP} or numpy or variants)"],
    [LOSSES, "-k", "numpy"],
    ["tests/maths/test_correction.py"],
]
TESTS = {
    "advantages": [["tests/maths/test_advantages.py"], [SIGNATURES]],
    "checks": [[SIGNATURES], ["tests/maths/test_kl.py"], *OF_THE_LOSS[1:]],
    "kl": [[SIGNATURES], ["tests/maths/test_kl.py"], [LOSSES, "-k", CHEAP]],
    "reference": [["tests/maths/test_reference.py"], [SIGNATURES]],
    "surrogates": OF_THE_LOSS,
    "metrics": OF_THE_LOSS,
    "losses": OF_THE_LOSS,
}
WORKER_LIFE = 60

# Reasons why no test can fail for a mutant. `EQUIVALENT` lists (module, start of the line, change, reason).
EMPTY = "matters only for an empty selection, whose value is never used"
ALREADY = "the value already has that type; the line is for callers that pass lists or other dtypes"
SAME_AXIS = "axis −1 equals axis 1 for [B, G] and [B, K]"
CLAMPED = "JAX clamps an out-of-range index on an axis of size 1"
ZERO = "the surrogate is 0 at A = 0 in both cases"
UNDER = "finite masked values have no effect"
AXIS_1 = [
    "centered, std = _center(_weighted_sum", "centered, std = _center(r,", "centered, _ = _center",
    "_, std = _center(_weighted_sum", "_, std = _center(r, scored", "_, std = _center(centered",
    "count = jnp.sum(scored, axis=1", "mean = jnp.mean(r, axis", "total = jnp.sum(tokens", "baseline = jnp.sum(tokens",
    "return jnp.all((std[",
]  # fmt: skip
EQUIVALENT = [
    ("advantages", "mean = jnp.sum(shifted", "1 → 2", "a single value is its own minimum, so the sum is 0"),
    ("advantages", "mean = jnp.sum(shifted", "1 → -1", EMPTY),
    ("advantages", "rewards = jnp.asarray", "asarray(x) → x", ALREADY),
    ("advantages", "return rewards, weights", "astype(x) → x", ALREADY),
    *(("advantages", line, "1 → -1", SAME_AXIS) for line in AXIS_1),
    ("advantages", "tokens = jnp.where(scored", "asarray(x) → x", ALREADY),
    ("advantages", "return jnp.all((std[", "0 → 1", CLAMPED),
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
    ("losses", "A = jnp.where(mask, row_or_token", "0 → 1", UNDER),
    ("losses", "p = p * jnp.where(mask", "1 → 2", UNDER),
    ("losses", "p = p * jnp.where(mask", "1 → -1", UNDER),
]

COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SWAPS = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "floor": "ceil", "any": "all",
         "all": "any", "expm1": "exp", "add": "subtract", "k3": "k2"}  # fmt: skip
# f(x, ...) → x
TRANSPARENT = {"sg", "stop_gradient", "ste_clip", "clip", "masked", "astype", "asarray", "broadcast_to", "sqrt", "flip"}


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield every (description, replacement) for a node."""

    def edited(**fields) -> ast.AST:
        new = copy.deepcopy(node)
        for field, value in fields.items():
            setattr(new, field, value)
        return new

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        new = COMPARE[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} → {new.__name__}", edited(ops=[new(), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and "Array" not in ast.unparse(node):
        new = ARITHMETIC[type(node.op)]
        yield f"{type(node.op).__name__} → {new.__name__}", edited(op=new())
    elif isinstance(node, ast.UnaryOp):
        yield f"{type(node.op).__name__} dropped", node.operand
    elif isinstance(node, ast.BoolOp):
        new = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} → {new.__name__}", edited(op=new())
    elif isinstance(node, ast.IfExp):
        yield "branches swapped", edited(body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.If):
        yield "condition negated", edited(test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} → {not node.value}", edited(value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{node.value} → {node.value + 1}", edited(value=node.value + 1)
        if node.value:
            yield f"{node.value} → {-node.value}", edited(value=-node.value)
    elif isinstance(node, ast.Call):
        function = name_of(node.func)
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield f"{function}: {keyword.arg}= dropped", edited(keywords=node.keywords[:i] + node.keywords[i + 1 :])
        if function in SWAPS:
            func = copy.deepcopy(node.func)
            setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", SWAPS[function])
            yield f"{function} → {SWAPS[function]}", edited(func=func)
        if function == "where":
            condition, a, b = node.args
            yield "where: branches swapped", edited(args=[condition, b, a])
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

    def visit_Raise(self, node):  # error messages are not mutated
        return node

    def visit_AnnAssign(self, node):
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node):
        return node

    def visit_FunctionDef(self, node):
        # Annotations and decorators are not mutated.
        node.args = self.visit(node.args)
        node.body = [x for x in (self.visit(statement) for statement in node.body) if x is not None]
        return node

    def visit_ClassDef(self, node):
        return node


def module_path(module: str) -> Path:
    return ROOT / "grpo_jax" / "maths" / f"{module}.py"


def mutants(module: str) -> list[tuple[int, str]]:
    walker = Change()
    walker.visit(ast.parse(module_path(module).read_text()))
    return walker.found


class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that loads one mutated module."""

    def __init__(self, module: str, target: int):
        tree = Change(target).visit(ast.parse(module_path(module).read_text()))
        self.name, self.path = f"grpo_jax.maths.{module}", str(module_path(module))
        self.code = compile(ast.fix_missing_locations(tree), self.path, "exec")

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


@functools.cache
def cases_of_the_loss() -> list:
    """Return (case, NumPy results, JAX loss) for some cases of the loss, computed once per worker."""
    import test_losses as t

    cases = [t.case(name, level, t.EVERYTHING) for level in t.LEVELS for name in t.TYPES]
    for i, settings in enumerate(t.SETTINGS.values()):
        cases += [t.case(t.TYPES[(i + 3 * j) % len(t.TYPES)], level, settings) for j, level in enumerate(t.LEVELS)]
    return [(case, t.complex_step(case), t.jax_loss) for case in cases]


def quick_check(module: str) -> bool:
    """Compare the loss in float32 with NumPy, without pytest; return False if they differ."""
    if TESTS[module] is not OF_THE_LOSS:
        return True
    import numpy as np

    try:
        grpo_loss = importlib.import_module("grpo_jax.maths.losses").grpo_loss
        for case, (loss, metrics, gradient), jax_loss in cases_of_the_loss():
            got = jax_loss(case, loss=grpo_loss)
            close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
            close(got[0], loss)
            close(got[2], gradient)
            assert set(got[1]) == set(metrics)
            for name in metrics:
                close(got[1][name], metrics[name])
    except Exception:
        return False
    return True


def run_tests(module: str, target: int) -> bool:
    """Run a mutant's tests (-1: the unchanged code) in this process and return whether all pass."""
    import pytest

    if TESTS[module] is OF_THE_LOSS:
        cases_of_the_loss()
    import_mutant(module, target)
    if not quick_check(module):
        return False
    for arguments in TESTS[module]:
        import_mutant(module, target)
        # Use -n 0: a pytest-xdist worker process would import the unchanged code.
        options = ["-x", "-q", "-n", "0", "--no-header", "-p", "no:cacheprovider", "--tb=short"]
        code = pytest.main([*options, *arguments])
        if code not in (0, 5):
            return False
    return True


def worker(module: str, targets: list[int], report: int, verbose: bool) -> None:
    """Run mutants in turn and write one byte per mutant: s(urvived) or k(illed)."""
    if not verbose:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    for target in targets:
        os.write(report, b"s" if run_tests(module, target) else b"k")


def run(module: str, targets: list[int], timeout: float, verbose: bool) -> Iterator[tuple[int, str]]:
    """Yield (target, "killed" | "survived" | "timeout" | "crashed") for each target, in order."""
    todo = list(targets)
    while todo:
        read, write = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                worker(module, todo[:WORKER_LIFE], write, verbose)
            finally:
                os._exit(0)
        os.close(write)
        for target in todo[:WORKER_LIFE]:
            ready = select.select([read], [], [], timeout)[0]
            answer = os.read(read, 1) if ready else b""
            todo.remove(target)
            yield target, {b"s": "survived", b"k": "killed"}.get(answer, "crashed" if ready else "timeout")
            if not answer:
                break
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="*", type=int)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per mutant; a timeout counts as killed")
    arguments = parser.parse_args()

    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(ROOT / "tests"))
    importlib.import_module("conftest")
    # Import these once, before forking. None of them starts a JAX backend; the child does, after the fork.
    import absl.testing.parameterized  # noqa: F401
    import chex  # noqa: F401
    import jax.numpy  # noqa: F401
    import pytest  # noqa: F401

    total = killed = 0
    survivors = []
    start = time.monotonic()
    for module in arguments.modules:
        found = mutants(module)
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
            if total % 20 == 0:
                print(f"  {module} {i}: {killed} of {total} killed, {time.monotonic() - start:.0f} s", flush=True)
            if result != "killed":
                text = lines[line - 1].strip()
                known = [e for e in EQUIVALENT if (e[0], e[2]) == (module, description) and text.startswith(e[1])]
                reason = known[0][3] if known else ""
                if result == "survived":
                    survivors.append(reason)
                print(f"{result}: {module} {i} line {line}: {description}: {text}  {reason}", flush=True)
        print(f"{module}: {len(found)} mutants, {time.monotonic() - start:.0f} s so far", flush=True)
    if total:
        unexplained = sum(not reason for reason in survivors)
        print(f"{killed} of {total} killed ({100 * killed / total:.1f} %)")
        print(f"{len(survivors)} survived, {unexplained} of them without a reason")


if __name__ == "__main__":
    main()
