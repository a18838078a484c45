"""Calls into other people's code: what they return, raise, or never come back from."""

import asyncio
import threading
import time

import pytest

from grpo_jax.turns.calling import call_within


@pytest.mark.quick
@pytest.mark.parametrize("seconds", [None, 10.0])
def test_a_function_of_any_kind_returns_or_raises(seconds):
    async def later(x, *, y):
        await asyncio.sleep(0.001)
        return x + y

    def leaves():
        raise SystemExit(3)

    async def fails():
        raise KeyError("gold")

    assert call_within(seconds, lambda x, *, y: x + y, 1, y=2) == 3
    assert call_within(seconds, later, 1, y=2) == 3
    for function, error in ((leaves, SystemExit), (fails, KeyError), (lambda: 1 / 0, ZeroDivisionError)):
        with pytest.raises(error):
            call_within(seconds, function)


@pytest.mark.quick
def test_one_that_hangs_is_left_behind():
    free, begun = threading.Event(), time.monotonic()

    async def hangs():
        await asyncio.sleep(1000)

    for function in (lambda: free.wait(1000), hangs):
        with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"):
            call_within(0.05, function)
    assert time.monotonic() - begun < 60
    free.set()


@pytest.mark.quick
def test_many_at_a_time_on_one_loop():
    """Async calls wait together: each waits for one that another thread begins."""
    both = threading.Barrier(3, timeout=60)

    async def meet():
        await asyncio.to_thread(both.wait)
        return 1

    found = []
    threads = [threading.Thread(target=lambda: found.append(call_within(60.0, meet))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1, 1, 1]


@pytest.mark.quick
def test_a_promise_that_hangs_is_cancelled_and_says_so_whoever_notices_first(monkeypatch):
    """The thread that waits for the promise may see the end of the time before its caller does."""
    cancelled = threading.Event()

    async def forever():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def late():
        raise TimeoutError("of its own")

    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: join(self, 10))
    with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"):
        call_within(0.05, forever)
    assert cancelled.wait(10)
    with pytest.raises(TimeoutError, match="of its own"):
        call_within(5.0, late)
