"""SIGTERM and SIGINT end a run where it can be saved: not in the middle of an update, and not after a whole rollout."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn


class Interrupted(Exception):
    """A signal came while something was made that nothing has been learned from yet; who goes on makes it again."""


class StopSignals:
    """A context manager that records the first SIGTERM or SIGINT in `received`; a second one does what it did before.

    Handlers are set in the main thread only (Python allows no other), and not for signals that are ignored or handled
    outside of Python.

    Args:
      enabled: False changes nothing, for runs that cannot be saved.
      alone: False if other processes work on the same arrays: none may leave a rollout that the others wait for.
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
            signal.signal(*self._previous.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.__exit__()
        # Not print: the signal may have come in the middle of one, and a stream cannot be entered twice.
        name = self.received.name
        os.write(2, f"\n{name}: saving as soon as this update is done; once more ends the run at once\n".encode())

    def interrupt(self) -> None:
        """Raise `Interrupted` after a signal, unless other processes need the work that it would leave."""
        if self.received is not None and self._alone:
            raise Interrupted

    @property
    def hurry(self) -> bool:
        """Whether the signal is the one that is followed by SIGKILL or the loss of the machine, SIGTERM."""
        return self.received is signal.SIGTERM

    def leave(self) -> NoReturn:
        """End the program as the signal asked for, now that all is saved.

        Raises:
          KeyboardInterrupt: on SIGINT in a notebook or at the prompt, where it ends the cell and not the session.
          SystemExit: otherwise, with 128 + the signal's number, so that a supervisor does not take the run for
            finished.
        """
        if self.received is signal.SIGINT and hasattr(sys, "ps1"):  # IPython sets it as well
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.received or signal.SIGTERM))
