"""Warnings before a run of what is no error and costs hours: in its prompts, and between them and the rewards."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_jax.messages import show
from grpo_jax.rewards.contract import reward_names
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.text.rows import is_conversation
from grpo_jax.types import Messages, RewardFn, Row, Tokenizer

_THINK = "<think>"
_LAST = 8
"""Tokens at the end of a prompt that may be the tag of a thought, and the space behind it."""

_PARTS = 100
"""Parts of an object that are looked at."""


def warn_of_prompts(data: EncodedPrompts, tokenizer: Tokenizer, reward_fns: Sequence[RewardFn], argument: str) -> None:
    """Warn of text prompts that bring the BOS which the tokenizer adds, of calls of tools with None among their
    arguments, and of prompts that open <think> themselves where a reward function asks for it.
    """
    for line in (
        _doubled_bos(data, tokenizer, argument),
        _empty_arguments(data.rows, argument),
        _opened_thought(data, tokenizer, reward_fns),
    ):
        if line is not None:
            warnings.warn(line, stacklevel=3)


def _doubled_bos(data: EncodedPrompts, tokenizer: Tokenizer, argument: str) -> str | None:
    """Warns of text prompts that begin with two BOS; a chat template writes its own, and none is added."""
    bos = getattr(tokenizer, "bos_token_id", None)
    doubled = [i for i, ids in enumerate(data.token_ids) if bos is not None and list(ids[:2]) == [bos, bos]]
    if not doubled or is_conversation(data.rows[doubled[0]]["prompt"]):
        return None
    return (
        f"{argument}: {len(doubled)} of {len(data.rows)} prompts, the first of them"
        f" {show(data.rows[doubled[0]]['prompt'])}, begin with the BOS {tokenizer.bos_token!r}, and the tokenizer adds"
        " another: take it out of the text, or give the messages that it was made of"
    )


def _empty_arguments(rows: Sequence[Row], argument: str) -> str | None:
    """Warns of calls of tools in prompts that have None for an argument."""
    found = [(i, name) for i, row in enumerate(rows) for name, value in _arguments(row["prompt"]) if value is None]
    if not found:
        return None
    row, name = found[0]
    return (
        f"{argument} row {row} has a call of a tool with the argument {name!r} = None in its prompt ({len(found)} such"
        " arguments in all): the package datasets fills in what calls of other rows have, and the policy reads null."
        " Take them out, or store arguments as JSON text"
    )


def _arguments(prompt: str | Messages) -> Iterator[tuple[str, object]]:
    """Names and values of the arguments of all calls in a prompt."""
    for message in () if isinstance(prompt, str) else prompt:
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call
            arguments = function.get("arguments")
            yield from arguments.items() if isinstance(arguments, Mapping) else ()


def _opened_thought(data: EncodedPrompts, tokenizer: Tokenizer, reward_fns: Sequence[RewardFn]) -> str | None:
    """Warns where completions begin inside a thought and reward functions look for its beginning."""
    ends = tokenizer.decode(list(data.token_ids[0][-_LAST:]))
    if not ends.rstrip().endswith(_THINK):
        return None
    names = reward_names(reward_fns)
    asking = [repr(name) for name, fn in zip(names, reward_fns, strict=True) if _mentions(fn, _THINK)]
    if not asking:
        return None
    several = len(asking) > 1
    return (
        f"prompts end with {_THINK}, which their template opens, so completions begin inside the thought, and reward"
        f" function{'s' * several} {', '.join(asking)} name{'s' * (not several)} {_THINK}: where it has to be there,"
        f" every reward is 0. Ask for </think> alone, or close the thought by chat_template_kwargs"
        " ({'enable_thinking': False} in many templates)"
    )


def _mentions(fn: Callable[..., Any], word: str) -> bool:
    """Whether a word stands in the strings and patterns that a function is made of, its docstring aside."""
    doc = getattr(fn, "__doc__", None)
    return any(word in text.replace("\\", "") for text in _texts(fn, depth=5) if text != doc)


def _texts(value: object, depth: int) -> Iterator[str]:
    """The strings in a function, down to some depth: its constants, what it closes over, the globals that it names and
    the parts of objects that are called."""
    parts: Iterable[object] = ()
    if isinstance(value, str | re.Pattern):
        yield str(getattr(value, "pattern", value))
    elif isinstance(value, types.CodeType):
        parts = value.co_consts
    elif isinstance(value, types.MethodType):
        parts = (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        with contextlib.suppress(ValueError):  # a cell that is empty still
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            named = [value.__globals__.get(name) for name in _names(value.__code__)]
            parts = (value.__code__, *held, *(x for x in named if isinstance(x, str | re.Pattern | types.FunctionType)))
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        parts = (inspect.getattr_static(type(value), "__call__", None), *vars(value).values())
    for part in itertools.islice(parts, _PARTS) if depth else ():
        yield from _texts(part, depth - 1)


def _names(code: types.CodeType) -> list[str]:
    """The global names in a function's code, those of its comprehensions and inner functions included."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return [*code.co_names, *inner]
