"""Handling of SIGTERM and SIGINT, which stop a run after the current update, or interrupt a rollout or evaluation."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn


class Interrupted(Exception):
    """Raised when a signal interrupts a rollout or an evaluation, which the resumed run repeats."""


class StopSignals:
    """Context manager that records the first SIGTERM or SIGINT in `received`, and then restores the previous handlers.

    Signals that are ignored or handled outside Python keep their handlers. Does nothing outside the main thread.
    """

    def __init__(self, enabled: bool = True, single_process: bool = True):
        self.received: signal.Signals | None = None
        self._single_process = single_process
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT) if self._enabled else ():
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: Any) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self.__exit__()
        # `print` is not reentrant, and the signal may arrive during another print.
        name = self.received.name
        os.write(2, f"\n{name}: saving after the current update; a second signal ends the run immediately\n".encode())

    def check(self) -> None:
        """Raise `Interrupted` if a signal has arrived, unless the run has several processes."""
        if self.received is not None and self._single_process:
            raise Interrupted

    def exit(self) -> NoReturn:
        """Raise SystemExit with status 128 + signal number, or KeyboardInterrupt for SIGINT in interactive sessions."""
        if self.received is signal.SIGINT and hasattr(sys, "ps1"):  # IPython also sets `ps1`
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.received or signal.SIGTERM))
