"""`grpo-jax report` and `grpo-jax compare`: pictures and pages, from the files of runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from grpo_jax.watch.compare import choose_metric, comparison_page, comparison_tables, draw_comparison, read_runs
from grpo_jax.watch.display import print_tables
from grpo_jax.watch.page import write_pictures
from grpo_jax.watch.plots import save_figure
from grpo_jax.watch.writer import RunWriter


def report(arguments: Namespace) -> None:
    """`grpo-jax report`."""
    run_dir = Path(arguments.run_dir).expanduser()
    if not (run_dir / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{run_dir} has no metrics.jsonl; is it the directory of a run?")
    write_pictures(RunWriter(run_dir))
    print("\n".join(str(run_dir / name) for name in ("report.html", "report.png")))


def compare(arguments: Namespace) -> None:
    """`grpo-jax compare`."""
    runs = read_runs(arguments.runs)
    metric = choose_metric(runs, arguments.metric)
    page = Path(arguments.out).expanduser()
    if page.suffix != ".html":
        raise ValueError(f"--out {arguments.out}: the page is HTML; give a name that ends in .html")
    print_tables(comparison_tables(runs, metric))
    page.write_bytes(comparison_page(runs, metric).encode("utf-8", "backslashreplace"))
    save_figure(draw_comparison(runs, metric), str(page.with_suffix(".png")))
    print("\n".join(str(path) for path in (page, page.with_suffix(".png"))))
