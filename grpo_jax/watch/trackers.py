"""Experiment trackers: TensorBoard, Weights & Biases, trackio, and live plots in a notebook.

`train` opens the trackers in `GRPOConfig(report_to=...)`. For other services, wrap two functions in a `Tracker`:

```python
with Tracker(lambda step, metrics: run.log(metrics, step=step), run.finish) as tracker:
    train(policy, rows, reward_fn, config, run_dir="runs/sums", callbacks=[tracker])
```
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_jax.config.sft import GRPOOrSFTConfig
from grpo_jax.messages import import_extra
from grpo_jax.watch.writer import read_settings, replace_file

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}

RUNS = "trackers.json"
"""File in the run directory with the ids or names of the trackers' runs, which a resumed run continues."""


class Tracker:
    """A callback that logs to an experiment tracker, and a context manager that closes the tracker.

    Args:
      log: function called as `log(step, metrics)` with the finite metrics of each logged step.
      close: function called once, without arguments, when the context exits.
    """

    def __init__(self, log: Callable[[int, dict[str, float]], object], close: Callable[[], object]):
        self._log = log
        self._close = close

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, {k: v for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)})

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def live_plot(only: Sequence[str] = ("Reward", "Held-out prompts", "KL divergence")) -> Tracker:
    """Return a tracker that plots metrics in a notebook cell. `only` lists panel titles; see `plots.draw_report`."""
    from grpo_jax.watch.plots import draw_report, save_figure

    display = import_extra("IPython.display", "ipython")
    handle = display.DisplayHandle()
    handle.display(display.Pretty("waiting for the first logged step"))
    lines: list[dict[str, float]] = []
    last_drawn = -math.inf

    def draw() -> None:
        nonlocal last_drawn
        picture = io.BytesIO()
        save_figure(draw_report(lines, only=only), picture)
        handle.update(display.Image(picture.getvalue()))
        last_drawn = time.monotonic()

    def log(step: int, metrics: dict[str, float]) -> None:
        lines.append({"step": step, **metrics})
        if time.monotonic() - last_drawn >= 3:  # drawing takes up to a second
            draw()

    return Tracker(log, lambda: draw() if lines else None)


def check_trackers(config: GRPOOrSFTConfig, run_dir: str | os.PathLike[str] | None) -> list[str]:
    """Return the names of the trackers in `report_to`. "all" is expanded to all installed trackers.

    Raises ValueError if a package is not installed, or if `run_dir` is None and TensorBoard needs it.
    """
    names = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to or ())
    if names == ["all"]:
        names = [name for name, package in _PACKAGES.items() if importlib.util.find_spec(package)]
    names = [name for name in names if name != "none"]
    for name in names:
        import_extra(_PACKAGES[name], _PACKAGES[name])
    if "tensorboard" in names and run_dir is None:
        raise ValueError(f"report_to = {config.report_to!r} requires a directory for TensorBoard's files; pass run_dir")
    return names


def open_trackers(config: GRPOOrSFTConfig, run_dir: str | os.PathLike[str] | None, *, step: int = 0) -> list[Tracker]:
    """Open the trackers in `report_to`. If `step` > 0, the trackers' previous runs are continued after this step."""
    names = check_trackers(config, run_dir)
    runs = read_settings(run_dir, RUNS) if step and run_dir is not None else {}
    trackers = [
        _open_tensorboard(run_dir, step) if name == "tensorboard" else _open_service(name, config, runs)
        for name in names
    ]
    if run_dir is not None and runs:
        replace_file(Path(run_dir) / RUNS, lambda file: file.write(json.dumps(runs).encode()))
    return trackers


def _open_tensorboard(run_dir: str | os.PathLike[str] | None, step: int) -> Tracker:
    """Open a TensorBoard writer, without TensorFlow. Entries after `step` from an interrupted run are dropped."""
    directory = Path(run_dir or ".") / "tensorboard"
    package = import_extra("tensorboardX", "tensorboardX")
    writer = package.SummaryWriter(logdir=str(directory.expanduser()), purge_step=step + 1 if step else 0)

    def log(step: int, metrics: dict[str, float]) -> None:
        for metric, value in metrics.items():
            writer.add_scalar(metric, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def _open_service(name: str, config: GRPOOrSFTConfig, runs: dict[str, str]) -> Tracker:
    """Open a wandb or trackio run. `runs` maps trackers to the ids or names of their runs, and is updated in place."""
    package = import_extra(name, name)
    settings = config.to_dict()
    if name == "trackio":  # trackio identifies a run by its name
        run_name = runs.get(name, config.run_name)
        run = package.init(project=config.project, name=run_name, config=settings, resume="allow")
    elif getattr(package, "run", None) is not None:  # use the active run, which the caller closes
        return Tracker(lambda step, metrics: package.run.log(metrics, step=step), lambda: None)
    else:
        project, resume = os.environ.get("WANDB_PROJECT", config.project), "allow" if name in runs else None
        run = package.init(project=project, name=config.run_name, config=settings, id=runs.get(name), resume=resume)
    runs[name] = run.name if name == "trackio" else run.id
    return Tracker(lambda step, metrics: run.log(metrics, step=step), run.finish)
