"""`grpo-jax report`: the page and the picture of a run, drawn again from its files."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from grpo_jax.watch.page import write_pictures
from grpo_jax.watch.writer import RunWriter


def report(arguments: Namespace) -> None:
    """`grpo-jax report`."""
    run_dir = Path(arguments.run_dir).expanduser()
    if not (run_dir / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{run_dir} has no metrics.jsonl; is it the directory of a run?")
    write_pictures(RunWriter(run_dir))
    print("\n".join(str(run_dir / name) for name in ("report.html", "report.png")))
