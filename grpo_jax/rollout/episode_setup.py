"""A run's tools and environments: validation before sampling, rewards, and episode records."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import raise_all, show
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.rollout.tools import Tool, environment_tools, read_tools, reset_arguments
from grpo_jax.text.calls import Format, call_fault, hidden_ids
from grpo_jax.text.formats import FORMATS, format_of
from grpo_jax.text.rows import is_conversation
from grpo_jax.text.templates import ChatTemplate
from grpo_jax.types import EnvironmentFactory, Environments, Json, Messages, RewardFn, Row, Tokenizer

REWARD_COLUMNS = ("environments", "environment_rewards")
"""Names of additional arguments that reward functions receive in a run with environments."""


@dataclasses.dataclass(frozen=True)
class EpisodeSetup:
    """What a run's episodes have in common: its tools and environments, and the settings for parsing turns.

    Factories, classes and methods are keyed by values of the column `environment`; by None if all rows use one factory.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    config: GRPOConfig
    ends: TurnEnds  # conditions that end a turn, in addition to EOS
    factories: Mapping[Hashable, EnvironmentFactory]  # {} if the run has only tools
    environment_classes: Mapping[Hashable, type]
    methods: Mapping[Hashable, Mapping[str, Tool]]  # public methods of each environment
    tools: Mapping[str, Tool]  # functions available to all rows
    format: Format | None  # the chat template's format for tool calls
    starts_in_thinking: bool  # whether the generation prompt opens a thinking block, so that turns start inside it
    removed_token_ids: tuple[int, ...] = ()  # special tokens to remove from the text before parsing

    def factory_key(self, row: Row) -> Hashable:
        """Return the key that selects a row's environment factory."""
        return None if None in self.factories or not self.factories else row["environment"]

    def schemas(self, row: Row) -> list[Json] | None:
        """Return the tool schemas that the chat template includes in a row's prompt."""
        return schemas_of({**self.tools, **self.methods.get(self.factory_key(row), {})})


def schemas_of(tools: Mapping[str, Tool]) -> list[Json] | None:
    """Return tool schemas for the chat template, or None if there are no tools."""
    return [tool.schema for tool in tools.values()] or None


class EnvironmentReward:
    """A reward function that returns the rewards from one environment class. Its `__name__` is the class's name."""

    def __init__(self, name: str, factories: Collection[Hashable] | None = None):
        self.__name__ = name
        self._factories = factories  # keys of the class's factories; None if one factory is used for all rows

    def __call__(
        self, environment_rewards: Sequence[float | list[float] | None], environment: Sequence[Hashable] = ()
    ) -> list[float | list[float] | None]:
        """Return the reward of each episode, or None for episodes with a different environment class."""
        if self._factories is None:
            return list(environment_rewards)
        pairs = zip(environment, environment_rewards, strict=True)
        return [reward if name in self._factories else None for name, reward in pairs]


def make_episode_setup(
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    rows: Sequence[Row],
    config: GRPOConfig,
    *,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Environments | None = None,
) -> EpisodeSetup | None:
    """Build a run's `EpisodeSetup` from arguments to `train`.

    Returns None if there are neither tools nor environments. Each factory is called once. Raises ValueError if a tool,
    an environment, a row or the chat template is invalid.
    """
    if not tools and environment_factory is None:
        return None
    functions, factories = read_tools(tools) if tools else {}, dict[Hashable, EnvironmentFactory]()
    if isinstance(environment_factory, Mapping):
        factories.update(environment_factory.items())
    elif environment_factory is not None:
        factories[None] = environment_factory
    environments = _create_environments(factories)
    methods = {name: environment_tools(environment) for name, environment in environments.items()}
    problems = _row_problems(rows, factories) + [
        f"the dataset must not have a column {name!r}, a reserved argument of reward functions. Rename the column"
        for name in REWARD_COLUMNS
        if rows and name in rows[0]
    ]
    for name, environment in environments.items():
        problems += _environment_problems(name, environment, methods[name], functions, rows)
    is_chat = bool(rows) and is_conversation(rows[0]["prompt"])
    has_tools = bool(functions) or any(methods.values())
    if has_tools and not is_chat:
        problems.append(
            "tools need prompts that are lists of messages, but the dataset's prompts are strings. Convert the"
            " prompts, or use an environment that has respond(text) instead of tools"
        )
    kwargs = dict(config.chat_template_kwargs or {})
    # If a tokenizer has the templates `tool_use` and `default`, rows with and without tools use different templates.
    all_schemas = [schemas_of({**functions, **tools}) for tools in methods.values()] or [schemas_of(functions)]
    schemas = next(filter(None, all_schemas), None)
    template = ChatTemplate(tokenizer, kwargs, schemas, eos_token_ids)
    form = format_of(template.source) if has_tools and is_chat else None
    if has_tools and is_chat and form is None:
        problems.append(
            "the chat template of policy.tokenizer must write tool calls in a supported format"
            f" ({', '.join(FORMATS)}). Use a checkpoint whose chat template supports tools"
        )
    if is_chat:
        responds = any(hasattr(environment, "respond") for environment in environments.values())
        roles = ["tool"] * has_tools + ["user"] * responds
        for schemas in all_schemas:
            problems += _template_problems(ChatTemplate(tokenizer, kwargs, schemas, eos_token_ids), form, roles)
    raise_all("tools or environment_factory", list(dict.fromkeys(problems)))
    return EpisodeSetup(
        tokenizer=tokenizer,
        eos_token_ids=tuple(eos_token_ids),
        config=config,
        ends=TurnEnds.of(config),
        factories=factories,
        environment_classes={name: type(environment) for name, environment in environments.items()},
        methods=methods,
        tools=functions,
        format=form,
        starts_in_thinking=is_chat and template.opens_thinking,
        removed_token_ids=() if form is None else hidden_ids(tokenizer, form),
    )


def _template_problems(template: ChatTemplate, form: Format | None, roles: Sequence[str]) -> list[str]:
    """Describe a chat template's problems with messages in the given roles and with tool calls."""
    try:
        template.check(roles)
        problem = call_fault(template, form) if form is not None and template.tools else ""
        return [problem] if problem else []
    except ValueError as error:
        return [str(error)]


def with_environments(reward_fns: Sequence[RewardFn], episode_setup: EpisodeSetup | None) -> list[RewardFn]:
    """Return the reward functions, followed by an `EnvironmentReward` for each environment class with `get_reward`."""
    classes = {} if episode_setup is None else episode_setup.environment_classes
    added = [
        EnvironmentReward(kind.__name__, None if None in classes else [n for n in classes if classes[n] is kind])
        for kind in dict.fromkeys(classes.values())
        if hasattr(kind, "get_reward")
    ]
    return [*reward_fns, *added]


def environment_weights(weights: Sequence[float] | None, reward_fns: Sequence[RewardFn]) -> list[float] | None:
    """Return `weights`, with 1.0 appended for each `EnvironmentReward` if they cover only the other functions."""
    added = sum(isinstance(fn, EnvironmentReward) for fn in reward_fns)
    return None if weights is None else [*weights, *[1.0] * (added if len(weights) == len(reward_fns) - added else 0)]


def _create_environments(factories: Mapping[Hashable, EnvironmentFactory]) -> dict[Hashable, object]:
    """Call each factory once, so that its environment can be validated."""
    environments = dict[Hashable, object]()
    for name, factory in factories.items():
        where = "environment_factory" if name is None else f"environment_factory[{name!r}]"
        if not callable(factory):
            raise ValueError(f"{where} must be a class or a function that returns an environment; got {show(factory)}.")
        try:
            environments[name] = factory()
        except Exception as error:
            raise ValueError(
                f"{where} raised {type(error).__name__}: {error}. A factory is called without arguments, once for"
                " each completion. Values that differ between rows are passed to the environment's reset method."
            ) from error
    return environments


def _row_problems(rows: Sequence[Row], factories: Mapping[Hashable, EnvironmentFactory]) -> list[str]:
    """Describe problems with the dataset column `environment`."""
    if None in factories or not factories:
        return []
    known = ", ".join(map(repr, factories))
    if any("environment" not in row for row in rows):
        return [f"the dataset must have a column 'environment' with keys of environment_factory ({known})"]
    unknown = dict.fromkeys(str(row["environment"]) for row in rows if row["environment"] not in factories)
    return [
        f"the column 'environment' must contain keys of environment_factory ({known}); got {name!r}" for name in unknown
    ]


def _environment_problems(
    name: Hashable, environment: object, methods: Mapping[str, Tool], tools: Mapping[str, Tool], rows: Sequence[Row]
) -> list[str]:
    """Describe problems with an environment that `environment_tools` does not report."""
    kind, problems = type(environment).__name__, list[str]()
    if not methods and not tools and not hasattr(environment, "respond"):
        problems.append(
            f"{kind} must have respond(text) or a public method that the policy can call as a tool. Otherwise all"
            " completions have a single turn"
        )
    problems += [f"{kind} and tools both define {tool!r}; rename one of them" for tool in methods.keys() & tools.keys()]
    row = next((row for row in rows if name is None or row.get("environment") == name), None)
    if not hasattr(environment, "reset") or row is None:
        return problems
    columns = reset_arguments(environment.reset, row)
    try:
        inspect.signature(environment.reset).bind(**columns)
    except TypeError as error:
        problems.append(
            f"{kind}.reset must accept the dataset's columns as keyword arguments ({', '.join(columns) or 'none'}):"
            f" {error}. Add **kwargs for unused columns, and defaults for parameters that are not columns"
        )
    return problems


@dataclasses.dataclass
class EpisodeRecord:
    """Record of an episode: plain data that can be converted to JSON."""

    turns: list[tuple[bool, str]] = dataclasses.field(default_factory=list)  # (True if sampled by the policy, text)
    messages: Messages = dataclasses.field(default_factory=list)  # turns and observations, empty for string prompts
    lengths: list[int] = dataclasses.field(default_factory=list)  # number of tokens in each of the policy's turns
    reward: float | list[float] | str | None = None  # see `Episode.reward`
    calls: int = 0  # number of tool calls
    failures: int = 0  # number of failed tool calls
    errors: int = 0  # number of environment errors
    seconds: float = 0.0  # time spent in tools and the environment
    clipped: int = 0  # 1 if the episode ended with a tool call beyond `max_tool_calling_iterations`
    cut_short: int = 0  # number of turns truncated at `max_turn_length`

    @classmethod
    def from_json(cls, values: Json) -> EpisodeRecord:
        """Build a record from the result of `dataclasses.asdict`, possibly read from JSON."""
        return cls(**{**values, "turns": [(sampled, text) for sampled, text in values["turns"]]})


def turn_ids(drawn: np.ndarray, episodes: Sequence[EpisodeRecord]) -> np.ndarray:
    """Return the turn index of each sampled token, [B·G, T] int32, and −1 where `drawn` [B·G, T] is False.

    The indices are computed from the lengths of the turns, because the observation between two turns may be empty.
    """
    ids = np.full(drawn.shape, -1, np.int32)
    for row, sampled, episode in zip(ids, drawn, episodes, strict=True):
        row[sampled] = np.searchsorted(
            np.cumsum(episode.lengths, dtype=int)[:-1], np.arange(sampled.sum()), side="right"
        )
    return ids


def metrics_of(episodes: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Aggregate the episodes' counters into metrics."""

    def total(name: str) -> float:
        return float(sum(getattr(episode, name) for episode in episodes))

    turns = [len(episode.lengths) for episode in episodes]
    return {
        "turns/mean": float(np.mean(turns)),
        "turns/max": float(max(turns)),
        "turns/clipped_ratio": total("clipped") / len(episodes),
        "turns/cut_short": total("cut_short"),
        "tools/calls": total("calls"),
        "tools/failures": total("failures"),
        "environment/errors": total("errors"),
        "environment/seconds": total("seconds"),
    }
