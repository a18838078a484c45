"""The policy as an agent of verifiers: a chat with tools, whose model is the policy being sampled.

```
an environment's run ──► PolicyAgent ──► a rollout of verifiers: tools, stops, hooks, limits, scores
the rollout ──► ToolChat ──► the rollout's model server ──► Conversation ──► the policy
```

verifiers lets a harness run in the caller's process if it requests each turn from the rollout's model server. That
server keeps the record and stops the rollout. It forwards requests to a client, which is `Conversation` here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TypeAlias

from grpo_jax.messages import import_extra, show
from grpo_jax.rewards.calls import event_loop
from grpo_jax.rollout.tools import as_text
from grpo_jax.suites.suite import Foreign
from grpo_jax.types import Json, Message, Messages

PACKAGE = "verifiers"
V1 = "verifiers.v1"

Results: TypeAlias = list[tuple[str, bool]]
"""For each call of a turn its text, and whether it failed."""


class Conversation:
    """The turns of the policy and the replies of an episode, which wait for each other; a client of verifiers.

    Attributes:
      trace: verifiers' record of the conversation; None before it begins.
      schemas: of the tools that the policy was shown; None before they are known.
      problems: id of a call that could not be parsed → why.
      failed: ids of the calls that failed.
    """

    def __init__(self, schemas: list[Json] | None, prompt: Messages):
        self.trace: Foreign = None
        self.schemas = schemas
        self.problems: dict[str, str] = {}
        self.failed: set[str] = set()
        self._seen = list(map(_plain, prompt))  # messages that the policy has seen, which every request begins with
        self._ids = map("call_{}".format, itertools.count())
        self._turns: asyncio.Queue[Message | None] = asyncio.Queue()  # of the policy; None: it has ended
        self._replies: asyncio.Queue[str | Results | None] = asyncio.Queue()  # of the episode; None: it has ended

    @property
    def policy_ended(self) -> bool:
        """Whether the policy has ended."""
        return not self._turns.empty()

    def end_policy(self) -> None:
        """Answer no further request."""
        self._turns.put_nowait(None)

    def end_episode(self) -> None:
        """Reply None from now on."""
        self._replies.put_nowait(None)

    async def add_turn(self, message: Message, problems: Sequence[str] = ()) -> None:
        """Add a turn of the policy; `problems` are its calls that could not be parsed."""
        functions = [dict(call["function"]) for call in message.get("tool_calls", ())]
        for function in functions:
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"])
        functions += [{"name": "", "arguments": ""} for _ in problems]
        calls: list[Json] = [{"id": next(self._ids), "type": "function", "function": one} for one in functions]
        unread = calls[len(calls) - len(problems) :]
        self.problems |= {call["id"]: problem for call, problem in zip(unread, problems, strict=True)}
        thought, end, content = (message["content"] or "").rpartition("</think>")
        turn: Message = {"role": "assistant", "content": content.lstrip() if end else content}
        if thought := thought.strip().removeprefix("<think>").strip():
            turn["reasoning_content"] = thought
        if calls:
            turn["tool_calls"] = calls
        await self._turns.put(turn)

    async def reply(self) -> str | Results | None:
        """Return the reply of the episode: text, or the results of calls; None when it has ended."""
        reply = await self._replies.get()
        if reply is None:
            self.end_episode()  # for further calls
        return reply

    async def get_response(self, dialect: Foreign, body: Json, *_: object, **__: object) -> Foreign:
        """Answer a request of the model server by a turn of the policy: the method of a client of verifiers."""
        messages: Messages = body["messages"]
        if list(map(_plain, messages[: len(self._seen)])) != self._seen:
            raise ValueError("the environment changes earlier messages, which the policy has seen")
        new = messages[len(self._seen) :]
        called = [(_text(one), one["tool_call_id"] in self.failed) for one in new if one["role"] == "tool"]
        if called and len(called) < len(new):
            raise ValueError("the environment adds messages to the results of tools")
        await self._replies.put(called or "\n\n".join(map(_text, new)))
        message = await self._turns.get()
        if message is None:
            self.end_policy()  # for further requests
            raise RuntimeError("the completion has ended")
        self._seen = [*map(_plain, messages), _plain(message)]
        reason = "tool_calls" if "tool_calls" in message else "stop"
        raw: Json = {
            "id": "policy",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        }
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def _text(message: Message) -> str:
    """Return the text of a message."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(as_text(part.get("text", part)) for part in content)


def _plain(message: Message) -> tuple[str, str]:
    """Return the role and text of a message, for comparison."""
    return message["role"], _text(message)


class Servers:
    """The tools and the model server that all episodes of an environment share in a process.

    They start with the first episode, and end with this object or the process.
    """

    def __init__(self, environment: Foreign):
        self.environment = environment
        self._ready: asyncio.Future[tuple[Foreign, Mapping[str, Foreign]]] | None = None

    async def ready(self) -> tuple[Foreign, Mapping[str, Foreign]]:
        """Return the model server, and the shared tool servers by name."""
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
            self._ready, ended = asyncio.get_running_loop().create_future(), asyncio.Event()
            holding = asyncio.create_task(_hold(self.environment, self._ready, ended))
            weakref.finalize(self, _end, ended, holding).atexit = False  # verifiers ends its own processes then
        return await asyncio.shield(self._ready)


def _end(ended: asyncio.Event, _: asyncio.Task[None]) -> None:
    event_loop().call_soon_threadsafe(ended.set)


async def _hold(
    environment: Foreign, ready: asyncio.Future[tuple[Foreign, Mapping[str, Foreign]]], ended: asyncio.Event
) -> None:
    """Start what episodes share, and end it in the same task, as its context managers require."""
    interception = import_extra(f"{V1}.interception", PACKAGE)
    try:
        async with contextlib.AsyncExitStack() as stack:
            shared = await stack.enter_async_context(environment.shared_tools())
            secrets = tuple(tool.state_secret for tool in shared.values() if tool.state_secret)
            models = await stack.enter_async_context(interception.InterceptionServer(state_service_secrets=secrets))
            stack.push_async_callback(environment.stop)
            await environment.start()
            ready.set_result((models, shared))
            await ended.wait()
    except Exception as error:
        if not ready.done():  # otherwise the process may be ending, where verifiers cleans up a second time
            ready.set_exception(error)


class _ModelServer:
    """A model server of verifiers that sends the requests of a rollout to a `Conversation`."""

    def __init__(self, server: Foreign, conversation: Conversation):
        self._server, self._conversation = server, conversation

    @contextlib.asynccontextmanager
    async def acquire(self, session: Foreign) -> AsyncIterator[Foreign]:
        async with self._server.acquire(session) as slot:
            session.client = self._conversation
            yield slot


class PolicyAgent:
    """The part of `verifiers.v1.Agent` that environments call, played by the policy.

    `run` does a task and returns its scored trace; `interaction` is a conversation of a task, scored at its end.
    """

    trainable = True

    def __init__(
        self, conversation: Conversation, models: Foreign, shared: Mapping[str, Foreign], name: str, config: Foreign
    ):
        v1 = import_extra(V1, PACKAGE)
        clients = import_extra(f"{V1}.configs.client", PACKAGE)
        unused = clients.EvalClientConfig(base_url="http://127.0.0.1", api_key_var="NO_KEY")
        config = config.model_copy(update={"model": "policy", "client": unused})
        self._conversation, self._name = conversation, name
        self._agent = v1.Agent(config, interception=_ModelServer(models, conversation))
        self.config = self._agent.config
        self.run = functools.partial(self._agent.run, tools=shared, on_trace=self._begin)
        self.interaction = functools.partial(self._agent.interaction, tools=shared, on_trace=self._begin)
        harness = self._agent.harness
        harness.setup, harness.session = _install_nothing, self._session

    def _begin(self, trace: Foreign) -> None:
        if self._conversation.trace is not None:
            raise ValueError("the environment has several conversations in an episode, and a completion is one")
        trace.agent.name, self._conversation.trace = self._name, trace

    async def _session(
        self,
        _: Foreign,
        trace: Foreign,
        runtime: Foreign,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Foreign,
        tool_interception_url: str | None = None,
    ) -> ToolChat:
        """Open the chat of a rollout, with its tools."""
        chat = ToolChat(self._conversation, trace, f"{endpoint}/chat/completions", secret, tool_interception_url)
        try:
            await chat.open(mcp_urls, *self._agent.harness.resolve_prompt(data))
        except BaseException:
            await chat.close()
            raise
        return chat


async def _install_nothing(_: Foreign) -> None:
    """The setup of a harness: the chat runs in this process."""


def _unanswered(name: str, error: BaseException) -> Foreign:
    """Return the error for a tool server that does not answer, whose cause may be nested in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = f"{type(error).__name__}: {error}"
    return import_extra(V1, PACKAGE).ToolsetError(f"the server of {name} does not answer ({cause})")


class ToolChat:
    """A chat with tools: the part of `verifiers.v1.HarnessSession` that a rollout calls."""

    def __init__(self, conversation: Conversation, trace: Foreign, url: str, secret: str, gate: str | None):
        self._conversation, self._trace, self._url, self._gate = conversation, trace, url, gate
        self._messages: Messages = []
        self._tools: list[Json] = []
        self._places: dict[str, tuple[str, str]] = {}  # tool → server and its name there
        self._servers: dict[str, Foreign] = {}
        self._stack = contextlib.AsyncExitStack()
        httpx = import_extra("httpx", PACKAGE)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, headers={"Authorization": f"Bearer {secret}"})

    async def open(self, urls: Mapping[str, str], system: str | None, prompt: Foreign) -> None:
        """Connect to the tools, and write the prompt."""
        await self._stack.enter_async_context(self._http)
        if urls:
            described = {"mcpServers": {name: {"url": url} for name, url in urls.items()}}
            connect = import_extra(f"{V1}.harnesses.utils.mcp", PACKAGE).connect_mcp
            try:
                self._tools, self._places, self._servers = await connect(described, self._stack)
            except Exception as error:
                raise _unanswered(", ".join(urls), error) from error
        if self._conversation.schemas is None:
            self._conversation.schemas = self._tools
        elif self._conversation.schemas != self._tools:
            raise ValueError("the tools of this task differ from the first task's, which all prompts show")
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            self._messages.append({"role": "user", "content": prompt})
        else:
            self._add(prompt or ())

    def _add(self, messages: Sequence[Foreign]) -> None:
        self._messages += map(import_extra(f"{V1}.dialects.chat", PACKAGE).message_to_wire, messages)

    async def turn(self, messages: Sequence[Foreign] | None = None) -> None:
        """Continue until the policy makes a turn without a call, or something stops the rollout."""
        self._add(messages or ())
        while (reply := await self._request()) is not None:
            self._messages.append(reply)
            for call in reply.get("tool_calls", ()):
                text, failed = await self._result(call)
                if failed:
                    self._conversation.failed.add(call["id"])
                name = call["function"]["name"]
                self._messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
            if "tool_calls" not in reply:
                return

    async def _request(self) -> Message | None:
        """Request a turn; None if the rollout was stopped or the policy has ended."""
        tools = {"tools": self._tools} if self._tools else {}
        response = await self._http.post(self._url, json={"model": "policy", "messages": self._messages, **tools})
        if response.is_success:
            reply: Message = response.json()["choices"][0]["message"]
            return reply
        if self._trace.stop_condition is None and not self._conversation.policy_ended:
            raise import_extra(V1, PACKAGE).HarnessError(as_text(response.text, limit=1000))
        return None

    async def _result(self, call: Json) -> tuple[str, bool]:
        """Return the text of a call, and whether it failed."""
        name, written = call["function"]["name"], call["function"]["arguments"]
        if call["id"] in self._conversation.problems:
            return f"Error: {self._conversation.problems[call['id']]}", True
        try:
            arguments = json.loads(written)
        except ValueError:
            arguments = written
        if (denied := await self._denied(call, arguments)) is not None:
            return denied, True
        if name not in self._places:
            return f"Error: there is no tool {name!r}; there are {', '.join(self._places)}", True
        if not isinstance(arguments, dict):
            return f"Error: {name}: the arguments are {show(arguments)}; give a JSON object", True
        server, inner = self._places[name]
        try:
            result = await self._servers[server].run(lambda client: client.call_tool(inner, arguments))
        except Exception as error:  # the server's; an exception of the tool is in its result
            raise _unanswered(name, error) from error
        content = import_extra(f"{V1}.harnesses.utils.mcp", PACKAGE).mcp_content_to_chat_content(result.content)
        return as_text(_text({"role": "tool", "content": content})), bool(result.is_error)

    async def _denied(self, call: Json, arguments: object) -> str | None:
        """Return the text that replaces a call which the rollout denies; None for an allowed call."""
        if self._gate is None:
            return None
        request = {"tool_call_id": call["id"], "name": call["function"]["name"], "arguments": arguments}
        response = await self._http.post(self._gate, json=request)
        verdict = response.json() if response.is_success else {"action": "stop", "reason": response.text}
        if verdict["action"] == "stop":
            raise import_extra(V1, PACKAGE).HarnessError(as_text(verdict["reason"], limit=1000))
        return _text(verdict["message"]) if verdict["action"] == "deny" else None

    async def close(self) -> None:
        """Disconnect from the tools; may be called repeatedly."""
        await self._stack.aclose()
