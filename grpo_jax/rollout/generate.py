"""Text generation: each prompt is prefilled once per group, and a compiled decode loop draws the tokens.

Token t of completion (b, g) is drawn with the key fold_in(fold_in(fold_in(key, prompt_indices[b]), g), t). A sample
therefore does not depend on the other completions, the batch or the number of devices.

The device decodes bursts of a few steps (`decode`). Between bursts, the host (`_SingleTurnRollout`) replaces ended
completions with waiting prompts. If no prompts are waiting, it moves the remaining completions to a smaller layout
(`layouts`). The cache grows in a few steps, or is a ring buffer if prompts are waiting. At each step, all completions
write to the same slot, so a group that starts later has a later first slot:

```
slot        0 1 2 3 4 5 6 7
group 0     a b c d e · · ·     start 0
group 1     · · x y z · · ·     start 2; replaces a group that ended in slot 1
group 2     s t u · · · q r     start 6; slots 8, 9 and 10 wrap around to 0, 1 and 2
```

Completions with several turns use the same compiled functions in a different loop (`turns`). There, each thread runs
a separate loop, so that one thread decodes while another waits for answers, and each completion has its own start
slot. With one turn, all threads share one loop, because their completions move to smaller layouts together.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.maths.sampling import Sampling, check_sampling
from grpo_jax.models.sharding import abstract_from, fetch, mesh_of, shard_count
from grpo_jax.models.threads import in_background, run_in_threads
from grpo_jax.rollout.decode import (
    DecodeState,
    Drawn,
    concatenate,
    decode,
    decode_burst,
    generate_traced,
    generate_uncached,
    grow,
    prefill,
    rearrange,
    refill,
)
from grpo_jax.rollout.draw import completion_keys
from grpo_jax.rollout.ends import decode_settings
from grpo_jax.rollout.layouts import choose_layouts, decode_threads, groups_at_once, on_cpu
from grpo_jax.rollout.programs import decode_variables
from grpo_jax.rollout.table import SamplingJob, Table
from grpo_jax.types import Completions, Model, Params, Prompts, Tokenizer, as_argument, is_builtin

if TYPE_CHECKING:
    from grpo_jax.rollout.turns import AnswerTurn

Item = TypeVar("Item")
DecodeResult = tuple[DecodeState, Drawn]
"""An updated state and the drawn tokens."""

OnTokens = Callable[[np.ndarray, np.ndarray], None]
"""A callback that receives the tokens and the mask [B, G, T] drawn so far."""


def generate(
    model: Model,
    params: Params,
    prompts: Prompts,
    key: jax.Array,
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
    answer_turn: AnswerTurn | None = None,
    interrupt: Callable[[], None] = lambda: None,
    on_tokens: OnTokens | None = None,
    on_host: bool = False,
) -> Completions:
    """Sample `num_generations` completions for each prompt.

    Arguments that are not listed here are documented in `GRPOConfig`.

    Args:
      model: a built-in model, or any `types.Model` with `apply`; the latter has no cache and is slow.
      params: model parameters.
      prompts: prompts with right-padded tokens [B, P] int32 and lengths [B].
      key: typed PRNG key. Completion (b, g) uses fold_in(fold_in(key, prompt_indices[b]), g); do not reuse the key.
      num_generations: number of completions per prompt, G ≥ 1.
      max_completion_length: maximum length T ≥ 1 in tokens, including observations. A completion without an EOS is
        truncated there, or at an observation that leaves no space for another token.
      temperature: sampling temperature ≥ 0; 0 is greedy.
      eos_token_ids: token ids that end a turn. A sampled EOS is part of the turn.
      stop: strings that end a turn. A match may span tokens, but must be within one turn. The token that completes the
        match is part of the turn. Needs `tokenizer`.
      max_turn_length: number of tokens at which a turn is truncated and then answered. With one turn, it is the maximum
        length T. If None, `max_completion_length` is used.
      tokenizer: the model's tokenizer, needed for `stop`.
      pad_token_id: id of the token that pads a completion after its end.
      prompt_indices: [B] integers used to derive the keys, 0..B-1 by default. A prompt with a given index has the same
        samples in any batch.
      batch_size: maximum number of completions that are decoded at the same time, in whole groups, over all devices.
        The other prompts wait. This does not change the samples. If None, there is no limit. Not supported under `jit`.
      answer_turn: function that returns the tokens after a turn, or None after the last turn. If `answer_turn` is None,
        completions have one turn. Needs a built-in model; not supported under `jit`.
      interrupt: function called on the host every few tokens. If it raises an exception, sampling ends. Not
        supported under `jit`.
      on_tokens: function called every few tokens with the tokens and the mask [B, G, T] drawn so far. On a mesh, it
        receives only the prompts that are decoded together. Supported only for single-turn completions.
      on_host: whether to return NumPy arrays instead of JAX arrays. Not supported under `jit`.

    Returns:
      `Completions` with the sampled tokens' log-probs, through which no gradient flows. With `answer_turn`, `mask`
      is True on sampled tokens, `present` also on observed tokens, and `ended` where `answer_turn` returned None.

    Raises:
      ValueError: if a shape, count or sampling setting is invalid.

    Example:
      >>> import jax
      >>> from grpo_jax.models.transformer import Transformer
      >>> from grpo_jax.models.config import TransformerConfig
      >>> model = Transformer(TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> prompts = Prompts(jax.numpy.ones((2, 3), "int32"), jax.numpy.array([3, 2]))
      >>> params = model.init(jax.random.key(0), prompts.tokens)["params"]
      >>> completions = generate(model, params, prompts, jax.random.key(1), num_generations=4, max_completion_length=6)
      >>> completions.tokens.shape
      (2, 4, 6)
    """
    sampling, mesh = Sampling(temperature, top_k, top_p, min_p), mesh_of(params)
    shards = shard_count(mesh)
    check_sampling(sampling)
    if prompts.tokens.ndim != 2 or prompts.lengths.shape != prompts.tokens.shape[:1]:
        shapes = f"{prompts.tokens.shape} and {prompts.lengths.shape}"
        raise ValueError(f"prompts must have tokens [B, P] and lengths [B]; got {shapes}.")
    sizes = {"num_generations": num_generations, "max_completion_length": max_completion_length}
    for name, value in (sizes | {"max_turn_length": 1 if max_turn_length is None else max_turn_length}).items():
        if int(value) != value or value < 1:
            raise ValueError(f"{name} must be an integer ≥ 1; got {value!r}.")
    if batch_size is not None and batch_size < shards * num_generations:
        per_thread = f" on each of the {shards} data-parallel devices" if shards > 1 else ""
        least = f"{shards * num_generations}, one group of completions{per_thread}"
        raise ValueError(f"batch_size must be at least {least}; got {batch_size!r}.")
    if answer_turn is not None and not is_builtin(model):
        kind = type(model).__name__
        raise ValueError(f"model must be a built-in model if completions have several turns; got {kind}.")
    groups, longest = prompts.tokens.shape[0], int(max_completion_length)
    turn_length = min(longest, int(max_turn_length or longest))
    keys = completion_keys(
        key, jnp.arange(groups) if prompt_indices is None else jnp.asarray(prompt_indices), num_generations
    )
    settings = decode_settings(
        sampling, eos_token_ids, pad_token_id, stop=stop, stop_token_ids=stop_token_ids, tokenizer=tokenizer
    )
    argument = as_argument(model)
    if not is_builtin(model):
        completions = generate_uncached(argument, params, prompts, keys, settings=settings, length=turn_length)
        return fetch(completions) if on_host else completions
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, prompts, key))):
        return generate_traced(argument, params, prompts, keys, settings=settings, length=turn_length)
    table = Table(keys.size, turn_length if answer_turn is None else longest, settings.pad_token_id)
    variables = decode_variables(argument, params)
    settings = settings._replace(mesh=mesh)
    job = SamplingJob(argument, params, variables, prompts, keys, settings, table, interrupt)
    at_once = groups_at_once(groups, num_generations, batch_size, shards)
    if answer_turn is None:
        completions = _sample_one_turn(job, at_once, on_tokens)
    else:
        from grpo_jax.rollout.turns import sample_turns

        completions = sample_turns(job, at_once, answer_turn, turn_length)
    return completions if on_host else jax.tree.map(jnp.asarray, completions)


def _sample_one_turn(job: SamplingJob, at_once: int, on_tokens: OnTokens | None) -> Completions:
    """Sample single-turn completions as NumPy arrays. At most `at_once` groups are decoded at the same time."""
    (b, g), table = job.keys.shape, job.table
    if job.mesh is not None and at_once < b:  # groups cannot change devices, so batches run one after another
        parts = [job.part(first, first + at_once) for first in range(0, b, at_once)]
        return concatenate([_sample_one_turn(part, at_once, on_tokens) for part in parts], np)
    batch = _SingleTurnRollout(job, at_once)
    while True:
        job.interrupt()
        if on_tokens is not None:
            on_tokens(table.tokens.reshape(b, g, -1), table.mask.reshape(b, g, -1))
        if not batch.refill():
            if batch.empty.all():
                batch.record(in_flight=0)
                return table.to_completions(b)
            if not batch.prompts_wait:
                batch.compact()
        if not batch.empty.all():  # the first token may have ended all new completions
            batch.decode()


class _SingleTurnRollout:
    """State of a single-turn rollout between bursts."""

    def __init__(self, job: SamplingJob, groups: int):
        (b, g), p = job.keys.shape, job.prompts.tokens.shape[1]
        self.job, self.next_group = job, groups  # index of the first waiting prompt
        length, mesh, waiting = job.table.length, job.mesh, groups < b
        self.layouts = choose_layouts(job.model, job.params, p, groups, g, length, mesh=mesh, prompts_wait=waiting)
        self.layout, self.slots = 0, self.layouts.slots[0]  # index of the layout; cache size
        self.slot = 0  # next slot, before reduction modulo the ring size
        # [B', G'] table row of the completion at each position, −1 if empty; [B'] number of tokens drawn in each group
        self.rows, self.drawn = job.rows(np.arange(groups)), np.ones(groups, int)
        self.bursts = collections.deque[tuple[np.ndarray, Sequence[Drawn]]]()  # bursts not yet recorded in the table
        self._on_cpu = on_cpu(job.params, job.mesh)

        def begin(part: np.ndarray) -> DecodeResult:
            prompts, keys = job.inputs(part)
            return prefill(job.model, job.params, prompts, keys, 0, settings=job.settings, slots=self.slots)

        job.interrupt()
        parts = np.split(np.arange(groups), decode_threads(job.params, groups, g))
        with in_background(functools.partial(self._compile, parts[0])):
            self.states, drawn = self._run(begin, parts)
        self._queue(self.rows, drawn)

    def _compile(self, part: np.ndarray) -> None:
        """Compile the first burst while the prompts are prefilled. Does nothing on a mesh."""
        job, layouts = self.job, self.layouts
        if job.mesh is None:
            model, params, settings = job.model, job.params, job.settings
            shapes, _ = prefill.eval_shape(model, params, *job.inputs(part), 0, settings=settings, slots=self.slots)
            state = abstract_from(shapes, (params, model))
            burst = functools.partial(decode_burst.lower, settings=settings, steps=layouts.steps, fixed=layouts.fixed)
            burst(model, job.decode_variables, state.cache, state.replace(cache=()), 0, 0).compile()

    @property
    def empty(self) -> np.ndarray:
        """[B'] bool, True for groups in which all completions have ended, according to the recorded bursts."""
        return np.logical_not((self.rows >= 0).any(axis=1))

    @property
    def prompts_wait(self) -> bool:
        """Whether some prompts have not been prefilled yet."""
        return self.next_group < len(self.job.keys)

    def refill(self) -> bool:
        """Refill states that have enough ended groups with waiting prompts. Returns whether any were refilled."""
        job, size = self.job, len(self.rows) // len(self.states)
        count = max(1, size // 4)  # number of prompts per refill; with fewer, the call costs more than it saves
        self.rows = self.rows.copy()  # `bursts` holds references to the old array
        refills = []
        for i, empty in enumerate(np.split(self.empty, len(self.states))):
            if empty.sum() >= count and self.prompts_wait:
                groups, indices = np.arange(self.next_group, self.next_group + count), np.flatnonzero(empty)[:count]
                self.rows[i * size + indices], self.drawn[i * size + indices] = job.rows(groups), 1
                self.next_group += count
                refills.append((i, groups, indices))

        def refill_state(entry: tuple[int, np.ndarray, np.ndarray]) -> DecodeResult:
            i, groups, indices = entry
            prompts, keys = job.inputs(groups)
            cache, state = self.states[i].cache, self.states[i].replace(cache=())
            state, drawn = refill(
                job.model, job.params, state, prompts, keys, indices, self.slot, settings=job.settings
            )
            return state.replace(cache=cache), drawn

        if not refills:
            return False
        job.interrupt()
        refilled, drawn = self._run(refill_state, refills)
        new = {i: state for (i, _, _), state in zip(refills, refilled, strict=True)}
        self.states = tuple(new.get(i, state) for i, state in enumerate(self.states))
        self._queue(self.rows[np.concatenate([i * size + indices for i, _, indices in refills])], drawn)
        return True

    def compact(self) -> None:
        """Move to a smaller layout if it can hold all active completions and is sufficiently cheaper."""
        move = self.layouts.smaller(self.layout, self.slots, self.rows >= 0)
        if move is None:
            return
        self.layout, self.slots, (groups, order) = move
        self.rows, self.drawn = self.rows[groups[:, None], order], self.drawn[groups]
        parts, mesh = decode_threads(self.job.params, len(groups), order.shape[1]), self.job.mesh
        kept = groups if mesh is None else None  # on a mesh, groups stay on their devices
        self.states = rearrange(self.states, kept, order, slots=self.slots, parts=parts, mesh=mesh)

    def decode(self) -> None:
        """Decode one burst, after growing a full cache. A burst is shorter near the cache's end or the length T."""
        job, layouts, last, settings = self.job, self.layouts, self.layouts.slots[-1], self.job.settings
        if self.slot >= self.slots < last:
            self.slots = layouts.slots[layouts.slots.index(self.slots) + 1]
            self.states = tuple(grow(state, slots=self.slots, mesh=job.mesh) for state in self.states)
        count = layouts.steps
        if not layouts.fixed:
            left = job.table.length - int(self.drawn[~self.empty].min())
            count = min(count, left if self.slots == last else min(left, self.slots - self.slot))

        def draw(state: DecodeState) -> DecodeResult:
            burst = functools.partial(decode, settings=settings, steps=layouts.steps, fixed=layouts.fixed)
            return burst(job.model, job.decode_variables, state, self.slot, count)

        self.states, drawn = self._run(draw, self.states)
        before = self.rows
        self.drawn, self.slot = self.drawn + count, self.slot + count
        self.rows = np.where(self.drawn[:, None] < job.table.length, self.rows, -1)
        self._queue(before, drawn)

    def _run(
        self, program: Callable[[Item], DecodeResult], items: Sequence[Item]
    ) -> tuple[tuple[DecodeState, ...], list[Drawn]]:
        """Call a function for each item in parallel. On a CPU, wait until the results are ready."""
        results = run_in_threads(program, items)
        if self._on_cpu:
            jax.block_until_ready(results)
        return tuple(state for state, _ in results), [drawn for _, drawn in results]

    def _queue(self, rows: np.ndarray, drawn: Sequence[Drawn]) -> None:
        """Queue drawn tokens to be recorded later, while an accelerator decodes the next burst."""
        for x in jax.tree.leaves(drawn):
            if x.is_fully_addressable:
                x.copy_to_host_async()
        self.bursts.append((rows, drawn))
        self.record(in_flight=0 if self._on_cpu else 1)

    def record(self, *, in_flight: int = 0) -> None:
        """Record all bursts except the last `in_flight`, and mark the positions of ended completions as empty."""
        table = self.job.table
        while len(self.bursts) > in_flight:
            rows, drawn = self.bursts.popleft()
            ended = table.record(rows, concatenate(fetch(drawn), np), self.job.settings)
            table.ended[rows[ended]] = True
            finished = rows[ended | (table.lengths[rows] == table.length)]
            self.rows = np.where(np.isin(self.rows, finished), -1, self.rows)
