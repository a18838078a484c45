"""Parts of a run's page that take its numbers apart: rewards by turn and by column, and one iteration in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.watch.colours import PHASES
from grpo_jax.watch.summary import numbers
from grpo_jax.watch.writer import CompletionRow, Line

_MOST = 24
"""Rows of a table; of turns, the first ones."""
_ORDER = ("rewards", "reference", "update", "other")
_ENGINE = {"write": "nothing", "hand_over": "low", "sample": "rollout"}
"""Part of an engine's time, as `sampler/seconds/<part>` → meaning of its colour."""


class PageTable(NamedTuple):
    """A table of a page: its title, the names of its columns, and its rows as texts; the first column names a row."""

    title: str
    head: list[str]
    rows: list[list[str]]


class Span(NamedTuple):
    """A part of an iteration: its lane, its name, the meaning of its colour, and when it begins and ends (seconds)."""

    lane: str
    name: str
    colour: str
    begin: float
    end: float


def turn_table(rows: Sequence[CompletionRow]) -> list[PageTable]:
    """Return the means of rewards that were given turn by turn, none where there are none.

    Example:
      >>> rows = [{"turn_rewards": {"near": [0.5, 1.0]}}, {"turn_rewards": {"near": [0.0]}}]
      >>> turn_table(rows)[0].rows
      [['1', '2', '0.25'], ['2', '1', '1']]
    """
    scored = [row["turn_rewards"] for row in rows if isinstance(row.get("turn_rewards"), Mapping)]
    names = list(dict.fromkeys(name for of_turns in scored for name in of_turns))
    turns = max((len(of_turn) for of_turns in scored for of_turn in of_turns.values()), default=0)
    body = []
    for turn in range(min(turns, _MOST)):
        values = [[of_turns[name][turn] for of_turns in scored if len(of_turns.get(name, ())) > turn] for name in names]
        body.append([str(turn + 1), str(max(map(len, values))), *map(_mean, values)])
    return [PageTable("Rewards by turn", ["turn", "completions", *names], body)] if body else []


def column_tables(rows: Sequence[CompletionRow], names: Iterable[str]) -> list[PageTable]:
    """Return the mean rewards for each value of a column that sorts completions, such as `task`.

    One does that holds texts of up to 60 letters, at least two and at most `_MOST` of them, each for two completions on
    average.

    Args:
      rows: completions.
      names: of their columns.

    Example:
      >>> rows = [{"task": task, "rewards": {"right": x}} for task, x in (("sum", 1.0), ("sum", 0.0), ("sort", 1.0))]
      >>> column_tables([*rows, rows[2]], ["task"])[0].rows
      [['sort', '2', '1'], ['sum', '2', '0.5']]
    """
    functions = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    tables = []
    for column in names:
        values = [row[column] for row in rows if column in row]
        if not all(isinstance(value, str) and 0 < len(value) <= 60 for value in values):
            continue
        kinds = sorted(set(values))
        if not (2 <= len(kinds) <= _MOST and 2 * len(kinds) <= len(values)):
            continue
        body = []
        for kind in kinds:
            of_kind = [row["rewards"] for row in rows if row.get(column) == kind]
            scores = [[rewards.get(function) for rewards in of_kind] for function in functions]
            body.append([kind, str(len(of_kind)), *map(_mean, scores)])
        tables.append(PageTable(f"Rewards by {column}", [column, "completions", *functions], body))
    return tables


def _mean(values: Iterable[float | None]) -> str:
    """Return the mean of the scores that there are, as a table shows it."""
    scores = [value for value in values if value is not None]
    return f"{np.mean(scores):.3g}" if scores else "–"


def iteration(lines: Sequence[Line], updates: int = 1) -> list[Span]:
    """Return one iteration in time, a mean of those since the last line but one: the engine beside the trainer.

    Lengths are measured; the phases stand in their order. A built-in engine samples for the seconds of `rollout`. What
    another one measured (`sampler/seconds/<part>`) ends when the rollout does, and begins before the iteration where
    completions were sampled ahead.

    Args:
      lines: objects of `metrics.jsonl`.
      updates: optimizer steps of an iteration.

    Returns:
      Spans of the lanes "engine" and "trainer"; [] where no times were logged.

    Example:
      >>> spans = iteration([{"step": 10, "seconds/rollout": 20.0, "seconds/update": 10.0, "seconds/total": 30.0}])
      >>> [(span.lane, span.name, span.begin, span.end) for span in spans]
      [('engine', 'rollout', 0.0, 2.0), ('trainer', 'update', 2.0, 3.0)]
    """
    timed = [line for line in lines if numbers([line], "seconds/rollout") and numbers([line], "seconds/total")]
    if not timed:
        return []
    line, before = timed[-1], timed[-2]["step"] if len(timed) > 1 else 0
    iterations = max((numbers([line], "step")[0] - float(before or 0)) / updates, 1.0)
    seconds = {
        name.removeprefix("seconds/"): numbers([line], name)[0] / iterations
        for name in line
        if name.startswith("seconds/") and numbers([line], name)
    }
    seconds["other"] = max(seconds.pop("total") - sum(seconds.values()), 0.0)
    sampled = seconds["rollout"]
    engine = {part: value for part in _ENGINE for value in numbers([line], f"sampler/seconds/{part}")}
    spans, at = [], sampled - sum(engine.values())
    for part, value in engine.items():
        spans.append(Span("engine", part.replace("_", " "), _ENGINE[part], at, at + value))
        at += value
    spans += [] if engine else [Span("engine", "rollout", PHASES["rollout"], 0.0, sampled)]
    at = sampled
    for phase in _ORDER:
        if seconds.get(phase, 0.0) > 1e-3 * sum(seconds.values()):
            spans.append(Span("trainer", phase, PHASES[phase], at, at + seconds[phase]))
            at += seconds[phase]
    return spans
