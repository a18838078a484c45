"""Where a run stands, on the host: counters, and the metrics that wait for the next line of the log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping


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
      window: name → [sum, count] of the metrics since the last line of the log.
    """

    step: int = 0
    cursor: int = 0
    updates_done: int = 0
    evaluated: int = -1
    tokens: int = 0
    skipped: int = 0
    metric: float | None = None
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
