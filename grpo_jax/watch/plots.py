"""The picture of a run: `metrics.jsonl` as curves."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING

import numpy as np

from grpo_jax.watch.colours import DARK, LIGHT, Theme, colour
from grpo_jax.watch.panels import Panel, find_panels, usual_times
from grpo_jax.watch.summary import headline
from grpo_jax.watch.writer import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 2000  # points of a curve; a panel is some 450 pixels wide
_LETTERS = 14  # of a legend, for each inch of a panel


def draw_report(
    lines: Sequence[Line], *, title: str = "", only: Sequence[str] | None = None, dark: bool = False
) -> Figure:
    """Draw the curves of a run: rewards, held-out rates, KL, entropy, lengths, clipping, gradient norm, phase times.

    Raw values are pale, with a smoothed curve (`smooth`) over them; the last smoothed value stands in the legend, which
    lies above its panel. A panel of which no metric was logged is left out. `trackers.live_plot` shows it in a notebook
    while a run goes.

    Args:
      lines: objects of `metrics.jsonl`, each with "step"; a value that is None or not there leaves a gap.
      only: titles of panels, such as "Reward"; None draws all.

    Returns:
      A figure without any global state of pyplot.

    Example:
      >>> figure = draw_report([{"step": step, "reward": step / 10} for step in range(10)], title="demo")
      >>> figure.get_suptitle(), [axes.get_title(loc="left") for axes in figure.axes]
      ('demo: reward 0 → 0.9 in 9 steps', ['Reward'])
    """
    theme = DARK if dark else LIGHT
    steps = np.array([line["step"] for line in lines], float)
    found = [panel for panel in find_panels(lines) if only is None or panel.panel.title in only]
    told = headline(lines) or "nothing was logged"
    figure, places = make_figure(len(found), f"{title}: {told}" if title else told, theme)
    for (panel, curves, meanings), (axes, letters, last) in zip(found, places, strict=True):
        colours = {label: colour(meaning, dark=dark) for label, meaning in meanings.items()}
        (_stack if panel.stacked else draw_lines)(axes, steps, curves, colours)
        style_axes(axes, panel, theme, letters=letters)
        if last:
            axes.set_xlabel("optimizer step", fontsize=9, color=theme.grey)
        if len(steps) > 1:
            axes.set_xlim(steps.min() - 0.01 * np.ptp(steps), steps.max() + 0.01 * np.ptp(steps))
    return figure


def make_figure(count: int, heading: str, theme: Theme) -> tuple[Figure, list[tuple[Axes, int, bool]]]:
    """Make a figure for so many panels, with what is above and below them.

    Returns:
      The figure, and for each panel: its axes, the letters that fit into a line of its legend, and whether it is in the
      last row.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = _rows(count)
    size = (4.6 * max(rows, default=1) + 0.2, 2.9 * max(len(rows), 1) + 0.8)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=size, dpi=110, layout=layout, facecolor=theme.page)
    text = textwrap.fill(_text(heading), int(9.5 * size[0]))
    figure.suptitle(text, x=0.01, ha="left", fontsize=13, color=theme.ink, weight="bold")
    grid = figure.add_gridspec(max(len(rows), 1), 6)
    places = []
    for row, columns in enumerate(rows):
        width = 6 // columns
        for i in range(columns):
            axes = figure.add_subplot(grid[row, i * width : (i + 1) * width])
            places.append((axes, int(_LETTERS * size[0] * width / 6), row == len(rows) - 1))
    if count:
        about = "Strong lines are smoothed, pale ones are as logged; numbers in the keys are the last values."
        figure.supxlabel(textwrap.fill(about, int(14 * size[0])), x=0.01, ha="left", fontsize=9, color=theme.grey)
    return figure, places


def _rows(count: int) -> list[int]:
    """Return the number of panels in each row: at most 3, as evenly as can be, so that no place is left empty.

    Example:
      >>> _rows(8), _rows(7), _rows(4), _rows(1), _rows(0)
      ([3, 3, 2], [3, 2, 2], [2, 2], [1], [])
    """
    rows = -(-count // 3)
    return [count // rows + (row < count % rows) for row in range(rows)]


def save_figure(figure: Figure, file: str | IO[bytes]) -> None:
    """Write a figure as PNG; letters that the font lacks are drawn as boxes, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(file, format="png")


def smooth(values: np.ndarray, width: float) -> np.ndarray:
    """Average each value with its neighbours by a Gaussian, so that a curve does not lag; NaN is left out of it.

    Args:
      values: [n] float, NaN where nothing was logged.
      width: standard deviation of the Gaussian, in values.

    Returns:
      [n] float; NaN where `values` is.

    Example:
      >>> smooth(np.array([1.0, 1.0, np.nan, 1.0]), width=1.0).round(6).tolist()
      [1.0, 1.0, nan, 1.0]
    """
    reach = min(int(4 * width) + 1, len(values))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(width, 1e-9)) ** 2)
    there = np.isfinite(values)
    total = np.convolve(np.where(there, values, 0.0), kernel)[reach : reach + len(values)]
    weight = np.convolve(there.astype(float), kernel)[reach : reach + len(values)]
    return np.where(there, total / np.maximum(weight, 1e-300), np.nan)


def thin(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` values: the means of neighbours, without those that are NaN.

    Example:
      >>> thin(np.array([1.0, 3.0, np.nan, 5.0, 7.0]), 3)
      array([2., 5., 7.])
    """
    size = -(-len(values) // most)
    values = np.append(values, np.full(-len(values) % size, np.nan)).reshape(-1, size)
    there = np.isfinite(values)
    return np.where(there.any(1), np.where(there, values, 0).sum(1) / np.maximum(there.sum(1), 1), np.nan)


def style_axes(axes: Axes, panel: Panel, theme: Theme, *, letters: int) -> None:
    """Give axes with their curves a title, a legend under it and above them, a unit, a grid and a quiet frame."""
    handles, labels = axes.get_legend_handles_labels()
    sizes = [len(label) + 6 for label in labels]
    columns = len(labels) if sum(sizes) <= letters else max(1, letters // max(sizes))
    rows = -(-len(labels) // columns)
    axes.legend(
        handles[:: -1 if panel.stacked else 1],  # the order of a legend is that of the areas, the upper one first
        labels[:: -1 if panel.stacked else 1],
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.98),
        ncols=columns,
        fontsize=8,
        frameon=False,
        labelcolor=theme.ink,
        borderaxespad=0.2,
        handlelength=1.4,
        columnspacing=1.4,
    )
    axes.set_title(panel.title, loc="left", fontsize=11, color=theme.ink, weight="bold", pad=8 + 12.5 * rows)
    axes.set_ylabel(panel.unit, fontsize=9, color=theme.grey)
    axes.set_facecolor(theme.page)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=theme.grey, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    if panel.low is not None:
        axes.set_ylim(bottom=panel.low)


def draw_lines(axes: Axes, steps: np.ndarray, curves: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    """Draw each curve: pale raw values and the smoothed curve; few values as dots joined by a line."""
    for label, values in curves.items():
        there = np.isfinite(values)
        x, y = steps[there], values[there]
        if len(y) < 20:
            axes.plot(x, y, linewidth=1.6, marker="o", markersize=3.5, label=_label(label, y[-1]), color=colours[label])
            continue
        stride = -(-len(y) // _MOST)
        axes.plot(x[::stride], y[::stride], linewidth=0.8, alpha=0.25, color=colours[label])
        x, y = thin(x, _MOST), thin(y, _MOST)
        curve = smooth(y, width=len(y) / 40)
        axes.plot(x, curve, linewidth=1.8, label=_label(label, curve[-1]), color=colours[label])


def _stack(axes: Axes, steps: np.ndarray, curves: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    """Draw times on top of each other, so that the upper edge is their sum, without the steps that compiled."""
    steps, times = usual_times(steps, curves)
    x = thin(steps, _MOST)
    areas = [smooth(y, width=len(y) / 40) for y in (thin(seconds, _MOST) for seconds in times)]
    labels = [_label(label, area[-1]) for label, area in zip(curves, areas, strict=True)]
    axes.stackplot(x, areas, labels=labels, colors=[colours[label] for label in curves], alpha=0.75, linewidth=0)


def _label(name: str, last: float) -> str:
    """Return a legend's text: the name and the last value. Matplotlib hides labels that begin with an underscore."""
    name = name.lstrip("_") or name.replace("_", "-")
    value = "< 0.0001" if 0 < last < 1e-4 else f"{last:.3g}"
    return _text(f"{name[:39]}{'…' if len(name) > 39 else ''}  {value}")


def _text(text: str) -> str:
    """Return text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
