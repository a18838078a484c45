"""An asynchronous HTTP client for JSON. Failed requests are repeated when the server is available again."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import math
import os
import re
import ssl
import time
import urllib.parse
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from grpo_jax.messages import show
from grpo_jax.types import Json

Result = TypeVar("Result")

RETRYABLE = (408, 425, 429, 500, 502, 503, 504)
"""HTTP status codes after which a request is retried."""
CONTENT_LENGTH = re.compile(rb"(?i)(?:[^\r\n]+\r\n)+?content-length: *(\d+)\r\n(?:[^\r\n]+\r\n)*\r\n")
"""Pattern for response headers that include Content-Length. The group is the length of the body in bytes."""
MAX_REQUESTS = 512
"""Maximum number of concurrent requests. A process can often open only 1024 files and sockets."""
MAX_RECOVERIES = 3
"""Maximum number of recoveries from lost connections per batch."""
NOT_TRAINED = "This batch was not used for training; restart the run to resume from its last checkpoint."


class EngineError(RuntimeError):
    """Raised if an inference server fails, rejects a request or returns an invalid response."""


class ConnectionLost(EngineError):
    """Raised if the server is unavailable. The server may become available again, with different weights."""


class StatusError(EngineError):
    """Raised if the server responded with an HTTP `status` that is neither 200 nor retried."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Client:
    """An HTTP client for JSON. `engines.vllm` documents the arguments."""

    def __init__(self, base_url: str, *, timeout: float = 600.0, patience: float = 300.0, api_key_env: str = ""):
        url = urllib.parse.urlsplit(base_url := str(base_url))  # may be a number or None in a RUN.yaml
        if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc or url.query:
            address = base_url.rpartition("@")[2].partition("?")[0]  # credentials must not be printed
            raise ValueError(
                f"base_url must have the form http://host:port, without credentials or a query; got {show(address)}."
                " Set the server's key in the environment variable that api_key_env names."
            )
        for name, seconds, least in (("timeout", timeout, 1e-3), ("patience", patience, 0.0)):
            if not isinstance(seconds, int | float) or not least <= seconds < math.inf:
                raise ValueError(f"{name} must be a finite number of seconds ≥ {least:g}; got {show(seconds)}.")
        self._path = url.path.rstrip("/").removesuffix("/v1")
        self.base_url = f"{url.scheme}://{url.netloc}{self._path}"
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._netloc, self._host = url.netloc, url.hostname
        self._port = url.port or (80 if self._ssl is None else 443)
        self._timeout, self.patience, self._env = timeout, patience, api_key_env

    async def request(self, path: str, body: Json | None = None, *, retry: Sequence[int] = RETRYABLE) -> Json:
        """Send a POST request, or a GET request if `body` is None, and return the JSON object in the response.

        Returns {} if the response does not start with "{". After a status in `retry`, the request is repeated for up to
        `patience` seconds. Raises `ConnectionLost` if no response arrives or all retries fail, `StatusError` for any
        other status except 200, and `EngineError` if the response contains invalid JSON.
        """
        end, pause = time.monotonic() + self.patience, 0.1
        while True:
            status, content = await self._send_once(path, body)
            text = self._without_key(content.decode(errors="replace").strip())
            if status == 200:
                try:
                    return dict(json.loads(content)) if text.startswith("{") else {}
                except (ValueError, RecursionError) as error:
                    raise EngineError(f"{self.base_url}{path} returned invalid JSON: {show(text)}") from error
            message = f"{self.base_url}{path} returned status {status}: {show(text, 300)}"
            if status in (401, 403):
                message += f". Set the server's key in the environment variable {self._env or 'that api_key_env names'}"
            if status not in retry:
                raise StatusError(message, status)
            if time.monotonic() + pause > end:
                raise ConnectionLost(f"{message}. Gave up after retrying for {self.patience:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10.0)

    async def is_alive(self) -> bool:
        """Return whether the server responds to `GET /health` with status 200, or 404 if it has no such route."""
        try:
            return (await self._send_once("/health", None))[0] in (200, 404)
        except ConnectionLost:
            return False

    def _key(self) -> str:
        """Return the server's API key, or "" if it is not set."""
        return os.environ.get(self._env, "").strip() if self._env else ""

    def _without_key(self, text: str) -> str:
        """Mask the API key in a server's response, which may quote the request headers."""
        key = self._key()
        return text.replace(key, "***") if key else text

    async def _send_once(self, path: str, body: Json | None) -> tuple[int, bytes]:
        """Send a request once over a new connection, and return the status and the body of the response."""
        method, key = "GET" if body is None else "POST", self._key()
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {self._path}{path} HTTP/1.1", f"Host: {self._netloc}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        head += [f"Authorization: Bearer {key}"] if key else []
        try:
            async with asyncio.timeout(self._timeout):
                received = await self._exchange("\r\n".join([*head, "", ""]).encode() + data)
            response = http.client.HTTPResponse(_ResponseBytes(received))  # type: ignore[arg-type]
            response.begin()
            return response.status, response.read()
        except TimeoutError:
            raise ConnectionLost(
                f"{self.base_url}{path} did not respond within {self._timeout:g} s. Check the server's log, or pass a"
                " longer timeout"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = self._without_key(f"{type(error).__name__}: {error}")  # may contain parts of the response
            fix = "Check that the server is running and that base_url is correct"
            raise ConnectionLost(f"{self.base_url}{path}: {cause}. {fix}") from None

    async def _exchange(self, request: bytes) -> bytes:
        """Send bytes over a new connection, and return the server's response."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        try:
            writer.write(request)
            received, end = bytearray(), math.inf
            while len(received) < end and (part := await reader.read(2**16)):
                received += part
                if header := CONTENT_LENGTH.match(received):  # the server may keep the connection open
                    end = header.end() + int(header[1])
            return bytes(received)
        finally:
            writer.close()


class _ResponseBytes:
    """A stand-in for a socket, from which `http.client.HTTPResponse` reads a complete response."""

    def __init__(self, received: bytes):
        self._received = received

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._received)


class Requests:
    """Requests for one batch. If the connection is lost, `restore` is called and the requests are repeated."""

    def __init__(self, client: Client, restore: Callable[[], Awaitable[None]]):
        self._client, self._restore = client, restore
        self.num_lost = 0  # number of lost connections
        self._lock, self._epoch = asyncio.Lock(), 0  # the epoch is the number of recoveries

    async def run(self, tasks: Sequence[Callable[[], Awaitable[Result]]], limit: int = MAX_REQUESTS) -> list[Result]:
        """Run tasks that call `send`, at most `limit` at once, and return their results. An error cancels the rest."""
        slots = asyncio.Semaphore(limit)

        async def limited(task: Callable[[], Awaitable[Result]]) -> Result:
            async with slots:
                return await task()

        try:
            async with asyncio.TaskGroup() as group:
                started = [group.create_task(limited(task)) for task in tasks]
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__
        return [task.result() for task in started]

    async def send(self, request: Callable[[], Awaitable[Result]]) -> Result:
        """Call `request` and return its result. Repeats the call if any request lost its connection in the meantime."""
        while True:
            epoch = self._epoch
            try:
                result = await request()
            except ConnectionLost as lost:
                await self._recover(epoch, lost)
                continue
            async with self._lock:  # wait for a recovery; a restarted server may have responded with different weights
                if epoch == self._epoch:
                    return result

    async def _recover(self, epoch: int, lost: ConnectionLost) -> None:
        """Wait until the server responds, then call `restore`. Only one of the waiting tasks does this."""
        patience = self._client.patience
        async with self._lock:
            while epoch == self._epoch:
                if self.num_lost == MAX_RECOVERIES:
                    message = f"{lost}. The connection was lost {MAX_RECOVERIES + 1} times in this batch. {NOT_TRAINED}"
                    raise EngineError(message) from lost
                self.num_lost += 1
                warnings.warn(f"{lost}. Waiting up to {patience:g} s for the server", stacklevel=3)
                end = time.monotonic() + patience
                while not await self._client.is_alive():
                    await asyncio.sleep(min(1.0, patience / 10))
                    if time.monotonic() > end:
                        raise EngineError(f"{lost}. Gave up after waiting {patience:g} s. {NOT_TRAINED}") from lost
                try:
                    await self._restore()
                    self._epoch += 1
                except ConnectionLost as error:
                    lost = error
