"""A vLLM server: token ids in, token ids and log-probs out, by its OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.maths.sampling import Sampling
from grpo_jax.maths.stops import Stops
from grpo_jax.messages import show, some
from grpo_jax.rollout.engine_client import SHORT, Client, EngineError, Lost, Refused
from grpo_jax.types import Json

START = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank RANK"
    " --logprobs-mode processed_logprobs"
)

BYTES_OF_LOG_PROB = 512
"""Most bytes of an answer for each log-prob in it, with its token as text."""
_COMPLETIONS, _CHOICE = "/v1/completions", "answer.choices[0]"

Kind = tuple[str, Callable[[Any], bool]]
"""A kind of JSON values: its name in messages, and whether a value is of it."""

_TEXT: Kind = ("text", lambda x: isinstance(x, str))
_TEXT_OR_NULL: Kind = ("text or null", lambda x: x is None or isinstance(x, str))
_COUNT_OR_NULL: Kind = ("a number of tokens or null", lambda x: x is None or type(x) is int)
_ID: Kind = ("a token id", lambda x: type(x) is int and 0 <= x < 2**31)
# vLLM writes -9999 for a probability of 0, and rounding may put a log-prob of 0 a little above it.
_LOG_PROB: Kind = ("a log-prob", lambda x: type(x) in (int, float) and -1e4 < x < 1e-2)
_PLACE: Kind = (
    "null or log-probs by token id",
    lambda x: x is None or (isinstance(x, dict) and all(map(_is_log_prob, x.items()))),
)

_MODELS = {"data": [{"id": _TEXT, "root": _TEXT_OR_NULL, "parent": _TEXT_OR_NULL, "max_model_len": _COUNT_OR_NULL}]}
_VERSION = {"weight_version": _TEXT}
_COMPLETION: Json = {"choices": [{}]}
_ENDED = {"finish_reason": _TEXT}
_DRAWN = {"token_ids": [_ID], "logprobs": {"token_logprobs": [_LOG_PROB]}}
_TOLD = {"prompt_logprobs": [_PLACE]}


def _is_log_prob(entry: tuple[str, Any]) -> bool:
    """Whether an entry is {token id: {"logprob": number}}."""
    token, value = entry
    return token.isdecimal() and len(token) <= 10 and isinstance(value, dict) and _LOG_PROB[1](value.get("logprob"))


def find_misfit(value: Any, schema: Any, at: str) -> str:
    """Describe what in a JSON value does not fit a schema; "" if it fits.

    A schema is a `Kind`, [schema] for a list, or {name: schema} for an object that has these fields.

    Example:
      >>> find_misfit({"ids": [3, True]}, {"ids": [("an id", lambda x: type(x) is int)]}, "choice")
      'choice.ids[1] is True, not an id'
    """
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(schema, dict) and isinstance(value, dict):
        inner = [(value.get(name), of, f"{at}.{name}") for name, of in schema.items()]
    elif isinstance(schema, list) and isinstance(value, list):
        inner = [(item, schema[0], f"{at}[{i}]") for i, item in enumerate(value)]
    elif not isinstance(schema, tuple) or not schema[1](value):
        found = type(value).__name__ if isinstance(value, (dict, list)) else show(value, 40)
        return f"{at} is {found}, not {schema[0] if isinstance(schema, tuple) else type(schema).__name__}"
    return next(filter(None, itertools.starmap(find_misfit, inner)), "")


class ServerTurn(NamedTuple):
    """Tokens that a server drew.

    Attributes:
      tokens: n ≥ 1 ids, including the one that ended the turn.
      log_probs: n, of the distribution that they were drawn from.
      ended: whether the last token, or a text that it completes, ends the turn.
    """

    tokens: list[int]
    log_probs: list[float]
    ended: bool


class VLLM:
    """Requests to a vLLM server, from many threads; `model` is the name of the base model, "" for the only one.

    All methods raise `EngineError`; its subclass `Lost` means that the server may come back.
    """

    def __init__(self, client: Client, model: str = ""):
        self._client, self._asked_for, self.base_url = client, model, client.base_url
        self.alive, self.close = client.alive, client.close
        self._base, self._name = model, model
        self._reports_version = True

    def __repr__(self) -> str:
        return f"VLLM({self.base_url!r})"

    def check(self, sampling: Sampling, longest: int) -> None:
        """Raise an `EngineError` unless the server returns the log-probs of the distribution that it samples from, and
        takes sequences of `longest` tokens."""
        self._find(longest, adapters=False)
        # With top_k = 1 the token drawn has log-prob 0 in the processed distribution, and less in the model's.
        if sampling == Sampling() or sampling.temperature == 0:
            return
        cut = Sampling(top_k=1)
        drawn = self.draw([1, 2, 3], most=1, seed=0, sampling=cut, stop=[], stops=None, stopped=lambda: False)
        if drawn.log_probs[0] < -1e-6:
            raise EngineError(
                f"{self.base_url} returns log-probs from before temperature, top_k, top_p and min_p: start it"
                " with --logprobs-mode processed_logprobs"
            )

    def look_up(self, longest: int) -> None:
        """Raise an `EngineError` unless the server has the model, or adapters, and takes `longest` tokens."""
        self._find(longest, adapters=True)
        self._asked_for = self._base  # a restarted server has to serve the same

    def _find(self, longest: int, *, adapters: bool) -> None:
        """Choose the model among the served ones, with `adapters` or without."""
        models = self._read("/v1/models", self._client.request("/v1/models"), _MODELS)["data"]
        bases = {one["id"]: one for one in models if one.get("parent") is None}
        served = {one["id"]: one for one in models} if adapters else bases
        if self._asked_for and self._asked_for not in served:
            raise EngineError(f"{self.base_url} serves {some(list(served))}, and model = {self._asked_for!r}: name one")
        if not self._asked_for and len({one.get("root") for one in bases.values()}) != 1:
            raise EngineError(f"{self.base_url} serves {some(list(bases))}: say which one by model")
        self._base = self._asked_for or next(iter(bases))
        self._name = self._name or self._base
        found = served[self._base]
        limit = bases.get(found.get("parent"), found).get("max_model_len")
        if limit is not None and longest > limit:
            raise EngineError(
                f"{self.base_url} takes {limit} tokens, and a prompt with its completion may have {longest}: start it"
                f" with --max-model-len {longest}, or lower max_completion_length or max_prompt_length"
            )

    def load(self, version: str, directory: Path, adapters: bool) -> None:
        """Load adapters in PEFT's format under a new name, or replace all weights; no request may be in flight."""
        before, self._name = self._name, version if adapters else self._base
        if adapters:
            self._rpc("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(directory)})
            if before not in (version, self._base):
                with contextlib.suppress(Refused):  # a restarted server does not have it
                    self._client.request("/v1/unload_lora_adapter", {"lora_name": before})
            return
        self._rpc("/pause?mode=wait", {})
        try:
            kwargs = {"weights_path": str(directory)}
            self._rpc("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
            self._rpc("/reset_prefix_cache", {})
        finally:
            self._rpc("/resume", {})
        try:
            self._client.request("/update_weight_version", {"new_version": version})
        except Refused:  # older versions of vLLM: only the probe checks their weights
            self._reports_version = False

    def holds(self, version: str) -> bool:
        """Whether it reports this version of the weights; True for adapters, which are requested by name."""
        if self._name == version or not self._reports_version:
            return True
        found = self._read("/weight_info", self._client.request("/weight_info"), _VERSION)
        return bool(found["weight_version"] == version)

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
    ) -> ServerTurn:
        """Draw at most `most` tokens after `ids`, until one of `stop` or one that completes a text of `stops`."""
        body = {
            "prompt": list(ids),
            "max_tokens": most,
            "seed": seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or 0.0,
            # Otherwise the server takes these from the model's generation_config.json.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
            "stop_token_ids": list(stop),
            "logprobs": 0,
            "return_token_ids": True,
            **({} if stops is None else {"stop": list(stops.strings)}),
        }
        choice = self._complete(body, len(ids) + most, stopped)
        reason = self._read(_COMPLETIONS, choice, _ENDED, _CHOICE)["finish_reason"]
        if reason not in ("stop", "length"):  # aborted by another client
            raise Lost(f"{self.base_url}{_COMPLETIONS} aborted a completion ({reason})")
        self._read(_COMPLETIONS, choice, _DRAWN, _CHOICE)
        tokens, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if not tokens or len(tokens) != len(log_probs):
            raise EngineError(
                f"{self.base_url}{_COMPLETIONS} returned {len(tokens)} token_ids and {len(log_probs)} log-probs for a"
                " completion: one log-prob for each token is needed"
            )
        # vLLM searches for texts in characters, and may need one more token than our search in bytes. A turn ends where
        # ours finds a text, with the same token as by `generate`.
        end = None if stops is None else stops.end_of(np.array(tokens))
        if end is not None:
            return ServerTurn(tokens[:end], log_probs[:end], True)
        ended = tokens[-1] in stop
        if ended != (reason == "stop") or (not ended and len(tokens) != most):
            raise EngineError(
                f"{self.base_url}{_COMPLETIONS} ended a completion after {len(tokens)} of {most} tokens by {reason!r},"
                f" with the token {tokens[-1]}: that is none of {some([str(i) for i in stop])}"
                f"{'' if stops is None else f', and they spell none of {some(list(map(repr, stops.strings)))}'}; is its"
                " --max-model-len long enough, and its tokenizer the policy's?"
            )
        return ServerTurn(tokens, log_probs, ended)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probs of ids[1:] at temperature 1."""
        return [place[token] for token, place in zip(ids[1:], self.log_probs(ids), strict=True)]

    def log_probs(
        self, ids: Sequence[int], k: int = 0, *, stopped: Callable[[], bool] = lambda: False
    ) -> list[dict[int, float]]:
        """For each of ids[1:], log-probs by token at temperature 1: of itself and of the k most probable tokens."""
        body = {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": k}
        try:
            choice = self._complete(body, len(ids) * (k + 1), stopped)
        except Refused as refused:
            if "max allowed" not in str(refused):
                raise
            raise EngineError(f"{refused}; start it with --max-logprobs {k}, or lower distillation_topk") from refused
        told = self._read(_COMPLETIONS, choice, _TOLD, _CHOICE)["prompt_logprobs"]
        if len(told) != len(ids):
            raise EngineError(f"{self.base_url} scored {len(told)} of {len(ids)} tokens: prompt_logprobs is needed")
        places = [{int(token): float(one["logprob"]) for token, one in (place or {}).items()} for place in told[1:]]
        for token, place in zip(ids[1:], places, strict=True):
            if token not in place or len(place) < k:
                raise EngineError(
                    f"{self.base_url} returned {len(place)} log-probs at the token {token}: prompt_logprobs = {k} needs"
                    " as many, and the token's own"
                )
        return places

    def _complete(self, body: Json, log_probs: int, stopped: Callable[[], bool]) -> Json:
        """The only choice of a completion, whose answer has at most so many log-probs."""
        body, most = {"model": self._name, **body}, SHORT + BYTES_OF_LOG_PROB * log_probs
        try:
            answer = self._client.request(_COMPLETIONS, body, stopped=stopped, most_bytes=most)
        except Refused as refused:
            if refused.status == 404 and self._name != self._base:  # a restarted server does not have the adapters
                raise Lost(str(refused)) from refused
            raise
        choices: list[Json] = self._read(_COMPLETIONS, answer, _COMPLETION)["choices"]
        if len(choices) != 1:
            raise EngineError(f"{self.base_url}{_COMPLETIONS} returned {len(choices)} completions for one prompt")
        return choices[0]

    def _read(self, path: str, answer: Json, schema: Json, at: str = "answer") -> Json:
        """Return an answer, or a part of it, that fits a schema; else raise an `EngineError`."""
        if misfit := find_misfit(answer, schema, at):
            raise EngineError(f"{self.base_url}{path}: {misfit}, as vLLM 0.10 and newer write it")
        return answer

    def _rpc(self, path: str, body: Json) -> None:
        """Send a request that loads weights, which the server's start has to allow."""
        try:
            self._client.request(path, body, busy=(429, 503))
        except Refused as refused:
            if re.search(r"already been loaded", str(refused)):
                return
            mend = "; does it see this directory, under this name?" if str(body).count("_path") else ""
            if refused.status in (404, 405):
                mend = f"; start it as `{START}`, and let it see {body.get('lora_path', 'the directory of weights')}"
            raise EngineError(f"{refused}{mend}") from refused
