"""HTTP to one server: JSON requests from many threads, sent again after the server was lost and came back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from grpo_jax.messages import show
from grpo_jax.types import Json

Result = TypeVar("Result")

BUSY = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed later."""
SHORT = 2**20
"""Most bytes of an answer whose length does not grow with the number of tokens."""
MAX_REQUESTS = 1024
"""Requests in flight, at most."""
RECOVERIES = 3
"""How often a server may be lost in one batch."""
NOTHING_LEARNED = "Nothing was learned from this batch; start the run again to resume from its last checkpoint."


class EngineError(RuntimeError):
    """An error of a server. The message names the server, the request and the fix."""


class Lost(EngineError):
    """The server does not answer: it is down, or hangs. It may come back, with other weights."""


class Refused(EngineError):
    """The server answered a request with an HTTP `status` other than 200."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Client:
    """An HTTP client for JSON, for any number of threads; the arguments are as in `engines.vllm`."""

    def __init__(self, base_url: str, *, timeout: float = 600.0, patience: float = 300.0, api_key_env: str = ""):
        url = urllib.parse.urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc or url.query:
            secret = "@" in base_url or url.query
            shown = "an address with more than a host in it" if secret else show(base_url)
            raise ValueError(
                f"base_url is {shown}: give http://host:port, as the server prints it at its start, and a key by an"
                " environment variable (api_key_env)"
            )
        self._path = url.path.rstrip("/").removesuffix("/v1")
        self.base_url = f"{url.scheme}://{url.netloc}{self._path}"
        self._host, self._port = url.hostname, url.port
        self._connection = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._timeout, self.patience, self._env = timeout, patience, api_key_env
        self._open, self._aborts = set[socket.socket](), 0

    def request(
        self, path: str, body: Json | None = None, *, busy: Sequence[int] = BUSY, most_bytes: int = SHORT
    ) -> Json:
        """Send a POST, or a GET if `body` is None, and return the JSON object of the answer, {} for anything else.

        After a status in `busy` the request is sent again, for `patience` seconds at most. Raises `Lost` without an
        answer in time, `Refused` for another status than 200, and `EngineError` for an answer of more than `most_bytes`
        or without valid JSON.
        """
        end, pause, aborts = time.monotonic() + self.patience, 0.1, self._aborts
        while True:
            status, content = self._once(path, body, most_bytes)
            said = self._without_key(content.decode(errors="replace").strip())
            if status == 200:
                try:
                    return dict(json.loads(content)) if said.startswith("{") else {}
                except (ValueError, RecursionError) as error:
                    raise EngineError(f"{self.base_url}{path} did not answer JSON: {show(said)}") from error
            message = f"{self.base_url}{path} answered {status}, {show(said, 300)}"
            if status in (401, 403):
                message += f": put its key into the environment variable {self._env or 'that api_key_env names'}"
            if status not in busy:
                raise Refused(message, status)
            if aborts != self._aborts or time.monotonic() + pause > end:
                raise Lost(f"{message}, for {self.patience:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def alive(self) -> bool:
        """Return whether the server answers one request."""
        try:
            return self._once("/health", None, SHORT)[0] in (200, 404)
        except Lost:
            return False

    def abort(self) -> None:
        """End the requests of all threads; they raise `Lost`."""
        self._aborts += 1
        for opened in list(self._open):
            _shut_down(opened)

    def _key(self) -> str:
        """Return the server's key, "" if there is none."""
        key = os.environ.get(self._env, "").strip() if self._env else ""
        if not (key.isascii() and key.isprintable()):  # http.client would show it in its error
            raise EngineError(f"{self.base_url}: the environment variable {self._env} is not printable ASCII")
        return key

    def _without_key(self, said: str) -> str:
        """Return a server's text without the key: the server may send back the headers of a request."""
        key = self._key()
        return said.replace(key, "***") if key else said

    def _once(self, path: str, body: Json | None, most_bytes: int) -> tuple[int, bytes]:
        """Send a request once, on its own connection, and return the status and the content of the answer."""
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        late, fault = threading.Event(), ""
        try:
            with self._connected(late) as connection:
                connection.request(method, self._path + path, data, headers)
                with connection.getresponse() as answer:
                    content = answer.read(most_bytes + 1)
                    if answer.length and len(content) <= most_bytes:
                        raise http.client.IncompleteRead(content, answer.length)
        except TimeoutError:
            late.set()
        except (OSError, http.client.HTTPException, ValueError) as error:
            fault = self._without_key(f"{type(error).__name__}: {error}")  # may quote the server
        if late.is_set():
            raise Lost(
                f"{self.base_url}{path}: no answer in {self._timeout:g} s; look at the server's log, or give a longer"
                " timeout"
            )
        if fault:
            raise Lost(f"{self.base_url}{path}: {fault}; is the server running, and is base_url right?")
        if len(content) > most_bytes:
            raise EngineError(f"{self.base_url}{path} answered more than {most_bytes} bytes")
        return answer.status, content

    @contextlib.contextmanager
    def _connected(self, late: threading.Event) -> Iterator[http.client.HTTPConnection]:
        """Open a connection, and shut it down at the timeout, since a socket's own timeout limits only each read."""
        connection, begin = self._connection(self._host, self._port, timeout=self._timeout), time.monotonic()
        connection.connect()
        opened = connection.sock  # the connection forgets its socket when the answer begins

        def expire() -> None:
            late.set()
            _shut_down(opened)

        timer = threading.Timer(begin + self._timeout - time.monotonic(), expire)
        timer.daemon = True
        timer.start()
        self._open.add(opened)
        try:
            yield connection
        finally:
            timer.cancel()
            self._open.discard(opened)
            connection.close()


class Requests:
    """The requests of one batch. After the server was lost and restored by `restore`, they are sent again."""

    def __init__(self, client: Client, restore: Callable[[], None]):
        self._client, self._restore, self._stopped = client, restore, threading.Event()
        self.lost = 0  # how often the server was lost
        self._lock, self._epoch = threading.Lock(), 0  # the epoch counts recoveries

    def run(
        self,
        tasks: Sequence[Callable[[], Result]],
        most: int = MAX_REQUESTS,
        interrupt: Callable[[], None] = lambda: None,
    ) -> list[Result]:
        """Return the results of tasks that call `send`, `most` at a time, each in its own thread.

        The first error aborts all requests, and so does an exception of `interrupt`, which is called every 0.2 s.
        """
        with ThreadPoolExecutor(min(most, len(tasks)), "grpo_jax-engine") as pool:
            pending = [pool.submit(task) for task in tasks]
            try:
                rest = set(pending)
                while rest:
                    done, rest = wait(rest, timeout=0.2, return_when="FIRST_EXCEPTION")
                    interrupt()
                    for one in done:
                        one.result()
            except BaseException:
                self._stopped.set()
                for one in pending:
                    one.cancel()
                self._client.abort()
                raise
        return [one.result() for one in pending]

    def send(self, request: Callable[[], Result]) -> Result:
        """Return the result of a request, which is sent again if the server is lost and comes back."""
        while True:
            self.raise_if_stopped()
            epoch = self._epoch
            try:
                result = request()
            except Lost as lost:
                self._recover(epoch, lost)
                continue
            with self._lock:  # waits for a recovery: the restarted server may have answered with other weights
                if epoch == self._epoch:
                    return result

    def raise_if_stopped(self) -> None:
        """Raise an `EngineError` if an error has ended the batch."""
        if self._stopped.is_set():
            raise EngineError("the batch was stopped")

    def _recover(self, epoch: int, lost: Lost) -> None:
        """Wait for the server and restore it. Only the first of several threads does so."""
        patience = self._client.patience
        with self._lock:
            while epoch == self._epoch:
                self.raise_if_stopped()
                if self.lost == RECOVERIES:
                    message = f"{lost}; this was the {RECOVERIES + 1}th time in one batch. {NOTHING_LEARNED}"
                    raise EngineError(message) from lost
                self.lost += 1
                warnings.warn(f"{lost}. Waiting for the server, at most {patience:g} s", stacklevel=3)
                end = time.monotonic() + patience
                while not self._client.alive():
                    if self._stopped.wait(min(1.0, patience / 10)) or time.monotonic() > end:
                        raise EngineError(
                            f"{lost}. It did not come back in {patience:g} s. {NOTHING_LEARNED}"
                        ) from lost
                try:
                    self._restore()
                    self._epoch += 1
                except Lost as again:
                    lost = again


def _shut_down(opened: socket.socket) -> None:
    """Shut down a socket, which ends the reads and writes of other threads."""
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
