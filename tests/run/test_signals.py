"""The first SIGTERM or SIGINT is recorded, the second has its usual effect, and the handlers are restored."""

import contextlib
import signal
import sys
import threading

import pytest

from grpo_jax.run.signals import Interrupted, StopSignals

pytestmark = pytest.mark.quick

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def _same_handlers_afterwards():
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background jobs ignore it
    before = [signal.getsignal(number) for number in BOTH]
    yield
    assert [signal.getsignal(number) for number in BOTH] == before
    signal.signal(signal.SIGINT, found)


@pytest.mark.parametrize("number", BOTH)
def test_first_signal_is_recorded_and_sets_the_exit_status(number, capfd):
    with StopSignals() as signals:
        assert signals.received is None
        signal.raise_signal(number)
        assert signals.received is number
        with pytest.raises(SystemExit) as left:
            signals.exit()
    assert left.value.code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert f"{number.name}: saving after the current update" in capfd.readouterr().err


def test_second_signal_has_its_usual_effect_and_one_in_a_notebook_ends_the_cell(monkeypatch):
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        assert signals.received is signal.SIGINT
        signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.exit()


def test_work_is_interrupted_only_in_a_single_process():
    for single_process in (True, False):
        with StopSignals(single_process=single_process) as signals:
            signals.check()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted) if single_process else contextlib.nullcontext():
                signals.check()


def test_handlers_are_unchanged_if_disabled_in_threads_or_under_nohup():
    def handlers(enabled=True):
        with StopSignals(enabled):
            return [signal.getsignal(number) for number in BOTH]

    usual, inside = [signal.getsignal(number) for number in BOTH], []
    assert handlers(enabled=False) == usual
    thread = threading.Thread(target=lambda: inside.append(handlers()))
    thread.start()
    thread.join()
    assert inside == [usual]
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    try:
        assert handlers()[1] is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, old)
