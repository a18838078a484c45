"""Reading prompts and drawing tokens: the compiled parts of a rollout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.devices.sharding import abstract, constrain, constrained_sharding, for_head, for_lookup
from grpo_jax.devices.streams import devices_of, shared
from grpo_jax.maths.sampling import Sampling, draw_tokens, greedy_tokens, process_logits, uniforms, vocabulary_blocks
from grpo_jax.models.attention import Cache, Prefix
from grpo_jax.models.cache import empty_like, with_slots
from grpo_jax.models.transformer import kernels_by_columns
from grpo_jax.rollout.ladder import BURST, whole_cache
from grpo_jax.types import Model, Params, Prompts, as_argument, is_cached


class Stream(flax.struct.PyTreeNode):
    """Completions that are decoded together, as they stand on the device.

    Attributes:
      prefix: of the prompts, B of them.
      cache: what is kept of the completions, `_without_ones`.
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


def draw(
    u: jax.Array, logits: jax.Array, sampling: Sampling, *, together: Callable[[jax.Array], jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Tokens and log-probs [B, G] from logits [B, G, V], with uniforms [B, G, 2]; `together` as in `draw_tokens`."""
    logits = process_logits(logits, sampling)
    return greedy_tokens(logits) if sampling.temperature == 0 else draw_tokens(u, logits, together=together)


def _vocabulary_axes(size: int, mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh along which a vocabulary is cut while tokens are drawn: each device has whole blocks of it."""
    if mesh is None:
        return ()
    blocks, width = vocabulary_blocks(size)
    names = tuple(name for name in ("fsdp", "tensor") if mesh.shape.get(name, 1) > 1)
    for axes in (names, names[1:], names[:1]):
        if blocks * width == size and blocks % math.prod(mesh.shape[name] for name in axes) == 0:
            return axes
    return ()


def draw_next(
    model: Any, variables: Any, u: jax.Array, hidden: jax.Array, sampling: Sampling, mesh: Any
) -> tuple[jax.Array, jax.Array]:
    """Tokens and log-probs [B, G] that follow hidden states [B, G, D], with uniforms [B, G, 2]."""

    def by_rows(u, hidden):
        return draw(u, model.apply(variables, hidden, method="unembed"), sampling)

    if mesh is not None:
        # Rows whole and the vocabulary cut: only sums of each row, and one block of it, go from device to device.
        axes = _vocabulary_axes(model.config.vocab_size, mesh)
        place = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
        rows = tuple(name for name in ("data",) if name in mesh.shape and u.shape[0] % mesh.shape[name] == 0)
        logits = model.apply(variables, place(hidden, rows), method="unembed")
        together = lambda x: place(x, rows)
        found = draw(place(u, rows), place(logits, rows, None, axes), sampling, together=together)
        return jax.tree.map(lambda x: constrain(place(x, rows), mesh), found)

    def by_columns(u, hidden):
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = process_logits(model.apply(variables, rows, method="unembed_columns"), sampling)
        return jax.tree.map(lambda x: x.reshape(u.shape[:-1]), draw_tokens(u.reshape(-1, 2), logits, axis=0))

    # A CPU multiplies a large table by few columns a quarter faster than few rows by the table.
    plain = sampling.temperature > 0 and sampling == Sampling(sampling.temperature)
    if model.config.tie_word_embeddings and plain:
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
    b, g = stream.token.shape
    whole = lambda x, of_prompts: x.reshape(b, of_prompts.shape[1], g, *x.shape[-2:])
    return jax.tree.map(whole, stream.cache, stream.prefix.layers)


def read_prompts(
    model: Any, params: Params, prompts: Prompts, keys: jax.Array, sampling: Sampling, mesh: Any
) -> tuple[Prefix, jax.Array, jax.Array]:
    """What is kept of the prompts, and the first token [B, G] of every completion with its log-prob."""
    b, g = keys.shape
    model, params = for_lookup((model, params), mesh)
    last, prefix = model.apply({"params": params}, prompts.tokens, prompts.lengths, method="prefill")
    logits = model.apply({"params": params}, last, method="unembed")
    logits = jnp.broadcast_to(logits[:, None], (b, g, logits.shape[-1]))
    return prefix, *draw(step_uniforms(keys, 0, 1)[0], logits, sampling)


def _read(model, params, prompts, keys, slot, eos_token_ids, sampling, mesh) -> tuple[Stream, Drawn]:
    """A stream without a cache, whose completions have their first token, from logits computed once per prompt."""
    b, g = keys.shape
    prefix, tokens, log_probs = read_prompts(model, params, prompts, keys, sampling, mesh)
    stream = Stream(prefix, (), tokens, is_eos(tokens, eos_token_ids), keys, jnp.full(b, slot, jnp.int32))
    return stream, (tokens[..., None], log_probs[..., None], jnp.ones((b, g, 1), bool))


@shared
@functools.partial(jax.jit, static_argnames=("eos_token_ids", "pad_token_id", "slots", "sampling", "mesh"))
def prefill(
    model, params, prompts, keys, slot, *, eos_token_ids, pad_token_id, slots, sampling, mesh=None
) -> tuple[Stream, Drawn]:
    """Read the prompts and draw the first token of every completion.

    The next slot is `slot`: there these completions begin. On a mesh each device holds the keys of its own prompts and
    heads.
    """
    g = keys.shape[1]
    stream, drawn = _read(model, params, prompts, keys, slot, eos_token_ids, sampling, mesh)
    cache = empty_like(stream.prefix.layers, g, slots)
    stream = stream.replace(cache=cache if mesh is not None else _without_ones(cache))
    return _keep_placed(stream, mesh), drawn


@shared
@functools.partial(jax.jit, static_argnames=("eos_token_ids", "pad_token_id", "sampling"), donate_argnames=("stream",))
def refill(
    model, params, stream, prompts, keys, places, slot, *, eos_token_ids, pad_token_id, sampling
) -> tuple[Stream, Drawn]:
    """`prefill` of prompts that take the places [B'] of groups that have ended, in a stream given without its cache.

    In the cache nothing moves: what the groups before have left there is older than the new ones' first slot, and a
    recurrent layer takes its prompt's state when it reads a completion's first token.
    """
    new, drawn = _read(model, params, prompts, keys, slot, eos_token_ids, sampling, None)
    return jax.tree.map(lambda old, x: old.at[places].set(x), stream, new), drawn


@shared
@functools.partial(
    jax.jit,
    static_argnames=("steps", "fixed", "eos_token_ids", "pad_token_id", "sampling", "mesh"),
    donate_argnames=("cache",),
)
def decode(
    model,
    variables,
    cache,
    stream,
    slot,
    count,
    *,
    steps,
    eos_token_ids,
    pad_token_id,
    sampling,
    fixed=False,
    mesh=None,
) -> tuple[tuple[Cache, jax.Array, jax.Array], Drawn]:
    """Decode `count` ≤ `steps` tokens, from the next slot `slot` on; stops early when all completions have ended.

    The cache comes beside the stream, because it alone is donated: its memory is that of the new one. Returned is what
    of the stream is new: cache, token and ended.

    `fixed`: all `steps`, whatever `count` is and who has ended. A GPU or a mesh would otherwise wait at every step for
    somebody to look whether there is another one.
    """
    b, g = stream.token.shape
    chex.assert_shape([stream.ended, stream.keys], (b, g))
    u = step_uniforms(stream.keys, slot - stream.start + 1, steps)
    tokens = jnp.full((steps, b, g), pad_token_id, jnp.int32)
    log_probs = jnp.zeros((steps, b, g), jnp.float32)
    mask = jnp.zeros((steps, b, g), bool)
    # The head as it is read by its parts on all devices: outside of the loop, it is moved there once a burst.
    head_model, head = for_head((model, variables), mesh, _vocabulary_axes(model.config.vocab_size, mesh))

    def unfinished(carry):
        i, _, _, ended, *_ = carry
        return (i < count) & ~ended.all()

    def step(carry):
        i, cache, token, ended, tokens, log_probs, mask = carry
        hidden, cache = model.apply(
            variables, token[:, :, None], stream.prefix, cache, slot + i, stream.start, method="hidden"
        )
        drawn, log_prob = draw_next(head_model, head, u[i], hidden[:, :, 0], sampling, mesh)
        drawn = jnp.where(ended, pad_token_id, drawn)
        tokens = tokens.at[i].set(drawn)
        log_probs = log_probs.at[i].set(jnp.where(ended, 0.0, log_prob))
        mask = mask.at[i].set(~ended)
        return i + 1, cache, drawn, ended | is_eos(drawn, eos_token_ids), tokens, log_probs, mask

    carry = (jnp.int32(0), cache, stream.token, stream.ended, tokens, log_probs, mask)
    if fixed:
        carry = jax.lax.fori_loop(0, steps, lambda _, carry: step(carry), carry)
    else:
        carry = jax.lax.while_loop(unfinished, step, carry)
    _, cache, token, ended, *drawn = carry
    tokens, log_probs, mask = (jnp.moveaxis(x, 0, -1) for x in drawn)
    cache = jax.tree.map(lambda x: constrain(x, mesh, "tensor"), cache)
    return (cache, constrain(token, mesh), constrain(ended, mesh)), (tokens, log_probs, mask)


_jit_kernels_by_columns = jax.jit(kernels_by_columns)


def decode_variables(model: Any, params: Params) -> dict[str, Any]:
    """What `decode` applies the model to: the params, and on a CPU the kernels once more, by columns.

    A CPU multiplies 8 to 32 rows by those in three to four fifths of the time.
    """
    if not _by_columns(params):
        return {"params": params}
    return {"params": params, "columns": _jit_kernels_by_columns(getattr(model, "base", params))}


def variables_shape(model: Any, params: Params) -> dict[str, Any]:
    """The shapes of `decode_variables`, of a model and params that are there."""
    if not _by_columns(params):
        return {"params": abstract(params)}
    return jax.eval_shape(
        lambda *x: {"params": x[0], "columns": kernels_by_columns(x[1])}, params, getattr(model, "base", params)
    )


def _by_columns(params: Params) -> bool:
    devices = devices_of(params)
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


@functools.partial(jax.jit, static_argnames=("slots", "parts"))
def gather(streams: tuple[Stream, ...], groups, order, *, slots: int, parts: int) -> tuple[Stream, ...]:
    """Completions order [B', G'] of groups [B'] of all streams, with `slots` slots, in `parts` streams."""
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *(x.replace(cache=_with_ones(x)) for x in streams))
    pick = lambda x: x[groups[:, None], order]
    own = lambda x: pick(x.swapaxes(1, 2)).swapaxes(1, 2)
    cache = with_slots(jax.tree.map(own, whole.cache), slots)
    prefix = jax.tree.map(lambda x: x[groups], whole.prefix)
    tokens, ended, keys = (pick(x) for x in (whole.token, whole.ended, whole.keys))
    chosen = Stream(prefix, cache, tokens, ended, keys, whole.start[groups])
    size = len(groups) // parts
    parts_of = (jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], chosen) for i in range(parts))
    return tuple(part.replace(cache=_without_ones(part.cache)) for part in parts_of)


@functools.partial(jax.jit, static_argnames=("slots", "mesh"))
def narrow(stream: Stream, order, *, slots: int, mesh) -> Stream:
    """The completions order [B, G'] of each group, with `slots` slots; nothing leaves its device."""
    pick = lambda x: jax.vmap(lambda own, at: own[at])(x, order)
    own = lambda x: pick(x.swapaxes(1, 2)).swapaxes(1, 2)
    cache = with_slots(jax.tree.map(own, stream.cache), slots)
    token, ended, keys = (pick(x) for x in (stream.token, stream.ended, stream.keys))
    return _keep_placed(stream.replace(cache=cache, token=token, ended=ended, keys=keys), mesh)


@functools.partial(jax.jit, static_argnames=("slots", "mesh"))
def grow(stream: Stream, *, slots: int, mesh=None) -> Stream:
    """The same completions with `slots` slots; nothing leaves its device."""
    return _keep_placed(stream.replace(cache=with_slots(stream.cache, slots)), mesh)


def _keep_placed(stream: Stream, mesh: Any) -> Stream:
    """The stream as every program of a mesh takes and returns it: cut by prompts, and keys and values by heads too."""
    if mesh is None:
        return stream
    heads = lambda tree: jax.tree.map(lambda x: constrain(x, mesh, "tensor"), tree)
    placed = jax.tree.map(lambda x: constrain(x, mesh), stream.replace(cache=None))
    prefix = placed.prefix.replace(layers=heads(stream.prefix.layers))
    return placed.replace(prefix=prefix, cache=heads(stream.cache))


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
    slots = whole_cache(max_completion_length, fixed=not on_cpu(params, mesh))
    given = (as_argument(model), params, prompts, keys, 0)
    stream, _ = jax.eval_shape(functools.partial(prefill, slots=slots, mesh=mesh, **how), *given)
    part = abstract_stream(stream, mesh)
    return decode.lower(
        as_argument(model),
        decode_variables(model, params),
        *(part.cache, part.replace(cache=None), 0, BURST),
        **how,
        steps=BURST,
        fixed=not on_cpu(params, mesh),
        mesh=mesh,
    )


def abstract_stream(stream: Stream, mesh: Any) -> Stream:
    """The shapes of a stream, each where `_keep_placed` puts it."""
    if mesh is None:
        return stream
    heads = lambda tree: jax.tree.map(lambda x: _abstract(x, constrained_sharding(x.shape, mesh, "tensor")), tree)
    placed = jax.tree.map(lambda x: _abstract(x, constrained_sharding(x.shape, mesh)), stream.replace(cache=None))
    prefix = placed.prefix.replace(layers=heads(stream.prefix.layers))
    of_keys = placed.keys.sharding  # of typed keys, all dimensions are named
    spec = PartitionSpec(*of_keys.spec, *[None] * (stream.keys.ndim - len(of_keys.spec)))
    keys = _abstract(stream.keys, NamedSharding(mesh, spec))
    return placed.replace(prefix=prefix, cache=heads(stream.cache), keys=keys)


def _abstract(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def on_cpu(params: Params, mesh: Any) -> bool:
    """Whether one CPU decodes: its loops can be watched for nothing."""
    at = {
        device.platform
        for x in jax.tree.leaves(params)
        for device in getattr(getattr(x, "sharding", None), "device_set", ())
    }
    return mesh is None and at <= {"cpu"}
