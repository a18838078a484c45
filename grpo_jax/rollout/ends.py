"""Conditions that end a turn: EOS and stop token ids, stop strings, and a maximum length."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import read_stop, read_token_ids
from grpo_jax.maths.sampling import Sampling
from grpo_jax.maths.stops import Stops, make_stops
from grpo_jax.messages import show
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.text.completions import special_tokens, token_bytes
from grpo_jax.types import Tokenizer

_STOPS_CACHE: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], Stops]] = weakref.WeakKeyDictionary()
"""Automata cached by tokenizer and stop strings. Building an automaton for a large vocabulary takes seconds."""


def stops_of(tokenizer: Tokenizer | None, strings: Sequence[str]) -> Stops:
    """Return a cached automaton that matches stop strings against the bytes of a tokenizer's non-special tokens.

    Raises ValueError if `tokenizer` is None, or if a string contains a special token or cannot be formed from tokens.
    """
    if tokenizer is None:
        raise ValueError(f"stop={show(list(strings))} needs a tokenizer; pass tokenizer.")
    cache = _STOPS_CACHE.setdefault(tokenizer, {})
    key = tuple(strings)
    if key not in cache:
        for index, token in special_tokens(tokenizer).items():
            for string in key:
                if token and token in string:
                    raise ValueError(
                        f"stop must not contain special tokens; got {token!r} in {show(string)}. Pass"
                        f" stop_token_ids=[{index}] instead."
                    )
        try:
            cache[key] = make_stops(key, token_bytes(tokenizer))
        except ValueError as error:
            raise ValueError(f"stop={show(list(key))}: {error}. Pass token ids in stop_token_ids instead.") from error
    return cache[key]


class TurnEnds(NamedTuple):
    """Conditions other than EOS that end a turn: stop strings, stop token ids, and a maximum length in tokens."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_turn_length: int | None = None

    @classmethod
    def read(
        cls, stop: str | Sequence[str] | None, stop_token_ids: int | Sequence[int] | None, max_turn_length: int | None
    ) -> TurnEnds:
        """Validate these `generate` arguments and convert them to canonical form. Raises ValueError if invalid."""
        if max_turn_length is not None and not (int(max_turn_length) == max_turn_length >= 1):
            raise ValueError(f"max_turn_length must be an integer ≥ 1; got {max_turn_length!r}.")
        (strings, stop_problem), (ids, ids_problem) = read_stop(stop), read_token_ids(stop_token_ids)
        for name, value, problem in (("stop", stop, stop_problem), ("stop_token_ids", stop_token_ids, ids_problem)):
            if problem:
                raise ValueError(f"{name} = {show(value)}: {problem}")
        return cls(cast("tuple[str, ...]", strings or ()), cast("tuple[int, ...]", ids or ()), max_turn_length)

    @classmethod
    def of(cls, config: GRPOConfig) -> TurnEnds:
        """Read the conditions from a config."""
        return cls.read(config.stop, config.stop_token_ids, config.max_turn_length)

    def check(self, tokenizer: Tokenizer | None, vocab_size: int | None) -> None:
        """Raise ValueError for stop strings that cannot be formed from tokens, and for ids outside the vocabulary."""
        if self.stop:
            stops_of(tokenizer, self.stop)
        unknown = [index for index in self.stop_token_ids if vocab_size is not None and index >= vocab_size]
        if unknown:
            raise ValueError(
                f"stop_token_ids must be less than the model's vocabulary size, {vocab_size}; got {unknown[0]}."
            )

    def cut_short(self, turn: np.ndarray, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> bool:
        """Return whether a turn [n] was truncated at `max_turn_length`: no EOS, stop id or stop string ended it."""
        if self.max_turn_length is None or len(turn) < self.max_turn_length:
            return False
        ended_by_token = int(turn[-1]) in (*eos_token_ids, *self.stop_token_ids)
        return not ended_by_token and not (self.stop and stops_of(tokenizer, self.stop).end_of(turn))


BY_EOS = TurnEnds()
"""Default `TurnEnds`: only an EOS token ends a turn."""


def decode_settings(
    sampling: Sampling,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    *,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: int | Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> DecodeSettings:
    """Build `DecodeSettings` from `generate` arguments. Raises ValueError if the stop arguments are invalid."""
    ends = TurnEnds.read(stop, stop_token_ids, None)
    stops = stops_of(tokenizer, ends.stop) if ends.stop else None
    return DecodeSettings((*map(int, eos_token_ids), *ends.stop_token_ids), int(pad_token_id), sampling, stops)
