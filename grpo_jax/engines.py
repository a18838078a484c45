"""vLLM servers for training: `vllm` builds a sampler, and `vllm_scorer` builds a teacher."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import raise_all
from grpo_jax.rewards.calls import run_on_event_loop
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
    """Build a `sampler` for `train`, `evaluate` and `rehearse`, backed by a running vLLM server.

    Start the server with the policy's base model:

        VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank 64 \\
            --logprobs-mode processed_logprobs --max-model-len 2048

    Before each batch, the server loads the current weights. Adapters are loaded under a new name per version; full
    weights replace the base model's. To verify the weights, the server's and the trainer's log-probs of a 65-token
    probe are compared before and after each batch.

    Args:
      base_url: URL of the server, such as "http://host:port".
      model: name of the base model on the server. If "", the server's only model is used.
      directory: directory that weights are written to. The server must be able to read it under the same path. If None,
        the system's temporary directory is used. Pass "/dev/shm" to keep the weights in memory.
      tolerance: maximum mean absolute difference between the probe's log-probs, in nats per token. If None, it is 1e-4
        for float32 models and 0.05 for others. With `--dtype bfloat16`, the difference is about 0.01.
      timeout: timeout in seconds for one complete response, such as a completion.
      patience: seconds for which to retry requests to a busy server, and to wait for an unavailable server.
      api_key_env: name of the environment variable that contains the server's API key. The key itself is not stored.

    Returns:
      An `Engine`, which implements `run.sampler.Sampler`.

    Raises:
      ValueError: if an argument is invalid.

    Example:
      >>> vllm("http://127.0.0.1:8000").last_metrics
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
    """Build a `teacher` for `train` that scores completions with a fixed model on a running vLLM server.

    The teacher may be larger than the policy, quantized, or sharded over many devices:

        vllm serve MODEL --max-model-len 2048 --max-logprobs 64

    Each completion is sent with its prompt in one request, which returns vLLM's `prompt_logprobs`. These are the
    model's log-probs at temperature 1, even with `--logprobs-mode processed_logprobs`. For other temperatures, an
    error is raised, because the normalizer cannot be computed from a few log-probs at temperature 1. Arguments that are
    not listed are documented in `vllm`.

    Args:
      top_k: number of tokens whose log-probs are requested at every position. It must equal `distillation_topk` in a
        run with `distillation_mode="topk_logits"`. Values over 20 need `--max-logprobs`. If None, only the log-probs of
        the sampled tokens are requested, for `distillation_mode="sampled_token"`.
      model: name of the teacher on the server, which may be an adapter. If "", the server's only model is used.
      at_once: maximum number of concurrent requests. Use 1 for a server with `--enable-lora`, where vLLM 0.32 crashes
        on `prompt_logprobs` for two sequences in one batch.
      tokenizer: tokenizer of the teacher, such as `AutoTokenizer.from_pretrained(MODEL)`, which is compared with the
        policy's. If None, the two are assumed to be equal.
    """
    client = Client(base_url, timeout=timeout, patience=patience, api_key_env=api_key_env)
    return EngineScorer(VLLM(client, model), top_k=top_k, at_once=at_once, tokenizer=tokenizer)


class EngineScorer:
    """A `run.teacher.Scorer` backed by a server. Build it with `vllm_scorer`, which documents the arguments."""

    def __init__(self, server: VLLM, *, top_k: int | None, at_once: int, tokenizer: Tokenizer | None):
        self._server, self._at_once, self.top_k, self.tokenizer = server, at_once, top_k, tokenizer

    def check(self, config: GRPOConfig) -> None:
        """Raise ValueError if the config does not match the scorer, and EngineError if the server cannot score."""
        problems = []
        if config.temperature != 1:
            problems.append(
                f"temperature must be 1.0 with a server as teacher; got {config.temperature}. Set temperature=1.0, or"
                " pass a Policy as teacher"
            )
        if config.distillation_topk != self.top_k:
            problems.append(
                f"distillation_topk must equal the scorer's top_k, {self.top_k}; got {config.distillation_topk}."
                " Pass the same value to both"
            )
        raise_all("teacher", problems)
        self._score_all([[1, 2, 3]])  # ids that exist in any vocabulary

    def score(self, prompts: Prompts, completions: Completions) -> TeacherLogProbs:
        """Return the server's log-probs of completions [B, G, T] after prompts [B, P]. See `run.teacher.Scorer`.

        Raises EngineError if the server rejects a request or remains unavailable.
        """
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        b, g, t = completions.tokens.shape
        drawn = np.asarray(completions.tokens).reshape(b * g, t)
        present = np.asarray(completions.mask if completions.present is None else completions.present)
        counts, begins, k = present.reshape(b * g, t).sum(-1), np.repeat(lengths, g), self.top_k or 0
        sequences = [[*tokens[i // g, : begins[i]].tolist(), *drawn[i, : counts[i]].tolist()] for i in range(b * g)]
        log_probs, top = np.zeros((b * g, t), np.float32), np.zeros((b * g, t, k), np.float32)
        ids = np.zeros((b * g, t, k), np.int32)
        for i, positions in enumerate(self._score_all(sequences)):
            for j, position in enumerate(positions[begins[i] - 1 :]):
                log_probs[i, j] = position[sequences[i][begins[i] + j]]
                ids[i, j] = sorted(position, key=position.__getitem__, reverse=True)[:k]
                top[i, j] = [position[token] for token in ids[i, j].tolist()]
        if not k:
            return TeacherLogProbs(log_probs.reshape(b, g, t))
        return TeacherLogProbs(log_probs.reshape(b, g, t), ids.reshape(b, g, t, k), top.reshape(b, g, t, k))

    def _score_all(self, sequences: Sequence[list[int]]) -> list[list[dict[int, float]]]:
        """Return, for each sequence, the log-probs at every position except the first, as dicts keyed by token id."""
        longest = max(map(len, sequences)) + 1  # the server also samples a token, which is ignored
        look_up = functools.partial(self._server.look_up, longest)
        requests = Requests(self._server.client, restore=look_up)  # a restarted server may have a different model
        scores = [functools.partial(self._server.log_probs, ids, self.top_k or 0) for ids in sequences]

        async def score_all() -> list[list[dict[int, float]]]:
            await requests.send(look_up)
            return await requests.run([functools.partial(requests.send, score) for score in scores], self._at_once)

        return run_on_event_loop(score_all())
