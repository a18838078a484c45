"""HTTP to one server: a request is one POST of JSON, on a kept connection; each thread has its own request."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import socket
import threading
import time
import urllib.parse
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from grpo_jax.messages import show
from grpo_jax.types import Json

Result = TypeVar("Result")

BUSY = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed later."""
PAUSES = (0.1, 0.5, 2.0, 5.0, 10.0)
"""Seconds between tries; the last one repeats."""
SHORT = 2**20
"""Most bytes of an answer, headers included, that does not grow with the number of tokens."""


RECOVERIES = 3
"""How often a server may be lost in one batch."""
NOTHING_LEARNED = "Nothing was learned from this batch; start the run again to resume from its last checkpoint."


class EngineError(RuntimeError):
    """A server cannot do what a run needs: names the server, the request and the fix."""


class Lost(EngineError):
    """The server does not answer: it is down, or hangs. It may come back, with other weights."""


class Refused(EngineError):
    """The server answered a request with an HTTP `status` other than 200."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class _Bounded(io.RawIOBase):
    """One answer's bytes from a socket, until a time of `time.monotonic` and up to a number of bytes.

    A socket's own timeout limits each read, and not the whole answer.
    """

    def __init__(self, sock: socket.socket, end: float, most: int):
        self._socket, self._file, self._end, self._most = sock, sock.makefile("rb", buffering=0), end, most
        self._count = 0

    def makefile(self, _: str) -> io.BufferedReader:
        """Called by `HTTPResponse`."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        count = self._file.readinto(buffer) or 0
        self._count += count
        if self._count > self._most:
            raise EngineError(f"answered more than {self._most} bytes")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class Client:
    """POST and GET of JSON, from any number of threads; the arguments are as in `engines.vllm`.

    Example:
      >>> Client("http://127.0.0.1:8000/v1/").base_url
      'http://127.0.0.1:8000'
    """

    def __init__(self, base_url: str, *, timeout: float = 600.0, patience: float = 300.0, api_key_env: str = ""):
        url = urllib.parse.urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc or url.query:
            secret = "@" in base_url or url.query
            shown = "an address with more than a host in it" if secret else show(base_url)
            raise ValueError(
                f"base_url is {shown}: give http://host:port, as the server prints it at its start, and a key by an"
                " environment variable (api_key_env)"
            )
        for name, value in (("timeout", timeout), ("patience", patience)):
            if not value >= 0:
                raise ValueError(f"{name} = {value!r}: give seconds ≥ 0")
        path = url.path.rstrip("/").removesuffix("/v1")
        self.base_url, self._path = f"{url.scheme}://{url.netloc}{path}", path
        self._secure, self._host, self._port = url.scheme == "https", url.hostname, url.port
        self._timeout, self.patience, self._env = timeout, patience, api_key_env
        self._idle, self._busy = list[http.client.HTTPConnection](), set[http.client.HTTPConnection]()
        self._closed = 0
        weakref.finalize(self, _close, self._idle)

    def __repr__(self) -> str:
        return f"Client({self.base_url!r})"

    def request(
        self,
        path: str,
        body: Json | None = None,
        *,
        stopped: Callable[[], bool] = lambda: False,
        busy: Sequence[int] = BUSY,
        most_bytes: int = SHORT,
    ) -> Json:
        """Send a POST, or a GET if `body` is None, and return the JSON object of the answer, {} for anything else.

        After a status in `busy` the request is sent again for `patience` seconds, unless `stopped` returns True.

        Raises:
          Lost: no answer within the timeout, or the server is still busy.
          Refused: any other status than 200.
          EngineError: an answer of more than `most_bytes`, or one that is not JSON.
        """
        end, tries = time.monotonic() + self.patience, 0
        while True:
            status, content = self._once(path, body, most_bytes)
            if status == 200:
                try:
                    return dict(json.loads(content)) if content.strip()[:1] == b"{" else {}
                except (ValueError, RecursionError) as error:
                    said = self._without_key(content.decode(errors="replace"))
                    raise EngineError(f"{self.base_url}{path} did not answer JSON: {show(said)}") from error
            if status not in busy:
                raise Refused(self._message(path, status, content), status)
            pause = PAUSES[min(tries, len(PAUSES) - 1)]
            if stopped() or time.monotonic() + pause > end:
                raise Lost(f"{self._message(path, status, content)}, {tries + 1} times in {self.patience:g} s")
            time.sleep(pause)
            tries += 1

    def alive(self) -> bool:
        """Whether the server answers; one request."""
        try:
            return self._once("/health", None, SHORT)[0] in (200, 404)
        except Lost:
            return False

    def close(self) -> None:
        """Abort the requests of all threads; the next request opens a new connection."""
        self._closed += 1
        for connection in list(self._busy):
            sock = connection.sock
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # its thread closes it
        _close(self._idle)

    def _message(self, path: str, status: int, content: bytes) -> str:
        """The message for a status other than 200."""
        said = content.decode(errors="replace").strip()
        try:
            error = json.loads(said)
            error = error.get("error", error) if isinstance(error, dict) else error
            said = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, RecursionError):
            pass
        mend = ""
        if status in (401, 403):
            mend = f": put its key into the environment variable {self._env or 'that api_key_env names'}"
        return f"{self.base_url}{path} answered {status}, {show(self._without_key(said), 300)}{mend}"

    def _key(self) -> str:
        """The server's key, "" if there is none."""
        key = os.environ.get(self._env, "").strip() if self._env else ""
        if not (key.isascii() and key.isprintable()):
            raise EngineError(f"{self.base_url}: the environment variable {self._env} is not printable ASCII")
        return key

    def _without_key(self, said: str) -> str:
        """A server's text without the key: it may send back the headers of a request."""
        key = self._key()
        return said.replace(key, "***") if key else said

    def _once(self, path: str, body: Json | None, most_bytes: int) -> tuple[int, bytes]:
        """Status and content of an answer; sent again if the server had closed a kept connection."""
        headers = {"Content-Type": "application/json"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        (connection, kept), closed = self._taken(), self._closed
        end = time.monotonic() + self._timeout

        # typeshed wants a socket and a class; http.client only calls `makefile` of the one, and the other itself.
        def bounded(sock: socket.socket, method: str | None) -> http.client.HTTPResponse:
            return http.client.HTTPResponse(_Bounded(sock, end, most_bytes), method=method)  # type: ignore[arg-type]

        connection.response_class = bounded  # type: ignore[assignment]
        self._busy.add(connection)
        try:
            method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
            if connection.sock is not None:
                connection.sock.settimeout(self._timeout)
            connection.request(method, self._path + path, data, headers)
            with connection.getresponse() as answer:
                content = b"".join(iter(lambda: answer.read(2**16), b""))
                if answer.length:
                    raise http.client.IncompleteRead(content, answer.length)
        except EngineError as error:
            connection.close()
            raise EngineError(f"{self.base_url}{path} {error}") from None
        except TimeoutError as error:
            connection.close()
            raise Lost(
                f"{self.base_url}{path}: no answer in {self._timeout:g} s; look at the server's log, or give a longer"
                " timeout"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            if kept and closed == self._closed and not isinstance(error, http.client.IncompleteRead):
                return self._once(path, body, most_bytes)
            said = self._without_key(f"{type(error).__name__}: {error}")  # may quote the server
            raise Lost(f"{self.base_url}{path}: {said}; is the server running, and is base_url right?") from None
        finally:
            self._busy.discard(connection)
        if connection.sock is not None:
            self._idle.append(connection)
        return answer.status, content

    def _taken(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was kept from an earlier request."""
        with contextlib.suppress(IndexError):
            return self._idle.pop(), True
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout), False


def run_together(
    tasks: Sequence[Callable[[], Result]],
    most: int,
    stop: threading.Event,
    close: Callable[[], None],
    interrupt: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Return the results of tasks that send requests, `most` at a time, each in its own thread.

    An error of one sets `stop`, and `close` aborts the requests in flight; so does what `interrupt` raises, which is
    called every 0.2 s.
    """
    with ThreadPoolExecutor(min(most, len(tasks)), "grpo_jax-engine") as pool:
        coming = [pool.submit(task) for task in tasks]
        try:
            rest = set(coming)
            while rest:
                done, rest = wait(rest, timeout=0.2, return_when="FIRST_EXCEPTION")
                interrupt()
                for one in done:
                    one.result()
        except BaseException:
            stop.set()
            for one in coming:
                one.cancel()
            close()
            raise
    return [one.result() for one in coming]


def wait_until_alive(
    alive: Callable[[], bool],
    lost: Lost,
    patience: float,
    stop: threading.Event,
    interrupt: Callable[[], None] = lambda: None,
) -> None:
    """Wait at most `patience` seconds for a lost server; raise an `EngineError` if it does not come back."""
    warnings.warn(f"{lost}. It is waited for, {patience:g} s at most", stacklevel=3)
    end = time.monotonic() + patience
    while not alive():
        interrupt()
        if stop.wait(min(1.0, patience / 10)) or time.monotonic() > end:
            raise EngineError(f"{lost}. It was waited for {patience:g} s. {NOTHING_LEARNED}") from lost


def _close(connections: list[http.client.HTTPConnection]) -> None:
    """Close idle connections."""
    while connections:
        connections.pop().close()
