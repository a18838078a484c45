"""Records of episodes that are over, and what follows from them: the turn of each token, metrics of a rollout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.types import Messages


@dataclasses.dataclass
class EpisodeCounts:
    """Counts of one episode's events.

    Attributes:
      turns: of the policy.
      calls, failures: of tools.
      errors: of the environment.
      seconds: of both.
      clipped: 1 if the last turn called where no more calls are made.
      cut_short: turns that were cut at the longest length of a turn; None: there is no such limit.
    """

    turns: int = 0
    calls: int = 0
    failures: int = 0
    errors: int = 0
    seconds: float = 0.0
    clipped: int = 0
    cut_short: int | None = None


class Played(NamedTuple):
    """The record of an episode that is over; JSON has a form for all of it.

    Attributes:
      turns: (True if the policy wrote it, text) of each turn and observation.
      messages: the same as messages, of a conversation.
      reward: that of `get_reward` and `respond`, as a Python number, or a list with one for each turn; None for "not
        scored".
      counts: of its events.
      lengths: tokens of each turn of the policy; () of a record that an older version has written.
    """

    turns: list[tuple[bool, str]]
    messages: Messages
    reward: float | list[float] | str | None
    counts: EpisodeCounts
    lengths: Sequence[int] = ()

    def to_json(self) -> list[object]:
        """Return it as lists and dicts."""
        return [self.turns, self.messages, self.reward, dataclasses.asdict(self.counts), [*self.lengths]]

    @classmethod
    def from_json(cls, kept: Sequence[Any]) -> Played:
        """Return the record that `to_json` has written."""
        turns, messages, reward, counts, *rest = kept
        return cls([(own, text) for own, text in turns], messages, reward, EpisodeCounts(**counts), *rest)


def turn_ids(drawn: np.ndarray, played: Sequence[Played]) -> np.ndarray:
    """Return [B·G, T] int32, the turn that each drawn token belongs to, from 0; −1 for tokens that were not drawn.

    By the lengths of the turns, and not by the gaps between them: an observation may have no token.
    """
    ids = np.full(drawn.shape, -1, np.int32)
    for row, own, one in zip(ids, drawn, played, strict=True):
        row[own] = np.searchsorted(np.cumsum(one.lengths, dtype=int)[:-1], np.arange(own.sum()), side="right")
    return ids


def metrics_of(played: Sequence[Played]) -> dict[str, float]:
    """Return the metrics of a rollout's episodes."""
    counts = [one.counts for one in played]
    turns, cut_short = [one.turns for one in counts], [one.cut_short for one in counts if one.cut_short is not None]
    return {
        "turns/mean": float(np.mean(turns)),
        "turns/max": float(max(turns)),
        "turns/clipped_ratio": sum(one.clipped for one in counts) / len(counts),
        **({"turns/cut_short": float(sum(cut_short))} if cut_short else {}),
        "tools/calls": float(sum(one.calls for one in counts)),
        "tools/failures": float(sum(one.failures for one in counts)),
        "environment/errors": float(sum(one.errors for one in counts)),
        "environment/seconds": float(sum(one.seconds for one in counts)),
    }
