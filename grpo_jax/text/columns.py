"""Columns under other names, and prompts made of a row's columns by a template."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from grpo_jax.messages import show
from grpo_jax.types import Json, Row

Columns = Mapping[str, str]
"""New name → name in the source, which may lead into a nested column (`reward_model.ground_truth`)."""

Template = str | list[dict[str, str]]
"""Text, or messages with `role` and `content`, in which `{column}` is the row's; a brace is written twice."""

_BRACES = "a brace that stands for itself is written twice"
_ABSENT = object()


def check_templates(columns: object, prompt: object) -> None:
    """Refuse columns that are no `Columns`, and a prompt that is no `Template`."""
    fault = _template_fault(prompt)
    if fault:
        raise ValueError(f"prompt = {show(prompt)}: {fault}")
    if columns is not None and not (
        isinstance(columns, Mapping) and all(isinstance(name, str) for pair in columns.items() for name in pair)
    ):
        raise ValueError(f"columns = {show(columns)}: give new names with the present ones, as {{answer: solution}}")


def _template_fault(template: object) -> str:
    """Return what is wrong with a template, "" if nothing is."""
    if template is None:
        return ""
    messages = template if isinstance(template, list) else [{"role": "user", "content": template}]
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return f"message {i} is a mapping of role and content"
        for text in message.values():
            if not isinstance(text, str):
                return f"must be text, or a list of messages with text in them, and has a {type(text).__name__}"
            try:
                list(string.Formatter().parse(text))
            except ValueError as error:
                return f"{error}; {_BRACES}"
    return "" if messages else "must not be empty"


def fill(row: Json, where: str, columns: Columns | None, prompt: Template | None) -> Row:
    """Return a row with its columns renamed and its prompt made; `where` names the row in messages."""
    names = columns or {}
    missing = [name for name in names.values() if _column(row, name) is _ABSENT]
    if missing:
        raise ValueError(f"columns: there is no column {missing[0]!r} in {where}; its columns are {_names(row)}")
    kept = {name: value for name, value in row.items() if name not in names.values()}
    renamed = kept | {new: _column(row, name) for new, name in names.items()}
    if isinstance(prompt, str):
        return {**renamed, "prompt": _filled(prompt, renamed, where)}
    if prompt is not None:
        messages = [{name: _filled(text, renamed, where) for name, text in message.items()} for message in prompt]
        return {**renamed, "prompt": messages}
    return renamed


def _filled(template: str, row: Json, where: str) -> str:
    """Return a template with a row's columns in it."""
    parts = []
    for text, name, spec, conversion in string.Formatter().parse(template):
        parts.append(text)
        if name is None:
            continue
        value = _column(row, name)
        if value is _ABSENT or spec or conversion:
            raise ValueError(f"prompt: {{{name}}} is no column of {where}, which has {_names(row)}; {_BRACES}")
        if value is None:
            raise ValueError(f"prompt: {{{name}}} is None in {where}: give a value, or leave the row out")
        parts.append(str(value))
    return "".join(parts)


def _column(row: Json, name: str) -> Any:
    """Return a row's value under a name, which may lead into a nested column, or `_ABSENT`."""
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    nested = row.get(outer, _ABSENT)
    if dot and nested is None:
        return None  # what a column does not have in a row, it has no part of
    return _column(nested, inner) if dot and isinstance(nested, Mapping) else _ABSENT


def _names(row: Json) -> list[str]:
    return sorted(map(str, row))
