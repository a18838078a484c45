"""Check an installed wheel in a fresh environment, for .ci/run: the README's quick start, and a run of the command.

    python tests/installed.py        # in any directory, with the Python of that environment

A small checkpoint, created here, replaces the one from the hub.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:] = [str(TESTS), *(path for path in sys.path if Path(path or ".").resolve() != TESTS.parent)]

from tiny import chat_checkpoint  # noqa: E402

import grpo_jax  # noqa: E402


def main() -> None:
    assert TESTS.parent not in Path(grpo_jax.__file__).parents, "imported the clone instead of the installed package"
    command = shutil.which("grpo-jax", path=str(Path(sys.executable).parent))
    assert command, "the wheel did not install the grpo-jax command"
    help_text = subprocess.run([command, "--help"], check=True, capture_output=True, text=True).stdout
    assert "train" in help_text
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        readme = (TESTS.parent / "README.md").read_text(encoding="utf-8")
        (code,) = re.findall(r"## Quick start.*?```python\n(.*?)```", readme, flags=re.S)
        (names,) = [set(re.findall(r'from_pretrained\("([^"]+)"\)', code))]
        code = code.replace(names.pop(), chat_checkpoint(folder)).replace("max_steps=50", "max_steps=2")
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
        assert (folder / "runs/sums/report.html").is_file()
        for arguments in ("init first", "train first/my_run.yaml --max_steps 2", "export runs/first out"):
            subprocess.run([command, *arguments.split()], cwd=folder, check=True)
        grpo_jax.from_pretrained(folder / "out")
    print(f"grpo_jax {grpo_jax.__version__}: the README's quick start works with the installed wheel")


if __name__ == "__main__":
    main()
