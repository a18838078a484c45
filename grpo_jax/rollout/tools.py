"""Tools: functions that the policy may call, described by their signatures and docstrings."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import json
import threading
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast, get_type_hints

from grpo_jax.messages import raise_all, show, some
from grpo_jax.rewards.calls import event_loop
from grpo_jax.rewards.contract import copy_containers
from grpo_jax.text.calls import parse_json
from grpo_jax.types import Json, Row

CALLED_BY_TRAINER = ("reset", "respond", "answer_calls", "get_reward")
"""Methods of an environment that are not tools."""

Function = Callable[..., Any]

_TYPES: dict[str, tuple[Any, str]] = {
    "integer": (int, "an integer"),
    "number": (int | float, "a number"),
    "boolean": (bool, "true or false"),
    "string": (str, "text"),
    "array": (list, "a list"),
    "object": (dict, "an object"),
}
"""A type of JSON schema → its Python type, and its name in messages."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the policy may call with keywords, sync or async."""

    name: str
    function: Function
    schema: Json  # {"type": "function", "function": {"name", "description", "parameters"}}, for chat templates


def read_tools(tools: Sequence[Function]) -> dict[str, Tool]:
    """Return functions as tools, by their names.

    The functions or bound methods may be sync or async. Each parameter needs a type hint, and a description in the
    docstring's "Args:" section, as in TRL; transformers' `get_json_schema` makes the schema of them. A `ValueError` has
    a line for each function that cannot be a tool.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise ValueError(f"tools is {show(tools)}: give a list of functions")
    read: dict[str, Tool] = {}
    problems: list[str] = []
    for index, function in enumerate(tools):
        tool = _read(function, f"tools[{index}]")
        if isinstance(tool, str):
            problems.append(tool)
        elif tool.name in read:
            problems.append(f"tools[{index}]: there is another tool {tool.name!r}: rename one of them")
        else:
            read[tool.name] = tool
    raise_all("tools", problems)
    return read


def environment_tools(environment: object) -> dict[str, Tool]:
    """Return the public methods of an environment as tools, by their names.

    Inherited methods are included; `reset`, `respond`, `get_reward` and names that begin with an underscore are not. An
    environment with `answer_calls`, which receives whole turns, has the tools of its `tool_schemas` instead. A
    `ValueError` has a line for each method that cannot be a tool.
    """
    kind, described = type(environment), cast("Any", environment)
    if hasattr(kind, "answer_calls"):
        schemas = {schema["function"]["name"]: schema for schema in described.tool_schemas}
        return {name: Tool(name, described.answer_calls, schema) for name, schema in schemas.items()}
    methods: dict[str, Tool] = {}
    problems: list[str] = []
    for name in dir(kind):
        member = None if name.startswith("_") or name in CALLED_BY_TRAINER else inspect.getattr_static(kind, name)
        if not isinstance(member, (types.FunctionType, staticmethod, classmethod)):
            continue
        tool = _read(getattr(environment, name), f"{kind.__name__}.{name}", name)
        if isinstance(tool, str):
            problems.append(f"{tool} (or begin its name with '_', if it is not a tool)")
        else:
            methods[name] = tool
    raise_all(f"environment {kind.__name__}", problems)
    return methods


def _read(function: Function, where: str, name: str | None = None) -> Tool | str:
    """Return a function as a tool, or a message about it; `name` is the name of a method."""
    from transformers.utils import get_json_schema

    if not callable(function):
        return f"{where} is {show(function)}, which cannot be called: give a function"
    if name is None:
        name = str(getattr(function, "__name__", ""))
        if isinstance(function, type) or not name.isidentifier():
            return f"{where} is {show(function)}, which is not a named function: wrap it in a `def`"
        where = f"{where}, {name!r}"

    def copy(**arguments: object) -> None:
        """Replaced."""

    try:
        parameters = inspect.signature(function).parameters
        for parameter in parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                kind = parameter.kind.description
                return f"{where}: argument {parameter.name!r} is {kind}: calls give each argument by name"
        copy.__name__, copy.__doc__ = name, inspect.getdoc(function)
        hints = get_type_hints(function)
        copy.__annotations__ = {key: hint for key, hint in hints.items() if key in (*parameters, "return")}
        cast("Any", copy).__signature__ = inspect.Signature(list(parameters.values()))
        return Tool(name, function, get_json_schema(copy))
    except Exception as error:  # transformers has its own, and resolving a hint may raise anything
        advice = " If you need a more complex"  # transformers suggests passing a schema
        return f"{where}: its schema cannot be made: {str(error).partition(advice)[0]}"


def reset_arguments(reset: Function, row: Row) -> Row:
    """Return the columns to call `reset` with; `prompt` and `environment` only if its signature names them."""
    parameters = inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: x for name, x in row.items() if name not in ("prompt", "environment") or name in parameters}


def bind_arguments(tool: Tool, arguments: object) -> Json | str:
    """Return the keywords to call a tool with, or an error message for the policy.

    `arguments` are a dict, JSON text of an object, or None. They are checked against the schema; "3" for an integer and
    3 for text are converted. The result shares no objects with them.
    """
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            return f"{tool.name}: the arguments are text that cannot be read: {error}"
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return f"{tool.name}: the arguments are {show(arguments)}; give a JSON object"
    parameters = tool.schema["function"].get("parameters") or {}
    known, required = list(parameters.get("properties") or {}), list(parameters.get("required") or [])
    unknown = [show(name) for name in arguments if name not in known]
    problems = [f"unknown arguments {some(unknown)} (there are: {', '.join(known) or 'none'})"] if unknown else []
    problems += [f"missing argument {name!r}" for name in required if name not in arguments]
    bound = {}
    for name in () if problems else arguments:
        value, wanted = _fitted(arguments[name], parameters["properties"][name])
        bound[name] = value
        if wanted is not None:
            problems.append(f"argument {name!r} is {show(value)}; give {wanted}")
    return f"{tool.name}: {'; '.join(problems)}" if problems else copy_containers(bound)


def _fitted(value: object, schema: Json) -> tuple[object, str | None]:
    """Return a value converted to the type of a schema, or the unchanged value and the name of the type.

    None is not checked, and neither are values whose schema has several types or none.
    """
    kind = schema.get("type")
    known, wanted = _TYPES.get(kind, (object, "")) if isinstance(kind, str) else (object, "")
    if value is None or (isinstance(value, known) and not (isinstance(value, bool) and kind in ("integer", "number"))):
        return value, None
    if kind == "string":
        return (value, wanted) if isinstance(value, list | dict) else (json.dumps(value), None)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value), None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            read = parse_json(value.strip().lower() if kind == "boolean" else value.strip())
            if read is not None and not isinstance(read, str):
                read, misfit = _fitted(read, schema)
                return (value, wanted) if misfit else (read, None)
    return value, wanted


def call_within(seconds: float | None, function: Function, *args: Any) -> Any:
    """Call a function, sync or async, and wait at most `seconds` for its result; None means no limit.

    A sync function runs in its own thread, which cannot be stopped: its late result is dropped. An async function runs
    on the event loop of async rewards, and is cancelled. Raises a `TimeoutError`, or the error of the function, also a
    `SystemExit`.
    """
    outcome: list[Any] = []

    def work() -> None:
        try:
            value = function(*args)
            if inspect.isawaitable(value):
                promise = asyncio.run_coroutine_threadsafe(_awaited(value), event_loop())
                if not concurrent.futures.wait([promise], seconds).done:
                    promise.cancel()
                    return  # no outcome
                value = promise.result()
            outcome.append((value, None))
        except BaseException as error:
            outcome.append((None, error))

    if seconds is None:
        work()
    else:
        thread = threading.Thread(target=work, daemon=True, name="grpo_jax-environment")
        thread.start()
        thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"took longer than {seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def as_text(value: object, *, limit: int = 20_000) -> str:
    """Return the result of a tool or an environment as text for the policy; never raises.

    Bytes are decoded, None is "", JSON values become JSON, and other objects are written by `str`. Invalid Unicode is
    replaced. After `limit` characters a note says how many were left out.
    """
    try:
        text = str.encode(_text(value), "utf-8", "replace").decode("utf-8")
    except (Exception, SystemExit) as error:  # of a user's `__str__`
        return f"[{type(value).__name__} that cannot be written as text: {type(error).__name__}]"
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[{len(text) - limit} more characters were left out]"


def _text(value: object) -> str:
    """Return a value as text; may raise."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, (dict, list, tuple, bool, int, float)):
        with contextlib.suppress(TypeError, ValueError):  # a key that JSON does not allow, or a cycle
            return json.dumps(value, ensure_ascii=False, default=str)
    return "" if value is None else str(value)
