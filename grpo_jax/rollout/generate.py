"""Text generation: each prompt is prefilled once for its group, and a compiled decode loop draws the tokens.

Token t of completion (b, g) is drawn with the key fold_in(fold_in(fold_in(key, prompt_indices[b]), g), t). A sample
therefore does not depend on the other completions, the batch or the number of devices.

The device decodes bursts of a few steps (`decode`). Between bursts, the host (`_SingleTurnRollout`) moves the active
completions to smaller arrays or a larger cache, as planned in `decode_plan`.

Completions with several turns use the same compiled functions in a different loop (`turns`). There, each thread runs
a separate loop, so that one thread decodes while another waits for observations. Each completion also has its own start
slot. With one turn, all threads share one loop, because their completions move to smaller arrays together.
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
from grpo_jax.models.sharding import fetch, mesh_of, shape_structs, shard_count
from grpo_jax.models.threads import in_background, run_in_threads
from grpo_jax.rollout.decode import (
    DecodeState,
    Drawn,
    decode,
    generate_traced,
    generate_uncached,
    grow,
    prefill,
    rearrange,
)
from grpo_jax.rollout.decode_plan import decode_threads, groups_at_once, on_cpu, plan_decode
from grpo_jax.rollout.decode_weights import convert_weights
from grpo_jax.rollout.draw import completion_keys
from grpo_jax.rollout.ends import decode_settings
from grpo_jax.rollout.table import SamplingJob, TokenTable
from grpo_jax.types import Completions, Model, Params, Prompts, Tokenizer, as_jit_argument, is_builtin

if TYPE_CHECKING:
    from grpo_jax.rollout.turns import NextObservation

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
    next_observation: NextObservation | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
    on_tokens: OnTokens | None = None,
    as_numpy: bool = False,
) -> Completions:
    """Sample `num_generations` completions for each prompt.

    Arguments that are not listed here are documented in `GRPOConfig`.

    Args:
      model: a built-in model, or any `types.Model` with `apply`; the latter has no cache and is slow.
      params: model parameters.
      prompts: prompts with right-padded tokens [B, P] int32 and lengths [B].
      key: typed PRNG key. Completion (b, g) uses fold_in(fold_in(key, prompt_indices[b]), g); do not reuse the key.
      num_generations: number of completions per prompt, G ≥ 1.
      max_completion_length: maximum length T ≥ 1 in tokens, including observations. Longer completions are
        truncated. A completion is also truncated before an observation that would leave no space for another token.
      temperature: sampling temperature ≥ 0; 0 is greedy.
      eos_token_ids: token ids that end a turn. A sampled EOS is part of the turn.
      stop: strings that end a turn. A match may span tokens, but must be within one turn. The token that completes the
        match is part of the turn. Needs `tokenizer`.
      max_turn_length: number of tokens at which a turn is truncated and an observation follows. With one turn, T is at
        most `max_turn_length`. If None, `max_completion_length` is used.
      tokenizer: the model's tokenizer, needed for `stop`.
      pad_token_id: id of the token that pads a completion after its end.
      prompt_indices: [B] integers that, with `key`, determine the samples in any batch. 0..B-1 by default.
      batch_size: maximum number of completions that are decoded together, in whole groups, over all devices. The
        samples do not depend on it. If None, there is no limit. Ignored under `jit` and for models without a cache.
      next_observation: function that returns a future of the tokens after a turn, or of None after the last turn (see
        `turns.NextObservation`). If None, completions have one turn. Needs a built-in model; not supported under `jit`.
      check_interrupt: function called on the host every few tokens. If it raises an exception, sampling ends. Not
        called under `jit` or for models that are not built in.
      on_tokens: function called every few tokens with the tokens and the mask [B, G, T] drawn so far. Called only
        for single-turn completions of built-in models, outside `jit`.
      as_numpy: whether to return NumPy arrays instead of JAX arrays. Not supported under `jit`.

    Returns:
      `Completions` with the sampled tokens' log-probs, through which no gradient flows. With `next_observation`, `mask`
      is True on sampled tokens, `present` also on observed tokens, and `ended` where the last observation is None.

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
        least = f"{shards * num_generations}, one group of completions on each data-parallel device"
        raise ValueError(f"batch_size must be at least {least}; got {batch_size!r}.")
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, prompts, key)))
    if next_observation is not None and (traced or not is_builtin(model)):
        kind = f"{type(model).__name__} under jit" if traced else type(model).__name__
        raise ValueError(f"next_observation requires a built-in model and does not support jit; got {kind}.")
    groups, longest = prompts.tokens.shape[0], int(max_completion_length)
    turn_length = min(longest, int(max_turn_length or longest))
    keys = completion_keys(
        key, jnp.arange(groups) if prompt_indices is None else jnp.asarray(prompt_indices), num_generations
    )
    settings = decode_settings(
        sampling, eos_token_ids, pad_token_id, stop=stop, stop_token_ids=stop_token_ids, tokenizer=tokenizer
    )
    argument, params = as_jit_argument(model), jax.lax.stop_gradient(params) if traced else params
    if not is_builtin(model):
        completions = generate_uncached(argument, params, prompts, keys, settings=settings, length=turn_length)
        return fetch(completions) if as_numpy else completions
    if traced:
        return generate_traced(argument, params, prompts, keys, settings=settings, length=turn_length)
    table = TokenTable(keys.size, turn_length if next_observation is None else longest, settings.pad_token_id)
    variables = convert_weights(argument, params)  # with cast or column-major copies; see `decode_weights`
    settings = settings._replace(mesh=mesh)
    job = SamplingJob(argument, params, variables, prompts, keys, settings, table, check_interrupt)
    at_once = groups_at_once(groups, num_generations, batch_size, shards)
    if next_observation is None:
        completions = _sample_one_turn(job, at_once, on_tokens)
    else:
        from grpo_jax.rollout.turns import sample_turns

        completions = sample_turns(job, at_once, next_observation, turn_length)
    return completions if as_numpy else jax.tree.map(jnp.asarray, completions)


def _sample_one_turn(job: SamplingJob, at_once: int, on_tokens: OnTokens | None) -> Completions:
    """Sample single-turn completions and return NumPy arrays. `at_once` groups are decoded together."""
    (b, g), table = job.keys.shape, job.table
    for first in range(0, b, at_once):
        batch = _SingleTurnRollout(job, np.arange(first, first + at_once))
        while True:
            job.check_interrupt()
            if on_tokens is not None:
                on_tokens(table.tokens.reshape(b, g, -1), table.mask.reshape(b, g, -1))
            if not batch.active.any():
                break
            batch.compact()
            batch.decode()
        batch.record(in_flight=0)
    return table.to_completions(b)


class _SingleTurnRollout:
    """State, between bursts, of single-turn completions that are decoded together."""

    def __init__(self, job: SamplingJob, groups: np.ndarray):
        self.job, g, p = job, job.keys.shape[1], job.prompts.tokens.shape[1]
        self.plan = plan_decode(job.model, job.params, p, len(groups), g, job.table.length, mesh=job.mesh)
        self.shape_index, self.cache_size = 0, self.plan.cache_sizes[0]
        self.slot = 0  # next slot; `slot + 1` tokens have been drawn
        self.rows = job.rows(groups)  # [B', G'] table row of the completion at each position, −1 if it has ended
        self.bursts = collections.deque[tuple[np.ndarray, Sequence[Drawn]]]()  # bursts not yet recorded in the table
        self._on_cpu = on_cpu(job.params, job.mesh)

        def prefill_part(part: np.ndarray) -> DecodeResult:
            prompts, keys = job.inputs(part)
            return prefill(job.model, job.params, prompts, keys, settings=job.settings, slots=self.cache_size)

        job.check_interrupt()
        parts = np.split(groups, decode_threads(job.params, len(groups), g))
        with in_background(functools.partial(self._compile, parts[0])):
            self.states, drawn = self._run(prefill_part, parts)
        self._queue(self.rows, drawn)

    def _compile(self, part: np.ndarray) -> None:
        """Compile the first burst while the prompts are being prefilled. Does nothing on a mesh."""
        job, plan = self.job, self.plan
        if job.mesh is None:
            model, params, settings = job.model, job.params, job.settings
            shapes, _ = prefill.eval_shape(model, params, *job.inputs(part), settings=settings, slots=self.cache_size)
            state = shape_structs(shapes, placed_like=(params, model))
            burst = functools.partial(decode.lower, settings=settings, steps=plan.burst_steps, all_steps=plan.all_steps)
            burst(model, job.decode_variables, state, 0, 0).compile()

    @property
    def active(self) -> np.ndarray:
        """[B', G'] bool, False for completions that have ended, according to the recorded bursts."""
        return self.rows >= 0

    def compact(self) -> None:
        """Move to a smaller shape if a decode step would cost at most `MAX_STEP_COST_RATIO` times as much as now."""
        move = self.plan.smaller(self.shape_index, self.cache_size, self.active)
        if move is None:
            return
        self.shape_index, self.cache_size, (groups, order) = move
        self.rows = self.rows[groups[:, None], order]
        parts, mesh = decode_threads(self.job.params, len(groups), order.shape[1]), self.job.mesh
        kept = groups if mesh is None else None  # on a mesh, groups stay on their devices
        self.states = rearrange(self.states, kept, order, slots=self.cache_size, parts=parts, mesh=mesh)

    def decode(self) -> None:
        """Decode one burst. Grows the cache first if it is full. On a CPU, a burst ends when the cache is full."""
        job, plan = self.job, self.plan
        if self.slot >= self.cache_size < plan.cache_sizes[-1]:
            self.cache_size = plan.cache_sizes[plan.cache_sizes.index(self.cache_size) + 1]
            self.states = tuple(grow(state, slots=self.cache_size, mesh=job.mesh) for state in self.states)
        count = plan.burst_steps if plan.all_steps else min(plan.burst_steps, self.cache_size - self.slot)

        def decode_state(state: DecodeState) -> DecodeResult:
            burst = functools.partial(decode, settings=job.settings, steps=plan.burst_steps, all_steps=plan.all_steps)
            return burst(job.model, job.decode_variables, state, self.slot, count)

        self.states, drawn = self._run(decode_state, self.states)
        rows, self.slot = self.rows, self.slot + count
        if self.slot + 1 >= job.table.length:
            self.rows = np.full_like(rows, -1)
        self._queue(rows, drawn)

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
        """Record all bursts except the last `in_flight`, and mark the completions that have ended."""
        table = self.job.table
        while len(self.bursts) > in_flight:
            rows, drawn = self.bursts.popleft()
            joined = jax.tree.map(lambda *x: np.concatenate(x), *fetch(drawn))
            ended = table.record(rows, joined, self.job.settings)
            table.ended[rows[ended]] = True
            finished = rows[ended | (table.lengths[rows] == table.length)]
            self.rows = np.where(np.isin(self.rows, finished), -1, self.rows)
