"""A wrapper around `collect` that names its results, for tests."""

from types import SimpleNamespace

from grpo_jax.run.collect import RolloutSource, collect


def collected(run, state, cursor=0, source=None):
    """Collect one iteration from `source`, or locally from the prompt at `cursor`; return a namespace of results."""
    source = RolloutSource(run, cursor=cursor) if source is None else source
    batch, metrics, rows = collect(run, state, source)
    return SimpleNamespace(batch=batch, metrics=metrics, rows=rows, cursor=source.cursor)
