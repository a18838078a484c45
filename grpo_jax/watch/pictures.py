"""The pictures of a run, drawn into its directory from the files that lie there."""

from __future__ import annotations

import functools
import pathlib
import warnings
from collections.abc import Callable
from typing import IO

from grpo_jax.watch.lines import read_lines
from grpo_jax.watch.page import html_report
from grpo_jax.watch.plots import draw_report, save_figure
from grpo_jax.watch.writer import RunWriter


def write_pictures(writer: RunWriter, *, page_only: bool = False) -> None:
    """Draw `report.png` and `report.html`, each whole or not at all; what fails is a warning and ends nothing.

    Args:
      writer: the files of the run; where its directory is None, nothing is drawn.
      page_only: leave out `report.png`, which takes most of the time of both.
    """
    if writer.run_dir is None:
        return
    drawn: dict[str, Callable[[pathlib.Path, IO[bytes]], object]] = {"report.png": _draw, "report.html": _write_page}
    for name in list(drawn)[page_only:]:
        try:
            writer.replace(name, functools.partial(drawn[name], writer.run_dir))
        except Exception as error:
            message = f"{name} was not drawn: {type(error).__name__}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _draw(run_dir: pathlib.Path, file: IO[bytes]) -> None:
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    save_figure(draw_report(lines, title=run_dir.resolve().name), file)


def _write_page(run_dir: pathlib.Path, file: IO[bytes]) -> None:
    file.write(html_report(run_dir).encode("utf-8", "backslashreplace"))
