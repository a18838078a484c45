"""Trackers: callbacks that send a run's numbers to TensorBoard, Weights & Biases, trackio or a notebook's cell.

A tracker is a `watch.Callback` that is closed at the end, and any other is written in the same three lines:
`Tracker(log, close)`, where `log(step, metrics)` gets the finite numbers of `metrics.jsonl`. The packages are extras of
this one and imported by the function that opens a tracker.

```python
with tensorboard("runs/sums/tensorboard") as tracker:
    train(policy, rows, right, config, run_dir="runs/sums", callbacks=[tracker])
```

`GRPOConfig(report_to=...)` has `train` open and close them by itself: `open_trackers`.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config.config import GRPOConfig
from grpo_jax.watch.plots import draw_report, save_figure

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}

RUNS = "trackers.json"
"""In a run directory: which runs its lines go to, so that a run that goes on goes on there too."""


class Tracker:
    """A callback with an end; a context manager that closes it.

    Args:
      log: called as `log(step, metrics)` with name → number, all finite.
      close: called once, at the end.

    Example:
      >>> with Tracker(print, lambda: print("closed")) as tracker:
      ...     tracker(10, {"reward": 0.5, "kl": float("nan")})
      10 {'reward': 0.5}
      closed
    """

    def __init__(self, log: Callable[[int, dict[str, float]], Any], close: Callable[[], Any]):
        self._log = log
        self._close = close

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send a logged step."""
        self._log(step, {k: v for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)})

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def tensorboard(log_dir: str | os.PathLike[str], **settings: Any) -> Tracker:
    """Open a TensorBoard event file, written without TensorFlow or PyTorch.

    Args:
      log_dir: a directory; `tensorboard --logdir` shows it.
      **settings: further arguments of `tensorboardX.SummaryWriter`.

    Raises:
      ImportError: tensorboardX is not installed.
    """
    writer = _package("tensorboardX", "tensorboard").SummaryWriter(os.fspath(log_dir), **settings)

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def wandb(**settings: Any) -> Tracker:
    """Open a run of Weights & Biases.

    Args:
      **settings: arguments of `wandb.init`, such as `project`, `name`, `config=config.to_dict()`; a run that may be
        resumed has an `id` of its own and `resume="allow"`.

    Raises:
      ImportError: wandb is not installed.
    """
    return _run("wandb", settings)


def trackio(**settings: Any) -> Tracker:
    """Open a run of trackio.

    Args:
      **settings: arguments of `trackio.init`, such as `project`, `name`, `config=config.to_dict()`, `resume="allow"`.

    Raises:
      ImportError: trackio is not installed.
    """
    return _run("trackio", settings)


def live_plot(
    only: Sequence[str] = ("Reward", "Held-out prompts", "KL divergence"), *, seconds: float = 3.0
) -> Tracker:
    """Draw the curves of a run in a cell of a notebook, in place.

    Args:
      only: titles of the panels of `plots.draw_report`.
      seconds: between two pictures at least; the last one is drawn at the end.

    Raises:
      ImportError: there is no IPython.
    """
    display = _package("IPython.display", "notebook")
    handle = display.DisplayHandle()
    handle.display(display.Pretty("the first numbers are on their way"))
    lines: list[dict[str, float]] = []
    drawn = -math.inf

    def draw() -> None:
        nonlocal drawn
        picture = io.BytesIO()
        save_figure(draw_report(lines, only=only), picture)
        handle.update(display.Image(picture.getvalue()))
        drawn = time.monotonic()

    def log(step: int, metrics: dict[str, float]) -> None:
        lines.append({"step": step, **metrics})
        if time.monotonic() - drawn >= seconds:
            draw()

    return Tracker(log, lambda: draw() if lines else None)


def check_trackers(config: GRPOConfig, run_dir: str | os.PathLike[str] | None) -> list[str]:
    """The names of the trackers that `report_to` asks for, each of which can be opened.

    Raises:
      ImportError: the package of one is not installed.
      ValueError: TensorBoard's files have no place.
    """
    asked = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or ())
    if asked == ["all"]:
        asked = [name for name, package in _PACKAGES.items() if _installed(package)]
    names = [name for name in asked if name != "none"]
    for name in names:
        _package(_PACKAGES[name], name)
    if "tensorboard" in names and run_dir is None and "TENSORBOARD_LOGGING_DIR" not in os.environ:
        raise ValueError(
            f"report_to = {config.report_to!r}: there is no directory for TensorBoard's files; give run_dir, or set"
            " the variable TENSORBOARD_LOGGING_DIR"
        )
    return names


def open_trackers(config: GRPOConfig, run_dir: str | os.PathLike[str] | None, *, step: int = 0) -> list[Tracker]:
    """Open the trackers that `report_to` asks for, under `run_name`.

    TensorBoard's files go to the directory TENSORBOARD_LOGGING_DIR, or to `tensorboard` in the run directory; what
    they hold of steps after `step` is dropped. Weights & Biases gets the variable WANDB_PROJECT or `project`, and a run
    that is active already is used and left open; trackio gets `project`. Both get all settings, and go on with the run
    that the run directory was reported to.

    Args:
      config: says which, and is sent along.
      run_dir: the run directory, or None.
      step: the step that the run goes on from; 0: it begins, as new runs.

    Returns:
      Trackers to be closed at the end.

    Raises:
      ImportError, ValueError: as `check_trackers`.
    """
    names = check_trackers(config, run_dir)
    kept = None if run_dir is None else Path(run_dir) / RUNS
    runs = json.loads(kept.read_text(encoding="utf-8")) if step and kept is not None and kept.exists() else {}
    opened: list[Tracker] = []
    try:
        for name in names:
            opened.append(_opened(name, config, run_dir, step, runs))
    except BaseException:
        for tracker in opened:
            tracker.__exit__()
        raise
    if kept is not None and runs:
        kept.write_text(json.dumps(runs), encoding="utf-8")
    return opened


def _opened(
    name: str, config: GRPOConfig, run_dir: str | os.PathLike[str] | None, step: int, runs: dict[str, str]
) -> Tracker:
    """Open one tracker; `runs`: tracker → the run that it goes on with, which one that is new is added to."""
    if name == "tensorboard":
        directory = os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(run_dir or ".") / "tensorboard"
        return tensorboard(Path(directory).expanduser(), purge_step=step + 1 if step else 0)
    package = _package(name, name)
    if name == "wandb" and getattr(package, "run", None) is not None:
        active = package.run
        return Tracker(lambda step, metrics: active.log(metrics, step=step), lambda: None)
    settings: dict[str, Any] = {"project": config.project, "name": config.run_name, "config": config.to_dict()}
    if name == "wandb":
        settings["project"] = os.environ.get("WANDB_PROJECT", config.project)
        # A run of Weights & Biases is found again by its id, one of trackio by its name.
        settings |= {"id": runs[name], "resume": "allow"} if name in runs else {}
    else:
        settings |= {"name": runs.get(name, config.run_name), "resume": "allow"}
    run = package.init(**settings)
    runs[name] = run.id if name == "wandb" else run.name
    return Tracker(lambda step, metrics: run.log(metrics, step=step), run.finish)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # imported already, and without a spec
        return True


def _run(package: str, settings: Mapping[str, Any]) -> Tracker:
    """A tracker on a run of one of the two packages, which share an interface."""
    run = _package(package, package).init(**settings)
    return Tracker(lambda step, metrics: run.log(metrics, step=step), run.finish)


def _package(name: str, extra: str) -> Any:
    """Import a package, or say how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}): pip install 'grpo_jax[{extra}]'") from error
