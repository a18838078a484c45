"""What a run leaves behind and tells: files in a run directory, seconds per phase, callbacks, the line at the start.

| file | what it holds |
|---|---|
| `config.json` | the config, package versions, the command line |
| `metrics.jsonl` | one JSON object a logged step: `{"step": 10, "reward": 0.5, ...}`; NaN and infinities are null |
| `completions.jsonl` | one JSON object a completion: step, prompt, completion, rewards, advantage, ended |
| `warnings.jsonl` | one JSON object a warning: step, category, message |
| `report.png` | the picture of the run, see `plots` |
| `report.html` | the same as a page, with completions, settings and warnings, see `html_report` |

Names of metrics are TRL's where TRL has them: `reward`, `rewards/<function>/mean`, `kl`, `entropy`,
`completions/mean_length`. Ours: `kl_initial`, `seconds/<phase>` since the last line, `eval/<function>`.
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
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from grpo_jax.config import GRPOConfig

__all__ = [
    "Callback",
    "Phases",
    "RunWriter",
    "check_callbacks",
    "describe_run",
    "held_out",
    "notify",
    "package_versions",
    "plain",
    "read_lines",
    "short",
]

Callback = Callable[[int, Mapping[str, Any]], Any]
"""Called after every logged step as `callback(step, metrics)`, with the numbers that `metrics.jsonl` gets.

Trackers and live plots are such functions, and whoever opened one closes it:

```python
def tensorboard(step, metrics):
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)

callbacks = [tensorboard, lambda step, metrics: wandb_run.log(metrics, step=step)]
```
"""

_LINES = ("metrics.jsonl", "completions.jsonl", "warnings.jsonl")
_PACKAGES = ("grpo_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "transformers", "numpy")


_NO_SCORE = {
    "mean_length",
    "min_length",
    "max_length",
    "clipped_ratio",
    "seconds",
    "std",
    "missing",
    "errors",
    "unscored",
}


def held_out(name: str) -> str | None:
    """Return what an `eval/` metric is a score of; None for one that is no score, or not of an evaluation.

    Example:
      >>> [held_out(name) for name in ("eval/accuracy", "eval/rewards/accuracy/mean", "eval/mean_length", "kl")]
      ['accuracy', 'accuracy', None, None]
    """
    if not name.startswith("eval/") or name.rpartition("/")[2] in _NO_SCORE:
        return None
    return name.removeprefix("eval/").removeprefix("rewards/").removesuffix("/mean")


def plain(value: Any) -> Any:
    """Return a value as JSON holds it: arrays as lists, their scalars as numbers, NaN and infinities as None.

    Example:
      >>> import numpy as np
      >>> plain({"loss": np.float32(0.5), "kl": float("nan"), "lengths": np.arange(2)})
      {'loss': 0.5, 'kl': None, 'lengths': [0, 1]}
    """
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


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, up to a line that a kill tore, and nothing if there is no file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for _, line in _whole_lines(file):
            yield line


class RunWriter:
    """The files of a run directory, written as the run goes.

    Each line is flushed as it is written. After a kill, `truncate` cuts the files back to the step of the checkpoint
    that the run goes on from, so that no line is there twice. On all processes but one of a multi-host run, and where
    nothing shall be kept, the directory is None and every method does nothing.

    Args:
      run_dir: the directory, made if it is not there; None: nothing is written.

    Raises:
      ValueError: the directory cannot be made or written to.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as run_dir:
      ...     writer = RunWriter(run_dir)
      ...     writer.metrics(1, {"reward": 0.25})
      ...     writer.metrics(2, {"reward": 0.5})
      ...     writer.truncate(1)
      ...     list(read_lines(writer.path("metrics.jsonl")))
      [{'step': 1, 'reward': 0.25}]
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None):
        self.run_dir = None if run_dir is None else pathlib.Path(run_dir)
        if self.run_dir is not None:
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                self.path(".writable").touch()
                self.path(".writable").unlink()
            except OSError as error:
                raise ValueError(
                    f"run_dir = {str(run_dir)!r}: cannot be written to ({error.strerror or error});"
                    " give a directory of your own, or None to keep nothing"
                ) from error

    def path(self, name: str) -> pathlib.Path:
        """Return the path of a file in the run directory."""
        if self.run_dir is None:
            raise ValueError("run_dir is None: there are no files")
        return self.run_dir / name

    def config(self, config: GRPOConfig, **more: Any) -> None:
        """Write `config.json`: the config, versions, the command line, and whatever else is given."""
        content = {
            "config": config.to_dict(),
            **more,
            "argv": sys.argv,
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), **package_versions()},
            "platform": platform.platform(),
        }
        if self.run_dir is not None:
            text = json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False)
            self._replace("config.json", lambda file: file.write(text.encode("utf-8", "backslashreplace")))

    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a line to `metrics.jsonl`."""
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def completions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to `completions.jsonl`: one a row, with the step in front."""
        self._append("completions.jsonl", [{"step": step, **row} for row in rows])

    def warning(self, step: int, category: str, message: str) -> None:
        """Add a line to `warnings.jsonl`."""
        self._append("warnings.jsonl", [{"step": step, "category": category, "message": message}])

    def truncate(self, step: int, *, evaluated: bool = True) -> None:
        """Cut the files back to `step`: drop all lines of later steps, and a last line that a kill tore.

        Args:
          step: optimizer steps of the checkpoint that the run goes on from; -1 for a run that begins anew.
          evaluated: whether the evaluation of that step is done, if one is due; its line is dropped if not.
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
        """Give other names to the files of a run that has made steps and cannot be gone on with.

        Returns:
          The last step that they tell of, and the ending that their names have now; (0, "") if there was none.
        """
        steps = [] if self.run_dir is None else [line["step"] for line in read_lines(self.path("metrics.jsonl"))]
        if max(steps, default=0) < 1:
            return 0, ""
        ending = next(f".old-{n}" for n in itertools.count(1) if not self.path(f"metrics.jsonl.old-{n}").exists())
        for name in _LINES:
            if self.path(name).exists():
                os.replace(self.path(name), self.path(name + ending))
        return max(steps), ending

    def report(self, *, picture: bool = True) -> None:
        """Draw `report.png` and `report.html` from the other files; what fails is a warning and ends nothing.

        Args:
          picture: False writes the page alone, which takes a small part of the time of both.
        """
        if self.run_dir is None:
            return
        for name, write in (("report.png", self._draw), ("report.html", self._page))[not picture :]:
            try:
                self._replace(name, write)
            except Exception as error:
                message = f"{name} was not drawn: {type(error).__name__}: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _draw(self, file: IO[bytes]) -> None:
        from grpo_jax.plots import draw_report, save_figure

        lines = list(read_lines(self.path("metrics.jsonl")))
        save_figure(draw_report(lines, title=self.path(".").resolve().name), file)

    def _page(self, file: IO[bytes]) -> None:
        from grpo_jax.html_report import html_report

        file.write(html_report(self.path(".")).encode("utf-8", "backslashreplace"))

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add lines in one write."""
        if self.run_dir is not None:
            lines = [json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
            try:
                with open(self.path(name), "ab") as file:
                    file.write("".join(lines).encode("utf-8", "backslashreplace"))
            except OSError as error:  # a write that fails does not say where
                raise OSError(error.errno, error.strerror, str(self.path(name))) from error

    def _replace(self, name: str, write: Callable[[IO[bytes]], Any]) -> None:
        """Write a file whole or not at all."""
        temporary = self.path(f".{name}.partial")
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, self.path(name))


class Phases:
    """A stopwatch: the seconds of each phase of an iteration.

    Phases may lie inside each other; a second counts for the innermost only, so that phases add up to no more than the
    total. JAX returns before the device is done: end a phase with what waits for its results, or the next one pays.

    Args:
      clock: returns seconds.

    Example:
      >>> phases = Phases()
      >>> with phases("rollout"):
      ...     tokens = list(range(1000))
      >>> list(phases.take())
      ['seconds/rollout', 'seconds/total']
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = self._last = clock()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase; one that is entered again goes on."""
        self._lap()
        self._open.append(name)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """Return `seconds/<phase>` of each and `seconds/total` since the last call, and start anew."""
        self._lap()
        seconds = {f"seconds/{name}": value for name, value in self._seconds.items()}
        seconds["seconds/total"] = self._last - self._start
        self._start, self._seconds = self._last, {}
        return seconds

    def _lap(self) -> None:
        """Give the seconds since the last lap to the innermost open phase."""
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._last
        self._last = now


def check_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Return the callbacks, or raise a `TypeError` that says which one cannot be called."""
    callbacks = tuple(callbacks)
    for i, callback in enumerate(callbacks):
        if not callable(callback):
            raise TypeError(f"callbacks[{i}] = {callback!r} is not a function; give one that takes (step, metrics)")
    return callbacks


def notify(callbacks: Iterable[Callback], step: int, metrics: Mapping[str, Any]) -> None:
    """Call each callback with the step and a copy of the metrics as plain Python numbers.

    Raises:
      Exception: whatever a callback raises, with a note that names it.
    """
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in metrics.items()}
    for i, callback in enumerate(callbacks):
        try:
            callback(step, dict(values))
        except Exception as error:
            error.add_note(f"raised by callbacks[{i}] = {callback!r} at step {step}")
            raise


def describe_run(
    config: GRPOConfig,
    *,
    num_rows: int,
    num_parameters: int,
    state_bytes: int,
    num_devices: int | None = None,
    device: str = "",
) -> str:
    """Return what the sizes of a run come to, in three lines for its start.

    Args:
      config: the run's settings.
      num_rows: rows of the dataset.
      num_parameters: of the policy.
      state_bytes: of the whole training state: policy, old policy, references, optimizer.
      num_devices: devices of the run; None: those of `config.mesh`, 1 without one.
      device: their kind.

    Example:
      >>> config = GRPOConfig(num_iterations=2, per_device_train_batch_size=64, max_steps=100)
      >>> print(describe_run(config, num_rows=400, num_parameters=1_234_567, state_bytes=14_815_000, device="cpu"))
      1.23 M parameters · 14.8 MB of training state · 1 device (cpu)
      each iteration: 8 prompts × 8 = 64 completions of up to 512 tokens · 2 passes × 1 slice = 2 updates of 8 prompts
      100 optimizer steps · 50 iterations · 400 prompts, gone through 1 time
    """
    sizes, steps = config.sizes(num_devices), config.total_steps(num_rows, num_devices)
    devices = num_devices or math.prod((config.mesh or {}).values())
    iterations = math.ceil(steps / sizes.updates)
    micro = f" in {_many(sizes.micro_batches, 'micro-batch', 'es')}" if sizes.micro_batches > 1 else ""
    epochs = float(f"{iterations * sizes.prompts / max(num_rows, 1):.2g}")
    return (
        f"{short(num_parameters)} parameters · {short(state_bytes, 'B')} of training state ·"
        f" {_many(devices, 'device')}{f' ({device})' if device else ''}\n"
        f"each iteration: {_many(sizes.prompts, 'prompt')} × {config.num_generations} = {sizes.completions} completions"
        f" of up to {config.max_completion_length} tokens ·"
        f" {_many(config.num_iterations, 'pass', 'es')} × {_many(sizes.slices, 'slice')} ="
        f" {_many(sizes.updates, 'update')} of {_many(sizes.prompts_per_update, 'prompt')}{micro}\n"
        f"{_many(steps, 'optimizer step')} · {_many(iterations, 'iteration')} ·"
        f" {_many(num_rows, 'prompt')}, gone through {epochs:g} time{'s' * (epochs != 1)}"
    )


def _many(count: int, noun: str, plural: str = "s") -> str:
    """Return a count with its noun: "1 prompt", "2 prompts"."""
    return f"{count} {noun}{plural if count != 1 else ''}"


def short(number: float, unit: str = "") -> str:
    """Return a number to three digits with its SI prefix: "1.23 M", "14.8 GB"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def _whole_lines(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
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


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide a run's numbers, without importing them."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
