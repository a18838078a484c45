"""Tools: which functions are accepted, their schemas, the binding of arguments, and their results and timeouts."""

import asyncio
import re
import threading
import time
from decimal import Decimal
from typing import Literal

import numpy as np
import pytest

from grpo_jax.rollout.tools import Tool, as_text, bind_arguments, call_within, environment_tools, read_tools

pytestmark = pytest.mark.quick


def multiply(a: int, b: float = 2.0, how: Literal["fast", "slow"] = "fast") -> float:
    """Multiply two numbers.

    Args:
        a: the first factor
        b: the second factor
        how: what matters

    Returns:
        The product.
    """
    return a * b


def now() -> str:
    """Say what time it is."""
    return "noon"


class Base:
    def shared(self, n: int | None = None) -> int:
        """Give back a number.

        Args:
            n: the number
        """
        return n


class World(Base):
    """An environment with every kind of attribute."""

    Inner = Base  # callable, but not a method

    def __init__(self):
        self.count = 0
        self.on_change = lambda: None

    def reset(self, **row): ...

    def get_reward(self): ...

    def respond(self, text): ...

    def _private(self): ...

    @property
    def state(self):
        raise RuntimeError("a property must not be read")

    def move(this, steps: int) -> int:
        """Move on.

        Args:
            steps: how many
        """
        this.count += steps
        return this.count

    async def wait(self) -> str:
        """Wait a moment."""
        return f"waited at {self.count}"

    @staticmethod
    def roll() -> int:
        """Roll a die."""
        return 6

    @classmethod
    def rules(cls) -> str:
        """Say the rules."""
        return cls.__name__


def test_schemas_equal_those_from_transformers():
    from transformers.utils import get_json_schema

    functions = [multiply, now, Base().shared, World().wait]
    tools = read_tools(functions)
    assert [(name, tool.function) for name, tool in tools.items()] == [(f.__name__, f) for f in functions]
    assert [tool.schema for tool in tools.values()] == [get_json_schema(f) for f in functions]


def test_one_error_names_every_problem():
    def silent(a: int): ...

    def unhinted(a, b: int): ...

    def undescribed(a: int, b: int): ...

    def variadic(a: int, *rest: int): ...

    def positional(a: int, /): ...

    def strange(a: Decimal): ...

    for function in (unhinted, undescribed, variadic, positional, strange):
        function.__doc__ = "Do something.\n\nArgs:\n    a: described"
    with pytest.raises(ValueError, match=r"tools must be a list of functions; got "):
        read_tools(multiply)
    with pytest.raises(ValueError, match="tools has 10 errors") as caught:
        read_tools([3, silent, unhinted, undescribed, variadic, positional, strange, lambda: 0, World, now, now])
    said = str(caught.value)
    assert "by hand" not in said  # advice from transformers that does not apply here
    for part in [
        r"tools\[0\] must be a function; got 3",
        r"tools\[1\], 'silent': the schema could not be built: .*no docstring",
        r"tools\[2\], 'unhinted': .*Argument a is missing a type hint",
        r"tools\[3\], 'undescribed': .*no description for the argument 'b'",
        r"'variadic': parameters must not be positional-only or variadic; 'rest' is variadic positional",
        r"'positional': .*'a' is positional-only",
        r"'strange': the schema could not be built: .*Decimal",
        r"tools\[7\] must be a named function; got <function .*",
        r"tools\[8\] must be a named function; got <class .*World'>",
        r"tools\[10\]: .*got 'now' twice",
    ]:
        assert re.search(part, said), part


def test_public_methods_of_an_environment_are_tools():
    world = World()
    tools = environment_tools(world)
    assert list(tools) == ["move", "roll", "rules", "shared", "wait"]
    tools["move"].function(steps=2)
    assert world.count == 2
    assert asyncio.run(tools["wait"].function()) == "waited at 2"
    assert [tools["roll"].function(), tools["rules"].function()] == [6, "World"]
    for tool in tools.values():
        assert not {"self", "this", "cls"} & set(tool.schema["function"]["parameters"]["properties"])


TOOL = read_tools([multiply])["multiply"]


@pytest.mark.parametrize(("arguments", "bound"), [
    ({"a": "3", "b": "1.5", "how": 2}, {"a": 3, "b": 1.5, "how": "2"}),
    ({"a": 2.5, "b": [1]},
        "multiply: argument 'a' must be an integer; got 2.5; argument 'b' must be a number; got [1]"),
    ('{"a": 3, "b": 1.5}', {"a": 3, "b": 1.5}),
    (None, "multiply: missing argument 'a'"),
    ({"A": 1}, "multiply: unknown arguments 'A' (available: a, b, how); missing argument 'a'"),
    ("[1]", "multiply: the arguments must be a JSON object; got [1]"),
    ("a=1", "multiply: the arguments could not be parsed: it is not valid JSON (Expecting value at character 0)"),
    ("[" * 100_000, "multiply: the arguments could not be parsed: it is nested deeper than 100 levels"),
])  # fmt: skip
def test_arguments_are_bound_or_an_error_text_is_returned(arguments, bound):
    assert bind_arguments(TOOL, arguments) == bound


TYPES = {"count": "integer", "rate": "number", "really": "boolean", "word": "string", "pairs": "array"}
TYPES |= {"either": ["integer", "string"]}
PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
OF_TYPES = Tool("of_types", print, {"type": "function", "function": {"name": "of_types", "parameters": PARAMETERS}})


@pytest.mark.parametrize(("name", "value", "wanted"), [
    ("count", "3", 3),
    ("count", "3.0", 3),
    ("count", "three", "must be an integer; got 'three'"),
    ("count", True, "must be an integer; got True"),
    ("rate", "NaN", "must be a number; got 'NaN'"),
    ("really", "True", True),
    ("really", 1, "must be true or false; got 1"),
    ("word", 3, "3"),
    ("word", {"a": 1}, "must be a string; got {'a': 1}"),
    ("pairs", "[1, 2]", [1, 2]),
    ("either", "3", "3"),
    ("count", None, None),
])  # fmt: skip
def test_values_are_converted_to_the_schema_types(name, value, wanted):
    bound = bind_arguments(OF_TYPES, {name: value})
    if isinstance(bound, str):
        assert bound == f"of_types: argument {name!r} {wanted}"
    else:
        assert (bound, type(bound[name])) == ({name: wanted}, type(wanted))


@pytest.mark.parametrize(("value", "text"), [
    ("as it is\n", "as it is\n"),
    (b"caf\xc3\xa9 \xff", "café \ufffd"),
    (None, ""),
    (True, "true"),
    ({"ä": [1, None, 2.5]}, '{"ä": [1, null, 2.5]}'),
    ((1, Decimal("2.5")), '[1, "2.5"]'),
    (np.float32(1.5), "1.5"),
    ({(1, 2): 3}, "{(1, 2): 3}"),
    ("half \ud83d a pair", "half ? a pair"),
    ("x" * 20_001, "x" * 20_000 + "\n[1 more characters were omitted]"),
])  # fmt: skip
def test_any_tool_result_becomes_text(value, text):
    assert as_text(value) == text


def test_calls_return_raise_or_time_out():
    async def later(x, y):
        await asyncio.sleep(0.001)
        return x + y

    def leaves():
        raise SystemExit(3)

    async def leaves_later():
        leaves()

    async def hangs():
        await asyncio.sleep(1000)

    for seconds in (10.0, None):
        assert call_within(seconds, later, 1, 2) == 3
        for function, error in ((leaves, SystemExit), (leaves_later, SystemExit), (lambda: 1 / 0, ZeroDivisionError)):
            with pytest.raises(error):
                call_within(seconds, function)
    free, begun = threading.Event(), time.monotonic()
    for function in (lambda: free.wait(1000), hangs):
        with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"):
            call_within(0.05, function)
    assert time.monotonic() - begun < 60
    free.set()
