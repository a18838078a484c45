"""Watching a run: its files, plots, page and display, hints, callbacks and trackers."""

from grpo_jax.watch.monitor import Callback, StopRun

__all__ = ["Callback", "StopRun"]
