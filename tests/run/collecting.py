"""One iteration's batch under names, for tests of `collect`."""

from types import SimpleNamespace

from grpo_jax.run.collect import LocalRollouts, collect


def collected(run, state, cursor=0, source=None):
    """`batch`, `metrics`, `rows` and `cursor` of an iteration, from a source or from the prompts at `cursor` on."""
    source = LocalRollouts(run, cursor=cursor) if source is None else source
    batch, metrics, rows = collect(run, state, source)
    return SimpleNamespace(batch=batch, metrics=metrics, rows=rows, cursor=source.cursor)
