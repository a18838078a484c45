"""Dataset rows: reading, renaming of columns, prompt templates, and validation."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.messages import show
from grpo_jax.text.images import image_column_fault
from grpo_jax.text.sources import Dataset, read_rows, with_arrays_as_lists
from grpo_jax.types import Json, Messages, Row

Columns = Mapping[str, str]
"""Mapping from new to existing column names. A dot selects a nested field (`reward_model.ground_truth`)."""

Template = str | list[dict[str, str]]
"""A format string, or messages with format strings as `role` and `content`. `{column}` inserts a column's value."""

_BRACES_HINT = "write literal braces as {{ and }}"
_MISSING = object()
_PROMPT_HINT = 'use a string, or a list of messages [{"role": "user", "content": ...}]'


def load_rows(
    dataset: Dataset,
    *,
    columns: Columns | None = None,
    prompt: Template | None = None,
    argument: str = "dataset",
    max_rows: int | None = None,
) -> list[Row]:
    """Read a dataset as a list of dicts that all have the same columns, including `prompt`.

    The prompts must be all strings or all lists of messages. The dataset is a sequence or iterable of dicts
    (`datasets.Dataset`, `datasets.IterableDataset`, a grain source), a pandas DataFrame, a pyarrow Table, the path to a
    JSONL, .csv or .parquet file, the name of a hub dataset (split "train"), or a mapping. A mapping contains either
    `path`, or `name` and optionally `config` and `split`. Its optional key `rows` limits the number of rows. At most
    `max_rows` rows are read from an iterable without a length. Raises FileNotFoundError for a missing file, and
    ValueError for invalid datasets and rows. In error messages, `argument` is the name of the dataset.

    Example:
      >>> load_rows([{"question": "1+1"}], prompt="What is {question}?")
      [{'question': '1+1', 'prompt': 'What is 1+1?'}]
    """
    return load_checked(dataset, columns, prompt, argument, max_rows, "a 'prompt'", _row_fault)


def load_checked(
    dataset: Dataset,
    columns: Columns | None,
    prompt: Template | None,
    argument: str,
    max_rows: int | None,
    needs: str,
    fault_of: Callable[[Json, Json], str],
) -> list[Row]:
    """Read a dataset, rename its columns, fill in the prompt template, and convert the rows to dicts.

    Raises ValueError if there are no rows, a row is not a mapping, or `fault_of(row, rows[0])` returns a message.
    `needs` describes the required columns in error messages.
    """
    check_templates(columns, prompt)
    rows: list[Any] = [with_arrays_as_lists(row) for row in read_rows(dataset, argument, max_rows)]
    if not rows:
        raise ValueError(f"{argument} is empty; pass at least one row with {needs}")
    if invalid := [i for i, row in enumerate(rows) if not isinstance(row, Mapping)]:
        raise ValueError(f"{argument} row {invalid[0]} must be a dict with {needs}; got {show(rows[invalid[0]])}")
    if columns is not None or prompt is not None:
        rows = [fill(row, f"{argument} row {i}", columns, prompt) for i, row in enumerate(rows)]
    faults = [f"{argument} row {i} {fault}" for i, row in enumerate(rows) if (fault := fault_of(row, rows[0]))]
    if faults:
        more = f" ({len(faults)} of the {len(rows)} rows are invalid)" if len(faults) > 1 else ""
        raise ValueError(faults[0] + more)
    return [dict(row) for row in rows]


def _row_fault(row: Json, first: Json) -> str:
    if "prompt" not in row:
        return f"lacks a 'prompt'; set prompt to a template, or rename one of the columns {sorted(map(str, row))}"
    if fault := messages_fault(row["prompt"], "prompt") or columns_fault(row, first):
        return fault
    if is_conversation(row["prompt"]) != is_conversation(first["prompt"]):
        return "and row 0 differ: one prompt is a string and the other a list of messages; convert all to the same type"
    return ""


def columns_fault(row: Json, first: Json) -> str:
    """Return the reason why a row's columns are invalid, or "" if they are valid."""
    if fault := image_column_fault(row):
        return fault
    if non_string := [name for name in row if not isinstance(name, str)]:
        return (
            f"has a column {non_string[0]!r}; column names must be strings, as they are arguments to reward functions"
        )
    if row.keys() != first.keys():
        missing, extra = (sorted(x - y, key=str) for x, y in ((first.keys(), row.keys()), (row.keys(), first.keys())))
        return f"and row 0 have different columns (missing: {missing}, extra: {extra}); use None for missing values"
    return ""


def messages_fault(value: object, column: str) -> str:
    """Return the reason why a value is neither a string nor a list of valid messages, or "" if it is valid."""
    if isinstance(value, str):
        return ""
    if not isinstance(value, (list, tuple)):
        return f"has {show(value)} of type {type(value).__name__} as {column!r}; {_PROMPT_HINT}"
    if not value:
        return f"has an empty list as {column!r}; use at least one message"
    for index, message in enumerate(value):
        if fault := _message_fault(message):
            return f"has {show(message)} as message {index} of {column!r}; {fault}"
    return ""


def _message_fault(message: object) -> str:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        return f"a message must be a dict with 'role' and 'content': {_PROMPT_HINT}"
    if not isinstance(message["role"], str):
        return "its 'role' must be a string, such as \"user\""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        return "its 'tool_calls' must be a list of dicts whose 'function' is a dict with 'name' and 'arguments'"
    parts = message["content"] if isinstance(message["content"], list) else []
    types = {str(part.get("type", "text")) for part in parts if isinstance(part, Mapping)}
    if others := types - {"text", "image"}:
        return f"it has a part of type {min(others)!r}; use parts of type 'text' and 'image'"
    # `content` may be None only in a message with tool calls. In other messages, templates render it as "None".
    if not isinstance(message["content"], (str, list)) and not message.get("tool_calls"):
        return "its 'content' must be a string or a list of parts"
    return ""


def is_conversation(prompt: str | Messages) -> bool:
    """Return whether a prompt is a list of messages rather than a string."""
    return not isinstance(prompt, str)


def check_templates(columns: object, prompt: object) -> None:
    """Raise ValueError if `columns` is neither None nor `Columns`, or `prompt` neither None nor a `Template`."""
    messages: Any = [] if prompt is None else [{"content": prompt}] if isinstance(prompt, str) else prompt
    try:
        for text in [text for message in messages for text in message.values()]:
            list(string.Formatter().parse(text))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"prompt must be a string or messages with strings as values; got {show(prompt)}") from error
    except ValueError as error:
        raise ValueError(f"prompt={show(prompt)}: {error}; {_BRACES_HINT}") from error
    if columns is not None and not (
        isinstance(columns, Mapping) and all(isinstance(name, str) for pair in columns.items() for name in pair)
    ):
        raise ValueError(f"columns must map new to old names, such as {{'answer': 'solution'}}; got {show(columns)}")


def fill(row: Json, where: str, columns: Columns | None, prompt: Template | None) -> Row:
    """Rename a row's columns and fill in its prompt. `where` is the row's name in error messages."""
    columns = columns or {}
    missing = [name for name in columns.values() if _column(row, name) is _MISSING]
    if missing:
        raise ValueError(f"columns: {where} has no column {missing[0]!r}; its columns are {sorted(map(str, row))}")
    others = {name: value for name, value in row.items() if name not in columns.values()}
    renamed = others | {new: _column(row, name) for new, name in columns.items()}
    if isinstance(prompt, str):
        return {**renamed, "prompt": _filled(prompt, renamed, where)}
    if prompt is not None:
        messages = [{name: _filled(text, renamed, where) for name, text in message.items()} for message in prompt]
        return {**renamed, "prompt": messages}
    return renamed


def _filled(template: str, row: Json, where: str) -> str:
    parts = []
    for text, name, spec, conversion in string.Formatter().parse(template):
        parts.append(text)
        if name is None:
            continue
        value = _column(row, name)
        if value is _MISSING or spec or conversion:
            available = f"{where} has the columns {sorted(map(str, row))}"
            raise ValueError(
                f"prompt: {{{name}}} must be a column name without a format specifier; {available}; {_BRACES_HINT}"
            )
        if value is None:
            raise ValueError(f"prompt: {{{name}}} is None in {where}; set a value or remove the row")
        parts.append(str(value))
    return "".join(parts)


def _column(row: Json, name: str) -> Any:
    """Return the value in a column or nested field, None inside a null column, or `_MISSING` if there is none."""
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    nested = row.get(outer, _MISSING)
    if dot and nested is None:
        return None
    return _column(nested, inner) if dot and isinstance(nested, Mapping) else _MISSING
