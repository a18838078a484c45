"""A trace of some optimizer steps, for TensorBoard's profiler or XProf."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import jax

FOLDER = "profile"
"""Of the trace, in the run directory."""


class Profile:
    """Writes a trace of `steps` optimizer steps; a context, so that a run that ends early has a whole trace.

    Args:
      run_dir: the trace goes into its folder "profile"; None writes none.
      steps: how many; None: no trace.

    Example:
      >>> with Profile(None, None) as profile:
      ...     profile.begins_at(2)
      ...     profile.at(2)
    """

    def __init__(self, run_dir: str | Path | None, steps: int | None):
        self._steps = None if run_dir is None else steps
        self._folder = None if run_dir is None else Path(run_dir) / FOLDER
        self._first, self._running = 0, False

    def begins_at(self, step: int) -> None:
        """The trace begins once so many steps are done."""
        self._first = step

    def at(self, step: int) -> None:
        """So many steps are done: begin or end the trace where it is due."""
        if self._steps is None:
            return
        if self._running and step >= self._first + self._steps:
            self._end()
        elif not self._running and self._first <= step < self._first + self._steps:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def _end(self) -> None:
        self._running = False
        jax.profiler.stop_trace()

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            self._end()
