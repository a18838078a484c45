"""Sampling of multi-turn completions, in which observations separate the turns.

A completion is one sequence of tokens. Its keys and values stay on the device from the first turn to the last, and
sampled tokens are never retokenized. An observation is prefilled together with the token that ended the turn:

```
                  turn 1              observation       turn 2
completion 0      a  b  EOS         x  y  z           c  d  e  EOS
completion 1      f  EOS            u                 g  EOS
position of 0     0  1  2           3  4  5           6  7  8  9
one prefill of 0        EOS         x  y  z
```

Observations are computed while other completions are decoded. When half of a thread's unfinished completions are
waiting, the others are decoded for two more bursts (a burst is a compiled call with up to `BURST` decode steps), during
which most observations arrive. Then the thread waits for the rest and prefills all observations together. The sequence
of compiled functions and their shapes thus depends only on the tokens, not on how long environments take, and a resumed
run reproduces the same results bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.sharding import fetch, gather_objects, shard, shard_count
from grpo_jax.models.threads import run_in_threads
from grpo_jax.rollout.decode import Drawn, decode, prefill, prefill_chunk, rearrange
from grpo_jax.rollout.decode_plan import BURST, SLOT_MULTIPLE, DecodePlan, decode_step_cost, decode_threads, on_cpu
from grpo_jax.rollout.table import SamplingJob
from grpo_jax.types import Completions

Result = TypeVar("Result")

CHUNK = 256
"""Maximum number of tokens per completion in one call to `prefill_chunk`."""

MIN_WAITING = 0.5
"""Fraction of a thread's unfinished completions that must be waiting before observations are prefilled. Waiting
completions are idle, but prefilling a single observation takes as long as prefilling all of them."""

EXTRA_BURSTS = 2
"""Number of bursts that are decoded after `MIN_WAITING` is reached. With 0, decoding would stop until the slowest
observation arrives; with a large value, one long turn would delay all other turns."""

ObservationFuture = Future[Sequence[int] | None]
"""Future of the token ids that the environment appends after a turn, or of None at the end of the completion."""

TRUNCATED = range(2**31 - 1)
"""Result of an `ObservationFuture` that truncates the completion, like an observation that is longer than any limit."""


class NextObservation(Protocol):
    """A function that returns a future of the observation after a turn. It is called once per turn, from any thread.

    If several processes sample the same completions together, exactly one of them computes a completion's
    observations; in the others, the function returns None.
    """

    def __call__(self, completion: int, turn: np.ndarray, limit: int) -> ObservationFuture | None:
        """Start computing the observation that follows a turn.

        Args:
          completion: index b · G + g of the completion.
          turn: token ids [n] of a turn that has ended or has the maximum length.
          limit: maximum observation length in tokens. If it is exceeded, the completion is truncated after the turn.

        Returns:
          A future of the observation's token ids, or of None if the turn is the last one. If a different process
          computes the observation, None is returned instead of a future.
        """
        ...


class _MultiTurnDecoder:
    """Decoding state of completions that one thread decodes together."""

    def __init__(self, job: SamplingJob, next_observation: NextObservation, groups: np.ndarray, max_turn_length: int):
        self.job, self.table = job, job.table
        self.next_observation, self.max_turn_length = next_observation, max_turn_length
        self.rows = job.rows(groups)  # [B', G'] table row at each position, −1 if empty
        g, p, length = job.keys.shape[1], job.prompts.tokens.shape[1], job.table.length
        # When completions end, the remaining ones move to smaller arrays.
        cost = decode_step_cost(job.model, job.params, p, length, cpu=on_cpu(job.params, job.mesh))
        self.plan = DecodePlan.of(len(groups), g, length, cost, shards=shard_count(job.mesh), multi_turn=True)
        self.shape_index, self.cache_size = 0, self._ring_size(min(length, 4 * BURST))  # slots of the ring
        self.slot = 0  # next slot of the active completions
        self.turn_starts = np.zeros(len(job.table.lengths), int)  # number of tokens before the current turn
        self.waiting: dict[int, ObservationFuture | None] = {}  # pending observations, keyed by table row
        self.bursts_waited = 0  # number of extra bursts since `MIN_WAITING` was reached
        prompts, keys = job.inputs(groups)
        self.device_state, drawn = prefill(
            job.model, job.params, prompts, keys, settings=job.settings, slots=self.cache_size, multi_turn=True
        )
        self._record(self.rows, drawn)

    def run(self) -> None:
        """Sample all turns of these completions."""
        while (self.rows >= 0).any():
            if self.active.any():
                self._draw()
            if not self.waiting or len(self.waiting) < MIN_WAITING * (self.rows >= 0).sum():
                continue
            if self.active.any() and self.bursts_waited < EXTRA_BURSTS:
                self.bursts_waited += 1
            else:
                self.bursts_waited = 0
                self._prefill_observations(self._observations())

    @property
    def active(self) -> np.ndarray:
        """[B', G'] bool, True for completions in an unfinished turn."""
        return (self.rows >= 0) & ~np.isin(self.rows, list(self.waiting))

    def _draw(self) -> None:
        """Decode one burst for all active completions."""
        job, table, active = self.job, self.table, self.active
        job.check_interrupt()
        lengths = table.lengths[self.rows]
        min_slots = min(int(lengths[active].max()) - 1 + BURST, table.length)
        if min_slots > self.cache_size:  # the ring is too small for another burst
            self._align(np.zeros_like(lengths), min_slots=min_slots)
            active, lengths = self.active, table.lengths[self.rows]
        remaining = np.minimum(table.length, self.turn_starts[self.rows] + self.max_turn_length) - lengths
        max_new_tokens = np.where(active, remaining, 0).astype(np.int32)
        # The device's state of the stop-string automaton is stale after an observation; use the host's.
        stop_state = None if self.device_state.stop_state is None else table.stop_state[self.rows]
        inactive, max_new_tokens, stop_state = shard((~active, max_new_tokens, stop_state), job.mesh)
        state = self.device_state.replace(ended=inactive, stop_state=stop_state)
        self.device_state, drawn = decode(
            job.model, job.decode_variables, state, self.slot, max_new_tokens, settings=job.settings, steps=BURST
        )
        self.slot += self._record(self.rows, drawn)

    def _record(self, rows: np.ndarray, drawn: Drawn) -> int:
        """Record the tokens drawn for table rows [B', G'], where −1 marks an empty position.

        Requests observations for turns that have just ended, and ends completions without space for more tokens.
        Returns the number of steps that drew any tokens.
        """
        table, drawn = self.table, fetch(drawn)
        _, _, mask = drawn
        turn_ended = table.record(rows, drawn, self.job.settings)
        lengths, has_drawn = table.lengths[rows], (rows >= 0) & mask.any(axis=-1)  # row −1 would select the last row
        turn_ended |= has_drawn & (lengths - self.turn_starts[rows] == self.max_turn_length) & (lengths < table.length)
        for row in map(int, rows[turn_ended]):
            length = int(table.lengths[row])
            turn = table.tokens[row, self.turn_starts[row] : length]
            self.waiting[row] = self.next_observation(row, turn, table.length - length - 1)
        finished = has_drawn & ~turn_ended & (lengths == table.length)
        self.rows = np.where(finished, -1, self.rows)
        return int(mask.sum(axis=-1).max())

    def _observations(self) -> dict[int, Sequence[int]]:
        """Wait for observations and return them by table row. Ends completions for which they are None or too long."""
        table, observed = self.table, dict[int, Sequence[int]]()
        local = [(row, future) for row, future in self.waiting.items() if future is not None]
        received = [(row, wait_for(future, self.job.check_interrupt)) for row, future in local]
        if jax.process_count() > 1:
            limit = table.length  # enough to show that an observation is too long
            lists = [(row, None if tokens is None else [int(i) for i in tokens[:limit]]) for row, tokens in received]
            received = [(row, tokens) for part in gather_objects(lists) for row, tokens in part]
        by_row = dict(received)
        for row in self.waiting:  # in the same order in all processes
            tokens = by_row[row]
            if tokens is None:
                table.ended[row] = True
            elif len(tokens) < table.length - table.lengths[row]:
                observed[row] = tokens
        finished = np.isin(self.rows, [row for row in self.waiting if row not in observed])
        self.rows, self.waiting = np.where(finished, -1, self.rows), {}
        return observed

    def _prefill_observations(self, observed: Mapping[int, Sequence[int]]) -> None:
        """Prefill each turn's last token with the observation after it, and draw the first token of the next turn."""
        if not observed:
            return
        job, table = self.job, self.table
        new_tokens = {
            row: [int(table.tokens[row, table.lengths[row] - 1]), *tokens] for row, tokens in observed.items()
        }
        longest = max(map(len, new_tokens.values()))
        chunk_length = min(CHUNK, 1 << max(1, (longest - 1).bit_length()))
        padded_length = -(-longest // chunk_length) * chunk_length
        counts = np.zeros(len(table.lengths) + 1, int)  # index −1, an empty position, selects the last entry
        counts[list(new_tokens)] = [len(ids) for ids in new_tokens.values()]
        needed = int(max(table.lengths[row] + counts[row] for row in new_tokens)) + BURST
        min_slots = max(padded_length, min(needed, table.length))
        self._align(counts[self.rows], min_slots=min_slots)
        for row, tokens in observed.items():
            table.append_observation(row, tokens)
            self.turn_starts[row] = table.lengths[row]
        padded = np.zeros((*self.rows.shape, padded_length), np.int32)
        valid = np.arange(padded_length) >= padded_length - counts[self.rows][..., None]
        answered = np.isin(self.rows, list(new_tokens))
        for i, j in np.argwhere(answered):
            ids = new_tokens[int(self.rows[i, j])]
            padded[i, j, padded_length - len(ids) :] = ids
        for start in range(0, padded_length, chunk_length):
            chunk = slice(start, start + chunk_length)
            ids, valid_chunk = shard((padded[..., chunk], valid[..., chunk]), job.mesh)
            slot = self.cache_size - padded_length + start
            self.device_state, token, log_prob = prefill_chunk(
                job.model, job.decode_variables, self.device_state, slot, ids, valid_chunk, settings=job.settings
            )
        next_token = jnp.where(shard(answered, job.mesh), token, self.device_state.token)
        self.device_state = self.device_state.replace(token=next_token)
        drawn = (token[..., None], log_prob[..., None], jnp.ones((*token.shape, 1), bool))
        self._record(np.where(answered, self.rows, -1), drawn)

    def _ring_size(self, min_slots: int) -> int:
        """Round `min_slots` up to a ring size. There are few ring sizes, because each needs a separate compilation."""
        sizes = (*self.plan.cache_sizes[:-1], self.table.length)
        return -(-next((n for n in sizes if n >= min_slots), min_slots) // SLOT_MULTIPLE) * SLOT_MULTIPLE

    def _align(self, counts: np.ndarray, *, min_slots: int) -> None:
        """Move completions so that each ends `counts` [B', G'] slots before the end of the ring.

        The ring grows to at least `min_slots` slots. If the completions fit into the next shape, they move to it.
        """
        groups, order = np.arange(len(self.rows)), np.broadcast_to(np.arange(self.rows.shape[1]), self.rows.shape)
        if self.shape_index + 1 < len(self.plan.shapes):
            selection = self.plan.select(self.shape_index + 1, self.rows >= 0)
            if selection is not None:
                self.shape_index, (groups, order) = self.shape_index + 1, selection
        self.cache_size = max(self.cache_size, self._ring_size(min_slots))
        self.rows, counts = (x[groups[:, None], order] for x in (self.rows, counts))
        filled = np.where(self.rows >= 0, self.table.lengths[self.rows] - 1, 0)
        self.slot, mesh = self.cache_size, self.job.mesh
        kept = groups if mesh is None else None  # on a mesh, groups stay on their devices
        start = self.cache_size - counts - filled
        (self.device_state,) = rearrange((self.device_state,), kept, order, start, slots=self.cache_size, mesh=mesh)


def wait_for(future: Future[Result], check_interrupt: Callable[[], None]) -> Result:
    """Wait for a future's result, and call `check_interrupt` every 0.2 s until it arrives."""
    while not wait([future], timeout=0.2).done:
        check_interrupt()
    return future.result()


def sample_turns(
    job: SamplingJob, at_once: int, next_observation: NextObservation, max_turn_length: int
) -> Completions:
    """Sample multi-turn completions and return NumPy arrays. At most `at_once` groups are decoded together."""
    b, g = job.keys.shape
    # With several processes, all must exchange observations in the same order, so each uses one thread.
    one_thread = job.mesh is not None or jax.process_count() > 1
    threads = 1 if one_thread else decode_threads(job.params, at_once, g, threads_per_core=2)
    size = at_once // threads

    def sample_groups(thread: int) -> None:
        for first in range(thread * size, b, at_once):
            _MultiTurnDecoder(job, next_observation, np.arange(first, first + size), max_turn_length).run()

    run_in_threads(sample_groups, range(threads))
    return job.table.to_completions(b, multi_turn=True)
