"""Tools and environments as they are given to `train`, checked before anything is sampled, and their rewards."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from grpo_jax.messages import raise_all, show
from grpo_jax.rewards.contract import as_list
from grpo_jax.text.prompts import EncodedPrompts, encode_prompts
from grpo_jax.text.rows import is_conversation
from grpo_jax.turns.calls import Format
from grpo_jax.turns.formats import FORMATS, format_of
from grpo_jax.turns.roundtrip import call_fault, hidden_ids
from grpo_jax.turns.templates import check_template, opens_thinking, template_of
from grpo_jax.turns.tools import Tool, environment_tools, read_tools, reset_arguments
from grpo_jax.types import Row

_GIVEN = ("environments", "environment_rewards")
"""What reward functions are given of completions of several turns, beside the columns."""


@dataclasses.dataclass(frozen=True)
class Interaction:
    """What the completions of a run are answered by.

    Attributes:
      tokenizer: decodes turns, and encodes what is answered.
      factories: makes an environment, by the value of the column `environment`; under None for all rows. {}: there are
        only tools.
      kinds: the class of what each factory makes.
      own_tools: what can be called of it.
      tools: functions that the policy may call, beside the methods of its environment.
      format: how the chat template writes calls; None where nothing can be called.
      hidden: special tokens that the parser is not shown, if others mark calls (`roundtrip.hidden_ids`).
      thinking: whether a turn begins in the middle of a thought.
      template_kwargs: of the chat template.
      eos_token_ids: that end a turn.
      most_calls: turns that may call tools, in each completion; None: no limit.
      seconds: that a call may take; None: no limit.
      on_error: "raise" or "end".
    """

    tokenizer: Any
    factories: Mapping[Any, Callable[[], Any]]
    kinds: Mapping[Any, type]
    own_tools: Mapping[Any, Mapping[str, Tool]]
    tools: Mapping[str, Tool]
    format: Format | None
    thinking: bool
    template_kwargs: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    hidden: tuple[int, ...] | None = None
    most_calls: int | None = None
    seconds: float | None = None
    on_error: str = "raise"

    def name_of(self, row: Row) -> Any:
        """Under which name a row's factory stands."""
        return None if None in self.factories or not self.factories else row["environment"]

    def schemas(self, name: Any) -> list[dict[str, Any]] | None:
        """What the chat template is told of the tools of such rows."""
        return schemas_of({**self.tools, **self.own_tools.get(name, {})})


def schemas_of(tools: Mapping[str, Tool]) -> list[dict[str, Any]] | None:
    """What the chat template is told of tools; None where there are none."""
    return [tool.schema for tool in tools.values()] or None


class EnvironmentReward:
    """`get_reward` of each completion's environment, as a reward function named after the environments' class.

    Args:
      name: of the class.
      factories: under what names those of it and of its subclasses stand in a dict; None where one makes all.
    """

    def __init__(self, name: str, factories: Collection[Any] | None = None):
        self.__name__, self._factories = name, factories

    def __call__(self, environment_rewards: Sequence[Any], environment: Sequence[Any] = ()) -> list[float | None]:
        """The rewards that were asked for when the episodes ended; None for environments of another class."""
        if self._factories is None:
            return list(environment_rewards)
        pairs = zip(environment, environment_rewards, strict=True)
        return [reward if name in self._factories else None for name, reward in pairs]


def make_interaction(
    tokenizer: Any,
    eos_token_ids: Sequence[int],
    rows: Sequence[Row],
    *,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    most_calls: int | None = None,
    seconds: float | None = None,
    on_error: str = "raise",
) -> Interaction | None:
    """What the completions of a run are answered by, or None where there is nothing to answer.

    Args:
      tokenizer: of the policy.
      eos_token_ids: that end a turn.
      rows: of the dataset.
      tools: as `train` takes them.
      environment_factory: likewise. Each factory is called once here, to see what it makes.
      chat_template_kwargs, most_calls, seconds, on_error: of the config, as `Interaction` has them.

    Raises:
      ValueError: tools or environments that cannot be used, or not with these rows or this chat template. Of several
        faults, all.
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
    # What the template shows of each row's tools; with `tool_use` beside `default` it is another one without tools.
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
        for some in shown:
            try:
                check_template(
                    tokenizer, roles=roles, chat_template_kwargs=kwargs, tools=some, eos_token_ids=eos_token_ids
                )
                if form is not None and some:
                    fault = call_fault(tokenizer, form, some, chat_template_kwargs=kwargs, eos_token_ids=eos_token_ids)
                    problems += [fault] if fault else []
            except ValueError as error:
                problems.append(str(error))
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
    )


def with_environments(reward_fns: Any, interaction: Interaction | None) -> Any:
    """Reward functions, and one more for each class of environments that has `get_reward`."""
    kinds = {} if interaction is None else interaction.kinds
    own = [
        EnvironmentReward(kind.__name__, None if None in kinds else [n for n in kinds if issubclass(kinds[n], kind)])
        for kind in dict.fromkeys(kinds.values())
        if hasattr(kind, "get_reward")
    ]
    return [*as_list(reward_fns), *own] if own else reward_fns


def environment_weights(weights: Sequence[float] | None, reward_fns: Sequence[Any]) -> list[float] | None:
    """Weights of reward functions, with those of environments, which are 1, where they are left out."""
    own = sum(isinstance(fn, EnvironmentReward) for fn in reward_fns)
    return None if weights is None else [*weights, *[1.0] * (own if len(weights) == len(reward_fns) - own else 0)]


def reward_columns(columns: Iterable[str], interaction: Interaction | None) -> list[str]:
    """The dataset's columns, and what else reward functions are given of each completion."""
    return [*columns, *(() if interaction is None else _GIVEN)]


def encode_rows(interaction: Interaction | None, rows: Sequence[Row], tokenizer: Any, **how: Any) -> EncodedPrompts:
    """`encode_prompts`, where each row's prompt shows the tools that its completions have."""
    if interaction is None or interaction.format is None:
        return encode_prompts(rows, tokenizer, **how)
    kwargs = dict(how.pop("chat_template_kwargs", None) or {})
    names = list(dict.fromkeys(interaction.name_of(row) for row in rows))
    at = {name: [i for i, row in enumerate(rows) if interaction.name_of(row) == name] for name in names}
    kept: dict[int, tuple[Row, list[int]]] = {}
    dropped: list[int] = []
    for name in names:
        tools = {"tools": interaction.schemas(name)}
        own = encode_prompts([rows[i] for i in at[name]], tokenizer, chat_template_kwargs=kwargs | tools, **how)
        left = {at[name][i] for i in own.dropped}
        kept |= dict(
            zip((i for i in at[name] if i not in left), zip(own.rows, own.token_ids, strict=True), strict=True)
        )
        dropped += left
    order = sorted(kept)
    return EncodedPrompts([kept[i][0] for i in order], [kept[i][1] for i in order], sorted(dropped))


def _factories(given: Any) -> dict[Any, Callable[[], Any]]:
    """`environment_factory` as a table."""
    if given is None:
        return {}
    table = dict(given) if isinstance(given, Mapping) else {None: given}
    for name, factory in table.items():
        if not callable(factory):
            where = "environment_factory" if name is None else f"environment_factory[{name!r}]"
            raise ValueError(f"{where} is {show(factory)}: give a class, or a function that makes an environment")
    return table


def _made(name: Any, factory: Callable[[], Any]) -> Any:
    """An environment, to look at."""
    where = "environment_factory" if name is None else f"environment_factory[{name!r}]"
    try:
        return factory()
    except Exception as error:
        raise ValueError(
            f"{where} raised {type(error).__name__}: {error}: it is called without arguments, once for each completion"
            " (what differs between rows comes to its method reset)"
        ) from error


def _row_problems(rows: Sequence[Row], factories: Mapping[Any, Any]) -> list[str]:
    """What the column `environment` lacks."""
    if None in factories or not factories:
        return []
    known = ", ".join(map(repr, factories))
    if any("environment" not in row for row in rows):
        return [f"environment_factory is a dict ({known}), and the dataset has no column 'environment' to choose by"]
    unknown = dict.fromkeys(str(row["environment"]) for row in rows if row["environment"] not in factories)
    return [f"the column 'environment' has {name!r}, and environment_factory has only {known}" for name in unknown]


def _environment_problems(
    name: Any, environment: Any, own: Mapping[str, Tool], tools: Mapping[str, Tool], rows: Sequence[Row]
) -> list[str]:
    """What is wrong with an environment, beside its tools."""
    kind, problems = type(environment).__name__, list[str]()
    if not own and not tools and not hasattr(environment, "respond"):
        problems.append(
            f"{kind} has no public method that the policy could call, and no respond(text): no completion would ever"
            " have a second turn"
        )
    problems += [f"{kind} and tools both have {twice!r}: rename one of them" for twice in own.keys() & tools.keys()]
    reset = getattr(environment, "reset", None)
    row = next((row for row in rows if name is None or row.get("environment") == name), None)
    if reset is None or row is None:
        return problems
    given = reset_arguments(reset, row)
    try:
        inspect.signature(reset).bind(**given)
    except TypeError as error:
        problems.append(
            f"{kind}.reset cannot take a row of the dataset, which it is given as keywords ({', '.join(given)}):"
            f" {error}; add **kwargs for those that it does not use"
        )
    except ValueError:
        pass  # a builtin without a signature
    return problems
