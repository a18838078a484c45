"""Dataset readers: sequences, tables, streams, files (JSONL, CSV, Parquet) and hub datasets."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from grpo_jax.messages import one_line, show
from grpo_jax.text.images import IMAGE_COLUMNS
from grpo_jax.types import Json

_MAX_ROWS = 10**7
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@runtime_checkable
class RandomAccess(Protocol):
    """A sequence of rows, such as a `datasets.Dataset` or a grain source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


Dataset = str | os.PathLike[str] | Json | Iterable[object] | RandomAccess
"""Dataset types that `load_rows` supports."""


def read_rows(dataset: Dataset, argument: str, max_rows: int | None = None) -> list[Any]:
    """Read a dataset's rows without validating them. See `load_rows` for the arguments."""
    if isinstance(dataset, Mapping):
        return _read_described(dataset, argument)
    if isinstance(dataset, str | os.PathLike):
        if isinstance(dataset, str) and is_hub_name(dataset) and not os.path.exists(dataset):
            return list(_with_encoded_images(_hub_dataset(dataset, None, "train", argument)))
        return _read_file(Path(dataset), argument)
    package, table = type(dataset).__module__.partition(".")[0], cast(Any, dataset)
    if package == "pandas" and hasattr(table, "to_dict"):
        return list(table.astype(object).where(table.notna(), None).to_dict("records"))  # NaN → None
    if package == "pyarrow" and hasattr(table, "to_pylist"):
        return list(table.to_pylist())
    limit = _MAX_ROWS + 1 if max_rows is None else max_rows
    if isinstance(dataset, RandomAccess):
        _check_size(len(dataset), argument)
        limit, dataset = len(dataset), _with_encoded_images(dataset)
    if not isinstance(dataset, Iterable):
        raise ValueError(
            f"{argument} must be a list of dicts, a datasets.Dataset, an iterator of dicts, a file"
            f" ({', '.join(_SUFFIXES)}) or the name of a hub dataset; got {show(dataset)}"
        )
    try:
        rows = list(itertools.islice(dataset, limit))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{argument} must contain dicts; reading its rows failed ({one_line(error)})") from error
    _check_size(len(rows), argument)
    # grain returns None for rows that a filter removed.
    return [row for row in rows if row is not None] if package == "grain" else rows


def _with_encoded_images(dataset: Any) -> Iterable[object]:
    """Return an iterable over a sequence of rows. Images in a `datasets.Dataset` are not decoded, to save memory."""
    if type(dataset).__module__.partition(".")[0] != "datasets" or dataset.format["type"] is not None:
        return map(dataset.__getitem__, range(len(dataset)))
    names = [name for name in IMAGE_COLUMNS if name in dataset.column_names]
    if not names:
        return iter(dataset)
    others = [name for name in dataset.column_names if name not in names]
    rows = dataset.select_columns(others) if others else itertools.repeat({}, len(dataset))
    # In Arrow's format, an image is a dict with `bytes` or `path`.
    tables = dataset.select_columns(names).with_format("arrow")
    return ({**row, **table.to_pylist()[0]} for row, table in zip(rows, tables, strict=True))


def _check_size(size: int, argument: str) -> None:
    if size > _MAX_ROWS:
        raise ValueError(
            f"{argument} has more than {_MAX_ROWS:,} rows; if it is infinite, pass a part of it, such as"
            " dataset.take(1000) or itertools.islice(dataset, 1000)"
        )


def with_arrays_as_lists(value: object) -> object:
    """Convert NumPy arrays to lists, recursively. pandas reads lists from Parquet files as arrays."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [with_arrays_as_lists(item) for item in value]
    if isinstance(value, dict):
        return {name: with_arrays_as_lists(item) for name, item in value.items()}
    return value


def named_datasets(dataset: Dataset | None) -> dict[str, Dataset]:
    """Return a dict of datasets. A single dataset, or a dict with a key "path", "name" or "prompt", has the name ""."""
    if not isinstance(dataset, Mapping) or not dataset or {"path", "name", "prompt"} & dataset.keys():
        return {} if dataset is None else {"": dataset}
    return {str(name): value for name, value in dataset.items()}


def is_hub_name(text: str) -> bool:
    """Return whether a string looks like the name of a hub dataset rather than a file name."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text) is not None and not text.endswith(_SUFFIXES)


def check_finite(dataset: object, argument: str, max_steps: int) -> None:
    """Raise ValueError for an `IterableDataset` without a length, which may be infinite, unless `max_steps` > 0."""
    is_stream = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
    if max_steps <= 0 and is_stream and not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{argument} is an IterableDataset of unknown length; set max_steps, or pass a finite part of the dataset,"
            " such as list(dataset.take(1000))"
        )


def _read_described(source: Json, argument: str) -> list[object]:
    """Read the dataset that a mapping describes: `path`, or `name` with `config` and `split` (see `load_rows`)."""
    keys = sorted(map(str, source))
    if not {"path", "name"} & source.keys():
        advice = "for a DatasetDict, pass one split: dataset['train']"
        raise ValueError(f"{argument} must be a list of dicts; got a dict with keys {keys} ({advice})")
    allowed = ("path", "rows") if "path" in source else ("name", "config", "split", "rows")
    if unknown := [name for name in keys if name not in allowed]:
        raise ValueError(f"{argument}.{unknown[0]} is not supported; supported keys are {', '.join(allowed)}")
    count = source.get("rows")
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(f"{argument}.rows must be a positive integer, or unset for all rows; got {show(count)}")
    if "path" in source:
        return read_rows(source["path"], argument, count)[:count]
    dataset = _hub_dataset(source["name"], source.get("config"), source.get("split", "train"), argument)
    return list(itertools.islice(_with_encoded_images(dataset), count))


def _hub_dataset(name: str, config: str | None, split: str, argument: str) -> Iterable[object]:
    problem = f"{argument}={name!r} is not a file, and it"
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{problem} cannot be loaded from the hub without the `datasets` package; run `pip install datasets`"
        ) from error
    try:
        dataset: Iterable[object] = datasets.load_dataset(name, config, split=split)
    except Exception as error:
        raise ValueError(f"{problem} could not be downloaded from the hub ({one_line(error, limit=None)})") from error
    return dataset


def _read_file(path: Path, argument: str) -> list[object]:
    """Read the rows of a .csv or .parquet file, or of a JSONL file with any other suffix."""
    if not path.is_file():
        reason = "is a directory" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{argument}={str(path)!r} {reason}; pass the path to a file ({', '.join(_SUFFIXES)})")
    if path.suffix != ".parquet":
        read = _read_csv if path.suffix == ".csv" else _read_jsonl
        try:
            with open(path, encoding="utf-8-sig", newline="") as lines:  # skips a byte-order mark; keeps \r in CSV
                return read(lines, path, argument)
        except UnicodeDecodeError as error:
            raise ValueError(f"{argument}={str(path)!r} is not UTF-8 ({error}); decompress or convert it") from error
    try:
        from pyarrow import parquet

        return list(parquet.read_table(path).to_pylist())
    except ImportError as error:
        raise ValueError(f"{argument}={str(path)!r}: Parquet requires pyarrow; run `pip install pyarrow`") from error
    except (ValueError, OSError, NotImplementedError) as error:  # base classes of pyarrow's exceptions
        raise ValueError(f"{argument}={str(path)!r} cannot be read as Parquet ({one_line(error)})") from error


def _read_csv(lines: Iterable[str], path: Path, argument: str) -> list[object]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(lines, strict=True)
    rows: list[object] = []
    try:
        if len({*(names := reader.fieldnames or ())}) < len(names):
            raise csv.Error(f"duplicate column names in {', '.join(names)}")
        for row in reader:
            if None in row:
                raise csv.Error(f"{len(row) - 1 + len(row[None])} fields, but the header has {len(row) - 1}")
            rows.append(row)
    except csv.Error as error:
        where = f"{argument}: line {reader.reader.line_num} of {str(path)!r}"
        raise ValueError(f"{where} is not valid CSV ({error})") from error
    return rows


def _read_jsonl(lines: Iterable[str], path: Path, argument: str) -> list[object]:
    rows: list[object] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{argument}: line {number} of {str(path)!r}"
        try:
            row = json.loads(line.strip())
        except (ValueError, RecursionError) as error:  # ValueError is also raised for huge integers
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"{where} is not valid JSON ({reason}); write one object per line") from error
        if isinstance(row, list) and not rows:
            raise ValueError(f"{where} is a JSON list; write one object per line, or pass the result of json.load")
        if not isinstance(row, dict):
            raise ValueError(f"{where} must be a JSON object; got {show(row)}")
        rows.append(row)
    return rows
