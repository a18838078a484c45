"""Trackers: callbacks that send a run's numbers to TensorBoard, Weights & Biases, trackio or a notebook's cell.

A tracker is a `report.Callback` that is closed at the end, and any other is written in the same three lines:
`Tracker(log, close)`, where `log(step, metrics)` gets the finite numbers of `metrics.jsonl`. The packages are extras of
this one and imported by the function that opens a tracker.

```python
with tensorboard("runs/sums/tensorboard") as tracker:
    train(policy, rows, right, config, run_dir="runs/sums", callbacks=[tracker])
```
"""

from __future__ import annotations

import importlib
import io
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.plots import draw_report, save_figure

__all__ = ["Tracker", "live_plot", "tensorboard", "trackio", "wandb"]


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
