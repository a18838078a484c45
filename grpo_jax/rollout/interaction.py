"""Tools and environments of a run, checked before sampling; their rewards, and the records of their episodes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

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
"""Arguments that reward functions may have in a run with environments."""


@dataclasses.dataclass(frozen=True)
class Interaction:
    """The tools and environments of a run, and how turns are read and answered.

    Environments are keyed by the values of the column `environment`, or by None for all rows.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    config: GRPOConfig
    ends: TurnEnds  # further ends of a turn
    factories: Mapping[Hashable, EnvironmentFactory]  # {} for a run with only tools
    kinds: Mapping[Hashable, type]  # classes of environments
    own_tools: Mapping[Hashable, Mapping[str, Tool]]  # public methods of environments
    tools: Mapping[str, Tool]  # functions that all rows may call
    format: Format | None  # format of tool calls in the chat template
    thinking: bool  # whether the generation prompt opens a thought, so that a turn begins inside it
    hidden: tuple[int, ...] | None = None  # special tokens to leave out of the text that is parsed

    def name_of(self, row: Row) -> Hashable:
        """Return the key of a row's factory."""
        return None if None in self.factories or not self.factories else row["environment"]

    def schemas(self, row: Row) -> list[Json] | None:
        """Return the schemas that the chat template shows with a row's prompt."""
        return schemas_of({**self.tools, **self.own_tools.get(self.name_of(row), {})})


def schemas_of(tools: Mapping[str, Tool]) -> list[Json] | None:
    """Return the schemas of tools for the chat template; None without tools."""
    return [tool.schema for tool in tools.values()] or None


class EnvironmentReward:
    """A reward function with the name and the rewards of one class of environments."""

    def __init__(self, name: str, factories: Collection[Hashable] | None = None):
        self.__name__ = name
        self._factories = factories  # keys of the class's factories; None if one factory makes all environments

    def __call__(
        self, environment_rewards: Sequence[float | list[float] | None], environment: Sequence[Hashable] = ()
    ) -> list[float | list[float] | None]:
        """Return the rewards of the episodes; None for environments of another class."""
        if self._factories is None:
            return list(environment_rewards)
        pairs = zip(environment, environment_rewards, strict=True)
        return [reward if name in self._factories else None for name, reward in pairs]


def make_interaction(
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    rows: Sequence[Row],
    config: GRPOConfig,
    *,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Environments | None = None,
) -> Interaction | None:
    """Return the `Interaction` of a run from `train`'s arguments; None without tools and environments.

    Each factory is called once. A `ValueError` lists all problems, also of the rows and the chat template.
    """
    if not tools and environment_factory is None:
        return None
    functions, factories = read_tools(tools) if tools else {}, dict[Hashable, EnvironmentFactory]()
    if isinstance(environment_factory, Mapping):
        factories.update(environment_factory.items())
    elif environment_factory is not None:
        factories[None] = environment_factory
    made = _made(factories)
    own = {name: environment_tools(environment) for name, environment in made.items()}
    problems = _row_problems(rows, factories) + [
        f"the dataset has a column {name!r}, which the trainer itself passes: rename it"
        for name in REWARD_COLUMNS
        if rows and name in rows[0]
    ]
    for name, environment in made.items():
        problems += _environment_problems(name, environment, own[name], functions, rows)
    is_chat = bool(rows) and is_conversation(rows[0]["prompt"])
    called = bool(functions) or any(own.values())
    if called and not is_chat:
        problems.append(
            "tools are called by messages, and the prompts of the dataset are text: give prompts as lists of messages"
            " (or an environment with a method respond(text), and no other public methods)"
        )
    kwargs = dict(config.chat_template_kwargs or {})
    # If the tokenizer has the templates `tool_use` and `default`, rows with and without tools have different ones.
    shown = [schemas_of({**functions, **methods}) for methods in own.values()] or [schemas_of(functions)]
    schemas = next((some for some in shown if some), None)
    template = ChatTemplate(tokenizer, kwargs, schemas, eos_token_ids)
    form = format_of(template.source) if called and is_chat else None
    if called and is_chat and form is None:
        problems.append(
            "the chat template of policy.tokenizer writes no tool calls in a known form"
            f" ({', '.join(FORMATS)}): use a checkpoint whose template has tools"
        )
    if is_chat:
        responds = any(hasattr(environment, "respond") for environment in made.values())
        roles = ["tool"] * called + ["user"] * responds
        for schemas in shown:
            problems += _template_problems(ChatTemplate(tokenizer, kwargs, schemas, eos_token_ids), form, roles)
    raise_all("tools and environment_factory", list(dict.fromkeys(problems)))
    return Interaction(
        tokenizer=tokenizer,
        eos_token_ids=tuple(eos_token_ids),
        config=config,
        ends=TurnEnds.of(config),
        factories=factories,
        kinds={name: type(environment) for name, environment in made.items()},
        own_tools=own,
        tools=functions,
        format=form,
        thinking=is_chat and template.opens_thinking,
        hidden=None if form is None else hidden_ids(tokenizer, form),
    )


def _template_problems(template: ChatTemplate, form: Format | None, roles: Sequence[str]) -> list[str]:
    """Return problems of a chat template with messages of these roles and with tool calls."""
    try:
        template.check(roles)
        fault = call_fault(template, form) if form is not None and template.tools else ""
        return [fault] if fault else []
    except ValueError as error:
        return [str(error)]


def with_environments(reward_fns: Sequence[RewardFn], interaction: Interaction | None) -> list[RewardFn]:
    """Return the reward functions, and one more for each class of environments with `get_reward`."""
    kinds = {} if interaction is None else interaction.kinds
    own = [
        EnvironmentReward(kind.__name__, None if None in kinds else [n for n in kinds if issubclass(kinds[n], kind)])
        for kind in dict.fromkeys(kinds.values())
        if hasattr(kind, "get_reward")
    ]
    return [*reward_fns, *own]


def environment_weights(weights: Sequence[float] | None, reward_fns: Sequence[RewardFn]) -> list[float] | None:
    """Return the weights of reward functions; an `EnvironmentReward` without a weight gets 1."""
    own = sum(isinstance(fn, EnvironmentReward) for fn in reward_fns)
    return None if weights is None else [*weights, *[1.0] * (own if len(weights) == len(reward_fns) - own else 0)]


def _made(factories: Mapping[Hashable, EnvironmentFactory]) -> dict[Hashable, object]:
    """Return an environment of each factory, for checks."""
    made = dict[Hashable, object]()
    for name, factory in factories.items():
        where = "environment_factory" if name is None else f"environment_factory[{name!r}]"
        if not callable(factory):
            raise ValueError(f"{where} is {show(factory)}: give a class, or a function that makes an environment")
        try:
            made[name] = factory()
        except Exception as error:
            raise ValueError(
                f"{where} raised {type(error).__name__}: {error}: it is called without arguments, once for each"
                " completion (pass what differs between rows by its method reset)"
            ) from error
    return made


def _row_problems(rows: Sequence[Row], factories: Mapping[Hashable, EnvironmentFactory]) -> list[str]:
    """Return problems of the column `environment`."""
    if None in factories or not factories:
        return []
    known = ", ".join(map(repr, factories))
    if any("environment" not in row for row in rows):
        return [f"environment_factory is a dict ({known}), and the dataset lacks the column 'environment' to choose by"]
    unknown = dict.fromkeys(str(row["environment"]) for row in rows if row["environment"] not in factories)
    return [f"the column 'environment' has {name!r}, and environment_factory has only {known}" for name in unknown]


def _environment_problems(
    name: Hashable, environment: object, own: Mapping[str, Tool], tools: Mapping[str, Tool], rows: Sequence[Row]
) -> list[str]:
    """Return problems of an environment, except for its tools."""
    kind, problems = type(environment).__name__, list[str]()
    if not own and not tools and not hasattr(environment, "respond"):
        problems.append(
            f"{kind} has neither a public method that the policy could call, nor respond(text): every completion would"
            " have a single turn"
        )
    problems += [f"{kind} and tools both have {twice!r}: rename one of them" for twice in own.keys() & tools.keys()]
    if own and tools and hasattr(environment, "answer_calls"):
        problems.append(
            f"{kind} answers all calls itself (answer_calls), so that tools would not be called: leave them out"
        )
    row = next((row for row in rows if name is None or row.get("environment") == name), None)
    if not hasattr(environment, "reset") or row is None:
        return problems
    columns = reset_arguments(environment.reset, row)
    try:
        inspect.signature(environment.reset).bind(**columns)
    except TypeError as error:
        problems.append(
            f"{kind}.reset cannot take a row of the dataset, which it is given as keywords ({', '.join(columns)}):"
            f" {error}; add **kwargs for the columns that it does not use"
        )
    return problems


@dataclasses.dataclass
class EpisodeCounts:
    """Counts of one episode."""

    turns: int = 0  # turns of the policy
    calls: int = 0  # calls of tools
    failures: int = 0  # failed calls
    errors: int = 0  # errors of the environment
    seconds: float = 0.0  # spent in tools and environment
    clipped: int = 0  # 1 if the last turn called a tool after the limit of calls
    cut_short: int | None = None  # turns that were cut at `max_turn_length`; None without that limit


class Played(NamedTuple):
    """The record of an episode, which JSON can hold."""

    turns: list[tuple[bool, str]]  # (True if the policy wrote it, text) of each turn and observation
    messages: Messages  # turns and observations, if the prompt is a conversation
    reward: float | list[float] | str | None  # reward of the episode, or one for each turn; None for "not scored"
    counts: EpisodeCounts
    lengths: Sequence[int] = ()  # tokens of each turn of the policy; () in records of older versions

    def to_json(self) -> list[object]:
        """Return the record as lists and dicts."""
        return [self.turns, self.messages, self.reward, dataclasses.asdict(self.counts), list(self.lengths)]

    @classmethod
    def from_json(cls, kept: Sequence[Any]) -> Played:
        """Return the record that `to_json` wrote."""
        turns, messages, reward, counts = kept[:4]
        lengths = kept[4] if len(kept) > 4 else ()
        return cls([(own, text) for own, text in turns], messages, reward, EpisodeCounts(**counts), lengths)


def turn_ids(drawn: np.ndarray, played: Sequence[Played]) -> np.ndarray:
    """Return [B·G, T] int32, the turn of each drawn token, from 0; −1 for tokens that were not drawn.

    The lengths of turns are counted, since an observation between two turns may be empty.
    """
    ids = np.full(drawn.shape, -1, np.int32)
    for row, own, one in zip(ids, drawn, played, strict=True):
        row[own] = np.searchsorted(np.cumsum(one.lengths, dtype=int)[:-1], np.arange(own.sum()), side="right")
    return ids


def metrics_of(played: Sequence[Played]) -> dict[str, float]:
    """Return the metrics of a rollout's episodes."""
    counts = [one.counts for one in played]
    turns, cut_short = [one.turns for one in counts], [one.cut_short for one in counts if one.cut_short is not None]
    metrics = {
        "turns/mean": float(np.mean(turns)),
        "turns/max": float(max(turns)),
        "turns/clipped_ratio": sum(one.clipped for one in counts) / len(counts),
    }
    if cut_short:
        metrics["turns/cut_short"] = float(sum(cut_short))
    return metrics | {
        "tools/calls": float(sum(one.calls for one in counts)),
        "tools/failures": float(sum(one.failures for one in counts)),
        "environment/errors": float(sum(one.errors for one in counts)),
        "environment/seconds": float(sum(one.seconds for one in counts)),
    }
