"""A vLLM server: token ids in, token ids and log-probs out, by its OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import itertools
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

Kind = tuple[str, Callable[[Any], bool]]
"""A kind of JSON values: its name in messages, and whether a value is of this kind."""

_TEXT: Kind = ("text", lambda x: isinstance(x, str))
_TEXT_OR_NULL: Kind = ("text or null", lambda x: x is None or isinstance(x, str))
_COUNT_OR_NULL: Kind = ("a number of tokens or null", lambda x: x is None or type(x) is int)
_ID: Kind = ("a token id", lambda x: type(x) is int and 0 <= x < 2**31)
# vLLM writes -9999 for a probability of 0, and rounding may put a log-prob of 0 a little above it.
_LOG_PROB: Kind = ("a log-prob", lambda x: type(x) in (int, float) and -1e4 < x < 1e-2)
_POSITION: Kind = (
    "null or log-probs by token id",
    lambda x: x is None or (isinstance(x, dict) and all(map(_is_log_prob, x, x.values()))),
)

_MODELS = {"data": [{"id": _TEXT, "root": _TEXT_OR_NULL, "parent": _TEXT_OR_NULL, "max_model_len": _COUNT_OR_NULL}]}
_DRAWN = {"token_ids": [_ID], "logprobs": {"token_logprobs": [_LOG_PROB]}}


def _is_log_prob(token: str, value: Any) -> bool:
    """Return whether an entry is {token id: {"logprob": number}}."""
    return token.isdecimal() and len(token) <= 10 and isinstance(value, dict) and _LOG_PROB[1](value.get("logprob"))


def find_misfit(value: Any, schema: Any, at: str) -> str:
    """Describe the first part of a JSON value that does not fit a schema; "" if all of it fits.

    A schema is a `Kind`, [schema] for a list, or {name: schema} for an object that has these fields.
    """
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(schema, dict) and isinstance(value, dict):
        inner = [(value.get(name), field, f"{at}.{name}") for name, field in schema.items()]
    elif isinstance(schema, list) and isinstance(value, list):
        inner = [(item, schema[0], f"{at}[{i}]") for i, item in enumerate(value)]
    elif not isinstance(schema, tuple) or not schema[1](value):
        found = type(value).__name__ if isinstance(value, (dict, list)) else show(value, 40)
        return f"{at} is {found}, not {schema[0] if isinstance(schema, tuple) else type(schema).__name__}"
    return next(filter(None, itertools.starmap(find_misfit, inner)), "")


class ServerTurn(NamedTuple):
    """Tokens that a server drew, one or more, their log-probs, and whether the last token ends the turn."""

    tokens: list[int]
    log_probs: list[float]
    ended: bool


class VLLM:
    """Requests to a vLLM server, from many threads; `model` is the name of the base model, "" for the only one.

    All methods raise `EngineError`; its subclass `Lost` means that the server may come back.
    """

    def __init__(self, client: Client, model: str = ""):
        self.client, self.url = client, client.base_url
        self._base = self._name = model  # the base model, and the model that draws
        self._reports_version = True

    def check(self, sampling: Sampling, longest: int) -> None:
        """Raise an `EngineError` unless the server takes `longest` tokens, and returns the log-probs of the
        distribution that it samples from."""
        self.look_up(longest)
        # With top_k = 1 the token drawn has log-prob 0 in the processed distribution, and less in the model's.
        if sampling == Sampling() or sampling.temperature == 0:
            return
        drawn = self.draw([1, 2, 3], most=1, seed=0, sampling=Sampling(top_k=1), stop=[], stops=None)
        if drawn.log_probs[0] < -1e-6:
            raise EngineError(
                f"{self.url} returns log-probs from before temperature, top_k, top_p and min_p: start it with"
                " --logprobs-mode processed_logprobs"
            )

    def look_up(self, longest: int) -> None:
        """Raise an `EngineError` unless the server has the model and takes `longest` tokens.

        A restarted server has to serve the same model.
        """
        models = self._read("/v1/models", self.client.request("/v1/models"), _MODELS)["data"]
        names, bases = [one["id"] for one in models], [one for one in models if one.get("parent") is None]
        if self._base and self._base not in names:
            raise EngineError(f"{self.url} serves {some(names)}, and model = {self._base!r}: name one")
        if not self._base and len({one.get("root") for one in bases}) != 1:
            raise EngineError(f"{self.url} serves {some(names)}: say which one by model")
        self._base = self._base or bases[0]["id"]
        self._name = self._name or self._base
        limit = min((one.get("max_model_len") or longest for one in bases), default=longest)
        if longest > limit:
            raise EngineError(
                f"{self.url} takes {limit} tokens, and a prompt with its completion may have {longest}: start it with"
                f" --max-model-len {longest}, or lower max_completion_length or max_prompt_length"
            )

    def load(self, version: str, directory: Path, adapters: bool) -> None:
        """Load adapters in PEFT's format under a new name, or replace all weights; no request may be in flight."""
        before, self._name = self._name, version if adapters else self._base
        if adapters:
            self._change("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(directory)})
            if before not in (version, self._base):
                with contextlib.suppress(Refused):  # a restarted server does not have it
                    self.client.request("/v1/unload_lora_adapter", {"lora_name": before})
            return
        self._change("/pause?mode=wait", {})
        try:
            kwargs = {"weights_path": str(directory)}
            self._change("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
            self._change("/reset_prefix_cache", {})
        finally:
            self._change("/resume", {})
        try:
            self.client.request("/update_weight_version", {"new_version": version})
        except Refused:  # older versions of vLLM: only the probe checks their weights
            self._reports_version = False

    def holds(self, version: str) -> bool:
        """Return whether the server reports this version; True for adapters, which are requested by name."""
        if self._name == version or not self._reports_version:
            return True
        found = self._read("/weight_info", self.client.request("/weight_info"), {"weight_version": _TEXT})
        return bool(found["weight_version"] == version)

    def draw(
        self, ids: Sequence[int], *, most: int, seed: int, sampling: Sampling, stop: Sequence[int], stops: Stops | None
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
            "stop": [] if stops is None else list(stops.strings),
            "logprobs": 0,
            "return_token_ids": True,
        }
        choice = self._complete(body, len(ids) + most, {"finish_reason": _TEXT})
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):  # aborted by another client
            raise Lost(f"{self.url} aborted a completion ({reason})")
        self._read("/v1/completions", choice, _DRAWN)
        tokens, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if not tokens or len(tokens) != len(log_probs):
            raise EngineError(
                f"{self.url} returned {len(tokens)} token_ids and {len(log_probs)} log-probs for a completion: one"
                " log-prob for each token is needed"
            )
        # vLLM searches for texts in characters, and may need one more token than our search in bytes. A turn ends where
        # ours finds a text, with the same token as by `generate`.
        end = None if stops is None else stops.end_of(np.array(tokens))
        if end is not None:
            return ServerTurn(tokens[:end], log_probs[:end], True)
        ended = tokens[-1] in stop
        if ended != (reason == "stop") or (not ended and len(tokens) != most):
            raise EngineError(
                f"{self.url} ended a completion after {len(tokens)} of {most} tokens by {reason!r}, with the token"
                f" {tokens[-1]}: that is none of {some([str(i) for i in stop])}"
                f"{'' if stops is None else f', and they spell none of {some(list(map(repr, stops.strings)))}'}; is its"
                " --max-model-len long enough, and its tokenizer the policy's?"
            )
        return ServerTurn(tokens, log_probs, ended)

    def log_probs(self, ids: Sequence[int], k: int = 0) -> list[dict[int, float]]:
        """Return log-probs by token at temperature 1 for each of ids[1:]: its own, and the k most probable ones."""
        body = {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": k}
        try:
            choice = self._complete(body, len(ids) * (k + 1), {"prompt_logprobs": [_POSITION]})
        except Refused as refused:
            if "max allowed" not in str(refused):
                raise
            raise EngineError(f"{refused}; start it with --max-logprobs {k}, or lower distillation_topk") from refused
        found = choice["prompt_logprobs"]
        if len(found) != len(ids):
            raise EngineError(f"{self.url} scored {len(found)} of {len(ids)} tokens: prompt_logprobs is needed")
        positions = [{int(i): float(one["logprob"]) for i, one in (entry or {}).items()} for entry in found[1:]]
        for token, position in zip(ids[1:], positions, strict=True):
            if token not in position or len(position) < k:
                raise EngineError(
                    f"{self.url} returned {len(position)} log-probs at the token {token}: prompt_logprobs = {k} needs"
                    " as many, and the token's own"
                )
        return positions

    def _complete(self, body: Json, log_probs: int, schema: Json) -> Json:
        """Return the only choice of a completion, checked by a schema; the answer has at most `log_probs` log-probs."""
        most = SHORT + BYTES_OF_LOG_PROB * log_probs
        try:
            answer = self.client.request("/v1/completions", {"model": self._name, **body}, most_bytes=most)
        except Refused as refused:
            if refused.status == 404 and self._name != self._base:  # a restarted server does not have the adapters
                raise Lost(str(refused)) from refused
            raise
        choices: list[Json] = self._read("/v1/completions", answer, {"choices": [schema]})["choices"]
        if len(choices) != 1:
            raise EngineError(f"{self.url} returned {len(choices)} completions for one prompt")
        return choices[0]

    def _read(self, path: str, answer: Json, schema: Json) -> Json:
        """Return an answer, or a part of one, that fits a schema; else raise an `EngineError`."""
        if misfit := find_misfit(answer, schema, "answer"):
            raise EngineError(f"{self.url}{path}: {misfit}, as vLLM 0.10 and newer write it")
        return answer

    def _change(self, path: str, body: Json) -> None:
        """Send a request that changes the weights; only servers that were started for it allow this."""
        try:
            self.client.request(path, body, busy=(429, 503))
        except Refused as refused:
            if "already been loaded" in str(refused):
                return
            fix = "; does it see this directory, under this name?" if "_path" in str(body) else ""
            if refused.status in (404, 405):
                fix = f"; start it as `{START}`, and let it see {body.get('lora_path', 'the directory of weights')}"
            raise EngineError(f"{refused}{fix}") from refused
