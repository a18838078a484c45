"""Counters of a run, a stopwatch of its phases, and a profiler trace of some steps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping

FOLDER = "profile"
"""Folder of the run directory that holds the trace."""


@dataclasses.dataclass
class Progress:
    """The counters of a run, all JSON: with `TrainState` and the present batch they decide all that follows.

    Attributes:
      step: optimizer steps done, as in `TrainState.step`.
      cursor: prompts sampled since the start of the run.
      updates_done: updates made on the present batch; 0 between iterations.
      evaluated: step of the last evaluation, −1 before the first.
      tokens: completion tokens sampled since the start.
      skipped: updates in a row, up to now, that were skipped because loss or gradient was not finite.
      metric: newest value of `metric_for_best_model`; None before the first.
      metrics: step → that metric of each scheduled checkpoint that there is, also of one that was written, at a stop,
        before its evaluation was made.
      asked: whether an engine is at the completions of the prompts from `cursor` on (`run.beside`).
      window: name → [sum, count] of the metrics since the last line of the log.
    """

    step: int = 0
    cursor: int = 0
    updates_done: int = 0
    evaluated: int = -1
    tokens: int = 0
    skipped: int = 0
    metric: float | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    asked: bool = False
    window: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def collected(self, cursor: int, metrics: Mapping[str, float]) -> None:
        """Note that an iteration's completions are there."""
        self.cursor = cursor
        self.tokens += int(metrics["num_tokens"])
        self._add(metrics)

    def updated(self, metrics: Mapping[str, float]) -> None:
        """Note an optimizer step."""
        self.step += 1
        self.updates_done += 1
        self.skipped = self.skipped + 1 if metrics.get("update_skipped") else 0
        self._add(metrics)

    def measured(self, name: str | None, metrics: Mapping[str, float]) -> None:
        """Note the metric of that name, if it is among these."""
        if name is not None and math.isfinite(metrics.get(name, math.nan)):
            self.metric = float(metrics[name])

    def _add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            total = self.window.setdefault(name, [0.0, 0])
            # One number that is not finite would hide all others of the window; it is counted where it arises.
            if math.isfinite(value):
                total[0] += float(value)
                total[1] += 1

    def log_line(self) -> dict[str, float]:
        """Means of the metrics since the last call (`ratio_max` and the like are means of maxima), and the totals."""
        means = {name: total / count if count else math.nan for name, (total, count) in self.window.items()}
        self.window = {}
        return {**means, "num_tokens": self.tokens, "num_prompts": self.cursor}


class Phases:
    """A stopwatch: the seconds of each phase of an iteration.

    Phases may lie inside each other; a second counts for the innermost only, so that phases add up to no more than the
    total. JAX returns before the device is done: end a phase with what waits for its results, or the next one pays.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = self._last = clock()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase; entering it again adds to its seconds."""
        self._lap()
        self._open.append(name)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """Return `seconds/<phase>` of each and `seconds/total` since the last call, and reset them."""
        self._lap()
        seconds = {f"seconds/{name}": value for name, value in self._seconds.items()}
        seconds["seconds/total"] = self._last - self._start
        self._start, self._seconds = self._last, {}
        return seconds

    def _lap(self) -> None:
        """Give the seconds since the last lap to the innermost open phase."""
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._last
        self._last = now
