"""SIGTERM and SIGINT stop a run after the update in progress, without waiting for a whole rollout."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn


class Interrupted(Exception):
    """A signal arrived during a rollout or an evaluation, which the resumed run makes again."""


class StopSignals:
    """A context manager that records the first SIGTERM or SIGINT in `received`; a second one has its usual effect.

    Handlers are set in the main thread only, and not for signals that are ignored or handled outside of Python.

    Args:
      enabled: False leaves the handlers unchanged, for runs that cannot be saved.
      alone: False if other processes work on the same arrays, and would wait for a rollout that this one leaves.
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
        os.write(2, f"\n{name}: saving as soon as this update is done; a second signal ends the run at once\n".encode())

    def interrupt(self) -> None:
        """Raise `Interrupted` after a signal, unless other processes work on the same arrays."""
        if self.received is not None and self._alone:
            raise Interrupted

    @property
    def hurry(self) -> bool:
        """Whether the signal is SIGTERM, which SIGKILL or the loss of the machine usually follows."""
        return self.received is signal.SIGTERM

    def leave(self) -> NoReturn:
        """End the program after the run is saved.

        Raises:
          KeyboardInterrupt: on SIGINT in a notebook or at the prompt, where it ends the cell and not the session.
          SystemExit: otherwise, with 128 + the signal's number, so that a supervisor does not see a finished run.
        """
        if self.received is signal.SIGINT and hasattr(sys, "ps1"):  # IPython sets it as well
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.received or signal.SIGTERM))
