"""The road of a call from the policy's tokens to the parser, tried before a run with a call of our own.

```
a call ── chat template ──► text ── tokenizer ──► ids ── turn_text ──► text ── Format.parse ──► the call, or a fault
```
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from grpo_jax.messages import show
from grpo_jax.text.calls import Format, Parsed, ToolCall, assistant_message, json_value
from grpo_jax.text.pieces import special_tokens
from grpo_jax.text.templates import opens_thinking, turn_of
from grpo_jax.types import Json, Tokenizer

Decode = Callable[..., str]
"""As a tokenizer's `decode`: (ids, skip_special_tokens=...) → text."""


def hidden_ids(tokenizer: Tokenizer, form: Format) -> tuple[int, ...] | None:
    """Return the special tokens that are left out of what a parser reads; None if no special token marks a call.

    Those that mark calls stay in the text.
    """
    special = special_tokens(tokenizer)
    marks = {index for index, token in special.items() if any(marker in token for marker in form.markers)}
    return tuple(sorted(special.keys() - marks)) if marks else None


def turn_text(ids: np.ndarray, decode: Decode, form: Format, hidden: Sequence[int] | None) -> str:
    """Return a turn as its parser reads it."""
    if hidden is None:
        return decode(ids, skip_special_tokens=not form.keeps_special_tokens)
    return decode(ids[~np.isin(ids, hidden)], skip_special_tokens=False)


def call_fault(
    tokenizer: Tokenizer,
    form: Format,
    tools: Sequence[Json],
    *,
    eos_token_ids: Collection[int],
    chat_template_kwargs: Json | None = None,
) -> str:
    """Return what keeps a call that the chat template has written from being read; "" if nothing does.

    Args:
      tools: schemas, at least one; the first is called, with all of its arguments.
    """
    function = tools[0]["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    call = ToolCall(function["name"], {name: _example(schema) for name, schema in properties.items()})
    schemas = {tool["function"]["name"]: tool for tool in tools}
    opened = opens_thinking(tokenizer, chat_template_kwargs=chat_template_kwargs, tools=tools)
    hidden = hidden_ids(tokenizer, form)
    faults = []
    # Some templates take the arguments as a dict, others as text.
    for arguments in (call.arguments, json.dumps(call.arguments)):
        message = assistant_message(Parsed("", (ToolCall(call.name, arguments),)))
        try:
            written, goes_on = turn_of(tokenizer, message, chat_template_kwargs=chat_template_kwargs, tools=tools)
        except ValueError as error:
            faults.append(f"the chat template cannot write a call: {error}")
            continue
        ids = np.array(tokenizer(text=written, add_special_tokens=False)["input_ids"], np.int32)
        ends = np.flatnonzero(np.isin(ids, list(eos_token_ids)))
        text = turn_text(ids[: ends[0] + 1] if len(ends) else ids, tokenizer.decode, form, hidden)
        parsed = form.parse(text, schemas=schemas, thinking=opened and goes_on)
        if [(one.name, json_value(one.arguments)) for one in parsed.calls] == [(call.name, call.arguments)]:
            return ""
        faults.append(
            f"the chat template writes a call of {call.name} with {show(call.arguments)} as {show(written, 300)}, which"
            f" the tokenizer gives back as {show(text, 300)}, and read in that, as the form {form.name!r} has it, is"
            f" {_described(parsed)}: use a checkpoint whose template writes calls in a form that is known here, or give"
            " such a chat_template"
        )
    return faults[0]


def _described(parsed: Parsed) -> str:
    """Return what was read of a turn, for a message."""
    if parsed.calls:
        return f"{parsed.calls[0].name} with {show(parsed.calls[0].arguments)}"
    return f"no call ({parsed.problems[0]})" if parsed.problems else "no call"


def _example(schema: Json) -> Any:
    """Return a value that a schema of JSON allows."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "array":
        return [_example(schema.get("items") or {})]
    return {"integer": 3, "number": 0.5, "boolean": True, "object": {}, "null": None}.get(str(kind), "Xw5")
