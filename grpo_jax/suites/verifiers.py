"""verifiers: tasks with their environments, which we play in the place of a harness and its model."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Sequence

from grpo_jax.messages import import_extra, show
from grpo_jax.rollout.tools import call_within
from grpo_jax.suites.harness import PACKAGE, V1, PolicyAgent, Results, Servers, Talk
from grpo_jax.suites.suite import Foreign, Suite
from grpo_jax.types import Json, Message, Messages, Row


def verifiers(taskset: str, *, size: int | None = None, env: str = "", **settings: object) -> Suite:
    """Return the tasks of an environment of [verifiers](https://github.com/PrimeIntellect-ai/verifiers) 0.4.

    The environment runs itself: its `run` holds a conversation with its agent, and what that agent says are the turns
    of the policy, one or several. The reward is that of the trace: the rewards of the task (`@reward`, and judges) and
    of the environment, by their weights. A completion's environment has its `trace`, with each reward and metric by
    name, for reward functions that take `environments`.

    Tools (`toolsets`) are verifiers' own servers, which it starts and ends: those of a task with each completion, those
    of the taskset once. Conditions (`@stop`) end an episode where verifiers asks them: before and after each turn.
    Refused are containers, several agents, limits in tokens, and tasks that rewrite what the policy says.

    Args:
      taskset: the id, which is the module of an installed package, or of one that comes with verifiers.
      size: tasks, the first of them; None: all, of a taskset that ends.
      env: the id of an environment; "": the taskset's own.
      settings: of the taskset's config, such as `game`.

    Raises:
      ValueError: verifiers or the taskset is not installed; a setting that it refuses; a task that is refused; tools
        that do not begin.

    Example:
      >>> suite = verifiers("textarena", game="Hangman-v0", size=100)  # doctest: +SKIP
      >>> train(policy, suite.rows, [], config, environment_factory=suite.environment_factory)  # doctest: +SKIP
    """
    loaders = import_extra(f"{V1}.utils.loaders", PACKAGE)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"size = {show(size)}: give the number of tasks, from 1 up, or leave it out for all")
    try:
        described = loaders.resolve_env_config({"id": env, "taskset": {"id": taskset, **settings}})
        environment = loaders.load_environment(_here(described))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"verifiers does not load {taskset!r} ({type(error).__name__}: {error})") from error
    if programs := [one.id for one in described.agent_harnesses().values() if one.id not in ("bash", "null")]:
        raise ValueError(f"{taskset} comes with the harness {programs[0]}, whose program is not run here")
    tasks = environment.taskset
    if size is None and not tasks.bounded:
        raise ValueError(f"size: the taskset {taskset!r} has no end; give the number of tasks")
    taken = list(itertools.islice(tasks, size))
    _check(environment, taken, taskset)
    rows: list[Row] = [
        {"prompt": _prompt(task), "index": index, "task": task.data.name or ""} for index, task in enumerate(taken)
    ]
    servers = Servers(environment)
    try:
        schemas = call_within(None, _schemas, servers, taken[0]) if _toolsets(environment) else []
    except Exception as error:
        raise ValueError(f"{taskset}: its tools do not begin ({type(error).__name__}: {error})") from error
    return Suite(rows=rows, environment_factory=functools.partial(VerifiersEnv, servers, taken, schemas))


def _here(config: Foreign) -> Foreign:
    """Return an environment's config with agents that run in this process: chats without a program."""
    v1 = import_extra(V1, PACKAGE)
    here = {"harness": v1.HarnessConfig(id="null"), "runtime": v1.SubprocessConfig(), "retries": v1.RetryConfig()}
    agents = import_extra(f"{V1}.configs.agent", PACKAGE).agent_config_fields(config)
    return config.model_copy(update={name: agent.model_copy(update=here) for name, agent in agents.items()})


def _toolsets(environment: Foreign) -> list[Foreign]:
    """Return the servers of tools, of the taskset and of each task."""
    taskset = environment.taskset
    return [*taskset.toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)]


def _check(environment: Foreign, tasks: Sequence[Foreign], name: str) -> None:
    """Refuse what the policy cannot do as it is sampled here."""
    configs = import_extra(f"{V1}.configs.agent", PACKAGE).agent_config_fields(environment.config)
    if len(configs) != 1:
        raise ValueError(f"{name}: its environment has the agents {', '.join(configs)}, and one policy plays one")
    if not tasks:
        raise ValueError(f"{name} has no tasks")
    (config,) = configs.values()
    kinds = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
    if limits := [kind for kind in kinds if getattr(config, kind) is not None]:
        raise ValueError(f"{name}: {limits[0]} of its agent counts tokens, which only max_completion_length does here")
    if type(tasks[0]).NEEDS_CONTAINER:
        raise ValueError(f"{name}: its tasks need a container, which is not run here")
    remote = import_extra(f"{V1}.interception", PACKAGE).requires_tunnel
    if far := [one.server_name for one in _toolsets(environment) if remote(True, [one.config])]:
        raise ValueError(
            f"{name}: its tools {', '.join(far)} run on another machine, which would have to reach this one"
        )
    hooks = import_extra(f"{V1}.session", PACKAGE).hook_boundary
    found = import_extra(f"{V1}.utils.decorators", PACKAGE).discover_decorated(tasks[0], "intercept")
    response = import_extra(V1, PACKAGE).Response
    if rewrites := [hook.__name__ for hook in found if hooks(hook, allow_trace=False) is response]:
        raise ValueError(f"{name}: {rewrites[0]} of its tasks rewrites what the policy says, which is then not its own")


def _prompt(task: Foreign) -> Messages:
    """Return the messages that a task begins with."""
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    asked = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt or []
    prompt: Messages = [*system, *(one if isinstance(one, dict) else _message(one) for one in asked)]
    if not prompt:
        raise ValueError(f"task {data.idx} has no prompt")
    return prompt


def _message(message: Foreign) -> Message:
    read: Message = message.model_dump(exclude_none=True)
    return read


async def _play(servers: Servers, task: Foreign, talk: Talk) -> None:
    """Run the environment's own program, with the policy as its agent."""
    v1, environment = import_extra(V1, PACKAGE), servers.environment
    about = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    try:
        agents = v1.Agents(environment.config, functools.partial(PolicyAgent, talk, *await servers.ready()))
        await environment.setup(agents)
        await environment.run(task, agents)
        if talk.trace is None:
            raise RuntimeError("the environment ran no agent")
        if talk.trace.errors:
            raise RuntimeError(f"{talk.trace.errors[-1].type}: {talk.trace.errors[-1].message}")
        info = v1.EnvInfo(id=environment.config.env_id)
        await environment.finalize(task, v1.Episode(env=info, task=about, traces=[talk.trace]))
    except ExceptionGroup as group:  # of an environment that does several things at a time
        raise group.exceptions[0] from group
    finally:
        talk.over()


async def _schemas(servers: Servers, task: Foreign) -> list[Json]:
    """Return the schemas of a task's tools, from an episode that is ended before its first turn."""
    talk = Talk(None, _prompt(task))
    episode = asyncio.create_task(_play(servers, task, talk))
    heard = await talk.hear()
    if heard is None:
        await episode  # raises what it has
    episode.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await episode
    return talk.schemas or []


class VerifiersEnv:
    """One completion, which an environment of verifiers plays as an episode; see `verifiers`.

    Attributes:
      trace: the suite's record of the completion; None before it begins.
      tool_schemas: of the tools that the tasks have.
    """

    def __init__(self, servers: Servers, tasks: Sequence[Foreign], tool_schemas: list[Json]):
        self._servers, self._tasks = servers, tasks
        self._talk: Talk | None = None
        self._episode: asyncio.Task[None] | None = None
        self.tool_schemas = tool_schemas

    @property
    def trace(self) -> Foreign:
        """The suite's record."""
        return None if self._talk is None else self._talk.trace

    async def reset(self, index: int, **_: object) -> str:
        """Begin the episode of a task; the text is what the environment says first, if it does."""
        task = self._tasks[index]
        self._talk = Talk(self.tool_schemas, _prompt(task))
        self._episode = asyncio.create_task(_play(self._servers, task, self._talk))
        said: str | None = await self._next()
        return said or ""

    async def respond(self, text: str) -> str | None:
        """Say a turn, and return what the environment answers; None when it is over."""
        said: str | None = await self._turn({"role": "assistant", "content": text})
        return said

    async def answer_calls(self, message: Message, problems: Sequence[str]) -> Results | None:
        """Say a turn that calls tools, and return what became of the calls; None when it is over."""
        done: Results | None = await self._turn(message, problems)
        return done

    async def get_reward(self) -> float | None:
        """Let the episode end, and return its reward."""
        if self._episode is None or self._talk is None:
            return None
        self._talk.end()
        await self._episode
        return None if any(one is None for one in self.trace.rewards.values()) else float(self.trace.reward)

    async def _turn(self, message: Message, problems: Sequence[str] = ()) -> Foreign:
        if self._talk is not None:
            await self._talk.say(message, problems)
        return await self._next()

    async def _next(self) -> Foreign:
        if self._talk is None or self._episode is None:
            return None
        heard = await self._talk.hear()
        if heard is None:
            await asyncio.shield(self._episode)  # raises what it has
        return heard
