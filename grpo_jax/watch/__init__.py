"""What a person sees of a run: its files, plots, page and display, hints, and trackers."""

from grpo_jax.watch.trackers import Callback

__all__ = ["Callback"]
