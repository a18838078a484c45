"""The picture of a run, `metrics.jsonl` as curves, and the colours that a meaning has in every picture and page.

The colours begin with Okabe and Ito's, which colour-blind readers tell apart, darker where a line of the original would
be too pale on white, each with a lighter one for dark pages.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
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
    "rollout": ("#b87d00", "#f0bb45"),
    "evaluation": ("#1595b0", "#67d3e8"),
    "nothing": ("#8793a0", "#74808c"),
    "reward0": ("#009e73", "#2cc99b"),
    "reward1": ("#7c7f00", "#c6c94a"),
    "reward2": ("#7f5539", "#c29a7b"),
    "reward3": ("#9b1d64", "#f06aae"),
}
"""Meaning → colour on white and on dark.

`policy` is the policy that is trained, and its updates; `reference` the reference; `start` the state before training;
`high` and `low` are beyond a bound, or on the wrong side; `rollout` and `evaluation` those phases; `nothing` teaches or
says nothing; `reward0` … are the reward functions, the first also a right answer.
"""

PHASES = {"rollout": "rollout", "reference": "reference", "rewards": "reward0", "update": "policy"}
PHASES |= {"evaluation": "evaluation", "other": "nothing"}
"""Phase of a run → meaning."""

_MOST = 2000  # points of a curve; a panel is some 450 pixels wide
_LETTERS = 14  # of a legend, for each inch of a panel


class Theme(NamedTuple):
    """Colours of the page, of text, of quiet text and of the lines of a grid."""

    page: str
    ink: str
    grey: str
    grid: str


LIGHT = Theme("#ffffff", "#1f2933", "#5d6b7a", "#e4e7eb")
DARK = Theme("#1c2229", "#e6eaee", "#9aa7b4", "#333c46")


def colour(meaning: str, *, dark: bool = False) -> str:
    """Return the colour of a meaning.

    Example:
      >>> colour("policy"), colour("policy", dark=True)
      ('#0072b2', '#56b4e9')
    """
    return COLOURS[meaning][dark]


def reward_meanings(names: Iterable[str]) -> dict[str, str]:
    """Return name → meaning of reward functions; of more than there are colours for, some share one.

    Example:
      >>> reward_meanings(["accuracy", "format", "accuracy"])
      {'accuracy': 'reward0', 'format': 'reward1'}
    """
    colours = [meaning for meaning in COLOURS if meaning.startswith("reward")]
    return {name: colours[i % len(colours)] for i, name in enumerate(dict.fromkeys(names))}


def as_css(*, dark: bool) -> str:
    """Return the declarations of a style sheet: `--policy: #0072b2; …`."""
    return " ".join(f"--{meaning}: {colour(meaning, dark=dark)};" for meaning in COLOURS)


class Panel(NamedTuple):
    """A panel: its title, the unit of its axis, and the curves.

    A curve is the pattern of a metric's name, a label ("": group 1 of the pattern) and what `COLOURS` has a colour for
    ("": that of the reward function or phase which the label names).
    """

    title: str
    unit: str
    curves: tuple[tuple[str, str, str], ...]
    stacked: bool = False
    low: float | None = 0.0


class Found(NamedTuple):
    """A panel of a run with its curves, label → values [n] (NaN where there is none), and their label → meaning."""

    panel: Panel
    curves: dict[str, np.ndarray]
    meanings: dict[str, str]


_PANELS = (
    Panel(
        "Reward",
        "mean over completions",
        (("reward", "weighted sum", "policy"), ("rewards/(.+)/mean", "", "")),
        low=None,
    ),
    Panel("Loss", "nats per token", (("loss", "training", "policy"), ("held out: loss", "held out", "reward0"))),
    Panel("Held-out prompts", "mean score", (("held out: (?!loss$)(.+)", "", ""),), low=None),
    Panel(
        "KL divergence",
        "nats per token",
        (("kl", "to the reference", "reference"), ("kl_initial", "to the initial policy", "start")),
        low=None,
    ),
    Panel("Entropy of the policy", "nats per token", (("entropy", "all tokens", "policy"),)),
    Panel(
        "Completion length",
        "tokens",
        (
            ("completions/mean_length", "mean", "policy"),
            ("completions/max_length", "longest", "high"),
            ("completions/min_length", "shortest", "low"),
        ),
    ),
    Panel(
        "Clipped ratios",
        "share of tokens",
        (("clip_fraction_low", "too low", "low"), ("clip_fraction_high", "too high", "high")),
    ),
    Panel(
        "Groups that teach nothing, completions cut off",
        "share",
        (
            ("frac_reward_zero_std", "groups with equal rewards", "nothing"),
            ("completions/clipped_ratio", "completions cut off", "high"),
        ),
    ),
    Panel("Gradient norm", "before clipping", (("grad_norm", "all parameters", "policy"),)),
    Panel("Time", "seconds per optimizer step", (("seconds/(?!total)(.+)", "", ""),), stacked=True),
)
_NOTHING_AT_ZERO = ("KL divergence", "Clipped ratios")
"""Panels that show nothing where all their values are 0: there is no reference, or each batch makes one update."""


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
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    theme = DARK if dark else LIGHT
    steps = np.array([line["step"] for line in lines], float)
    found = [panel for panel in find_panels(lines) if only is None or panel.panel.title in only]
    rows = _rows(len(found))
    size = (4.6 * max(rows, default=1) + 0.2, 2.9 * max(len(rows), 1) + 0.8)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=size, dpi=110, layout=layout, facecolor=theme.page)
    told = headline(lines) or "nothing was logged"
    heading = textwrap.fill(_text(f"{title}: {told}" if title else told), int(9.5 * size[0]))
    figure.suptitle(heading, x=0.01, ha="left", fontsize=13, color=theme.ink, weight="bold")
    grid = figure.add_gridspec(max(len(rows), 1), 6)
    places = [(row, i * (6 // count), 6 // count) for row, count in enumerate(rows) for i in range(count)]
    for (panel, curves, meanings), (row, left, width) in zip(found, places, strict=True):
        axes = figure.add_subplot(grid[row, left : left + width])
        colours = {label: colour(meaning, dark=dark) for label, meaning in meanings.items()}
        (_stack if panel.stacked else _lines)(axes, steps, curves, colours)
        _style(axes, panel, theme, letters=int(_LETTERS * size[0] * width / 6))
        if row == len(rows) - 1:
            axes.set_xlabel("optimizer step", fontsize=9, color=theme.grey)
        if len(steps) > 1:
            axes.set_xlim(steps.min() - 0.01 * np.ptp(steps), steps.max() + 0.01 * np.ptp(steps))
    if found:
        about = "Strong lines are smoothed, pale ones are as logged; numbers in the keys are the last values."
        figure.supxlabel(textwrap.fill(about, int(14 * size[0])), x=0.01, ha="left", fontsize=9, color=theme.grey)
    return figure


def _rows(count: int) -> list[int]:
    """Return the number of panels in each row: at most 3, as evenly as can be, so that no place is left empty.

    Example:
      >>> _rows(8), _rows(7), _rows(4), _rows(1), _rows(0)
      ([3, 3, 2], [3, 2, 2], [2, 2], [1], [])
    """
    rows = -(-count // 3)
    return [count // rows + (row < count % rows) for row in range(rows)]


def find_panels(lines: Sequence[Line]) -> list[Found]:
    """Return the panels for which anything was logged, with their curves.

    Example:
      >>> [(found.panel.title, found.meanings) for found in find_panels([{"step": 1, "reward": 0.5, "kl": 0.1}])]
      [('Reward', {'weighted sum': 'policy'}), ('KL divergence', {'to the reference': 'reference'})]
    """
    functions = reward_colours(lines)
    scores = held_out_scores(metric_names(lines))
    lines = [{f"held out: {scores[name]}" if name in scores else name: line[name] for name in line} for line in lines]
    names = metric_names(lines)
    found = []
    for panel in _PANELS:
        # The loss of GRPO is near 0 whatever is learned.
        curves = {} if panel.title == "Loss" and "reward" in names else _curves(panel, names, lines)
        meanings = {label: meaning for _, label, meaning in panel.curves}
        named = PHASES if panel.stacked else functions  # by labels that are names of phases, or of functions
        if panel.stacked:  # a run without a reference has such a phase too, which takes no time
            whole = sum(np.nansum(curve) for curve in curves.values())
            curves = {label: curve for label, curve in curves.items() if np.nansum(curve) > 1e-3 * whole}
        if curves:
            own = {label: meanings.get(label) or named.get(label) or "nothing" for label in curves}
            found.append(Found(panel, curves, own))
    return found


def reward_colours(lines: Sequence[Line]) -> dict[str, str]:
    """Return name → meaning, for its colour, of each reward function and each held-out score of a run."""
    names = metric_names(lines)
    functions = [match[1] for name in names if (match := re.fullmatch(r"rewards/(.+)/mean", name))]
    scores = [score for score in held_out_scores(names).values() if score != "reward"]
    return {"reward": "policy", **reward_meanings([*functions, *scores])}


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


def _curves(panel: Panel, names: Sequence[str], lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Return label → values [n] of a panel's metrics, without those that have no finite value."""
    curves: dict[str, np.ndarray] = {}
    for pattern, label, _ in panel.curves:
        for name in names:
            if match := re.fullmatch(pattern, name):
                logged = [line.get(name) for line in lines]
                values = np.array([value if isinstance(value, int | float) else np.nan for value in logged], float)
                # Without a reference the logged KL is 0 throughout: nothing to show.
                if np.isfinite(values).any() and not (name == "kl" and np.nanmax(np.abs(values)) == 0):
                    curves[label or match[1]] = values
    if panel.title in _NOTHING_AT_ZERO and not any(np.nan_to_num(values).any() for values in curves.values()):
        return {}
    # The weighted sum of one function is that function over again.
    if len(curves) == 2 and "weighted sum" in curves:
        first, second = curves.values()
        if np.allclose(first, second, equal_nan=True):
            del curves["weighted sum"]
    return curves


def _style(axes: Axes, panel: Panel, theme: Theme, *, letters: int) -> None:
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


def _lines(axes: Axes, steps: np.ndarray, curves: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
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
