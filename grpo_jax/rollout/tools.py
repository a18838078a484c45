"""Tools: functions that the policy may call, described by their own signatures; their arguments and what they return.

```
functions, an environment's methods ── read_tools, environment_tools ──► Tool(name, function, schema)
a parsed call's arguments ── bind_arguments ──► keywords, or a text that says what is wrong
what the function returned ── as_text ──► an observation
```
"""

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
from typing import Any, get_type_hints

from grpo_jax.messages import nearest, raise_all, show
from grpo_jax.rewards.calls import event_loop
from grpo_jax.rewards.contract import own_copy
from grpo_jax.text.calls import parse_json
from grpo_jax.types import Json, Row

CALLED_BY_TRAINER = ("reset", "respond", "answer_calls", "get_reward")
"""Methods that an environment may have, and that are no tools."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_TYPES: dict[str, tuple[Any, str]] = {
    "integer": (int, "an integer"),
    "number": (int | float, "a number"),
    "boolean": (bool, "true or false"),
    "string": (str, "text"),
    "array": (list, "a list"),
    "object": (dict, "an object"),
}
"""A type of JSON schema → its type in Python, and its name in messages."""
_NO_HINTS = "give every argument a type hint, such as `x: int`"
_NO_DESCRIPTION = "describe it under 'Args:' in the docstring, as `x: what it is`"


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
      name: what the policy calls it.
      function: what is called, with keywords; sync or async. A method of an environment that was given as a class is
        not bound: such a tool is good for its schema only.
      schema: {"type": "function", "function": {"name", "description", "parameters"}}, as chat templates take it.
    """

    name: str
    function: Callable[..., Any]
    schema: Json


def read_tools(tools: Sequence[Callable[..., Any]], *, argument: str = "tools") -> dict[str, Tool]:
    """Return functions as tools, by their names.

    Args:
      tools: functions or bound methods, sync or async, each with a docstring that describes every argument in an
        'Args:' section, and with a type hint for every argument; both become the schema that the policy reads.
      argument: what the caller calls them, for the messages.

    Raises:
      ValueError: one error with a line for each problem: something that is no function or has no name, no docstring,
        an argument without a type hint or description, positional-only or variadic arguments, two of one name, a hint
        that has no JSON schema.

    References:
      What TRL asks of its `tools` (1.16), and transformers' `get_json_schema` for the schema.

    Example:
      >>> def add(a: int, b: int = 1) -> int:
      ...     '''Add two numbers.
      ...
      ...     Args:
      ...         a: the first
      ...         b: the second
      ...     '''
      ...     return a + b
      >>> read_tools([add])["add"].schema["function"]["parameters"]["required"]
      ['a']
    """
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise ValueError(f"{argument} is {show(tools)}: give a list of functions")
    read: dict[str, Tool] = {}
    problems: list[str] = []
    for index, function in enumerate(tools):
        where = f"{argument}[{index}]"
        tool, faults = _read(function, function, where)
        problems += faults
        if tool is not None and tool.name in read:
            problems.append(f"{where}: there is another tool {tool.name!r}: rename one of them")
        elif tool is not None:
            read[tool.name] = tool
    raise_all(argument, problems)
    return read


def environment_tools(environment: object) -> dict[str, Tool]:
    """Return the public methods of an environment as tools, by their names.

    Args:
      environment: an object, or a class, whose methods are then not bound. `reset`, `get_reward`, `respond`, names that
        begin with an underscore and attributes that are no methods are left out; inherited methods are not. An object
        with `answer_calls` has the tools that its `tool_schemas` describe instead, and is told of whole turns.

    Raises:
      ValueError: as `read_tools`, for the methods.

    Example:
      >>> class Counter:
      ...     def reset(self, **row): self.count = 0
      ...     def add(self, n: int):
      ...         '''Add to the counter.
      ...
      ...         Args:
      ...             n: how many
      ...         '''
      ...         self.count += n
      >>> list(environment_tools(Counter())), list(environment_tools(Counter)["add"].schema["function"]["parameters"])
      (['add'], ['type', 'properties', 'required'])
    """
    kind = environment if isinstance(environment, type) else type(environment)
    if hasattr(kind, "answer_calls") and not isinstance(environment, type):
        described: Any = environment
        return {
            schema["function"]["name"]: Tool(schema["function"]["name"], described.answer_calls, schema)
            for schema in described.tool_schemas
        }
    methods: dict[str, Tool] = {}
    problems: list[str] = []
    for name in dir(kind):
        member = None if name.startswith("_") or name in CALLED_BY_TRAINER else inspect.getattr_static(kind, name)
        if not isinstance(member, (types.FunctionType, staticmethod, classmethod)):
            continue
        function = getattr(environment, name)
        # Of a class, the method is described as an object would have it: without its first parameter.
        bound = types.MethodType(member, kind) if function is member else function
        tool, faults = _read(function, bound, f"{kind.__name__}.{name}", name)
        problems += [f"{fault} (or begin its name with '_', if it is no tool)" for fault in faults]
        if tool is not None:
            methods[name] = tool
    raise_all(f"environment {kind.__name__}", problems)
    return methods


def _read(
    function: Callable[..., Any], described: Callable[..., Any], where: str, name: str | None = None
) -> tuple[Tool | None, list[str]]:
    """Return a function as a tool, or what keeps it from being one; `described` is what its schema is made from."""
    if not callable(function):
        return None, [f"{where} is {show(function)}, which cannot be called: give a function"]
    name = name or getattr(function, "__name__", "")
    if isinstance(function, type) or not str(name).isidentifier():
        return None, [f"{where} is {show(function)}, which is no named function: wrap it in a `def`"]
    where = where if where.endswith(f".{name}") else f"{where}, {name!r}"
    try:
        parameters = list(inspect.signature(described).parameters.values())
    except (TypeError, ValueError):
        return None, [f"{where} has no signature: wrap it in a `def` with type hints"]
    faults = _faults_of(described, parameters)
    schema: Json = {}
    if not faults:
        try:
            schema = _schema(described, str(name), parameters)
        except Exception as error:  # transformers' own two, and whatever resolving a hint raises
            advice = " If you need a more complex"  # transformers would take a schema in place of the function
            faults = [f"its schema cannot be made: {str(error).partition(advice)[0]}"]
    return (None if faults else Tool(str(name), function, schema)), [f"{where}: {fault}" for fault in faults]


def _faults_of(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Return what is wrong with the signature and docstring of a function."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    faults = []
    docstring = inspect.getdoc(function)
    if not docstring:
        faults.append("it has no docstring: say in one what it does, since that is all the policy learns of it")
    described = (docstring and parse_google_format_docstring(docstring.strip())[1]) or {}
    for parameter in parameters:
        which = f"argument {parameter.name!r}"
        if parameter.kind in _VARIADIC:
            faults.append(f"{which} takes any number of values, which no schema can say: name each argument")
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            faults.append(f"{which} is positional-only: calls give arguments by name")
        if parameter.annotation is parameter.empty:
            faults.append(f"{which} has no type hint: {_NO_HINTS}")
        if docstring and parameter.name not in described:
            faults.append(f"{which} has no description: {_NO_DESCRIPTION}")
    return faults


def _schema(function: Callable[..., Any], name: str, parameters: Sequence[inspect.Parameter]) -> Json:
    """Return the schema of a function, made from a stand-in that has its face and no `self`."""
    from transformers.utils import get_json_schema

    def face(**arguments: Any) -> None:
        """Replaced."""

    hints = get_type_hints(function)
    kept = {*(parameter.name for parameter in parameters), "return"}
    face.__name__, face.__doc__ = name, inspect.getdoc(function)
    face.__annotations__ = {key: hint for key, hint in hints.items() if key in kept}
    described: Any = face
    described.__signature__ = inspect.Signature(parameters)
    return get_json_schema(face)


def reset_arguments(reset: Callable[..., Any], row: Row) -> Row:
    """Return the columns to call `reset` with: of prompt and name of the environment only what its signature takes."""
    try:
        parameters = inspect.signature(reset).parameters
    except ValueError:  # a builtin without a signature
        return row
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: x for name, x in row.items() if name not in ("prompt", "environment") or name in parameters}


def bind_arguments(tool: Tool, arguments: object) -> dict[str, Any] | str:
    """Return the keywords to call a tool with, or a text for the policy that says what is wrong with them.

    Names, required arguments and types are checked by the schema; "3" for an integer or 3 for text are converted.
    `arguments` are a dict, JSON text of an object, or None; the result shares nothing with them.
    """
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            return f"{tool.name}: the arguments are text that cannot be read: {error}"
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return f"{tool.name}: the arguments are {_kind(arguments)}, {show(arguments)}; give a JSON object"
    parameters = tool.schema["function"].get("parameters") or {}
    known, required = list(parameters.get("properties") or {}), list(parameters.get("required") or [])
    problems = [f"unknown argument {_suggested(name, known)}" for name in arguments if name not in known]
    if len(problems) > 5:
        problems = [*problems[:5], f"{len(problems) - 5} more unknown arguments"]
    problems += [f"missing argument {name!r}" for name in required if name not in arguments]
    bound = {}
    for name in () if problems else arguments:
        value, wanted = _fitted(arguments[name], parameters["properties"][name])
        bound[name] = value
        if wanted is not None:
            problems.append(f"argument {name!r} is {_kind(value)}, {show(value)}; give {wanted}")
    return f"{tool.name}: {'; '.join(problems)}" if problems else own_copy(bound)


def _fitted(value: Any, schema: Json) -> tuple[Any, str | None]:
    """Return a value of the type that a schema names, or the value as it is and what would fit.

    None, and a value whose schema has several types or none, are the tool's own affair.
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


def _suggested(name: object, known: Sequence[str]) -> str:
    """Return an unknown name with the nearest known one, or all known ones if none is near."""
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(known) or 'none'}"
    return f"{show(name)} ({hint})"


def _kind(value: object) -> str:
    """Return what a value of JSON is called, with its article."""
    names = {bool: "a truth value", list: "a list", int: "a number", float: "a number", str: "text"}
    return names.get(type(value), f"a {type(value).__name__}")


def call_within(seconds: float | None, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a function, sync or async, and wait at most `seconds` (None: no limit) for its result.

    A sync function runs in its own thread, which cannot be ended: its late result is dropped. An async one runs on the
    loop of async rewards, and is cancelled. Raises a `TimeoutError`, or what the function raises, `SystemExit`
    included.
    """
    outcome: list[Any] = []

    def work() -> None:
        try:
            value = function(*args, **keywords)
            if inspect.isawaitable(value):
                promise = asyncio.run_coroutine_threadsafe(_awaited(value), event_loop())
                if not concurrent.futures.wait([promise], seconds).done:
                    promise.cancel()
                    return  # no outcome: it took longer, however soon the caller sees that
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
    """Return what a tool or an environment returned as text for the policy; never raises.

    Bytes are decoded, None is no text, JSON values become JSON, and all else is `str`; what is not Unicode is replaced.
    After `limit` characters a note says how many were left out.
    """
    try:
        text = _text(value)
        # Encoded by `str` itself, whatever a subclass of it makes of its own methods: what comes back is a plain str.
        text = str.encode(text, "utf-8", "replace").decode("utf-8")
    except (Exception, SystemExit) as error:  # a value can do anything while it is written
        return f"[{type(value).__name__} that cannot be written as text: {type(error).__name__}]"
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[{len(text) - limit} more characters were left out]"


def _text(value: object) -> str:
    """Return a value as text; may raise."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, (dict, list, tuple, bool, int, float)):
        try:
            return json.dumps(value, ensure_ascii=False, default=str)
        except Exception:  # a circle, a key that JSON has none for: `str` may have an answer
            return str(value)
    return str(value)
