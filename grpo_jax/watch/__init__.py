"""Watching a run: its files, plots, page and display, hints, callbacks and trackers."""

from grpo_jax.watch.trackers import Callback, StopRun

__all__ = ["Callback", "StopRun"]
