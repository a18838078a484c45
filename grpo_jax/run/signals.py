"""SIGTERM and SIGINT stop a run after the update in progress, or in the middle of a rollout."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn


class Interrupted(Exception):
    """A signal arrived during a rollout or an evaluation, which the resumed run repeats."""


class StopSignals:
    """A context manager that records the first SIGTERM or SIGINT in `received`; a second one has its usual effect.

    Handlers are set only in the main thread, if `enabled`, and not for signals that are ignored or handled outside
    Python. `alone` is False if other processes would wait for a rollout that this one leaves.
    """

    def __init__(self, enabled: bool = True, alone: bool = True):
        self.received: signal.Signals | None = None
        self._alone = alone
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT) if self._enabled else ():
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.__exit__()
        # Not `print`: the signal may have interrupted one, and streams are not reentrant.
        name = self.received.name
        os.write(2, f"\n{name}: saving as soon as this update is done; a second signal ends the run at once\n".encode())

    def interrupt(self) -> None:
        """Raise `Interrupted` after a signal, unless other processes work on the same arrays."""
        if self.received is not None and self._alone:
            raise Interrupted

    def leave(self) -> NoReturn:
        """Raise `SystemExit` with 128 + the signal's number, so that a supervisor does not see a finished run.

        SIGINT in a notebook or at the prompt is a `KeyboardInterrupt`, which ends only the cell.
        """
        if self.received is signal.SIGINT and hasattr(sys, "ps1"):  # IPython sets it too
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.received or signal.SIGTERM))
