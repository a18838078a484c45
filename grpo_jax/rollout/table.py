"""A rollout on the host: its arguments, and a table of the tokens that have been drawn or observed."""

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
    """Tokens of B·G completions. Completion (b, g) is row b · G + g; −1 stands for an empty place on the device.

    Attributes:
      tokens: [B·G, T] drawn or observed tokens; the pad id after the end.
      mask: [B·G, T] True on drawn tokens.
      log_probs: [B·G, T] log-probs of the drawn tokens, 0 elsewhere.
      lengths: [B·G] tokens of each completion so far, drawn or observed.
      ended: [B·G] True for completions that ended before they were cut at T.
      stop_state: [B·G] state of the stop strings after the last token of the current turn.
    """

    def __init__(self, count: int, length: int, pad_token_id: int):
        self.tokens = np.full((count, length), pad_token_id, np.int32)
        self.log_probs = np.zeros((count, length), np.float32)
        self.mask = np.zeros((count, length), bool)
        self.lengths = np.zeros(count, int)
        self.ended = np.zeros(count, bool)
        self.stop_state = np.zeros(count, np.int32)

    @property
    def length(self) -> int:
        """T, the maximum length of a completion."""
        return self.tokens.shape[1]

    def record(self, completions: np.ndarray, drawn: Drawn, settings: DecodeSettings) -> np.ndarray:
        """Append drawn tokens [B', G', N] to completions [B', G']; return which drew an EOS or a stop string."""
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
        """All completions of B = `groups` prompts as NumPy arrays, with `present` if they have several `turns`."""
        present = np.arange(self.length) < self.lengths[:, None]
        arrays = (self.tokens, self.mask, self.log_probs, self.ended, present if turns else None)
        return Completions(*jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), arrays))


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Arguments of a rollout, and its table.

    Attributes:
      model: as an argument of a compiled function.
      params: for prompts.
      variables: collections for `decode` (`programs.decode_variables`).
      prompts: tokens [B, P] and lengths [B].
      keys: [B, G] typed keys.
      settings: of all programs.
      table: of all completions.
      interrupt: called before prompts are read, before each burst, and while an observation is awaited.
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
        """Mesh of the params; None for one device."""
        return self.settings.mesh

    def rows(self, groups: np.ndarray) -> np.ndarray:
        """[B', G] rows of the completions of groups [B'] in the table; −1 for groups from B on, which fill a shape."""
        b, g = self.keys.shape
        return np.where(groups[:, None] < b, groups[:, None] * g + np.arange(g), -1)

    def inputs(self, groups: np.ndarray) -> tuple[Prompts, jax.Array]:
        """Prompts and keys of groups [B'], on the devices; the last group's for groups from B on."""
        at = np.minimum(groups, len(self.keys) - 1)
        prompts, keys = jax.tree.map(lambda x: x[at], (self.prompts, self.keys))
        return split((prompts, keys), self.mesh)
