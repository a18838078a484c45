"""Run plots: metric panels, their colors, and `report.png`."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.watch.summary import headline, held_out_scores, metric_names
from grpo_jax.watch.writer import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 400
"""Maximum number of values per curve. A panel is about 400 pixels wide."""
SMOOTHED = 20
"""Minimum number of finite values for a curve to be smoothed."""

COLORS = {
    "policy": ("#0072b2", "#56b4e9"),
    "reference": ("#5c4d9e", "#a99be6"),
    "start": ("#52606d", "#b8c2cc"),
    "high": ("#d55e00", "#f28c4b"),
    "low": ("#b8578f", "#e08cba"),
    "nothing": ("#8793a0", "#74808c"),
    "reward0": ("#009e73", "#2cc99b"),
    "reward1": ("#7c7f00", "#c6c94a"),
    "reward2": ("#7f5539", "#c29a7b"),
    "reward3": ("#9b1d64", "#f06aae"),
}
"""Maps meanings to (color on a light page, color on a dark page). The palette is based on Okabe and Ito's.

`policy` is the trained policy, `start` the initial policy, and `reference` the reference. `high` and `low` are maxima
and minima or values above and below a range, `nothing` is zero-signal groups, and `reward0` … are reward functions.
"""


class Theme(NamedTuple):
    """Colors of the page, text, secondary text and grid lines."""

    page: str
    ink: str
    gray: str
    grid: str


LIGHT = Theme("#ffffff", "#1f2933", "#5d6b7a", "#e4e7eb")
DARK = Theme("#1c2229", "#e6eaee", "#9aa7b4", "#333c46")


class Curve(NamedTuple):
    """A metric in a panel: label, key in `COLORS`, values [n] (NaN if missing), and smoothed values [n] or None."""

    label: str
    color: str
    values: np.ndarray
    smoothed: np.ndarray | None


class Panel(NamedTuple):
    """A panel: title, unit, lower limit of the y axis (None: automatic), steps [n ≤ `POINTS`] and curves."""

    title: str
    unit: str
    low: float | None
    steps: np.ndarray
    curves: list[Curve]


# fmt: off
_PANELS: tuple[tuple[str, str, float | None, dict[str, tuple[str, str]]], ...] = (
    ("Reward", "mean over completions", None, {"reward": ("weighted sum", "policy"), "rewards/(.+)/mean": ("", "")}),
    ("Reward standard deviation", "within a group", 0.0, {"reward_std": ("mean over groups", "policy")}),
    ("Loss", "nats per token", 0.0, {"loss": ("training", "policy"), "held out: loss": ("held out", "reward0")}),
    ("Held-out prompts", "mean score", None, {"held out: (?!loss$)(.+)": ("", "")}),
    ("KL divergence", "nats per token", None,
     {"kl": ("to the reference", "reference"), "kl_initial": ("to the initial policy", "start")}),
    ("Entropy", "nats per token", 0.0, {"entropy": ("policy", "policy")}),
    ("Completion length", "tokens", 0.0,
     {"completions/mean_length": ("mean", "policy"), "completions/max_length": ("longest", "high"),
      "completions/min_length": ("shortest", "low")}),
    ("Truncated completions", "fraction of completions", 0.0, {"completions/clipped_ratio": ("truncated", "high")}),
    ("Zero-signal groups", "fraction of groups", 0.0, {"frac_reward_zero_std": ("equal rewards", "nothing")}),
    ("Clip fraction", "fraction of tokens", 0.0,
     {"clip_fraction_low": ("below the range", "low"), "clip_fraction_high": ("above the range", "high")}),
    ("Gradient norm", "before clipping", 0.0, {"grad_norm": ("all parameters", "policy")}),
    ("Learning rate", "", 0.0, {"learning_rate": ("optimizer", "policy")}),
)
# fmt: on
"""(title, unit, lower limit of the y axis, dict that maps regular expressions for metrics to (label, meaning)).

If the label is empty, group 1 of the match is used. If the meaning is empty, the reward function's color is used.
"""

_HIDDEN_AT_ZERO = ("KL divergence", "Clip fraction")
"""Panels that omit curves whose values are all 0, such as clip fractions with one update per batch."""


def color(meaning: str, *, dark: bool = False) -> str:
    """Return the color for a meaning (a key of `COLORS`)."""
    return COLORS[meaning][dark]


def find_panels(lines: Sequence[Line]) -> list[Panel]:
    """Return the panels with at least one logged metric."""
    names, steps = metric_names(lines), np.array([line["step"] for line in lines], float)
    labels, functions = held_out_scores(names), reward_colors(names)
    metrics = {f"held out: {labels[name]}" if name in labels else name: _values(lines, name) for name in names}
    panels = []
    for title, unit, low, patterns in _PANELS:
        if title == "Loss" and "reward" in metrics:  # GRPO's loss stays near 0 and does not measure progress
            continue
        curves = [
            (label or match[1], meaning or functions[match[1]], values)
            for pattern, (label, meaning) in patterns.items()
            for name, values in metrics.items()
            if np.isfinite(values).any() and (match := re.fullmatch(pattern, name))
            if title not in _HIDDEN_AT_ZERO or np.nan_to_num(values).any()
        ]
        # With a single reward function, the weighted sum is the same curve.
        if len(curves) == 2 and title == "Reward" and np.allclose(curves[0][2], curves[1][2], equal_nan=True):
            curves = curves[1:]
        if curves:
            logged = np.isfinite([values for _, _, values in curves]).any(axis=0)
            panels.append(Panel(title, unit, low, np.round(thin(steps[logged], POINTS)), []))
            for label, meaning, values in curves:
                y = thin(values[logged], POINTS)
                smoothed = smooth(y, width=len(y) / 40) if np.isfinite(y).sum() >= SMOOTHED else None
                panels[-1].curves.append(Curve(label, meaning, y, smoothed))
    return panels


def reward_colors(names: Iterable[str]) -> dict[str, str]:
    """Return a dict that maps the labels of training and held-out rewards in `names` to keys of `COLORS`."""
    names = list(names)
    functions = [match[1] for name in names if (match := re.fullmatch(r"rewards/(.+)/mean", name))]
    scores = [score for score in held_out_scores(names).values() if score != "reward"]
    labels = dict.fromkeys([*functions, *scores])
    return {"reward": "policy", **{label: f"reward{i % 4}" for i, label in enumerate(labels)}}


def _values(lines: Sequence[Line], name: str) -> np.ndarray:
    """Return a metric's value in each line: [n] float, NaN if missing."""
    logged = [line.get(name) for line in lines]
    return np.array([value if isinstance(value, int | float) else np.nan for value in logged], float)


def smooth(values: np.ndarray, width: float) -> np.ndarray:
    """Smooth [n] values with a Gaussian kernel of standard deviation `width`. Non-finite values become NaN."""
    reach = min(int(4 * width) + 1, len(values))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(width, 1e-9)) ** 2)
    finite = np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0.0), kernel)[reach : reach + len(values)]
    weight = np.convolve(finite.astype(float), kernel)[reach : reach + len(values)]
    return np.where(finite, total / np.maximum(weight, 1e-300), np.nan)


def thin(values: np.ndarray, limit: int) -> np.ndarray:
    """Reduce [n] values to at most `limit` by averaging neighbors. Non-finite values are excluded."""
    size = -(-len(values) // limit)
    values = np.append(values, np.full(-len(values) % size, np.nan)).reshape(-1, size)
    finite = np.isfinite(values)
    return np.where(finite.any(1), np.where(finite, values, 0).sum(1) / np.maximum(finite.sum(1), 1), np.nan)


_COLUMNS = 3
"""Number of panels per row."""

# fmt: off
_STYLE: Any = {  # matplotlib's type stubs accept only literal keys
    "axes.axisbelow": True, "axes.grid": True, "grid.color": LIGHT.grid, "axes.edgecolor": LIGHT.grid,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.xmargin": 0.01,
    "axes.labelcolor": LIGHT.gray, "axes.labelsize": 9, "axes.titlecolor": LIGHT.ink, "axes.titlelocation": "left",
    "axes.titlesize": 11, "axes.titleweight": "bold", "legend.fontsize": 8, "legend.labelcolor": LIGHT.ink,
    "text.parse_math": False, "xtick.color": LIGHT.gray, "xtick.labelsize": 8, "xtick.major.size": 0,
    "ytick.color": LIGHT.gray, "ytick.labelsize": 8, "ytick.major.size": 0,
}
# fmt: on


def draw_report(lines: Sequence[Line], *, title: str = "", only: Sequence[str] | None = None) -> Figure:
    """Draw a run's panels from the lines of `metrics.jsonl`. `only` selects panels by their titles.

    Curves with at least `SMOOTHED` values are smoothed; their raw values are paler. Legends show the last values.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = [panel for panel in find_panels(lines) if only is None or panel.title in only]
    sentence = headline(lines) or "nothing was logged"
    rows, columns = -(-len(panels) // _COLUMNS), min(max(len(panels), 1), _COLUMNS)
    size = (4.6 * columns + 0.2, 2.9 * max(rows, 1) + 0.8)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1), facecolor="white")
        text = textwrap.fill(f"{title}: {sentence}" if title else sentence, int(9.5 * size[0]))
        figure.suptitle(text, x=0.01, ha="left", fontsize=13, color=LIGHT.ink, weight="bold")
        for i, panel in enumerate(panels):
            _draw(figure.add_subplot(rows, columns, i + 1, sharex=figure.axes[0] if i else None), panel)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    for curve in panel.curves:
        logged, line_color = np.isfinite(curve.values), color(curve.color)
        x, y = panel.steps[logged], (curve.values if curve.smoothed is None else curve.smoothed)[logged]
        label = f"{y[-1]:.3g}  {curve.label}"  # matplotlib hides labels that start with an underscore
        if curve.smoothed is None:
            axes.plot(x, y, linewidth=1.6, marker="o", markersize=3.5, label=label, color=line_color)
        else:
            axes.plot(x, curve.values[logged], linewidth=0.8, alpha=0.25, color=line_color)
            axes.plot(x, y, linewidth=1.8, label=label, color=line_color)
    axes.legend()
    axes.set_title(panel.title)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(panel.unit)
    axes.yaxis.set_major_formatter("{x:.3g}")
    if panel.low is not None:
        axes.set_ylim(bottom=panel.low)


def save_figure(figure: Figure, file: str | IO[bytes]) -> None:
    """Write a figure as PNG. Suppresses matplotlib's warnings about characters missing from the font."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(file, format="png")
