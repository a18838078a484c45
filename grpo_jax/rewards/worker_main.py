"""The worker's side of `grpo_jax.rewards.processes`: a script, so that it imports neither JAX nor this package.

It reads a setup, answers "ready", then reads requests and answers each with "begun" and then its result, all over one
connection. Requests come as pickles, from the process that started it; replies go as JSON, so that nothing that a
reward function made is unpickled there.

Of environments it runs nothing itself: it imports what they need, and forks for each, which then has a connection of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
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
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sized
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

_TEXT_LIMIT = 2**22  # characters that an environment may say: more fit into no completion
_MESSAGE_LIMIT = 2000  # characters of an exception's text; a reply must not be the way around the limit of output
_REPR_LIMIT = 200


def main(descriptor: int) -> None:
    """Serve requests until the connection is closed."""
    # A batch system sends SIGTERM to all processes of a run, which then finishes its step and needs the rewards.
    # A handler, unlike SIG_IGN, is not passed on to the processes that the function starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    connection = Connection(descriptor)
    setup = pickle.loads(connection.recv_bytes())
    if not setup["instances"]:  # who forks has one thread, and waits for its parent's word
        threading.Thread(target=_end_with_parent, args=(setup["parent"],), daemon=True).start()
    try:
        sys.path[:] = setup["path"]
        _load_main(setup["main"])
        fn = pickle.loads(setup["fn"])
        if setup["instances"]:
            _send(connection, {"ready": True})
            return _fork_on_request(connection, fn, setup)
        # After the imports: these are limits of what the function does, not of the libraries it needs.
        _limit(setup["memory_mb"], setup["max_output_bytes"])
        _send(connection, {"ready": True})
    except BaseException as error:
        _send(connection, _failure(error))
        return
    with asyncio.Runner() as runner:
        for request in _requests(connection):
            _send(connection, {"begun": True})  # from here on, the end of this process is the function's doing
            _send(connection, _answer(fn, request, runner))


def _requests(connection: Connection) -> Iterator[bytes]:
    """Yield what is asked for, until the connection is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield connection.recv_bytes()


def _fork_on_request(connection: Connection, factory: Callable[[], object], setup: Mapping[str, Any]) -> None:
    """Fork for each instance and end forks, until the connection is closed; then end all.

    A fork that has ended is waited for only when that is asked for: until then its number is no other process's.
    """
    children: set[int] = set()
    for request in map(json.loads, _requests(connection)):
        codes = [_end(pid, children) for pid in request["end"]]
        if not request["fork"]:
            _send(connection, {"codes": codes})
            continue
        here, there = Pipe()
        pid = os.fork()
        if pid == 0:
            connection.close()
            here.close()
            _live(there, factory, setup)
        there.close()
        children.add(pid)
        _send(connection, {"codes": codes, "pid": pid})
        reduction.send_handle(connection, here.fileno(), None)
        here.close()
    for pid in list(children):
        _end(pid, children)


def _end(pid: int, children: set[int]) -> int:
    """End a fork and all that it started; return its exit code."""
    if pid not in children:
        return 0
    children.remove(pid)
    for kill in (os.kill, os.killpg):  # the first for one that has no group of its own yet
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _live(connection: Connection, factory: Callable[[], object], setup: Mapping[str, Any]) -> None:
    """Be the process of one instance; never returns."""
    try:
        os.setpgid(0, 0)
        output = None
        if setup["max_output_bytes"] is not None:
            output = tempfile.TemporaryFile()  # noqa: SIM115 — it lives as long as the process
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        if "numpy" in sys.modules:  # each fork would draw the same; `random` sees to that itself
            sys.modules["numpy"].random.seed()
        _limit(setup["memory_mb"], setup["max_output_bytes"])
        _serve_instance(connection, factory, output)
    finally:
        os._exit(0)


def _serve_instance(connection: Connection, factory: Callable[[], object], output: IO[bytes] | None) -> None:
    """Make the instance, then call its methods and read its attributes, until the connection is closed."""
    instance: object = None
    with asyncio.Runner() as runner:
        for request in _requests(connection):
            try:
                what, name, args, keywords = pickle.loads(request)
                if what == "make":
                    instance = factory()
                    value: object = [type(instance).__module__, type(instance).__qualname__]
                elif what == "read":
                    value = getattr(instance, name)
                else:
                    value = getattr(instance, name)(*args, **keywords)
                    if inspect.isawaitable(value):
                        value = runner.run(_awaited(value))
                reply = _as_sent(value)
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException as error:
                reply = _failure(error)
            _send(connection, reply | _printed(output))


def _printed(output: IO[bytes] | None) -> dict[str, str]:
    """Return the part of a reply that holds what was printed since the last call, which is then forgotten."""
    if output is None:
        return {}
    output.seek(0)
    text = output.read().decode(errors="replace")[:_TEXT_LIMIT]
    output.seek(0)
    output.truncate()
    return {"printed": text} if text else {}


def _as_sent(value: Any) -> dict[str, object]:
    """Return the reply for a method's value: as it is if JSON has it, or its text, with its type."""
    if isinstance(value, str):
        return {"value": str.__str__(value)[:_TEXT_LIMIT]}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": bytes(value)[:_TEXT_LIMIT].decode("latin-1")}
    if value is None or isinstance(value, (bool, int, float, list, tuple, dict)):
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # a circle, a key that JSON has none for
            text = json.dumps(value, default=str)
            return {"value": json.loads(text)} if len(text) <= _TEXT_LIMIT else {"value": text[:_TEXT_LIMIT]}
    kind, number = type(value).__name__, None
    try:
        text = str(value)[:_TEXT_LIMIT]
    except Exception as error:
        text = f"[{kind} that cannot be written as text: {type(error).__name__}]"
    if not isinstance(value, (list, tuple, dict)):
        with contextlib.suppress(Exception):  # NumPy's and others' numbers are rewards too
            number = float(value)
    return {"value": {**_stand_in(value), "text": text, "number": number}, "other": True}


def _send(connection: Connection, reply: Mapping[str, object]) -> None:
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


def _answer(fn: Callable[..., object], request: bytes, runner: asyncio.Runner) -> dict[str, object]:
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


async def _awaited(awaitable: Awaitable[object]) -> object:
    """Await anything that can be awaited; a runner takes coroutines only."""
    return await awaitable


def _plain(outcome: object, count: int) -> dict[str, object]:
    """Return the reply for a function's rewards as JSON has them; they are judged in the parent."""
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


def _stand_in(value: object) -> dict[str, str]:
    """Return the repr and the type of a value, for a message."""
    return {"repr": repr(value)[:_REPR_LIMIT], "type": type(value).__name__}


def _failure(error: BaseException) -> dict[str, object]:
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
