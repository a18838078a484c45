"""verifiers: tasks with their environments, which we play in the place of a harness and its model."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from grpo_jax.messages import import_extra, show
from grpo_jax.suites.suite import Foreign, Suite
from grpo_jax.types import Message, Messages, Row

_PACKAGE = "verifiers"
_V1 = "verifiers.v1"


def verifiers(taskset: str, *, size: int | None = None, env: str = "", **settings: object) -> Suite:
    """Return the tasks of an environment of [verifiers](https://github.com/PrimeIntellect-ai/verifiers) 0.4.

    The environment runs itself: its `run` holds a conversation with its agent, and what that agent says are the turns
    of the policy, one or several. The reward is that of the trace: the rewards of the task (`@reward`, and judges) and
    of the environment, by their weights. A completion's environment has its `trace`, with each reward and metric by
    name, for reward functions that take `environments`.

    What only a harness can do is refused: tools (servers for programs), stop conditions, containers, several agents.

    Args:
      taskset: the id, which is the module of an installed package, or of one that comes with verifiers.
      size: tasks, the first of them; None: all, of a taskset that ends.
      env: the id of an environment; "": the taskset's own.
      settings: of the taskset's config, such as `game`.

    Raises:
      ValueError: verifiers or the taskset is not installed; a setting that it refuses; a task that needs a harness.

    Example:
      >>> suite = verifiers("textarena", game="Hangman-v0", size=100)  # doctest: +SKIP
      >>> train(policy, suite.rows, [], config, environment_factory=suite.environment_factory)  # doctest: +SKIP
    """
    loaders = import_extra("verifiers.v1.utils.loaders", _PACKAGE)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"size = {show(size)}: give the number of tasks, from 1 up, or leave it out for all")
    try:
        described = loaders.resolve_env_config({"id": env, "taskset": {"id": taskset, **settings}})
        environment = loaders.load_environment(described)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"verifiers does not load {taskset!r} ({type(error).__name__}: {error})") from error
    tasks = environment.taskset
    if size is None and not tasks.bounded:
        raise ValueError(f"size: the taskset {taskset!r} has no end; give the number of tasks")
    taken = list(itertools.islice(tasks, size))
    _check(environment, taken, taskset)
    rows = [_row(task, index) for index, task in enumerate(taken)]
    return Suite(rows=rows, environment_factory=functools.partial(VerifiersEnv, environment, taken))


def _check(environment: Foreign, tasks: Sequence[Foreign], name: str) -> None:
    """Refuse what only a harness can do."""
    taskset = environment.taskset
    configs = import_extra("verifiers.v1.configs.agent", _PACKAGE).agent_config_fields(environment.config)
    if len(configs) != 1:
        raise ValueError(f"{name}: its environment has the agents {', '.join(configs)}, and one policy plays one")
    if not tasks:
        raise ValueError(f"{name} has no tasks")
    kind = type(tasks[0])
    if taskset.toolsets(taskset.config) or kind.toolsets(taskset.config.task):
        raise ValueError(f"{name}: its tools are servers for a harness, which is not run here; give tools of your own")
    if tasks[0].hooks("stop"):
        raise ValueError(f"{name}: its tasks stop a harness, which is not run here, by conditions of their own")
    if kind.NEEDS_CONTAINER:
        raise ValueError(f"{name}: its tasks need a container, which is not run here")


def _row(task: Foreign, index: int) -> Row:
    """Return the row of a task: its prompt, and its number."""
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    asked = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt or []
    prompt: Messages = [*system, *(one if isinstance(one, dict) else _message(one) for one in asked)]
    if not prompt:
        raise ValueError(f"task {index} has no prompt")
    return {"prompt": prompt, "index": index, "task": data.name or ""}


def _message(message: Foreign) -> Message:
    read: Message = message.model_dump(exclude_none=True)
    return read


class VerifiersEnv:
    """One completion, which an environment of verifiers plays as an episode; see `verifiers`.

    Attributes:
      trace: the suite's record of the completion; None before it begins.
    """

    def __init__(self, environment: Foreign, tasks: Sequence[Foreign]):
        self._environment, self._tasks = environment, tasks
        self._said: asyncio.Queue[str | None] = asyncio.Queue()  # by the policy; None: it will say no more
        self._heard: asyncio.Queue[str | None] = asyncio.Queue()  # by the environment; None: it is over
        self._episode: asyncio.Task[None] | None = None
        self.trace: Foreign = None

    async def reset(self, index: int, **_: object) -> str:
        """Begin the episode of a task; the text is what the environment says first, if it does."""
        self._episode = asyncio.create_task(self._play(self._tasks[index]))
        return await self._next() or ""

    async def respond(self, text: str) -> str | None:
        """Say a turn, and return what the environment answers; None when it is over."""
        await self._said.put(text)
        return await self._next()

    async def get_reward(self) -> float | None:
        """Let the episode end, and return its reward."""
        if self._episode is None:
            return None
        await self._said.put(None)
        await self._episode
        return None if any(one is None for one in self.trace.rewards.values()) else float(self.trace.reward)

    async def _next(self) -> str | None:
        said = await self._heard.get()
        if said is None:
            self._heard.put_nowait(None)  # it is over, however often it is asked
            if self._episode is not None and self._episode.done():
                self._episode.result()  # raises what it has
        return said

    async def _play(self, task: Foreign) -> None:
        """Run the environment's own program, with this object as its agent."""
        v1 = import_extra(_V1, _PACKAGE)
        agents = v1.Agents(self._environment.config, lambda name, spec: _Agent(self, name, spec))
        about = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        try:
            await self._environment.setup(agents)
            await self._environment.run(task, agents)
            info = v1.EnvInfo(id=self._environment.config.env_id)
            await self._environment.finalize(task, v1.Episode(env=info, task=about, traces=[self.trace]))
        finally:
            await self._heard.put(None)

    async def _turn(self, message: str | None) -> str | None:
        """Say something to the policy, and return its turn; None when it says no more."""
        await self._heard.put(message or "")
        text = await self._said.get()
        if text is None:
            self._said.put_nowait(None)  # the policy says no more, however often it is asked
        return text


class _Agent:
    """The policy as the one agent of an environment: what of `verifiers.v1.Agent` a program of an environment calls."""

    def __init__(self, completion: VerifiersEnv, name: str, config: Foreign):
        self._completion, self._name, self.config = completion, name, config
        self.trainable = True

    async def run(self, task: Foreign) -> Foreign:
        """Let the policy answer a task in one turn, and return the scored trace."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Foreign) -> AsyncIterator[_Interaction]:
        """Hold a conversation of a task; the task scores its trace at the end."""
        v1 = import_extra(_V1, _PACKAGE)
        about = v1.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        state = import_extra("verifiers.v1.state", _PACKAGE).state_cls(type(task))()
        trace = v1.Trace(task=about, state=state, agent=v1.AgentInfo(config=self.config, name=self._name))
        self._completion.trace = trace
        interaction = _Interaction(v1, self._completion._turn, trace)
        interaction.note(*_row(task, 0)["prompt"] if task.data.prompt is not None else [])
        await task.setup(trace, None)
        yield interaction
        trace.is_completed = trace.ok = True
        await task.finalize(trace, None)
        await task.score(trace)


class _Interaction:
    """A conversation with the policy: what of `verifiers.v1.Interaction` a program of an environment calls."""

    def __init__(self, v1: Foreign, turn: Callable[[str | None], Awaitable[str | None]], trace: Foreign):
        self._v1, self._turn, self.trace = v1, turn, trace

    def note(self, *messages: Message, sampled: bool = False) -> None:
        """Write messages into the trace."""
        for message in messages:
            parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
            self.trace.nodes.append(self._v1.MessageNode(parent=parent, message=message, sampled=sampled))

    async def turn(self, message: str | None = None) -> Foreign:
        """Say something to the policy, and return what it answers as a segment."""
        segment = import_extra("verifiers.v1.agent", _PACKAGE).Segment
        if message is not None:
            self.note({"role": "user", "content": message})
        text = await self._turn(message)
        if text is None:
            return segment(messages=[], terminated=True)
        self.note({"role": "assistant", "content": text}, sampled=True)
        return segment(messages=[self.trace.nodes[-1].message])
