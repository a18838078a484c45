"""Where a turn ends: with an EOS or another token, behind a text, or after so many tokens."""

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

_KNOWN: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], Stops]] = weakref.WeakKeyDictionary()
"""For each tokenizer: what was made of some strings, which takes seconds for a large vocabulary."""


def stops_of(tokenizer: Tokenizer | None, strings: Sequence[str]) -> Stops:
    """Return the automaton of stop strings over a tokenizer's vocabulary; cached.

    It reads the bytes of a turn's tokens, from the first on; special tokens have none. Raises a `ValueError` without a
    tokenizer, or for a string with a special token, or that no tokens spell.
    """
    if tokenizer is None:
        raise ValueError(f"stop = {show(list(strings))}: texts are found in tokens by a tokenizer: give tokenizer too")
    known = _KNOWN.setdefault(tokenizer, {})
    key = tuple(strings)
    if key not in known:
        for index, token in special_tokens(tokenizer).items():
            for string in key:
                if token and token in string:
                    raise ValueError(
                        f"stop has {show(string)}, and {token!r} is a special token, which spells no text: give its id,"
                        f" stop_token_ids=[{index}]"
                    )
        try:
            known[key] = make_stops(key, token_bytes(tokenizer))
        except ValueError as error:
            raise ValueError(f"stop = {show(list(key))}: {error}: name tokens by their ids, stop_token_ids") from error
    return known[key]


class TurnEnds(NamedTuple):
    """The ends of a turn of the policy, or of a completion of one turn, other than EOS: texts, ids, and a length in
    tokens.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_turn_length: int | None = None

    @classmethod
    def read(
        cls, stop: str | Sequence[str] | None, stop_token_ids: int | Sequence[int] | None, max_turn_length: int | None
    ) -> TurnEnds:
        """Return them as they are asked for by arguments; raise a `ValueError` for what is none."""
        if max_turn_length is not None and not (int(max_turn_length) == max_turn_length >= 1):
            raise ValueError(f"max_turn_length must be an integer ≥ 1; got {max_turn_length!r}.")
        (strings, fault), (ids, fault_of_ids) = read_stop(stop), read_token_ids(stop_token_ids)
        for name, value, wrong in (("stop", stop, fault), ("stop_token_ids", stop_token_ids, fault_of_ids)):
            if wrong:
                raise ValueError(f"{name} = {show(value)}: {wrong}")
        return cls(cast("tuple[str, ...]", strings or ()), cast("tuple[int, ...]", ids or ()), max_turn_length)

    @classmethod
    def of(cls, config: GRPOConfig) -> TurnEnds:
        """Return those of a run."""
        return cls.read(config.stop, config.stop_token_ids, config.max_turn_length)

    def check(self, tokenizer: Tokenizer | None, vocab_size: int | None) -> None:
        """Raise a `ValueError` for texts that the tokenizer's tokens do not spell, and ids that the model lacks."""
        if self.stop:
            stops_of(tokenizer, self.stop)
        alien = [index for index in self.stop_token_ids if vocab_size is not None and index >= vocab_size]
        if alien:
            raise ValueError(
                f"stop_token_ids has {alien[0]}, and the model has a vocabulary of {vocab_size}: give ids below that"
            )

    def cut_short(self, turn: np.ndarray, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> bool:
        """Return whether a turn [n] of the policy is as long as it may be, and has not ended by itself."""
        if self.max_turn_length is None or len(turn) < self.max_turn_length:
            return False
        by_token = int(turn[-1]) in (*eos_token_ids, *self.stop_token_ids)
        return not by_token and not (self.stop and stops_of(tokenizer, self.stop).end_of(turn))


BY_EOS = TurnEnds()
"""Nothing beside an EOS."""


def decode_settings(
    sampling: Sampling,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    *,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: int | Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> DecodeSettings:
    """The settings of compiled programs, from arguments of `generate`; bad ends raise a `ValueError`."""
    ends = TurnEnds.read(stop, stop_token_ids, None)
    stops = stops_of(tokenizer, ends.stop) if ends.stop else None
    return DecodeSettings((*map(int, eos_token_ids), *ends.stop_token_ids), int(pad_token_id), sampling, stops)
