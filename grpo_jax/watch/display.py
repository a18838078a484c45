"""Display of a run: a bar with the numbers that matter in a terminal, a line per logging step elsewhere."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_jax.watch.summary import held_out_scores
from grpo_jax.watch.writer import CompletionRow, is_dialogue

if TYPE_CHECKING:
    from IPython.display import DisplayHandle
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

_SHOWN = (
    ("reward", "reward", 3),
    ("loss", "loss", 3),
    ("kl", "KL", None),
    ("completions/mean_length", "length", 1),
    ("tokens_per_second", "tokens/s", None),
)
"""Metrics that are shown: name, label, digits after the point (None: three significant ones). The loss only in SFT."""

SILENCE = 30
"""Seconds without a line after which a log file gets one."""

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES: dict[int, int | str] = {
    **{i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"},
    **{i: f"\\x{i:02x}" if i < 256 else f"\\u{i:04x}" for i in (*range(0x7F, 0xA0), *_BIDI, *range(0xD800, 0xE000))},
}


def escape_controls(text: str) -> str:
    r"""Return text without characters that drive a terminal or reorder what is read: they are shown instead.

    These are control characters except newline and tab, the marks that set the direction of text, and surrogates.
    """
    return text.translate(_ESCAPES)


def format_metrics(metrics: Mapping[str, float], iterations: float = 1) -> tuple[str, str]:
    """Return the numbers of a logged step in words, and the seconds of an iteration by phase; "" where there are none.

    The seconds of `metrics` are the sum over `iterations`.
    """
    shown = [one for one in _SHOWN if one[0] in metrics and (one[0] != "loss" or "reward" not in metrics)]
    numbers = [f"{label} {_digits(metrics[name], digits)}" for name, label, digits in shown]
    numbers += [f"held-out {score} {_digits(metrics[name], 3)}" for name, score in held_out_scores(metrics).items()]
    spent = {name: value / iterations for name, value in metrics.items() if name.startswith("seconds/")}
    phases = {name.removeprefix("seconds/"): value for name, value in spent.items()}
    total = phases.pop("total", sum(phases.values()))
    parts = ", ".join(f"{name} {_digits(value, 1)}" for name, value in phases.items() if value >= 0.05)
    return " · ".join(numbers), f"{_digits(total, 1)} s per iteration{': ' * bool(parts)}{parts}" if phases else ""


class Display:
    """The display of a run; itself a callback, called as `display(step, metrics)` after each logged step.

    In a terminal it is a bar and in a notebook a line, redrawn after each optimizer step. In a log file or a pipe it is
    one line per logged step. A thread adds a line with the `activity` of the run after `SILENCE` seconds without one,
    so that a long rollout or compilation can be told from a hang. All is written to standard error (in a notebook to
    the cell) or to the given console. Leaving the `with` block restores the terminal, also after an error.
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
        self._began: float | None = None  # the end of the first iteration, which compiles and takes longer
        self._total_steps = self._step = self._first = self._logged = 0
        self._updates = 1
        self._said = self._stepped = clock()
        self._lines: tuple[str, str] = "", ""
        self._live: Live | None = None
        self._bar: Progress | None = None
        self._cell: DisplayHandle | None = None
        self._left = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def start(self, total_steps: int, *, step: int = 0, updates: int = 1) -> None:
        """Begin to show a run of `total_steps` optimizer steps, `updates` an iteration; `step` of them are done."""
        self._total_steps, self._updates, self._began = total_steps, updates, None
        self._step = self._first = self._logged = step
        self._stepped = self._clock()
        if self._console is None:
            return
        if self._console.is_jupyter:
            from IPython.display import DisplayHandle

            self._cell = DisplayHandle()
            self._cell.display({"text/plain": f"step {step}/{total_steps}"}, raw=True)
        elif self._console.is_terminal:
            from rich.live import Live

            self._bar = _bar(self._console, total_steps, step)
            self._live = Live(self._bar, console=self._console, refresh_per_second=4)
            self._live.start()  # redraws the elapsed time by itself
        else:
            self._thread = threading.Thread(target=self._break_silences, daemon=True)
            self._thread.start()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a logged step."""
        self._lines = format_metrics(metrics, max(step - self._logged, 1) / self._updates)
        if self._lines[1]:
            self._logged = step
        self._advance(step)
        self._show(*self._lines, self._time_left())

    def progressed(self, step: int) -> None:
        """Show an optimizer step that is not logged."""
        self._advance(step)
        if self._live is not None or self._cell is not None:
            self._show(*self._lines, self._time_left())

    def _advance(self, step: int) -> None:
        self._step, self._stepped = step, self._clock()
        if self._began is None and step >= self._first + self._updates:
            self._first, self._began = step, self._clock()

    def _break_silences(self) -> None:
        while not self._left.wait(max(self._said + SILENCE - self._clock(), 0.01)):
            self.break_silence()

    def break_silence(self) -> None:
        """Show what the run is doing, if the last line is `SILENCE` seconds old."""
        now = self._clock()
        if now - self._said >= SILENCE:
            self._said = now
            waited = round(now - self._stepped)
            self._show(f"{self._activity()} ({waited} s since the last step)" if waited else "", self._time_left())

    def _show(self, *parts: str) -> None:
        """Redraw the bar or the cell, or print a line; the last part is the time left."""
        if self._live is not None and self._bar is not None:
            from rich.console import Group
            from rich.text import Text

            self._bar.update(self._bar.task_ids[0], completed=self._step, left=parts[-1])
            shown = [Text(f"  {line}", overflow="ellipsis", no_wrap=True) for line in parts[:-1] if line]
            self._live.update(Group(self._bar, *shown))
            return
        where = f"step {self._step:>{len(str(self._total_steps))}}/{self._total_steps}"
        line = " · ".join(part.strip() for part in (where, *parts) if part)
        if self._cell is None:
            self.say(line)
        else:
            self._cell.update({"text/plain": line}, raw=True)

    def say(self, text: str) -> None:
        """Print a text above the bar, without markup."""
        self._said = self._clock()
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def completions(self, rows: Sequence[CompletionRow]) -> None:
        """Print completions with their rewards and advantages above the bar."""
        if self._console is not None:
            self._console.print(completions_table(rows))

    def _time_left(self) -> str:
        """Return the time that the rest of the run takes at the speed since the end of the first iteration."""
        done, todo = self._step - self._first, self._total_steps - self._step
        if self._began is None or done <= 0 or todo <= 0:
            return ""
        seconds = round((self._stepped - self._began) / done * todo)
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02}:{seconds % 60:02} left"


def completions_table(rows: Iterable[CompletionRow]) -> Table:
    """Return a table of completions: prompt, completion, each reward, advantage; one prompt per group.

    Control characters are escaped: models and environments write untrusted text.
    """
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    table = Table(show_lines=False, header_style="bold", pad_edge=False)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=3, overflow="fold")
    for name in (*names, "advantage"):
        table.add_column(Text(name), justify="right", overflow="fold")
    last = None
    for row in rows:
        scores = [row["rewards"].get(name) for name in names]
        table.add_row(
            Text("" if row["prompt"] == last else _spoken(row["prompt"])),
            _completion(row),
            *(Text(_digits(score, 2)) for score in scores),
            Text(_digits(row["advantage"], 2)),
        )
        last = row["prompt"]
    return table


def _default_console() -> Console:
    """Return a console on standard error, or on a notebook's cell."""
    from rich.console import Console

    console = Console()
    return console if console.is_jupyter else Console(stderr=True)


def _bar(console: Console, total_steps: int, start: int) -> Progress:
    """Return a rich progress bar with one task."""
    from rich import progress

    bar = progress.Progress(
        progress.TextColumn("GRPO"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("so far"),
        progress.TextColumn("{task.fields[left]}"),
        console=console,
        expand=True,
    )
    bar.add_task("GRPO", total=total_steps, completed=start, left="")
    return bar


def _digits(value: float | None, digits: int | None) -> str:
    """Return a number with so many digits after the point, three significant ones if None, "–" if there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f}" if digits is not None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _completion(row: CompletionRow) -> Text:
    """Return a completion; several turns with their speakers, the environment's dim, which the policy did not write."""
    from rich.text import Text

    shown = Text()
    if is_dialogue(row.get("turns")):
        for turn in row["turns"]:
            line = "\n" * bool(shown) + f"{turn['by']}: {turn['text']}"
            shown.append(escape_controls(line), None if turn["by"] == "policy" else "dim")
    else:
        shown.append(_spoken(row["completion"]))
    return shown.append("" if row.get("ended", True) else " …")


def _spoken(text: str | Iterable[Mapping[str, object]]) -> str:
    """Return a prompt or completion as text; a conversation with its roles."""
    if not isinstance(text, str):
        text = "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in text)
    return escape_controls(text)
