"""An agent for the `verifiers` package. Its model is the policy, and its harness is a chat that runs in this process.

The environment runs a `verifiers` rollout, whose harness is a `Chat`. The chat requests each turn from the rollout's
model server, which records the conversation, checks stop conditions, and forwards requests to a `Conversation`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence

from grpo_jax.messages import import_extra
from grpo_jax.rollout.tools import as_text
from grpo_jax.types import Foreign, Json, Message, Messages

PACKAGE = "verifiers"
V1 = "verifiers.v1"


class Conversation:
    """A `verifiers` model client that passes the policy's turns and the episode's replies between concurrent tasks."""

    def __init__(self, prompt: Messages):
        self.trace: Foreign = None  # the `verifiers` trace; None before the conversation starts
        self._seen = list(map(_role_and_text, prompt))  # prefix of the messages in every request
        self._turns: asyncio.Queue[Message | None] = asyncio.Queue()  # the policy's turns, then None
        self._replies: asyncio.Queue[str | None] = asyncio.Queue()  # the episode's replies, then None

    @property
    def policy_ended(self) -> bool:
        return not self._turns.empty()

    def end_policy(self) -> None:
        """End the policy's turns. Further requests for a turn are rejected."""
        self._turns.put_nowait(None)

    def end_episode(self) -> None:
        """Make `reply` return None once all pending replies have been returned."""
        self._replies.put_nowait(None)

    async def add_turn(self, text: str) -> None:
        """Add a turn by the policy. Text before `</think>` becomes the message's `reasoning_content`."""
        reasoning, end, content = text.rpartition("</think>")
        turn: Message = {"role": "assistant", "content": content.lstrip() if end else content}
        if reasoning := reasoning.strip().removeprefix("<think>").strip():
            turn["reasoning_content"] = reasoning
        await self._turns.put(turn)

    async def reply(self) -> str | None:
        """Return the episode's next message, or None if the episode has ended."""
        reply = await self._replies.get()
        if reply is None:
            self.end_episode()  # later calls also return None
        return reply

    async def get_response(self, dialect: Foreign, body: Json, *_: object, **__: object) -> Foreign:
        """Answer a request to the model with the policy's turn. Part of the `verifiers` client interface."""
        messages: Messages = body["messages"]
        if list(map(_role_and_text, messages[: len(self._seen)])) != self._seen:
            raise ValueError("the environment must not change earlier messages, which are part of the completion")
        await self._replies.put("\n\n".join(map(_text, messages[len(self._seen) :])))
        message = await self._turns.get()
        if message is None:
            self.end_policy()  # later requests also fail
            raise RuntimeError("the completion has ended")
        self._seen = [*map(_role_and_text, messages), _role_and_text(message)]
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        raw = {"id": "policy", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(as_text(part.get("text", part)) for part in content)


def _role_and_text(message: Message) -> tuple[str, str]:
    return message["role"], _text(message)


class SharedModelServer:
    """A taskset's environment and its model server, which all episodes share until the process exits."""

    _stack = contextlib.AsyncExitStack()  # never closed, because `verifiers` stops its processes at exit

    def __init__(self, environment: Foreign):
        self.environment = environment
        self._starting: asyncio.Task[Foreign] | None = None

    async def start(self) -> Foreign:
        """Return the server, which is started on the first call."""
        self._starting = self._starting or asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Foreign:
        server = import_extra(f"{V1}.interception", PACKAGE).InterceptionServer()
        await self._stack.enter_async_context(server)
        await self.environment.start()
        return server


class _ForwardingServer:
    """A wrapper around a `verifiers` model server that forwards a rollout's requests to a `Conversation`."""

    def __init__(self, server: Foreign, conversation: Conversation):
        self._server, self._conversation = server, conversation

    @contextlib.asynccontextmanager
    async def acquire(self, session: Foreign) -> AsyncIterator[Foreign]:
        async with self._server.acquire(session) as slot:
            session.client = self._conversation
            yield slot


def policy_agent(conversation: Conversation, server: Foreign, name: str, config: Foreign) -> Foreign:
    """Return a `verifiers.v1.Agent` for one episode, with the policy as its model and a `Chat` as its harness."""
    v1 = import_extra(V1, PACKAGE)
    clients = import_extra(f"{V1}.configs.client", PACKAGE)
    unused = clients.EvalClientConfig(base_url="http://127.0.0.1", api_key_var="NO_KEY")
    config = config.model_copy(update={"model": "policy", "client": unused})
    agent = v1.Agent(config, interception=_ForwardingServer(server, conversation))

    def start(trace: Foreign) -> None:
        if conversation.trace is not None:
            raise ValueError("the environment has several conversations per episode, but only one is supported")
        trace.agent.name, conversation.trace = name, trace

    async def install(_: Foreign) -> None:
        """Do nothing: the chat does not need a program."""

    async def open_chat(*arguments: Foreign, **_: Foreign) -> Chat:
        _, trace, _, endpoint, secret, _, data = arguments
        messages = opening_messages(*agent.harness.resolve_prompt(data))
        return Chat(conversation, trace, f"{endpoint}/chat/completions", secret, messages)

    agent.run = functools.partial(agent.run, on_trace=start)
    agent.interaction = functools.partial(agent.interaction, on_trace=start)
    agent.harness.setup, agent.harness.session = install, open_chat
    return agent


def opening_messages(system: str | None, prompt: Foreign) -> Messages:
    """Return a task's first messages. `prompt` is a string, a list of `verifiers` messages, or None."""
    messages: Messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else _to_json(prompt or ()))


def _to_json(messages: Sequence[Foreign]) -> Messages:
    return [*map(import_extra(f"{V1}.dialects.chat", PACKAGE).message_to_wire, messages)]


class Chat:
    """A chat that starts with `messages`. Implements the part of `verifiers.v1.HarnessSession` that rollouts use."""

    def __init__(self, conversation: Conversation, trace: Foreign, url: str, secret: str, messages: Messages):
        self._conversation, self._trace, self._url, self._messages = conversation, trace, url, messages
        httpx = import_extra("httpx", PACKAGE)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, headers={"Authorization": f"Bearer {secret}"})

    async def turn(self, messages: Sequence[Foreign] | None = None) -> None:
        """Add messages and the policy's turn. If the rollout or the policy's turns have ended, no turn is added."""
        self._messages += _to_json(messages or ())
        response = await self._http.post(self._url, json={"model": "policy", "messages": self._messages})
        if response.is_success:
            self._messages.append(response.json()["choices"][0]["message"])
        elif self._trace.stop_condition is None and not self._conversation.policy_ended:
            raise import_extra(V1, PACKAGE).HarnessError(as_text(response.text, limit=1000))

    async def close(self) -> None:
        """Close the connection to the model server. Can be called repeatedly."""
        await self._http.aclose()
