"""Rows of a dataset: read from what people have, and refused with a reason."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from grpo_jax.messages import show

Row = dict[str, Any]


Messages = list[dict[str, Any]]


_MOST_ROWS = 10**9
_MOST_READ = 10**7  # of what does not say how many there are
_PICTURES = ("image", "images")
_PROMPT = 'give text, or a list of messages [{"role": "user", "content": ...}]'


def load_rows(dataset: Any, *, argument: str = "dataset", most: int | None = None) -> list[Row]:
    """Turn a dataset into a list of dict rows, each with a `prompt` and all with the same columns.

    Args:
      dataset: a list of dicts; anything with `len` and integer indexing that gives dicts (`datasets.Dataset`, a grain
        source or `MapDataset`); a pandas DataFrame or a pyarrow Table; what can be iterated over (a generator,
        `datasets.IterableDataset`, in the order in which it shuffles itself); or the path of a JSONL file. All become
        the same list, so that order, epochs and resuming are the same for all.
      argument: what the caller calls it, for the messages.
      most: rows that are read of what can only be iterated over, which may have no end; None: to its end.

    Returns:
      A list of dicts. `prompt` is text in every row, or in every row a list of messages with `role` and `content`.

    Raises:
      ValueError: no rows; a row that is no dict; no `prompt`, or one that is neither text nor messages; rows whose
        columns differ; a line of the file that is not JSON; without `most` a stream of more than ten million rows.
      FileNotFoundError: the path does not exist.

    Example:
      >>> load_rows({"prompt": p, "answer": a} for p, a in [("1+1=", "2"), ("2+2=", "4")])[1]
      {'prompt': '2+2=', 'answer': '4'}
    """
    rows = [_without_arrays(row) if isinstance(row, dict) else row for row in read_rows(dataset, argument, most)]
    if not rows:
        raise ValueError(f"{argument} is empty: give at least one row with a 'prompt'")
    faults = [f"{argument} row {i} {fault}" for i, row in enumerate(rows) if (fault := _row_fault(row, rows[0]))]
    if faults:
        more = f" ({len(faults) - 1} more of the {len(rows)} rows have faults)" if len(faults) > 1 else ""
        raise ValueError(faults[0] + more)
    return [dict(row) for row in rows]


def _without_arrays(value: Any) -> Any:
    """Return a value with lists in the place of NumPy's arrays, as pandas has them where a table has lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_without_arrays(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_arrays(item) for name, item in value.items()}
    return value


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, those inside lists and mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _surrogate_fault(row: Mapping[Any, Any]) -> str:
    """Return in which column there is half of a character, "" if there is none."""
    for name, value in row.items():
        for text in _texts(value):
            if not text.isascii() and re.search("[\ud800-\udfff]", text):
                return (
                    f"has half of a character (a lone surrogate) in its column {name!r}, which cannot be encoded: write"
                    " the whole character, or text.encode(errors='replace').decode()"
                )
    return ""


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset is an `IterableDataset`, of `datasets` or of PyTorch, which may have no end."""
    return any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__) and not hasattr(dataset, "__len__")


def _row_fault(row: Any, first: Any) -> str:
    """Return what is wrong with a row, "" if nothing is; `first` is the row that the others are like."""
    if not isinstance(row, Mapping):
        return f"is {show(row)}: each row is a dict with a 'prompt' and any other columns"
    if "prompt" not in row:
        return f"has no 'prompt'; its columns are {sorted(map(str, row))}: rename or add one"
    if fault := _prompt_fault(row["prompt"]) or _picture_fault(row) or _surrogate_fault(row):
        return fault
    if fault := _columns_fault(row, first):
        return fault
    if is_conversation(row["prompt"]) != is_conversation(first["prompt"]):
        return (
            "and row 0 differ in kind, one prompt is text and the other a list of messages: reward functions would get "
            "both; make them all the same"
        )
    return ""


def _picture_fault(row: Mapping[Any, Any]) -> str:
    """Return what is wrong with a row of more than text, "" if there is none."""
    for name in _PICTURES:
        if row.get(name) is not None and row[name] != []:
            return f"has a column {name!r}: models read text alone, and no pictures; take the column out"
    return ""


def _columns_fault(row: Mapping[Any, Any], first: Mapping[Any, Any]) -> str:
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


def read_rows(dataset: Any, argument: str, most: int | None = None) -> list[Any]:
    """Read whatever stands for a dataset into a list, whose rows are not looked at yet."""
    if isinstance(dataset, (str, os.PathLike)):
        return _read_jsonl(dataset, argument)
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"{argument} is a dict with the keys {sorted(map(str, dataset))}: give a list of rows, each a dict "
            "(of a dataset with splits, choose one: dataset['train'])"
        )
    package = type(dataset).__module__.partition(".")[0]
    if package == "pandas" and hasattr(dataset, "to_dict"):
        return dataset.to_dict("records")
    if package == "pyarrow" and hasattr(dataset, "to_pylist"):
        return dataset.to_pylist()
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        if len(dataset) > _MOST_ROWS:
            raise ValueError(
                f"{argument} says that it has {len(dataset)} rows, as a source does that repeats for ever: give it "
                "without its repetition (num_train_epochs and max_steps say how long to train)"
            )
        # By index, not by iteration: random-access sources need not be iterable.
        try:
            rows = [dataset[index] for index in range(len(dataset))]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{argument} is of type {type(dataset).__name__}, whose rows cannot be had by number "
                f"({type(error).__name__}: {error}): give a list of dicts"
            ) from error
        if package == "grain":
            rows = [row for row in rows if row is not None]  # which is how grain says that a filter left one out
        return rows
    if isinstance(dataset, Iterable):
        return _read_stream(dataset, argument, most)
    raise ValueError(
        f"{argument} is {show(dataset)}: give a list of dicts, a datasets.Dataset, an iterator of dicts or the path "
        "of a JSONL file"
    )


def read_lines(path: str | os.PathLike[str], argument: str) -> Iterator[str]:
    """Read the lines of a file of text in UTF-8, with their ends.

    Raises:
      ValueError: bytes that are no UTF-8, with the line that they are in.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")  # some programs begin with a byte-order mark
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{argument}: line {number} of {os.fspath(path)!r} is no text in UTF-8 (byte {error.start} of it is"
                    f" 0x{error.object[error.start]:02x}): write the file in UTF-8 (iconv -f latin1 -t utf-8, where it"
                    " is Latin-1), or read it yourself (Parquet: datasets.load_dataset) and give its rows"
                ) from error


def _read_stream(dataset: Iterable[Any], argument: str, most: int | None) -> list[Any]:
    """Read rows one after another: `most` of them, or all, of which there may not be too many."""
    rows = list(itertools.islice(dataset, _MOST_READ + 1 if most is None else most))
    if most is None and len(rows) > _MOST_READ:
        raise ValueError(
            f"{argument} goes on after {_MOST_READ:,} rows, as a stream does that has no end: give a part of it, such"
            " as dataset.take(1000) or itertools.islice(dataset, 1000)"
        )
    return rows


def _read_jsonl(path: str | os.PathLike[str], argument: str) -> list[Any]:
    """Read one JSON value from each non-empty line."""
    rows: list[Any] = []
    name = os.fspath(path)
    if not os.path.isfile(path):
        what = "a directory" if os.path.isdir(path) else "no file"
        raise FileNotFoundError(f"{argument} is {name!r}, which is {what}: give the path of a JSONL file")
    for number, line in enumerate(read_lines(path, argument), start=1):
        if not line.strip():
            continue
        where = f"{argument}: line {number} of {name!r}"
        try:
            row = json.loads(line.strip())
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where} is not JSON ({error.msg} at column {error.colno}): a JSONL file has one object on each line"
            ) from error
        if isinstance(row, list) and not rows:
            raise ValueError(f"{where} holds a JSON list: write one object on each line, or give json.load of the file")
        if not isinstance(row, dict):
            raise ValueError(f"{where} is {show(row)}: a JSONL file has one object on each line")
        rows.append(row)
    return rows


def _prompt_fault(prompt: Any) -> str:
    """Return what is wrong with a prompt, "" if it is text or a list of messages."""
    if isinstance(prompt, str):
        return ""
    if not isinstance(prompt, (list, tuple)):
        return f"has the 'prompt' {show(prompt)}, of type {type(prompt).__name__}: {_PROMPT}"
    if not prompt:
        return "has an empty list as its 'prompt': give at least one message"
    for index, message in enumerate(prompt):
        if fault := _message_fault(message):
            return f"has {show(message)} as message {index} of its 'prompt': {fault}"
    return ""


def _message_fault(message: Any) -> str:
    """Return what is wrong with a message, "" if nothing is."""
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        return f"a message is a dict with 'role' and 'content'; {_PROMPT}"
    if not isinstance(message["role"], str):
        return "its 'role' is text, such as \"user\""
    # A call of a tool has no content; anything else that is None would be the word None in the prompt.
    parts = message["content"] if isinstance(message["content"], list) else []
    others = {str(part["type"]) for part in parts if isinstance(part, Mapping) and part.get("type", "text") != "text"}
    if others:
        return f"it has a part of type {min(others)!r}; models read text alone: give parts of type 'text'"
    if not isinstance(message["content"], (str, list)) and not message.get("tool_calls"):
        return "its 'content' is text, or a list of parts"
    return ""


def is_conversation(prompt: Any) -> bool:
    """Return whether a prompt is a list of messages rather than text.

    Example:
      >>> is_conversation([{"role": "user", "content": "Hi"}]), is_conversation("Hi")
      (True, False)
    """
    return not isinstance(prompt, str)
