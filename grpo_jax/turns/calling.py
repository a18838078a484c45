"""Calls into other people's code: sync or async, from any thread, with an end to waiting."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable
from typing import Any

from grpo_jax.rewards.calls import event_loop


def call_within(seconds: float | None, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """What a function returns, awaited if that is a promise; waited for so many seconds at most.

    A function that takes longer goes on in its thread, which nothing can end, and what it returns is thrown away; one
    that is awaited is cancelled.

    Args:
      seconds: None: however long it takes.
      function: sync, then it runs in a thread of its own; or async, then on the loop that async rewards share.
      args, keywords: its arguments.

    Raises:
      TimeoutError: it took longer.
      Exception: whatever it raises; a `SystemExit` too, which would otherwise end only its thread.

    Example:
      >>> call_within(5.0, lambda x: x + 1, 2)
      3
    """
    outcome: list[Any] = []

    def work() -> None:
        try:
            value = function(*args, **keywords)
            if inspect.isawaitable(value):
                promise = asyncio.run_coroutine_threadsafe(_awaited(value), event_loop())
                if not concurrent.futures.wait([promise], seconds).done:
                    promise.cancel()
                    return  # no outcome: it took longer, however soon the caller sees that
                value = promise.result()
            outcome.append((value, None))
        except BaseException as error:
            outcome.append((None, error))

    if seconds is None:
        work()
    else:
        thread = threading.Thread(target=work, daemon=True, name="grpo_jax-environment")
        thread.start()
        thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"took longer than {seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


async def _awaited(value: Any) -> Any:
    return await value
