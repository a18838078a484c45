"""Progress display: a progress bar with the latest metrics in a terminal, one line per logged step elsewhere."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_jax.watch.summary import held_out_scores
from grpo_jax.watch.writer import CompletionRow, to_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress

_SHOWN = (
    ("reward", "reward", 3),
    ("loss", "loss", 3),
    ("kl", "KL", None),
    ("completions/mean_length", "length", 1),
    ("tokens_per_second", "tokens/s", None),
)
"""Displayed metrics as (name, label, decimals); None means three significant digits. The loss is shown only for SFT."""

SILENCE = 30
"""Seconds without output after which the current activity is printed."""

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES: dict[int, int | str] = {
    **{i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"},
    **{i: f"\\x{i:02x}" if i < 256 else f"\\u{i:04x}" for i in (*range(0x7F, 0xA0), *_BIDI, *range(0xD800, 0xE000))},
}


def escape_controls(text: str) -> str:
    """Replace control characters (except newline and tab), bidirectional controls and surrogates with escapes."""
    return text.translate(_ESCAPES)


def format_metrics(metrics: Mapping[str, float], iterations: float = 1) -> tuple[str, str]:
    """Format a logged step's metrics and the time per iteration, split by phase.

    The times in `metrics` are totals over `iterations`. The second string is empty if no times were logged.
    """
    shown = [entry for entry in _SHOWN if entry[0] in metrics and (entry[0] != "loss" or "reward" not in metrics)]
    values = [f"{label} {_format(metrics[name], decimals)}" for name, label, decimals in shown]
    values += [f"held-out {score} {_format(metrics[name], 3)}" for name, score in held_out_scores(metrics).items()]
    seconds = {name: value / iterations for name, value in metrics.items() if name.startswith("seconds/")}
    phases = {name.removeprefix("seconds/"): value for name, value in seconds.items()}
    total = phases.pop("total", sum(phases.values()))
    parts = ", ".join(f"{name} {_format(value, 1)}" for name, value in phases.items() if value >= 0.05)
    return " · ".join(values), f"{_format(total, 1)} s per iteration{': ' * bool(parts)}{parts}" if phases else ""


class Display:
    """A run's progress display. It is a callback: call `display(step, metrics)` after each logged step.

    In a terminal, a progress bar is redrawn after each optimizer step. In a log file, pipe or notebook, one line is
    printed per logged step. After `SILENCE` seconds without output, the current `activity` is printed, so that a
    long rollout or compilation is not mistaken for a hang. Output goes to `console`, by default standard error (in a
    notebook, the output cell). Exiting the context restores the terminal, even after an error.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        activity: Callable[[], str] = lambda: "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = None if quiet else (console or _default_console())
        self._activity, self._clock = activity, clock
        # Time when the first iteration ended. It is excluded from the estimate, since it includes compilation.
        self._started: float | None = None
        self._total_steps = self._step = self._first = self._logged = 0
        self._updates = 1
        self._last_output = self._last_step = clock()
        self._lines: tuple[str, str] = "", ""
        self._live: Live | None = None
        self._bar: Progress | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def start(self, total_steps: int, *, step: int = 0, updates: int = 1) -> None:
        """Start the display at `step` of `total_steps` optimizer steps, with `updates` steps per iteration."""
        self._total_steps, self._updates, self._started = total_steps, updates, None
        self._step = self._first = self._logged = step
        self._last_step = self._clock()
        if self._console is None:
            return
        if self._console.is_terminal and not self._console.is_jupyter:
            from rich.live import Live

            self._bar = _progress_bar(self._console, total_steps, step)
            self._live = Live(self._bar, console=self._console, refresh_per_second=4)
            self._live.start()  # starts a thread that updates the elapsed time
        else:
            self._thread = threading.Thread(target=self._report_activity, daemon=True)
            self._thread.start()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines = format_metrics(metrics, max(step - self._logged, 1) / self._updates)
        if self._lines[1]:
            self._logged = step
        self._set_step(step)
        self._show(*self._lines, self._time_left())

    def advance(self, step: int) -> None:
        """Update the progress bar after an optimizer step that is not logged."""
        self._set_step(step)
        if self._live is not None:
            self._show(*self._lines, self._time_left())

    def _set_step(self, step: int) -> None:
        self._step, self._last_step = step, self._clock()
        if self._started is None and step >= self._first + self._updates:
            self._first, self._started = step, self._clock()

    def _report_activity(self) -> None:
        while not self._closed.wait(max(self._last_output + SILENCE - self._clock(), 0.01)):
            self.report_activity()

    def report_activity(self) -> None:
        """Print the current activity if there has been no output for `SILENCE` seconds."""
        now = self._clock()
        if now - self._last_output >= SILENCE:
            self._last_output = now
            waited = round(now - self._last_step)
            self._show(f"{self._activity()} ({waited} s since the last step)" if waited else "", self._time_left())

    def _show(self, *parts: str) -> None:
        """Redraw the progress bar or print a line. The last element of `parts` is the remaining time."""
        if self._live is not None and self._bar is not None:
            from rich.console import Group
            from rich.text import Text

            self._bar.update(self._bar.task_ids[0], completed=self._step, left=parts[-1])
            lines = [Text(f"  {line}", overflow="ellipsis", no_wrap=True) for line in parts[:-1] if line]
            self._live.update(Group(self._bar, *lines))
        else:
            progress = f"step {self._step:>{len(str(self._total_steps))}}/{self._total_steps}"
            self.say(" · ".join(part.strip() for part in (progress, *parts) if part))

    def say(self, text: str) -> None:
        """Print a message (in a terminal, above the progress bar). Markup is not interpreted."""
        self._last_output = self._clock()
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def completions(self, rows: Sequence[CompletionRow]) -> None:
        """Print a table of completions with their rewards and advantages. The prompt is printed once per group.

        Control characters are escaped, because models and environments produce untrusted text.
        """
        if self._console is None:
            return
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

    def _time_left(self) -> str:
        """Format the estimated remaining time. Returns "" while it is unknown, i.e. during the first iteration."""
        done, todo = self._step - self._first, self._total_steps - self._step
        if self._started is None or done <= 0 or todo <= 0:
            return ""
        seconds = round((self._last_step - self._started) / done * todo)
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02}:{seconds % 60:02} left"


def _default_console() -> Console:
    """Return a console that writes to standard error or, in a notebook, to the output cell."""
    from rich.console import Console

    console = Console()
    return console if console.is_jupyter else Console(stderr=True)


def _progress_bar(console: Console, total_steps: int, start: int) -> Progress:
    from rich import progress

    bar = progress.Progress(
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("elapsed"),
        progress.TextColumn("{task.fields[left]}"),
        console=console,
        expand=True,
    )
    bar.add_task("", total=total_steps, completed=start, left="")
    return bar


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
