"""Rows of a dataset: read, columns renamed, prompts filled in by a template, and checked."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.messages import show
from grpo_jax.text.sources import Dataset, read_rows, without_arrays
from grpo_jax.types import Json, Messages, Row

Columns = Mapping[str, str]
"""New name → name in the source; a dot leads into a nested column (`reward_model.ground_truth`)."""

Template = str | list[dict[str, str]]
"""Text, or messages with `role` and `content`. `{column}` is replaced by the row's value; a brace is written twice."""

_BRACES = "a literal brace is written twice"
_ABSENT = object()
_PICTURES = ("image", "images")
_PROMPT = 'give text, or a list of messages [{"role": "user", "content": ...}]'


def load_rows(
    dataset: Dataset,
    *,
    columns: Columns | None = None,
    prompt: Template | None = None,
    argument: str = "dataset",
    most: int | None = None,
) -> list[Row]:
    """Turn a dataset into a list of dict rows, each with a `prompt` and all with the same columns.

    Args:
      dataset: a list of dicts; a sequence of dicts (`datasets.Dataset`, a grain source); a pandas DataFrame or a
        pyarrow Table; an iterable (a generator, `datasets.IterableDataset`); the path of a file (JSONL, .csv,
        .parquet); the name of a dataset on the hub (its split "train"); or a mapping with `path` or `name`, and
        optionally `config`, `split` and `rows` (the first ones only).
      columns: new name → present name of columns; `reward_model.ground_truth` is the field of a nested column.
      prompt: template of the column `prompt`: text or a list of messages, in which `{question}` is replaced by the
        row's column `question`.
      argument: name of `dataset` in messages.
      most: number of rows to read from an iterable; None reads all.

    Returns:
      A list of dicts. The prompts are all text, or all lists of messages with `role` and `content`.

    Raises:
      ValueError: no rows, or more than ten million; a row that is not a dict, or has no `prompt` of text or messages;
        rows with different columns; a column in `columns` or `prompt` that a row does not have; a file or a dataset
        that cannot be read.
      FileNotFoundError: the path does not exist.

    Example:
      >>> load_rows({"prompt": p, "answer": a} for p, a in [("1+1=", "2"), ("2+2=", "4")])[1]
      {'prompt': '2+2=', 'answer': '4'}
      >>> load_rows([{"question": "1+1"}], prompt="What is {question}?")
      [{'question': '1+1', 'prompt': 'What is 1+1?'}]
    """
    rows = filled_rows(dataset, columns, prompt, argument, most)
    if not rows:
        raise ValueError(f"{argument} is empty: give at least one row with a 'prompt'")
    return checked_rows(rows, _row_fault, argument)


def filled_rows(
    dataset: Dataset, columns: Columns | None, prompt: Template | None, argument: str, most: int | None
) -> list[Any]:
    """Return a dataset's rows with renamed and filled columns, not checked; arguments as in `load_rows`."""
    check_templates(columns, prompt)
    rows = [without_arrays(row) for row in read_rows(dataset, argument, most)]
    if columns is None and prompt is None:
        return rows
    return [
        fill(row, f"{argument} row {i}", columns, prompt) if isinstance(row, Mapping) else row
        for i, row in enumerate(rows)
    ]


def checked_rows(rows: Sequence[Json], fault_of: Callable[[object, Json], str], argument: str) -> list[Row]:
    """Return the rows as dicts; ValueError with the first text that `fault_of(row, first row)` returns."""
    faults = [f"{argument} row {i} {fault}" for i, row in enumerate(rows) if (fault := fault_of(row, rows[0]))]
    if faults:
        more = f" ({len(faults) - 1} more of the {len(rows)} rows have faults)" if len(faults) > 1 else ""
        raise ValueError(faults[0] + more)
    return [dict(row) for row in rows]


def _row_fault(row: object, first: Json) -> str:
    """Return the fault of a row of prompts, "" if there is none."""
    if not isinstance(row, Mapping):
        return f"is {show(row)}: each row is a dict with a 'prompt' and any other columns"
    if "prompt" not in row:
        return f"has no 'prompt'; its columns are {sorted(map(str, row))}: rename or add one"
    if fault := messages_fault(row["prompt"], "prompt") or content_fault(row, first):
        return fault
    if is_conversation(row["prompt"]) != is_conversation(first["prompt"]):
        return "and row 0 differ in kind, one prompt is text and the other a list of messages: make them all the same"
    return ""


def content_fault(row: Json, first: Json) -> str:
    """Return the fault of a row of any kind, "" if there is none."""
    for name in _PICTURES:
        if row.get(name) is not None and row[name] != []:
            return f"has a column {name!r}: models read text only; remove the column"
    for name, value in row.items():
        if not isinstance(name, str):
            return f"has a column {name!r}: names of columns are text, since reward functions get them as keywords"
        try:
            json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
        except UnicodeEncodeError:
            return (
                f"has half of a character (a lone surrogate) in its column {name!r}, which cannot be encoded: write the"
                " whole character, or text.encode(errors='replace').decode()"
            )
    if row.keys() != first.keys():
        missing, extra = (sorted(x - y, key=str) for x, y in ((first.keys(), row.keys()), (row.keys(), first.keys())))
        return (
            f"differs from row 0 in its columns (missing: {missing}, only here: {extra}): give every row the same "
            "columns, None where there is no value"
        )
    return ""


def messages_fault(value: object, column: str) -> str:
    """Return the fault of a column of text or messages, "" if there is none."""
    if isinstance(value, str):
        return ""
    if not isinstance(value, (list, tuple)):
        return f"has the {column!r} {show(value)}, of type {type(value).__name__}: {_PROMPT}"
    if not value:
        return f"has an empty list as its {column!r}: give at least one message"
    for index, message in enumerate(value):
        if fault := _message_fault(message):
            return f"has {show(message)} as message {index} of its {column!r}: {fault}"
    return ""


def _message_fault(message: object) -> str:
    """Return the fault of a message, "" if there is none."""
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        return f"a message is a dict with 'role' and 'content'; {_PROMPT}"
    if not isinstance(message["role"], str):
        return "its 'role' is text, such as \"user\""
    calls = message.get("tool_calls") or []
    calls = calls if isinstance(calls, (list, tuple)) else [None]
    functions = [call.get("function") or call if isinstance(call, Mapping) else None for call in calls]
    if not all(isinstance(function, Mapping) for function in functions):
        return "its 'tool_calls' is a list of dicts, each with a 'function', a dict of 'name' and 'arguments'"
    # Only a tool call may lack content: a template would write None as a word.
    parts = message["content"] if isinstance(message["content"], list) else []
    others = {str(part["type"]) for part in parts if isinstance(part, Mapping) and part.get("type", "text") != "text"}
    if others:
        return f"it has a part of type {min(others)!r}; models read text only: give parts of type 'text'"
    if not isinstance(message["content"], (str, list)) and not message.get("tool_calls"):
        return "its 'content' is text, or a list of parts"
    return ""


def is_conversation(prompt: str | Messages) -> bool:
    """Whether a prompt is a list of messages rather than text."""
    return not isinstance(prompt, str)


def check_templates(columns: object, prompt: object) -> None:
    """Raise ValueError unless `columns` are `Columns` or None, and `prompt` is a `Template` or None."""
    if fault := _template_fault(prompt):
        raise ValueError(f"prompt = {show(prompt)}: {fault}")
    if columns is not None and not (
        isinstance(columns, Mapping) and all(isinstance(name, str) for pair in columns.items() for name in pair)
    ):
        raise ValueError(f"columns = {show(columns)}: give new names with the present ones, as {{answer: solution}}")


def _template_fault(template: object) -> str:
    """Return the fault of a template, "" if there is none."""
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
    """Return a row with renamed columns and its prompt filled in; `where` is its name in messages."""
    names = columns or {}
    missing = [name for name in names.values() if _column(row, name) is _ABSENT]
    if missing:
        raise ValueError(f"columns: {missing[0]!r} is not a column of {where}; its columns are {sorted(map(str, row))}")
    kept = {name: value for name, value in row.items() if name not in names.values()}
    renamed = kept | {new: _column(row, name) for new, name in names.items()}
    if isinstance(prompt, str):
        return {**renamed, "prompt": _filled(prompt, renamed, where)}
    if prompt is not None:
        messages = [{name: _filled(text, renamed, where) for name, text in message.items()} for message in prompt]
        return {**renamed, "prompt": messages}
    return renamed


def _filled(template: str, row: Json, where: str) -> str:
    """Return a template filled with a row's columns."""
    parts = []
    for text, name, spec, conversion in string.Formatter().parse(template):
        parts.append(text)
        if name is None:
            continue
        value = _column(row, name)
        if value is _ABSENT or spec or conversion:
            names = sorted(map(str, row))
            raise ValueError(f"prompt: {{{name}}} is not a column of {where}, which has {names}; {_BRACES}")
        if value is None:
            raise ValueError(f"prompt: {{{name}}} is None in {where}: give a value, or leave the row out")
        parts.append(str(value))
    return "".join(parts)


def _column(row: Json, name: str) -> Any:
    """Return a row's value by a name that may lead into a nested column; `_ABSENT` if there is none."""
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    nested = row.get(outer, _ABSENT)
    if dot and nested is None:
        return None  # a field of a missing value is missing
    return _column(nested, inner) if dot and isinstance(nested, Mapping) else _ABSENT
