"""Completions of prompts: each prompt read once, one compiled decode, rows that have ended left behind.

Every random number is found by counting. Row (b, g) of a call with `key` draws its token t with
fold_in(fold_in(fold_in(key, prompt_indices[b]), g), t). So a row's sample depends neither on the rows beside it nor on
how rows are laid out over devices, cut into batches, or moved together when others have ended.

Decoding goes in segments. Inside one, everything is on the device. Between two, the host looks which rows have ended,
moves the living ones of each group together into the next smaller bucket of rows, and grows the cache to the next
bucket of slots, so that attention never looks at slots that nobody has reached.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.log_probs import join_rows
from grpo_jax.models.attention import Cache, Prefix
from grpo_jax.sampling import Sampling, check_sampling, draw_tokens, greedy_tokens, process_logits, uniforms
from grpo_jax.streams import count_streams, run_in_streams
from grpo_jax.types import Completions, Model, Params, Prompts, as_argument

__all__ = ["generate", "row_keys"]

STREAM_ROWS = 32
"""Rows of one stream at least: fewer leave the matrix products too thin."""

SEGMENT = 32
"""Decode steps between two looks at which rows have ended."""


def row_keys(key: jax.Array, prompt_indices: jax.Array, num_generations: int) -> jax.Array:
    """One typed key a row, [B, G]: fold_in(fold_in(key, prompt_indices[b]), g)."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    fold = jax.random.fold_in
    rows = jnp.arange(num_generations)
    return jax.vmap(lambda b: jax.vmap(lambda g: fold(fold(key, b), g))(rows))(prompt_indices)


def _draw(u: jax.Array, logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    logits = process_logits(logits, **sampling._asdict())
    return greedy_tokens(logits) if sampling.temperature == 0 else draw_tokens(u, logits)


def _is_eos(tokens: jax.Array, eos_token_ids: tuple[int, ...]) -> jax.Array:
    ended = jnp.zeros(tokens.shape, bool)
    for eos in eos_token_ids:
        ended |= tokens == eos
    return ended


def _step_uniforms(keys: jax.Array, first: jax.Array | int, steps: int) -> jax.Array:
    """[steps, B, G, 2]: made for a whole segment at once, because one wide draw is cheaper than many narrow ones."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    counts = first + jnp.arange(steps)
    return jax.vmap(lambda t: uniforms(fold(keys.reshape(-1), t).reshape(keys.shape)))(counts)


@functools.partial(jax.jit, static_argnames=("eos_token_ids", "slots", "sampling"))
def _prefill(model, params, prompts, keys, *, eos_token_ids, slots, sampling):
    """Read the prompts and draw the first token of every row, from logits computed once a prompt."""
    b, g = keys.shape
    last, prefix = model.apply({"params": params}, prompts.tokens, prompts.lengths, method="prefill")
    logits = model.apply({"params": params}, last, method="unembed")
    logits = jnp.broadcast_to(logits[:, None], (b, g, logits.shape[-1]))
    tokens, log_probs = _draw(_step_uniforms(keys, 0, 1)[0], logits, sampling)

    heads, d = prefix.layers[0][0].shape[1::2]
    dtype = prefix.layers[0][0].dtype
    keys_of, values_of = (jnp.zeros((b, heads, g, *shape), dtype) for shape in ((d, slots), (slots, d)))
    cache = tuple((keys_of, values_of) for _ in prefix.layers)
    return prefix, cache, tokens, log_probs, _is_eos(tokens, eos_token_ids)


@functools.partial(
    jax.jit,
    static_argnames=("steps", "eos_token_ids", "pad_token_id", "sampling"),
    donate_argnames=("cache",),
)
def _decode(
    model, params, prefix, cache, token, ended, keys, first, count, *, steps, eos_token_ids, pad_token_id, sampling
):
    """Decode `count` ≤ `steps` tokens from index `first` on, of rows whose token before it is `token`.

    Stops early when all rows have ended. Returns the cache, the last token and the ended flag of each row, and tokens,
    log_probs and mask [B, G, steps].
    """
    b, g = token.shape
    u = _step_uniforms(keys, first, steps)
    tokens = jnp.full((steps, b, g), pad_token_id, jnp.int32)
    log_probs = jnp.zeros((steps, b, g), jnp.float32)
    mask = jnp.zeros((steps, b, g), bool)

    def unfinished(carry):
        i, _, _, ended, *_ = carry
        return (i < count) & ~ended.all()

    def step(carry):
        i, cache, token, ended, tokens, log_probs, mask = carry
        hidden, cache = model.apply(
            {"params": params}, token[:, :, None], prefix, cache, first + i - 1, method="hidden"
        )
        logits = model.apply({"params": params}, hidden[:, :, 0], method="unembed")
        drawn, log_prob = _draw(u[i], logits, sampling)
        drawn = jnp.where(ended, pad_token_id, drawn)
        tokens = tokens.at[i].set(drawn)
        log_probs = log_probs.at[i].set(jnp.where(ended, 0.0, log_prob))
        mask = mask.at[i].set(~ended)
        return i + 1, cache, drawn, ended | _is_eos(drawn, eos_token_ids), tokens, log_probs, mask

    carry = (jnp.int32(0), cache, token, ended, tokens, log_probs, mask)
    _, cache, token, ended, tokens, log_probs, mask = jax.lax.while_loop(unfinished, step, carry)
    rows_first = lambda x: jnp.moveaxis(x, 0, -1)
    return cache, token, ended, rows_first(tokens), rows_first(log_probs), rows_first(mask)


@functools.partial(jax.jit, static_argnames=("slots",))
def _grow(cache: Cache, *, slots: int) -> Cache:
    """The same keys and values with room for `slots` tokens."""
    more, rest = (0, slots - cache[0][1].shape[3]), ((0, 0),) * 3
    return tuple((jnp.pad(k, (*rest, (0, 0), more)), jnp.pad(v, (*rest, more, (0, 0)))) for k, v in cache)


@jax.jit
def _keep(cache: Cache, prefix: Prefix, token, ended, keys, groups, order):
    """Rows order [B', G'] of groups [B']."""
    own = lambda x: jnp.take_along_axis(x[groups], order[:, None, :, None, None], axis=2)
    rows = lambda x: jnp.take_along_axis(x[groups], order, axis=1)
    prefix = Prefix(jax.tree.map(lambda x: x[groups], prefix.layers), prefix.lengths[groups])
    return jax.tree.map(own, cache), prefix, rows(token), rows(ended), keys[groups[:, None], order]


def _bucket(n: int, largest: int) -> int:
    """The smallest of 1, 2, 4, … that holds n, at most `largest`."""
    return min(1 << max(0, n - 1).bit_length(), largest)


def _survivors(alive: np.ndarray, num_generations: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Which rows of alive [B', G'] to keep, as groups [B''] and order [B'', G'']; None to leave the layout as it is.

    Few layouts, so that few programs are compiled: groups stay whole while one of them has many rows alive, their width
    halving at each stage; below an eighth of `num_generations` rows stand alone, each with a copy of its prompt.
    """
    width = alive.shape[1]
    widest = _bucket(int(alive.sum(axis=1).max()), width)
    if width > 1 and widest * 8 > num_generations:
        order = np.argsort(~alive, axis=1, kind="stable")
        return None if widest == width else (np.arange(alive.shape[0]), order[:, :widest])
    flat = np.flatnonzero(alive)
    size = _bucket(len(flat), alive.size)
    if size == alive.size and width == 1:
        return None
    # Fillers are rows that have ended: they draw nothing.
    flat = np.concatenate([flat, np.flatnonzero(~alive)[: size - len(flat)]])
    return flat // width, (flat % width)[:, None]


def _generate_by_segments(model, params, prompts, keys, *, length, eos_token_ids, pad_token_id, sampling):
    """Decode in segments, moving living rows together between them: the tokens are those of one long decode."""
    b, g = keys.shape
    tokens = np.full((b * g, length), pad_token_id, np.int32)
    log_probs, mask = np.zeros((b * g, length), np.float32), np.zeros((b * g, length), bool)
    finished = np.zeros(b * g, bool)
    slots = max(1, min(SEGMENT, length - 1))
    prefix, cache, token, log_prob, ended = _prefill(
        model, params, prompts, keys, eos_token_ids=eos_token_ids, slots=slots, sampling=sampling
    )
    rows = np.arange(b * g).reshape(b, g)  # which row of the batch stands where; −1 for one that only fills the shape
    tokens[:, 0], log_probs[:, 0], mask[:, 0] = np.ravel(token), np.ravel(log_prob), True
    finished[:] = np.ravel(ended)
    done = 1
    while done < length and not finished.all():
        now = np.asarray(ended)
        rows = np.where(now, -1, rows)
        survivors = _survivors(rows >= 0, g)
        if survivors is not None:
            groups, order = survivors
            rows = rows[groups[:, None], order]
            cache, prefix, token, ended, keys = _keep(cache, prefix, token, ended, keys, groups, order)
        if done > slots:
            slots = min(2 * slots, length - 1)
            cache = _grow(cache, slots=slots)
        count = min(SEGMENT, slots + 1 - done)
        cache, token, ended, *new = _decode(
            model,
            params,
            prefix,
            cache,
            token,
            ended,
            keys,
            done,
            count,
            steps=SEGMENT,
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            sampling=sampling,
        )
        at = rows >= 0
        for whole, part in zip((tokens, log_probs, mask), new, strict=True):
            whole[rows[at], done : done + count] = np.asarray(part)[at][:, :count]
        finished[rows[at]] = np.asarray(ended)[at]
        done += count
    shape = (b, g, length)
    return Completions(
        tokens=jnp.asarray(tokens.reshape(shape)),
        mask=jnp.asarray(mask.reshape(shape)),
        log_probs=jnp.asarray(log_probs.reshape(shape)),
        ended=jnp.asarray(finished.reshape(b, g)),
    )


def _generate_in_one(model, params, prompts, keys, *, length, eos_token_ids, pad_token_id, sampling):
    """The same decode as one traced loop, for use inside someone else's `jit`."""
    slots = max(1, length - 1)
    prefix, cache, token, log_prob, ended = _prefill(
        model, params, prompts, keys, eos_token_ids=eos_token_ids, slots=slots, sampling=sampling
    )
    first = (token[..., None], log_prob[..., None], jnp.ones_like(ended)[..., None])
    if length > 1:
        _, _, ended, *rest = _decode(
            model,
            params,
            prefix,
            cache,
            token,
            ended,
            keys,
            1,
            length - 1,
            steps=length - 1,
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            sampling=sampling,
        )
        tokens, log_probs, mask = (jnp.concatenate(pair, axis=-1) for pair in zip(first, rest, strict=True))
    else:
        tokens, log_probs, mask = first
    return Completions(tokens=tokens, mask=mask, log_probs=log_probs, ended=ended)


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
      top_k, top_p, min_p: see `sampling.process_logits`.
      eos_token_ids: any number of token ids that end a row; the one that was drawn belongs to the completion.
      pad_token_id: what stands after the end of a row.
      prompt_indices: [B] integers that number the prompts in the key derivation, by default 0..B-1. A prompt keeps its
        samples wherever it stands, if it keeps its number.

    Returns:
      `Completions`, with the log-probs that the tokens were drawn with. No gradient flows through them.

    Raises:
      ValueError: shapes, counts or sampling settings that make no sense.

    Example:
      >>> import jax
      >>> from grpo_jax.models.transformer import Transformer, TransformerConfig
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
    if prompt_indices is None:
        prompt_indices = jnp.arange(prompts.tokens.shape[0])
    keys = row_keys(key, jnp.asarray(prompt_indices), num_generations)
    settings: dict[str, Any] = {
        "length": int(max_completion_length),
        "eos_token_ids": tuple(int(i) for i in eos_token_ids),
        "pad_token_id": int(pad_token_id),
        "sampling": Sampling(float(temperature), int(top_k), float(top_p), None if min_p is None else float(min_p)),
    }
    if not hasattr(model, "prefill"):
        return _generate_uncached(as_argument(model), params, prompts, keys, **settings)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, prompts, key))):
        return _generate_in_one(as_argument(model), params, prompts, keys, **settings)

    def part(at: slice) -> Completions:
        some = jax.tree.map(lambda x: x[at], prompts)
        return _generate_by_segments(as_argument(model), params, some, keys[at], **settings)

    groups = keys.shape[0]
    most = count_streams(params, min(groups, keys.size // STREAM_ROWS))
    streams = max(n for n in range(1, most + 1) if groups % n == 0)
    size = groups // streams
    done = run_in_streams(part, [slice(i * size, (i + 1) * size) for i in range(streams)])
    return done[0] if streams == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *done)
