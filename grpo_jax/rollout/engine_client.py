"""A thread-safe HTTP client for JSON. Requests are repeated after the server has been unavailable."""

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
"""HTTP status codes after which a request is retried."""
SHORT = 2**20
"""Maximum size in bytes of responses that do not grow with the number of tokens."""
CONNECT = 10.0
"""Time limit for a connection in seconds. An interrupt must wait for it, because it cannot be aborted."""
MAX_REQUESTS = 1024
"""Maximum number of concurrent requests."""
MAX_RECOVERIES = 3
"""Maximum number of recoveries from lost connections per batch."""
NOT_TRAINED = "This batch was not used for training; restart the run to resume from its last checkpoint."


class EngineError(RuntimeError):
    """Raised if an inference server fails. The message contains the server's URL and suggests a fix."""


class ConnectionLost(EngineError):
    """Raised if the server does not respond. It may become available again, with different weights."""


class Refused(EngineError):
    """Raised if the server responded with an HTTP `status` other than 200."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Client:
    """A thread-safe HTTP client for JSON. `engines.vllm` documents the arguments."""

    def __init__(self, base_url: str, *, timeout: float = 600.0, patience: float = 300.0, api_key_env: str = ""):
        url = urllib.parse.urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc or url.query:
            secret = "@" in base_url or url.query
            shown = "a URL with credentials or a query" if secret else show(base_url)
            raise ValueError(
                f"base_url must have the form http://host:port, as printed by the server at startup; got {shown}. Set"
                " the server's key in an environment variable (api_key_env)."
            )
        for name, seconds, least in (("timeout", timeout, 1e-3), ("patience", patience, 0.0)):
            if not isinstance(seconds, int | float) or not least <= seconds <= threading.TIMEOUT_MAX:
                raise ValueError(f"{name} must be a finite number of seconds ≥ {least:g}; got {show(seconds)}.")
        self._path = url.path.rstrip("/").removesuffix("/v1")
        self.base_url = f"{url.scheme}://{url.netloc}{self._path}"
        self._host, self._port = url.hostname, url.port
        self._connection = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._timeout, self.patience, self._env = timeout, patience, api_key_env
        self._open, self._aborts = set[socket.socket](), 0

    def request(
        self, path: str, body: Json | None = None, *, busy: Sequence[int] = BUSY, most_bytes: int = SHORT
    ) -> Json:
        """Send a POST request, or a GET request if `body` is None, and return the JSON object in the response.

        Returns {} if the response is not JSON. After a status in `busy`, the request is repeated for at most `patience`
        seconds. Raises `ConnectionLost` if there is no response in time, `Refused` if the status is not 200, and
        `EngineError` if the response is longer than `most_bytes` or contains invalid JSON.
        """
        end, pause, aborts = time.monotonic() + self.patience, 0.1, self._aborts
        while True:
            status, content = self._once(path, body, most_bytes)
            text = self._without_key(content.decode(errors="replace").strip())
            if status == 200:
                try:
                    return dict(json.loads(content)) if text.startswith("{") else {}
                except (ValueError, RecursionError) as error:
                    raise EngineError(f"{self.base_url}{path} returned invalid JSON: {show(text)}") from error
            message = f"{self.base_url}{path} returned status {status}: {show(text, 300)}"
            if status in (401, 403):
                message += f". Set its key in the environment variable {self._env or 'given by api_key_env'}"
            if status not in busy:
                raise Refused(message, status)
            if aborts != self._aborts or time.monotonic() + pause > end:
                raise ConnectionLost(f"{message}. Gave up after retrying for {self.patience:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 10.0)

    def alive(self) -> bool:
        """Return whether the server responds to a request."""
        try:
            return self._once("/health", None, SHORT)[0] in (200, 404)
        except ConnectionLost:
            return False

    def abort(self) -> None:
        """Abort the requests in all threads. Each aborted request raises `ConnectionLost`."""
        self._aborts += 1
        for opened in list(self._open):
            _shut_down(opened)

    def _key(self) -> str:
        """Return the server's API key, or "" if it is not set."""
        key = os.environ.get(self._env, "").strip() if self._env else ""
        if not (key.isascii() and key.isprintable()):  # http.client would include it in its error message
            raise EngineError(f"{self.base_url}: the environment variable {self._env} must be printable ASCII")
        return key

    def _without_key(self, text: str) -> str:
        """Mask the API key in a server's response, which may quote the request headers."""
        key = self._key()
        return text.replace(key, "***") if key else text

    def _once(self, path: str, body: Json | None, most_bytes: int) -> tuple[int, bytes]:
        """Send a request once over a new connection, and return the status and the body of the response."""
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {key}"
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        late, cause = threading.Event(), ""
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
            cause = self._without_key(f"{type(error).__name__}: {error}")  # may contain parts of the response
        if late.is_set():
            raise ConnectionLost(
                f"{self.base_url}{path} did not respond within {self._timeout:g} s. Check the server's log, or pass a"
                " longer timeout"
            )
        if cause:
            fix = "Check that the server is running and that base_url is correct"
            raise ConnectionLost(f"{self.base_url}{path}: {cause}. {fix}")
        if len(content) > most_bytes:
            raise EngineError(f"{self.base_url}{path} returned more than {most_bytes} bytes")
        return answer.status, content

    @contextlib.contextmanager
    def _connected(self, late: threading.Event) -> Iterator[http.client.HTTPConnection]:
        """Open a connection and shut it down after the timeout. A socket timeout would apply only to single reads."""
        aborts, begin, limit = self._aborts, time.monotonic(), min(self._timeout, CONNECT)
        connection = self._connection(self._host, self._port, timeout=limit)
        try:
            connection.connect()
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {limit:g} s") from error
        opened = connection.sock  # http.client clears `sock` when the response starts
        opened.settimeout(self._timeout)

        def expire() -> None:
            late.set()
            _shut_down(opened)

        timer = threading.Timer(begin + self._timeout - time.monotonic(), expire)
        timer.daemon = True
        timer.start()
        self._open.add(opened)
        if aborts != self._aborts:  # aborted while connecting
            _shut_down(opened)
        try:
            yield connection
        finally:
            timer.cancel()
            self._open.discard(opened)
            connection.close()


class Requests:
    """Requests for one batch. If the connection is lost, `restore` is called and the requests are repeated."""

    def __init__(self, client: Client, restore: Callable[[], None]):
        self._client, self._restore, self._stopped = client, restore, threading.Event()
        self.lost = 0  # number of lost connections
        self._lock, self._epoch = threading.Lock(), 0  # the epoch is the number of recoveries

    def run(
        self,
        tasks: Sequence[Callable[[], Result]],
        most: int = MAX_REQUESTS,
        interrupt: Callable[[], None] = lambda: None,
    ) -> list[Result]:
        """Run tasks that call `send` in at most `most` threads, and return their results.

        `interrupt` is called every 0.2 s. An exception in a task or in `interrupt` aborts all requests.
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
        """Send a request and return its result. The request is repeated if the server was unavailable meanwhile."""
        while True:
            self.raise_if_stopped()
            epoch = self._epoch
            try:
                result = request()
            except ConnectionLost as lost:
                self._recover(epoch, lost)
                continue
            with self._lock:  # wait for a recovery; a restarted server may have responded with different weights
                if epoch == self._epoch:
                    return result

    def raise_if_stopped(self) -> None:
        """Raise `EngineError` if the batch was stopped by an error or an interrupt."""
        if self._stopped.is_set():
            raise EngineError("The batch was stopped")

    def _recover(self, epoch: int, lost: ConnectionLost) -> None:
        """Wait until the server responds, then call `restore`. Only one of the waiting threads does this."""
        patience = self._client.patience
        with self._lock:
            while epoch == self._epoch:
                self.raise_if_stopped()
                if self.lost == MAX_RECOVERIES:
                    message = f"{lost}. This was failure {MAX_RECOVERIES + 1} in one batch. {NOT_TRAINED}"
                    raise EngineError(message) from lost
                self.lost += 1
                warnings.warn(f"{lost}. Waiting up to {patience:g} s for the server", stacklevel=3)
                end = time.monotonic() + patience
                while not self._client.alive():
                    if self._stopped.wait(min(1.0, patience / 10)) or time.monotonic() > end:
                        raise EngineError(f"{lost}. Gave up after waiting {patience:g} s. {NOT_TRAINED}") from lost
                try:
                    self._restore()
                    self._epoch += 1
                except ConnectionLost as again:
                    lost = again


def _shut_down(opened: socket.socket) -> None:
    """Shut down a socket, which also ends reads and writes in other threads."""
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
