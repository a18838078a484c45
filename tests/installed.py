"""Check an installed wheel in a fresh environment, for .ci/run: the README's quick start, in Python and as a command.

    python tests/installed.py        # in any directory, with the Python of that environment

A small checkpoint, created here, replaces the one from the hub.
"""

import json
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

RUN = """
data: rows.jsonl
rewards: [judging.py:right]
max_steps: 2
num_generations: 8
max_completion_length: 16
learning_rate: 1e-6
"""
RIGHT = (
    "def right(completions, answer):\n    return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]\n"
)


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
        prompt = [{"role": "user", "content": "What is 9 * 8?"}]
        (folder / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "72"}) + "\n")
        (folder / "judging.py").write_text(RIGHT)
        (folder / "run.yaml").write_text(RUN)
        subprocess.run([command, "train", "run.yaml", "--model", "model"], cwd=folder, check=True)
        subprocess.run([command, "export", "runs/run", "out"], cwd=folder, check=True)
        grpo_jax.from_pretrained(folder / "out")
    print(f"grpo_jax {grpo_jax.__version__}: the README's quick start works with the installed wheel")


if __name__ == "__main__":
    main()
