"""Datasets to lists of rows: lists, tables, streams, files (JSONL, CSV, Parquet) and datasets of the hub."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from grpo_jax.messages import one_line, show
from grpo_jax.types import Json

_MOST_ROWS = 10**7
_KEYS = ("config", "name", "path", "rows", "split")
_KINDS = (".jsonl", ".json", ".csv", ".parquet")


@runtime_checkable
class RandomAccess(Protocol):
    """Rows by index, such as a `datasets.Dataset` or a grain source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


Dataset = str | os.PathLike[str] | Json | Iterable[object] | RandomAccess
"""What `load_rows` reads."""


def read_rows(dataset: Dataset, argument: str, most: int | None = None) -> list[Any]:
    """Return the rows of a dataset, not checked; arguments as in `load_rows`."""
    if isinstance(dataset, Mapping):
        return _read_described(dataset, argument)
    if isinstance(dataset, str | os.PathLike):
        return _read_name(dataset, argument)
    package = type(dataset).__module__.partition(".")[0]
    if package == "pandas" and hasattr(dataset, "to_dict"):
        frame: Any = dataset
        return list(frame.astype(object).where(frame.notna(), None).to_dict("records"))  # None for NaN
    if package == "pyarrow" and hasattr(dataset, "to_pylist"):
        table: Any = dataset
        return list(table.to_pylist())
    if not isinstance(dataset, RandomAccess | Iterable):
        raise ValueError(
            f"{argument} is {show(dataset)}: give a list of dicts, a datasets.Dataset, an iterator of dicts, a file"
            f" ({', '.join(_KINDS)}) or the name of a dataset on the hub"
        )
    if isinstance(dataset, RandomAccess):
        rows, size = [], len(dataset)
    else:
        rows = list(itertools.islice(dataset, _MOST_ROWS + 1 if most is None else most))
        size = len(rows)
    if size > _MOST_ROWS:
        raise ValueError(
            f"{argument} has more than {_MOST_ROWS:,} rows; if it repeats without end, give a part of it, such as"
            " dataset.take(1000) or itertools.islice(dataset, 1000)"
        )
    if isinstance(dataset, RandomAccess):
        try:
            rows = [dataset[index] for index in range(len(dataset))]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{argument} is of type {type(dataset).__name__}, which does not support indexing"
                f" ({type(error).__name__}: {error}): give a list of dicts"
            ) from error
    # grain returns None for a row that a filter left out.
    return [row for row in rows if row is not None] if package == "grain" else rows


def without_arrays(value: object) -> object:
    """Return a value with lists instead of the NumPy arrays that pandas makes of them."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [without_arrays(item) for item in value]
    if isinstance(value, dict):
        return {name: without_arrays(item) for name, item in value.items()}
    return value


def named_datasets(dataset: Dataset | None) -> dict[str, Dataset]:
    """Return the datasets of a dict of several by name; a single dataset under "", and {} for None."""
    if not isinstance(dataset, Mapping) or {"path", "name"} & dataset.keys():
        return {} if dataset is None else {"": dataset}
    # A dict of columns has lists of other values than rows.
    firsts = [next(iter(some), {}) if isinstance(some, list | tuple) else some for some in dataset.values()]
    are_datasets = all(isinstance(first, RandomAccess) and not isinstance(first, str) for first in firsts)
    return {str(name): some for name, some in dataset.items()} if firsts and are_datasets else {"": dataset}


def is_hub_name(text: str) -> bool:
    """Whether a text may be the name of a dataset on the hub rather than of a file."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text) is not None and not text.endswith(_KINDS)


def is_stream(dataset: object) -> bool:
    """Whether a dataset is an `IterableDataset` of `datasets` or PyTorch, which may be infinite."""
    return any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__) and not hasattr(dataset, "__len__")


def _read_name(name: str | os.PathLike[str], argument: str) -> list[object]:
    """Read a file, or the split "train" of a dataset on the hub."""
    if isinstance(name, str) and is_hub_name(name) and not os.path.exists(name):
        return list(_hub_dataset(name, None, "train", argument))
    return _read_file(Path(name), argument)


def _read_described(source: Json, argument: str) -> list[object]:
    """Read the first `rows` of a `path`, or of the `split` of the hub's dataset `name` in its `config`."""
    keys = sorted(map(str, source))
    if not keys or (not {"path", "name"} & source.keys() and not set(keys).issubset(_KEYS)):
        raise ValueError(
            f"{argument} is a dict with the keys {keys}: give a list of rows, each a dict "
            "(of a dataset with splits, choose one: dataset['train'])"
        )
    if unknown := [name for name in keys if name not in _KEYS]:
        raise ValueError(f"{argument}.{unknown[0]}: no such key; {argument} has {', '.join(_KEYS)}")
    if ("path" in source) == ("name" in source):
        raise ValueError(f"{argument} = {show(dict(source))}: give either a path or the name of a dataset on the hub")
    if others := [name for name in ("config", "split") if "path" in source and name in source]:
        raise ValueError(f"{argument}.{others[0]}: only a dataset on the hub has one, which is given by its name")
    count = source.get("rows")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"{argument}.rows = {show(count)}: use a whole number from 1 up, or leave it out for all")
    if "path" in source:
        return read_rows(source["path"], argument, count)[:count]
    found = _hub_dataset(source["name"], source.get("config"), source.get("split", "train"), argument)
    return list(itertools.islice(found, count))


def _hub_dataset(name: str, config: str | None, split: str, argument: str) -> Iterable[object]:
    """Return a split of a dataset on the hub, by the package `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{argument} = {name!r} is not a file, and datasets of the hub need the package datasets: pip install"
            " datasets"
        ) from error
    try:
        found: Iterable[object] = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of the network, the hub or the dataset
        reason = one_line(error, limit=None)
        raise ValueError(
            f"{argument} = {name!r} is not a file, and could not be downloaded from the hub ({reason})"
        ) from error
    return found


def _read_file(path: Path, argument: str) -> list[object]:
    """Read the rows of a file by its suffix: .csv, .parquet, and any other as JSONL."""
    if not path.is_file():
        what = "a directory" if path.is_dir() else "not a file"
        raise FileNotFoundError(f"{argument} is {str(path)!r}, which is {what}: give a file ({', '.join(_KINDS)})")
    if path.suffix == ".csv":
        return _read_csv(path, argument)
    if path.suffix != ".parquet":
        return _read_jsonl(path, argument)
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{argument} is {str(path)!r}: Parquet files need the package pyarrow: pip install pyarrow"
        ) from error
    return list(parquet.read_table(path).to_pylist())


_UTF16 = "is text in UTF-16: write it in UTF-8 (iconv -f utf-16 -t utf-8)"
_BEGINNINGS = {b"\x1f\x8b": "is compressed by gzip: unpack it (gunzip)", b"\xff\xfe": _UTF16, b"\xfe\xff": _UTF16}
"""First bytes of files that are not in UTF-8, and what to do."""


def _read_lines(path: Path, argument: str) -> Iterator[str]:
    """Yield the lines of a file in UTF-8, with their ends; ValueError with the line of other bytes."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")  # some programs begin with a byte-order mark
            except UnicodeDecodeError as error:
                for start, fix in _BEGINNINGS.items() if number == 1 else ():
                    if line.startswith(start):
                        raise ValueError(f"{argument}: {str(path)!r} {fix}") from error
                raise ValueError(
                    f"{argument}: line {number} of {str(path)!r} is not UTF-8 (byte {error.start} is"
                    f" 0x{error.object[error.start]:02x}): write the file in UTF-8 (iconv -f latin1 -t utf-8, if it is"
                    " Latin-1)"
                ) from error


def _read_csv(path: Path, argument: str) -> list[object]:
    """Read the rows of a CSV file."""
    lines = io.StringIO("".join(_read_lines(path, argument)), newline="")  # which may end in \r alone
    reader = csv.DictReader(lines)
    rows: list[object] = []
    try:
        for row in reader:
            if None in row:
                raise csv.Error(f"{len(row) - 1 + len(row[None])} fields where the first line names {len(row) - 1}")
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{argument}: line {reader.line_num} of {str(path)!r} is not CSV ({error})") from error
    return rows


def _read_jsonl(path: Path, argument: str) -> list[object]:
    """Read one JSON object from each non-empty line."""
    rows: list[object] = []
    for number, line in enumerate(_read_lines(path, argument), start=1):
        if not line.strip():
            continue
        where = f"{argument}: line {number} of {str(path)!r}"
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
