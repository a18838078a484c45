"""The files of a run directory, written as the run goes and read back.

| file | what it holds |
|---|---|
| `run.json` | the config, package versions, the command line |
| `metrics.jsonl` | one JSON object per logged step: `{"step": 10, "reward": 0.5, ...}`; NaN and infinities are null |
| `completions.jsonl` | one JSON object per completion: step, prompt, completion, rewards, advantage, ended, `turns` |
| `warnings.jsonl` | one JSON object per warning: step, category, message |
| `report.png`, `report.html` | the picture of the run and its page, drawn by `page.write_report` |

`turns` is there for completions of several turns only: [{"by": "policy" or "environment", "text": …}, …].

Metrics have TRL's names where TRL has them: `reward`, `rewards/<function>/mean`, `kl`, `entropy`,
`completions/mean_length`. Ours: `kl_initial`, `seconds/<phase>` since the last line, and of held-out prompts
`eval/<function>` and `eval/reward`.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from grpo_jax.config.sft import Config

JSON = bool | int | float | str | None | list["JSON"] | dict[str, "JSON"]
"""A value that JSON can hold."""

Line = Mapping[str, float | None]
"""An object of `metrics.jsonl`: `step` and metrics by name; None where a value is not finite."""

CompletionRow = Mapping[str, Any]
"""An object of `completions.jsonl`: "prompt" and "completion" (text or messages), "rewards" (function → number, or None
for "not scored"), "advantage", "ended", "turns" (if there are several), "turn_rewards" (function → one number for each
turn), and what reward functions add by `log_extra`."""

_LINES = ("metrics.jsonl", "completions.jsonl", "warnings.jsonl")
_PACKAGES = ("grpo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "transformers", "numpy")
_SECRET = re.compile(r"(?i)(key|token|secret|password|passwd|credentials?|authorization)$")
_CREDENTIALS = re.compile(r"://[^/@\s]+@")


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, up to a line that a kill tore; none if the file does not exist."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for _, line in _whole_lines(file):
            yield line


def read_settings(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a run's `run.json`; {} if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((pathlib.Path(run_dir) / "run.json").read_text("utf-8"))
    return {}


def _whole_lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset of the next line, object) for each line, up to one that is torn."""
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


def plain(value: object) -> JSON:
    """Return a value as JSON holds it: arrays as lists, their scalars as numbers, NaN and infinities as None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def is_dialogue(turns: object) -> bool:
    """Return whether `turns` of a row of `completions.jsonl` holds the turns of a completion, with their speakers.

    Example:
      >>> is_dialogue([{"by": "policy", "text": "32"}, {"by": "environment", "text": "higher"}]), is_dialogue([2])
      (True, False)
    """
    return (
        isinstance(turns, list)
        and turns != []
        and all(isinstance(turn, dict) and turn.keys() == {"by", "text"} for turn in turns)
    )


def hide_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command line with `***` instead of passwords in URLs and the values of options named like secrets.

    Example:
      >>> hide_secrets(["train.py", "--hf-token=hf_x", "--api_key", "x", "http://me:pw@host", "--max_steps=3"])
      ['train.py', '--hf-token=***', '--api_key', '***', 'http://***@host', '--max_steps=3']
    """
    shown: list[str] = []
    for argument in arguments:
        name, given, _ = argument.partition("=")
        before = shown[-1] if shown else ""
        if before.startswith("-") and _SECRET.search(before) and not argument.startswith("--"):
            argument = "***"
        elif given and _SECRET.search(name):
            argument = f"{name}=***"
        shown.append(_CREDENTIALS.sub("://***@", argument))
    return shown


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide a run's numbers, without importing them."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


class RunWriter:
    """Writes the files of a run directory during the run; without a directory, every method does nothing.

    Each line is flushed. When a run resumes, `truncate` cuts the files back to the step of its checkpoint, so that no
    line is there twice. A directory that cannot be made or written to is a ValueError.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None):
        self.run_dir = None if run_dir is None else pathlib.Path(run_dir)
        if self.run_dir is not None:
            with refused_if_unusable(self.run_dir):
                self.run_dir.mkdir(parents=True, exist_ok=True)
                self.path(".writable").touch()
                self.path(".writable").unlink()

    def path(self, name: str) -> pathlib.Path:
        """Return the path of a file in the run directory."""
        if self.run_dir is None:
            raise ValueError("run_dir is None: nothing is written")
        return self.run_dir / name

    def config(self, config: Config, **more: object) -> None:
        """Write `run.json`: the config, versions, the command line without secrets, and `more`."""
        content = {
            "config": config.to_dict(),
            **more,
            "argv": hide_secrets(sys.argv),
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), **package_versions()},
            "platform": platform.platform(),
        }
        if self.run_dir is not None:
            text = json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False)
            replace_file(self.path("run.json"), lambda file: file.write(text.encode("utf-8", "backslashreplace")))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a line to `metrics.jsonl`."""
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def completions(self, step: int, rows: Iterable[CompletionRow]) -> None:
        """Add lines to `completions.jsonl`: one per completion, with the step in front."""
        self._append("completions.jsonl", [{"step": step, **row} for row in rows])

    def warning(self, step: int, category: str, message: str) -> None:
        """Add a line to `warnings.jsonl`."""
        self._append("warnings.jsonl", [{"step": step, "category": category, "message": message}])

    def truncate(self, step: int, *, evaluated: bool = True) -> None:
        """Drop all lines of steps after `step`, and a torn last line; -1 drops all.

        An evaluation of `step` itself is dropped too, unless the checkpoint includes it (`evaluated`).
        """
        for name in _LINES:
            if self.run_dir is None or not self.path(name).exists():
                continue
            with open(self.path(name), "r+b") as file:
                end = 0
                for start_of_next, line in _whole_lines(file):
                    undone = not evaluated and any(key.startswith("eval/") for key in line)
                    if line["step"] > step or (line["step"] == step and undone):
                        break
                    end = start_of_next
                file.truncate(end)

    def put_aside(self) -> tuple[int, str]:
        """Rename the files of a run that has made steps but never wrote a checkpoint.

        Returns its last step and the ending of the new names; (0, "") if nothing was renamed.
        """
        steps = [] if self.run_dir is None else [line["step"] for line in read_lines(self.path("metrics.jsonl"))]
        if max(steps, default=0) < 1:
            return 0, ""
        ending = next(f".old-{n}" for n in itertools.count(1) if not self.path(f"metrics.jsonl.old-{n}").exists())
        for name in _LINES:
            if self.path(name).exists():
                os.replace(self.path(name), self.path(name + ending))
        return max(steps), ending

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Add lines in one write."""
        if self.run_dir is not None:
            lines = [json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
            try:
                with open(self.path(name), "ab") as file:
                    file.write("".join(lines).encode("utf-8", "backslashreplace"))
            except OSError as error:  # a write that fails does not say where
                raise OSError(error.errno, error.strerror, str(self.path(name))) from error


def replace_file(path: pathlib.Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "wb") as file:
        write(file)
    os.replace(temporary, path)


def refuse_bucket(run_dir: str | os.PathLike[str] | None, *, argument: str = "run_dir") -> None:
    """Raise a ValueError for a run directory in an object store: a run locks, appends to and renames files."""
    found = re.match(r"([a-z][a-z0-9+.-]+):/", str(run_dir or ""), re.IGNORECASE)  # Path makes one slash of two
    if found:
        address = re.sub(":/+", "://", str(run_dir), count=1)
        raise ValueError(
            f"{argument} = {address!r}: is in an object store, which can neither lock, append to nor rename the"
            " files of a run; give a directory (a disk, NFS, a PersistentVolumeClaim), and copy it to the store when"
            " the run is over"
        )


@contextlib.contextmanager
def refused_if_unusable(run_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` into a `ValueError` which says that the run directory cannot be used."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"run_dir = {str(run_dir)!r}: cannot be written to ({error.strerror or error});"
            " give a directory of your own, or None to keep nothing"
        ) from error
