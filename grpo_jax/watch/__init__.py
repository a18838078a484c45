"""Run monitoring: log files, plots, the HTML report, the progress display, hints, callbacks and trackers."""

from grpo_jax.watch.monitor import Callback, StopRun

__all__ = ["Callback", "StopRun"]
