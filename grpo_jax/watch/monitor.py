"""The monitor of a run: one object that passes what the loop reports to files, callbacks, hints and the screen."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import jax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import Config
from grpo_jax.models.transformer import count_parameters
from grpo_jax.update.state import TrainState
from grpo_jax.watch.display import Display
from grpo_jax.watch.hints import Hints
from grpo_jax.watch.page import write_pictures
from grpo_jax.watch.progress import Phases, Progress
from grpo_jax.watch.summary import describe_run
from grpo_jax.watch.trackers import Callback, Tracker, check_callbacks, notify, open_trackers
from grpo_jax.watch.writer import CompletionRow, Line, RunWriter, read_lines

MOST_WARNINGS = 200
"""Warnings that are kept of a run, each text once."""


class Monitor:
    """Files, callbacks, stopwatch, hints and display of one run.

    A context manager: inside, Python's warnings are also written to `warnings.jsonl`; at the end the pictures are drawn
    and the trackers of `report_to` closed. A quiet monitor, of a process that does not log, opens no tracker. `stopped`
    is whether a callback has requested a stop.
    """

    def __init__(
        self, run_dir: str | Path | None, config: Config, *, callbacks: Sequence[Callback] = (), quiet: bool = False
    ):
        self.phase = Phases()
        self._config = config
        self._writer = RunWriter(run_dir)
        self._callbacks = check_callbacks(callbacks)
        self._trackers: list[Tracker] = []
        self._reports = not quiet
        self._display = Display(quiet=quiet)
        self._hints = Hints(config) if isinstance(config, GRPOConfig) else None  # they concern rollouts
        self._tokens = 0.0
        self._hurry = self._drawn = self._complete = False
        self.stopped = False
        self._step: int | None = None  # None: the files are not cut back yet
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
                write_pictures(self._writer, page_only=self._hurry or self._drawn)
        finally:
            warnings.showwarning = self._show_warning
            with contextlib.ExitStack() as trackers:  # all are closed, whatever one of them raises
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
                stacklevel=5,
            )
        self._writer.truncate(progress.step if resumed else -1, evaluated=progress.evaluated == progress.step)
        kinds = {leaf.dtype.name for leaf in jax.tree.leaves(state.params)}
        self._writer.config(self._config, prompts=num_rows, param_dtype=max(kinds, default="float32"))
        if self._reports:
            self._trackers = open_trackers(self._config, self._writer.run_dir, step=progress.step if resumed else 0)
        if resumed and self._writer.run_dir is not None:
            for line in read_lines(self._writer.path("metrics.jsonl")):
                self._hear(line)
            for line in read_lines(self._writer.path("warnings.jsonl")):
                self._warned.add((line["category"], line["message"]))
        self._step = progress.step
        for category, message in self._early:
            self._keep(category, message)
        self._display.say(
            describe_run(
                self._config,
                num_rows=num_rows,
                num_parameters=count_parameters(state.params),
                state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
                device=jax.devices()[0].device_kind,
            )
        )
        if num_dropped:
            self._display.say(f"{num_dropped} rows are left out: their prompts are longer than max_prompt_length")
        if resumed:
            self._say_where(progress.step, total_steps)
        self._display.start(total_steps, step=progress.step, updates=updates)
        self._tokens = float(progress.tokens)
        self.phase.take()

    def _say_where(self, step: int, total_steps: int) -> None:
        """Print the step that the run resumes from, or that it is complete."""
        self._complete = step >= total_steps
        if not self._complete:
            return self._display.say(f"resuming after step {step}")
        longer = "raise max_steps to continue, or give another run_dir to begin a new run"
        if not self._config.lr_scheduler_type.startswith("constant"):
            longer = "give another run_dir to begin a new run; a longer one has another learning rate at every step"
        self._display.say(f"complete: {step} of {total_steps} steps; {longer}")

    def say(self, message: str) -> None:
        """Show a line that does not belong to a step."""
        self._display.say(message)

    def completions(self, step: int, rows: Sequence[CompletionRow]) -> None:
        """Write the completions that the updates from `step` on will learn from."""
        self._step = step
        if rows:
            self._writer.completions(step, rows)
        if self._config.log_completions and self._config.logs_at(step):
            self._display.completions(rows, self._config.num_completions_to_print)

    def progressed(self, step: int) -> None:
        """Show an optimizer step that has no line of metrics."""
        self._display.progressed(step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of metrics and show it."""
        seconds = self.phase.take()
        tokens, self._tokens = metrics["num_tokens"] - self._tokens, metrics["num_tokens"]
        rate = {"tokens_per_second": tokens / seconds["seconds/total"]} if seconds["seconds/total"] > 0 else {}
        line = {**metrics, **rate, **seconds}
        self._step = step
        self._emit(step, line)
        for message in self._hear({"step": step, **line}):
            self._display.say(f"hint: {message}")
            self._keep("hint", message)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of an evaluation and show it."""
        self._emit(step, {f"eval/{name}": value for name, value in metrics.items()})

    def end(self, step: int, total_steps: int, *, best: tuple[int, float] | None = None, hurry: bool = False) -> None:
        """Print the best checkpoint, and how to resume if the run is not at its end.

        With `hurry`, an unfinished run leaves the picture out: it is slow, and the page shows the same.
        """
        self._hurry = hurry and step < total_steps
        if best is not None:
            self._display.say(f"best checkpoint: step {best[0]} ({self._config.metric_for_best_model} {best[1]:.4g})")
        if self._writer.run_dir is not None:
            self._display.say(f"{self._writer.path('report.html')} shows the run")
        if step < total_steps:
            self._display.say(
                f"stopped after step {step} of {total_steps} and saved: to go on, call train again with this run_dir"
            )

    def draw(self) -> None:
        """Draw the pictures before the end, to be published; at the end only the page is drawn again."""
        write_pictures(self._writer)
        self._drawn = True

    def _emit(self, step: int, line: Mapping[str, float]) -> None:
        self._writer.metrics(step, line)
        self._complete = False
        self.stopped |= notify((self._display, *self._callbacks, *self._trackers), step, line)

    def _hear(self, line: Line) -> list[str]:
        """Return the new hints of a line of training; an evaluation gives none."""
        return self._hints(line) if self._hints is not None and "num_tokens" in line else []

    def _warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Show a warning as before (instead of `warnings.showwarning`), and write it to its file."""
        self._show_warning(message, category, filename, lineno, file, line)
        self._keep(category.__name__, str(message))

    def _keep(self, category: str, message: str) -> None:
        """Write a warning to its file, once; it waits until the file is cut back."""
        if self._step is None:
            self._early.append((category, message))
        elif (category, message) not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add((category, message))
            with contextlib.suppress(OSError):  # a warning never ends a run; metrics say that a disk is full
                self._writer.warning(self._step, category, message)
