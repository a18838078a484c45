"""The policy as an agent of verifiers: its chat with tools, whose model is what is sampled here.

```
an environment's run ──► PolicyAgent ──► a rollout of verifiers: tools, stops, hooks, limits, scores
the rollout ──► PolicyLoop, the chat with tools ──► the rollout's server of models ──► Talk ──► the policy
```

verifiers lets a harness run in the process of the caller, as long as it asks for each turn at the rollout's server of
models. That server keeps the record and stops the rollout; who answers it is a client, and here that is `Talk`.
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


class Talk:
    """The talk of the policy with an episode, each waiting for the other; the client of a server of models.

    Attributes:
      trace: the suite's record of the conversation; None before it begins.
      schemas: of the tools that the policy was shown; None before they are known.
      problems: id of a call that could not be read → why.
      failed: ids of the calls that failed.
    """

    def __init__(self, schemas: list[Json] | None, prompt: Messages):
        self.trace: Foreign = None
        self.schemas = schemas
        self.problems: dict[str, str] = {}
        self.failed: set[str] = set()
        self._known = list(map(_plain, prompt))  # the beginning of each request, which the policy has seen
        self._ids = map("call_{}".format, itertools.count())
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()  # by the policy; None: it will say no more
        self._heard: asyncio.Queue[str | Results | None] = asyncio.Queue()  # by the episode; None: it is over

    @property
    def silent(self) -> bool:
        """Whether the policy says no more."""
        return not self._said.empty()

    async def say(self, message: Message, problems: Sequence[str] = ()) -> None:
        """Say a turn; `problems` are its calls that could not be read."""
        functions = [dict(call["function"]) for call in message.get("tool_calls", ())]
        for function in functions:
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"])
        functions += [{"name": "", "arguments": ""} for _ in problems]
        calls: list[Json] = [
            {"id": next(self._ids), "type": "function", "function": function} for function in functions
        ]
        unread = calls[len(calls) - len(problems) :]
        self.problems |= {call["id"]: problem for call, problem in zip(unread, problems, strict=True)}
        thought, end, content = (message["content"] or "").rpartition("</think>")
        said: Message = {"role": "assistant", "content": content.lstrip() if end else content}
        if thought := thought.strip().removeprefix("<think>").strip():
            said["reasoning_content"] = thought
        await self._said.put({**said, **({"tool_calls": calls} if calls else {})})

    async def hear(self) -> str | Results | None:
        """Return what the episode says: text, or what became of the calls; None when it is over."""
        heard = await self._heard.get()
        if heard is None:
            self._heard.put_nowait(None)  # however often it is asked
        return heard

    def end(self) -> None:
        """The policy says no more."""
        self._said.put_nowait(None)

    def over(self) -> None:
        """The episode says no more."""
        self._heard.put_nowait(None)

    async def get_response(self, dialect: Foreign, body: Json, *_: object, **__: object) -> Foreign:
        """Answer a request for a turn by the policy's own, as a client of verifiers does."""
        messages: Messages = body["messages"]
        if list(map(_plain, messages[: len(self._known)])) != self._known:
            raise ValueError("the environment changes what was said before, and the policy has seen that")
        new = messages[len(self._known) :]
        called = [(_text(one), one["tool_call_id"] in self.failed) for one in new if one["role"] == "tool"]
        if called and len(called) < len(new):
            raise ValueError("the environment adds messages to the results of tools")
        await self._heard.put(called or "\n\n".join(map(_text, new)))
        message = await self._said.get()
        if message is None:
            self.end()
            raise RuntimeError("the policy says no more: its completion is over")
        self._known = [*map(_plain, messages), _plain(message)]
        raw: Json = {
            "id": "policy",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": _finish(message), "message": message}],
        }
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def _finish(message: Message) -> str:
    return "tool_calls" if "tool_calls" in message else "stop"


def _text(message: Message) -> str:
    """Return the text of a message."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(as_text(part.get("text", part)) for part in content)


def _plain(message: Message) -> tuple[str, str]:
    """Return what of a message the policy reads, but for its calls."""
    return message["role"], _text(message)


class Servers:
    """All that the episodes of an environment share in a process: its tools, and the server of models.

    They begin with the first episode, and end with this object, or with the process.
    """

    def __init__(self, environment: Foreign):
        self.environment = environment
        self._ready: asyncio.Future[tuple[Foreign, Mapping[str, Foreign]]] | None = None

    async def ready(self) -> tuple[Foreign, Mapping[str, Foreign]]:
        """Return the server of models, and the shared servers of tools by their names."""
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
    """Begin what episodes share, and end it all in the same task."""
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
        if not ready.done():  # else it is the end, maybe of the process, where verifiers clears up once more
            ready.set_exception(error)


class _Models:
    """A rollout's place at the server of models, where the policy answers."""

    def __init__(self, server: Foreign, talk: Talk):
        self._server, self._talk = server, talk

    @contextlib.asynccontextmanager
    async def acquire(self, session: Foreign) -> AsyncIterator[Foreign]:
        async with self._server.acquire(session) as slot:
            session.client = self._talk
            yield slot


class PolicyAgent:
    """The policy in an agent's seat: what of `verifiers.v1.Agent` a program of an environment calls.

    `run` does a task and returns its scored trace; `interaction` is a conversation of a task, scored at its end.
    `trainable` is True until an environment changes it.
    """

    def __init__(self, talk: Talk, models: Foreign, shared: Mapping[str, Foreign], name: str, config: Foreign):
        v1 = import_extra(V1, PACKAGE)
        clients = import_extra(f"{V1}.configs.client", PACKAGE)
        fixed = {
            "model": "policy",
            "client": clients.EvalClientConfig(base_url="http://127.0.0.1", api_key_var="NO_KEY"),  # nobody asks there
        }
        self._talk, self._name = talk, name
        self._agent = v1.Agent(config.model_copy(update=fixed), interception=_Models(models, talk))
        self.config, self.trainable = self._agent.config, True
        self.run = functools.partial(self._agent.run, tools=shared, on_trace=self._begin)
        self.interaction = functools.partial(self._agent.interaction, tools=shared, on_trace=self._begin)
        harness = self._agent.harness
        harness.setup, harness.session = _no_program, self._session

    def _begin(self, trace: Foreign) -> None:
        if self._talk.trace is not None:
            raise ValueError("the environment holds several conversations in an episode, and a completion is one")
        trace.agent.name, self._talk.trace = self._name, trace

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
    ) -> PolicyLoop:
        """Open the chat of a rollout, with its tools."""
        loop = PolicyLoop(self._talk, trace, f"{endpoint}/chat/completions", secret, tool_interception_url)
        try:
            await loop.open(mcp_urls, *self._agent.harness.resolve_prompt(data))
        except BaseException:
            await loop.close()
            raise
        return loop


async def _no_program(_: Foreign) -> None:
    """Nothing is installed: the chat runs in this process."""


def _unanswered(name: str, error: BaseException) -> Foreign:
    """Return the error of a server that does not answer, which may be deep in groups of others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = f"{type(error).__name__}: {error}"
    return import_extra(V1, PACKAGE).ToolsetError(f"the server of {name} does not answer ({cause})")


class PolicyLoop:
    """A chat with tools: what of `verifiers.v1.HarnessSession` a rollout calls."""

    def __init__(self, talk: Talk, trace: Foreign, url: str, secret: str, gate: str | None):
        self._talk, self._trace, self._url, self._gate = talk, trace, url, gate
        self._messages: Messages = []
        self._tools: list[Json] = []
        self._places: dict[str, tuple[str, str]] = {}  # tool → server and its name there
        self._servers: dict[str, Foreign] = {}
        self._stack = contextlib.AsyncExitStack()
        httpx = import_extra("httpx", PACKAGE)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, headers={"Authorization": f"Bearer {secret}"})

    async def open(self, urls: Mapping[str, str], system: str | None, prompt: Foreign) -> None:
        """Find the tools, and write the prompt."""
        await self._stack.enter_async_context(self._http)
        if urls:
            described = {"mcpServers": {name: {"url": url} for name, url in urls.items()}}
            connect = import_extra(f"{V1}.harnesses.utils.mcp", PACKAGE).connect_mcp
            try:
                self._tools, self._places, self._servers = await connect(described, self._stack)
            except Exception as error:
                raise _unanswered(", ".join(urls), error) from error
        if self._talk.schemas is None:
            self._talk.schemas = self._tools
        elif self._talk.schemas != self._tools:
            raise ValueError("the tools of this task are not those of the first, which all prompts show")
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            self._messages.append({"role": "user", "content": prompt})
        else:
            self._hear(prompt or ())

    def _hear(self, messages: Sequence[Foreign]) -> None:
        written = import_extra(f"{V1}.dialects.chat", PACKAGE).message_to_wire
        self._messages += map(written, messages)

    async def turn(self, messages: Sequence[Foreign] | None = None) -> None:
        """Go on until the policy says something without a call, or until something stops the rollout."""
        self._hear(messages or ())
        while (reply := await self._reply()) is not None:
            self._messages.append(reply)
            for call in reply.get("tool_calls", ()):
                text, failed = await self._result(call)
                if failed:
                    self._talk.failed.add(call["id"])
                name = call["function"]["name"]
                self._messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
            if "tool_calls" not in reply:
                return

    async def _reply(self) -> Message | None:
        """Ask for a turn; None where the rollout has been stopped, or where the policy says no more."""
        tools = {"tools": self._tools} if self._tools else {}
        response = await self._http.post(self._url, json={"model": "policy", "messages": self._messages, **tools})
        if response.is_success:
            reply: Message = response.json()["choices"][0]["message"]
            return reply
        if self._trace.stop_condition is None and not self._talk.silent:
            raise import_extra(V1, PACKAGE).HarnessError(as_text(response.text, limit=1000))
        return None

    async def _result(self, call: Json) -> tuple[str, bool]:
        """Return the text of a call, and whether it failed."""
        name, written = call["function"]["name"], call["function"]["arguments"]
        if call["id"] in self._talk.problems:
            return f"Error: {self._talk.problems[call['id']]}", True
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
        except Exception as error:  # what a tool itself raises is in its result
            raise _unanswered(name, error) from error
        content = import_extra(f"{V1}.harnesses.utils.mcp", PACKAGE).mcp_content_to_chat_content(result.content)
        return as_text(_text({"role": "tool", "content": content})), bool(result.is_error)

    async def _denied(self, call: Json, arguments: object) -> str | None:
        """Ask the rollout whether a call may be made; the text in its place if not."""
        if self._gate is None:
            return None
        asked = {"tool_call_id": call["id"], "name": call["function"]["name"], "arguments": arguments}
        response = await self._http.post(self._gate, json=asked)
        verdict = response.json() if response.is_success else {"action": "stop", "reason": response.text}
        if verdict["action"] == "stop":
            raise import_extra(V1, PACKAGE).HarnessError(as_text(verdict["reason"], limit=1000))
        return _text(verdict["message"]) if verdict["action"] == "deny" else None

    async def close(self) -> None:
        """Leave the tools; may be called again."""
        await self._stack.aclose()
