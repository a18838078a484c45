"""Logging of a run: counters, a stopwatch, and `Monitor`, which sends metrics to files, callbacks and the display."""

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

from grpo_jax.config.sft import Config
from grpo_jax.models.transformer import count_parameters
from grpo_jax.update.state import TrainState
from grpo_jax.watch.display import Display
from grpo_jax.watch.summary import describe_run
from grpo_jax.watch.writer import CompletionRow, Line, RunWriter, read_lines

if TYPE_CHECKING:  # optional: imported when `report_to` names a tracker
    from grpo_jax.watch.trackers import Tracker

MOST_WARNINGS = 200
"""Warnings kept in `warnings.jsonl`, each text once."""

Callback = Callable[[int, Mapping[str, float]], object]
"""Called after every logged step as `callback(step, metrics)`, with the numbers of the line in `metrics.jsonl`.

```python
callbacks = [lambda step, metrics: wandb_run.log(metrics, step=step)]
```

A callback that raises `StopRun` ends the run, saved; any other exception is an error of the run.
"""


class StopRun(Exception):
    """Raised by a callback: the run ends after this step, with a checkpoint, and `train` returns its state."""


@dataclasses.dataclass
class Progress:
    """The counters of a run, all JSON: with `TrainState` and the present batch they decide all that follows.

    Attributes:
      step: optimizer steps done, as in `TrainState.step`.
      cursor: prompts sampled since the start of the run.
      updates_done: updates made on the present batch; 0 between iterations.
      evaluated: step of the last evaluation, −1 before the first.
      tokens: completion tokens sampled since the start.
      skipped: consecutive updates up to now that were skipped because loss or gradient was not finite.
      metric: newest value of `metric_for_best_model`; None before the first.
      metrics: step → that metric, for each scheduled checkpoint. Includes one that a stop wrote before its evaluation.
      asked: whether an engine is sampling the completions of the prompts from `cursor` on.
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
        """Count an iteration's completions."""
        self.cursor = cursor
        self.tokens += int(metrics["num_tokens"])
        self._add(metrics)

    def updated(self, metrics: Mapping[str, float]) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.updates_done += 1
        self.skipped = self.skipped + 1 if metrics.get("update_skipped") else 0
        self._add(metrics)

    def measured(self, name: str | None, metrics: Mapping[str, float]) -> None:
        """Keep the metric of this name, if it is among these."""
        if name is not None and math.isfinite(metrics.get(name, math.nan)):
            self.metric = float(metrics[name])

    def _add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            total = self.window.setdefault(name, [0.0, 0])
            if math.isfinite(value):  # one that is not finite would hide the others of the window
                total[0] += float(value)
                total[1] += 1

    def log_line(self) -> dict[str, float]:
        """Return the means of the metrics since the last call (of `ratio_max`, means of maxima), and the totals."""
        means = {name: total / count if count else math.nan for name, (total, count) in self.window.items()}
        self.window = {}
        return {**means, "num_tokens": self.tokens, "num_prompts": self.cursor}


class Phases:
    """A stopwatch for the phases of an iteration.

    Phases may be nested; a second counts for the innermost one only. JAX dispatches asynchronously: a phase has to wait
    for its results, or its time counts for the next one.
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

    @property
    def current(self) -> str:
        """The innermost open phase, or ""."""
        return self._open[-1] if self._open else ""

    def take(self) -> dict[str, float]:
        """Return `seconds/<phase>` of each and `seconds/total` since the last call, and reset them."""
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
    """Files, callbacks, stopwatch, hints and display of one run.

    A context manager: inside, Python's warnings are also written to `warnings.jsonl`; at the end the report is written
    and the trackers of `report_to` are closed. `hints` returns the new hints of a line of training (`watch.hints`). A
    quiet monitor, of a process that does not log, opens no tracker. `stopped` is True once a callback has raised
    `StopRun`.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        config: Config,
        *,
        callbacks: Iterable[Callback] = (),
        hints: Callable[[Line], list[str]] | None = None,
        quiet: bool = False,
    ):
        self.phase = Phases()
        self.stopped = False
        self._config, self._hints, self._quiet = config, hints, quiet
        self._writer = RunWriter(run_dir)
        self._callbacks = check_callbacks(callbacks)
        self._trackers: list[Tracker] = []
        self._display = Display(quiet=quiet, activity=lambda: self.phase.current)
        self._tokens = 0.0
        self._page_only = self._complete = False
        self._step: int | None = None  # None: earlier lines of the files are not cut yet
        self._early: list[tuple[str, str]] = []
        self._warned: set[tuple[str, str]] = set()

    def __enter__(self) -> Monitor:
        self._display.__enter__()
        self._show_warning, warnings.showwarning = warnings.showwarning, self._warning
        return self

    def __exit__(self, *error: object) -> None:
        self._display.__exit__(*error)
        try:
            run_dir = self._writer.run_dir
            if not (self._complete and run_dir is not None and (run_dir / "report.html").exists()):
                self._report(page_only=self._page_only)
        finally:
            warnings.showwarning = self._show_warning
            with contextlib.ExitStack() as trackers:  # closes all, whatever one of them raises
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
        """Print the sizes of the run, and cut the files of an earlier part of it back to where it resumes."""
        last, ending = (0, "") if resumed else self._writer.put_aside()
        if last:
            warnings.warn(
                f"run_dir = {str(self._writer.run_dir)!r} has metrics up to step {last} but no checkpoint, so the run"
                f" starts again from step 0. The old metrics are kept in files whose names end in {ending}; save_steps"
                " and save_minutes say how often a run is saved",
                RuntimeWarning,
                stacklevel=4,
            )
        self._writer.truncate(progress.step if resumed else -1, evaluated=progress.evaluated == progress.step)
        kinds = {leaf.dtype.name for leaf in jax.tree.leaves(state.params)}
        self._writer.config(self._config, prompts=num_rows, param_dtype=max(kinds, default="float32"))
        if not self._quiet and self._config.report_to not in (None, "none"):
            from grpo_jax.watch.trackers import open_trackers

            self._trackers = open_trackers(self._config, self._writer.run_dir, step=progress.step if resumed else 0)
        if resumed and self._writer.run_dir is not None:
            for line in read_lines(self._writer.path("metrics.jsonl")):
                self._new_hints(line)
            for line in read_lines(self._writer.path("warnings.jsonl")):
                self._warned.add((line["category"], line["message"]))
        self._step = progress.step
        for category, message in self._early:
            self._keep(category, message)
        self.say(
            describe_run(
                self._config,
                num_rows=num_rows,
                num_parameters=count_parameters(state.params),
                state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
                device=jax.devices()[0].device_kind,
            )
        )
        if num_dropped:
            self.say(f"{num_dropped} rows are left out: their prompts are longer than max_prompt_length")
        if resumed:
            self._say_where(progress.step, total_steps)
        self._display.start(total_steps, step=progress.step, updates=updates)
        self._tokens = float(progress.tokens)
        self.phase.take()

    def _say_where(self, step: int, total_steps: int) -> None:
        """Print the step that the run resumes from, or that it is complete."""
        self._complete = step >= total_steps
        if not self._complete:
            return self.say(f"resuming after step {step}")
        longer = "raise max_steps to continue, or give another run_dir to begin a new run"
        if not self._config.lr_scheduler_type.startswith("constant"):
            longer = "give another run_dir to begin a new run; a longer one has another learning rate at every step"
        self.say(f"complete: {step} of {total_steps} steps; {longer}")

    def say(self, message: str) -> None:
        """Show a line that does not belong to a step."""
        self._display.say(message)

    def completions(self, step: int, rows: Sequence[CompletionRow]) -> None:
        """Write the completions that the updates from `step` on learn from."""
        self._step = step
        if rows:
            self._writer.completions(step, rows)
        if self._config.log_completions and self._config.logs_at(step):
            self._display.completions(rows[: self._config.num_completions_to_print])

    def progressed(self, step: int) -> None:
        """Show an optimizer step without a line of metrics."""
        self._display.progressed(step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of metrics and show it."""
        seconds = self.phase.take()
        tokens, self._tokens = metrics["num_tokens"] - self._tokens, metrics["num_tokens"]
        rate = {"tokens_per_second": tokens / seconds["seconds/total"]} if seconds["seconds/total"] > 0 else {}
        line = {**metrics, **rate, **seconds}
        self._step = step
        self._emit(step, line)
        for message in self._new_hints({"step": step, **line}):
            self.say(f"hint: {message}")
            self._keep("hint", message)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of an evaluation and show it."""
        self._emit(step, {f"eval/{name}": value for name, value in metrics.items()})

    def end(self, step: int, total_steps: int, *, best: tuple[int, float] | None = None, hurry: bool = False) -> None:
        """Print the best checkpoint, and how to resume if the run is not at its end.

        With `hurry`, an unfinished run leaves out `report.png`, which is slow and shows the same as the page.
        """
        self._page_only |= hurry and step < total_steps
        if best is not None:
            self.say(f"best checkpoint: step {best[0]} ({self._config.metric_for_best_model} {best[1]:.4g})")
        if self._writer.run_dir is not None:
            self.say(f"{self._writer.path('report.html')} shows the run")
        if step < total_steps:
            self.say(
                f"stopped after step {step} of {total_steps} and saved: call train again with this run_dir to resume"
            )

    def draw(self) -> None:
        """Write the report before the end, to be published; at the end only the page is written again."""
        self._report()
        self._page_only = True

    def _report(self, *, page_only: bool = False) -> None:
        from grpo_jax.watch.page import write_report  # at the end only

        if self._writer.run_dir is not None:
            write_report(self._writer.run_dir, page_only=page_only)

    def _emit(self, step: int, line: Mapping[str, float]) -> None:
        self._writer.metrics(step, line)
        self._complete = False
        self.stopped |= notify((self._display, *self._callbacks, *self._trackers), step, line)

    def _new_hints(self, line: Line) -> list[str]:
        return (
            self._hints(line) if self._hints is not None and "num_tokens" in line else []
        )  # a line of an evaluation has none

    def _warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Replacement of `warnings.showwarning` that also writes the warning to its file."""
        self._show_warning(message, category, filename, lineno, file, line)
        self._keep(category.__name__, str(message))

    def _keep(self, category: str, message: str) -> None:
        """Write a warning to its file, once; before the file is cut, it waits."""
        if self._step is None:
            self._early.append((category, message))
        elif (category, message) not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add((category, message))
            with contextlib.suppress(OSError):  # a warning never ends a run; metrics report a full disk
                self._writer.warning(self._step, category, message)


def check_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Return the callbacks, or raise a `TypeError` that names one that cannot be called."""
    callbacks = tuple(callbacks)
    for i, callback in enumerate(callbacks):
        if not callable(callback):
            raise TypeError(f"callbacks[{i}] = {callback!r} is not a function; give one that takes (step, metrics)")
    return callbacks


def notify(callbacks: Iterable[Callback], step: int, metrics: Mapping[str, float]) -> bool:
    """Call each callback with a copy of the metrics as Python numbers; return whether one has raised `StopRun`.

    Another exception gets a note that names the callback.
    """
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in metrics.items()}
    stop = False
    for i, callback in enumerate(callbacks):
        try:
            callback(step, dict(values))
        except StopRun:
            stop = True
        except Exception as error:
            error.add_note(f"raised by callbacks[{i}] = {callback!r} at step {step}")
            raise
    return stop
