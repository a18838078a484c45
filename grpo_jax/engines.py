"""vLLM servers for a run: `vllm` as its sampler, `vllm_scorer` as its teacher."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import raise_all
from grpo_jax.rollout.engine import MAX_REQUESTS, Engine
from grpo_jax.rollout.engine_client import (
    NOTHING_LEARNED,
    RECOVERIES,
    Client,
    EngineError,
    Lost,
    run_together,
    wait_until_alive,
)
from grpo_jax.rollout.engine_server import VLLM
from grpo_jax.types import Completions, Prompts, TeacherLogProbs, Tokenizer

__all__ = ["Engine", "EngineError", "EngineScorer", "vllm", "vllm_scorer"]

_Result = TypeVar("_Result")


def vllm(
    base_url: str,
    *,
    model: str = "",
    directory: str | None = None,
    tolerance: float | None = None,
    timeout: float = 600.0,
    patience: float = 300.0,
    api_key_env: str = "VLLM_API_KEY",
) -> Engine:
    """A running vLLM server as the `sampler` of `train`, `evaluate` and `rehearse`.

    Start the server with the policy's base model:

        VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank 64 \\
            --logprobs-mode processed_logprobs --max-model-len 2048

    Before each batch it loads the weights: adapters under a new name for each version, all weights of a policy without
    adapters from files. Before and after the batch, both sides score a text of 65 tokens.

    Args:
      base_url: "http://host:port".
      model: the name that it serves the base model under; "" for the only one.
      directory: for the files of weights; the server needs it under the same name. If None, /dev/shm, or the directory
        for temporary files.
      tolerance: nats per token, the largest mean difference between both sides' log-probs of that text. If None, 1e-4
        for float32 params, 0.05 for others; a server that computes in bfloat16 (`--dtype`) differs by some 0.01.
      timeout: seconds for one whole answer of the server, such as a completion.
      patience: seconds during which a busy server is retried, and a lost one waited for.
      api_key_env: name of the environment variable with the server's key, which is stored nowhere else.

    Returns:
      `Engine`, a `run.sampler.Sampler`.

    Raises:
      ValueError: an argument that makes no sense.

    Example:
      >>> vllm("http://127.0.0.1:8000")
      Engine(VLLM('http://127.0.0.1:8000'))
    """
    client = Client(base_url, timeout=timeout, patience=patience, api_key_env=api_key_env)
    return Engine(VLLM(client, model), directory=directory, tolerance=tolerance, patience=patience)


def vllm_scorer(
    base_url: str,
    *,
    top_k: int | None = None,
    model: str = "",
    at_once: int = MAX_REQUESTS,
    tokenizer: Tokenizer | None = None,
    timeout: float = 600.0,
    patience: float = 300.0,
    api_key_env: str = "VLLM_API_KEY",
) -> EngineScorer:
    """A running vLLM server as the `teacher` of `train`: it scores the policy's completions with a fixed model.

    The teacher may be larger than the policy, quantized, or on many devices:

        vllm serve MODEL --max-model-len 2048 --max-logprobs 64

    Each completion is one request with its prompt, for vLLM's `prompt_logprobs`: the model's log-probs at temperature
    1, also under `--logprobs-mode processed_logprobs`. Runs at other temperatures are refused, since their normalizer
    does not follow from a few log-probs at temperature 1.

    Args:
      base_url: "http://host:port".
      top_k: tokens whose log-probs are requested at every position, `distillation_topk` of a run with
        `distillation_mode="topk_logits"`. If None, only the drawn ones, for "sampled_token". More than 20 need
        `--max-logprobs`.
      model: the name that it serves the teacher under, which may be one of adapters; "" for the only model.
      at_once: requests in flight, at most. Use 1 for a server with `--enable-lora`: vLLM 0.32 crashes there on the
        prompt_logprobs of two texts in one batch.
      tokenizer: of the teacher, such as `AutoTokenizer.from_pretrained(MODEL)`, which the run compares with the
        policy's. If None, they are assumed to be equal.
      timeout: seconds for one whole answer of the server.
      patience: seconds during which a busy server is retried, and a lost one waited for.
      api_key_env: name of the environment variable with the server's key.

    Returns:
      `EngineScorer`, a `run.teacher.Scorer`.

    Raises:
      ValueError: an argument that makes no sense.

    Example:
      >>> vllm_scorer("http://127.0.0.1:8000", top_k=16)
      EngineScorer(VLLM('http://127.0.0.1:8000'))
    """
    client = Client(base_url, timeout=timeout, patience=patience, api_key_env=api_key_env)
    return EngineScorer(VLLM(client, model), top_k=top_k, at_once=at_once, tokenizer=tokenizer, patience=patience)


class EngineScorer:
    """A `run.teacher.Scorer` by a server; `vllm_scorer` makes one and describes the arguments."""

    def __init__(self, server: VLLM, *, top_k: int | None, at_once: int, tokenizer: Tokenizer | None, patience: float):
        if top_k is not None and not top_k >= 1:
            raise ValueError(f"top_k = {top_k!r}: give a number of tokens ≥ 1, or None for the drawn ones alone")
        if not at_once >= 1:
            raise ValueError(f"at_once = {at_once!r}: give a number of requests ≥ 1")
        self._server, self._patience, self._at_once = server, patience, at_once
        self.top_k, self.tokenizer = top_k, tokenizer
        self._longest = 0  # tokens of a text that the server has to accept
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._gone: EngineError | None = None  # the server did not come back during this batch

    def __repr__(self) -> str:
        return f"EngineScorer({self._server!r})"

    def check(self, config: GRPOConfig) -> None:
        """Raise a `ValueError` for settings unlike the scorer's, an `EngineError` if the server cannot score."""
        problems = []
        if config.temperature != 1:
            problems.append(
                f"temperature = {config.temperature}: a server returns a text's log-probs at temperature 1.0 only; use"
                " 1.0, or a Policy as teacher"
            )
        if config.distillation_topk != self.top_k:
            problems.append(
                f"distillation_topk = {config.distillation_topk}: the scorer was made with top_k = {self.top_k}; give"
                " both the same"
            )
        raise_all("teacher", problems)
        self._score_all([[1, 2, 3]])  # tokens of any vocabulary

    def score(self, prompts: Prompts, completions: Completions) -> TeacherLogProbs:
        """The server's log-probs of completions [B, G, T] after prompts [B, P], as described by `run.teacher.Scorer`.

        Raises:
          EngineError: the server refuses, or does not come back in time.
        """
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        b, g, t = completions.tokens.shape
        drawn = np.asarray(completions.tokens).reshape(b * g, t)
        present = np.asarray(completions.mask if completions.present is None else completions.present)
        counts, begins, k = present.reshape(b * g, t).sum(-1), np.repeat(lengths, g), self.top_k or 0
        texts = [[*tokens[i // g, : begins[i]].tolist(), *drawn[i, : counts[i]].tolist()] for i in range(b * g)]
        log_probs, top = np.zeros((b * g, t), np.float32), np.zeros((b * g, t, k), np.float32)
        ids = np.zeros((b * g, t, k), np.int32)
        for i, places in enumerate(self._score_all(texts)):
            for at, place in enumerate(places[begins[i] - 1 :]):
                log_probs[i, at] = place[texts[i][begins[i] + at]]
                if k:
                    ids[i, at] = sorted(place, key=place.__getitem__, reverse=True)[:k]
                    top[i, at] = [place[token] for token in ids[i, at].tolist()]
        if not k:
            return TeacherLogProbs(log_probs.reshape(b, g, t))
        return TeacherLogProbs(log_probs.reshape(b, g, t), ids.reshape(b, g, t, k), top.reshape(b, g, t, k))

    def _score_all(self, texts: Sequence[list[int]]) -> list[list[dict[int, float]]]:
        """For each text, the log-probs by token at every position after the first."""
        self._stop.clear()
        self._gone, self._longest = None, max(map(len, texts)) + 1  # the server draws a token, which is ignored
        self._retry(lambda: self._server.look_up(self._longest))
        tasks = [functools.partial(self._score_one, ids) for ids in texts]
        return run_together(tasks, self._at_once, self._stop, self._server.close)

    def _score_one(self, ids: Sequence[int]) -> list[dict[int, float]]:
        return self._retry(lambda: self._server.log_probs(ids, self.top_k or 0, stopped=self._stop.is_set))

    def _retry(self, request: Callable[[], _Result]) -> _Result:
        """Make a request again after the server was lost and came back."""
        for _ in range(RECOVERIES):
            try:
                return request()
            except Lost as lost:
                self._wait(lost)
        try:
            return request()
        except Lost as lost:
            message = f"{lost}; this was the {RECOVERIES + 1}th time for one request. {NOTHING_LEARNED}"
            raise EngineError(message) from lost

    def _wait(self, lost: Lost) -> None:
        """Wait for the server; one thread does, for all."""
        with self._lock:
            if self._gone is not None:
                raise self._gone
            if self._stop.is_set():
                raise lost
            try:
                wait_until_alive(self._server.alive, lost, self._patience, self._stop)
            except EngineError as error:
                self._gone = error
                self._stop.set()
                raise
        self._server.look_up(self._longest)  # a restarted server may serve another model
