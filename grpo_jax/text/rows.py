"""Rows of a dataset: read, with columns renamed and prompts made by a template, and refused with a reason."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.messages import show
from grpo_jax.text.sources import Dataset, read_rows
from grpo_jax.types import Json, Messages, Row

Columns = Mapping[str, str]
"""New name → name in the source, which may lead into a nested column (`reward_model.ground_truth`)."""

Template = str | list[dict[str, str]]
"""Text, or messages with `role` and `content`, in which `{column}` is the row's; a brace is written twice."""

_BRACES = "a brace that stands for itself is written twice"
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
      dataset: a list of dicts; anything with `len` and integer indexing that gives dicts (`datasets.Dataset`, a grain
        source or `MapDataset`); a pandas DataFrame or a pyarrow Table; what can be iterated over (a generator,
        `datasets.IterableDataset`, in the order in which it shuffles itself); the path of a file (JSONL, .csv,
        .parquet); the name of a dataset on the hub, whose split "train" is read; or a mapping of `path` or `name`, and
        of `config`, `split` and `rows` (only the first). All become the same list, so that order, epochs and resuming
        are the same for all.
      columns: new name → present name of columns; `reward_model.ground_truth` takes one out of a nested column.
      prompt: a template that makes the column `prompt`: text, or a list of messages, in which `{question}` is the
        row's column `question`.
      argument: the caller's name for `dataset`, for the messages.
      most: rows that are read of what can only be iterated over, which may have no end; None: to its end.

    Returns:
      A list of dicts. `prompt` is text in every row, or in every row a list of messages with `role` and `content`.

    Raises:
      ValueError: no rows; a row that is no dict; no `prompt`, or one that is neither text nor messages; rows whose
        columns differ; a column that `columns` or `prompt` names and a row does not have; a file in another form than
        its name says; a dataset that the hub does not give; without `most` a stream of more than ten million rows.
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
    """Read a dataset and rename and fill its columns; the rows are not looked at yet. Arguments as in `load_rows`."""
    check_templates(columns, prompt)
    rows = [_without_arrays(row) if isinstance(row, dict) else row for row in read_rows(dataset, argument, most)]
    if columns is None and prompt is None:
        return rows
    return [
        fill(row, f"{argument} row {i}", columns, prompt) if isinstance(row, Mapping) else row
        for i, row in enumerate(rows)
    ]


def checked_rows(rows: Sequence[Json], fault_of: Callable[[object, Json], str], argument: str) -> list[Row]:
    """Return the rows as dicts, or raise the first of what `fault_of(row, first row)` says is wrong with them."""
    faults = [f"{argument} row {i} {fault}" for i, row in enumerate(rows) if (fault := fault_of(row, rows[0]))]
    if faults:
        more = f" ({len(faults) - 1} more of the {len(rows)} rows have faults)" if len(faults) > 1 else ""
        raise ValueError(faults[0] + more)
    return [dict(row) for row in rows]


def _without_arrays(value: object) -> object:
    """Return a value with lists in the place of NumPy's arrays, as pandas has them where a table has lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_without_arrays(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_arrays(item) for name, item in value.items()}
    return value


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a value, those inside lists and mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _surrogate_fault(row: Json) -> str:
    """Return in which column there is half of a character, "" if there is none."""
    for name, value in row.items():
        for text in _texts(value):
            if not text.isascii() and re.search("[\ud800-\udfff]", text):
                return (
                    f"has half of a character (a lone surrogate) in its column {name!r}, which cannot be encoded: write"
                    " the whole character, or text.encode(errors='replace').decode()"
                )
    return ""


def _row_fault(row: object, first: Json) -> str:
    """Return what is wrong with a row, "" if nothing is; `first` is the row that the others are like."""
    if not isinstance(row, Mapping):
        return f"is {show(row)}: each row is a dict with a 'prompt' and any other columns"
    if "prompt" not in row:
        return f"has no 'prompt'; its columns are {sorted(map(str, row))}: rename or add one"
    if fault := messages_fault(row["prompt"], "prompt") or content_fault(row, first):
        return fault
    if is_conversation(row["prompt"]) != is_conversation(first["prompt"]):
        return (
            "and row 0 differ in kind, one prompt is text and the other a list of messages: reward functions would get "
            "both; make them all the same"
        )
    return ""


def content_fault(row: Json, first: Json) -> str:
    """Return what is wrong with a row whatever it is for, "" if nothing is."""
    for name in _PICTURES:
        if row.get(name) is not None and row[name] != []:
            return f"has a column {name!r}: models read text alone, and no pictures; take the column out"
    return _surrogate_fault(row) or _columns_fault(row, first)


def _columns_fault(row: Json, first: Json) -> str:
    """Return what is wrong with the columns of a row, "" if nothing is."""
    unnamed = [name for name in row if not isinstance(name, str)]
    if unnamed:
        return f"has a column {unnamed[0]!r}: names of columns are text, since reward functions get them as keywords"
    if row.keys() != first.keys():
        missing, extra = (sorted(x - y, key=str) for x, y in ((first.keys(), row.keys()), (row.keys(), first.keys())))
        return (
            f"differs from row 0 in its columns (missing: {missing}, only here: {extra}): give every row the same "
            "columns, None where there is no value"
        )
    return ""


def messages_fault(value: object, column: str) -> str:
    """Return what is wrong with a column of text or messages, "" if it is either."""
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
    """Return what is wrong with a message, "" if nothing is."""
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        return f"a message is a dict with 'role' and 'content'; {_PROMPT}"
    if not isinstance(message["role"], str):
        return "its 'role' is text, such as \"user\""
    calls = message.get("tool_calls") or []
    calls = calls if isinstance(calls, (list, tuple)) else [None]
    functions = [call.get("function") or call if isinstance(call, Mapping) else None for call in calls]
    if not all(isinstance(function, Mapping) for function in functions):
        return "its 'tool_calls' is a list of dicts, each with a 'function', a dict of 'name' and 'arguments'"
    # A call of a tool has no content; anything else that is None would be the word None in the prompt.
    parts = message["content"] if isinstance(message["content"], list) else []
    others = {str(part["type"]) for part in parts if isinstance(part, Mapping) and part.get("type", "text") != "text"}
    if others:
        return f"it has a part of type {min(others)!r}; models read text alone: give parts of type 'text'"
    if not isinstance(message["content"], (str, list)) and not message.get("tool_calls"):
        return "its 'content' is text, or a list of parts"
    return ""


def is_conversation(prompt: str | Messages) -> bool:
    """Return whether a prompt is a list of messages rather than text.

    Example:
      >>> is_conversation([{"role": "user", "content": "Hi"}]), is_conversation("Hi")
      (True, False)
    """
    return not isinstance(prompt, str)


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
