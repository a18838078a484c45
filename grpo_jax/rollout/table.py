"""A rollout on the host: its arguments, and a table of the drawn and observed tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import chex
import jax
import numpy as np
from jax.sharding import Mesh

from grpo_jax.models.sharding import split
from grpo_jax.rollout.decode import Drawn
from grpo_jax.rollout.draw import DecodeSettings, Variables
from grpo_jax.types import CachedModel, Completions, Params, Prompts


class Table:
    """Tokens of B·G completions. Completion (b, g) is row b · G + g; −1 marks an empty place on the device."""

    def __init__(self, count: int, length: int, pad_token_id: int):
        self.tokens = np.full((count, length), pad_token_id, np.int32)  # drawn or observed tokens
        self.log_probs = np.zeros((count, length), np.float32)  # 0 except for drawn tokens
        self.mask = np.zeros((count, length), bool)  # True on drawn tokens
        self.lengths = np.zeros(count, int)  # drawn and observed tokens so far
        self.ended = np.zeros(count, bool)  # True for completions that were not cut at T
        self.stop_state = np.zeros(count, np.int32)  # state of the stop strings after the last token

    @property
    def length(self) -> int:
        """T, the maximum length of a completion."""
        return self.tokens.shape[1]

    def record(self, completions: np.ndarray, drawn: Drawn, settings: DecodeSettings) -> np.ndarray:
        """Append drawn tokens [B', G', N] to completions [B', G'], and return which drew an EOS or a stop text."""
        chex.assert_equal_shape_prefix((completions, *drawn), 2)
        tokens, log_probs, mask = map(np.asarray, drawn)
        at = self.lengths[completions][:, :, None] + np.arange(tokens.shape[2])
        new = mask & (completions >= 0)[:, :, None] & (at < self.length)
        where = np.broadcast_to(completions[:, :, None], new.shape)[new], at[new]
        self.tokens[where], self.log_probs[where], self.mask[where] = tokens[new], log_probs[new], True
        np.add.at(self.lengths, where[0], 1)
        ended = (np.isin(tokens, settings.eos_token_ids) & new).any(axis=-1)
        if settings.stops is None:
            return ended
        state = self.stop_state[completions]
        for t in range(tokens.shape[-1]):
            state = np.where(new[..., t], settings.stops.after(state, tokens[..., t]), state)
        self.stop_state[completions[completions >= 0]] = state[completions >= 0]
        # A completion that waits for an observation draws nothing, and keeps its state.
        return ended | (new.any(axis=-1) & (state == settings.stops.found))

    def append(self, completion: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append tokens that another engine drew."""
        new = slice(self.lengths[completion], self.lengths[completion] + len(tokens))
        self.observe(completion, tokens)
        self.mask[completion, new], self.log_probs[completion, new] = True, log_probs

    def observe(self, completion: int, tokens: Sequence[int]) -> None:
        """Append an observation, after which a turn begins."""
        begin, end = self.lengths[completion], self.lengths[completion] + len(tokens)
        self.tokens[completion, begin:end], self.lengths[completion] = tokens, end
        self.stop_state[completion] = 0

    def completions(self, groups: int, *, turns: bool = False) -> Completions:
        """Return all completions of B = `groups` prompts as NumPy arrays, with `present` for several `turns`."""
        present = np.arange(self.length) < self.lengths[:, None]
        arrays = (self.tokens, self.mask, self.log_probs, self.ended, present if turns else None)
        return Completions(*jax.tree.map(lambda x: x.reshape((groups, -1, *x.shape[1:])), arrays))


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Arguments of a rollout, and its table.

    Prompts are read with `params`, and tokens are decoded with `variables` (`programs.decode_variables`). `keys` are
    [B, G] typed keys. `interrupt` is called before prompts are read, before each burst, and while it waits for answers.
    """

    model: CachedModel
    params: Params
    variables: Variables
    prompts: Prompts
    keys: jax.Array
    settings: DecodeSettings
    table: Table
    interrupt: Callable[[], None]

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the params; None for one device."""
        return self.settings.mesh

    def rows(self, groups: np.ndarray) -> np.ndarray:
        """Return the table's rows [B', G] for groups [B']; −1 for groups from B on, which fill a shape."""
        b, g = self.keys.shape
        return np.where(groups[:, None] < b, groups[:, None] * g + np.arange(g), -1)

    def inputs(self, groups: np.ndarray) -> tuple[Prompts, jax.Array]:
        """Return the prompts and keys of groups [B'], on the devices; groups from B on repeat the last group."""
        at = np.minimum(groups, len(self.keys) - 1)
        prompts, keys = jax.tree.map(lambda x: x[at], (self.prompts, self.keys))
        return split((prompts, keys), self.mesh)

    def part(self, first: int, last: int) -> Rollout:
        """Return the rollout of groups first … last − 1 alone."""
        prompts, keys = jax.tree.map(lambda x: x[first:last], (self.prompts, self.keys))
        table = Table(keys.size, self.table.length, self.settings.pad_token_id)
        return dataclasses.replace(self, prompts=prompts, keys=keys, table=table)
