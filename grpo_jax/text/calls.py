"""Tool calls: the description of a format, JSON of untrusted text, and a check that a template's own calls are read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from grpo_jax.messages import show
from grpo_jax.text.completions import special_tokens
from grpo_jax.text.templates import ChatTemplate
from grpo_jax.types import Json, Message, Messages, Tokenizer

_MOST_LEVELS = 100

Decode = Callable[..., str]
"""A tokenizer's `decode`: (ids, skip_special_tokens=...) → text."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy.

    Attributes:
      name: of the tool, not checked.
      arguments: a JSON value, not checked (`tools.bind_arguments` does).
    """

    name: str
    arguments: Any


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A parsed turn of the policy.

    Attributes:
      content: its text without the parsed calls and special tokens; thoughts and malformed calls stay.
      calls: in order.
      problems: a message to the policy for each malformed call.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


class Parse(Protocol):
    """Parses a turn: see `Format.parse`."""

    def __call__(self, text: str, *, schemas: Mapping[str, Json] | None = None, thinking: bool = False) -> Parsed: ...


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to write tool calls.

    Attributes:
      name: its key in `FORMATS`.
      recognise: whether a chat template writes calls this way.
      parse: (text, schemas=None, thinking=False) → `Parsed`. `text` is one decoded turn; `schemas` are the tools' by
        name, for formats that do not distinguish text from numbers; with `thinking` the turn begins inside a thought,
        because the generation prompt opens <think>.
      keeps_special_tokens: whether the turn is decoded with its special tokens, because they mark calls.
      markers: texts that mark a call or a thought, and are kept even if they are special tokens.
    """

    name: str
    recognise: Callable[[str], bool]
    parse: Parse
    keeps_special_tokens: bool
    markers: tuple[str, ...] = ()


class Unreadable(ValueError):
    """A malformed call; its text is the end of a sentence."""


def parse_json(text: str) -> Any:
    """Return the value of JSON from untrusted input; ValueError for infinity, NaN and deep nesting.

    Lone surrogates are replaced.
    """
    try:
        value = json.loads(text, parse_constant=_not_finite, parse_float=_finite)
        if "\\ud" in text.lower():  # an escape may be half of a character, which no file and no tokenizer accepts
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        level = [value]
        for _ in range(_MOST_LEVELS):
            inner = [list(item.values()) if isinstance(item, dict) else item for item in level]
            level = [item for items in inner if isinstance(items, list) for item in items]
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        level = [text]
    if level:
        raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels")
    return value


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _not_finite(show(digits).strip("'"))


def json_value(arguments: Any) -> Any:
    """Return the value of arguments that may be JSON text."""
    try:
        return parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def call_of(text: str) -> ToolCall:
    """Return the call of a JSON object with a name and arguments (or parameters), or raise `Unreadable`."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise Unreadable(str(error)) from None
    if not isinstance(value, dict):
        raise Unreadable(f"it is {show(value)}, not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable("it has no 'name' of a tool")
    return ToolCall(name, value.get("arguments", value.get("parameters", {})))


def problem_of(reason: str, form: str) -> str:
    """Return the message to the policy about a malformed call; `form` shows how calls are written."""
    return f"A tool call could not be read: {reason}. Write calls as {form}"


def changed_calls(messages: Messages, change: Callable[[int, int, Json], Json]) -> Messages:
    """Return a copy of a conversation with `change(message index, call index, function)` in each tool call."""
    changed = []
    for place, message in enumerate(messages):
        calls = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = change(place, number, call.get("function") or call)
            calls.append({**call, "function": function} if call.get("function") else function)
        changed.append({**message, "tool_calls": calls} if calls else dict(message))
    return changed


def decoded_arguments(messages: Messages, render: Callable[[Messages], str]) -> Messages:
    """Return a conversation whose tool calls have objects as arguments instead of JSON text.

    Most templates write objects as JSON, and would encode text twice. Arguments stay text if `render` shows that the
    template refuses objects or writes them as Python does (DeepSeek's).
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
    except Exception:  # a template may raise anything
        return messages
    return messages if not objects or any(x and repr(x) in shown for x in objects) else decoded


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


# From tokens to the parser --------------------------------------------------------------------------------------------


def hidden_ids(tokenizer: Tokenizer, form: Format) -> tuple[int, ...] | None:
    """Return the special tokens to leave out before parsing; None if no marker of the format is a special token."""
    special = special_tokens(tokenizer)
    marks = {index for index, token in special.items() if any(marker in token for marker in form.markers)}
    return tuple(sorted(special.keys() - marks)) if marks else None


def turn_text(ids: np.ndarray, decode: Decode, form: Format, hidden: Sequence[int] | None) -> str:
    """Return the text of a turn for its parser; `hidden` is from `hidden_ids`."""
    if hidden is None:
        return decode(ids, skip_special_tokens=not form.keeps_special_tokens)
    return decode(ids[~np.isin(ids, hidden)], skip_special_tokens=False)


def call_fault(template: ChatTemplate, form: Format) -> str:
    """Return why a call of the first tool, as the template writes it, is not parsed from its tokens; "" if it is."""
    tools, tokenizer = template.tools or [], template.tokenizer
    function = tools[0]["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    call = ToolCall(function["name"], {name: _example(schema) for name, schema in properties.items()})
    schemas = {tool["function"]["name"]: tool for tool in tools}
    faults = []
    for arguments in (call.arguments, json.dumps(call.arguments)):  # templates take a dict, or text
        message = assistant_message(Parsed("", (ToolCall(call.name, arguments),)))
        try:
            written, whole = template.turn_of(message)
        except ValueError as error:
            faults.append(f"the chat template cannot write a call: {error}")
            continue
        ids = np.array(tokenizer(text=written, add_special_tokens=False)["input_ids"], np.int32)
        ends = np.flatnonzero(np.isin(ids, template.eos_token_ids))
        text = turn_text(ids[: ends[0] + 1] if len(ends) else ids, tokenizer.decode, form, hidden_ids(tokenizer, form))
        parsed = form.parse(text, schemas=schemas, thinking=whole and template.opens_thinking)
        if [(one.name, json_value(one.arguments)) for one in parsed.calls] == [(call.name, call.arguments)]:
            return ""
        found = f"no call ({parsed.problems[0]})" if parsed.problems else "no call"
        if parsed.calls:
            found = f"{parsed.calls[0].name} with {show(parsed.calls[0].arguments)}"
        faults.append(
            f"the chat template writes a call of {call.name} with {show(call.arguments)} as {show(written, 300)}, which"
            f" the tokenizer decodes to {show(text, 300)}; parsed as {form.name!r}, this is {found}: use a checkpoint"
            " whose template writes calls in a known format, or give such a chat_template"
        )
    return faults[0]


def _example(schema: Json) -> Any:
    """Return a value that a JSON schema allows."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [_example(schema.get("items") or {})]
    return {"integer": 3, "number": 0.5, "boolean": True, "object": {}, "null": None}.get(str(kind), "Xw5")
