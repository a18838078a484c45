"""vLLM servers for a run: `vllm` as its sampler, `vllm_scorer` as its teacher."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import raise_all
from grpo_jax.rollout.engine import Engine
from grpo_jax.rollout.engine_client import MAX_REQUESTS, Client, EngineError, Requests
from grpo_jax.rollout.engine_server import VLLM
from grpo_jax.types import Completions, Prompts, TeacherLogProbs, Tokenizer

__all__ = ["Engine", "EngineError", "EngineScorer", "vllm", "vllm_scorer"]


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

    Before each batch the server loads the weights: adapters under a new name for each version, or all weights from
    files. Before and after the batch, both sides score a text of 65 tokens.

    Args:
      base_url: "http://host:port".
      model: the name under which the server has the base model; "" for the only one.
      directory: where the weights are written; the server needs the directory under the same name. If None, /dev/shm is
        used, or the directory for temporary files.
      tolerance: largest mean difference between both sides' log-probs of that text, in nats per token. If None, 1e-4
        for float32 params and 0.05 for others; a server that computes in bfloat16 (`--dtype`) differs by some 0.01.
      timeout: seconds for one whole answer of the server, such as a completion.
      patience: seconds for which a busy server is retried, and for which the engine waits for a lost server.
      api_key_env: name of the environment variable with the server's key, which is stored nowhere else.

    Returns:
      `Engine`, a `run.sampler.Sampler`.

    Raises:
      ValueError: an argument that makes no sense.

    Example:
      >>> vllm("http://127.0.0.1:8000").measured
      {}
    """
    client = Client(base_url, timeout=timeout, patience=patience, api_key_env=api_key_env)
    return Engine(VLLM(client, model), directory=directory, tolerance=tolerance)


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

    Each completion is one request with its prompt, for vLLM's `prompt_logprobs`. These are the model's log-probs at
    temperature 1, also under `--logprobs-mode processed_logprobs`. Runs at other temperatures are refused, since a few
    log-probs at temperature 1 do not determine their normalizer. Arguments without a description are as in `vllm`.

    Args:
      top_k: number of tokens whose log-probs are requested at every position, `distillation_topk` of a run with
        `distillation_mode="topk_logits"`; more than 20 need `--max-logprobs`. If None, only the drawn tokens' log-probs
        are requested, for "sampled_token".
      model: the name under which the server has the teacher, which may be an adapter; "" for the only model.
      at_once: requests in flight, at most. Use 1 for a server with `--enable-lora`: vLLM 0.32 crashes there on the
        prompt_logprobs of two texts in one batch.
      tokenizer: the teacher's, such as `AutoTokenizer.from_pretrained(MODEL)`, to compare with the policy's. If None,
        they are assumed to be equal.
    """
    client = Client(base_url, timeout=timeout, patience=patience, api_key_env=api_key_env)
    return EngineScorer(VLLM(client, model), top_k=top_k, at_once=at_once, tokenizer=tokenizer)


class EngineScorer:
    """A `run.teacher.Scorer` by a server; `vllm_scorer` makes one and describes the arguments."""

    def __init__(self, server: VLLM, *, top_k: int | None, at_once: int, tokenizer: Tokenizer | None):
        self._server, self._at_once, self.top_k, self.tokenizer = server, at_once, top_k, tokenizer

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
        """Return the server's log-probs of completions [B, G, T] after prompts [B, P]; see `run.teacher.Scorer`.

        Raises an `EngineError` if the server refuses, or does not come back in time.
        """
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        b, g, t = completions.tokens.shape
        drawn = np.asarray(completions.tokens).reshape(b * g, t)
        present = np.asarray(completions.mask if completions.present is None else completions.present)
        counts, begins, k = present.reshape(b * g, t).sum(-1), np.repeat(lengths, g), self.top_k or 0
        texts = [[*tokens[i // g, : begins[i]].tolist(), *drawn[i, : counts[i]].tolist()] for i in range(b * g)]
        log_probs, top = np.zeros((b * g, t), np.float32), np.zeros((b * g, t, k), np.float32)
        ids = np.zeros((b * g, t, k), np.int32)
        for i, positions in enumerate(self._score_all(texts)):
            for at, position in enumerate(positions[begins[i] - 1 :]):
                log_probs[i, at] = position[texts[i][begins[i] + at]]
                ids[i, at] = sorted(position, key=position.__getitem__, reverse=True)[:k]
                top[i, at] = [position[token] for token in ids[i, at].tolist()]
        if not k:
            return TeacherLogProbs(log_probs.reshape(b, g, t))
        return TeacherLogProbs(log_probs.reshape(b, g, t), ids.reshape(b, g, t, k), top.reshape(b, g, t, k))

    def _score_all(self, texts: Sequence[list[int]]) -> list[list[dict[int, float]]]:
        """Return log-probs by token at every position of each text after the first."""
        longest = max(map(len, texts)) + 1  # the server draws a token, which is ignored
        look_up = functools.partial(self._server.look_up, longest)
        requests = Requests(self._server.client, restore=look_up)  # a restarted server may have another model
        requests.send(look_up)
        scores = [functools.partial(self._server.log_probs, ids, self.top_k or 0) for ids in texts]
        return requests.run([functools.partial(requests.send, score) for score in scores], self._at_once)
