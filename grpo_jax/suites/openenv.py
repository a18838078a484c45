"""OpenEnv: environments behind an HTTP server, one session of it for each completion."""

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
_SECONDS_BETWEEN = 0.5
"""Between two tries to reach a server that is not there."""

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
    """Return the tasks of an [OpenEnv](https://github.com/meta-pytorch/OpenEnv) server, whose environments reward them.

    ```
    reset(seed of the row) ──► text added to the prompt ──► turn ──► step({action: turn}) ──► observation ──► turn ──► …
    ```

    Each completion has a session of its own, by the package's own client, so the server has to allow B·G of them
    (`max_concurrent_envs` of its `create_app`). The reward is the sum of the rewards of its steps; None, not scored,
    where no step had one or the session was lost. The last `state` stands in the environment, for reward functions that
    take `environments`.

    Args:
      base_url: of the server, as `http://127.0.0.1:8000`.
      prompt: of every row: text, which becomes a message of the user, or messages.
      size: rows.
      seed: row i resets the environment with `seed + i`, where it takes one. All completions of a row get the same, and
        what `reset` returns has to be the same for them.
      action: the field of the environment's action that the text of a turn is; or a function of the text.
      observation: the field of its observations that the policy reads. None: the whole observation, as JSON.
      max_turns: turns after which a completion ends; None: when the environment is done.
      timeout: seconds in which the server answers; an environment that takes longer has failed.
      wait: seconds for which `reset` tries to reach a server that is starting, or starting again. A session that is
        lost in the middle cannot be taken up: its environment has failed, as `on_environment_error` has it.

    Raises:
      ValueError: openenv-core is not installed, or a value that is out of range. The server is first asked when a
        completion begins.

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
    """One completion's session; see `openenv`.

    Attributes:
      state: the environment's own, as the server last told it: {} before the end.
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
        self._session = await self._opened()
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

    async def _opened(self) -> Foreign:
        """Return a session, however often the server has to be asked for it."""
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
            await asyncio.sleep(_SECONDS_BETWEEN)

    async def _answered(self, answer: Awaitable[_Result]) -> _Result:
        """Return what the server answers; a session that has failed is closed."""
        try:
            return await answer
        except TimeoutError as error:
            problem: Exception = TimeoutError(f"the server at {self._url} did not answer in time")
            cause: Exception = error
        except RuntimeError as error:  # what the server says itself
            more = "; let it have more sessions (max_concurrent_envs)" if "CAPACITY_REACHED" in str(error) else ""
            problem, cause = RuntimeError(f"{error}{more}"), error
        except Exception as error:  # of the connection, whose class is that of the package underneath
            problem, cause = ConnectionError(f"the session at {self._url} is lost ({one_line(error)})"), error
        await self._close()
        raise problem from cause

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.disconnect()

    def _read(self, result: Foreign) -> str:
        """Take note of a step's reward, and return its observation as text."""
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        seen: Mapping[str, object] = result.observation
        if self._observation is None:
            return as_text(seen)
        if self._observation not in seen:
            raise ValueError(f"observation = {self._observation!r}: the server's have {', '.join(seen)}")
        return as_text(seen[self._observation])
