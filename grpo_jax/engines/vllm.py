"""A vLLM server as an engine: token ids in, token ids and their log-probs out, by its OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from grpo_jax.engines.client import Client, EngineError, Lost, Refused
from grpo_jax.engines.engine import MOST, Engine
from grpo_jax.engines.scorer import EngineScorer
from grpo_jax.engines.server import Drawn
from grpo_jax.maths.sampling import Sampling
from grpo_jax.maths.stops import Stops
from grpo_jax.messages import some
from grpo_jax.types import Json, Tokenizer

START = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank RANK"
    " --logprobs-mode processed_logprobs"
)


class VLLM:
    """The requests of `engines.server.Server` and of a `ScoringServer`, as vLLM understands them.

    Args:
      client: HTTP to the server.
      model: the name that it serves the base model under; "" for the only one.
    """

    def __init__(self, client: Client, model: str = ""):
        self._client, self._asked_for, self.base_url = client, model, client.base_url
        self._base, self._name = model, model
        self._says_version = True

    def __repr__(self) -> str:
        return f"VLLM({self.base_url!r})"

    def check(self, sampling: Sampling, longest: int) -> None:
        """Look for the model, its room, and the mode of its log-probs."""
        self._find(longest, adapters=False)
        # Cut to one token, the distribution that is drawn from gives it the log-prob 0, and the model's own less.
        if sampling == Sampling() or sampling.temperature == 0:
            return
        cut = Sampling(top_k=1)
        drawn = self.draw([1, 2, 3], most=1, seed=0, sampling=cut, stop=[], stops=None, stopped=lambda: False)
        if drawn.log_probs[0] < -1e-6:
            raise EngineError(
                f"{self.base_url} gives the log-probs of the model, and not those that temperature, top_k, top_p and"
                " min_p leave: start it with --logprobs-mode processed_logprobs"
            )

    def look_up(self, longest: int) -> None:
        """Look for the model, which may be adapters that somebody has loaded, and its room."""
        self._find(longest, adapters=True)
        self._asked_for = self._base  # one that is started again has to be the same

    def _find(self, longest: int, *, adapters: bool) -> None:
        """Decide on a model, of those that it serves with adapters or without."""
        models = self._client.get("/v1/models")["data"]
        bases = {one["id"]: one for one in models if one.get("parent") is None}
        served = {one["id"]: one for one in models} if adapters else bases
        if self._asked_for and self._asked_for not in served:
            raise EngineError(f"{self.base_url} serves {some(list(served))}, and model = {self._asked_for!r}: name one")
        if not self._asked_for and len({one.get("root") for one in bases.values()}) != 1:
            raise EngineError(f"{self.base_url} serves {some(list(bases))}: say which one by model")
        self._base = self._asked_for or next(iter(bases))
        self._name = self._name or self._base
        found = served[self._base]
        room = bases.get(found.get("parent"), found).get("max_model_len")
        if room is not None and longest > room:
            raise EngineError(
                f"{self.base_url} takes {room} tokens, and a prompt with its completion may have {longest}: start it"
                f" with --max-model-len {longest}, or lower max_completion_length or max_prompt_length"
            )

    def load(self, version: str, directory: Path, adapters: bool) -> None:
        """Load adapters under a name of their own, or all weights in the place of those that were there."""
        before, self._name = self._name, version if adapters else self._base
        if adapters:
            self._rpc("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(directory)})
            if before not in (version, self._base):
                with contextlib.suppress(Refused):  # a server that was started again has not had it
                    self._client.post("/v1/unload_lora_adapter", {"lora_name": before})
            return
        self._rpc("/pause?mode=wait", {})
        try:
            kwargs = {"weights_path": str(directory)}
            self._rpc("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
            self._rpc("/reset_prefix_cache", {})
        finally:
            self._rpc("/resume", {})
        try:
            self._client.post("/update_weight_version", {"new_version": version})
        except Refused:  # of an older vLLM, whose weights the probe alone knows
            self._says_version = False

    def holds(self, version: str) -> bool:
        """Ask for its version of the weights; adapters are asked for by their name, which says it already."""
        if self._name == version or not self._says_version:
            return True
        return bool(self._client.get("/weight_info")["weight_version"] == version)

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
        """One request of /v1/completions."""
        body = {
            "prompt": list(ids),
            "max_tokens": most,
            "seed": seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or 0.0,
            # The settings of the model's own generation_config.json are not the run's.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "stop_token_ids": list(stop),
            "logprobs": 0,
            "return_token_ids": True,
            **({} if stops is None else {"stop": list(stops.strings)}),
        }
        choice = self._complete(body, stopped)
        tokens, reason = choice.get("token_ids"), choice.get("finish_reason")
        log_probs = (choice.get("logprobs") or {}).get("token_logprobs")
        if reason not in ("stop", "length"):  # paused, or stopped, by somebody else
            raise Lost(f"{self.base_url}/v1/completions broke a completion off ({reason})")
        if not tokens or log_probs is None or len(tokens) != len(log_probs):
            raise EngineError(
                f"{self.base_url}/v1/completions gave {len(tokens or [])} token_ids and {len(log_probs or [])}"
                " log-probs for a completion: vLLM 0.10 and newer give both"
            )
        # Both sides look for texts, ours in bytes, and vLLM in characters, for which it may wait a token longer. A turn
        # ends where ours finds one: with the same token as by `generate`.
        end = None if stops is None else stops.end_of(np.array(tokens))
        if end is not None:
            return Drawn(tokens[:end], log_probs[:end], True)
        ended = tokens[-1] in stop
        if ended != (reason == "stop") or (not ended and len(tokens) != most):
            raise EngineError(
                f"{self.base_url}/v1/completions ended a completion after {len(tokens)} of {most} tokens by {reason!r},"
                f" with the token {tokens[-1]}: that is none of {some([str(i) for i in stop])}"
                f"{'' if stops is None else f', and they spell none of {some(list(map(repr, stops.strings)))}'}; is its"
                " --max-model-len long enough, and its tokenizer the policy's?"
            )
        return Drawn(tokens, log_probs, ended)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probs of a prompt."""
        return [place[token] for token, place in zip(ids[1:], self.tell(ids), strict=True)]

    def tell(
        self, ids: Sequence[int], k: int = 0, *, stopped: Callable[[], bool] = lambda: False
    ) -> list[dict[int, float]]:
        """Log-probs of a prompt, beside one token that nobody reads."""
        body = {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": k}
        try:
            told = self._complete(body, stopped).get("prompt_logprobs") or []
        except Refused as refused:
            if "max allowed" not in str(refused):
                raise
            raise EngineError(f"{refused}; start it with --max-logprobs {k}, or lower distillation_topk") from refused
        if len(told) != len(ids):
            raise EngineError(f"{self.base_url} scored {len(told)} of {len(ids)} tokens: prompt_logprobs is needed")
        places = [{int(token): float(one["logprob"]) for token, one in place.items()} for place in told[1:]]
        for token, place in zip(ids[1:], places, strict=True):
            if token not in place or len(place) < k:
                raise EngineError(
                    f"{self.base_url} told {len(place)} log-probs in the place of the token {token}, and"
                    f" prompt_logprobs = {k} asks for as many, and for its own"
                )
        return places

    def alive(self) -> bool:
        """Ask /health."""
        return self._client.alive()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _complete(self, body: Json, stopped: Callable[[], bool]) -> Json:
        """The only choice of a completion; an adapter that is not there any more is a server started again."""
        try:
            answer = self._client.post("/v1/completions", {"model": self._name, **body}, stopped=stopped)
        except Refused as refused:
            if refused.status == 404 and self._name != self._base:
                raise Lost(str(refused)) from refused
            raise
        choice: Json = answer["choices"][0]
        return choice

    def _rpc(self, path: str, body: Json) -> None:
        """A request that hands weights over; the server has to have been started for it."""
        try:
            self._client.post(path, body, busy=(429, 503))
        except Refused as refused:
            if re.search(r"already been loaded", str(refused)):
                return
            mend = "; does it see this directory, under this name?" if str(body).count("_path") else ""
            if refused.status in (404, 405):
                mend = f"; start it as `{START}`, and let it see {body.get('lora_path', 'the directory of weights')}"
            raise EngineError(f"{refused}{mend}") from refused


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
      timeout: seconds for one completion.
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
      timeout: seconds for one completion.
      patience: seconds for which a busy server is asked again, and a lost one waited for.
      api_key_env: name of the environment variable with the key of a server that asks for one; the key itself is kept
        nowhere.

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
