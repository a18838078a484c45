"""Environments on an OpenEnv server, with one session per completion."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from grpo_jax.messages import import_extra, one_line
from grpo_jax.rollout.tools import as_text
from grpo_jax.types import Foreign, Json, Messages, Suite

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
    """Return tasks from an [OpenEnv](https://github.com/meta-pytorch/OpenEnv) server, which provides the rewards.

    ```
    reset(seed of the row) ──► text added to the prompt ──► turn ──► step({action: turn}) ──► observation ──► turn ──► …
    ```

    Each completion opens a session, so the server must allow B·G sessions (`max_concurrent_envs` in `create_app`). The
    reward is the sum of the rewards that the server returned for `reset` and all steps, or None if it returned none or
    the session was lost. Reward functions with an argument `environments` can read the final `state` of each session.

    Args:
      base_url: server URL, such as `http://127.0.0.1:8000`.
      prompt: prompt for all rows: messages, or a string that is converted to a user message.
      size: number of rows.
      seed: seed for the first row. Row i resets the environment with `seed + i`. `reset` must return the same
        observation for all completions of a row.
      action: name of the action field for the text of a turn, or a function that converts the text to an action.
      observation: name of the observation field to pass to the policy. If None, all fields are passed, as JSON.
      max_turns: maximum number of turns. If None, the number of turns is not limited.
      timeout: time limit in seconds for each server response.
      wait: time in seconds for which `reset` keeps trying to connect. `on_environment_error` determines how sessions
        that are lost later are handled.
    """
    client = import_extra("openenv.core", _PACKAGE).GenericEnvClient
    messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    connect = functools.partial(client, base_url=base_url, message_timeout_s=timeout)
    action_of = action if callable(action) else lambda text: {action: text}
    make = functools.partial(OpenEnv, connect, base_url, action_of, observation, max_turns, wait)
    return Suite(rows=[{"prompt": messages, "seed": seed + index} for index in range(size)], environment_factory=make)


@dataclasses.dataclass(eq=False)
class OpenEnv:
    """Session for one completion (see `openenv`). `state` is {} until `get_reward` stores the final state."""

    _connect: Callable[[], Foreign]
    _url: str
    _action_of: Callable[[str], Json]
    _observation: str | None
    _max_turns: int | None
    _wait: float
    _session: Foreign = None
    _num_turns: int = 0
    _rewards: list[float] = dataclasses.field(default_factory=list)
    state: Json = dataclasses.field(default_factory=dict)

    async def reset(self, seed: int, **_: object) -> str:
        """Open a session, reset the environment, and return its first observation."""
        self._session = await self._open()
        return self._record(await self._response(self._session.reset(seed=seed)))

    async def respond(self, text: str) -> str | None:
        """Step the environment with the text of a turn. Returns the observation, or None if the environment is done."""
        result = await self._response(self._session.step(dict(self._action_of(text))))
        observation = self._record(result)
        self._num_turns += 1
        return None if result.done or self._num_turns == self._max_turns else observation

    async def get_reward(self) -> float | None:
        """Store the final state and close the session. Returns the reward, or None if there is none (see `openenv`)."""
        if self._session is None:
            return None
        self.state = await self._response(self._session.state())
        await self._close()
        return sum(self._rewards) if self._rewards else None

    async def _open(self) -> Foreign:
        """Open a session. Retries for `wait` seconds, since the server may still be starting."""
        end = time.monotonic() + self._wait
        while True:
            try:
                return await self._connect().connect()
            except ConnectionError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    async def _response(self, response: Awaitable[_Result]) -> _Result:
        """Wait for a response and return it. If this fails, the session is closed."""
        try:
            return await response
        except RuntimeError:  # reported by the server
            await self._close()
            raise
        except Exception as error:
            await self._close()
            fix = "restart the server, or increase timeout if it is slow"
            raise ConnectionError(f"lost the session with {self._url} ({one_line(error)}); {fix}") from error

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.disconnect()

    def _record(self, result: Foreign) -> str:
        """Record a step's reward and return its observation as a string."""
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        fields: Mapping[str, object] = result.observation
        if self._observation is None:
            return as_text(fields)
        if self._observation not in fields:
            raise ValueError(
                f"observation={self._observation!r} must be a field of the server's observations: {', '.join(fields)}"
            )
        return as_text(fields[self._observation])
