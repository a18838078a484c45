"""vLLM servers for a run: `vllm` as its sampler, `vllm_scorer` as its teacher."""

from __future__ import annotations

from grpo_jax.rollout.engine import MOST, Engine
from grpo_jax.rollout.engine_client import Client, EngineError
from grpo_jax.rollout.engine_scorer import EngineScorer
from grpo_jax.rollout.engine_server import VLLM
from grpo_jax.types import Tokenizer

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

    The server is started by whoever runs it, with the base model of the policy:

        VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank 64 \\
            --logprobs-mode processed_logprobs --max-model-len 2048

    Before each batch it gets the weights: adapters under a new name for each version, all weights of a policy without
    adapters by files that both sides see. Both sides then score a text of 65 tokens, and once more after the batch.

    Args:
      base_url: "http://host:port".
      model: the name that it serves the base model under; "" for the only one.
      directory: where weights are written for it; both see it under this name. None: /dev/shm, or where there is none
        the directory for temporary files.
      tolerance: nats per token, the mean by which both sides' log-probs of that text may differ. None: 1e-4 for float32
        params, 0.05 for others. A server that computes in bfloat16 (`--dtype`) differs by some 0.01.
      timeout: seconds for one whole answer of the server, such as a completion.
      patience: seconds for which a busy server is asked again, and a lost one waited for.
      api_key_env: name of the environment variable with the key of a server that asks for one; the key itself is kept
        nowhere.

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
    at_once: int = MOST,
    tokenizer: Tokenizer | None = None,
    timeout: float = 600.0,
    patience: float = 300.0,
    api_key_env: str = "VLLM_API_KEY",
) -> EngineScorer:
    """A running vLLM server as the `teacher` of `train`: its model tells the log-probs of the policy's completions.

    The server is started by whoever runs it, with the teacher, which may be larger than the policy, quantized, or on
    many devices:

        vllm serve MODEL --max-model-len 2048 --max-logprobs 64

    It keeps its weights. Each completion is one request with its prompt, by vLLM's `prompt_logprobs`: the log-probs of
    the model at temperature 1, also under `--logprobs-mode processed_logprobs`. A run at another temperature is
    refused: what the rest of the vocabulary weighs there does not follow from a few log-probs at temperature 1.

    Args:
      base_url: "http://host:port".
      top_k: tokens whose log-probs are asked for in every place, `distillation_topk` of a run with
        `distillation_mode="topk_logits"`; None: the drawn ones alone, for "sampled_token". More than 20 need
        `--max-logprobs`.
      model: the name that it serves the teacher under, which may be that of adapters; "" for the only model.
      at_once: requests in flight, at most. 1 for a server with `--enable-lora`: vLLM 0.32 ends at the prompt_logprobs
        of two texts in one batch there.
      tokenizer: of the teacher, such as `AutoTokenizer.from_pretrained(MODEL)`, which the run compares with the
        policy's; None: they are taken to be the same.
      timeout: as in `vllm`, like the next two.
      patience: seconds.
      api_key_env: name of a variable.

    Returns:
      `EngineScorer`, a `run.teacher.Scorer`.

    Raises:
      ValueError: an argument that makes no sense.

    Example:
      >>> vllm_scorer("http://127.0.0.1:8000", top_k=16)
      EngineScorer(VLLM('http://127.0.0.1:8000'))
    """
    client = Client(base_url, timeout=timeout, patience=patience, api_key_env=api_key_env)
    server = VLLM(client, model)
    return EngineScorer(server, top_k=top_k, at_once=at_once, tokenizer=tokenizer, patience=patience)
