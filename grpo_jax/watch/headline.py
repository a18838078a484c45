"""A run in one sentence: what it was measured by, from where to where, in how many steps, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_jax.watch.names import held_out

_PHASES = {
    "rollout": "rollouts",
    "update": "updates",
    "rewards": "reward functions",
    "reference": "log-probs of the reference",
    "evaluation": "evaluations",
}


def headline(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the sentence of a run: its first held-out score, or else its reward, and the phase that took most time.

    Args:
      lines: objects of `metrics.jsonl`.

    Returns:
      One line without a full stop, "" where nothing was logged.

    Example:
      >>> lines = [{"step": 0, "eval/accuracy": 0.125}, {"step": 9, "seconds/update": 6.0, "seconds/total": 8.0}]
      >>> headline([*lines, {"step": 10, "eval/accuracy": 0.98}])
      'accuracy on held-out prompts 0.125 → 0.98 in 10 steps; 75 % of the time in updates'
    """
    if not lines:
        return ""
    steps = max(line["step"] for line in lines)
    end = f"{steps:,} step{'s' * (steps != 1)}"
    change = _change(lines)
    told = [f"{change} in {end}" if change else end]
    seconds = phase_seconds(lines)
    if seconds:
        total = sum(seconds.values())
        name = max(seconds, key=lambda phase: seconds[phase])
        told.append(f"{100 * seconds[name] / total:.0f} % of the time in {_PHASES.get(name, name)}")
    return "; ".join(told)


def phase_seconds(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of each phase over a run; "other" is what no phase holds.

    Example:
      >>> phase_seconds([{"seconds/update": 1.5, "seconds/total": 2.0}] * 2)
      {'update': 3.0, 'other': 1.0}
    """
    seconds: dict[str, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("seconds/") and isinstance(value, int | float):
                phase = name.removeprefix("seconds/")
                seconds[phase] = seconds.get(phase, 0.0) + value
    total = seconds.pop("total", 0.0)
    other = total - sum(seconds.values())
    return seconds | ({"other": other} if other > 0 else {})


def _change(lines: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last value of the metric that a run is told by."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    told = {name: f"{held_out(name)} on held-out prompts" for name in names if held_out(name)}
    for name, label in {**told, "reward": "reward"}.items():
        values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
        if len(values) > 1:
            return f"{label} {values[0]:.3g} → {values[-1]:.3g}"
        if values:
            return f"{label} {values[0]:.3g}"
    return ""
