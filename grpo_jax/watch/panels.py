"""The panels of a run's picture and page: which metrics stand together, under which names, in which colours."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.watch.colours import PHASES, SERIES, reward_meanings
from grpo_jax.watch.summary import held_out_scores, metric_names
from grpo_jax.watch.writer import Line


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


_OUR_KINDS = {
    "rewards",
    "completions",
    "seconds",
    "eval",
    "sampler",
    "dynamic_sampling",
    "turns",
    "tools",
    "environment",
    "prompt_selection",
}
"""First parts of the names of metrics that a run logs itself."""


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
    for panel in (*_PANELS[:3], *_logged(names), *_PANELS[3:]):
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


def _logged(names: Sequence[str]) -> list[Panel]:
    """Return a panel for each kind of metrics that reward functions log as "kind/name", two names of it or more.

    Example:
      >>> [(panel.title, len(panel.curves)) for panel in _logged(["sums/long", "sums/short", "alone/x", "eval/a"])]
      [('sums', 2)]
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind, slash, _ = name.partition("/")
        if slash and kind not in _OUR_KINDS:
            kinds.setdefault(kind, []).append(name)
    return [
        Panel(
            kind,
            "mean",
            tuple((re.escape(n), n.partition("/")[2], c) for n, c in zip(of, itertools.cycle(SERIES))),
            low=None,
        )
        for kind, of in kinds.items()
        if len(of) > 1
    ]


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
