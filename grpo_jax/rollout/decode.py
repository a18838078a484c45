"""Reading prompts and drawing tokens: the compiled parts of a rollout."""

from __future__ import annotations

import functools
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp

from grpo_jax.devices.sharding import constrain, for_lookup, split_sharding
from grpo_jax.devices.streams import devices_of, shared
from grpo_jax.maths.sampling import Sampling, draw_tokens, greedy_tokens, process_logits, uniforms
from grpo_jax.models.attention import Cache, Prefix
from grpo_jax.models.transformer import kernels_by_columns
from grpo_jax.types import Model, Params, Prompts, as_argument, is_cached

FEWEST_SLOTS = 64
"""Slots of a cache at least."""

BURST = 16
"""Decode steps of one call, between two looks at which completions have ended."""


class Stream(flax.struct.PyTreeNode):
    """Completions that are decoded together, as they stand on the device.

    Attributes:
      prefix: of the prompts, B of them.
      cache: own keys and values, `_without_ones`.
      token: [B, G] the last token of each completion.
      ended: [B, G] whether that was its last.
      keys: [B, G] typed keys.
      start: [B] int32, slot of the cache in which the completions of each prompt begin.
    """

    prefix: Prefix
    cache: Cache
    token: jax.Array
    ended: jax.Array
    keys: jax.Array
    start: jax.Array


Drawn = tuple[jax.Array, jax.Array, jax.Array]
"""Tokens, log-probs and mask, each [B, G, steps]."""


@functools.partial(jax.jit, static_argnames=("num_generations",))
def completion_keys(key: jax.Array, prompt_indices: jax.Array, num_generations: int) -> jax.Array:
    """One typed key per completion, [B, G]: fold_in(fold_in(key, prompt_indices[b]), g)."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    fold = jax.random.fold_in
    group = jnp.arange(num_generations)
    return jax.vmap(lambda b: jax.vmap(lambda g: fold(fold(key, b), g))(group))(prompt_indices)


def draw(u: jax.Array, logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Tokens and log-probs [B, G] drawn from logits [B, G, V], with uniforms [B, G, 2]."""
    logits = process_logits(logits, sampling)
    return greedy_tokens(logits) if sampling.temperature == 0 else draw_tokens(u, logits)


def _draw_next(
    model: Any, variables: Any, u: jax.Array, hidden: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Tokens and log-probs [B, G] that follow hidden states [B, G, D], with uniforms [B, G, 2]."""

    def by_rows(u, hidden):
        return draw(u, model.apply(variables, hidden, method="unembed"), sampling)

    def by_columns(u, hidden):
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = process_logits(model.apply(variables, rows, method="unembed_columns"), sampling)
        return jax.tree.map(lambda x: x.reshape(u.shape[:-1]), draw_tokens(u.reshape(-1, 2), logits, axis=0))

    # A CPU multiplies a large table by few columns a quarter faster than few rows by the table.
    tied = hasattr(model, "unembed_columns") and model.config.tie_word_embeddings
    plain = sampling.temperature > 0 and sampling == Sampling(sampling.temperature)
    if tied and plain:
        return jax.lax.platform_dependent(u, hidden, cpu=by_columns, default=by_rows)
    return by_rows(u, hidden)


def is_eos(tokens: jax.Array, eos_token_ids: tuple[int, ...]) -> jax.Array:
    """Whether each token is one of the ids that end a completion."""
    ended = jnp.zeros(tokens.shape, bool)
    for eos in eos_token_ids:
        ended |= tokens == eos
    return ended


def step_uniforms(keys: jax.Array, first: jax.Array | int, steps: int) -> jax.Array:
    """[steps, B, G, 2] for the tokens first, first + 1, … of each group, `first` being [B] or one number.

    Made for a whole burst at once, because one wide draw is cheaper than many narrow ones.
    """
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(0, None)))
    first = jnp.broadcast_to(first, keys.shape[:1])
    return jax.vmap(lambda i: uniforms(fold(keys, first + i)))(jnp.arange(steps))


def _without_ones(cache: Cache) -> Cache:
    """A cache without those of its axes B, H_kv and G that are one.

    XLA's CPU backend takes such an axis out of a product, and then copies the cache at every step.
    """
    return jax.tree.map(lambda x: x.reshape(*(n for n in x.shape[:-2] if n > 1), *x.shape[-2:]), cache)


def _with_ones(stream: Stream) -> Cache:
    """The cache of a stream with all its axes."""
    (b, g), heads = stream.token.shape, stream.prefix.layers[0][1].shape[1]
    return jax.tree.map(lambda x: x.reshape(b, heads, g, *x.shape[-2:]), stream.cache)


@shared
@functools.partial(jax.jit, static_argnames=("eos_token_ids", "pad_token_id", "slots", "sampling", "mesh"))
def prefill(
    model, params, prompts, keys, slot, *, eos_token_ids, pad_token_id, slots, sampling, mesh=None
) -> tuple[Stream, Drawn]:
    """Read the prompts and draw the first token of every completion, from logits computed once per prompt.

    The next slot is `slot`: there these completions begin. On a mesh each device holds the keys of its own prompts and
    heads.
    """
    b, g = keys.shape
    model, params = for_lookup((model, params), mesh)
    last, prefix = model.apply({"params": params}, prompts.tokens, prompts.lengths, method="prefill")
    logits = model.apply({"params": params}, last, method="unembed")
    logits = jnp.broadcast_to(logits[:, None], (b, g, logits.shape[-1]))
    tokens, log_probs = draw(step_uniforms(keys, 0, 1)[0], logits, sampling)
    heads, d = prefix.layers[0][1].shape[1::2]
    dtype = prefix.layers[0][0].dtype
    keys_of, values_of = (
        constrain(jnp.zeros((b, heads, g, *shape), dtype), mesh, "tensor") for shape in ((d, slots), (slots, d))
    )
    cache = _without_ones(tuple((keys_of, values_of) for _ in prefix.layers))
    start = constrain(jnp.full(b, slot, jnp.int32), mesh)
    stream = Stream(prefix, cache, tokens, is_eos(tokens, eos_token_ids), keys, start)
    return stream, (tokens[..., None], log_probs[..., None], jnp.ones((b, g, 1), bool))


@shared
@functools.partial(
    jax.jit, static_argnames=("steps", "eos_token_ids", "pad_token_id", "sampling"), donate_argnames=("cache",)
)
def decode(
    model, variables, cache, stream, slot, count, *, steps, eos_token_ids, pad_token_id, sampling
) -> tuple[Stream, Drawn]:
    """Decode `count` ≤ `steps` tokens, from the next slot `slot` on; stops early when all completions have ended.

    The cache comes beside the stream, because it alone is donated: its memory is that of the new one.
    """
    b, g = stream.token.shape
    chex.assert_shape([stream.ended, stream.keys], (b, g))
    u = step_uniforms(stream.keys, slot - stream.start + 1, steps)
    tokens = jnp.full((steps, b, g), pad_token_id, jnp.int32)
    log_probs = jnp.zeros((steps, b, g), jnp.float32)
    mask = jnp.zeros((steps, b, g), bool)

    def unfinished(carry):
        i, _, _, ended, *_ = carry
        return (i < count) & ~ended.all()

    def step(carry):
        i, cache, token, ended, tokens, log_probs, mask = carry
        hidden, cache = model.apply(
            variables, token[:, :, None], stream.prefix, cache, slot + i, stream.start, method="hidden"
        )
        drawn, log_prob = _draw_next(model, variables, u[i], hidden[:, :, 0], sampling)
        drawn = jnp.where(ended, pad_token_id, drawn)
        tokens = tokens.at[i].set(drawn)
        log_probs = log_probs.at[i].set(jnp.where(ended, 0.0, log_prob))
        mask = mask.at[i].set(~ended)
        return i + 1, cache, drawn, ended | is_eos(drawn, eos_token_ids), tokens, log_probs, mask

    carry = (jnp.int32(0), cache, stream.token, stream.ended, tokens, log_probs, mask)
    _, cache, token, ended, *drawn = jax.lax.while_loop(unfinished, step, carry)
    tokens, log_probs, mask = (jnp.moveaxis(x, 0, -1) for x in drawn)
    return stream.replace(cache=cache, token=token, ended=ended), (tokens, log_probs, mask)


_jit_kernels_by_columns = jax.jit(kernels_by_columns)


def decode_variables(model: Any, params: Params) -> dict[str, Any]:
    """What `decode` applies the model to: the params, and on a CPU the kernels once more, by columns.

    A CPU multiplies 8 to 32 rows by those in three to four fifths of the time.
    """
    devices = devices_of(params)
    if len(devices) != 1 or any(device.platform != "cpu" for device in devices):
        return {"params": params}
    return {"params": params, "columns": _jit_kernels_by_columns(getattr(model, "base", params))}


@functools.partial(jax.jit, static_argnames=("slots", "parts"))
def rearrange(streams: tuple[Stream, ...], groups, order, shift, *, slots: int, parts: int) -> tuple[Stream, ...]:
    """Completions order [B', G'] of groups [B'] of all streams, with room for `slots` tokens, in `parts` streams.

    The first `shift` slots, in which no living completion has anything, are given up.
    """
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *(x.replace(cache=_with_ones(x)) for x in streams))
    pick = lambda x: x[groups[:, None], order]
    own = lambda x, axis: jnp.roll(pick(x.swapaxes(1, 2)).swapaxes(1, 2), -shift, axis)
    more, rest = (0, slots - whole.cache[0][1].shape[3]), ((0, 0),) * 3
    cache = tuple(
        (jnp.pad(own(k, 4), (*rest, (0, 0), more)), jnp.pad(own(v, 3), (*rest, more, (0, 0)))) for k, v in whole.cache
    )
    prefix = jax.tree.map(lambda x: x[groups], whole.prefix)
    tokens, ended, keys = (pick(x) for x in (whole.token, whole.ended, whole.keys))
    chosen = Stream(prefix, cache, tokens, ended, keys, whole.start[groups] - shift)
    size = len(groups) // parts
    parts_of = (jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], chosen) for i in range(parts))
    return tuple(part.replace(cache=_without_ones(part.cache)) for part in parts_of)


@functools.partial(jax.jit, static_argnames=("mesh",))
def narrow(stream: Stream, order, *, mesh) -> Stream:
    """The completions order [B, G'] of each group; nothing leaves its device."""
    pick = lambda x, *axes: constrain(jax.vmap(lambda own, at: own[at])(x, order), mesh, *axes)
    of_heads = lambda x: pick(x.swapaxes(1, 2), None, "tensor").swapaxes(1, 2)
    token, ended, keys = (pick(x) for x in (stream.token, stream.ended, stream.keys))
    cache = _without_ones(jax.tree.map(of_heads, _with_ones(stream)))
    return stream.replace(cache=cache, token=token, ended=ended, keys=keys)


@functools.partial(jax.jit, static_argnames=("slots",))
def grow(stream: Stream, *, slots: int) -> Stream:
    """The same completions with room for `slots` tokens; nothing leaves its device."""
    more = slots - stream.cache[0][1].shape[-2]
    pad = lambda x, axis: jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])
    return stream.replace(cache=tuple((pad(k, -1), pad(v, -2)) for k, v in stream.cache))


def lower_decode(
    model: Model,
    params: Params,
    prompts: Prompts,
    num_generations: int,
    max_completion_length: int,
    *,
    sampling: Sampling,
    mesh: Any = None,
) -> Any:
    """The largest program of `generate`, lowered; None for a model without a cache.

    Only shapes are looked at, but for the copy of the kernels on a CPU, which is made.
    """
    if not is_cached(model):
        return None
    how: dict[str, Any] = {"eos_token_ids": (), "pad_token_id": 0, "sampling": sampling}
    keys = jax.eval_shape(lambda: completion_keys(jax.random.key(0), jnp.arange(len(prompts.lengths)), num_generations))
    how_many: dict[str, Any] = {"slots": max(1, max_completion_length - 1), "mesh": mesh}
    stream, _ = jax.eval_shape(
        functools.partial(prefill, **how_many, **how), as_argument(model), params, prompts, keys, 0
    )
    if mesh is not None:  # what `prefill` returns stands where it says, and the decode takes it from there
        at = split_sharding(keys, mesh)
        keys = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=at)
        compiled = prefill.lower(as_argument(model), params, prompts, keys, 0, **how_many, **how).compile()
        place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        stream = jax.tree.map(place, stream, compiled.output_shardings[0])
    part = (stream.cache, stream.replace(cache=None), 0, BURST)
    return decode.lower(as_argument(model), decode_variables(model, params), *part, steps=BURST, **how)
