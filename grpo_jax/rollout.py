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

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.bounds import DecodeStep
from grpo_jax.log_probs import join_rows
from grpo_jax.models.attention import Cache, Prefix
from grpo_jax.models.transformer import kernels_by_columns
from grpo_jax.sampling import Sampling, check_sampling, draw_tokens, greedy_tokens, process_logits, uniforms
from grpo_jax.sharding import constrain, fetch, for_lookup, mesh_of, shard_count, split, split_sharding
from grpo_jax.streams import count_streams, devices_of, run_in_streams
from grpo_jax.types import Completions, Model, Params, Prompts, as_argument

__all__ = ["generate", "row_keys"]

STREAM_ROWS = 16
"""Rows of one stream at least: fewer leave the matrix products too thin."""

FEWEST = 8
"""Rows that are left in a batch at least: a product with fewer takes a CPU as long."""

FEWEST_SLOTS = 64
"""Slots of a cache at least."""

SEGMENT = 16
"""Decode steps between two looks at which rows have ended."""

WORTH_A_MOVE = 0.8
"""Share of the present layout's cost that another may have at most: a move costs a copy of the cache, and a program."""


@functools.partial(jax.jit, static_argnames=("num_generations",))
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


def _draw_next(
    model: Any, variables: Any, u: jax.Array, hidden: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Tokens and log-probs [B, G] that follow hidden states [B, G, D], with uniforms [B, G, 2]."""

    def by_rows(u, hidden):
        return _draw(u, model.apply(variables, hidden, method="unembed"), sampling)

    def by_columns(u, hidden):
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = process_logits(model.apply(variables, rows, method="unembed_columns"), **sampling._asdict())
        return jax.tree.map(lambda x: x.reshape(u.shape[:-1]), draw_tokens(u.reshape(-1, 2), logits, axis=0))

    # A CPU multiplies a large table by few columns a quarter faster than few rows by the table.
    tied = hasattr(model, "unembed_columns") and model.config.tie_word_embeddings
    plain = sampling.temperature > 0 and sampling == Sampling(sampling.temperature)
    if tied and plain:
        return jax.lax.platform_dependent(u, hidden, cpu=by_columns, default=by_rows)
    return by_rows(u, hidden)


def _is_eos(tokens: jax.Array, eos_token_ids: tuple[int, ...]) -> jax.Array:
    ended = jnp.zeros(tokens.shape, bool)
    for eos in eos_token_ids:
        ended |= tokens == eos
    return ended


def _step_uniforms(keys: jax.Array, first: jax.Array | int, steps: int) -> jax.Array:
    """[steps, B, G, 2] for the tokens first, first + 1, … of each group, `first` being [B] or one number.

    Made for a whole segment at once, because one wide draw is cheaper than many narrow ones.
    """
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(0, None)))
    first = jnp.broadcast_to(first, keys.shape[:1])
    return jax.vmap(lambda i: uniforms(fold(keys, first + i)))(jnp.arange(steps))


class _Rows(flax.struct.PyTreeNode):
    """Rows that are decoded together, as they stand on the device.

    Attributes:
      prefix: of the prompts, B of them.
      cache: own keys and values, `_without_ones`.
      token: [B, G] the last token of each row.
      ended: [B, G] whether that was its last.
      keys: [B, G] typed keys.
      start: [B] int32, slot of the cache in which the rows of each prompt begin.
    """

    prefix: Prefix
    cache: Cache
    token: jax.Array
    ended: jax.Array
    keys: jax.Array
    start: jax.Array


def _without_ones(cache: Cache) -> Cache:
    """A cache without those of its axes B, H_kv and G that are one.

    XLA's CPU backend takes such an axis out of a product, and then copies the cache at every step.
    """
    return jax.tree.map(lambda x: x.reshape(*(n for n in x.shape[:-2] if n > 1), *x.shape[-2:]), cache)


def _with_ones(rows: _Rows) -> Cache:
    """The cache of some rows with all its axes."""
    (b, g), heads = rows.token.shape, rows.prefix.layers[0][1].shape[1]
    return jax.tree.map(lambda x: x.reshape(b, heads, g, *x.shape[-2:]), rows.cache)


Drawn = tuple[jax.Array, jax.Array, jax.Array]
"""Tokens, log-probs and mask, each [B, G, steps]."""


@functools.partial(jax.jit, static_argnames=("eos_token_ids", "pad_token_id", "slots", "sampling", "mesh"))
def _prefill(
    model, params, prompts, keys, slot, *, eos_token_ids, pad_token_id, slots, sampling, mesh=None
) -> tuple[_Rows, Drawn]:
    """Read the prompts and draw the first token of every row, from logits computed once a prompt.

    The next slot is `slot`: there these rows begin. On a mesh each device holds the keys of its own prompts and heads.
    """
    b, g = keys.shape
    model, params = for_lookup((model, params), mesh)
    last, prefix = model.apply({"params": params}, prompts.tokens, prompts.lengths, method="prefill")
    logits = model.apply({"params": params}, last, method="unembed")
    logits = jnp.broadcast_to(logits[:, None], (b, g, logits.shape[-1]))
    tokens, log_probs = _draw(_step_uniforms(keys, 0, 1)[0], logits, sampling)
    heads, d = prefix.layers[0][1].shape[1::2]
    dtype = prefix.layers[0][0].dtype
    keys_of, values_of = (
        constrain(jnp.zeros((b, heads, g, *shape), dtype), mesh, "tensor") for shape in ((d, slots), (slots, d))
    )
    cache = _without_ones(tuple((keys_of, values_of) for _ in prefix.layers))
    start = constrain(jnp.full(b, slot, jnp.int32), mesh)
    rows = _Rows(prefix, cache, tokens, _is_eos(tokens, eos_token_ids), keys, start)
    return rows, (tokens[..., None], log_probs[..., None], jnp.ones((b, g, 1), bool))


@functools.partial(
    jax.jit,
    static_argnames=("steps", "eos_token_ids", "pad_token_id", "sampling"),
    donate_argnames=("cache",),
)
def _decode(
    model, variables, cache, rows, slot, count, *, steps, eos_token_ids, pad_token_id, sampling
) -> tuple[_Rows, Drawn]:
    """Decode `count` ≤ `steps` tokens, from the next slot `slot` on; stops early when all rows have ended.

    The cache comes beside the rows, because it alone is donated: its memory is that of the new one.
    """
    b, g = rows.token.shape
    u = _step_uniforms(rows.keys, slot - rows.start + 1, steps)
    tokens = jnp.full((steps, b, g), pad_token_id, jnp.int32)
    log_probs = jnp.zeros((steps, b, g), jnp.float32)
    mask = jnp.zeros((steps, b, g), bool)

    def unfinished(carry):
        i, _, _, ended, *_ = carry
        return (i < count) & ~ended.all()

    def step(carry):
        i, cache, token, ended, tokens, log_probs, mask = carry
        hidden, cache = model.apply(
            variables, token[:, :, None], rows.prefix, cache, slot + i, rows.start, method="hidden"
        )
        drawn, log_prob = _draw_next(model, variables, u[i], hidden[:, :, 0], sampling)
        drawn = jnp.where(ended, pad_token_id, drawn)
        tokens = tokens.at[i].set(drawn)
        log_probs = log_probs.at[i].set(jnp.where(ended, 0.0, log_prob))
        mask = mask.at[i].set(~ended)
        return i + 1, cache, drawn, ended | _is_eos(drawn, eos_token_ids), tokens, log_probs, mask

    carry = (jnp.int32(0), cache, rows.token, rows.ended, tokens, log_probs, mask)
    _, cache, token, ended, *drawn = jax.lax.while_loop(unfinished, step, carry)
    tokens, log_probs, mask = (jnp.moveaxis(x, 0, -1) for x in drawn)
    return rows.replace(cache=cache, token=token, ended=ended), (tokens, log_probs, mask)


_jit_kernels_by_columns = jax.jit(kernels_by_columns)


def _variables(model: Any, params: Params) -> dict[str, Any]:
    """What `_decode` applies the model to: the params, and on a CPU the kernels once more, by columns.

    A CPU multiplies 8 to 32 rows by those in three to four fifths of the time.
    """
    devices = devices_of(params)
    if len(devices) != 1 or any(device.platform != "cpu" for device in devices):
        return {"params": params}
    return {"params": params, "columns": _jit_kernels_by_columns(getattr(model, "base", params))}


@functools.partial(jax.jit, static_argnames=("slots", "parts"))
def _rearrange(lanes: tuple[_Rows, ...], groups, order, shift, *, slots: int, parts: int) -> tuple[_Rows, ...]:
    """Rows order [B', G'] of groups [B'] of all lanes together, with room for `slots` tokens, in so many lanes.

    The first `shift` slots, in which no living row has anything, are given up.
    """
    all_rows = jax.tree.map(lambda *x: jnp.concatenate(x), *(lane.replace(cache=_with_ones(lane)) for lane in lanes))
    pick = lambda x: x[groups[:, None], order]
    own = lambda x, axis: jnp.roll(pick(x.swapaxes(1, 2)).swapaxes(1, 2), -shift, axis)
    more, rest = (0, slots - all_rows.cache[0][1].shape[3]), ((0, 0),) * 3
    cache = tuple(
        (jnp.pad(own(k, 4), (*rest, (0, 0), more)), jnp.pad(own(v, 3), (*rest, more, (0, 0))))
        for k, v in all_rows.cache
    )
    prefix = jax.tree.map(lambda x: x[groups], all_rows.prefix)
    tokens, ended, keys = (pick(x) for x in (all_rows.token, all_rows.ended, all_rows.keys))
    chosen = _Rows(prefix, cache, tokens, ended, keys, all_rows.start[groups] - shift)
    size = len(groups) // parts
    parts_of = (jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], chosen) for i in range(parts))
    return tuple(part.replace(cache=_without_ones(part.cache)) for part in parts_of)


@functools.partial(jax.jit, static_argnames=("mesh",))
def _narrow(rows: _Rows, order, *, mesh) -> _Rows:
    """The rows order [B, G'] of each group; nothing leaves its device."""
    pick = lambda x, *axes: constrain(jax.vmap(lambda own, at: own[at])(x, order), mesh, *axes)
    of_heads = lambda x: pick(x.swapaxes(1, 2), None, "tensor").swapaxes(1, 2)
    token, ended, keys = (pick(x) for x in (rows.token, rows.ended, rows.keys))
    cache = _without_ones(jax.tree.map(of_heads, _with_ones(rows)))
    return rows.replace(cache=cache, token=token, ended=ended, keys=keys)


@functools.partial(jax.jit, static_argnames=("slots",))
def _grow(rows: _Rows, *, slots: int) -> _Rows:
    """The same rows with room for `slots` tokens; nothing leaves its device."""
    more = slots - rows.cache[0][1].shape[-2]
    pad = lambda x, axis: jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])
    return rows.replace(cache=tuple((pad(k, -1), pad(v, -2)) for k, v in rows.cache))


def _bucket(n: int, largest: int, *, smallest: int = 1, factor: int = 2) -> int:
    """The smallest of smallest, factor·smallest, factor²·smallest, … that holds n, at most `largest`."""
    while smallest < n:
        smallest *= factor
    return min(smallest, largest)


def _survivors(alive: np.ndarray, step: DecodeStep) -> tuple[np.ndarray, np.ndarray] | None:
    """Which rows of alive [B', G'] to keep, as groups [B''] and order [B'', G'']; None to leave the layout as it is.

    One of three layouts: the present one, unless another saves a fifth; every row by itself with a prompt of its own;
    the groups that live, as wide as the widest of them has to be, where that is cheaper by a quarter. So, and by sizes
    that are far apart, there are few layouts, and few programs are compiled.
    """
    b, g = alive.shape
    if alive.size <= FEWEST:
        return None
    counts = alive.sum(axis=1)
    living = np.flatnonzero(counts)
    width = _bucket(int(counts.max()), g)
    groups = _bucket(len(living), b, smallest=min(b, max(1, FEWEST // width)))
    single = _bucket(int(counts.sum()), b * g, smallest=FEWEST, factor=4)
    grouped, apart = step.cost(groups, width), step.cost(single, 1)
    if min(grouped, apart) > WORTH_A_MOVE * step.cost(b, g):
        return None
    if grouped <= 0.75 * apart:
        chosen = np.argsort(counts == 0, kind="stable")[:groups]
        return chosen, np.argsort(~alive[chosen], axis=1, kind="stable")[:, :width]
    # Fillers are rows that have ended: they draw nothing.
    flat = np.argsort(~alive.reshape(-1), kind="stable")[:single]
    return flat // g, (flat % g)[:, None]


def _narrower(alive: np.ndarray, step: DecodeStep, shards: int) -> np.ndarray | None:
    """Which rows of each group of alive [B', G'] to keep, as order [B', G'']; None to leave the layout as it is.

    For a mesh, where no group leaves its device, of which each has its share: all are as wide as the widest has to be.
    """
    b, g = alive.shape
    width = _bucket(int(alive.sum(axis=1).max()), g)
    if step.cost(b // shards, width) > WORTH_A_MOVE * step.cost(b // shards, g):
        return None
    return np.argsort(~alive, axis=1, kind="stable")[:, :width]


def _decode_step(model: Any, params: Params, rows: _Rows) -> DecodeStep:
    """What a step of these rows costs; a CPU multiplies eight times in the time of one byte, a GPU a hundred times."""
    values, cache = rows.prefix.layers[0][1], rows.cache[0][1]
    held = jax.tree.leaves((model, params))
    on_cpu = all(device.platform == "cpu" for device in devices_of(params))
    return DecodeStep.of(
        model.config,
        prompt_length=values.shape[2],
        row_length=cache.shape[-2],
        itemsize=values.dtype.itemsize,
        weight_itemsize=sum(x.nbytes for x in held) / sum(x.size for x in held),
        bytes_per_operation=0.13 if on_cpu else 0.01,
    )


def _streams(params: Params, groups: int, width: int) -> int:
    """How many lanes [groups, width] rows are decoded in."""
    most = count_streams(params, min(groups, groups * width // STREAM_ROWS))
    return max(n for n in range(1, most + 1) if groups % n == 0)


class _Table:
    """The whole call's tokens, log-probs and mask on the host, and which of its rows stands where on the device.

    Attributes:
      rows: [B', G'] which row of the call stands where; −1 for one that has ended or only fills the shape.
      drawn: [B'] tokens drawn of each group's rows.
      finished: [B·G] whether a row has drawn an EOS.
    """

    def __init__(self, count: int, length: int, pad_token_id: int, eos_token_ids: tuple[int, ...]):
        self.tokens = np.full((count, length), pad_token_id, np.int32)
        self.log_probs = np.zeros((count, length), np.float32)
        self.mask = np.zeros((count, length), bool)
        self.finished = np.zeros(count, bool)
        self.rows = np.zeros((0, 0), int)
        self.drawn = np.zeros(0, int)
        self._eos = eos_token_ids

    @property
    def length(self) -> int:
        """T, the most tokens of a row."""
        return self.tokens.shape[1]

    def note(self, rows: np.ndarray, before: np.ndarray, drawn: Drawn, count: int) -> np.ndarray:
        """Take in `count` tokens more of rows [B', G'] that had `before` [B']; return which rows go on [B', G']."""
        tokens, log_probs, mask = (np.asarray(x)[:, :, :count] for x in drawn)
        at = before[:, None, None] + np.arange(count)
        here = (rows >= 0)[:, :, None] & (at < self.length)
        where = np.broadcast_to(rows[:, :, None], here.shape)[here], np.broadcast_to(at, here.shape)[here]
        for whole, part in ((self.tokens, tokens), (self.log_probs, log_probs), (self.mask, mask)):
            whole[where] = part[here]
        ended = (np.isin(tokens, self._eos) & mask & here).any(axis=-1)
        self.finished[rows[ended]] = True
        return (rows >= 0) & ~ended & (before[:, None] + count < self.length)


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


def places(groups: int, num_generations: int, batch_size: int | None, shards: int) -> int:
    """How many groups stand on the devices at a time: at most `batch_size` completions, as many on each device.

    Args:
      groups: B, all that there are.
      num_generations: G.
      batch_size: completions at a time over all devices; None: all.
      shards: devices that prompts are cut over.

    Example:
      >>> places(30, 4, None, 8), places(30, 4, 70, 8), places(30, 4, 70, 1)
      (32, 16, 17)
    """
    most = groups if batch_size is None else min(groups, batch_size // num_generations // shards * shards)
    return -(-most // shards) * shards


def lower_decode(
    model: Model,
    params: Params,
    prompts: Prompts,
    num_generations: int,
    max_completion_length: int,
    *,
    mesh: Any = None,
    **sampling: Any,
) -> Any:
    """The largest program of `generate`, lowered; None for a model without a cache.

    Only shapes are looked at, but for the copy of the kernels on a CPU, which is made.
    """
    if not hasattr(model, "prefill"):
        return None
    how: dict[str, Any] = {"eos_token_ids": (), "pad_token_id": 0, "sampling": Sampling(**sampling)}
    keys = jax.eval_shape(lambda: row_keys(jax.random.key(0), jnp.arange(len(prompts.lengths)), num_generations))
    how_many: dict[str, Any] = {"slots": max(1, max_completion_length - 1), "mesh": mesh}
    rows, _ = jax.eval_shape(
        functools.partial(_prefill, **how_many, **how), as_argument(model), params, prompts, keys, 0
    )
    if mesh is not None:  # what `_prefill` returns stands where it says, and the decode takes it from there
        at = split_sharding(keys, mesh)
        keys = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=at)
        compiled = _prefill.lower(as_argument(model), params, prompts, keys, 0, **how_many, **how).compile()
        place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        rows = jax.tree.map(place, rows, compiled.output_shardings[0])
    part = (rows.cache, rows.replace(cache=None), 0, SEGMENT)
    return _decode.lower(as_argument(model), _variables(model, params), *part, steps=SEGMENT, **how)


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
    if not hasattr(model, "prefill"):
        return _generate_uncached(as_argument(model), params, prompts, keys, **settings)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, prompts, key))):
        return _generate_in_one(as_argument(model), params, prompts, keys, **settings)

    how: dict[str, Any] = {"at_once": places(len(keys), num_generations, batch_size, shards), "interrupt": interrupt}
    return _generate_by_segments(as_argument(model), params, prompts, keys, **how, **settings)
