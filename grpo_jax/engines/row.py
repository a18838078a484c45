"""One completion of a batch that a server samples: how it is asked for, and its tokens as it grows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.engines.client import EngineError
from grpo_jax.maths.sampling import Sampling
from grpo_jax.maths.stops import Stops
from grpo_jax.rollout.turns import Answers
from grpo_jax.types import Completions


class Asked(NamedTuple):
    """How a batch is asked for.

    Attributes:
      sampling: the distribution.
      stop: ids that end a turn.
      longest: tokens of a completion, at most.
      answers: who answers its turns; None: it has one.
      stops: of the texts that end a turn; None where there are none.
      turn: tokens of a turn, at most.
    """

    sampling: Sampling
    stop: tuple[int, ...]
    longest: int
    answers: Answers | None
    stops: Stops | None
    turn: int


class Row:
    """One completion as it grows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.sampled: list[bool] = []
        self.log_probs: list[float] = []
        self.ended = False

    def add(self, tokens: Sequence[int], log_probs: Sequence[float] | None) -> None:
        """Drawn tokens, or without log-probs observed ones."""
        self.tokens += map(int, tokens)
        self.sampled += [log_probs is not None] * len(tokens)
        self.log_probs += [0.0] * len(tokens) if log_probs is None else log_probs


def wait_for(promise: Future[Sequence[int] | None], stop: threading.Event) -> Sequence[int] | None:
    """Return the answer, unless the batch is given up."""
    while not stop.is_set():
        done, _ = wait([promise], timeout=0.2)
        if done:
            return promise.result()
    raise EngineError("the batch was given up")


def completions_of(rows: list[Row], shape: tuple[int, int, int], pad_token_id: int) -> Completions:
    """Rows of several lengths as arrays."""
    b, g, t = shape
    tokens = np.full((b * g, t), pad_token_id, np.int32)
    mask, present = np.zeros((2, b * g, t), bool)
    log_probs = np.zeros((b * g, t), np.float32)
    for i, row in enumerate(rows):
        n = len(row.tokens)
        tokens[i, :n], mask[i, :n], present[i, :n], log_probs[i, :n] = row.tokens, row.sampled, True, row.log_probs
    ended = np.array([row.ended for row in rows])
    several = None if np.array_equal(mask, present) else present
    arrays = (tokens, mask, log_probs, ended, several)
    return Completions(*jax.tree.map(lambda x: x.reshape(b, g, *x.shape[1:]), arrays))
