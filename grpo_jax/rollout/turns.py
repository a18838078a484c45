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

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.devices.sharding import fetch, gather_objects, mesh_of, shard_count, split
from grpo_jax.devices.streams import count_streams, run_in_streams
from grpo_jax.maths.sampling import Sampling
from grpo_jax.rollout.decode import completion_keys, decode_variables, on_cpu
from grpo_jax.rollout.generate import check_request
from grpo_jax.rollout.ladder import ALIGNED, BURST, Ladder
from grpo_jax.rollout.layout import STREAM_COMPLETIONS, decode_step, places
from grpo_jax.rollout.turn_programs import LEAD, align, begin, draw_turn, read_chunk
from grpo_jax.types import Completions, Model, Params, Prompts, as_argument, is_cached

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
        """The tokens that follow a turn [n] that has ended with an EOS; None, where the completion is over.

        `completion` is b · G + g; an observation of more than `room` tokens would leave none for a further turn, and
        ends the completion as truncated. No promise where another process answers.
        """
        ...


class _OtherFailed(Exception):
    """Another stream has failed: nobody will want these completions."""


class _Rows:
    """All tokens of a call, on the host.

    Attributes:
      tokens: [B·G, T] drawn and observed; likewise sampled (drawn), log_probs.
      lengths: [B·G] tokens of each, drawn or observed.
      ended: [B·G] whether a completion ended by itself.
    """

    def __init__(self, count: int, length: int, pad_token_id: int):
        self.tokens = np.full((count, length), pad_token_id, np.int32)
        self.log_probs = np.zeros((count, length), np.float32)
        self.sampled = np.zeros((count, length), bool)
        self.lengths = np.zeros(count, int)
        self.ended = np.zeros(count, bool)

    @property
    def length(self) -> int:
        """T, the most tokens of a completion."""
        return self.tokens.shape[1]

    def draw(self, rows: np.ndarray, tokens: Any, log_probs: Any, mask: Any) -> None:
        """Take in what was drawn of rows [B', G'] (−1 for none), arrays [B', G', steps]."""
        tokens, log_probs, mask = map(np.asarray, (tokens, log_probs, mask))
        for at in np.argwhere((rows >= 0) & mask.any(axis=-1)):
            row, own = rows[tuple(at)], tuple(at)
            drawn, begin = mask[own], self.lengths[row]
            end = begin + drawn.sum()
            self.tokens[row, begin:end], self.log_probs[row, begin:end] = tokens[own][drawn], log_probs[own][drawn]
            self.sampled[row, begin:end], self.lengths[row] = True, end

    def observe(self, row: int, tokens: Sequence[int]) -> None:
        """Take in an observation."""
        begin, end = self.lengths[row], self.lengths[row] + len(tokens)
        self.tokens[row, begin:end], self.lengths[row] = tokens, end

    def completions(self, groups: int) -> Completions:
        """As `Completions` of B = `groups` prompts."""
        there = np.arange(self.length)[None] < self.lengths[:, None]
        arrays = (self.tokens, self.sampled, self.log_probs, there)
        tokens, mask, log_probs, present = (jnp.asarray(x.reshape(groups, -1, self.length)) for x in arrays)
        return Completions(tokens, mask, log_probs, jnp.asarray(self.ended.reshape(groups, -1)), present)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What all streams of one call share."""

    model: Any
    params: Params
    prompts: Prompts
    keys: jax.Array
    rows: _Rows
    answers: Answers
    eos_token_ids: tuple[int, ...]
    sampling: Sampling
    interrupt: Callable[[], None]
    mesh: Any
    variables: dict[str, Any]  # what the model is applied to while it decodes: made once for all streams

    @property
    def how(self) -> dict[str, Any]:
        """What every program is told."""
        return {"sampling": self.sampling, "mesh": self.mesh}


class _Play:
    """The completions of one stream, from their prompts to their ends."""

    def __init__(self, call: _Call, groups: np.ndarray):
        b, g = call.keys.shape
        self.call = call
        self.completions = np.where(groups[:, None] < b, groups[:, None] * g + np.arange(g), -1)
        p, length = call.prompts.tokens.shape[1], call.rows.length
        step = decode_step(call.model, call.params, p, length, cpu=on_cpu(call.params, call.mesh))
        self.ladder = Ladder.of(len(groups), g, length, step, shards=shard_count(call.mesh))
        # The slot is the next one of those whose turn has not ended.
        self.at, self.slots, self.slot = 0, self._slots(min(length, 4 * BURST)), LEAD
        self.starts = np.full(self.completions.shape, LEAD)  # the stream's, on the host
        self.waiting: dict[int, Future[Sequence[int] | None] | None] = {}
        self.more = 0  # bursts drawn since enough have come to wait
        self.begins = np.zeros(len(call.rows.lengths), int)  # of each completion's present turn
        own = jax.tree.map(lambda x: x[np.minimum(groups, b - 1)], (call.prompts, call.keys))
        given = split(own, call.mesh)
        self.stream, token, log_prob = begin(call.model, call.params, *given, slots=self.slots, **call.how)
        self._first(self.completions, token, log_prob)

    def run(self) -> None:
        """All turns."""
        while (self.completions >= 0).any():
            if self.active.any():
                self._draw()
            if not self.waiting or len(self.waiting) < TOGETHER * (self.completions >= 0).sum():
                continue
            if self.active.any() and self.more < PATIENCE:
                self.more += 1
            else:
                self.more = 0
                self._read(self._answers())

    @property
    def active(self) -> np.ndarray:
        """[B', G'] completions in the middle of a turn."""
        return (self.completions >= 0) & ~np.isin(self.completions, list(self.waiting))

    def _draw(self) -> None:
        """A burst of all turns; who ends one is answered while the others go on."""
        call, rows, active = self.call, self.call.rows, self.active
        call.interrupt()
        lengths = rows.lengths[self.completions]
        least = min(int(lengths[active].max()) - 1 + BURST, rows.length)
        if least > self.slots:  # the ring is full
            self._align(np.zeros_like(lengths), least=least)
            active, lengths = self.active, rows.lengths[self.completions]
        room = np.where(active, rows.length - lengths, 0).astype(np.int32)
        how = {"steps": BURST, "eos_token_ids": call.eos_token_ids, **call.how}
        given = (self.stream.cache, self.stream.replace(cache=()), self.slot, *split((active, room), call.mesh))
        cache, token, drawn = draw_turn(call.model, call.variables, *given, **how)
        drawn = [np.asarray(x) for x in fetch(drawn)]
        # Where all turns have ended, no further step was made.
        self.stream, self.slot = self.stream.replace(cache=cache, token=token), self.slot + int(drawn[2].sum(-1).max())
        rows.draw(self.completions, *drawn)
        self._note(active)

    def _note(self, active: np.ndarray) -> None:
        """Ask for those whose turns have just ended, and let go of those that have no room for another token."""
        call, rows = self.call, self.call.rows
        for row in self.completions[active]:
            length = int(rows.lengths[row])
            if rows.tokens[row, length - 1] in call.eos_token_ids:
                turn = rows.tokens[row, self.begins[row] : length]
                self.waiting[int(row)] = call.answers(int(row), turn, rows.length - length - 1)
        over = active & self.active & (rows.lengths[self.completions] == rows.length)
        self.completions = np.where(over, -1, self.completions)

    def _answers(self) -> dict[int, Sequence[int]]:
        """The observations of those who waited and go on; for the others the last turn was the last."""
        rows, observed = self.call.rows, dict[int, Sequence[int]]()
        own = [(row, promise) for row, promise in self.waiting.items() if promise is not None]
        told = [(row, _wait(promise, self.call.interrupt)) for row, promise in own]
        if jax.process_count() > 1:
            plain = [(row, None if tokens is None else [int(token) for token in tokens]) for row, tokens in told]
            told = [(row, tokens) for part in gather_objects(plain) for row, tokens in part]
        answers = dict(told)
        for row in self.waiting:
            tokens = answers[row]
            if tokens is None:
                rows.ended[row] = True
            elif len(tokens) < rows.length - rows.lengths[row]:
                observed[row] = tokens
        over = np.isin(self.completions, [row for row in self.waiting if row not in observed])
        self.completions, self.waiting = np.where(over, -1, self.completions), {}
        return observed

    def _read(self, observed: Mapping[int, Sequence[int]]) -> None:
        """Read the observations, behind the tokens that ended the turns, and draw the first tokens of the next."""
        if not observed:
            return
        call, rows = self.call, self.call.rows
        texts = {row: [int(rows.tokens[row, rows.lengths[row] - 1]), *tokens] for row, tokens in observed.items()}
        longest = max(map(len, texts.values()))
        size = min(CHUNK, 1 << max(1, (longest - 1).bit_length()))
        width = -(-longest // size) * size
        counts = np.zeros(len(rows.lengths) + 1, int)  # the last for −1, nobody
        counts[list(texts)] = [len(text) for text in texts.values()]
        most = int(max(rows.lengths[row] + counts[row] for row in texts)) + BURST
        least = max(width, min(most, rows.length))
        first = self._in_step(counts[self.completions], width, least)
        if first is None:
            self._align(counts[self.completions], least=least)
            first = self.slots - width
        for row, more in observed.items():
            rows.observe(row, more)
            self.begins[row] = rows.lengths[row]
        tokens = np.zeros((*self.completions.shape, width), np.int32)
        real = np.arange(width) >= width - counts[self.completions][..., None]
        back = np.isin(self.completions, list(texts))
        for at in np.argwhere(back):
            text = texts[int(self.completions[tuple(at)])]
            tokens[tuple(at)][width - len(text) :] = text
        token: Any = None
        log_prob: Any = None
        for start in range(0, width, size):
            part = split((tokens[..., start : start + size], real[..., start : start + size]), call.mesh)
            given = (self.stream.cache, self.stream.replace(cache=()), first + start, *part)
            cache, token, log_prob = read_chunk(call.model, call.variables, *given, **call.how)
            self.stream = self.stream.replace(cache=cache)
        self.slot = first + width
        self.stream = self.stream.replace(token=jnp.where(split(back, call.mesh), token, self.stream.token))
        self._first(np.where(back, self.completions, -1), token, log_prob)

    def _first(self, completions: np.ndarray, token: Any, log_prob: Any) -> None:
        """Take in the first token of a turn."""
        token, log_prob = fetch((token, log_prob))
        drawn = np.ones((*completions.shape, 1), bool)
        self.call.rows.draw(completions, np.asarray(token)[..., None], np.asarray(log_prob)[..., None], drawn)
        self._note(completions >= 0)

    def _slots(self, least: int) -> int:
        """The size of a ring with so many slots at least: of few sizes, because each is a program."""
        sizes = (*self.ladder.slots[:-1], self.call.rows.length)
        return -(-next((n for n in sizes if n >= least), least) // ALIGNED) * ALIGNED

    def _in_step(self, more: np.ndarray, width: int, least: int) -> int | None:
        """The slot from which `width` tokens can be read, of which each completion's last `more` [B', G'] are real.

        None, unless all completions end side by side and are told as many tokens, as in games whose turns have one
        length, and the ring has room behind them. Aligning moves all keys and values, and takes longer than to read a
        few tokens.
        """
        alive = self.completions >= 0
        ends, told = (self.starts + self.call.rows.lengths[self.completions] - 1)[alive], more[alive]
        if (ends != ends[0]).any() or (told != told[0]).any() or least > self.slots or self._next_layout() is not None:
            return None
        first = int(ends[0] + told[0]) - width
        return first if first >= 0 and first % self.slots + width <= self.slots else None

    def _next_layout(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Which completions go on in fewer places; None where there are too many."""
        last = self.at + 1 == len(self.ladder.shapes)
        return None if last else self.ladder.choose(self.at, self.completions >= 0)

    def _align(self, more: np.ndarray, *, least: int) -> None:
        """All completions side by side, so many tokens [B', G'] before the end of a ring with `least` slots.

        In fewer places, where few enough completions are left.
        """
        rows, chosen, shape = self.call.rows, self._next_layout(), self.completions.shape
        everything = np.arange(shape[0]), np.broadcast_to(np.arange(shape[1]), shape)
        groups, order = everything if chosen is None else chosen
        self.at, self.slots = self.at + (chosen is not None), max(self.slots, self._slots(least))
        self.completions, more = (x[groups[:, None], order] for x in (self.completions, more))
        filled = np.where(self.completions >= 0, rows.lengths[self.completions] - 1, 0)
        given = tuple(x.astype(np.int32) for x in (groups, order, filled, more))
        self.stream, self.slot = align(self.stream, *given, slots=self.slots), self.slots
        self.starts = self.slots - more - filled


def _wait(promise: Future[Any], interrupt: Callable[[], None]) -> Any:
    """What was promised; the interrupt is looked at meanwhile."""
    while True:
        try:
            return promise.result(timeout=0.2)
        except TimeoutError:
            if promise.done():  # the answer's own
                raise
            interrupt()


def _stream_count(params: Params, groups: int, width: int, mesh: Any) -> int:
    """Streams of [groups, width] completions: twice as many as work at a time, so that some can wait for answers.

    One with a mesh, and with several processes: they tell each other the answers, all in the same order.
    """
    if mesh is not None or jax.process_count() > 1:
        return 1
    most = max(1, min(groups, groups * width // STREAM_COMPLETIONS, 2 * count_streams(params, groups)))
    return max(n for n in range(1, most + 1) if groups % n == 0)


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
    pad_token_id: int = 0,
    prompt_indices: jax.Array | np.ndarray | None = None,
    batch_size: int | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> Completions:
    """Sample completions of several turns: an EOS ends a turn, and `answers` says how the completion goes on.

    Args:
      model: a model of this package.
      params: its parameters.
      prompts: tokens [B, P] int32 right-padded, lengths [B].
      key: a typed PRNG key, consumed; token t of completion (b, g), counted with the observed ones, is drawn with
        fold_in(fold_in(fold_in(key, prompt_indices[b]), g), t).
      answers: see `Answers`.
      num_generations: G ≥ 1.
      max_completion_length: T ≥ 1, in tokens, of all turns with their observations. A completion whose observation
        does not fit, with one token more, ends there as truncated.
      temperature, top_k, top_p, min_p, eos_token_ids, pad_token_id, prompt_indices: as in `generate`.
      batch_size: completions that stand on the device at a time, in whole groups; None: all.
      interrupt: called on the host every few tokens and while it waits; what it raises ends the sampling.

    Returns:
      `Completions`, whose `mask` is True on what was drawn and `present` on what was observed too; `ended` where
      `answers` returned None.

    Raises:
      ValueError: a model without a cache, or sampling settings that make no sense.
      Exception: what an answer raises.

    Example:
      >>> import jax
      >>> from grpo_jax.models.transformer import Transformer
      >>> from grpo_jax.models.layers import TransformerConfig
      >>> model = Transformer(TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> prompts = Prompts(jax.numpy.ones((2, 3), "int32"), jax.numpy.array([3, 2]))
      >>> params = model.init(jax.random.key(0), prompts.tokens)["params"]
      >>> def answers(completion, turn, room):
      ...     promise = Future()
      ...     promise.set_result([7, 7])
      ...     return promise
      >>> how = {"num_generations": 4, "max_completion_length": 40, "eos_token_ids": range(8)}
      >>> completions = generate_turns(model, params, prompts, jax.random.key(1), answers, **how)
      >>> bool((completions.tokens[completions.present & ~completions.mask] == 7).all())
      True
    """
    sampling, mesh = Sampling(temperature, top_k, top_p, min_p), mesh_of(params)
    shards = shard_count(mesh)
    check_request(prompts, sampling, num_generations, max_completion_length, batch_size, shards=shards)
    if not is_cached(model):
        raise ValueError(f"model is {type(model).__name__}: several turns need a model of this package, with its cache")
    b = prompts.tokens.shape[0]
    numbers = jnp.arange(b) if prompt_indices is None else jnp.asarray(prompt_indices)
    keys = completion_keys(key, numbers, num_generations)
    rows = _Rows(b * num_generations, int(max_completion_length), int(pad_token_id))
    eos = tuple(int(i) for i in eos_token_ids)
    failed = threading.Event()

    def interrupted() -> None:
        interrupt()
        if failed.is_set():
            raise _OtherFailed

    given = (as_argument(model), params)
    variables = decode_variables(*given)
    call = _Call(*given, prompts, keys, rows, answers, eos, sampling, interrupted, mesh, variables)
    at_once = places(b, num_generations, batch_size, shards)
    streams = _stream_count(params, at_once, num_generations, mesh)
    size = at_once // streams

    def play(stream: int) -> None:
        try:
            for first in range(stream * size, b, at_once):
                _Play(call, np.arange(first, first + size)).run()
        except _OtherFailed:
            return  # the other one says why
        except BaseException:
            failed.set()
            raise

    run_in_streams(play, range(streams))
    return rows.completions(b)
