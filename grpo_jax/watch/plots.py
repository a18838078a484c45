"""The picture of a run: `metrics.jsonl` as curves that a person can read."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.watch.names import held_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GREY, _GRID = "#1f2933", "#697586", "#e4e7eb"
# Okabe and Ito's colours, which colour-blind readers tell apart, the darker ones first.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f5539", "#5c4d9e")
_MOST = 2000  # points of a curve; a panel is some 450 pixels wide


class Panel(NamedTuple):
    """A panel: its title, the unit of its axis, and the curves: pattern of a metric's name and label ("": group 1)."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    stacked: bool = False
    low: float | None = None


_PANELS = (
    Panel("Reward", "mean over completions", ((r"reward", "weighted sum"), (r"rewards/(.+)/mean", ""))),
    Panel("Held-out prompts", "mean score", ((r"held out: (.+)", ""),)),
    Panel("KL divergence", "nats per token", ((r"kl", "to the reference"), (r"kl_initial", "to the initial policy"))),
    Panel("Entropy of the policy", "nats per token", ((r"entropy", "all tokens"),), low=0.0),
    Panel(
        "Completion length",
        "tokens",
        (
            (r"completions/mean_length", "mean"),
            (r"completions/max_length", "longest"),
            (r"completions/min_length", "shortest"),
        ),
        low=0.0,
    ),
    Panel(
        "Clipped ratios",
        "share of tokens",
        ((r"clip_fraction_low", "too low"), (r"clip_fraction_high", "too high")),
        low=0.0,
    ),
    Panel(
        "Equal groups and cut-offs",
        "share",
        (
            (r"frac_reward_zero_std", "groups with equal rewards"),
            (r"completions/clipped_ratio", "completions without an end"),
        ),
        low=0.0,
    ),
    Panel("Gradient norm", "before clipping", ((r"grad_norm", "all parameters"),), low=0.0),
    Panel("Time", "seconds an optimizer step", ((r"seconds/(?!total)(.+)", ""),), stacked=True, low=0.0),
)


def draw_report(lines: Sequence[Mapping[str, Any]], *, title: str = "", only: Sequence[str] | None = None) -> Figure:
    """Draw the curves of a run: rewards, held-out rates, KL, entropy, lengths, clipping, gradient norm, phase times.

    Raw values are pale, with a smoothed curve (`smooth`) over them; the last smoothed value stands in the legend. A
    panel of which no metric was logged is left out. `trackers.live_plot` shows it in a notebook while a run goes.

    Args:
      lines: objects of `metrics.jsonl`, each with "step"; a value that is None or not there leaves a gap.
      title: name of the run.
      only: titles of panels, such as "Reward"; None draws all.

    Returns:
      A figure without any global state of pyplot.

    Example:
      >>> figure = draw_report([{"step": step, "reward": step / 10} for step in range(10)], title="demo")
      >>> [axes.get_title(loc="left") for axes in figure.axes]
      ['Reward']
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    steps = np.array([line["step"] for line in lines], float)
    panels = [found for found in find_panels(lines) if only is None or found[0].title in only]
    columns = min(max(len(panels), 1), 3)
    rows = max(-(-len(panels) // columns), 1)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(4.6 * columns + 0.2, 2.7 * rows + 0.5), dpi=110, layout=layout, facecolor="white")
    end = f"{len(lines)} lines up to step {steps.max():.0f}" if len(lines) else "nothing was logged"
    figure.suptitle(
        _text(f"{title} · {end}" if title else end), x=0.01, ha="left", fontsize=13, color=_INK, weight="bold"
    )
    for i, (panel, curves) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        _style(axes, panel)
        if panel.stacked:
            _stack(axes, steps, curves)
        else:
            _lines(axes, steps, curves)
        if panel.low is not None:
            axes.set_ylim(bottom=panel.low)
        if i >= len(panels) - columns:
            axes.set_xlabel("optimizer step", fontsize=9, color=_GREY)
        if len(steps) > 1:
            axes.set_xlim(steps.min() - 0.01 * np.ptp(steps), steps.max() + 0.01 * np.ptp(steps))
        # The order of a legend is that of the areas, the upper one first.
        axes.legend(reverse=panel.stacked, loc="best", fontsize=8, framealpha=0.85, edgecolor="none", labelcolor=_INK)
    return figure


def find_panels(lines: Sequence[Mapping[str, Any]]) -> list[tuple[Panel, dict[str, np.ndarray]]]:
    """Return the panels of which anything was logged, each with label → values [n], NaN where there is none.

    Args:
      lines: n objects of `metrics.jsonl`.

    Example:
      >>> [(panel.title, list(curves)) for panel, curves in find_panels([{"step": 1, "reward": 0.5, "kl": 0.1}])]
      [('Reward', ['weighted sum']), ('KL divergence', ['to the reference'])]
    """
    lines = [{f"held out: {held_out(name)}" if held_out(name) else name: line[name] for name in line} for line in lines]
    names = list(dict.fromkeys(name for line in lines for name in line))
    return [(panel, curves) for panel in _PANELS if (curves := _curves(panel, names, lines))]


def usual_times(steps: np.ndarray, curves: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps [m], seconds an optimizer step [curves, m]) of the timed lines, without those that compiled.

    Example:
      >>> usual_times(np.array([10.0, 20.0]), {"update": np.array([5.0, 4.0])})
      (array([10., 20.]), array([[0.5, 0.4]]))
    """
    times = np.array(list(curves.values()))
    timed = np.isfinite(times).any(axis=0)
    # A line holds the seconds since the line before it.
    times = np.nan_to_num(times[:, timed]) / np.maximum(np.diff(steps[timed], prepend=0.0), 1.0)
    total = times.sum(axis=0)
    usual = total <= 3 * np.median(total)
    return steps[timed][usual], times[:, usual]


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


def _curves(panel: Panel, names: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return label → values [n] of a panel's metrics, those of which any value is finite."""
    curves: dict[str, np.ndarray] = {}
    for pattern, label in panel.curves:
        for name in names:
            if match := re.fullmatch(pattern, name):
                values = np.array([_as_float(line.get(name)) for line in lines])
                # Without a reference the logged KL is 0 throughout: nothing to show.
                if np.isfinite(values).any() and not (name == "kl" and np.nanmax(np.abs(values)) == 0):
                    curves[label or match[1]] = values
    # The weighted sum of one function is that function over again.
    if len(curves) == 2 and "weighted sum" in curves:
        first, second = curves.values()
        if np.allclose(first, second, equal_nan=True):
            del curves["weighted sum"]
    return curves


def _as_float(value: Any) -> float:
    """Return a logged value as a float, NaN for what is none."""
    return float(value) if isinstance(value, int | float) else np.nan


def _style(axes: Axes, panel: Panel) -> None:
    """Give axes their title, unit, grid and quiet frame."""
    axes.set_title(panel.title, loc="left", fontsize=11, color=_INK, weight="bold")
    axes.set_ylabel(panel.unit, fontsize=9, color=_GREY)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_GREY, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)


def _lines(axes: Axes, steps: np.ndarray, curves: Mapping[str, np.ndarray]) -> None:
    """Draw each curve: pale raw values and the smoothed curve; few values as dots joined by a line."""
    for i, (label, values) in enumerate(curves.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        there = np.isfinite(values)
        x, y = steps[there], values[there]
        if len(y) < 20:
            axes.plot(x, y, color=colour, linewidth=1.6, marker="o", markersize=3.5, label=_label(label, y[-1]))
            continue
        stride = -(-len(y) // _MOST)
        axes.plot(x[::stride], y[::stride], color=colour, linewidth=0.8, alpha=0.25)
        x, y = thin(x, _MOST), thin(y, _MOST)
        curve = smooth(y, width=len(y) / 40)
        axes.plot(x, curve, color=colour, linewidth=1.8, label=_label(label, curve[-1]))


def _stack(axes: Axes, steps: np.ndarray, curves: Mapping[str, np.ndarray]) -> None:
    """Draw times on top of each other, so that the upper edge is their sum, without the steps that compiled."""
    steps, times = usual_times(steps, curves)
    x = thin(steps, _MOST)
    areas = [smooth(y, width=len(y) / 40) for y in (thin(seconds, _MOST) for seconds in times)]
    labels = [_label(label, area[-1]) for label, area in zip(curves, areas, strict=True)]
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(areas))]
    axes.stackplot(x, areas, labels=labels, colors=colours, alpha=0.75, linewidth=0)


def _label(name: str, last: float) -> str:
    """Return a legend's text: the name and the last value. Matplotlib hides labels that begin with an underscore."""
    return _text(f"{name.lstrip('_') or name.replace('_', '-')}  {last:.3g}")


def _text(text: str) -> str:
    """Return text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
