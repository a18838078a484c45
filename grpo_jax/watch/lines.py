"""The lines of a run's JSON-lines files, read back: each whole one, and nothing after one that a kill tore."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import IO, Any


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, up to a line that a kill tore, and nothing if there is no file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for _, line in whole_lines(file):
            yield line


def whole_lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset of the next line, object) of each line, up to one that is torn."""
    end = 0
    for text in file:
        end += len(text)
        try:
            line = json.loads(text) if text.endswith(b"\n") else None
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            return
        yield end, line
