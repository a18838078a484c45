"""Curves of a run: which metrics share a panel, in which colours, and the picture `report.png`."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from grpo_jax.watch.summary import headline, held_out_scores, metric_names
from grpo_jax.watch.writer import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
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
"""Meaning → colour on white and on dark pages: Okabe and Ito's palette, darkened where it is too pale on white.

`policy` is the trained policy; `reference` the reference; `start` the initial policy; `high` and `low` are values
beyond a bound; `nothing` is without a signal; `reward0` … are the reward functions.
"""

SMOOTHED = 20
"""Number of values from which on a curve is smoothed."""
_MOST = 2000
"""Points of a curve; a panel is about 450 pixels wide."""
_COLUMNS, _LETTERS = 3, 62
"""Panels of a row, and letters in a line of a legend."""


class Theme(NamedTuple):
    """Colours of the page, of text, of secondary text and of grid lines."""

    page: str
    ink: str
    grey: str
    grid: str


LIGHT = Theme("#ffffff", "#1f2933", "#5d6b7a", "#e4e7eb")
DARK = Theme("#1c2229", "#e6eaee", "#9aa7b4", "#333c46")


class Curve(NamedTuple):
    """A metric in a panel: its label, a key of `COLOURS`, and its value in each line, [n] float, NaN where missing."""

    label: str
    colour: str
    values: np.ndarray


class Panel(NamedTuple):
    """A panel: its title, the unit of its values, the lower end of its axis (None: that of the values), its curves."""

    title: str
    unit: str
    low: float | None
    curves: list[Curve]


_PANELS: tuple[tuple[str, str, float | None, dict[str, tuple[str, str]]], ...] = (
    ("Reward", "mean over completions", None, {"reward": ("weighted sum", "policy"), "rewards/(.+)/mean": ("", "")}),
    ("Reward standard deviation", "within a group", 0.0, {"reward_std": ("mean over groups", "policy")}),
    ("Loss", "nats per token", 0.0, {"loss": ("training", "policy"), "held out: loss": ("held out", "reward0")}),
    ("Held-out prompts", "mean score", None, {"held out: (?!loss$)(.+)": ("", "")}),
    (
        "KL divergence",
        "nats per token",
        None,
        {"kl": ("to the reference", "reference"), "kl_initial": ("to the initial policy", "start")},
    ),
    ("Entropy", "nats per token", 0.0, {"entropy": ("policy", "policy")}),
    (
        "Completion length",
        "tokens",
        0.0,
        {
            "completions/mean_length": ("mean", "policy"),
            "completions/max_length": ("longest", "high"),
            "completions/min_length": ("shortest", "low"),
        },
    ),
    ("Truncated completions", "share of completions", 0.0, {"completions/clipped_ratio": ("truncated", "high")}),
    ("Zero-signal groups", "share of groups", 0.0, {"frac_reward_zero_std": ("equal rewards", "nothing")}),
    (
        "Clip fraction",
        "share of tokens",
        0.0,
        {"clip_fraction_low": ("below the range", "low"), "clip_fraction_high": ("above the range", "high")},
    ),
    ("Gradient norm", "before clipping", 0.0, {"grad_norm": ("all parameters", "policy")}),
    ("Learning rate", "", 0.0, {"learning_rate": ("optimizer", "policy")}),
)
"""(title, unit, lower end, pattern of a metric's name → label and colour). An empty label is group 1 of the pattern, an
empty colour that of the reward function or held-out score of this label."""

_EMPTY_AT_ZERO = ("KL divergence", "Clip fraction")
"""Panels that are left out where all values are 0: there is no reference, or each batch makes one update."""


def colour(meaning: str, *, dark: bool = False) -> str:
    """Return the colour of a meaning."""
    return COLOURS[meaning][dark]


def as_css(*, dark: bool) -> str:
    """Return the declarations of a style sheet: `--policy: #0072b2; …`."""
    return " ".join(f"--{meaning}: {colour(meaning, dark=dark)};" for meaning in COLOURS)


def reward_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each reward function and held-out score among the names of metrics, by its label."""
    names = list(names)
    functions = [match[1] for name in names if (match := re.fullmatch(r"rewards/(.+)/mean", name))]
    scores = [score for score in held_out_scores(names).values() if score != "reward"]
    colours = [meaning for meaning in COLOURS if meaning.startswith("reward")]
    labels = dict.fromkeys([*functions, *scores])
    return {"reward": "policy", **{label: colours[i % len(colours)] for i, label in enumerate(labels)}}


def find_panels(lines: Sequence[Line]) -> list[Panel]:
    """Return the panels for which anything was logged."""
    names = metric_names(lines)
    scores, functions = held_out_scores(names), reward_colours(names)
    metrics = {f"held out: {scores[name]}" if name in scores else name: _values(lines, name) for name in names}
    panels = []
    for title, unit, low, patterns in _PANELS:
        curves = [
            Curve(label or match[1], meaning or functions[match[1]], values)
            for pattern, (label, meaning) in patterns.items()
            for name, values in metrics.items()
            if np.isfinite(values).any() and (match := re.fullmatch(pattern, name))
        ]
        # Without a reference the logged KL is 0 throughout.
        curves = [curve for curve in curves if curve.label != "to the reference" or np.nan_to_num(curve.values).any()]
        if title == "Loss" and "reward" in metrics:  # the loss of GRPO is near 0 whatever is learned
            continue
        if title in _EMPTY_AT_ZERO and not any(np.nan_to_num(curve.values).any() for curve in curves):
            continue
        # The weighted sum of a single function repeats that function.
        if len(curves) == 2 and title == "Reward" and np.allclose(curves[0].values, curves[1].values, equal_nan=True):
            curves = curves[1:]
        if curves:
            panels.append(Panel(title, unit, low, curves))
    return panels


def _values(lines: Sequence[Line], name: str) -> np.ndarray:
    """Return the value of a metric in each line, [n] float; NaN where there is none."""
    logged = [line.get(name) for line in lines]
    return np.array([value if isinstance(value, int | float) else np.nan for value in logged], float)


def draw_report(lines: Sequence[Line], *, title: str = "", only: Sequence[str] | None = None) -> Figure:
    """Draw the curves of a run, for each panel with a logged metric, as a figure without any global state of pyplot.

    From `SMOOTHED` values on, raw values are pale with a smoothed curve over them. The legend above a panel shows the
    last value of each curve.

    Args:
      lines: objects of `metrics.jsonl`, each with "step"; a value that is None or missing leaves a gap.
      title: the name of the run.
      only: titles of panels, such as "Reward"; None draws all.
    """
    steps = np.array([line["step"] for line in lines], float)
    panels = [panel for panel in find_panels(lines) if only is None or panel.title in only]
    sentence = headline(lines) or "nothing was logged"
    smoothed = any(np.isfinite(curve.values).sum() >= SMOOTHED for panel in panels for curve in panel.curves)
    caption = "Strong lines are smoothed, pale lines are raw values. " if smoothed else ""
    caption += "The number in a legend is where its curve ends."
    figure, places = _figure(len(panels), f"{title}: {sentence}" if title else sentence, caption)
    for panel, axes in zip(panels, places, strict=True):
        for curve in panel.curves:
            _draw(axes, steps, curve)
        _style(axes, panel)
        if len(steps) > 1:
            axes.set_xlim(steps.min() - 0.01 * np.ptp(steps), steps.max() + 0.01 * np.ptp(steps))
    return figure


def save_figure(figure: Figure, file: str | IO[bytes]) -> None:
    """Write a figure as PNG; letters that the font lacks are drawn as boxes, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(file, format="png")


def smooth(values: np.ndarray, width: float) -> np.ndarray:
    """Average each of [n] values with its neighbours by a Gaussian with the standard deviation `width`, in values.

    The curve does not lag. NaN stays NaN, and is left out of the averages.
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


def _figure(count: int, heading: str, caption: str) -> tuple[Figure, list[Axes]]:
    """Make a figure and the axes of `count` panels, with a heading above and a caption below."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows, columns = -(-count // _COLUMNS), min(max(count, 1), _COLUMNS)
    size = (4.6 * columns + 0.2, 2.9 * max(rows, 1) + 0.8)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=size, dpi=110, layout=layout, facecolor=LIGHT.page)
    text = textwrap.fill(_text(heading), int(9.5 * size[0]))
    figure.suptitle(text, x=0.01, ha="left", fontsize=13, color=LIGHT.ink, weight="bold")
    if count:
        text = textwrap.fill(caption, int(14 * size[0]))
        figure.supxlabel(text, x=0.01, ha="left", fontsize=9, color=LIGHT.grey)
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def _style(axes: Axes, panel: Panel) -> None:
    """Give axes with their curves a title, a legend between it and the panel, labels, a grid and a plain frame."""
    _, labels = axes.get_legend_handles_labels()
    sizes = [len(label) + 6 for label in labels]
    columns = len(labels) if sum(sizes) <= _LETTERS else max(1, _LETTERS // max(sizes))
    rows = -(-len(labels) // columns)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.98),
        ncols=columns,
        fontsize=8,
        frameon=False,
        labelcolor=LIGHT.ink,
        borderaxespad=0.2,
        handlelength=1.4,
        columnspacing=1.4,
    )
    axes.set_title(panel.title, loc="left", fontsize=11, color=LIGHT.ink, weight="bold", pad=8 + 12.5 * rows)
    axes.set_xlabel("optimizer step", fontsize=9, color=LIGHT.grey)
    axes.set_ylabel(panel.unit, fontsize=9, color=LIGHT.grey)
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.set_facecolor(LIGHT.page)
    axes.grid(color=LIGHT.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=LIGHT.grey, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT.grid)
    if panel.low is not None:
        axes.set_ylim(bottom=panel.low)


def _draw(axes: Axes, steps: np.ndarray, curve: Curve) -> None:
    """Draw pale raw values and the smoothed curve; few values as dots joined by a line."""
    line_colour = colour(curve.colour)
    there = np.isfinite(curve.values)
    x, y = steps[there], curve.values[there]
    if len(y) < SMOOTHED:
        axes.plot(x, y, linewidth=1.6, marker="o", markersize=3.5, label=_label(curve.label, y[-1]), color=line_colour)
        return
    stride = -(-len(y) // _MOST)
    axes.plot(x[::stride], y[::stride], linewidth=0.8, alpha=0.25, color=line_colour)
    x, y = thin(x, _MOST), thin(y, _MOST)
    smoothed = smooth(y, width=len(y) / 40)
    axes.plot(x, smoothed, linewidth=1.8, label=_label(curve.label, smoothed[-1]), color=line_colour)


def _label(name: str, last: float) -> str:
    """Return a legend's text: the name and the last value. Matplotlib hides labels that begin with an underscore."""
    name = name.lstrip("_") or name.replace("_", "-")
    return _text(f"{name[:39]}{'…' if len(name) > 39 else ''}  {last:.3g}")


def _text(text: str) -> str:
    """Return text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
