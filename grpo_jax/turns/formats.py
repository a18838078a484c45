"""How chat templates write tool calls: one table, `FORMATS`; each entry reads calls back out of what the policy wrote.

A turn is text that nobody vouches for: cut off, nested, repeated, hostile. Reading it never raises and takes time in
proportion to its length; a call that cannot be read becomes a text in `Parsed.problems`, for the policy to learn from.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from grpo_jax.messages import show

MOST_CALLS = 64
"""Calls that are read in one turn: a turn of a thousand openings is read to its end no more than this often."""
_MOST_LEVELS = 100
_SPECIAL = re.compile(r"<\|[a-zA-Z0-9_]{1,40}\|>")


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call as the policy wrote it.

    Attributes:
      name: of the tool, not checked.
      arguments: what stood for them: a value of JSON, not checked (`tools.bind_arguments` does).
    """

    name: str
    arguments: Any


@dataclasses.dataclass(frozen=True)
class Parsed:
    """What a turn of the policy says.

    Attributes:
      content: its text without the calls that were read and without special tokens; thinking stays, and so does what
        stands there of a call that could not be read.
      calls: in their order.
      problems: a text for each call that could not be read, for the policy.
    """

    content: str
    calls: tuple[Call, ...] = ()
    problems: tuple[str, ...] = ()


class Parse(Protocol):
    """Reads a turn: see `Format.parse`."""

    def __call__(
        self, text: str, *, schemas: Mapping[str, Mapping[str, Any]] | None = None, thinking: bool = False
    ) -> Parsed: ...


@dataclasses.dataclass(frozen=True)
class Format:
    """One way to write tool calls.

    Attributes:
      name: its key in `FORMATS`.
      recognise: whether a chat template's text writes calls this way.
      parse: (text, schemas=None, thinking=False) → `Parsed`. `text` is one turn, decoded; `schemas` are those of the
        tools by their names, for formats that do not tell text from numbers; `thinking` says that the generation prompt
        has opened <think> (`templates.opens_thinking`), so that the turn begins in the middle of a thought.
      keeps_special_tokens: whether the turn has to be decoded with its special tokens (skip_special_tokens=False),
        because calls are marked by them; without, they are to be left out.
    """

    name: str
    recognise: Callable[[str], bool]
    parse: Parse
    keeps_special_tokens: bool


class _Unreadable(ValueError):
    """Why a call cannot be read, as the end of a sentence."""


def read_json(text: str) -> Any:
    """Return the value of JSON text from anybody: nothing infinite, no NaN, no deep nesting, no lone surrogate.

    Raises:
      ValueError: it is none, and why.

    Example:
      >>> read_json('{"n": 1}')
      {'n': 1}
      >>> read_json('{"n": 1e999}')
      Traceback (most recent call last):
      ValueError: 1e999 is no number that can be given to a tool
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


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number that can be given to a tool")


def _finite(digits: str) -> float:
    return float(digits) if math.isfinite(float(digits)) else _no_number(show(digits).strip("'"))


def _check_levels(value: Any) -> None:
    """Raise if lists and dicts are nested too deeply for whoever walks through them."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        inner = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [item for items in inner if isinstance(items, list) for item in items]
        if not level:
            return
    raise RecursionError


def _call_of(text: str) -> Call:
    """Return the call that a JSON object with a name and arguments (or parameters) stands for."""
    try:
        value = read_json(text)
    except ValueError as error:
        raise _Unreadable(str(error)) from None
    if not isinstance(value, dict):
        raise _Unreadable(f"it is {show(value)}, which is no JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _Unreadable("it has no 'name' of a tool")
    return Call(name, value.get("arguments", value.get("parameters", {})))


def _problem(reason: str, form: str) -> str:
    return f"A tool call could not be read: {reason}. Write calls as {form}"


# --- <tool_call> … </tool_call>, of which there may be several: with JSON inside (Hermes, Qwen 2.5 and 3), or with tags
# (Qwen3-Coder, Qwen 3.5).

_HERMES_FORM = '<tool_call>\n{"name": "tool", "arguments": {"argument": value}}\n</tool_call>'
_XML_FORM = "<tool_call>\n<function=tool>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>"
_THINK_OR_CALL = re.compile(r"<think>|<tool_call>")
_DECODER = json.JSONDecoder()


def _parse_hermes(
    text: str, *, schemas: Mapping[str, Mapping[str, Any]] | None = None, thinking: bool = False
) -> Parsed:
    return _parse_tagged(text, thinking, _read_hermes, _HERMES_FORM)


def _parse_xml(text: str, *, schemas: Mapping[str, Mapping[str, Any]] | None = None, thinking: bool = False) -> Parsed:
    return _parse_tagged(text, thinking, lambda text, start: _read_xml(text, start, schemas or {}), _XML_FORM)


def _parse_tagged(text: str, thinking: bool, read: Callable[[str, int], tuple[Call, int]], form: str) -> Parsed:
    """Read every call outside of thoughts; `read` takes where a call's inside begins and returns where it all ends."""
    calls: list[Call] = []
    problems: list[str] = []
    kept: list[str] = []
    position = _end_of(text, "</think>", 0) if thinking else 0
    begin = 0  # of the text that is not yet in `kept`
    while found := _THINK_OR_CALL.search(text, position):
        if found[0] == "<think>":
            position = _end_of(text, "</think>", found.end())
            continue
        if len(calls) + len(problems) == MOST_CALLS:
            problems.append(f"Only the first {MOST_CALLS} tool calls of a turn are read.")
            break
        try:
            call, position = read(text, found.end())
        except _Unreadable as error:
            problems.append(_problem(str(error), form))
            position = _end_of(text, "</tool_call>", found.end())
        else:
            calls.append(call)
            kept.append(text[begin : found.start()])
            begin = position
    content = "".join([*kept, text[begin:]])
    return Parsed(content.strip() if calls else content, tuple(calls), tuple(problems))


def _end_of(text: str, tag: str, start: int) -> int:
    """Return where the next `tag` ends; the end of the text if there is none."""
    found = text.find(tag, start)
    return len(text) if found < 0 else found + len(tag)


def _read_hermes(text: str, start: int) -> tuple[Call, int]:
    """Read JSON and its closing tag; the JSON ends where it says, so that a tag within its strings closes nothing."""
    start = _skip(text, start)
    try:
        _, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        end = -1
    close = text.find("</tool_call>", start)
    if end < 0 or not text.startswith("</tool_call>", _skip(text, end)):
        end = len(text) if close < 0 else close
        _call_of(text[start:end])  # raises, unless the tag alone is missing
        raise _Unreadable("it is not closed by </tool_call>")
    return _call_of(text[start:end]), _skip(text, end) + len("</tool_call>")


_BLANK = re.compile(r"\s*")
_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,200})>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,200})>")
_PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_END = re.compile(r"</function>\s*</tool_call>")


def _skip(text: str, start: int) -> int:
    """Return where the blank space at `start` ends."""
    found = _BLANK.match(text, start)
    return found.end() if found else start


def _read_xml(text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[Call, int]:
    """Read one function and its parameters."""
    function = _FUNCTION.match(text, start)
    if not function:
        raise _Unreadable("there is no <function=...> after <tool_call>")
    name, position = function[1].strip(), function.end()
    properties = _properties(schemas.get(name))
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(text, position):
        end = _PARAMETER_END.search(text, parameter.end())
        if not end:
            raise _Unreadable(f"<parameter={parameter[1]}> is not closed by </parameter>")
        key = parameter[1].strip()
        if key in arguments:
            raise _Unreadable(f"the parameter {key!r} is given twice")
        arguments[key] = _value(text[parameter.end() : end.start()], properties.get(key))
        position = end.end()
    closing = _FUNCTION_END.match(text, position)
    if not closing:
        raise _Unreadable("its parameters are not followed by </function> and </tool_call>")
    return Call(name, arguments), closing.end()


def _properties(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments, by their names."""
    if not schema:
        return {}
    return (schema.get("function", schema).get("parameters") or {}).get("properties") or {}


def _value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return what the text of a parameter stands for: text if the schema says so, else JSON where it is JSON."""
    text = text[text.startswith("\n") :]
    text = text[: len(text) - text.endswith("\n")]
    kind = (schema or {}).get("type")
    # Templates write a truth value and None as Python does.
    if kind == "boolean" and text.strip() in ("True", "False"):
        return text.strip() == "True"
    if (schema or {}).get("nullable") and text.strip() in ("None", "null"):
        return None
    if kind == "string":
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


# --- Llama 3: a whole message that is one JSON object, with or without <|python_tag|> before it.

_LLAMA_FORM = '{"name": "tool", "parameters": {"argument": value}} and nothing else'
_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\{"name":.{0,200}"parameters":', re.DOTALL)


def _parse_llama(
    text: str, *, schemas: Mapping[str, Mapping[str, Any]] | None = None, thinking: bool = False
) -> Parsed:
    start = _end_of(text, "</think>", 0) if thinking or text.lstrip().startswith("<think>") else 0
    thought, message = text[:start], text[start:]
    before, tag, after = message.partition(_TAG)
    written = _plain(after if tag else message).strip()
    named = written.startswith("{") and '"name"' in written and ('"parameters"' in written or '"arguments"' in written)
    if not tag and not named:
        return Parsed(_plain(text))
    try:
        call = _call_of(written)
    except _Unreadable as error:
        return Parsed(_plain(text), (), (_problem(str(error), _LLAMA_FORM),))
    return Parsed(_plain(thought + (before if tag else "")).strip(), (call,))


def _plain(text: str) -> str:
    """Return a text without special tokens."""
    return _SPECIAL.sub("", text)


# --- gpt-oss's harmony: messages of their own, whose headers name a channel and a recipient.

_HARMONY_FORM = '<|channel|>commentary to=functions.tool <|constrain|>json<|message|>{"argument": value}<|call|>'
_BODY_END = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,200})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w{1,40})")


def _parse_harmony(
    text: str, *, schemas: Mapping[str, Mapping[str, Any]] | None = None, thinking: bool = False
) -> Parsed:
    calls: list[Call] = []
    problems: list[str] = []
    kept: list[str] = []
    for header, body, end in _messages(text):
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and len(calls) + len(problems) == MOST_CALLS:
            problems.append(f"Only the first {MOST_CALLS} tool calls of a turn are read.")
            break
        if not recipient:
            thought = channel is not None and channel[1] == "analysis"
            kept.append(f"<think>\n{_plain(body)}\n</think>" if thought else _plain(body))
            continue
        try:
            calls.append(_addressed(recipient[1], body, end))
        except _Unreadable as error:
            problems.append(_problem(str(error), _HARMONY_FORM))
            kept.append(_plain(header + body))
    return Parsed("\n\n".join(part for part in kept if part), tuple(calls), tuple(problems))


def _messages(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield header, body and closing token of each message; text without a header is a body."""
    for part in text.split("<|start|>"):
        header, found, rest = part.partition("<|message|>")
        if not found:  # a header that was cut off, or no header at all
            header, rest = (part, "") if "<|channel|>" in part else ("", part)
        end = _BODY_END.search(rest)
        if part:
            yield header, rest[: end.start()] if end else rest, end[0] if end else ""


def _addressed(recipient: str, body: str, end: str) -> Call:
    """Return the call that a message with a recipient stands for."""
    room, _, name = recipient.partition(".")
    if room != "functions" or not name:
        raise _Unreadable(f"there is no recipient {recipient!r}: tools are addressed as functions.tool")
    if end != "<|call|>":
        raise _Unreadable("it is not closed by <|call|>")
    try:
        return Call(name, read_json(body) if body.strip() else {})
    except ValueError as error:
        raise _Unreadable(str(error)) from None


# --- The table. A template is asked in this order: harmony and the tags are also in templates that know JSON.

_ALL = (
    Format("harmony", lambda template: "<|channel|>" in template and "functions." in template, _parse_harmony, True),
    Format("qwen_xml", lambda template: "<tool_call>" in template and "<function=" in template, _parse_xml, False),
    Format("hermes", lambda template: "<tool_call>" in template and '"arguments' in template, _parse_hermes, False),
    Format("llama3", lambda template: _TAG in template or bool(_LLAMA_CALL.search(template)), _parse_llama, True),
)
FORMATS: dict[str, Format] = {entry.name: entry for entry in _ALL}
"""Every known way to write tool calls, by its name."""


def format_of(chat_template: str | Mapping[str, str] | None) -> Format | None:
    """Return how a chat template writes tool calls; None if it mentions none, or writes them in no known way.

    Args:
      chat_template: a tokenizer's; of several under names, the one for tools, as transformers chooses.

    Example:
      >>> format_of('{{ "<tool_call>" }}{"name": "...", "arguments": {{ call.arguments | tojson }} }').name
      'hermes'
      >>> format_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None
      True
    """
    if isinstance(chat_template, Mapping):
        chat_template = chat_template.get("tool_use") or chat_template.get("default")
    if not chat_template:
        return None
    written = chat_template.replace('\\"', '"')
    return next((entry for entry in FORMATS.values() if entry.recognise(written)), None)


def assistant_message(parsed: Parsed) -> dict[str, Any]:
    """Return a turn as a message, in the form of chat templates and of TRL.

    Example:
      >>> assistant_message(Parsed("So:", (Call("add", {"a": 1}),)))["tool_calls"]
      [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]
      >>> assistant_message(Parsed("It is 2."))
      {'role': 'assistant', 'content': 'It is 2.'}
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in parsed.calls
        ]
    return message


def tool_message(name: str, text: str) -> dict[str, Any]:
    """Return what a tool said as a message.

    Example:
      >>> tool_message("add", "2")
      {'role': 'tool', 'name': 'add', 'content': '2'}
    """
    return {"role": "tool", "name": name, "content": text}
