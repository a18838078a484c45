"""Collect the claims that the tests verify: `python docs/claims.py` prints them as Markdown.

A claim is the first paragraph of a test's docstring. It is listed with the test that fails if the claim does not hold,
under the sub-package that the test's folder is named after.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"


def claims():
    """Return {folder in tests/: [(claim, "tests/FILE.py::TEST"), ...]}."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if is_test and (said := ast.get_docstring(node)):
                folder = path.parent.name if path.parent != TESTS else "package"
                test = f"{path.relative_to(TESTS.parent).as_posix()}::{node.name}"
                found.setdefault(folder, []).append((" ".join(said.split("\n\n")[0].split()), test))
    return found


def as_markdown():
    """Format the claims as Markdown, with one list per folder."""
    lines = []
    for folder, proofs in claims().items():
        lines += [f"## {folder}", "", *(f"- {claim} (`{test}`)" for claim, test in proofs), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
