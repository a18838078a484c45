"""An agent for the `verifiers` package that uses the policy as its model: a chat with tools, run in this process.

```
the environment's run ──► policy_agent ──► a `verifiers` rollout: tools, stops, hooks, limits, scores
the rollout ──► ToolChat ──► the rollout's model server ──► Conversation ──► the policy
```

`verifiers` supports a harness in the caller's process if the harness requests each turn from the rollout's model
server. This server records the conversation, stops the rollout, and forwards requests to a `Conversation`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TypeAlias

from grpo_jax.messages import import_extra, show
from grpo_jax.rollout.tools import as_text
from grpo_jax.types import Foreign, Json, Message, Messages

PACKAGE = "verifiers"
V1 = "verifiers.v1"

Results: TypeAlias = list[tuple[str, bool]]
"""Pairs (result, True if the call failed) for the calls in a turn."""


class Conversation:
    """A `verifiers` model client that passes the policy's turns and the episode's replies between concurrent tasks.

    Attributes:
      trace: `verifiers` trace of the conversation, or None before it starts.
      schemas: tool schemas in the prompt, or None if not yet known.
      problems: reasons why calls could not be parsed, keyed by call id.
      failed: ids of failed calls.
    """

    def __init__(self, schemas: list[Json] | None, prompt: Messages):
        self.trace: Foreign = None
        self.schemas = schemas
        self.problems: dict[str, str] = {}
        self.failed: set[str] = set()
        self._seen = list(map(_role_and_text, prompt))  # prefix of the messages in every request
        self._ids = map("call_{}".format, itertools.count())
        self._turns: asyncio.Queue[Message | None] = asyncio.Queue()  # the policy's turns, then None
        self._replies: asyncio.Queue[str | Results | None] = asyncio.Queue()  # the episode's replies, then None

    @property
    def policy_ended(self) -> bool:
        return not self._turns.empty()

    def end_policy(self) -> None:
        """End the policy's turns. Further requests for a turn are rejected."""
        self._turns.put_nowait(None)

    def end_episode(self) -> None:
        """Make all further calls to `reply` return None."""
        self._replies.put_nowait(None)

    async def add_turn(self, message: Message, problems: Sequence[str] = ()) -> None:
        """Add a turn by the policy. `problems` describes calls that could not be parsed."""
        functions = [dict(call["function"]) for call in message.get("tool_calls", ())]
        for function in functions:
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"])
        functions += [{"name": "", "arguments": ""} for _ in problems]
        calls: list[Json] = [{"id": next(self._ids), "type": "function", "function": one} for one in functions]
        malformed = calls[len(calls) - len(problems) :]
        self.problems |= {call["id"]: problem for call, problem in zip(malformed, problems, strict=True)}
        reasoning, end, content = (message["content"] or "").rpartition("</think>")
        turn: Message = {"role": "assistant", "content": content.lstrip() if end else content}
        if reasoning := reasoning.strip().removeprefix("<think>").strip():
            turn["reasoning_content"] = reasoning
        if calls:
            turn["tool_calls"] = calls
        await self._turns.put(turn)

    async def reply(self) -> str | Results | None:
        """Return the episode's next reply: a message, call results, or None if the episode has ended."""
        reply = await self._replies.get()
        if reply is None:
            self.end_episode()  # later calls also return None
        return reply

    async def get_response(self, dialect: Foreign, body: Json, *_: object, **__: object) -> Foreign:
        """Return the policy's turn for a request from the model server. Part of the `verifiers` client interface."""
        messages: Messages = body["messages"]
        if list(map(_role_and_text, messages[: len(self._seen)])) != self._seen:
            raise ValueError("the environment must not change earlier messages, which are part of the completion")
        new = messages[len(self._seen) :]
        results = [(_text(one), one["tool_call_id"] in self.failed) for one in new if one["role"] == "tool"]
        if results and len(results) < len(new):
            raise ValueError("messages from the environment after tool results are not supported")
        await self._replies.put(results or "\n\n".join(map(_text, new)))
        message = await self._turns.get()
        if message is None:
            self.end_policy()  # later requests also fail
            raise RuntimeError("the completion has ended")
        self._seen = [*map(_role_and_text, messages), _role_and_text(message)]
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        raw = {"id": "policy", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(as_text(part.get("text", part)) for part in content)


def _role_and_text(message: Message) -> tuple[str, str]:
    return message["role"], _text(message)


class Servers:
    """A taskset's model server and tool servers, shared by all episodes until the process exits."""

    _stack = contextlib.AsyncExitStack()  # never closed, because `verifiers` stops its processes at exit

    def __init__(self, environment: Foreign):
        self.environment = environment
        self._starting: asyncio.Task[tuple[Foreign, Mapping[str, Foreign]]] | None = None

    async def start(self) -> tuple[Foreign, Mapping[str, Foreign]]:
        """Start the servers at the first call. Returns the model server and a dict that contains the tool servers."""
        self._starting = self._starting or asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> tuple[Foreign, Mapping[str, Foreign]]:
        tools = await self._stack.enter_async_context(self.environment.shared_tools())
        secrets = tuple(tool.state_secret for tool in tools.values() if tool.state_secret)
        models = import_extra(f"{V1}.interception", PACKAGE).InterceptionServer(state_service_secrets=secrets)
        await self._stack.enter_async_context(models)
        await self.environment.start()
        return models, tools


class _ModelServer:
    """A wrapper around a `verifiers` model server that forwards a rollout's requests to a `Conversation`."""

    def __init__(self, server: Foreign, conversation: Conversation):
        self._server, self._conversation = server, conversation

    @contextlib.asynccontextmanager
    async def acquire(self, session: Foreign) -> AsyncIterator[Foreign]:
        async with self._server.acquire(session) as slot:
            session.client = self._conversation
            yield slot


def policy_agent(
    conversation: Conversation, models: Foreign, tools: Mapping[str, Foreign], name: str, config: Foreign
) -> Foreign:
    """Return a `verifiers.v1.Agent` for one episode, with the policy as its model and a `ToolChat` as its harness."""
    v1 = import_extra(V1, PACKAGE)
    clients = import_extra(f"{V1}.configs.client", PACKAGE)
    unused = clients.EvalClientConfig(base_url="http://127.0.0.1", api_key_var="NO_KEY")
    config = config.model_copy(update={"model": "policy", "client": unused})
    agent = v1.Agent(config, interception=_ModelServer(models, conversation))

    def start(trace: Foreign) -> None:
        if conversation.trace is not None:
            raise ValueError("the environment has several conversations per episode, but only one is supported")
        trace.agent.name, conversation.trace = name, trace

    async def install(_: Foreign) -> None:
        """Do nothing: the chat does not need a program."""

    async def open_chat(*arguments: Foreign, tool_interception_url: str | None = None) -> ToolChat:
        _, trace, _, endpoint, secret, mcp_urls, data = arguments
        chat = ToolChat(conversation, trace, f"{endpoint}/chat/completions", secret)
        try:
            await chat.open(mcp_urls, *agent.harness.resolve_prompt(data))
        except BaseException:
            await chat.close()
            raise
        return chat

    agent.run = functools.partial(agent.run, tools=tools, on_trace=start)
    agent.interaction = functools.partial(agent.interaction, tools=tools, on_trace=start)
    agent.harness.setup, agent.harness.session = install, open_chat
    return agent


def _tool_error(name: str, error: BaseException) -> Foreign:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = f"{type(error).__name__}: {error}"
    return import_extra(V1, PACKAGE).ToolsetError(f"the tool server of {name} does not respond ({cause})")


class ToolChat:
    """A chat with tools. Implements the part of `verifiers.v1.HarnessSession` that rollouts use."""

    def __init__(self, conversation: Conversation, trace: Foreign, url: str, secret: str):
        self._conversation, self._trace, self._url = conversation, trace, url
        self._messages: Messages = []
        self._tools: list[Json] = []
        self._origins: dict[str, tuple[str, str]] = {}  # tool → (server, name on the server)
        self._servers: dict[str, Foreign] = {}
        self._stack = contextlib.AsyncExitStack()
        httpx = import_extra("httpx", PACKAGE)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, headers={"Authorization": f"Bearer {secret}"})

    async def open(self, urls: Mapping[str, str], system: str | None, prompt: Foreign) -> None:
        """Connect to the tool servers and add the prompt."""
        await self._stack.enter_async_context(self._http)
        if urls:
            described = {"mcpServers": {name: {"url": url} for name, url in urls.items()}}
            connect = import_extra(f"{V1}.harnesses.utils.mcp", PACKAGE).connect_mcp
            try:
                self._tools, self._origins, self._servers = await connect(described, self._stack)
            except Exception as error:
                raise _tool_error(", ".join(urls), error) from error
        if self._conversation.schemas is None:
            self._conversation.schemas = self._tools
        elif self._conversation.schemas != self._tools:
            raise ValueError("this task's tools differ from the first task's tools; use one set of tools")
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            self._messages.append({"role": "user", "content": prompt})
        else:
            self._add(prompt or ())

    def _add(self, messages: Sequence[Foreign]) -> None:
        self._messages += map(import_extra(f"{V1}.dialects.chat", PACKAGE).message_to_wire, messages)

    async def turn(self, messages: Sequence[Foreign] | None = None) -> None:
        """Run the chat until a turn has no calls, or until the rollout or the policy ends."""
        self._add(messages or ())
        while (reply := await self._request()) is not None:
            self._messages.append(reply)
            for call in reply.get("tool_calls", ()):
                text, failed = await self._call(call)
                if failed:
                    self._conversation.failed.add(call["id"])
                name = call["function"]["name"]
                self._messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
            if "tool_calls" not in reply:
                return

    async def _request(self) -> Message | None:
        """Request a turn. Returns None if the rollout or the policy has ended."""
        tools = {"tools": self._tools} if self._tools else {}
        response = await self._http.post(self._url, json={"model": "policy", "messages": self._messages, **tools})
        if response.is_success:
            return response.json()["choices"][0]["message"]
        if self._trace.stop_condition is None and not self._conversation.policy_ended:
            raise import_extra(V1, PACKAGE).HarnessError(as_text(response.text, limit=1000))
        return None

    async def _call(self, call: Json) -> tuple[str, bool]:
        """Run a call. Returns its result and whether it failed."""
        name, written = call["function"]["name"], call["function"]["arguments"]
        if call["id"] in self._conversation.problems:
            return f"Error: {self._conversation.problems[call['id']]}", True
        try:
            arguments = json.loads(written)
        except ValueError:
            arguments = written
        if name not in self._origins:
            return f"Error: there is no tool {name!r}; available: {', '.join(self._origins)}", True
        if not isinstance(arguments, dict):
            return f"Error: {name}: the arguments must be a JSON object; got {show(arguments)}", True
        server, inner = self._origins[name]
        try:
            result = await self._servers[server].run(lambda client: client.call_tool(inner, arguments))
        except Exception as error:  # the server failed; errors raised by the tool are part of its result
            raise _tool_error(name, error) from error
        content = import_extra(f"{V1}.harnesses.utils.mcp", PACKAGE).mcp_content_to_chat_content(result.content)
        return as_text(_text({"role": "tool", "content": content})), bool(result.is_error)

    async def close(self) -> None:
        """Disconnect from the tool servers. Can be called repeatedly."""
        await self._stack.aclose()
