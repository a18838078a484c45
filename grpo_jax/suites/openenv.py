"""OpenEnv: environments behind an HTTP server, with a session for each completion."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from grpo_jax.messages import import_extra, one_line, show
from grpo_jax.rollout.tools import as_text
from grpo_jax.suites.suite import Foreign, Suite, check_whole_number
from grpo_jax.types import Json, Messages

_PACKAGE = "openenv-core"
_RETRY_SECONDS = 0.5

_Result = TypeVar("_Result")


def openenv(
    base_url: str,
    *,
    prompt: str | Messages,
    size: int = 500,
    seed: int = 0,
    action: str | Callable[[str], Json] = "message",
    observation: str | None = None,
    max_turns: int | None = None,
    timeout: float = 60.0,
    wait: float = 60.0,
) -> Suite:
    """Return the tasks of an [OpenEnv](https://github.com/meta-pytorch/OpenEnv) server, rewarded by its environments.

    ```
    reset(seed of the row) ──► text added to the prompt ──► turn ──► step({action: turn}) ──► observation ──► turn ──► …
    ```

    Each completion has its own session, so the server has to allow B·G of them (`max_concurrent_envs` of `create_app`).
    The reward is the sum of the rewards of its steps; None if no step had one or the session was lost. Reward functions
    that take `environments` find the last `state` of the environment there.

    Args:
      base_url: of the server, such as `http://127.0.0.1:8000`.
      prompt: of every row: text, which becomes a message of the user, or messages.
      size: rows.
      seed: row i resets the environment with `seed + i`. `reset` must return the same for all completions of a row.
      action: the field of the environment's action that is set to the text of a turn; or a function of the text.
      observation: the field of its observations that the policy reads. None: the whole observation, as JSON.
      max_turns: turns after which a completion ends; None: when the environment is done.
      timeout: seconds for an answer of the server, after which the environment has failed.
      wait: seconds for which `reset` tries to reach a server that is starting. A session that is lost later has failed,
        which `on_environment_error` handles.

    Raises:
      ValueError: openenv-core is not installed, or a value is out of range.

    Example:
      >>> openenv("127.0.0.1:8000", prompt="Say something.")
      Traceback (most recent call last):
      ValueError: base_url = '127.0.0.1:8000': begin with http:// or https://
    """
    if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url = {show(base_url)}: begin with http:// or https://")
    check_whole_number("size", size, 1)
    check_whole_number("seed", seed, 0)
    if max_turns is not None:
        check_whole_number("max_turns", max_turns, 1)
    for name, seconds in (("timeout", timeout), ("wait", wait)):
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"{name} = {show(seconds)}: give a positive number of seconds")
    client = import_extra("openenv.core", _PACKAGE).GenericEnvClient
    asked: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    connect = functools.partial(client, base_url=base_url, message_timeout_s=timeout)
    action_of = action if callable(action) else lambda text: {action: text}
    make = functools.partial(OpenEnv, connect, base_url, action_of, observation, max_turns, wait)
    rows = [{"prompt": asked, "seed": seed + index} for index in range(size)]
    return Suite(rows=rows, environment_factory=make)


class OpenEnv:
    """The session of one completion; see `openenv`.

    Attributes:
      state: the environment's state at the end; {} before.
    """

    def __init__(
        self,
        connect: Callable[[], Foreign],
        base_url: str,
        action_of: Callable[[str], Json],
        observation: str | None,
        max_turns: int | None,
        wait: float,
    ):
        self._connect, self._url, self._action_of, self._observation = connect, base_url, action_of, observation
        self._turns_left, self._wait = max_turns, wait
        self._session: Foreign = None
        self._rewards: list[float] = []
        self.state: Json = {}

    async def reset(self, seed: int, **_: object) -> str:
        """Open the session, and return its first observation."""
        self._session = await self._open()
        return self._read(await self._answered(self._session.reset(seed=seed)))

    async def respond(self, text: str) -> str | None:
        """Take a step by a turn's text; None when the environment is done."""
        result = await self._answered(self._session.step(dict(self._action_of(text))))
        said = self._read(result)
        if self._turns_left is not None:
            self._turns_left -= 1
        return None if result.done or self._turns_left == 0 else said

    async def get_reward(self) -> float | None:
        """Close the session, and return the sum of its rewards."""
        if self._session is None:
            return None
        self.state = await self._answered(self._session.state())
        await self._close()
        return sum(self._rewards) if self._rewards else None

    async def _open(self) -> Foreign:
        """Return a session; try again while the server is starting."""
        until = time.monotonic() + self._wait
        while True:
            session = self._connect()
            try:
                return await session.connect()
            except (OSError, TimeoutError) as error:
                if time.monotonic() > until:
                    raise ConnectionError(
                        f"no OpenEnv server answers at {self._url} ({one_line(error)}): start it, or correct base_url"
                    ) from error
            await asyncio.sleep(_RETRY_SECONDS)

    async def _answered(self, answer: Awaitable[_Result]) -> _Result:
        """Return the answer of the server; close a session that has failed."""
        try:
            return await answer
        except TimeoutError as error:
            problem: Exception = TimeoutError(f"the server at {self._url} did not answer in time")
            cause: Exception = error
        except RuntimeError as error:  # a message of the server
            more = "; let it have more sessions (max_concurrent_envs)" if "CAPACITY_REACHED" in str(error) else ""
            problem, cause = RuntimeError(f"{error}{more}"), error
        except Exception as error:  # of the connection; its class depends on the client's HTTP package
            problem, cause = ConnectionError(f"the session at {self._url} is lost ({one_line(error)})"), error
        await self._close()
        raise problem from cause

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.disconnect()

    def _read(self, result: Foreign) -> str:
        """Record the reward of a step, and return its observation as text."""
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        seen: Mapping[str, object] = result.observation
        if self._observation is None:
            return as_text(seen)
        if self._observation not in seen:
            raise ValueError(f"observation = {self._observation!r}: the server's observations have {', '.join(seen)}")
        return as_text(seen[self._observation])
