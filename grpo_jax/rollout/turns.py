"""Completions of several turns: the policy draws, somebody answers, and the policy goes on from there.

A completion is one row of tokens, and its keys and values stay on the device from the first turn to the last. What is
drawn is never decoded and encoded again; what an answer adds (an observation) is read in one go, after the token that
ended the turn:

```
                  turn 1              observation       turn 2
completion 0      a  b  EOS         x  y  z           c  d  e  EOS
completion 1      f  EOS            u                 g  EOS
slot of 0         0  1  2           3  4  5           6  7  8  9      each completion has slots of its own
read together        (only EOS)  EOS  x  y  z
```

Turn by turn, the completions of a stream begin together: those that end early are answered while the others still draw,
and the next turn begins when all have been answered. So which programs run, on which shapes, follows from the tokens
alone and not from how long an answer takes; a run that is resumed comes to the same bytes. While one stream waits,
others decode.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.devices.sharding import fetch, mesh_of, shard_count, split
from grpo_jax.devices.streams import count_streams, run_in_streams
from grpo_jax.maths.sampling import Sampling, check_sampling
from grpo_jax.rollout.decode import completion_keys, decode_variables, on_cpu
from grpo_jax.rollout.ladder import ALIGNED, BURST, Ladder
from grpo_jax.rollout.layout import STREAM_COMPLETIONS, decode_step
from grpo_jax.rollout.turn_programs import begin, choose, draw_turn, read_chunk
from grpo_jax.types import Completions, Model, Params, Prompts, as_argument, is_cached

CHUNK = 256
"""Tokens of observations that are read at a time, at most."""


class Answers(Protocol):
    """Who answers: for each turn of a completion one call, from any thread, and a promise at once."""

    def __call__(self, completion: int, turn: np.ndarray, room: int) -> Future[Sequence[int] | None]:
        """The tokens that follow a turn [n] that has ended with an EOS; None, where the completion is over.

        `completion` is b · G + g; an observation of more than `room` tokens would leave none for a further turn, and
        ends the completion as truncated.
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

    @functools.cached_property
    def variables(self) -> dict[str, Any]:
        """What the model is applied to while it decodes."""
        return decode_variables(self.model, self.params)

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
        self.at, self.slots = 0, self._slots(min(length, 4 * BURST))
        own = jax.tree.map(lambda x: x[np.minimum(groups, b - 1)], (call.prompts, call.keys))
        given = split(own, call.mesh)
        self.stream, token, log_prob = begin(call.model, call.params, *given, slots=self.slots, **call.how)
        self._first(self.completions, token, log_prob)

    def run(self) -> None:
        """All turns."""
        while (self.completions >= 0).any():
            observed = self._answer(self._turn())
            self._make_room(max(map(len, observed.values()), default=0))
            self._read(observed)

    def _turn(self) -> dict[int, Future[Sequence[int] | None]]:
        """Draw until every turn has ended; who has ended by itself is answered meanwhile."""
        call, rows, promised = self.call, self.call.rows, dict[int, Future[Sequence[int] | None]]()
        begins = rows.lengths.copy()
        begins[self.completions[self.completions >= 0]] -= 1  # each has drawn a token of this turn already

        def note(active: np.ndarray) -> np.ndarray:
            """Those of the active that go on; the others are asked for, or over."""
            going = active & (rows.lengths[self.completions] < rows.length)
            for row in self.completions[active]:
                if rows.tokens[row, rows.lengths[row] - 1] in call.eos_token_ids:
                    turn = rows.tokens[row, begins[row] : rows.lengths[row]]
                    promised[int(row)] = call.answers(int(row), turn, rows.length - int(rows.lengths[row]) - 1)
            return going & ~np.isin(self.completions, list(promised))

        active = note(self.completions >= 0)
        while active.any():
            call.interrupt()
            self._make_room(BURST)
            room = np.where(active, rows.length - rows.lengths[self.completions], 0)
            how = {"steps": BURST, "eos_token_ids": call.eos_token_ids, **call.how}
            given = split((active, room.astype(np.int32)), call.mesh)
            self.stream, _, drawn = draw_turn(call.model, call.variables, self.stream, *given, **how)
            rows.draw(self.completions, *fetch(drawn))
            active = note(active)
        return promised

    def _answer(self, promised: Mapping[int, Future[Sequence[int] | None]]) -> dict[int, Sequence[int]]:
        """The observations of those who go on; for the others this was the last turn."""
        rows, observed = self.call.rows, dict[int, Sequence[int]]()
        for row, promise in promised.items():
            tokens = _wait(promise, self.call.interrupt)
            if tokens is None:
                rows.ended[row] = True
            elif len(tokens) < rows.length - rows.lengths[row]:
                observed[row] = tokens
        self.completions = np.where(np.isin(self.completions, list(observed)), self.completions, -1)
        return observed

    def _read(self, observed: Mapping[int, Sequence[int]]) -> None:
        """Read the observations, behind the tokens that ended the turns, and draw the first tokens of the next."""
        if not observed:
            return
        call, rows = self.call, self.call.rows
        texts = {row: [int(rows.tokens[row, rows.lengths[row] - 1]), *tokens] for row, tokens in observed.items()}
        for row, more in observed.items():
            rows.observe(row, more)
        longest = max(map(len, texts.values()))
        size = min(CHUNK, 1 << max(1, (longest - 1).bit_length()))
        for start in range(0, longest, size):
            tokens = np.zeros((*self.completions.shape, size), np.int32)
            counts, last = np.zeros(self.completions.shape, np.int32), np.zeros(self.completions.shape, bool)
            for at in np.argwhere(self.completions >= 0):
                own, whole = tuple(at), texts[int(self.completions[tuple(at)])]
                part = whole[start : start + size]
                tokens[own][: len(part)], counts[own] = part, len(part)
                last[own] = start < len(whole) <= start + size
            given = split((tokens, counts, last), call.mesh)
            self.stream, token, log_prob = read_chunk(call.model, call.variables, self.stream, *given, **call.how)
            self._first(np.where(last, self.completions, -1), token, log_prob)

    def _first(self, completions: np.ndarray, token: jax.Array, log_prob: jax.Array) -> None:
        """Take in the first token of a turn."""
        token, log_prob = fetch((token, log_prob))
        drawn = np.ones((*completions.shape, 1), bool)
        self.call.rows.draw(completions, np.asarray(token)[..., None], np.asarray(log_prob)[..., None], drawn)

    def _slots(self, least: int) -> int:
        """The size of a cache with so many slots at least, and room for a chunk behind them."""
        sizes = (*self.ladder.slots[:-1], self.call.rows.length)
        chunk = min(CHUNK, 1 << max(3, (sizes[-1] - 1).bit_length()))  # no observation is as long as a completion
        return -(-next(n for n in sizes if n >= min(least, sizes[-1])) // ALIGNED) * ALIGNED + chunk

    def _make_room(self, more: int) -> None:
        """Slots for so many tokens more; fewer places, where few enough completions are left."""
        alive = self.completions >= 0
        if not alive.any():
            return
        chosen = None if self.at + 1 == len(self.ladder.shapes) else self.ladder.choose(self.at, alive)
        slots = max(self.slots, self._slots(int(self.call.rows.lengths[self.completions[alive]].max()) + more))
        if chosen is None and slots == self.slots:
            return
        everything = np.arange(alive.shape[0]), np.broadcast_to(np.arange(alive.shape[1]), alive.shape)
        groups, order = everything if chosen is None else chosen
        self.at, self.slots = self.at + (chosen is not None), slots
        self.stream = choose(self.stream, jnp.asarray(groups), jnp.asarray(order), slots=slots)
        self.completions = self.completions[groups[:, None], order]


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
    """Streams of [groups, width] completions: twice as many as work at a time, so that some can wait for answers."""
    if mesh is not None:
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
    sampling = Sampling(temperature, top_k, top_p, min_p)
    check_sampling(sampling)
    if not is_cached(model):
        raise ValueError(f"model is {type(model).__name__}: several turns need a model of this package, with its cache")
    b, mesh = prompts.tokens.shape[0], mesh_of(params)
    numbers = jnp.arange(b) if prompt_indices is None else jnp.asarray(prompt_indices)
    keys = completion_keys(key, numbers, num_generations)
    rows = _Rows(b * num_generations, int(max_completion_length), int(pad_token_id))
    eos = tuple(int(i) for i in eos_token_ids)
    failed = threading.Event()

    def interrupted() -> None:
        interrupt()
        if failed.is_set():
            raise _OtherFailed

    call = _Call(as_argument(model), params, prompts, keys, rows, answers, eos, sampling, interrupted, mesh)
    shards = shard_count(mesh)
    at_once = b if batch_size is None else max(1, min(b, batch_size // num_generations))
    at_once = -(-at_once // shards) * shards
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
