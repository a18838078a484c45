"""Runs over each other: one metric against steps, tokens and seconds, as a page, a picture and tables."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grpo_jax.messages import nearest, some
from grpo_jax.watch.breakdown import PageTable
from grpo_jax.watch.colours import DARK, LIGHT, SERIES, colour
from grpo_jax.watch.page import POINTS, fill_page, page_curve
from grpo_jax.watch.panels import Panel
from grpo_jax.watch.plots import draw_lines, make_figure, style_axes, thin
from grpo_jax.watch.summary import changed_settings, held_out_scores, metric_names, numbers, short_number
from grpo_jax.watch.writer import JSON, Line, read_lines, read_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {"steps": "optimizer step", "tokens": "completion tokens", "seconds": "seconds"}
"""What a metric is drawn against → the label of that axis."""


class Compared(NamedTuple):
    """A run that is compared: its name here, the objects of its `metrics.jsonl`, and its config."""

    name: str
    lines: list[Line]
    config: Mapping[str, JSON]


def read_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> list[Compared]:
    """Read the files of runs; each is named by the last parts of its path that tell it from the others.

    Raises:
      ValueError: fewer than two directories, or one of them twice, or one in which nothing was logged.
      FileNotFoundError: one is not the directory of a run.
    """
    if len(run_dirs) < 2:
        raise ValueError(f"run_dirs: {len(run_dirs)} given; give the directories of two runs or more")
    paths = [Path(run_dir).expanduser().resolve() for run_dir in run_dirs]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path} is given twice; give each run once")
        if not (path / "metrics.jsonl").is_file():
            raise FileNotFoundError(f"{path} has no metrics.jsonl; is it the directory of a run?")
    depths = ([os.sep.join(path.parts[-depth:]) for path in paths] for depth in itertools.count(1))
    names = next(names for names in depths if len(set(names)) == len(names))
    runs = [
        Compared(name, list(read_lines(path / "metrics.jsonl")), read_settings(path).get("config", {}))
        for name, path in zip(names, paths, strict=True)
    ]
    for run, path in zip(runs, paths, strict=True):
        if not run.lines:
            raise ValueError(f"{path} has nothing in metrics.jsonl yet; compare it after its first logged step")
    return runs


def choose_metric(runs: Sequence[Compared], metric: str | None = None) -> str:
    """Return the metric that is compared: the one asked for, else `reward`, else `loss`.

    Raises:
      ValueError: a run has not logged it.

    Example:
      >>> choose_metric([Compared("a", [{"step": 1, "loss": 2.0}], {}), Compared("b", [{"step": 1, "loss": 1.0}], {})])
      'loss'
    """
    logged = {run.name: [name for name in metric_names(run.lines) if numbers(run.lines, name)] for run in runs}
    wanted = ["reward", "loss"] if metric is None else [metric]
    for name in wanted:
        if all(name in names for names in logged.values()):
            return name
    name = metric or "reward"
    without = next(run for run, names in logged.items() if name not in names)
    shared = [other for other in logged[runs[0].name] if all(other in names for names in logged.values())]
    close = nearest(name, shared)
    raise ValueError(
        f"metric = {name!r}: {without} has logged no such metric; "
        + (f"did you mean {close}?" if close else f"all runs have {some([*shared]) if shared else 'none in common'}")
    )


def against(lines: Sequence[Line], metric: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return what a metric is drawn against, and its values.

    Steps are those of the lines. Tokens (`num_tokens`) and seconds (the sum of `seconds/total`, compilation and
    evaluations included) are known at logged steps and taken as linear in between, from 0 at step 0.

    Returns:
      (name of `AXES` → [n] float, values [n] float), of the n lines in which the metric is finite; an axis of which
      nothing was logged is left out.

    Example:
      >>> lines = [{"step": 10, "reward": 0.5, "num_tokens": 640, "seconds/total": 2.0}, {"step": 20, "reward": 0.75}]
      >>> {name: x.tolist() for name, x in against(lines, "reward")[0].items()}
      {'steps': [10.0, 20.0], 'tokens': [640.0, 640.0], 'seconds': [2.0, 2.0]}
    """
    there = [line for line in lines if numbers([line], metric)]
    steps = np.array([line["step"] for line in there], float)
    found = {"steps": steps}
    for axis, name in (("tokens", "num_tokens"), ("seconds", "seconds/total")):
        known = [line for line in lines if numbers([line], name)]
        values = np.array(numbers(known, name))
        if known:
            at = np.array([line["step"] for line in known], float)
            total = np.cumsum(values) if axis == "seconds" else values
            found[axis] = np.interp(steps, np.append(0.0, at), np.append(0.0, total))
    return found, np.array(numbers(there, metric))


def level(x: np.ndarray, y: np.ndarray, end: float) -> float:
    """Return the mean of the last tenth of the values up to `end`, at least one; NaN if there is none.

    Example:
      >>> level(np.arange(1.0, 41.0), np.arange(1.0, 41.0), 20.0)
      19.5
    """
    values = y[x <= end]
    return float(values[-max(len(values) // 10, 1) :].mean()) if len(values) else float("nan")


def comparison_tables(runs: Sequence[Compared], metric: str) -> list[PageTable]:
    """Return the tables of a comparison: what each run came to, and the settings in which the runs differ.

    The runs are compared at the largest number of steps, of tokens and of seconds that all of them have reached; the
    value there is the `level`.
    """
    drawn = [against(run.lines, metric) for run in runs]
    shared = [axis for axis in AXES if all(axis in x for x, _ in drawn)]
    ends = {axis: min(float(x[axis][-1]) for x, _ in drawn) for axis in shared}
    reached, levels = [], []
    for run, (x, y) in zip(runs, drawn, strict=True):
        amounts = [_amount(float(x[axis][-1])) if axis in x else "–" for axis in AXES]
        reached.append([run.name, *amounts, f"{y[0]:.4g}", f"{level(x['steps'], y, np.inf):.4g}"])
        levels.append([run.name, *(f"{level(x[axis], y, end):.4g}" for axis, end in ends.items())])
    tables = [
        PageTable("What the runs came to", ["run", *AXES, f"first {metric}", "last"], reached),
        PageTable(
            f"{metric} at the same steps, tokens and seconds",
            ["run", *(f"{_amount(end)} {axis}" for axis, end in ends.items())],
            levels,
        ),
    ]
    configs = [changed_settings(run.config) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    whole = [run.config for run in runs]
    differing = [name for name in names if any(config.get(name) != whole[0].get(name) for config in whole)]
    settings = [[name, *(str(config.get(name, "–")) for config in whole)] for name in differing]
    return tables + [PageTable("Settings that differ", ["field", *(run.name for run in runs)], settings)] * bool(
        settings
    )


def _amount(value: float) -> str:
    """Return a number of steps, tokens or seconds in a table."""
    return short_number(value) if value >= 10_000 else f"{value:.6g}" if value >= 100 else f"{value:.3g}"


class _Drawn(NamedTuple):
    """A panel of a comparison: the panel, the axis, and (run, x [n], y [n]) of each curve."""

    panel: Panel
    axis: str
    curves: list[tuple[str, np.ndarray, np.ndarray]]


def _panels(runs: Sequence[Compared], metric: str) -> list[_Drawn]:
    """Return the panels: the metric, and each held-out score that two runs have, against every axis."""
    scores: dict[str, str] = {}
    for run in runs:
        scores |= held_out_scores(name for name in metric_names(run.lines) if numbers(run.lines, name))
    titles = {metric: metric[:1].upper() + metric[1:]} | {name: f"Held out: {scores[name]}" for name in scores}
    panels = []
    for name, title in titles.items():
        with_it = [(run.name, against(run.lines, name)) for run in runs if numbers(run.lines, name)]
        for axis in AXES if len(with_it) > 1 else ():
            curves = [(run, x[axis], y) for run, (x, y) in with_it if axis in x]
            if curves:
                panels.append(_Drawn(Panel(f"{title} against {axis}", AXES[axis], (), low=None), axis, curves))
    return panels


def _meanings(runs: Sequence[Compared]) -> dict[str, str]:
    """Return run → a name of `COLOURS`; of more runs than there are colours for, some share one."""
    return dict(zip((run.name for run in runs), itertools.cycle(SERIES)))


def comparison_page(runs: Sequence[Compared], metric: str) -> str:
    """Return the page of a comparison as HTML, which needs no server and asks for nothing.

    Args:
      runs: of `read_runs`.
      metric: of `choose_metric`.

    Example:
      >>> one = Compared("a", [{"step": 1, "reward": 0.5}], {})
      >>> page = comparison_page([one, one._replace(name="b")], "reward")
      >>> page.startswith("<!doctype html>"), "Reward against steps" in page
      (True, True)
    """
    meanings = _meanings(runs)
    panels = []
    for panel, axis, curves in _panels(runs, metric):
        drawn = [{**page_curve(run, meanings[run], y), "x": thin(x, POINTS).round(3).tolist()} for run, x, y in curves]
        panels.append(
            {
                "title": panel.title,
                "unit": "",
                "along": AXES[axis],
                "stacked": False,
                "low": None,
                "x": [],
                "curves": drawn,
            }
        )
    names = ", ".join(run.name for run in runs)
    data = {"panels": panels, "tables": [table._asdict() for table in comparison_tables(runs, metric)]}
    about = "Values of a table are means of the last tenth of what was logged up to there."
    return fill_page(f"Runs: {names}", f"{len(runs)} runs by {metric}.", {"about": about, **data})


def draw_comparison(runs: Sequence[Compared], metric: str, *, dark: bool = False) -> Figure:
    """Draw the curves of `comparison_page` as a figure without any global state of pyplot."""
    theme, meanings, panels = DARK if dark else LIGHT, _meanings(runs), _panels(runs, metric)
    heading = f"{metric} of {', '.join(run.name for run in runs)}"
    figure, places = make_figure(len(panels), heading, theme)
    for (panel, axis, curves), (axes, letters, _) in zip(panels, places, strict=True):
        for run, x, y in curves:
            draw_lines(axes, x, {run: y}, {run: colour(meanings[run], dark=dark)})
        style_axes(axes, panel._replace(unit=""), theme, letters=letters)
        axes.set_xlabel(AXES[axis], fontsize=9, color=theme.grey)
    return figure
