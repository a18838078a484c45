"""Tools: functions that the policy may call, with schemas derived from their signatures and docstrings."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import json
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.messages import raise_all, shorten, show
from grpo_jax.rewards.calls import run_on_event_loop
from grpo_jax.rewards.contract import copy_containers
from grpo_jax.text.calls import parse_json
from grpo_jax.types import Json, Row

CALLED_BY_TRAINER = ("reset", "respond", "get_reward")
"""Names of environment methods that are not tools."""

Function = Callable[..., Any]

_TYPES: dict[str, tuple[Any, str]] = {
    "integer": (int, "an integer"),
    "number": (int | float, "a number"),
    "boolean": (bool, "true or false"),
    "string": (str, "a string"),
    "array": (list, "a list"),
    "object": (dict, "an object"),
}
"""Python types, and descriptions of values for error messages, keyed by JSON schema type."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A sync or async function that the policy may call with keyword arguments."""

    name: str
    function: Function
    schema: Json  # {"type": "function", "function": {"name", "description", "parameters"}}, for chat templates


def read_tools(tools: Sequence[Function]) -> dict[str, Tool]:
    """Convert functions to `Tool`s, keyed by name.

    The functions or bound methods may be sync or async. As in TRL, each parameter needs a type hint and a description
    in the "Args:" section of the docstring, from which transformers' `get_json_schema` builds the schema. Raises a
    single ValueError that lists all functions that cannot be converted.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise ValueError(f"tools must be a list of functions; got {show(tools)}.")
    by_name: dict[str, Tool] = {}
    problems: list[str] = []
    for index, function in enumerate(tools):
        tool = _make_tool(function, f"tools[{index}]")
        if isinstance(tool, str):
            problems.append(tool)
        elif tool.name in by_name:
            problems.append(f"tools[{index}]: tool names must be unique; got {tool.name!r} twice. Rename one of them")
        else:
            by_name[tool.name] = tool
    raise_all("tools", problems)
    return by_name


def environment_tools(environment: object) -> dict[str, Tool]:
    """Convert an environment's public methods to `Tool`s, keyed by name.

    Inherited methods are included; `reset`, `respond`, `get_reward` and names with a leading underscore are not. Raises
    a single ValueError that lists all methods that cannot be converted.
    """
    kind = type(environment)
    methods: dict[str, Tool] = {}
    problems: list[str] = []
    for name in dir(kind):
        member = None if name.startswith("_") or name in CALLED_BY_TRAINER else inspect.getattr_static(kind, name)
        if not isinstance(member, (types.FunctionType, staticmethod, classmethod)):
            continue
        tool = _make_tool(getattr(environment, name), f"{kind.__name__}.{name}", name)
        if isinstance(tool, str):
            problems.append(f"{tool} (if {name!r} is not a tool, rename it to start with '_')")
        else:
            methods[name] = tool
    raise_all(f"environment {kind.__name__}", problems)
    return methods


def _make_tool(function: Function, where: str, name: str | None = None) -> Tool | str:
    """Convert a function to a `Tool`, or return an error message if that fails. `name` is set for methods."""
    from transformers.utils import get_json_schema

    if not callable(function):
        return f"{where} must be a function; got {show(function)}"
    if name is None:
        name = str(getattr(function, "__name__", ""))
        if isinstance(function, type) or not name.isidentifier():
            return f"{where} must be a named function; got {show(function)}. Wrap it in a `def`"
        where = f"{where}, {name!r}"

    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                kind = parameter.kind.description
                return f"{where}: parameters must not be positional-only or variadic; {parameter.name!r} is {kind}"
        described = get_json_schema(function)["function"]
        return Tool(name, function, {"type": "function", "function": {**described, "name": name}})
    except Exception as error:  # resolving a type hint may raise any exception
        advice = " If you need a more complex"  # start of transformers' advice, which does not apply here
        return f"{where}: the schema could not be built: {str(error).partition(advice)[0]}"


def reset_arguments(reset: Function, row: Row) -> Row:
    """Return keyword arguments for `reset`. `prompt` and `environment` are omitted unless `reset` accepts them."""
    parameters = inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: x for name, x in row.items() if name not in ("prompt", "environment") or name in parameters}


def bind_arguments(tool: Tool, arguments: object) -> Json | str:
    """Return the keyword arguments for a tool call, or an error message for the policy.

    `arguments` is a dict, a JSON object as a string, or None. The arguments are validated against the schema. "3" is
    converted to 3 for an integer parameter, and 3 to "3" for a string parameter. The result is a deep copy.
    """
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            return f"{tool.name}: the arguments could not be parsed: {error}"
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return f"{tool.name}: the arguments must be a JSON object; got {show(arguments)}"
    parameters = tool.schema["function"].get("parameters") or {}
    known, required = list(parameters.get("properties") or {}), list(parameters.get("required") or [])
    unknown = [show(name) for name in arguments if name not in known]
    problems = [f"unknown arguments {shorten(unknown)} (available: {', '.join(known) or 'none'})"] if unknown else []
    problems += [f"missing argument {name!r}" for name in required if name not in arguments]
    bound = {}
    for name in () if problems else arguments:
        value, expected = _converted(arguments[name], parameters["properties"][name])
        bound[name] = value
        if expected is not None:
            problems.append(f"argument {name!r} must be {expected}; got {show(value)}")
    return f"{tool.name}: {'; '.join(problems)}" if problems else copy_containers(bound)


def _converted(value: object, schema: Json) -> tuple[object, str | None]:
    """Convert a value to the schema's type. Returns (converted value, None). A value of None is not converted.

    If the value cannot be converted, returns (value, description of the type).
    """
    kind = schema.get("type")
    python_type, expected = _TYPES.get(kind, (object, "")) if isinstance(kind, str) else (object, "")
    if value is None or (
        isinstance(value, python_type) and not (isinstance(value, bool) and kind in ("integer", "number"))
    ):
        return value, None
    if kind == "string":
        return (value, expected) if isinstance(value, list | dict) else (json.dumps(value), None)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value), None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            parsed = parse_json(value.strip().lower() if kind == "boolean" else value.strip())
            if parsed is not None and not isinstance(parsed, str):
                converted, mismatch = _converted(parsed, schema)
                return (value, expected) if mismatch else (converted, None)
    return value, expected


def call_within(seconds: float | None, function: Function, *args: Any) -> Any:
    """Call a sync or async function and wait at most `seconds` for its result.

    If `seconds` is None, there is no limit, and a sync function runs in the caller's thread. Otherwise, it runs in a
    separate thread that cannot be stopped, and its result is discarded after a timeout. An async function runs on the
    event loop for async rewards and is canceled after a timeout. Raises TimeoutError, or the function's exception,
    which may be SystemExit.
    """
    promise = concurrent.futures.Future[Any]()

    def result_of(future: concurrent.futures.Future[Any]) -> Any:
        if not concurrent.futures.wait([future], seconds).done:
            raise TimeoutError(f"took longer than {seconds:g} s")
        return future.result()

    def work() -> None:
        try:
            value = function(*args)
            if inspect.isawaitable(value):
                value = run_on_event_loop(asyncio.wait_for(value, None), result_of)
            promise.set_result(value)
        except asyncio.CancelledError as error:  # not an `Exception`: callers would not handle it
            promise.set_exception(concurrent.futures.CancelledError(str(error)))
        except BaseException as error:
            promise.set_exception(error)

    if seconds is None:
        work()
    else:
        threading.Thread(target=work, daemon=True, name="grpo_jax-environment").start()
    return result_of(promise)


def as_text(value: object, *, limit: int = 20_000) -> str:
    """Convert the result of a tool or an environment to text for the policy.

    Bytes are decoded; None becomes ""; lists, dicts and numbers become JSON; `str` converts all other values. Invalid
    Unicode is replaced. Text beyond `limit` characters is replaced with a note that states how many were omitted.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        text = bytes(value).decode("utf-8", "replace")
    elif isinstance(value, (dict, list, tuple, bool, int, float)):
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except (TypeError, ValueError):  # keys that JSON does not support, or a cycle
            text = str(value)
    else:
        text = "" if value is None else str(value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[{len(text) - limit} more characters were omitted]"
