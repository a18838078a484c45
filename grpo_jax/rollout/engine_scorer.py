"""A server's model as the teacher of a run: it keeps its weights, and tells log-probs of the policy's completions."""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import raise_all
from grpo_jax.rollout.engine import MOST, NOTHING, RECOVERIES
from grpo_jax.rollout.engine_client import EngineError, Lost, run_together
from grpo_jax.rollout.engine_server import VLLM
from grpo_jax.types import Completions, Prompts, Tokenizer, Told

_Answer = TypeVar("_Answer")

_PROBE = (1, 2, 3)
"""Tokens of any vocabulary, asked about before anything is sampled."""


class EngineScorer:
    """A `run.teacher.Scorer` by a server: `engines.vllm_scorer` makes one.

    Its arguments are described there; `top_k` and `at_once` below 1 are a ValueError.
    """

    def __init__(
        self,
        server: VLLM,
        *,
        top_k: int | None = None,
        at_once: int = MOST,
        tokenizer: Tokenizer | None = None,
        patience: float = 300.0,
    ):
        if top_k is not None and not top_k >= 1:
            raise ValueError(f"top_k = {top_k!r}: give a number of tokens ≥ 1, or None for the drawn ones alone")
        if not at_once >= 1:
            raise ValueError(f"at_once = {at_once!r}: give a number of requests ≥ 1")
        self._server, self._patience, self._at_once = server, patience, at_once
        self.top_k, self.tokenizer = top_k, tokenizer
        self._longest = 0  # tokens that the server has to have room for
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._gone: EngineError | None = None  # the server is lost for this batch

    def __repr__(self) -> str:
        return f"EngineScorer({self._server!r})"

    def check(self, config: GRPOConfig) -> None:
        """Raise what stands against a run with these settings, before anything is sampled.

        Settings that differ from the scorer's raise ValueError, a server that cannot score EngineError.
        """
        problems = []
        if config.temperature != 1:
            problems.append(
                f"temperature = {config.temperature}: a server tells a text's log-probs at temperature 1.0 and at no"
                " other; use 1.0, or a Policy as teacher"
            )
        if config.distillation_topk != self.top_k:
            problems.append(
                f"distillation_topk = {config.distillation_topk}: the scorer was made with top_k = {self.top_k}; give"
                " both the same"
            )
        raise_all("teacher", problems)
        self._stop.clear()
        self._ask_all([list(_PROBE)])

    def score(self, prompts: Prompts, completions: Completions) -> Told:
        """The server's log-probs of completions [B, G, T] behind prompts [B, P], as `run.teacher.Scorer` says.

        Raises:
          EngineError: the server cannot do it, or is lost for longer than it is waited for.
        """
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        b, g, t = completions.tokens.shape
        drawn = np.asarray(completions.tokens).reshape(b * g, t)
        present = np.asarray(completions.mask if completions.present is None else completions.present)
        counts, begins, k = present.reshape(b * g, t).sum(-1), np.repeat(lengths, g), self.top_k or 0
        texts = [
            [*tokens[i // g, : begins[i]].tolist(), *drawn[i, : counts[i]].tolist()] for i in range(b * g)
        ]  # what was observed between turns is a part of the text
        log_probs, top = np.zeros((b * g, t), np.float32), np.zeros((b * g, t, k), np.float32)
        ids = np.zeros((b * g, t, k), np.int32)
        for i, places in enumerate(self._ask_all(texts)):
            for at, place in enumerate(places[begins[i] - 1 :]):
                log_probs[i, at] = place[texts[i][begins[i] + at]]
                if k:
                    ids[i, at] = sorted(place, key=place.__getitem__, reverse=True)[:k]
                    top[i, at] = [place[token] for token in ids[i, at].tolist()]
        if not k:
            return Told(log_probs.reshape(b, g, t))
        return Told(log_probs.reshape(b, g, t), ids.reshape(b, g, t, k), top.reshape(b, g, t, k))

    def _ask_all(self, texts: Sequence[list[int]]) -> list[list[dict[int, float]]]:
        """Ask about each text."""
        self._stop.clear()
        self._gone = None
        self._longest = max(map(len, texts)) + 1  # it draws a token, which nobody reads
        self._patiently(lambda: self._server.look_up(self._longest))
        tasks = [functools.partial(self._ask, ids) for ids in texts]
        return run_together(tasks, self._at_once, self._stop, self._server.close)

    def _ask(self, ids: Sequence[int]) -> list[dict[int, float]]:
        """Ask about a text."""
        return self._patiently(lambda: self._server.tell(ids, self.top_k or 0, stopped=self._stop.is_set))

    def _patiently(self, ask: Callable[[], _Answer]) -> _Answer:
        """The answer of a server that may be lost meanwhile."""
        for _ in range(RECOVERIES):
            try:
                return ask()
            except Lost as lost:
                self._wait(lost)
        try:
            return ask()
        except Lost as lost:
            raise EngineError(f"{lost}; this was the {RECOVERIES + 1}th time for one request. {NOTHING}") from lost

    def _wait(self, lost: Lost) -> None:
        """Wait for the server; of several threads one looks for it."""
        with self._lock:
            if self._gone is not None:  # the first thread's answer is that of all
                raise self._gone
            if self._stop.is_set():
                raise lost
            warnings.warn(f"{lost}. It is waited for, {self._patience:g} s at most", stacklevel=2)
            end = time.monotonic() + self._patience
            while not self._server.alive():
                if self._stop.wait(min(1.0, self._patience / 10)) or time.monotonic() > end:
                    self._gone = EngineError(f"{lost}. It was waited for {self._patience:g} s. {NOTHING}")
                    self._stop.set()
                    raise self._gone from lost
        self._server.look_up(self._longest)  # one that was started again may be another one
