"""Tool calls: a turn of the policy as it is read, the description of a form of calls, and JSON from anybody."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from grpo_jax.messages import show
from grpo_jax.types import Json, Message, Messages

_MOST_LEVELS = 100


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call as the policy wrote it.

    Attributes:
      name: of the tool, not checked.
      arguments: what stood for them: a value of JSON, not checked (`tools.bind_arguments` does).
    """

    name: str
    arguments: Any


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A turn of the policy, read.

    Attributes:
      content: its text without the calls that were read and without special tokens; thinking stays, and so does what
        stands there of a call that could not be read.
      calls: in their order.
      problems: a text for each call that could not be read, for the policy.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


class Parse(Protocol):
    """Reads a turn: see `Format.parse`."""

    def __call__(self, text: str, *, schemas: Mapping[str, Json] | None = None, thinking: bool = False) -> Parsed: ...


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to write tool calls.

    Attributes:
      name: its key in `FORMATS`.
      recognise: whether a chat template's text writes calls this way.
      parse: (text, schemas=None, thinking=False) → `Parsed`. `text` is one turn, decoded; `schemas` are those of the
        tools by their names, for formats that do not tell text from numbers; `thinking` says that the generation prompt
        has opened <think> (`templates.opens_thinking`), so that the turn begins in the middle of a thought.
      keeps_special_tokens: whether the turn has to be decoded with all of its special tokens, because calls are marked
        by them; without, they are left out, but for the markers.
      markers: what marks a call or a thought, and is read also where a tokenizer has made a special token of it.
    """

    name: str
    recognise: Callable[[str], bool]
    parse: Parse
    keeps_special_tokens: bool
    markers: tuple[str, ...] = ()


class Unreadable(ValueError):
    """A call that cannot be read; its text is the end of a sentence."""


def parse_json(text: str) -> Any:
    """Return the value of JSON from untrusted input; ValueError for infinity, NaN and deep nesting.

    Lone surrogates are replaced.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if "\\ud" in text.lower():  # an escape may stand for half a character, which no file and no tokenizer takes
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        _check_levels(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no valid JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels") from None
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that can be given to a tool")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_number(show(digits).strip("'"))


def _check_levels(value: object) -> None:
    """Raise if lists and dicts are nested too deeply for whoever walks through them."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        inner = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [item for items in inner if isinstance(items, list) for item in items]
        if not level:
            return
    raise RecursionError


def call_of(text: str) -> ToolCall:
    """Return the call of a JSON object with a name and arguments (or parameters), or raise `Unreadable`."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise Unreadable(str(error)) from None
    if not isinstance(value, dict):
        raise Unreadable(f"it is {show(value)}, which is no JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable("it has no 'name' of a tool")
    return ToolCall(name, value.get("arguments", value.get("parameters", {})))


def problem_of(reason: str, form: str) -> str:
    """Return the message to the policy about a call that could not be read; `form` is how calls are written."""
    return f"A tool call could not be read: {reason}. Write calls as {form}"


def changed_calls(messages: Messages, change: Callable[[int, int, Json], Json]) -> Messages:
    """Return a conversation with `change(message, call, function)` in each call, whose place the numbers say."""
    changed = []
    for place, message in enumerate(messages):
        calls = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = change(place, number, call.get("function") or call)
            calls.append({**call, "function": function} if call.get("function") else function)
        changed.append({**message, "tool_calls": calls} if calls else dict(message))
    return changed


def decoded_arguments(messages: Messages, render: Callable[[Messages], str]) -> Messages:
    """Return a conversation whose arguments of calls that are JSON text are objects, which templates write as JSON.

    They stay text where `render` says that the template refuses objects, or writes them as Python does (DeepSeek's).
    """
    objects = list[Json]()

    def decode(place: int, number: int, function: Json) -> Json:
        value = json_value(function.get("arguments"))
        if value is function.get("arguments") or not isinstance(value, dict):
            return function
        objects.append(value)
        return {**function, "arguments": value}

    decoded = changed_calls(messages, decode)
    try:
        shown = render(decoded) if objects else ""
    except Exception:  # as a template raises
        return messages
    return messages if not objects or any(x and repr(x) in shown for x in objects) else decoded


def json_value(arguments: Any) -> Any:
    """Return arguments that may be JSON text as what they stand for."""
    try:
        return parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def assistant_message(parsed: Parsed) -> Message:
    """Return a turn as a message, in the form of chat templates and of TRL."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in parsed.calls
        ]
    return message


def tool_message(name: str, text: str) -> Message:
    """Return a tool's text as a message."""
    return {"role": "tool", "name": name, "content": text}
