"""The rows that a RUN.yaml names: read from a file, from the hub or from a function, with its columns and templates."""

from __future__ import annotations

import csv
import itertools
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_jax.cli.named import find, is_reference
from grpo_jax.messages import one_line, show
from grpo_jax.text.rows import load_rows, read_lines, read_rows
from grpo_jax.types import Row

_KEYS = {"path", "name", "config", "split", "rows"}
_KINDS = (".jsonl", ".json", ".csv", ".parquet")


def rows_of(source: Any, folder: Path, *, key: str = "data", columns: Any = None, prompt: Any = None) -> list[Row]:
    """The rows of a source, as `train` takes them.

    Args:
      source: what stands under `data`, see `keys.OWN`.
      folder: what files are named from.
      key: what the source is called, for the messages.
      columns: new name → name in the source.
      prompt: a template, text or messages, in the place of a column `prompt`.

    Raises:
      ValueError: what is wrong with any of them.
      FileNotFoundError: no such file.
    """
    asked = dict(source) if isinstance(source, Mapping) else {}
    unknown = sorted(set(asked) - _KEYS, key=str)
    if unknown:
        raise ValueError(f"{key}.{unknown[0]}: no such key; {key} has {', '.join(sorted(_KEYS))}")
    if not isinstance(source, Mapping):
        asked = {"name" if isinstance(source, str) and _is_of_hub(source, folder) else "path": source}
    if len(asked.keys() & {"path", "name"}) != 1:
        raise ValueError(f"{key} = {show(source)}: give it a path, or the name of a dataset on the hub, and not both")
    count = asked.get("rows")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"{key}.rows = {show(count)}: use a whole number from 1 up, or leave it out for all")
    rows = _of_hub(asked, key) if "name" in asked else _of_path(asked["path"], folder, key)
    rows = list(itertools.islice(rows, count))
    if not rows:
        raise ValueError(f"{key} = {show(source)}: has no rows")
    return load_rows([_shaped(row, i, key, columns, prompt) for i, row in enumerate(rows)], argument=key)


def _is_of_hub(text: str, folder: Path) -> bool:
    """Whether a text is the name of a dataset on the hub: neither a file nor like one, and no reference."""
    return not (is_reference(text) or (folder / text).exists() or text.endswith(_KINDS)) and text.count("/") <= 1


def _of_hub(asked: Mapping[str, Any], key: str) -> Any:
    """A split of a dataset, by the package `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{key} = {asked['name']!r}: datasets of the hub are read by the package datasets: pip install datasets"
        ) from error
    try:
        return datasets.load_dataset(asked["name"], asked.get("config"), split=asked.get("split", "train"))
    except Exception as error:  # of the network, of the hub and of the dataset itself
        reason = one_line(error, limit=None)
        raise ValueError(f"{key} = {asked['name']!r}: is no file, and the hub did not give it ({reason})") from error


def _of_path(path: Any, folder: Path, key: str) -> Any:
    """The rows of a file, or of what a reference names."""
    if is_reference(path):
        try:
            found = find(path, folder)
            return read_rows(found() if callable(found) else found, key)
        except ValueError as error:
            raise ValueError(f"{key} = {path!r}: {error}") from error
    if not isinstance(path, str):
        raise ValueError(f"{key} = {show(path)}: give a file ({', '.join(_KINDS)}), a name on the hub or module:name")
    file = folder / Path(path).expanduser()
    if file.is_file() and file.suffix == ".csv":
        return _of_csv(file, key)
    if file.is_file() and file.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ValueError(
                f"{key} = {path!r}: Parquet is read by the package pyarrow: pip install pyarrow"
            ) from error
        return parquet.read_table(file).to_pylist()
    return read_rows(file, key)


def _of_csv(file: Path, key: str) -> list[dict[str, Any]]:
    """The rows of a CSV file, whose fields may be of any length."""
    limit = csv.field_size_limit(2**31 - 1)  # of the whole process: 131,072 characters, unless somebody sets it
    reader = csv.DictReader(read_lines(file, key))
    try:
        return list(reader)
    except csv.Error as error:
        raise ValueError(f"{key}: line {reader.line_num} of {str(file)!r} is no CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)


_ABSENT = object()


def _column(row: Mapping[str, Any], name: str) -> Any:
    """A row's value under a name, which may lead into a nested column (`reward_model.ground_truth`), or `_ABSENT`."""
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    nested = row.get(outer)
    return _column(nested, inner) if dot and isinstance(nested, Mapping) else _ABSENT


def _shaped(row: Any, index: int, key: str, columns: Any, prompt: Any) -> Any:
    """A row with its new names and its prompt."""
    if not isinstance(row, Mapping):
        return row  # load_rows says so
    names = columns or {}
    missing = [name for name in names.values() if _column(row, name) is _ABSENT]
    if missing:
        raise ValueError(
            f"columns: there is no column {missing[0]!r} in {key} row {index}; its columns are {sorted(map(str, row))}"
        )
    row = {name: value for name, value in row.items() if name not in names.values()} | {
        new: _column(row, name) for new, name in names.items()
    }
    return row if prompt is None else {**row, "prompt": _filled(prompt, row, index, key)}


def _filled(template: Any, row: Mapping[str, Any], index: int, key: str) -> Any:
    """A template with a row's columns in it; the messages of a conversation each by itself."""
    if isinstance(template, list):
        return [{name: _filled(text, row, index, key) for name, text in message.items()} for message in template]
    parts = []
    for text, name, spec, conversion in string.Formatter().parse(template):
        parts.append(text)
        if name is not None:
            value = _column(row, name)
            if value is _ABSENT or spec or conversion:
                raise ValueError(
                    f"prompt: {{{name}}} is no column of {key}, which has {sorted(map(str, row))}; a brace that stands"
                    " for itself is written twice"
                )
            if value is None:
                raise ValueError(f"prompt: {{{name}}} is None in {key} row {index}: give a value, or leave the row out")
            parts.append(str(value))
    return "".join(parts)


def template_fault(template: Any) -> str:
    """What is wrong with a template, "" if nothing is.

    Example:
      >>> template_fault("Q: {question}"), template_fault([{"role": "user"}])
      ('', 'message 0 is a mapping of role and content')
      >>> template_fault("{question")
      "expected '}' before end of string; a brace that stands for itself is written twice"
    """
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
                return f"{error}; a brace that stands for itself is written twice"
    return "" if messages else "must not be empty"
