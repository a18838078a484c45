"""Completions of prompts: each prompt read once, one compiled decode, rows that have ended left behind.

Every random number is found by counting. Row (b, g) of a call with `key` draws its token t with
fold_in(fold_in(fold_in(key, prompt_indices[b]), g), t). So a row's sample depends neither on the rows beside it nor on
how rows are laid out over devices, cut into batches, or moved together when others have ended.

Decoding goes in segments. Inside one, everything is on the device. Between two, the host looks which rows have ended,
and gives their places to prompts that wait. Once none waits, it moves the living rows together into the layout that
costs least. It grows the cache to the next bucket of slots, so that attention looks at few slots that nobody has
reached. All rows write their keys to the same slot; one that came later begins in a later slot:

```
slot        0 1 2 3 4 5 6 7
group 0     a b c d e · · ·     start 0
group 1     · · x y z · · ·     start 2, in the place of a group that ended after slot 1
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.devices.sharding import fetch, mesh_of, shard_count, split
from grpo_jax.devices.streams import run_in_streams
from grpo_jax.maths.sampling import Sampling, check_sampling
from grpo_jax.rollout.decode import (
    FEWEST_SLOTS,
    SEGMENT,
    _decode,
    _draw,
    _grow,
    _is_eos,
    _narrow,
    _prefill,
    _rearrange,
    _step_uniforms,
    _variables,
    row_keys,
)
from grpo_jax.rollout.layout import Drawn, _decode_step, _narrower, _Rows, _streams, _survivors, _Table, places
from grpo_jax.types import Completions, Model, Params, Prompts, as_argument, is_cached, join_rows

__all__ = [
    "generate",
]


def _generate_by_segments(model, params, prompts, keys, *, length, at_once, interrupt, **settings):
    """Decode in segments, moving living rows together between them: the tokens are those of one long decode.

    At most `at_once` groups stand on the device; the others wait, and enter some at a time. On a mesh, where each
    device has its own groups, rows are moved together inside them, and those that wait enter when all have ended.
    """
    b, g = keys.shape
    mesh = mesh_of(params)
    if mesh is not None and at_once < b:
        how = {"length": length, "at_once": at_once, "interrupt": interrupt, **settings}
        waves = [jax.tree.map(lambda x, i=i: x[i : i + at_once], (prompts, keys)) for i in range(0, b, at_once)]
        done = [_generate_by_segments(model, params, *wave, **how) for wave in waves]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *done)
    table = _Table(b * g, length, settings["pad_token_id"], settings["eos_token_ids"])
    variables = _variables(model, params)
    # Attention looks at all slots, so they grow with the rows, by few sizes.
    slots = min(max(FEWEST_SLOTS, -(-length // 4)), max(1, length - 1))
    shape = (prompts.tokens.shape[1], jax.tree.structure(model))

    def enter(first: int, count: int, slot: int) -> tuple[list[_Rows], np.ndarray, np.ndarray]:
        """Lanes of the next `count` prompts, with one token of each row; their rows, −1 where there are none."""
        interrupt()
        numbers = np.arange(first, first + count)
        parts = _streams(params, count, g)
        some = [np.minimum(part, b - 1) for part in np.split(numbers, parts)]

        def prefill(at: np.ndarray) -> tuple[_Rows, Drawn]:
            own = split(jax.tree.map(lambda x: x[at], (prompts, keys)), mesh)
            return jax.block_until_ready(_prefill(model, params, *own, slot, slots=slots, mesh=mesh, **settings))

        results = run_in_streams(prefill, some, program=("prefill", count, parts, g, slots, *shape))
        rows = np.where(numbers < b, numbers, -b)[:, None] * g + np.arange(g)
        alive = table.note(np.maximum(rows, -1), np.zeros(count, int), _on_host(results), 1)
        return [lane for lane, _ in results], np.where(alive, rows, -1), np.ones(count, int)

    lanes, rows, drawn = enter(0, at_once, 0)
    slot, entered, some = 0, at_once, max(1, at_once // 4)
    while True:
        interrupt()
        empty = ~(rows >= 0).any(axis=1)
        order, survivors = None, None
        if entered >= b and not empty.all():
            step = _decode_step(model, params, lanes[0])
            if mesh is None:
                survivors = _survivors(rows >= 0, step)
            elif (kept := _narrower(rows >= 0, step, shard_count(mesh))) is not None:
                lanes = [_narrow(lane, kept, mesh=mesh) for lane in lanes]
                rows = np.take_along_axis(rows, kept, axis=1)
        if entered < b and empty.sum() >= some:
            new, new_rows, new_drawn = enter(entered, some, slot)
            lanes, entered = [*lanes, *new], entered + some
            rows, drawn = np.concatenate([rows, new_rows]), np.concatenate([drawn, new_drawn])
            groups = np.argsort(np.append(empty, np.zeros(some, bool)), kind="stable")[:at_once]
            order = np.broadcast_to(np.arange(g), (at_once, g))
        elif empty.all():
            break
        elif survivors is not None:
            groups, order = survivors
        elif slot >= slots and mesh is not None:
            slots = min(2 * slots, length - 1)
            lanes = [_grow(lane, slots=slots) for lane in lanes]
        elif slot >= slots:
            groups, order = np.arange(len(rows)), np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
        if order is not None:
            rows, drawn = rows[groups[:, None], order], drawn[groups]
            alive = (rows >= 0).any(axis=1)
            shift = slot + 1 - int(drawn[alive].max(initial=1))
            slot -= shift
            if slot >= slots:
                slots = min(2 * slots, length - 1)
            parts = _streams(params, *rows.shape)
            lanes = list(_rearrange(tuple(lanes), groups, order, shift, slots=slots, parts=parts))
            if not alive.any():
                continue
        count = min(SEGMENT, slots - slot, length - int(drawn[(rows >= 0).any(axis=1)].min()))

        def decode(lane: _Rows, slot: int = slot, count: int = count) -> tuple[_Rows, Drawn]:
            part = (lane.cache, lane.replace(cache=None), slot, count)
            return jax.block_until_ready(_decode(model, variables, *part, steps=SEGMENT, **settings))

        results = run_in_streams(decode, lanes, program=("decode", *rows.shape, len(lanes), slots, *shape))
        lanes = [lane for lane, _ in results]
        rows = np.where(table.note(rows, drawn, _on_host(results), count), rows, -1)
        drawn, slot = drawn + count, slot + count
    arrays = (table.tokens, table.mask, table.log_probs)
    tokens, mask, log_probs = (jnp.asarray(x.reshape(b, g, length)) for x in arrays)
    return Completions(tokens, mask, log_probs, jnp.asarray(table.finished.reshape(b, g)))


def _on_host(results: Sequence[tuple[_Rows, Drawn]]) -> Any:
    """What the lanes drew, [B', G', steps]."""
    drawn = zip(*(fetch(x) for _, x in results), strict=True)
    return tuple(np.concatenate(parts) for parts in drawn)


def _generate_in_one(model, params, prompts, keys, *, length, **settings):
    """The same decode as one traced loop, for use inside someone else's `jit`."""
    rows, first = _prefill(model, params, prompts, keys, 0, slots=max(1, length - 1), **settings)
    if length > 1:
        rows, rest = _decode(
            model, {"params": params}, rows.cache, rows.replace(cache=None), 0, length - 1, steps=length - 1, **settings
        )
        first = tuple(jnp.concatenate(pair, axis=-1) for pair in zip(first, rest, strict=True))
    tokens, log_probs, mask = first
    return Completions(tokens=tokens, mask=mask, log_probs=log_probs, ended=rows.ended)


@functools.partial(jax.jit, static_argnames=("length", "eos_token_ids", "pad_token_id", "sampling"))
def _generate_uncached(model, params, prompts, keys, *, length, eos_token_ids, pad_token_id, sampling):
    """For a model that has `apply` and nothing else: the whole row is read again for every token."""
    b, g = keys.shape

    def step(t, carry):
        tokens, log_probs, mask, ended = carry
        rows, start = join_rows(prompts, tokens)
        logits = model.apply({"params": params}, rows)
        at = (start - 1 + t)[:, None, None]
        logits = jnp.take_along_axis(logits, at, axis=1)[:, 0].reshape(b, g, -1)
        drawn, log_prob = _draw(_step_uniforms(keys, t, 1)[0], logits, sampling)
        drawn = jnp.where(ended, pad_token_id, drawn)
        tokens = tokens.at[:, :, t].set(drawn)
        log_probs = log_probs.at[:, :, t].set(jnp.where(ended, 0.0, log_prob))
        return tokens, log_probs, mask.at[:, :, t].set(~ended), ended | _is_eos(drawn, eos_token_ids)

    start = (
        jnp.full((b, g, length), pad_token_id, jnp.int32),
        jnp.zeros((b, g, length), jnp.float32),
        jnp.zeros((b, g, length), bool),
        jnp.zeros((b, g), bool),
    )
    tokens, log_probs, mask, ended = jax.lax.fori_loop(0, length, step, start)
    return Completions(tokens=tokens, mask=mask, log_probs=log_probs, ended=ended)


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
    pad_token_id: int = 0,
    prompt_indices: jax.Array | np.ndarray | None = None,
    batch_size: int | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> Completions:
    """Sample `num_generations` completions of each prompt.

    Args:
      model: a model of this package, or any `apply` by `types.Model` (then without a cache, and slow).
      params: its parameters.
      prompts: tokens [B, P] int32 right-padded, lengths [B].
      key: a typed PRNG key, consumed; row (b, g) uses fold_in(fold_in(key, prompt_indices[b]), g).
      num_generations: G ≥ 1.
      max_completion_length: T ≥ 1, in tokens; a row that has not drawn an EOS by then is truncated.
      temperature: ≥ 0; 0 is greedy.
      top_k: see `sampling.process_logits`.
      top_p: likewise.
      min_p: likewise.
      eos_token_ids: any number of token ids that end a row; the one that was drawn belongs to the completion.
      pad_token_id: what stands after the end of a row.
      prompt_indices: [B] integers that number the prompts in the key derivation, by default 0..B-1. A prompt keeps its
        samples wherever it stands, if it keeps its number.
      batch_size: completions that are decoded at a time, in whole groups; further prompts wait and take the places of
        those that have ended, which changes no sample. On a mesh as many groups on each device as it holds, one at
        least, and the next ones begin when all of these have ended. None: all at once. Not inside a `jit`.
      interrupt: called on the host every few tokens; what it raises ends the sampling. Not inside a `jit`.

    Returns:
      `Completions`, with the log-probs that the tokens were drawn with. No gradient flows through them.

    Raises:
      ValueError: shapes, counts or sampling settings that make no sense.

    Example:
      >>> import jax
      >>> from grpo_jax.models.transformer import Transformer
      >>> from grpo_jax.models.layers import TransformerConfig
      >>> model = Transformer(TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> prompts = Prompts(jax.numpy.ones((2, 3), "int32"), jax.numpy.array([3, 2]))
      >>> params = model.init(jax.random.key(0), prompts.tokens)["params"]
      >>> completions = generate(model, params, prompts, jax.random.key(1), num_generations=4, max_completion_length=6)
      >>> completions.tokens.shape
      (2, 4, 6)
    """
    check_sampling(temperature, top_k, top_p, min_p)
    if prompts.tokens.ndim != 2 or prompts.lengths.shape != prompts.tokens.shape[:1]:
        raise ValueError(
            f"prompts must have tokens [B, P] and lengths [B]; got {prompts.tokens.shape} and {prompts.lengths.shape}."
        )
    for name, value in (("num_generations", num_generations), ("max_completion_length", max_completion_length)):
        if int(value) != value or value < 1:
            raise ValueError(f"{name} must be an integer ≥ 1; got {value!r}.")
    shards = shard_count(mesh_of(params))
    if batch_size is not None and batch_size < shards * num_generations:
        each = f" on each of the {shards} devices that prompts are cut over" if shards > 1 else ""
        raise ValueError(f"batch_size must hold a group of {num_generations} completions{each}; got {batch_size!r}.")
    if prompt_indices is None:
        prompt_indices = jnp.arange(prompts.tokens.shape[0])
    keys = row_keys(key, jnp.asarray(prompt_indices), num_generations)
    settings: dict[str, Any] = {
        "length": int(max_completion_length),
        "eos_token_ids": tuple(int(i) for i in eos_token_ids),
        "pad_token_id": int(pad_token_id),
        "sampling": Sampling(float(temperature), int(top_k), float(top_p), None if min_p is None else float(min_p)),
    }
    if not is_cached(model):
        return _generate_uncached(as_argument(model), params, prompts, keys, **settings)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, prompts, key))):
        return _generate_in_one(as_argument(model), params, prompts, keys, **settings)

    how: dict[str, Any] = {"at_once": places(len(keys), num_generations, batch_size, shards), "interrupt": interrupt}
    return _generate_by_segments(as_argument(model), params, prompts, keys, **how, **settings)
