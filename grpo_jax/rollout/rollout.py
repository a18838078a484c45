"""One rollout: what it was asked for, what has been drawn, and the programs by which completions go on.

`layout` says what happens when, where completions have one turn; `turns` where somebody answers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import chex
import jax
import numpy as np
from jax.sharding import Mesh

from grpo_jax.maths.stops import Stops
from grpo_jax.models.sharding import mesh_of, split
from grpo_jax.rollout.decode import Drawn, Stream, decode, move, on_cpu, prefill, read_chunk, refill
from grpo_jax.rollout.draw import DecodeSettings, Variables
from grpo_jax.rollout.variables import decode_variables
from grpo_jax.types import CachedModel, Completions, Params, Prompts, as_argument

Result = TypeVar("Result")


class Table:
    """All tokens of a call, on the host.

    Attributes:
      tokens: [B·G, T] drawn and observed; the pad id after the end.
      mask: [B·G, T] which of them were drawn.
      log_probs: [B·G, T] that they were drawn with, 0 elsewhere.
      lengths: [B·G] tokens of each completion so far, drawn or observed.
      ended: [B·G] whether a completion ended by itself.
      stop_state: [B·G] how much of a stop string its last tokens are, from the beginning of its turn on.
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
        """T, the most tokens of a completion."""
        return self.tokens.shape[1]

    def record(
        self, completions: np.ndarray, drawn: Drawn, eos_token_ids: tuple[int, ...], stops: Stops | None = None
    ) -> np.ndarray:
        """Take in what was drawn of completions [B', G'], −1 for nobody's; return who ended with it [B', G']."""
        chex.assert_equal_shape_prefix((completions, *drawn), 2)
        tokens, log_probs, mask = map(np.asarray, drawn)
        at = self.lengths[completions][:, :, None] + np.arange(tokens.shape[2])
        here = mask & (completions >= 0)[:, :, None] & (at < self.length)
        where = np.broadcast_to(completions[:, :, None], here.shape)[here], at[here]
        self.tokens[where], self.log_probs[where], self.mask[where] = tokens[here], log_probs[here], True
        np.add.at(self.lengths, where[0], 1)
        ended = (np.isin(tokens, eos_token_ids) & here).any(axis=-1)
        return ended if stops is None else ended | self._stopped(completions, tokens, here, stops)

    def _stopped(self, completions: np.ndarray, tokens: np.ndarray, here: np.ndarray, stops: Stops) -> np.ndarray:
        """Who has come to the end of a stop string [B', G'] with the tokens [B', G', N] that are `here`."""
        state = self.stop_state[completions]
        for t in range(tokens.shape[-1]):
            state = np.where(here[..., t], stops.after(state, tokens[..., t]), state)
        real = completions >= 0
        self.stop_state[completions[real]] = state[real]
        return here.any(axis=-1) & (state == stops.found)  # and not again, while an answer is waited for

    def append(self, completion: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Take in tokens that were drawn elsewhere."""
        new = slice(self.lengths[completion], self.lengths[completion] + len(tokens))
        self.observe(completion, tokens)
        self.mask[completion, new], self.log_probs[completion, new] = True, log_probs

    def observe(self, completion: int, tokens: Sequence[int]) -> None:
        """Take in an observation; behind it a turn begins."""
        begin, end = self.lengths[completion], self.lengths[completion] + len(tokens)
        self.tokens[completion, begin:end], self.lengths[completion] = tokens, end
        self.stop_state[completion] = 0

    def completions(self, groups: int, *, turns: bool = False) -> Completions:
        """All completions of B = `groups` prompts, in NumPy's arrays; of several `turns`, or of one."""
        there = np.arange(self.length) < self.lengths[:, None]
        arrays = (self.tokens, self.mask, self.log_probs, self.ended, there if turns else None)
        return Completions(*jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), arrays))


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Arguments of a rollout, the table of what has been drawn, and the compiled programs on its streams.

    Attributes:
      model: as an argument of a compiled function.
      params: of the model.
      variables: collections that it is applied to while it decodes.
      prompts: B of them.
      keys: [B, G] typed keys.
      settings: of all programs.
      table: of all completions.
      interrupt: called before prompts are read, before each burst, and while answers are waited for.
    """

    model: CachedModel
    params: Params
    variables: Variables
    prompts: Prompts
    keys: jax.Array
    settings: DecodeSettings
    table: Table
    interrupt: Callable[[], None]

    @classmethod
    def of(
        cls,
        model: CachedModel,
        params: Params,
        prompts: Prompts,
        keys: jax.Array,
        settings: DecodeSettings,
        length: int,
        interrupt: Callable[[], None],
    ) -> Rollout:
        """A rollout of completions of at most `length` tokens, of which none has been drawn."""
        given, table = as_argument(model), Table(keys.size, length, settings.pad_token_id)
        return cls(given, params, decode_variables(given, params), prompts, keys, settings, table, interrupt)

    def part(self, first: int, last: int) -> Rollout:
        """The rollout of groups first … last − 1 alone."""
        prompts, keys = jax.tree.map(lambda x: x[first:last], (self.prompts, self.keys))
        table = Table(keys.size, self.table.length, self.settings.pad_token_id)
        return dataclasses.replace(self, prompts=prompts, keys=keys, table=table)

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """Mesh that the params are on; None for one device."""
        return mesh_of(self.params)

    @functools.cached_property
    def in_flight(self) -> int:
        """Bursts that are begun before the host looks at the tokens of the one before them."""
        return 0 if on_cpu(self.params, self.mesh) else 1

    def numbers(self, groups: np.ndarray) -> np.ndarray:
        """[B', G] numbers of the completions of groups [B'] in the table; −1 for fillers after the last group."""
        b, g = self.keys.shape
        return np.where(groups[:, None] < b, groups[:, None] * g + np.arange(g), -1)

    def prefill(self, groups: np.ndarray, slot: int, *, slots: int, turns: bool = False) -> tuple[Stream, Drawn]:
        """A stream of groups [B'], and the first tokens of their completions, which begin in `slot`."""
        prompts, keys = split(self._inputs(groups), self.mesh)
        return prefill(
            *(self.model, self.params, prompts, keys, slot),
            settings=self.settings,
            slots=slots,
            turns=turns,
            mesh=self.mesh,
        )

    def refill(self, stream: Stream, groups: np.ndarray, places: np.ndarray, slot: int) -> tuple[Stream, Drawn]:
        """The stream with further groups in those places, and their first tokens."""
        prompts, keys = self._inputs(groups)
        new, drawn = refill(
            *(self.model, self.params, stream.replace(cache=()), prompts, keys, places, slot), settings=self.settings
        )
        return new.replace(cache=stream.cache), drawn

    def decode(
        self, stream: Stream, slot: int, count: int | jax.Array, *, steps: int, fixed: bool = False
    ) -> tuple[Stream, Drawn]:
        """The stream after a burst from `slot` on, and what was drawn."""
        (cache, token, ended, state), drawn = decode(
            *(self.model, self.variables, stream.cache, stream.replace(cache=()), slot, count),
            settings=self.settings,
            steps=steps,
            fixed=fixed,
            mesh=self.mesh,
        )
        return stream.replace(cache=cache, token=token, ended=ended, stop_state=state), drawn

    def read(
        self, stream: Stream, slot: int, tokens: np.ndarray, real: np.ndarray
    ) -> tuple[Stream, jax.Array, jax.Array]:
        """The stream after the `real` ones of tokens [B', G', N], and what is drawn next [B', G']: token, log-prob."""
        tokens, real = split((tokens, real), self.mesh)
        cache, token, log_prob = read_chunk(
            *(self.model, self.variables, stream.cache, stream.replace(cache=()), slot, tokens, real),
            settings=self.settings,
            mesh=self.mesh,
        )
        return stream.replace(cache=cache), token, log_prob

    def move(
        self,
        streams: tuple[Stream, ...],
        groups: np.ndarray,
        order: np.ndarray,
        start: np.ndarray | None = None,
        *,
        slots: int,
        parts: int = 1,
    ) -> tuple[Stream, ...]:
        """Completions order [B', G'] of groups [B'] of all streams, in `parts` streams; on a mesh all groups."""
        some = groups if self.mesh is None else None
        return move(streams, some, order, start, slots=slots, parts=parts, mesh=self.mesh)

    def waited(self, results: Result) -> Result:
        """Results of a stream's program; a CPU's threads wait for theirs."""
        return results if self.in_flight else jax.block_until_ready(results)

    def _inputs(self, groups: np.ndarray) -> tuple[Prompts, jax.Array]:
        """Prompts and keys of groups [B']; those of the last group for fillers after it."""
        at = np.minimum(groups, len(self.keys) - 1)
        return jax.tree.map(lambda x: x[at], (self.prompts, self.keys))
