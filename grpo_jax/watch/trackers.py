"""Trackers: callbacks that are closed at the end of a run.

`GRPOConfig(report_to=...)` makes `train` open TensorBoard, Weights & Biases or trackio, and `live_plot` draws in a cell
of a notebook. `Tracker` makes one of two functions, for a service that is not listed:

```python
with Tracker(lambda step, metrics: run.log(metrics, step=step), run.finish) as tracker:
    train(policy, rows, right, config, run_dir="runs/sums", callbacks=[tracker])
```
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from grpo_jax.config.sft import Config

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}

RUNS = "trackers.json"
"""File of a run directory with the ids of its runs in trackers, so that a resumed run continues them."""


class Tracker:
    """A callback with an end; a context manager that closes it.

    Args:
      log: called as `log(step, metrics)` with the finite numbers of a line of `metrics.jsonl`.
      close: called once, at the end.

    Example:
      >>> with Tracker(print, lambda: print("closed")) as tracker:
      ...     tracker(10, {"reward": 0.5, "kl": float("nan")})
      10 {'reward': 0.5}
      closed
    """

    def __init__(self, log: Callable[[int, dict[str, float]], object], close: Callable[[], object]):
        self._log = log
        self._close = close

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step."""
        self._log(step, {k: v for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)})

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def live_plot(
    only: Sequence[str] = ("Reward", "Held-out prompts", "KL divergence"), *, seconds: float = 3.0
) -> Tracker:
    """Draw the curves of a run in a cell of a notebook, in place.

    Args:
      only: titles of the panels of `plots.draw_report`.
      seconds: least time between two pictures; the last one is drawn at the end.

    Raises:
      ImportError: IPython is not installed.
    """
    from grpo_jax.watch.plots import draw_report, save_figure

    display = _package("IPython.display", "notebook")
    handle = display.DisplayHandle()
    handle.display(display.Pretty("waiting for the first logged step"))
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


def check_trackers(config: Config, run_dir: str | os.PathLike[str] | None) -> list[str]:
    """Return the names of the trackers in `report_to`.

    Raises an `ImportError` if the package of one is not installed, and a `ValueError` without a directory for
    TensorBoard's files.
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


def open_trackers(config: Config, run_dir: str | os.PathLike[str] | None, *, step: int = 0) -> list[Tracker]:
    """Open the trackers in `report_to`, under `run_name`; a run that resumes after `step` > 0 continues their runs."""
    names = check_trackers(config, run_dir)
    kept = None if run_dir is None else Path(run_dir) / RUNS
    runs = json.loads(kept.read_text(encoding="utf-8")) if step and kept is not None and kept.exists() else {}
    with contextlib.ExitStack() as opened:  # an error closes the ones that are open
        trackers = []
        for name in names:
            tracker = _tensorboard(run_dir, step) if name == "tensorboard" else _service(name, config, runs)
            trackers.append(opened.enter_context(tracker))
        opened.pop_all()
    if kept is not None and runs:
        kept.write_text(json.dumps(runs), encoding="utf-8")
    return trackers


def _tensorboard(run_dir: str | os.PathLike[str] | None, step: int) -> Tracker:
    """Write TensorBoard's files, without TensorFlow; what they hold of steps after `step` is dropped."""
    directory = os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(run_dir or ".") / "tensorboard"
    package = _package("tensorboardX", "tensorboard")
    writer = package.SummaryWriter(logdir=str(Path(directory).expanduser()), purge_step=step + 1 if step else 0)

    def log(step: int, metrics: dict[str, float]) -> None:
        for metric, value in metrics.items():
            writer.add_scalar(metric, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def _service(name: str, config: Config, runs: dict[str, str]) -> Tracker:
    """Open a run of Weights & Biases or trackio. `runs` has the run to continue, and gets the one that is opened."""
    package = _package(name, name)
    settings = {"project": config.project, "name": config.run_name, "config": config.to_dict(), "resume": "allow"}
    if name == "trackio":  # continues a run by its name
        settings["name"] = runs.get(name, config.run_name)
    elif getattr(package, "run", None) is not None:  # an active one, which its owner closes
        return Tracker(lambda step, metrics: package.run.log(metrics, step=step), lambda: None)
    else:
        settings["project"] = os.environ.get("WANDB_PROJECT", config.project)
        settings |= {"id": runs.get(name), "resume": "allow" if name in runs else None}
    run = package.init(**settings)
    runs[name] = run.name if name == "trackio" else run.id
    return Tracker(lambda step, metrics: run.log(metrics, step=step), run.finish)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # imported already, and without a spec
        return True


def _package(name: str, extra: str) -> ModuleType:
    """Import a package; raise an ImportError that names its extra if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}): pip install 'grpo_jax[{extra}]'") from error
