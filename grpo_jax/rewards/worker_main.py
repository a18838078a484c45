"""The worker's side of `grpo_jax.rewards.workers`: a script, so that it imports neither JAX nor this package.

It reads a setup, answers "ready", then reads requests, answers "begun" and then with what came of each, all over one
connection. Requests come as pickles, from the process that started it; replies go as JSON, so that nothing that a
reward function made is unpickled there.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import importlib.util
import inspect
import itertools
import json
import numbers
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Iterable, Mapping, Sized
from multiprocessing.connection import Connection
from typing import Any

_MESSAGE_LIMIT = 2000  # characters of an exception's text; a reply must not be the way around the limit of output
_REPR_LIMIT = 200


def main(descriptor: int) -> None:
    """Serve requests until the connection is closed."""
    # A batch system sends SIGTERM to all processes of a run, which then finishes its step and needs the rewards.
    # A handler, unlike SIG_IGN, is not passed on to the processes that the function starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    connection = Connection(descriptor)
    setup = pickle.loads(connection.recv_bytes())
    threading.Thread(target=_end_with_parent, args=(setup["parent"],), daemon=True).start()
    try:
        sys.path[:] = setup["path"]
        _load_main(setup["main"])
        fn = pickle.loads(setup["fn"])
        # After the imports: these are limits of what the function does, not of the libraries it needs.
        _limit(setup["memory_mb"], setup["max_output_bytes"])
        _send(connection, {"ready": True})
    except BaseException as error:
        _send(connection, _failure(error))
        return
    with asyncio.Runner() as runner:
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            _send(connection, {"begun": True})  # from here on, the end of this process is the function's doing
            _send(connection, _answer(fn, request, runner))


def _send(connection: Connection, reply: Mapping[str, Any]) -> None:
    """Send a reply as JSON."""
    connection.send_bytes(json.dumps(reply).encode())


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has gone without telling it, however busy it is."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _load_main(main_source: tuple[str, str] | None) -> None:
    """Import what is `__main__` in the parent, under another name, so that its functions are found here."""
    if main_source is None:
        return
    kind, name = main_source
    if kind == "module":
        module = importlib.import_module(name)
    else:
        spec = importlib.util.spec_from_file_location("__mp_main__", name)  # the name that multiprocessing gives it
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is no Python file that can be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules["__mp_main__"] = module
        spec.loader.exec_module(module)
    sys.modules["__main__"] = module


def _limit(memory_mb: int | None, max_output_bytes: int | None) -> None:
    """Set the limits of this process and of those that it starts."""
    import resource

    if memory_mb is not None:
        with open("/proc/self/statm", encoding="ascii") as statm:
            in_use = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = in_use + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if max_output_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_output_bytes, max_output_bytes))


def _answer(fn: Any, request: bytes, runner: asyncio.Runner) -> dict[str, Any]:
    """Call the function and return the reply."""
    try:
        count, inputs = pickle.loads(request)
        outcome = fn(**inputs)
        if inspect.isawaitable(outcome):
            outcome = runner.run(_awaited(outcome))
        reply = _plain(outcome, count)
        sys.stdout.flush()
        sys.stderr.flush()
        return reply
    except BaseException as error:
        return _failure(error)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    """Await anything that can be awaited; a runner takes coroutines only."""
    return await awaitable


def _plain(outcome: Any, count: int) -> dict[str, Any]:
    """Return what a function returned in a form that JSON has; what it is worth is judged in the parent."""
    if hasattr(outcome, "tolist"):
        outcome = outcome.tolist()
    if isinstance(outcome, (str, bytes, Mapping, set, frozenset)) or not isinstance(outcome, Iterable):
        return {"whole": None if outcome is None else _stand_in(outcome)}
    items = list(itertools.islice(outcome, count + 1))
    if len(items) != count:
        return {"length": len(outcome) if isinstance(outcome, Sized) else len(items)}
    return {"values": [_plain_item(item) for item in items]}


def _plain_item(item: Any) -> Any:
    """Return one reward as a number or None; as its repr and the name of its type if it is neither."""
    if item is None or isinstance(item, (bool, float)):
        return item
    inexact = isinstance(item, numbers.Complex) and not isinstance(item, numbers.Real)
    if isinstance(item, (str, bytes)) or inexact or getattr(item, "shape", ()) != ():
        return _stand_in(item)
    try:
        return float(item)
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError):
        return _stand_in(item)


def _stand_in(value: Any) -> dict[str, str]:
    """Return what a message needs to know of a value."""
    return {"repr": repr(value)[:_REPR_LIMIT], "type": type(value).__name__}


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the reply for an exception."""
    if isinstance(error, MemoryError):
        return {"limit": "memory"}
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return {"limit": "output"}
    values, faults = getattr(error, "values", None), getattr(error, "faults", None)
    if isinstance(values, list) and isinstance(faults, dict):  # PartialRewards, which is not imported here
        words = [(index, _words(fault)) for index, fault in faults.items()]
        return {"values": [_plain_item(item) for item in values], "faults": words}
    lines = "".join(traceback.format_exception(error))
    return {"error": [type(error).__name__, str(error)[:_MESSAGE_LIMIT], lines[-_MESSAGE_LIMIT:]]}


def _words(fault: BaseException | str) -> str:
    """Return one fault of several as the end of a sentence."""
    text = fault if isinstance(fault, str) else f"raised {type(fault).__name__}: {fault}"
    return text[:_MESSAGE_LIMIT]


if __name__ == "__main__":
    main(int(sys.argv[1]))
