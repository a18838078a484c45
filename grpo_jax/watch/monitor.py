"""Run logging: counters, a stopwatch, and `Monitor`, which passes metrics to files, callbacks and the display."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import jax

from grpo_jax.config.sft import GRPOOrSFTConfig
from grpo_jax.update.state import TrainState
from grpo_jax.watch.display import Display
from grpo_jax.watch.summary import describe_run
from grpo_jax.watch.writer import CompletionRow, Line, RunWriter, read_lines

if TYPE_CHECKING:  # otherwise imported only if `report_to` names a tracker
    from grpo_jax.watch.trackers import Tracker

MAX_WARNINGS = 200
"""Maximum number of distinct warnings and hints in `warnings.jsonl`."""

Callback = Callable[[int, Mapping[str, float]], object]
"""A function called as `callback(step, metrics)` with the metrics of each logged step and of each evaluation.

```python
callbacks = [lambda step, metrics: wandb_run.log(metrics, step=step)]
```

On `StopRun`, `train` saves a checkpoint (if `run_dir` is set) and returns. Other exceptions propagate.
"""


class StopRun(Exception):
    """Exception that a callback raises to end the run after the current step. `train` then returns the state."""


@dataclasses.dataclass
class Progress:
    """A run's counters, as JSON values. A checkpoint stores them with the `TrainState` and any partly used batch.

    Attributes:
      cursor: number of prompts sampled since the start of the run; `tokens` is the total length of their completions.
      updates_done: number of updates made on the current batch; 0 between iterations.
      evaluated: step of the last evaluation; −1 before the first.
      skipped: current number of consecutive updates skipped because the loss or gradient was not finite.
      metric: latest value of `metric_for_best_model`; `metrics` maps the steps of scheduled checkpoints to values.
      in_progress: whether an engine is already sampling completions for the prompts that start at `cursor`.
      window: dict that maps each metric name to [sum, count] since the last logged line.
    """

    step: int = 0
    cursor: int = 0
    updates_done: int = 0
    evaluated: int = -1
    tokens: int = 0
    skipped: int = 0
    metric: float | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    in_progress: bool = False
    window: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def count_batch(self, cursor: int, metrics: Mapping[str, float]) -> None:
        """Add the tokens and metrics of an iteration's completions, and set the cursor."""
        self.cursor = cursor
        self.tokens += int(metrics["num_tokens"])
        self._add(metrics)

    def count_update(self, metrics: Mapping[str, float]) -> None:
        """Count an optimizer step and add its metrics."""
        self.step += 1
        self.updates_done += 1
        self.skipped = self.skipped + 1 if metrics.get("update_skipped") else 0
        self._add(metrics)

    def set_metric(self, name: str | None, metrics: Mapping[str, float]) -> None:
        """Set `metric` to the value of the metric `name` if this value is finite."""
        if name is not None and math.isfinite(metrics.get(name, math.nan)):
            self.metric = float(metrics[name])

    def _add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            total = self.window.setdefault(name, [0.0, 0])
            if math.isfinite(value):  # a NaN would make the mean of the whole window NaN
                total[0] += float(value)
                total[1] += 1

    def log_line(self) -> dict[str, float]:
        """Return the totals so far, and each metric's mean since the last call (`ratio_max`: the mean of maxima)."""
        means = {name: total / count if count else math.nan for name, (total, count) in self.window.items()}
        self.window = {}
        return {**means, "num_tokens": self.tokens, "num_prompts": self.cursor}


class Phases:
    """Stopwatch for an iteration's phases.

    Phases may be nested; time is attributed to the innermost phase only. JAX dispatches asynchronously, so a phase must
    wait for its results. Otherwise, part of its time is attributed to the next phase.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = self._last = clock()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase. The times of phases with the same name are summed."""
        self._lap()
        self._open.append(name)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    @property
    def current(self) -> str:
        """Name of the innermost open phase, or "" outside all phases."""
        return self._open[-1] if self._open else ""

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call as `seconds/<phase>` and `seconds/total`, and reset them."""
        self._lap()
        seconds = {f"seconds/{name}": value for name, value in self._seconds.items()}
        seconds["seconds/total"] = self._last - self._start
        self._start, self._seconds = self._last, {}
        return seconds

    def _lap(self) -> None:
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._last
        self._last = now


class Monitor:
    """A run's log files, callbacks, trackers, stopwatch, hints and display.

    Inside the context, Python warnings are also written to `warnings.jsonl`. Exiting the context writes the report and
    closes the trackers. `hints` is called with each line of training metrics and returns new hints (see `watch.hints`).
    `quiet=True`, for processes that do not log, disables the display and the trackers. `stopped` is True once a
    callback has raised `StopRun`.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        config: GRPOOrSFTConfig,
        *,
        callbacks: Iterable[Callback] = (),
        hints: Callable[[Line], list[str]] | None = None,
        quiet: bool = False,
    ):
        self.phase = Phases()
        self.stopped = False
        self._config, self._hints, self._quiet = config, hints, quiet
        self._writer = RunWriter(run_dir)
        self._callbacks = tuple(callbacks)
        self._trackers: list[Tracker] = []
        self.display = Display(quiet=quiet, activity=lambda: self.phase.current)
        self._tokens = 0.0  # `num_tokens` in the last logged line
        self._step: int | None = None  # None until `start` has truncated the files
        self._updates, self._total_steps = 1, 0  # updates per iteration, steps in the run
        self._warned: set[tuple[str, str]] = set()

    def __enter__(self) -> Monitor:
        self.display.__enter__()
        self._show_warning, warnings.showwarning = warnings.showwarning, self._warning
        return self

    def __exit__(self, *error: object) -> None:
        self.display.__exit__(*error)
        try:
            self.write_report()
        finally:
            warnings.showwarning = self._show_warning
            with contextlib.ExitStack() as trackers:  # closes all trackers even if one raises
                for tracker in self._trackers:
                    trackers.push(tracker)

    def start(
        self,
        state: TrainState,
        progress: Progress,
        *,
        total_steps: int,
        num_rows: int,
        num_dropped: int = 0,
        resumed: bool = False,
        updates: int = 1,
    ) -> None:
        """Open a run's files and trackers, drop logged lines after the checkpoint, and print the run's sizes."""
        self._writer.truncate(progress.step if resumed else -1, evaluated=progress.evaluated == progress.step)
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state.params)}
        self._writer.config(self._config, prompts=num_rows, param_dtype=max(dtypes, default="float32"))
        if not self._quiet and self._config.report_to not in (None, "none"):
            from grpo_jax.watch.trackers import open_trackers

            self._trackers = open_trackers(self._config, self._writer.run_dir, step=progress.step if resumed else 0)
        if resumed and self._writer.run_dir is not None:
            for line in read_lines(self._writer.path("metrics.jsonl")):
                self._new_hints(line)
            for line in read_lines(self._writer.path("warnings.jsonl")):
                self._warned.add((line["category"], line["message"]))
        self._step = progress.step
        self.display.say(describe_run(self._config, state, num_rows=num_rows))
        if num_dropped:
            self.display.say(f"dropped rows with prompts longer than max_prompt_length: {num_dropped}")
        if resumed and progress.step >= total_steps:
            fix = "to start a new run, pass a different run_dir"
            self.display.say(f"complete: {progress.step} of {total_steps} steps; {fix}")
        elif resumed:
            self.display.say(f"resuming after step {progress.step}")
        self._updates, self._total_steps = updates, total_steps
        self.display.start(total_steps, step=progress.step, updates=updates)
        self._tokens = float(progress.tokens)
        self.phase.take()

    def completions(self, step: int, rows: Sequence[CompletionRow]) -> None:
        """Write the completions in the batch whose first update is `step`.

        With `log_completions`, they are also printed if one of the batch's updates is logged.
        """
        self._step = step
        if rows:
            self._writer.completions(step, rows)
        steps = range(step, step + self._updates)
        if self._config.log_completions and (self._total_steps in steps or any(map(self._config.logs_at, steps))):
            self.display.completions(rows[: self._config.num_completions_to_print])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's training metrics, and print and store new hints."""
        seconds = self.phase.take()
        tokens, self._tokens = metrics["num_tokens"] - self._tokens, metrics["num_tokens"]
        rate = {"tokens_per_second": tokens / seconds["seconds/total"]} if seconds["seconds/total"] > 0 else {}
        line = {**metrics, **rate, **seconds}
        self._step = step
        self._emit(step, line)
        for message in self._new_hints({"step": step, **line}):
            self.display.say(f"hint: {message}")
            self._keep("hint", message)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log evaluation metrics under the names `eval/<name>`."""
        self._emit(step, {f"eval/{name}": value for name, value in metrics.items()})

    def end(self, step: int, total_steps: int, *, best: tuple[int, float] | None = None) -> None:
        """Print the best checkpoint, the path of the report and, if the run is incomplete, how to resume it."""
        if best is not None:
            self.display.say(f"best checkpoint: step {best[0]} ({self._config.metric_for_best_model} {best[1]:.4g})")
        if self._writer.run_dir is not None:
            self.display.say(f"report: {self._writer.path('report.html')}")
        if step < total_steps:
            saved = " and saved; to resume, repeat the call with the same run_dir" if self._writer.run_dir else ""
            self.display.say(f"stopped after step {step} of {total_steps}{saved}")

    def write_report(self) -> None:
        """Write the report for the steps so far."""
        from grpo_jax.watch.page import write_report  # imported only to write a report

        if self._writer.run_dir is not None:
            write_report(self._writer.run_dir)

    def _emit(self, step: int, line: Mapping[str, float]) -> None:
        self._writer.metrics(step, line)
        self.stopped |= notify((self.display, *self._callbacks, *self._trackers), step, line)

    def _new_hints(self, line: Line) -> list[str]:
        is_training = "num_tokens" in line
        return self._hints(line) if self._hints is not None and is_training else []

    def _warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Show a warning and write it to `warnings.jsonl`. Replaces `warnings.showwarning` inside the context."""
        self._show_warning(message, category, filename, lineno, file, line)
        self._keep(category.__name__, str(message))

    def _keep(self, category: str, message: str) -> None:
        """Write a warning or hint to `warnings.jsonl`, at most once and only after `start`."""
        if self._step is not None and (category, message) not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add((category, message))
            with contextlib.suppress(OSError):  # if the disk is full, the next write of metrics raises an error
                self._writer.warning(self._step, category, message)


def notify(callbacks: Iterable[Callback], step: int, metrics: Mapping[str, float]) -> bool:
    """Call each callback with a copy of the metrics as Python scalars. Returns whether any of them raised `StopRun`."""
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in metrics.items()}
    stop = False
    for callback in callbacks:
        try:
            callback(step, dict(values))
        except StopRun:
            stop = True
    return stop
