"""Reading and writing the files in a run directory.

| file | contents |
|---|---|
| `run.json` | the config and package versions |
| `metrics.jsonl` | one JSON object per logged step: `{"step": 10, "reward": 0.5, ...}`; NaN and infinities are null |
| `completions.jsonl` | one JSON object per completion; see `CompletionRow` |
| `images/` | thumbnails of the images in prompts, as JPEG files |
| `warnings.jsonl` | one JSON object per warning: step, category, message |
| `trackers.json` | the trackers' run ids; see `watch.trackers` |
| `report.html`, `report.png` | the report, written by `page.write_report` |

Metrics that TRL also logs have the same names as in TRL. Other metrics include `kl_initial`, `seconds/<phase>` (time
spent in the phase since the previous line), and `eval/<function>` and `eval/reward` for held-out prompts.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any

from grpo_jax.config.sft import GRPOOrSFTConfig
from grpo_jax.text.images import ImageSource, thumbnail

JSON = bool | int | float | str | None | list["JSON"] | dict[str, "JSON"]
"""A JSON value."""

Line = Mapping[str, float | None]
"""A line of `metrics.jsonl`: a dict with "step" and the metrics. Values that are not finite are None."""

CompletionRow = Mapping[str, Any]
"""A line of `completions.jsonl`: "prompt" and "completion" (strings or messages), "rewards" (dict that maps functions
to rewards, or to None if not scored), "advantage", "ended", and columns added by reward functions with `log_extra`.
Prompts with images have "images", `[{"source": path or description, "thumbnail": file in images/}, …]`. Completions
with several turns also have "turns", `[{"by": "policy" or "environment", "text": …}, …]`, and may have "turn_rewards"
(dict that maps functions to one reward per turn)."""

_PACKAGES = ("grpo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "transformers", "numpy")


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield a JSON Lines file's objects up to an incomplete or invalid line. Yields nothing if the file is missing."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for _, line in _complete_lines(file):
            yield line


def read_settings(run_dir: str | os.PathLike[str], name: str = "run.json") -> dict[str, Any]:
    """Return the content of a JSON file, or {} if the file is missing, empty or incomplete (after a power failure)."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads((pathlib.Path(run_dir) / name).read_text("utf-8"))
    return {}


def _complete_lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset of the next line, object) for each line, up to a line that a killed process left incomplete."""
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


def to_json(value: object) -> JSON:
    """Convert a value to JSON types: arrays to lists, NaN and infinities to None, other objects to strings."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    text = f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)  # bytes: an encoded image
    return re.sub(r" at 0x[0-9A-Fa-f]+>$", ">", text)  # addresses differ between runs


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that affect a run's results, without importing them."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


class RunWriter:
    """Writer for the files in a run directory. If `run_dir` is None, nothing is written.

    Lines are written immediately. When a run resumes, `truncate` drops the lines after its checkpoint.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None):
        self.run_dir = None if run_dir is None else pathlib.Path(run_dir)
        if self.run_dir is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> pathlib.Path:
        """Return the path of the file `name` in the run directory."""
        assert self.run_dir is not None
        return self.run_dir / name

    def config(self, config: GRPOOrSFTConfig, **extra: object) -> None:
        """Write `run.json`: the config, package versions, and `extra`."""
        content = {
            "config": config.to_dict(),
            **extra,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), **package_versions()},
            "platform": platform.platform(),
        }
        if self.run_dir is not None:
            text = json.dumps(to_json(content), indent=2, ensure_ascii=False, allow_nan=False)
            replace_file(self.path("run.json"), lambda file: file.write(text.encode("utf-8", "backslashreplace")))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line to `metrics.jsonl`."""
        self._append("metrics.jsonl", step, [metrics])

    def completions(self, step: int, rows: Iterable[CompletionRow]) -> None:
        """Append one line per completion to `completions.jsonl`, with "step" as the first key."""
        rows = list(rows) if self.run_dir is not None else []
        images = {id(row["images"]): row["images"] for row in rows if "images" in row}  # shared within a group
        saved = {key: {"images": [self._save_image(x) for x in found]} for key, found in images.items()}
        lines = [{**row, **saved.get(id(row.get("images")), {})} for row in rows]
        self._append("completions.jsonl", step, lines)

    def warning(self, step: int, category: str, message: str) -> None:
        """Append a line to `warnings.jsonl`."""
        self._append("warnings.jsonl", step, [{"category": category, "message": message}])

    def truncate(self, step: int, *, evaluated: bool = True) -> None:
        """Drop the lines for steps after `step` (−1: all lines) and a truncated last line.

        `evaluated=False` also drops the evaluation at `step`, for a checkpoint that was written before this evaluation.
        """
        for name in ("metrics.jsonl", "completions.jsonl", "warnings.jsonl"):
            if self.run_dir is None or not self.path(name).exists():
                continue
            with open(self.path(name), "r+b") as file:
                end = 0
                for start_of_next, line in _complete_lines(file):
                    undone = not evaluated and any(key.startswith("eval/") for key in line)
                    if line["step"] > step or (line["step"] == step and undone):
                        break
                    end = start_of_next
                file.truncate(end)

    def _save_image(self, source: ImageSource) -> dict[str, object]:
        """Write an image's thumbnail, with a name derived from its content, and return the image's entry."""
        content = thumbnail(source)
        path = self.path("images") / f"{hashlib.sha256(content).hexdigest()[:16]}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return {"source": source, "thumbnail": path.name}

    def _append(self, name: str, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Append rows as lines with "step" as the first key. A "step" logged by a reward function is replaced."""
        if self.run_dir is not None:
            first = {"step": step}
            rows = [{**first, **row, **first} for row in rows]
            lines = [json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
            with open(self.path(name), "ab") as file:
                file.write("".join(lines).encode("utf-8", "backslashreplace"))


def replace_file(path: pathlib.Path, write: Callable[[IO[bytes]], object]) -> None:
    """Atomically replace a file with the output of `write(file)`. If `write` raises, the previous file is unchanged."""
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "wb") as file:
        write(file)
    os.replace(temporary, path)


def absolute_run_dir(run_dir: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """Return `run_dir` as an absolute path, which does not change if a reward function changes the working directory.

    Raises ValueError if it is in an object store, where files cannot be locked, appended to or renamed.
    """
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(run_dir or ""), re.IGNORECASE):  # `Path` turns "//" into "/"
        address = re.sub(":/+", "://", str(run_dir), count=1)
        raise ValueError(
            f"run_dir = {address!r} is in an object store, which cannot lock, append to or rename files; use a"
            " directory on a disk, NFS or a PersistentVolumeClaim, and copy the directory to the store after the run"
        )
    return None if run_dir is None else pathlib.Path(run_dir).expanduser().absolute()


@contextlib.contextmanager
def reject_unwritable(run_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an `OSError` to a `ValueError` whose message names the run directory."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"run_dir = {str(run_dir)!r} cannot be written to ({error.strerror or error}); pass a writable directory,"
            " or None to write no files"
        ) from error
