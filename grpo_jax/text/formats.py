"""Tool call formats: their parsers, and detection of a chat template's format.

The parsed text is untrusted. Parsing takes linear time and never raises. `Parsed.problems` reports malformed calls.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo_jax.text.calls import Format, Parsed, ToolCall, parse_call, parse_json, problem_message
from grpo_jax.types import Json

MAX_CALLS = 64
"""Maximum number of calls parsed per turn, which keeps parsing time linear if a turn has thousands of opening tags."""
_SPECIAL = re.compile(r"<\|[a-zA-Z0-9_]{1,40}\|>")


# --- <tool_call> … </tool_call> around JSON (Hermes, Qwen 2.5 and 3) or tags (Qwen3-Coder, Qwen 3.5).

_HERMES_FORM = '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
_XML_FORM = "<tool_call>\n<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n</tool_call>"
_THINK_OR_CALL = re.compile(r"<think>|<tool_call>|<function=[^<>\n]{1,200}>")

ParseOne = Callable[[str, int, Mapping[str, Json]], tuple[ToolCall, int]]
"""A parser for one call: (text, position after the opening tag, tool schemas) → (call, position after the call)."""


def _parse_tagged(
    text: str, *, parse_one: ParseOne, form: str, schemas: Mapping[str, Json] | None = None, thinking: bool = False
) -> Parsed:
    """Parse all calls outside `<think>` blocks. `form` is an example of the correct syntax."""
    schemas = schemas or {}
    calls: list[ToolCall] = []
    problems: list[str] = []
    kept: list[str] = []
    position = _end_of(text, "</think>", 0) if thinking else 0
    start = 0  # start of the text that is not yet in `kept`
    while tag := _THINK_OR_CALL.search(text, position):
        if tag[0] == "<think>":
            position = _end_of(text, "</think>", tag.end())
            continue
        if len(calls) + len(problems) == MAX_CALLS:
            problems.append(f"Only the first {MAX_CALLS} tool calls of a turn are read.")
            break
        if tag[0] != "<tool_call>":
            problems.append(problem_message("it is not enclosed in <tool_call> and </tool_call>", form))
            position = _end_of(text, "</function>", tag.end())
            continue
        try:
            call, position = parse_one(text, tag.end(), schemas)
        except ValueError as error:
            problems.append(problem_message(str(error), form))
            position = _end_of(text, "</tool_call>", tag.end())
        else:
            calls.append(call)
            kept.append(text[start : tag.start()])
            start = position
    content = "".join([*kept, text[start:]])
    return Parsed(content.strip() if calls else content, tuple(calls), tuple(problems))


def _end_of(text: str, tag: str, start: int) -> int:
    """Return the position after the next `tag`, or the length of the text if there is none."""
    position = text.find(tag, start)
    return len(text) if position < 0 else position + len(tag)


def _parse_one_hermes(text: str, start: int, schemas: Mapping[str, Json]) -> tuple[ToolCall, int]:
    """Parse JSON followed by a closing tag. Closing tags inside JSON strings are ignored."""
    start = _skip(text, start)
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        end = -1
    close = text.find("</tool_call>", start)
    if end < 0 or not text.startswith("</tool_call>", _skip(text, end)):
        end = len(text) if close < 0 else close
        parse_call(text[start:end])  # report invalid JSON first
        raise ValueError("it is not closed by </tool_call>")
    return parse_call(text[start:end]), _skip(text, end) + len("</tool_call>")


_BLANK = re.compile(r"\s*")
_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,200})>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,200})>")
_PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_END = re.compile(r"</function>\s*</tool_call>")


def _skip(text: str, start: int) -> int:
    """Return the position of the first character at or after `start` that is not whitespace."""
    blank = _BLANK.match(text, start)
    return blank.end() if blank else start


def _parse_one_xml(text: str, start: int, schemas: Mapping[str, Json]) -> tuple[ToolCall, int]:
    """Parse <function=...>, its parameters and the closing tags."""
    function = _FUNCTION.match(text, start)
    if not function:
        raise ValueError("there is no <function=...> after <tool_call>")
    name, position = function[1].strip(), function.end()
    schema = schemas.get(name) or {}
    properties = (schema.get("function", schema).get("parameters") or {}).get("properties") or {}
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(text, position):
        end = _PARAMETER_END.search(text, parameter.end())
        if not end:
            raise ValueError(f"<parameter={parameter[1]}> is not closed by </parameter>")
        key = parameter[1].strip()
        if key in arguments:
            raise ValueError(f"the parameter {key!r} is given twice")
        arguments[key] = _value(text[parameter.end() : end.start()], properties.get(key))
        position = end.end()
    closing = _FUNCTION_END.match(text, position)
    if not closing:
        raise ValueError("its parameters are not followed by </function> and </tool_call>")
    return ToolCall(name, arguments), closing.end()


def _value(text: str, schema: Json | None) -> Any:
    """Parse a parameter's value. Returns the text if the schema requires a string or the text is not JSON."""
    text = text[text.startswith("\n") :]
    text = text[: len(text) - text.endswith("\n")]
    kind = (schema or {}).get("type")
    # Some templates render booleans and null in Python syntax.
    if kind == "boolean" and text.strip() in ("True", "False"):
        return text.strip() == "True"
    if (schema or {}).get("nullable") and text.strip() in ("None", "null"):
        return None
    if kind == "string":
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text


# --- Llama 3: the whole message is one JSON object, optionally after <|python_tag|>.

_LLAMA_FORM = '{"name": "NAME", "parameters": {"ARGUMENT": VALUE}} and nothing else'
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\{"name":.{0,200}"parameters":', re.DOTALL)


def _parse_llama(text: str, *, schemas: Mapping[str, Json] | None = None, thinking: bool = False) -> Parsed:
    start = _end_of(text, "</think>", 0) if thinking or text.lstrip().startswith("<think>") else 0
    reasoning, message = text[:start], text[start:]
    before, tag, after = message.partition(_PYTHON_TAG)
    body = _plain(after if tag else message).strip()
    if not tag and not _looks_like_call(body):
        problem = problem_message("it is enclosed in <function=...>", _LLAMA_FORM)
        return Parsed(_plain(text), (), (problem,) if "<function=" in body else ())
    try:
        call = parse_call(body)
    except ValueError as error:
        return Parsed(_plain(text), (), (problem_message(str(error), _LLAMA_FORM),))
    return Parsed(_plain(reasoning + (before if tag else "")).strip(), (call,))


def _looks_like_call(body: str) -> bool:
    """Return whether a message starts with "{" and contains keys for a name and arguments."""
    named = '"name"' in body or '"function"' in body
    return body.startswith("{") and named and ('"parameters"' in body or '"arguments"' in body)


def _plain(text: str) -> str:
    """Remove strings that look like special tokens."""
    return _SPECIAL.sub("", text)


# --- gpt-oss (harmony): message headers contain a channel and a recipient.

_HARMONY_FORM = '<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"ARGUMENT": VALUE}<|call|>'
_BODY_END = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,200})")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w{1,40})")


def _parse_harmony(text: str, *, schemas: Mapping[str, Json] | None = None, thinking: bool = False) -> Parsed:
    calls: list[ToolCall] = []
    problems: list[str] = []
    kept: list[str] = []
    for header, body, end in _messages(text):
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and len(calls) + len(problems) == MAX_CALLS:
            problems.append(f"Only the first {MAX_CALLS} tool calls of a turn are read.")
            break
        if not recipient:
            is_reasoning = channel is not None and channel[1] == "analysis"
            kept.append(f"<think>\n{_plain(body)}\n</think>" if is_reasoning else _plain(body))
            continue
        try:
            calls.append(_harmony_call(recipient[1], body, end))
        except ValueError as error:
            problems.append(problem_message(str(error), _HARMONY_FORM))
            kept.append(_plain(header + body))
    return Parsed("\n\n".join(part for part in kept if part), tuple(calls), tuple(problems))


def _messages(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the header, body and closing token of each message. Text without a header is a body."""
    for part in text.split("<|start|>"):
        header, separator, rest = part.partition("<|message|>")
        if not separator:  # a truncated header, or no header
            header, rest = (part, "") if "<|channel|>" in part else ("", part)
        end = _BODY_END.search(rest)
        if part:
            yield header, rest[: end.start()] if end else rest, end[0] if end else ""


def _harmony_call(recipient: str, body: str, end: str) -> ToolCall:
    """Parse a message addressed to a tool. Raises ValueError if the message is not a valid call."""
    namespace, _, name = recipient.partition(".")
    if namespace != "functions" or not name:
        raise ValueError(f"unknown recipient {recipient!r}; address a tool as functions.NAME")
    if end != "<|call|>":
        raise ValueError("it is not closed by <|call|>")
    return ToolCall(name, parse_json(body) if body.strip() else {})


_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_parse_xml = functools.partial(_parse_tagged, parse_one=_parse_one_xml, form=_XML_FORM)
_parse_hermes = functools.partial(_parse_tagged, parse_one=_parse_one_hermes, form=_HERMES_FORM)

FORMATS: dict[str, Format] = {
    "harmony": Format("harmony", _parse_harmony, keeps_special_tokens=True),
    "qwen_xml": Format("qwen_xml", _parse_xml, markers=_MARKERS),
    "hermes": Format("hermes", _parse_hermes, markers=_MARKERS),
    "llama3": Format("llama3", _parse_llama, keeps_special_tokens=True),
}
"""Supported formats, keyed by name."""


def format_of(chat_template: str | None) -> Format | None:
    """Return a chat template's tool call format, or None if the format is unknown."""
    template = (chat_template or "").replace('\\"', '"')
    # The order matters: templates for harmony and XML may also match a later condition.
    if "<|channel|>" in template and "functions." in template:
        return FORMATS["harmony"]
    if "<tool_call>" in template and "<function=" in template:
        return FORMATS["qwen_xml"]
    if "<tool_call>" in template and '"arguments' in template:
        return FORMATS["hermes"]
    return FORMATS["llama3"] if _PYTHON_TAG in template or _LLAMA_CALL.search(template) else None
