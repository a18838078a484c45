"""Tasks from the `verifiers` package, in which the policy is the environment's agent."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Sequence

from grpo_jax.messages import import_extra, shorten
from grpo_jax.suites.harness import PACKAGE, V1, Conversation, SharedModelServer, opening_messages, policy_agent
from grpo_jax.types import Foreign, Messages, Row, Suite


def verifiers(taskset: str, *, size: int | None = None, env: str = "", **settings: object) -> Suite:
    """Return the tasks in a [verifiers](https://github.com/PrimeIntellect-ai/verifiers) 0.4 taskset.

    The environment controls the episode, and the policy generates the agent's turns. The reward is the trace's
    weighted sum of rewards from the task (`@reward` and judges) and from the environment. Reward functions with an
    argument `environments` can read each reward and metric from `trace`.

    Stop conditions (`@stop`) are checked before and after each turn. Tools (`toolsets`), containers, several agents and
    `@intercept` hooks are not supported. The agent's token limits have no effect: set `max_completion_length`.

    Args:
      taskset: module name of an installed taskset, or of a taskset that is part of `verifiers`.
      size: maximum number of tasks. If None, all tasks are used.
      env: environment id. If "", the taskset's default is used.
      settings: settings for the taskset's config, such as `game`.

    Example:
      >>> suite = verifiers("textarena", game="Hangman-v0", size=100)  # doctest: +SKIP
      >>> train(policy, suite.rows, [], config, environment_factory=suite.environment_factory)  # doctest: +SKIP
    """
    loaders = import_extra(f"{V1}.utils.loaders", PACKAGE)
    try:
        config = loaders.resolve_env_config({"id": env, "taskset": {"id": taskset, **settings}})
        environment = loaders.load_environment(_in_process(config))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"verifiers cannot load {taskset!r} ({type(error).__name__}: {error})") from error
    if programs := [harness.id for harness in config.agent_harnesses().values() if harness.id not in ("bash", "null")]:
        raise ValueError(f"taskset {taskset!r} uses the harness {programs[0]!r}; only 'bash' and 'null' are supported")
    if size is None and not environment.taskset.bounded:
        raise ValueError(f"taskset {taskset!r} is infinite; set size to limit the number of tasks")
    tasks = list(itertools.islice(environment.taskset, size))
    _check_supported(environment, tasks, taskset)
    rows: list[Row] = [
        {"prompt": _prompt(task), "index": i, "task": task.data.name or ""} for i, task in enumerate(tasks)
    ]
    server = SharedModelServer(environment)
    return Suite(rows=rows, environment_factory=functools.partial(VerifiersEnv, server, tasks))


def _in_process(config: Foreign) -> Foreign:
    """Return a copy of an environment's config with which agents run in this process, without a program."""
    v1 = import_extra(V1, PACKAGE)
    updates = {"harness": v1.HarnessConfig(id="null"), "runtime": v1.SubprocessConfig(), "retries": v1.RetryConfig()}
    agents = import_extra(f"{V1}.configs.agent", PACKAGE).agent_config_fields(config)
    return config.model_copy(update={name: agent.model_copy(update=updates) for name, agent in agents.items()})


def _check_supported(environment: Foreign, tasks: Sequence[Foreign], name: str) -> None:
    """Raise ValueError if the environment or its tasks are not supported."""
    configs = import_extra(f"{V1}.configs.agent", PACKAGE).agent_config_fields(environment.config)
    if len(configs) != 1:
        raise ValueError(f"taskset {name!r}: the environment must have one agent; got {', '.join(configs) or 'none'}")
    if not tasks:
        raise ValueError(f"taskset {name!r} has no tasks; use a different taskset, or change its settings")
    if type(tasks[0]).NEEDS_CONTAINER:
        raise ValueError(f"taskset {name!r}: tasks that need a container are not supported")
    toolsets = [x.server_name for owner in (environment.taskset, *tasks) for x in owner.toolsets(owner.config)]
    if toolsets:
        raise ValueError(
            f"taskset {name!r}: tasks with tools ({shorten([*dict.fromkeys(toolsets)])}) are not supported. Use tasks"
            " without toolsets, or write the tools as methods of an environment_factory (docs/turns.md)"
        )
    hooks = import_extra(f"{V1}.utils.decorators", PACKAGE).discover_decorated(tasks[0], "intercept")
    if hooks:
        raise ValueError(f"taskset {name!r}: tasks with @intercept hooks ({hooks[0].__name__}) are not supported")


def _prompt(task: Foreign) -> Messages:
    prompt = opening_messages(task.data.system_prompt, task.data.prompt)
    if not prompt:
        raise ValueError(f"task {task.data.idx} has no prompt and no system prompt; use tasks with one of them")
    return prompt


async def _run_episode(server: SharedModelServer, task: Foreign, conversation: Conversation) -> None:
    v1, environment = import_extra(V1, PACKAGE), server.environment
    trace_task = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    try:
        agents = v1.Agents(environment.config, functools.partial(policy_agent, conversation, await server.start()))
        await environment.setup(agents)
        await environment.run(task, agents)
        if conversation.trace is None:
            raise RuntimeError("the environment did not run its agent")
        if conversation.trace.errors:
            raise RuntimeError(f"{conversation.trace.errors[-1].type}: {conversation.trace.errors[-1].message}")
        info = v1.EnvInfo(id=environment.config.env_id)
        await environment.finalize(task, v1.Episode(env=info, task=trace_task, traces=[conversation.trace]))
    except ExceptionGroup as group:  # raised by environments with concurrent tasks
        raise group.exceptions[0] from group
    finally:
        conversation.end_episode()


class VerifiersEnv:
    """Environment that runs one episode of a task, for one completion (see `verifiers`)."""

    def __init__(self, server: SharedModelServer, tasks: Sequence[Foreign]):
        self._server, self._tasks = server, tasks
        self._conversation = Conversation([])
        self._episode: asyncio.Task[None] | None = None

    @property
    def trace(self) -> Foreign:
        """Trace of the episode, or None before it starts."""
        return self._conversation.trace

    async def reset(self, index: int, **_: object) -> str:
        """Start the episode of a task. Returns the environment's first message, or "" if there is none."""
        task = self._tasks[index]
        self._conversation = Conversation(_prompt(task))
        self._episode = asyncio.create_task(_run_episode(self._server, task, self._conversation))
        return await self._reply() or ""

    async def respond(self, text: str) -> str | None:
        """Add a turn. Returns the environment's reply, or None if the episode has ended."""
        await self._conversation.add_turn(text)
        return await self._reply()

    async def get_reward(self) -> float | None:
        """End the episode. Returns its reward, or None if it did not start or a reward is missing."""
        if self._episode is None:
            return None
        self._conversation.end_policy()
        await self._episode
        return None if any(one is None for one in self.trace.rewards.values()) else float(self.trace.reward)

    async def _reply(self) -> str | None:
        reply = await self._conversation.reply()
        if reply is None and self._episode is not None:
            await asyncio.shield(self._episode)  # raises the episode's exception
        return reply
