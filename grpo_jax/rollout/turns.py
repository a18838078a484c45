"""Completions of several turns: the policy draws, somebody answers, and the policy goes on from there.

A completion is one row of tokens, and its keys and values stay on the device from the first turn to the last. What is
drawn is never decoded and encoded again; what an answer adds (an observation) is read in one go, after the token that
ended the turn:

```
                  turn 1              observation       turn 2
completion 0      a  b  EOS         x  y  z           c  d  e  EOS
completion 1      f  EOS            u                 g  EOS
position of 0     0  1  2           3  4  5           6  7  8  9
read together        (only EOS)  EOS  x  y  z
```

A completion whose turn has ended is answered while the others still draw. When half of a stream's completions wait,
the others draw for two bursts more, in which most answers arrive; then the observations are read together and all go
on. So which programs run, on which shapes, follows from the tokens alone and not from how long an answer takes; a run
that is resumed comes to the same bytes. While one stream waits for answers, others decode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.maths.sampling import Sampling
from grpo_jax.models.sharding import fetch, gather_objects, mesh_of, shard_count, split
from grpo_jax.models.streams import run_in_streams
from grpo_jax.rollout.decode import Drawn, on_cpu
from grpo_jax.rollout.draw import completion_keys, decode_settings
from grpo_jax.rollout.generate import check_request
from grpo_jax.rollout.ladder import ALIGNED, BURST, Ladder
from grpo_jax.rollout.layout import decode_step, places, stream_count
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.types import Completions, Model, Params, Prompts, Tokenizer, is_cached

LEAD = 16
"""The slot in which completions begin: before it there is room for what fills up a short text that is read."""

CHUNK = 256
"""Tokens of observations that are read at a time, at most."""

TOGETHER = 0.5
"""Share of a stream's completions whose observations are read together: those that wait for the others draw nothing,
and reading costs as much for one as for all."""

PATIENCE = 2
"""Bursts that the others draw after so many have come to wait. Without them every reading would wait for an answer that
was asked for only just now, as long as an environment takes; with many, one long turn would hold up all others."""


class Answers(Protocol):
    """Who answers: for each turn of a completion one call, from any thread, and a promise at once.

    Several processes draw the same completions together: each is answered in one of them, which tells the others.
    """

    def __call__(self, completion: int, turn: np.ndarray, room: int) -> Future[Sequence[int] | None] | None:
        """The tokens that follow a turn [n] that has ended, or is as long as it may be; None, where all is over.

        `completion` is b · G + g; an observation of more than `room` tokens would leave none for a further turn, and
        ends the completion as truncated. No promise where another process answers.
        """
        ...


Promise = Future[Sequence[int] | None]


class _OtherFailed(Exception):
    """Stops this stream because another has failed."""


class _Play:
    """The completions of one stream, from their prompts to their ends."""

    def __init__(self, rollout: Rollout, answers: Answers, groups: np.ndarray, longest: int):
        """`longest`: tokens of a turn."""
        self.rollout, self.table, self.answers, self.longest = rollout, rollout.table, answers, longest
        self.completions = rollout.numbers(groups)
        g, p, length = rollout.keys.shape[1], rollout.prompts.tokens.shape[1], rollout.table.length
        step = decode_step(rollout.model, rollout.params, p, length, cpu=on_cpu(rollout.params, rollout.mesh))
        self.ladder = Ladder.of(len(groups), g, length, step, shards=shard_count(rollout.mesh), turns=True)
        # The slot is the next one of those whose turn has not ended.
        self.at, self.slots, self.slot = 0, self._slots(min(length, 4 * BURST)), LEAD
        self.starts = np.full(self.completions.shape, LEAD)  # the stream's, on the host
        self.waiting: dict[int, Promise | None] = {}
        self.patience_used = 0  # bursts drawn since enough have come to wait
        self.begins = np.zeros(len(rollout.table.lengths), int)  # of each completion's present turn
        self.stream, drawn = rollout.prefill(groups, LEAD, slots=self.slots, turns=True)
        self._take(self.completions, drawn)

    def run(self) -> None:
        """All turns."""
        while (self.completions >= 0).any():
            if self.active.any():
                self._draw()
            if not self.waiting or len(self.waiting) < TOGETHER * (self.completions >= 0).sum():
                continue
            if self.active.any() and self.patience_used < PATIENCE:
                self.patience_used += 1
            else:
                self.patience_used = 0
                self._read(self._answers())

    @property
    def active(self) -> np.ndarray:
        """[B', G'] completions in the middle of a turn."""
        return (self.completions >= 0) & ~np.isin(self.completions, list(self.waiting))

    def _draw(self) -> None:
        """A burst of all turns; who ends one is answered while the others go on."""
        table, active = self.table, self.active
        self.rollout.interrupt()
        lengths = table.lengths[self.completions]
        least = min(int(lengths[active].max()) - 1 + BURST, table.length)
        if least > self.slots:  # the ring is full
            self._align(np.zeros_like(lengths), least=least)
            active, lengths = self.active, table.lengths[self.completions]
        room = np.minimum(table.length - lengths, self.begins[self.completions] + self.longest - lengths)
        room = np.where(active, room, 0).astype(np.int32)
        # A turn begins in the state of no stop string: the host knows it, as it knows who waits.
        state = None if self.stream.stop_state is None else table.stop_state[self.completions]
        ended, room, state = split((~active, room, state), self.rollout.mesh)
        stream = self.stream.replace(ended=ended, stop_state=state)
        self.stream, drawn = self.rollout.decode(stream, self.slot, room, steps=BURST)
        self.slot += self._take(self.completions, drawn)

    def _take(self, completions: np.ndarray, drawn: Drawn) -> int:
        """Record what was drawn of completions [B', G'] (−1 marks an empty slot), and return the steps made, 0 if all
        turns ended.

        Turns that have just ended are answered; completions without space for another token are dropped.
        """
        table, drawn, settings = self.table, fetch(drawn), self.rollout.settings
        mask = drawn[2]
        ended = table.record(completions, drawn, settings.eos_token_ids, settings.stops)
        lengths = table.lengths[completions]
        cut = (completions >= 0) & (lengths - self.begins[completions] == self.longest) & (lengths < table.length)
        ended |= cut & mask.any(axis=-1)
        for completion in map(int, completions[ended]):
            length = int(table.lengths[completion])
            turn = table.tokens[completion, self.begins[completion] : length]
            self.waiting[completion] = self.answers(completion, turn, table.length - length - 1)
        over = mask.any(axis=-1) & ~ended & (lengths == table.length)
        self.completions = np.where(over & (completions >= 0), -1, self.completions)
        return int(mask.sum(axis=-1).max())

    def _answers(self) -> dict[int, Sequence[int]]:
        """The observations of those who waited and go on; for the others the last turn was the last."""
        table, observed = self.table, dict[int, Sequence[int]]()
        own = [(number, promise) for number, promise in self.waiting.items() if promise is not None]
        kept = [(number, wait_for(promise, self.rollout.interrupt)) for number, promise in own]
        if jax.process_count() > 1:
            plain = [(number, None if tokens is None else [int(token) for token in tokens]) for number, tokens in kept]
            kept = [(number, tokens) for part in gather_objects(plain) for number, tokens in part]
        answers = dict(kept)
        for number in self.waiting:
            tokens = answers[number]
            if tokens is None:
                table.ended[number] = True
            elif len(tokens) < table.length - table.lengths[number]:
                observed[number] = tokens
        over = np.isin(self.completions, [number for number in self.waiting if number not in observed])
        self.completions, self.waiting = np.where(over, -1, self.completions), {}
        return observed

    def _read(self, observed: Mapping[int, Sequence[int]]) -> None:
        """Read the observations, behind the tokens that ended the turns, and draw the first tokens of the next."""
        if not observed:
            return
        table = self.table
        texts = {i: [int(table.tokens[i, table.lengths[i] - 1]), *tokens] for i, tokens in observed.items()}
        longest = max(map(len, texts.values()))
        size = min(CHUNK, 1 << max(1, (longest - 1).bit_length()))
        width = -(-longest // size) * size
        counts = np.zeros(len(table.lengths) + 1, int)  # the last for −1, nobody
        counts[list(texts)] = [len(text) for text in texts.values()]
        most = int(max(table.lengths[i] + counts[i] for i in texts)) + BURST
        least = max(width, min(most, table.length))
        first = self._in_step(counts[self.completions], width, least)
        if first is None:
            self._align(counts[self.completions], least=least)
            first = self.slots - width
        for i, observation in observed.items():
            table.observe(i, observation)
            self.begins[i] = table.lengths[i]
        tokens = np.zeros((*self.completions.shape, width), np.int32)
        real = np.arange(width) >= width - counts[self.completions][..., None]
        back = np.isin(self.completions, list(texts))
        for at in map(tuple, np.argwhere(back)):
            text = texts[int(self.completions[at])]
            tokens[at][width - len(text) :] = text
        for start in range(0, width, size):
            chunk, there = tokens[..., start : start + size], real[..., start : start + size]
            self.stream, token, log_prob = self.rollout.read(self.stream, first + start, chunk, there)
        self.slot = first + width
        self.stream = self.stream.replace(token=jnp.where(split(back, self.rollout.mesh), token, self.stream.token))
        drawn = (token[..., None], log_prob[..., None], jnp.ones((*token.shape, 1), bool))
        self._take(np.where(back, self.completions, -1), drawn)

    def _slots(self, least: int) -> int:
        """The size of a ring with so many slots at least: of few sizes, because each is a program."""
        sizes = (*self.ladder.slots[:-1], self.table.length)
        return -(-next((n for n in sizes if n >= least), least) // ALIGNED) * ALIGNED

    def _in_step(self, to_read: np.ndarray, width: int, least: int) -> int | None:
        """The slot from which `width` tokens can be read, of which each completion's last `to_read` [B', G'] are real.

        None, unless all completions end side by side and are told as many tokens, as in games whose turns have one
        length, and the ring has room behind them. Aligning moves all keys and values, and takes longer than to read a
        few tokens.
        """
        alive = self.completions >= 0
        ends, read = (self.starts + self.table.lengths[self.completions] - 1)[alive], to_read[alive]
        if (ends != ends[0]).any() or (read != read[0]).any() or least > self.slots or self._next_layout() is not None:
            return None
        first = int(ends[0] + read[0]) - width
        return first if first >= 0 and first % self.slots + width <= self.slots else None

    def _next_layout(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Which completions go on in fewer places; None where there are too many."""
        last = self.at + 1 == len(self.ladder.shapes)
        return None if last else self.ladder.choose(self.at, self.completions >= 0)

    def _align(self, to_read: np.ndarray, *, least: int) -> None:
        """All completions side by side, so many tokens [B', G'] before the end of a ring with `least` slots.

        In fewer places, where few enough completions are left.
        """
        chosen, shape = self._next_layout(), self.completions.shape
        everything = np.arange(shape[0]), np.broadcast_to(np.arange(shape[1]), shape)
        groups, order = everything if chosen is None else chosen
        self.at, self.slots = self.at + (chosen is not None), max(self.slots, self._slots(least))
        self.completions, to_read = (x[groups[:, None], order] for x in (self.completions, to_read))
        filled = np.where(self.completions >= 0, self.table.lengths[self.completions] - 1, 0)
        self.starts, self.slot = self.slots - to_read - filled, self.slots
        at = (x.astype(np.int32) for x in (groups, order, self.starts))
        (self.stream,) = self.rollout.move((self.stream,), *at, slots=self.slots)


def wait_for(promise: Promise, interrupt: Callable[[], None]) -> Sequence[int] | None:
    """The answer, once it is there; the interrupt is looked at meanwhile."""
    while True:
        try:
            return promise.result(timeout=0.2)
        except TimeoutError:
            if promise.done():  # the answer's own
                raise
            interrupt()


def generate_turns(
    model: Model,
    params: Params,
    prompts: Prompts,
    key: jax.Array,
    answers: Answers,
    *,
    num_generations: int,
    max_completion_length: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
    eos_token_ids: Sequence[int] = (),
    stop: str | Sequence[str] | None = None,
    stop_token_ids: int | Sequence[int] | None = None,
    max_turn_length: int | None = None,
    tokenizer: Tokenizer | None = None,
    pad_token_id: int = 0,
    prompt_indices: jax.Array | np.ndarray | None = None,
    batch_size: int | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> Completions:
    """Sample completions of several turns: an EOS or `stop` ends a turn, and `answers` says how it continues.

    Arguments are those of `generate`, except for the following. A model needs a cache.

    Args:
      key: token t of completion (b, g), counted with the observed ones, is drawn as in `generate`.
      answers: returns the tokens that follow a turn; what it raises ends the sampling.
      max_completion_length: T ≥ 1, in tokens, of all turns with their observations. A completion whose observation does
        not fit, with one token more, ends there as truncated.
      stop: is searched in each turn separately, and not in observations.
      max_turn_length: tokens of a turn, which is then answered as if it had ended; None: as many as fit.

    Returns:
      `Completions` in NumPy's arrays. `mask` is True on what was drawn, `present` on what was observed too, `ended`
        where `answers` returned None.
    """
    sampling, mesh = Sampling(temperature, top_k, top_p, min_p), mesh_of(params)
    shards = shard_count(mesh)
    check_request(prompts, sampling, num_generations, max_completion_length, batch_size, max_turn_length, shards=shards)
    if not is_cached(model):
        raise ValueError(f"model is {type(model).__name__}: several turns need a model of this package, with its cache")
    b = prompts.tokens.shape[0]
    numbers = jnp.arange(b) if prompt_indices is None else jnp.asarray(prompt_indices)
    keys = completion_keys(key, numbers, num_generations)
    settings = decode_settings(
        sampling, eos_token_ids, pad_token_id, stop=stop, stop_token_ids=stop_token_ids, tokenizer=tokenizer
    )
    failed = threading.Event()

    def interrupted() -> None:
        interrupt()
        if failed.is_set():
            raise _OtherFailed

    rollout = Rollout.of(model, params, prompts, keys, settings, int(max_completion_length), interrupted)
    at_once = places(b, num_generations, batch_size, shards)
    # Several processes tell each other the answers, all in the same order.
    alone = mesh is not None or jax.process_count() > 1
    streams = 1 if alone else stream_count(params, at_once, num_generations, each=2)
    size, longest = at_once // streams, int(max_turn_length or max_completion_length)

    def play(stream: int) -> None:
        try:
            for first in range(stream * size, b, at_once):
                _Play(rollout, answers, np.arange(first, first + size), longest).run()
        except _OtherFailed:
            return  # the other one says why
        except BaseException:
            failed.set()
            raise

    run_in_streams(play, range(streams))
    return rollout.table.completions(b, turns=True)
