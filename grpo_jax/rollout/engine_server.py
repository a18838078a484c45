"""Requests to a vLLM server through its OpenAI-compatible API: token ids in, token ids and log-probs out."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_jax.maths.sampling import Sampling
from grpo_jax.messages import shorten
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.rollout.engine_client import Client, ConnectionLost, EngineError, StatusError
from grpo_jax.types import Json

START_COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank RANK"
    " --logprobs-mode processed_logprobs"
)


def read_log_prob(value: float) -> float:
    """Return a log-prob from a response as a float. Raises ValueError unless -1e4 < `value` < 1e-2."""
    # vLLM returns -9999 for a probability of 0, and a log-prob of 0 may be rounded to a small positive number.
    if not -1e4 < value < 1e-2:
        raise ValueError(f"log-probs must be in (-1e4, 0]; got {value}")
    return float(value)


class ServerTurn(NamedTuple):
    """One or more tokens drawn by a server, their log-probs, and whether the last token ends the turn."""

    tokens: list[int]
    log_probs: list[float]
    ended: bool


class VLLM:
    """Requests to a vLLM server.

    `model` is the name of the base model; "" selects the server's only base model. All methods may raise `EngineError`;
    its subclass `ConnectionLost` means that the server may become available again.
    """

    def __init__(self, client: Client, model: str = ""):
        self.client, self.url = client, client.base_url
        self._base = self._name = model  # the base model's name, and the name sent with requests
        self._reports_version = True

    async def check(self, sampling: Sampling) -> None:
        """Raise EngineError unless the server's log-probs reflect `sampling`."""
        # Probe: with top_k = 1, the drawn token has a log-prob of 0 under the distribution that the server samples
        # from, and a negative log-prob under the raw distribution.
        if sampling == Sampling() or sampling.temperature == 0:
            return
        drawn = await self.draw([1, 2, 3], max_tokens=1, seed=0, settings=DecodeSettings(sampling=Sampling(top_k=1)))
        if drawn.log_probs[0] < -1e-6:
            raise EngineError(
                f"{self.url} returns log-probs that ignore temperature, top_k, top_p and min_p; start the"
                " server with --logprobs-mode processed_logprobs"
            )

    async def look_up(self, longest: int) -> None:
        """Find the model on the server. Raises EngineError if it is missing or limited to fewer than `longest` tokens.

        Later calls, after a server restart, require the same model.
        """
        response = await self.client.request("/v1/models")
        with self._reading("/v1/models"):
            names = [str(model["id"]) for model in response["data"]]
            bases = [model for model in response["data"] if model.get("parent") is None]
            limit = min((int(model.get("max_model_len") or longest) for model in bases), default=longest)
        if self._base and self._base not in names:
            raise EngineError(f"{self.url} does not serve model={self._base!r} (available: {shorten(names) or 'none'})")
        if not self._base and len({model.get("root") for model in bases}) != 1:
            raise EngineError(f"model must name a model on {self.url} (available: {shorten(names) or 'none'})")
        self._base = self._base or bases[0]["id"]
        self._name = self._name or self._base
        if longest > limit:
            raise EngineError(
                f"{self.url} is limited to {limit} tokens, but a prompt and its completion may need {longest}; start"
                f" the server with --max-model-len {longest}, or reduce max_completion_length or max_prompt_length"
            )

    async def load(self, version: str, directory: Path, adapters: bool) -> None:
        """Load adapters in PEFT's format under a new name, or replace all weights. No requests may be in flight."""
        previous, self._name = self._name, version if adapters else self._base
        if adapters:
            await self._change("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(directory)})
            if previous not in (version, self._base):
                with contextlib.suppress(StatusError):  # not loaded if the server was restarted
                    await self.client.request("/v1/unload_lora_adapter", {"lora_name": previous})
            return
        await self._change("/pause?mode=wait", {})
        try:
            weights = {"weights_path": str(directory)}
            await self._change("/collective_rpc", {"method": "reload_weights", "kwargs": weights})
            await self._change("/reset_prefix_cache", {})
        finally:
            await self._change("/resume", {})
        try:
            await self.client.request("/update_weight_version", {"new_version": version})
        except StatusError:  # in older vLLM versions, only the probe verifies the weights
            self._reports_version = False

    async def has_loaded(self, version: str) -> bool:
        """Return whether the server reports this version.

        Always True for adapters, which requests select by name, and for servers that do not report versions.
        """
        if self._name == version or not self._reports_version:
            return True
        response = await self.client.request("/weight_info")
        with self._reading("/weight_info"):
            return bool(response["weight_version"] == version)

    async def draw(self, ids: Sequence[int], *, max_tokens: int, seed: int, settings: DecodeSettings) -> ServerTurn:
        """Draw up to `max_tokens` tokens after `ids`."""
        sampling, eos_ids, stops = settings.sampling, settings.eos_token_ids, settings.stops
        body = {
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or 0.0,
            # Without these values, vLLM would use defaults from the model's generation_config.json.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "stop_token_ids": list(eos_ids),
            "stop": [] if stops is None else list(stops.strings),
            "logprobs": 0,
            "return_token_ids": True,
        }
        choice = await self._complete(body)
        with self._reading("/v1/completions"):
            reason = choice["finish_reason"]
            if reason not in ("stop", "length"):  # aborted by another client
                raise ConnectionLost(f"{self.url} aborted a completion (finish_reason {reason!r})")
            tokens = [*map(operator.index, choice["token_ids"])]
            log_probs = [*map(read_log_prob, choice["logprobs"]["token_logprobs"])]
        if not 1 <= len(tokens) <= max_tokens or len(tokens) != len(log_probs):
            raise EngineError(
                f"{self.url} must return 1 to max_tokens={max_tokens} token_ids, and as many token_logprobs; got"
                f" {len(tokens)} token_ids and {len(log_probs)} token_logprobs for a completion"
            )
        # vLLM matches stop strings against characters and may need one more token than `Stops`, which matches bytes.
        # The turn is truncated where `Stops` finds a match, so that it ends with the same token as in `generate`.
        end = None if stops is None else stops.end_of(np.array(tokens))
        if end is not None:
            return ServerTurn(tokens[:end], log_probs[:end], True)
        ended = tokens[-1] in eos_ids  # vLLM 0.10 reports "length" if the last of `max_tokens` tokens is a stop id
        if not ended and (reason == "stop" or len(tokens) != max_tokens):
            raise EngineError(
                f"{self.url} ended a completion after {len(tokens)} of {max_tokens} tokens with finish_reason"
                f" {reason!r}, but the last token, {tokens[-1]}, is not a stop id and does not complete a stop string."
                " Check that the server's --max-model-len is sufficient and that its tokenizer equals the policy's"
            )
        return ServerTurn(tokens, log_probs, ended)

    async def log_probs(self, ids: Sequence[int], k: int = 0) -> list[dict[int, float]]:
        """Return log-probs at temperature 1 for ids[1:], and for the k most probable tokens at each of their positions.

        The list has one dict per position, which maps token ids to log-probs.
        """
        choice = await self._complete({"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": k})
        with self._reading("/v1/completions"):
            entries = [entry or {} for entry in choice["prompt_logprobs"]]
            log_probs_by_position = [
                {int(i): read_log_prob(x["logprob"]) for i, x in entry.items()} for entry in entries[1:]
            ]
        is_complete = len(entries) == len(ids) and all(
            token in position and len(position) >= k
            for token, position in zip(ids[1:], log_probs_by_position, strict=True)
        )
        if not is_complete:
            raise EngineError(
                f"{self.url} must return prompt_logprobs for all {len(ids)} tokens"
                f"{f' and for the top {k} at each position' if k else ''}; use vLLM 0.10 or newer"
            )
        return log_probs_by_position

    async def _complete(self, body: Json) -> Json:
        """Request one completion and return the only entry of the response's `choices`."""
        try:
            response = await self.client.request("/v1/completions", {"model": self._name, **body})
        except StatusError as error:
            if error.status == 404 and self._name != self._base:  # a restart removes adapters
                raise ConnectionLost(str(error)) from error
            raise
        with self._reading("/v1/completions"):
            (choice,) = response["choices"]
            return dict(choice)

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Convert exceptions that a malformed response causes in the `with` block to EngineError."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise EngineError(
                f"{self.url}{path} returned a malformed response ({cause}). Use vLLM 0.10 or newer"
            ) from error

    async def _change(self, path: str, body: Json) -> None:
        """Send a request that changes the weights. The server must have been started as in `START_COMMAND`."""
        try:
            await self.client.request(path, body, retry=(429, 503))
        except StatusError as error:
            if "already been loaded" in str(error):
                return
            fix = ""
            if error.status in (404, 405):
                directory = body.get("lora_path", "the weights directory")
                fix = f". Start the server with `{START_COMMAND}`, and give it access to {directory}"
            elif "_path" in str(body):
                fix = ". If the server cannot read the weights, pass a different directory to engines.vllm"
            raise EngineError(f"{error}{fix}") from error
