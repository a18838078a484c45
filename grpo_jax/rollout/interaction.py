"""The tools and environments that answer a policy, checked before anything is sampled, and their rewards."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from grpo_jax.messages import raise_all, show
from grpo_jax.rollout.ends import BY_EOS, TurnEnds
from grpo_jax.rollout.tools import Tool, environment_tools, read_tools, reset_arguments
from grpo_jax.text.calls import Format, call_fault, hidden_ids
from grpo_jax.text.formats import FORMATS, format_of
from grpo_jax.text.prompts import EncodedPrompts, encode_prompts
from grpo_jax.text.rows import is_conversation
from grpo_jax.text.templates import check_template, opens_thinking, template_of
from grpo_jax.types import EnvironmentFactory, Environments, Json, RewardFn, Row, Tokenizer

_GIVEN = ("environments", "environment_rewards")
"""Arguments of reward functions that only completions of several turns have."""


@dataclasses.dataclass(frozen=True)
class Interaction:
    """Who answers the policy between its turns, and how.

    Attributes:
      tokenizer: decodes turns and encodes observations.
      factories: value of the column `environment` → what makes an environment; under None for all rows. {}: there are
        only tools.
      kinds: the class of the environments that each factory makes.
      own_tools: the tools of each such class, its public methods.
      tools: functions that the policy may call beside these.
      format: the form of calls in the chat template; None where nothing can be called.
      hidden: special tokens left out of the text that is parsed, if others mark calls (`calls.hidden_ids`).
      thinking: True if the generation prompt opens a thought, in the middle of which a turn then begins.
      template_kwargs: further keywords of the chat template.
      eos_token_ids: ids that end a turn.
      most_calls: limit of turns that call tools, in each completion; None: no limit.
      seconds: limit of one call; None: no limit.
      on_error: "raise" or "end", if an environment fails.
      ends: what ends a turn beside the ids.
    """

    tokenizer: Tokenizer
    factories: Mapping[Hashable, EnvironmentFactory]
    kinds: Mapping[Hashable, type]
    own_tools: Mapping[Hashable, Mapping[str, Tool]]
    tools: Mapping[str, Tool]
    format: Format | None
    thinking: bool
    template_kwargs: Json
    eos_token_ids: tuple[int, ...]
    hidden: tuple[int, ...] | None = None
    most_calls: int | None = None
    seconds: float | None = None
    on_error: str = "raise"
    ends: TurnEnds = BY_EOS

    def name_of(self, row: Row) -> Hashable:
        """Return the key of a row's factory."""
        return None if None in self.factories or not self.factories else row["environment"]

    def schemas(self, row: Row) -> list[Json] | None:
        """Return the schemas that the chat template shows with a row's prompt."""
        return schemas_of({**self.tools, **self.own_tools.get(self.name_of(row), {})})


def schemas_of(tools: Mapping[str, Tool]) -> list[Json] | None:
    """Return the schemas of tools, as the chat template takes them; None where there are no tools."""
    return [tool.schema for tool in tools.values()] or None


class EnvironmentReward:
    """`get_reward` of each completion's environment, as a reward function named after the environments' class.

    `factories` are the keys of its factories and its subclasses'; None where one factory makes all.
    """

    def __init__(self, name: str, factories: Collection[Hashable] | None = None):
        self.__name__, self._factories = name, factories

    def __call__(
        self, environment_rewards: Sequence[float | list[float] | None], environment: Sequence[Hashable] = ()
    ) -> list[float | list[float] | None]:
        """Return the rewards that were asked for when the episodes ended; None for environments of another class."""
        if self._factories is None:
            return list(environment_rewards)
        pairs = zip(environment, environment_rewards, strict=True)
        return [reward if name in self._factories else None for name, reward in pairs]


def make_interaction(
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    rows: Sequence[Row],
    *,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Environments | None = None,
    chat_template_kwargs: Json | None = None,
    most_calls: int | None = None,
    seconds: float | None = None,
    on_error: str = "raise",
    ends: TurnEnds = BY_EOS,
) -> Interaction | None:
    """Make the `Interaction` of a run, which has its arguments' names; None without tools and environments.

    Each factory is called once. A `ValueError` lists all that cannot be used, or not with these rows or chat template.
    """
    if not tools and environment_factory is None:
        return None
    functions = read_tools(tools) if tools else {}
    factories = _factories(environment_factory)
    made = {name: _made(name, factory) for name, factory in factories.items()}
    own = {name: environment_tools(environment) for name, environment in made.items()}
    problems = _row_problems(rows, factories) + [
        f"the dataset has a column {name!r}, which the trainer itself gives: rename it"
        for name in _GIVEN
        if rows and name in rows[0]
    ]
    for name, environment in made.items():
        problems += _environment_problems(name, environment, own[name], functions, rows)
    talks = bool(rows) and is_conversation(rows[0]["prompt"])
    called = bool(functions) or any(own.values())
    if called and not talks:
        problems.append(
            "tools are called by messages, and the prompts of the dataset are text: give prompts as lists of messages"
            " (or an environment with a method respond(text), and no other public methods)"
        )
    kwargs = dict(chat_template_kwargs or {})
    # With `tool_use` beside `default`, rows with tools and rows without have different templates.
    shown = [schemas_of({**functions, **of_rows}) for of_rows in own.values()] or [schemas_of(functions)]
    schemas = next((some for some in shown if some), None)
    template = template_of(tokenizer, chat_template_kwargs=kwargs, tools=schemas) if talks else None
    form = format_of(template) if called else None
    if called and talks and form is None:
        problems.append(
            "the chat template of policy.tokenizer writes no tool calls in a form that is known here"
            f" ({', '.join(FORMATS)}): use a checkpoint whose template has tools"
        )
    if talks:
        speaks = any(hasattr(environment, "respond") for environment in made.values())
        roles = ["tool"] * called + ["user"] * speaks
        for tools_of_rows in shown:
            problems += _template_problems(tokenizer, form, tools_of_rows, kwargs, eos_token_ids, roles)
    raise_all("tools and environment_factory", list(dict.fromkeys(problems)))
    return Interaction(
        tokenizer=tokenizer,
        factories=factories,
        kinds={name: type(environment) for name, environment in made.items()},
        own_tools=own,
        tools=functions,
        format=form,
        hidden=None if form is None else hidden_ids(tokenizer, form),
        thinking=talks and opens_thinking(tokenizer, chat_template_kwargs=kwargs, tools=schemas),
        template_kwargs=kwargs,
        eos_token_ids=tuple(eos_token_ids),
        most_calls=most_calls,
        seconds=seconds,
        on_error=on_error,
        ends=ends,
    )


def _template_problems(
    tokenizer: Tokenizer,
    form: Format | None,
    tools: list[Json] | None,
    chat_template_kwargs: Json,
    eos_token_ids: Sequence[int],
    roles: Sequence[str],
) -> list[str]:
    """Return why a chat template cannot carry messages of these roles and calls of these tools."""
    try:
        check_template(
            tokenizer, roles=roles, chat_template_kwargs=chat_template_kwargs, tools=tools, eos_token_ids=eos_token_ids
        )
        if form is None or not tools:
            return []
        fault = call_fault(
            tokenizer, form, tools, chat_template_kwargs=chat_template_kwargs, eos_token_ids=eos_token_ids
        )
        return [fault] if fault else []
    except ValueError as error:
        return [str(error)]


def with_environments(reward_fns: Sequence[RewardFn], interaction: Interaction | None) -> list[RewardFn]:
    """Return reward functions, and one more for each class of environments that has `get_reward`."""
    kinds = {} if interaction is None else interaction.kinds
    own = [
        EnvironmentReward(kind.__name__, None if None in kinds else [n for n in kinds if issubclass(kinds[n], kind)])
        for kind in dict.fromkeys(kinds.values())
        if hasattr(kind, "get_reward")
    ]
    return [*reward_fns, *own]


def environment_weights(weights: Sequence[float] | None, reward_fns: Sequence[RewardFn]) -> list[float] | None:
    """Return the weights of reward functions, with a 1 for each of the environments' where these are left out."""
    own = sum(isinstance(fn, EnvironmentReward) for fn in reward_fns)
    return None if weights is None else [*weights, *[1.0] * (own if len(weights) == len(reward_fns) - own else 0)]


def reward_columns(columns: Iterable[str], interaction: Interaction | None) -> list[str]:
    """Return the names of all columns that reward functions may ask for."""
    return [*columns, *(() if interaction is None else _GIVEN)]


def encode_rows(
    interaction: Interaction | None,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int | None = None,
    on_long_prompt: str = "error",
    chat_template_kwargs: Json | None = None,
    argument: str = "dataset",
) -> EncodedPrompts:
    """`encode_prompts`, where each row's prompt shows the tools that its completions have."""
    shown = interaction is not None and interaction.format is not None
    return encode_prompts(
        rows,
        tokenizer,
        max_prompt_length=max_prompt_length,
        on_long_prompt=on_long_prompt,
        chat_template_kwargs=chat_template_kwargs,
        tools=[interaction.schemas(row) for row in rows] if interaction is not None and shown else None,
        argument=argument,
    )


def _factories(given: Environments | None) -> dict[Hashable, EnvironmentFactory]:
    """Return `environment_factory` as a table, in which one factory for all rows stands under None."""
    if given is None:
        return {}
    table: dict[Hashable, EnvironmentFactory] = dict(given.items()) if isinstance(given, Mapping) else {None: given}
    for name, factory in table.items():
        if not callable(factory):
            where = _where(name)
            raise ValueError(f"{where} is {show(factory)}: give a class, or a function that makes an environment")
    return table


def _where(name: Hashable) -> str:
    """Return how messages name a factory."""
    return "environment_factory" if name is None else f"environment_factory[{name!r}]"


def _made(name: Hashable, factory: EnvironmentFactory) -> object:
    """Make an environment, to look at."""
    try:
        return factory()
    except Exception as error:
        raise ValueError(
            f"{_where(name)} raised {type(error).__name__}: {error}: it is called without arguments, once for each"
            " completion (what differs between rows comes to its method reset)"
        ) from error


def _row_problems(rows: Sequence[Row], factories: Mapping[Hashable, EnvironmentFactory]) -> list[str]:
    """Return what is wrong with the column `environment`."""
    if None in factories or not factories:
        return []
    known = ", ".join(map(repr, factories))
    if any("environment" not in row for row in rows):
        return [f"environment_factory is a dict ({known}), and the dataset has no column 'environment' to choose by"]
    unknown = dict.fromkeys(str(row["environment"]) for row in rows if row["environment"] not in factories)
    return [f"the column 'environment' has {name!r}, and environment_factory has only {known}" for name in unknown]


def _environment_problems(
    name: Hashable, environment: object, own: Mapping[str, Tool], tools: Mapping[str, Tool], rows: Sequence[Row]
) -> list[str]:
    """Return what is wrong with an environment, beside its tools."""
    kind, problems = type(environment).__name__, list[str]()
    if not own and not tools and not hasattr(environment, "respond"):
        problems.append(
            f"{kind} has no public method that the policy could call, and no respond(text): no completion would ever"
            " have a second turn"
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
            f" {error}; add **kwargs for those that it does not use"
        )
    except ValueError:
        pass  # a builtin without a signature
    return problems
