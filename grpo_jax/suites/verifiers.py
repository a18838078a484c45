"""verifiers: tasks with environments, in which the policy is the agent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Sequence

from grpo_jax.messages import import_extra
from grpo_jax.rollout.tools import call_within
from grpo_jax.suites.harness import PACKAGE, V1, Conversation, PolicyAgent, Results, Servers
from grpo_jax.suites.suite import Foreign, Suite, check_whole_number
from grpo_jax.types import Json, Message, Messages, Row


def verifiers(taskset: str, *, size: int | None = None, env: str = "", **settings: object) -> Suite:
    """Return the tasks of an environment of [verifiers](https://github.com/PrimeIntellect-ai/verifiers) 0.4.

    The environment runs itself: the turns of its agent are the turns of the policy. The reward is the trace's: the
    weighted sum of the rewards of the task (`@reward` and judges) and of the environment. Reward functions that take
    `environments` find the `trace` there, with each reward and metric by name.

    Tools (`toolsets`) run in verifiers' own servers, a task's for each completion, a taskset's once. Conditions
    (`@stop`) are checked before and after each turn. Containers, several agents, limits in tokens, and tasks that
    rewrite the turns of the policy are not supported.

    Args:
      taskset: the module of an installed package, or of one that comes with verifiers.
      size: the number of tasks, from the first; None: all of them.
      env: the id of an environment; "": the taskset's own.
      settings: of the taskset's config, such as `game`.

    Raises:
      ValueError: verifiers or the taskset is not installed; a setting or task that is not supported; tools that do not
        start.

    Example:
      >>> suite = verifiers("textarena", game="Hangman-v0", size=100)  # doctest: +SKIP
      >>> train(policy, suite.rows, [], config, environment_factory=suite.environment_factory)  # doctest: +SKIP
    """
    loaders = import_extra(f"{V1}.utils.loaders", PACKAGE)
    if size is not None:
        check_whole_number("size", size, 1)
    try:
        described = loaders.resolve_env_config({"id": env, "taskset": {"id": taskset, **settings}})
        environment = loaders.load_environment(_here(described))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"verifiers does not load {taskset!r} ({type(error).__name__}: {error})") from error
    if programs := [one.id for one in described.agent_harnesses().values() if one.id not in ("bash", "null")]:
        raise ValueError(f"{taskset} has the harness {programs[0]}, whose program is not supported")
    tasks = environment.taskset
    if size is None and not tasks.bounded:
        raise ValueError(f"size: the taskset {taskset!r} is infinite; give the number of tasks")
    taken = list(itertools.islice(tasks, size))
    _check(environment, taken, taskset)
    rows: list[Row] = [
        {"prompt": _prompt(task), "index": index, "task": task.data.name or ""} for index, task in enumerate(taken)
    ]
    servers = Servers(environment)
    try:
        schemas = call_within(None, _schemas, servers, taken[0]) if _toolsets(environment) else []
    except Exception as error:
        raise ValueError(f"{taskset}: its tools do not start ({type(error).__name__}: {error})") from error
    return Suite(rows=rows, environment_factory=functools.partial(VerifiersEnv, servers, taken, schemas))


def _here(config: Foreign) -> Foreign:
    """Return an environment's config with agents that run in this process, without a program."""
    v1 = import_extra(V1, PACKAGE)
    here = {"harness": v1.HarnessConfig(id="null"), "runtime": v1.SubprocessConfig(), "retries": v1.RetryConfig()}
    agents = import_extra(f"{V1}.configs.agent", PACKAGE).agent_config_fields(config)
    return config.model_copy(update={name: agent.model_copy(update=here) for name, agent in agents.items()})


def _toolsets(environment: Foreign) -> list[Foreign]:
    """Return the tool servers of the taskset and of each task."""
    taskset = environment.taskset
    return [*taskset.toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)]


def _check(environment: Foreign, tasks: Sequence[Foreign], name: str) -> None:
    """Raise ValueError for an environment or tasks that are not supported."""
    configs = import_extra(f"{V1}.configs.agent", PACKAGE).agent_config_fields(environment.config)
    if len(configs) != 1:
        raise ValueError(f"{name}: its environment has the agents {', '.join(configs)}; one is supported")
    if not tasks:
        raise ValueError(f"{name} does not contain tasks")
    (config,) = configs.values()
    kinds = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
    if limits := [kind for kind in kinds if getattr(config, kind) is not None]:
        raise ValueError(f"{name}: {limits[0]} of its agent limits tokens: use max_completion_length instead")
    if type(tasks[0]).NEEDS_CONTAINER:
        raise ValueError(f"{name}: its tasks need a container, which is not supported")
    remote = import_extra(f"{V1}.interception", PACKAGE).requires_tunnel
    if far := [one.server_name for one in _toolsets(environment) if remote(True, [one.config])]:
        raise ValueError(f"{name}: its tools {', '.join(far)} run on another machine, which cannot reach this one")
    hooks = import_extra(f"{V1}.session", PACKAGE).hook_boundary
    found = import_extra(f"{V1}.utils.decorators", PACKAGE).discover_decorated(tasks[0], "intercept")
    response = import_extra(V1, PACKAGE).Response
    if rewrites := [hook.__name__ for hook in found if hooks(hook, allow_trace=False) is response]:
        raise ValueError(f"{name}: {rewrites[0]} of its tasks rewrites the turns of the policy")


def _prompt(task: Foreign) -> Messages:
    """Return the messages that a task begins with."""
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    asked = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt or []
    prompt = [*system, *(one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in asked)]
    if not prompt:
        raise ValueError(f"task {data.idx} lacks a prompt")
    return prompt


async def _play(servers: Servers, task: Foreign, conversation: Conversation) -> None:
    """Run the program of the environment, with the policy as its agent."""
    v1, environment = import_extra(V1, PACKAGE), servers.environment
    about = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    try:
        agents = v1.Agents(environment.config, functools.partial(PolicyAgent, conversation, *await servers.ready()))
        await environment.setup(agents)
        await environment.run(task, agents)
        if conversation.trace is None:
            raise RuntimeError("the environment ran no agent")
        if conversation.trace.errors:
            raise RuntimeError(f"{conversation.trace.errors[-1].type}: {conversation.trace.errors[-1].message}")
        info = v1.EnvInfo(id=environment.config.env_id)
        await environment.finalize(task, v1.Episode(env=info, task=about, traces=[conversation.trace]))
    except ExceptionGroup as group:  # of an environment with concurrent tasks
        raise group.exceptions[0] from group
    finally:
        conversation.end_episode()


async def _schemas(servers: Servers, task: Foreign) -> list[Json]:
    """Return the schemas of a task's tools, from an episode that is cancelled before its first turn."""
    conversation = Conversation(None, _prompt(task))
    episode = asyncio.create_task(_play(servers, task, conversation))
    if await conversation.reply() is None:
        await episode  # raises its exception
    episode.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await episode
    return conversation.schemas or []


class VerifiersEnv:
    """One completion, which an environment of verifiers runs as an episode; see `verifiers`.

    Attributes:
      tool_schemas: of the tools that the tasks have.
    """

    def __init__(self, servers: Servers, tasks: Sequence[Foreign], tool_schemas: list[Json]):
        self._servers, self._tasks = servers, tasks
        self._conversation: Conversation | None = None
        self._episode: asyncio.Task[None] | None = None
        self.tool_schemas = tool_schemas

    @property
    def trace(self) -> Foreign:
        """The record of verifiers; None before the episode begins."""
        return None if self._conversation is None else self._conversation.trace

    async def reset(self, index: int, **_: object) -> str:
        """Begin the episode of a task, and return its first text, if any."""
        task = self._tasks[index]
        self._conversation = Conversation(self.tool_schemas, _prompt(task))
        self._episode = asyncio.create_task(_play(self._servers, task, self._conversation))
        text: str | None = await self._reply()
        return text or ""

    async def respond(self, text: str) -> str | None:
        """Add a turn, and return the reply of the environment; None when the episode has ended."""
        return await self._turn({"role": "assistant", "content": text})

    async def answer_calls(self, message: Message, problems: Sequence[str]) -> Results | None:
        """Add a turn that calls tools, and return the results; None when the episode has ended."""
        return await self._turn(message, problems)

    async def get_reward(self) -> float | None:
        """Let the episode end, and return its reward."""
        if self._episode is None or self._conversation is None:
            return None
        self._conversation.end_policy()
        await self._episode
        return None if any(one is None for one in self.trace.rewards.values()) else float(self.trace.reward)

    async def _turn(self, message: Message, problems: Sequence[str] = ()) -> Foreign:
        if self._conversation is not None:
            await self._conversation.add_turn(message, problems)
        return await self._reply()

    async def _reply(self) -> Foreign:
        if self._conversation is None or self._episode is None:
            return None
        reply = await self._conversation.reply()
        if reply is None:
            await asyncio.shield(self._episode)  # raises its exception
        return reply
