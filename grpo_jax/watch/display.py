"""Progress display: one line per logged step and, in a terminal, a progress bar."""

from __future__ import annotations

import datetime
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_jax.watch.summary import held_out_scores
from grpo_jax.watch.writer import CompletionRow, to_json

if TYPE_CHECKING:
    from rich.console import Console

_METRICS = (
    ("reward", "reward", 3),
    ("loss", "loss", 3),
    ("kl", "KL", None),
    ("completions/mean_length", "length", 1),
    ("tokens_per_second", "tokens/s", None),
)
"""Displayed metrics: (name, label, decimals or None for 3 significant digits). `loss` is omitted if `reward` exists."""

SILENCE = 30
"""Seconds without output after which the current activity is printed."""

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Replace control characters (except newline and tab), bidirectional controls and surrogates with escapes."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def format_metrics(metrics: Mapping[str, float], iterations: float = 1) -> tuple[str, str]:
    """Return two strings: a logged step's metrics, and its seconds per iteration, in total and by phase.

    The times in `metrics` are totals over `iterations`. The second string is empty if no phase was timed.
    """
    entries = [entry for entry in _METRICS if entry[0] in metrics and (entry[0] != "loss" or "reward" not in metrics)]
    values = [f"{label} {_format(metrics[name], decimals)}" for name, label, decimals in entries]
    values += [f"held-out {score} {_format(metrics[name], 3)}" for name, score in held_out_scores(metrics).items()]
    seconds = {name: value / iterations for name, value in metrics.items() if name.startswith("seconds/")}
    phases = {name.removeprefix("seconds/"): value for name, value in seconds.items()}
    total = phases.pop("total", sum(phases.values()))
    parts = ", ".join(f"{name} {_format(value, 1)}" for name, value in phases.items() if value >= 0.05)
    return " · ".join(values), f"{_format(total, 1)} s per iteration{': ' * bool(parts)}{parts}" if phases else ""


class Display:
    """A run's progress display. It is a callback: call `display(step, metrics)` after each logged step.

    Each logged step is printed as a line. In a terminal, a progress bar below the lines is updated after each optimizer
    step. In a log file, pipe or notebook, the current `activity` is printed after `SILENCE` seconds without output, so
    that a long rollout or compilation is not mistaken for a hang. Output goes to `console`, by default standard error
    (in a notebook, the output cell). Exiting the context restores the terminal, even after an error.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        activity: Callable[[], str] = lambda: "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        from rich import progress
        from rich.console import Console

        is_jupyter = Console().is_jupyter
        self._console = console = console or Console(stderr=not is_jupyter, quiet=quiet)
        self._activity, self._clock = activity, clock
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            get_time=clock,
            speed_estimate_period=math.inf,
            disable=quiet or not console.is_terminal or console.is_jupyter,
            expand=True,
        )
        self._logged_step, self._updates = 0, 1
        self._last_output = self._last_step = clock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._bar.stop()

    def start(self, total_steps: int, *, step: int = 0, updates: int = 1) -> None:
        """Start the display at `step` of `total_steps` optimizer steps, with `updates` steps per iteration."""
        self._logged_step, self._updates, self._last_step = step, updates, self._clock()
        self._bar.add_task("", total=total_steps, completed=step)
        self._bar.start()
        if self._bar.disable and not self._console.quiet:
            self._thread = threading.Thread(target=self._report_activity, daemon=True)
            self._thread.start()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        values, seconds = format_metrics(metrics, max(step - self._logged_step, 1) / self._updates)
        if seconds:
            self._logged_step = step
        self.advance(step)
        self._say_progress(values, seconds)

    def advance(self, step: int) -> None:
        """Update the progress bar after an optimizer step."""
        self._last_step = self._clock()
        self._bar.update(self._bar.task_ids[0], completed=step)

    def _report_activity(self) -> None:
        while not self._closed.wait(max(self._last_output + SILENCE - self._clock(), 0.01)):
            self.report_activity()

    def report_activity(self) -> None:
        """Print the current activity if there has been no output for `SILENCE` seconds."""
        now = self._clock()
        if now - self._last_output >= SILENCE:
            self._say_progress(f"{self._activity()} ({now - self._last_step:.0f} s since the last step)")

    def _say_progress(self, *parts: str) -> None:
        """Print the step, the parts and the estimated remaining time. The estimate ignores the first step's time."""
        (task,) = self._bar.tasks
        left = f"{datetime.timedelta(seconds=task.time_remaining)} left" if task.time_remaining else ""
        progress = f"step {task.completed:>{len(str(task.total))}}/{task.total}"
        self.say(" · ".join(part for part in (progress, *parts, left) if part))

    def say(self, text: str) -> None:
        """Print a message (in a terminal, above the progress bar). Markup is not interpreted."""
        self._last_output = self._clock()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def completions(self, rows: Sequence[CompletionRow]) -> None:
        """Print a table of completions with their rewards and advantages. The prompt is printed once per group.

        Control characters are escaped, because models and environments produce untrusted text.
        """
        from rich.table import Table
        from rich.text import Text

        names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
        table = Table(show_lines=False, header_style="bold", pad_edge=False)
        table.add_column("prompt", ratio=2, overflow="fold")
        table.add_column("completion", ratio=3, overflow="fold")
        for name in (*names, "advantage"):
            table.add_column(Text(name), justify="right", overflow="fold")
        last = None
        for row in rows:
            cells = ["" if row["prompt"] == last else _join(row["prompt"])]
            cells += [_join(row["completion"]) + ("" if row.get("ended", True) else " …")]
            cells += [_format(row["rewards"].get(name), 2) for name in names] + [_format(row["advantage"], 2)]
            table.add_row(*map(Text, cells))
            last = row["prompt"]
        self._console.print(table)


def _format(value: float | None, decimals: int | None) -> str:
    """Format a value, with three significant digits if `decimals` is None. Returns "–" if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{decimals}f}" if decimals is not None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _join(text: str | Iterable[Mapping[str, object]]) -> str:
    """Format a string or a list of messages (as "role: content" lines), with control characters escaped."""
    if not isinstance(text, str):
        text = "\n".join(f"{message.get('role', '')}: {to_json(message.get('content', ''))}" for message in text)
    return escape_controls(text)
