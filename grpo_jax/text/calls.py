"""Parsing of tool calls in untrusted text, and a check that calls rendered by a chat template can be parsed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from grpo_jax.messages import show
from grpo_jax.text.completions import special_tokens
from grpo_jax.text.templates import ChatTemplate
from grpo_jax.types import Json, Message, Messages, Tokenizer

_MAX_DEPTH = 100


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call by the policy. `arguments` is any JSON value; `tools.bind_arguments` validates it later."""

    name: str
    arguments: Any


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The result of parsing one of the policy's turns."""

    content: str  # text without parsed calls or special tokens; includes `<think>` blocks and malformed calls
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()  # error messages for the policy about malformed calls or too many calls


@dataclasses.dataclass(frozen=True)
class Format:
    """A syntax for tool calls.

    `parse(text, *, schemas=None, thinking=False)` parses a decoded turn. `schemas` maps tool names to schemas, for
    formats that do not distinguish strings from numbers. `thinking` is True if the generation prompt opens <think>.
    """

    name: str  # key in `FORMATS`
    parse: Callable[..., Parsed]
    keeps_special_tokens: bool = False  # whether special tokens delimit calls, in which case decoding must keep them
    markers: tuple[str, ...] = ()  # strings that delimit calls and reasoning, kept even if they are special tokens


def parse_json(text: str) -> Any:
    """Parse untrusted JSON, replacing lone surrogates.

    Raises ValueError for invalid JSON, Infinity, NaN, and more than 100 levels of nesting. The error message completes
    the sentence "A tool call could not be read: ...".
    """
    try:
        value = json.loads(text, parse_constant=_not_finite, parse_float=_finite)
        if "\\ud" in text.lower():  # files and tokenizers reject lone surrogates
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        level = [value]
        for _ in range(_MAX_DEPTH):
            inner = [list(item.values()) if isinstance(item, dict) else item for item in level]
            level = [item for items in inner if isinstance(items, list) for item in items]
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        level = [text]
    if level:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    return value


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _not_finite(show(digits).strip("'"))


def parse_arguments(arguments: Any) -> Any:
    """Parse `arguments` if it is a JSON string. Other values are returned unchanged."""
    try:
        return parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def parse_call(text: str) -> ToolCall:
    """Parse a JSON object with `name` and optional `arguments` (or `parameters`). Raises ValueError for other text."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is {show(value)}, not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("it lacks the 'name' of a tool")
    return ToolCall(name, value.get("arguments", value.get("parameters", {})))


def problem_message(reason: str, form: str) -> str:
    """Return an error message for the policy about a malformed call. `form` shows the correct syntax."""
    return f"A tool call could not be read: {reason}. Write calls as {form}"


def map_calls(change: Callable[[int, int, Json], Json], messages: Messages) -> Messages:
    """Copy messages, replacing the `function` of each call with `change(message_index, call_index, function)`."""
    changed = []
    for index, message in enumerate(messages):
        calls = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = change(index, number, call.get("function") or call)
            calls.append({**call, "function": function} if call.get("function") else function)
        changed.append({**message, "tool_calls": calls} if calls else dict(message))
    return changed


def decode_arguments(messages: Messages, render: Callable[[Messages], str]) -> Messages:
    """Convert the arguments of tool calls from JSON strings to objects.

    Most templates serialize the arguments, so a string would be encoded twice. Returns the messages unchanged if
    `render`, which applies the template, rejects objects or writes their Python repr (as DeepSeek's templates do).
    """
    objects = list[Json]()

    def decode(message: int, call: int, function: Json) -> Json:
        value = parse_arguments(function.get("arguments"))
        if value is function.get("arguments") or not isinstance(value, dict):
            return function
        objects.append(value)
        return {**function, "arguments": value}

    decoded = map_calls(decode, messages)
    try:
        text = render(decoded) if objects else ""
    except Exception:  # templates can raise any exception
        return messages
    return messages if not objects or any(x and repr(x) in text for x in objects) else decoded


def assistant_message(parsed: Parsed) -> Message:
    """Convert a parsed turn to a message in the format that chat templates and TRL use."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def tool_message(name: str, text: str) -> Message:
    """Build a message that contains a tool's result."""
    return {"role": "tool", "name": name, "content": text}


def hidden_ids(tokenizer: Tokenizer, form: Format) -> tuple[int, ...]:
    """Return the ids that `turn_text` removes: special tokens except markers, or none if `keeps_special_tokens`."""
    if form.keeps_special_tokens:
        return ()
    special = special_tokens(tokenizer)
    return tuple(sorted(i for i, token in special.items() if not any(marker in token for marker in form.markers)))


def turn_text(ids: np.ndarray, decode: Callable[..., str], hidden: Sequence[int]) -> str:
    """Decode a turn for `Format.parse`. `decode` is the tokenizer's method; `hidden` is the result of `hidden_ids`."""
    return decode(ids[~np.isin(ids, hidden)], skip_special_tokens=False)


def call_fault(template: ChatTemplate, form: Format) -> str:
    """Check that a call to the first tool can be rendered, tokenized and parsed. Returns an error message or ""."""
    tools, tokenizer = template.tools or [], template.tokenizer
    function = tools[0]["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    call = ToolCall(function["name"], {name: _example(schema) for name, schema in properties.items()})
    schemas = {tool["function"]["name"]: tool for tool in tools}
    faults = []
    for arguments in (call.arguments, json.dumps(call.arguments)):  # some templates require a dict, others a string
        message = assistant_message(Parsed("", (ToolCall(call.name, arguments),)))
        try:
            written, whole_prompt = template.turn_of(message)
        except ValueError as error:
            faults.append(f"the chat template cannot render a call: {error}")
            continue
        ids = np.array(tokenizer(text=written, add_special_tokens=False)["input_ids"], np.int32)
        ends = np.flatnonzero(np.isin(ids, template.eos_token_ids))
        text = turn_text(ids[: ends[0] + 1] if len(ends) else ids, tokenizer.decode, hidden_ids(tokenizer, form))
        parsed = form.parse(text, schemas=schemas, thinking=whole_prompt and template.opens_thinking)
        if [(one.name, parse_arguments(one.arguments)) for one in parsed.calls] == [(call.name, call.arguments)]:
            return ""
        results = [f"{one.name} with {show(one.arguments)}" for one in parsed.calls]
        results += [f"no call ({problem})" for problem in parsed.problems]
        faults.append(
            f"the chat template renders a call to {call.name} with {show(call.arguments)} as {show(written, 300)},"
            f" which the tokenizer decodes to {show(text, 300)}; the {form.name!r} parser finds"
            f" {(*results, 'no call')[0]}. Use a chat template with a supported tool call format"
        )
    return faults[0]


def _example(schema: Json) -> Any:
    """Return a value that matches a parameter's schema."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [_example(schema.get("items") or {})]
    return {"integer": 3, "number": 0.5, "boolean": True, "object": {}, "null": None}.get(str(kind), "Xw5")
