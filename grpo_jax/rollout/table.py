"""Host-side data for a rollout: its arguments, and a table of the sampled and observed tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import chex
import jax
import numpy as np
from jax.sharding import Mesh

from grpo_jax.models.sharding import shard
from grpo_jax.rollout.decode import Drawn
from grpo_jax.rollout.draw import DecodeSettings, Variables
from grpo_jax.types import BuiltinModel, Completions, Params, Prompts


class TokenTable:
    """Tokens for B·G completions. Completion (b, g) is row b · G + g; row −1 marks an empty position on the device."""

    def __init__(self, count: int, length: int, pad_token_id: int):
        self.length = length  # maximum length T of a completion
        self.tokens = np.full((count, length), pad_token_id, np.int32)  # sampled or observed tokens
        self.log_probs = np.zeros((count, length), np.float32)  # 0 except for sampled tokens
        self.mask = np.zeros((count, length), bool)  # True on sampled tokens
        self.lengths = np.zeros(count, int)  # number of sampled and observed tokens so far
        self.ended = np.zeros(count, bool)  # True for completions that have ended without being truncated
        self.stop_state = np.zeros(count, np.int32)  # state of the stop automaton after the last token

    def record(self, rows: np.ndarray, drawn: Drawn, settings: DecodeSettings) -> np.ndarray:
        """Append tokens [B', G', N] to rows [B', G']. Returns where a turn ended, a bool array [B', G']."""
        chex.assert_equal_shape_prefix((rows, *drawn), 2)
        tokens, log_probs, mask = map(np.asarray, drawn)
        positions = self.lengths[rows][:, :, None] + np.arange(tokens.shape[2])
        new = mask & (rows >= 0)[:, :, None] & (positions < self.length)
        indices = np.broadcast_to(rows[:, :, None], new.shape)[new], positions[new]
        self.tokens[indices], self.log_probs[indices], self.mask[indices] = tokens[new], log_probs[new], True
        np.add.at(self.lengths, indices[0], 1)
        ended = (np.isin(tokens, settings.eos_token_ids) & new).any(axis=-1)
        if settings.stops is None:
            return ended
        state = self.stop_state[rows]
        for t in range(tokens.shape[-1]):
            state = np.where(new[..., t], settings.stops.advance(state, tokens[..., t]), state)
        self.stop_state[rows[rows >= 0]] = state[rows >= 0]
        # A completion that is waiting for an observation may be in the final state, but has no new tokens.
        return ended | (new.any(axis=-1) & (state == settings.stops.final_state))

    def append_sampled(self, completion: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append tokens that were drawn by an inference server, with their log-probs."""
        new = slice(self.lengths[completion], self.lengths[completion] + len(tokens))
        self.append_observation(completion, tokens)
        self.mask[completion, new], self.log_probs[completion, new] = True, log_probs

    def append_observation(self, completion: int, tokens: Sequence[int]) -> None:
        """Append an observation and start a new turn."""
        start, end = self.lengths[completion], self.lengths[completion] + len(tokens)
        self.tokens[completion, start:end], self.lengths[completion] = tokens, end
        self.stop_state[completion] = 0

    def to_completions(self, groups: int, *, multi_turn: bool = False) -> Completions:
        """Return the completions for B = `groups` prompts as NumPy arrays. If `multi_turn`, `present` is set."""
        present = np.arange(self.length) < self.lengths[:, None]
        arrays = (self.tokens, self.mask, self.log_probs, self.ended, present if multi_turn else None)
        return Completions(*jax.tree.map(lambda x: x.reshape((groups, -1, *x.shape[1:])), arrays))


@dataclasses.dataclass(frozen=True)
class SamplingJob:
    """Arguments of a rollout, and the table that its tokens are written to.

    Prefill uses `params`. Decoding uses `decode_variables`, the same weights with some of them cast or transposed (see
    `decode_weights.convert_weights`). `keys` are typed PRNG keys [B, G]. `check_interrupt` is called before each burst
    and during long waits.
    """

    model: BuiltinModel
    params: Params
    decode_variables: Variables
    prompts: Prompts
    keys: jax.Array
    settings: DecodeSettings
    table: TokenTable
    check_interrupt: Callable[[], None]

    @property
    def mesh(self) -> Mesh | None:
        """Mesh on which the params are sharded, or None on one device."""
        return self.settings.mesh

    def rows(self, groups: np.ndarray) -> np.ndarray:
        """Return the table indices [B', G] of groups [B']; −1 for group indices ≥ B, which are padding."""
        b, g = self.keys.shape
        return np.where(groups[:, None] < b, groups[:, None] * g + np.arange(g), -1)

    def inputs(self, groups: np.ndarray) -> tuple[Prompts, jax.Array]:
        """Return the prompts and keys of groups [B'] on the devices. Group indices ≥ B repeat the last group."""
        indices = np.minimum(groups, len(self.keys) - 1)
        prompts, keys = jax.tree.map(lambda x: x[indices], (self.prompts, self.keys))
        return shard((prompts, keys), self.mesh)
