"""The protocol of a server that samples: what an `Engine` asks of vLLM, SGLang or another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from grpo_jax.maths.sampling import Sampling
from grpo_jax.maths.stops import Stops


class Drawn(NamedTuple):
    """The tokens that a server drew after some others.

    Attributes:
      tokens: n ≥ 1 ids, the one that ended them among them.
      log_probs: n, of the distribution that they were drawn from.
      ended: whether the last one, or a text that it completes, was to end them.
    """

    tokens: list[int]
    log_probs: list[float]
    ended: bool


class Server(Protocol):
    """A small client of one kind of server; its methods are called from many threads.

    All of them raise `engines.client.EngineError`, of which `Lost` says that the server may come back.
    """

    base_url: str

    def check(self, sampling: Sampling, longest: int) -> None:
        """Raise an `EngineError` unless it samples by these settings, with the log-probs of what it samples from, and
        has room for sequences of so many tokens; asked before the first completion."""

    def load(self, version: str, directory: Path, adapters: bool) -> None:
        """Give it the weights of a directory, or the adapters in PEFT's format; no request may be on its way."""

    def holds(self, version: str) -> bool:
        """Whether it still has those weights, as far as it can say."""

    def draw(
        self,
        ids: Sequence[int],
        *,
        most: int,
        seed: int,
        sampling: Sampling,
        stop: Sequence[int],
        stops: Stops | None,
        stopped: Callable[[], bool],
    ) -> Drawn:
        """Draw at most so many tokens after `ids`, up to one of `stop` or one that completes a text of `stops`, by the
        weights loaded last."""

    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-probs of ids[1:] at temperature 1, by the weights loaded last."""

    def alive(self) -> bool:
        """Whether it answers."""

    def close(self) -> None:
        """Break off what is being asked."""


class ScoringServer(Protocol):
    """The part of a server's client that an `EngineScorer` calls, from many threads; all of it raises `EngineError`."""

    base_url: str

    def look_up(self, longest: int) -> None:
        """Raise an `EngineError` unless it has the model, and room for sequences of so many tokens."""

    def tell(
        self, ids: Sequence[int], k: int = 0, *, stopped: Callable[[], bool] = lambda: False
    ) -> list[dict[int, float]]:
        """For each of ids[1:], log-probs by token: its own and those of the k most probable ones, at temperature 1."""

    def alive(self) -> bool:
        """Whether it answers."""

    def close(self) -> None:
        """Break off what is being asked."""
