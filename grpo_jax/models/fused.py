"""Attention whose memory grows with the length and not with its square: scores exist for one tile at a time.

`attention` writes the scores [queries, keys] out, which is fastest while they are small. Here a tile of queries goes
through the tiles of keys that it may see, and of the scores only their running maximum and sum are kept (Milakov &
Gimelshein 2018; Dao et al. 2022). The backward pass computes the scores again from the log-sum-exp.

The same tiles are computed by one of two implementations: "tiles", plain JAX for any platform, and "triton", a kernel
for NVIDIA GPUs from Ampere on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.models.matmul import tile_product
from grpo_jax.models.sight import NOBODY, Kernel, Marks, Sight, compiler_params, padded, repeated

MOST_PARTS, LEAST_PART = 8, 64
"""Programs that share the queries of a tile of a prompt's keys, at most; and tiles of queries for each, at least."""

MASKED = -1e30
"""A score no softmax can see, finite so that a query that sees nothing stays finite."""


def fused_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, kernel: Kernel, sinks: jax.Array | None = None
) -> jax.Array:
    """Return the softmax of the scores that `sight` leaves, times the values.

    Held constant in the gradient: what is seen. Backwards only: forward mode raises, as of any `jax.custom_vjp`.

    Args:
      q: [A, H_kv, N, R, d]; R query heads share a key head.
      k: [A, H_kv, S, d].
      v: [A, H_kv, S, d].
      sight: marks of N queries and S keys, and the tiles of `kernel.window`.
      kernel: with the sizes that the tiles were found for.
      sinks: [H_kv, R] float32, each head's score of a key without a value, or None.

    Returns:
      [A, H_kv, N, R, d] in the dtype of v. A query that sees nothing gets zeros.
    """
    a, h, n, r, d = q.shape
    chex.assert_shape([k, v], (a, h, sight.keys.number.shape[1], d))
    chex.assert_shape(sight.queries.number, (a, n))
    rows, keys = padded(repeated(sight.queries, r), kernel.rows), padded(sight.keys, kernel.columns)
    kernel = kernel._replace(shared=sight.keys.number.shape[1] - n)
    # Triton's arrays are powers of two, and a product has 16 channels at least.
    width = d if kernel.implementation == "tiles" else max(16, 1 << (d - 1).bit_length())

    def fill(x: jax.Array, size: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % size), (0, width - d)))

    q = fill(q.reshape(a, h, n * r, d), kernel.rows)
    k, v = fill(k, kernel.columns), fill(v, kernel.columns)
    # [H_kv, N R], as the queries are laid out.
    sinks = None if sinks is None else jnp.pad(jnp.tile(sinks, (1, n)), ((0, 0), (0, -n * r % kernel.rows)))
    out = _attend(kernel, q, k, v, rows, keys, sight.tiles[str(kernel.window)], sinks)
    return out[:, :, : n * r, :d].reshape(a, h, n, r, d)


# One tile of scores, in arrays of two dimensions: the mathematics of both implementations.


def _seen(rows: tuple[jax.Array, ...], keys: tuple[jax.Array, ...], kernel: Kernel) -> jax.Array:
    """Return which of some keys (number, position) each of some queries (number, prompt, position) sees."""
    (number, prompt, position), (key, key_position) = (tuple(x[:, None] for x in rows), tuple(x[None] for x in keys))
    distance = position - key_position
    seen = (((key == number) & (distance >= 0)) | (key == prompt)) & (key != NOBODY)
    return seen if kernel.window is None else seen & (distance < kernel.window)


def _scores(q: jax.Array, k: jax.Array, seen: jax.Array, kernel: Kernel, keys_axis: int = 1) -> jax.Array:
    scores = tile_product(q, k, (1, keys_axis)) * kernel.scale
    if kernel.soft_cap is not None:
        scores = kernel.soft_cap * jnp.tanh(scores / kernel.soft_cap)
    return jnp.where(seen, scores, MASKED)


def start_of_sums(shape: tuple[int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the (sum of values, maximum, sum of weights) of queries [rows, d] that have seen nothing."""
    return jnp.zeros(shape), jnp.full(shape[0], MASKED), jnp.zeros(shape[0])


def add_tile(sums, q, k, v, seen, kernel, keys_axis=1):
    """Return the running sums of some queries with a tile of keys more, [columns, d] or if `keys_axis` is 0 turned."""
    values, top, total = sums
    scores = _scores(q, k, seen, kernel, keys_axis)
    higher = jnp.maximum(top, scores.max(axis=1))
    fade = jnp.exp(top - higher)
    weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0)
    values = values * fade[:, None] + tile_product(weights.astype(v.dtype), v, (1, 0))
    return values, higher, total * fade + weights.sum(axis=1)


def _finished(sums, dtype):
    """Return outputs and log-sum-exps; where nothing was seen, zeros and a log-sum-exp that leaves no weight."""
    values, top, total = sums
    some = total > 0
    return (values / jnp.where(some, total, 1.0)[:, None]).astype(dtype), jnp.where(
        some, top + jnp.log(jnp.where(some, total, 1.0)), -MASKED
    )


def _tile_gradients(q, k, v, g, lse, delta, seen, *, kernel):
    """Return the weights of a tile, and the gradient of its products q kᵀ, both in float32."""
    scores = _scores(q, k, seen, kernel)
    weights = jnp.where(seen, jnp.exp(scores - lse[:, None]), 0.0)
    slope = weights * (tile_product(g, v, (1, 1)) - delta[:, None])
    if kernel.soft_cap is not None:
        slope = jnp.where(seen, slope * (1 - (scores / kernel.soft_cap) ** 2), 0.0)
    return weights, slope * kernel.scale


# In plain JAX: all A and H together, tile by tile.


def _over_heads(function: Callable[..., Any], *shared: bool) -> Callable[..., Any]:
    """Map a function of one head's tile over arrays [A, H, ...], or [A, ...] where they are `shared`."""
    return jax.vmap(jax.vmap(function, in_axes=tuple(None if x else 0 for x in shared)))


def _take(x: jax.Array, at: jax.Array, size: int) -> jax.Array:
    """Return tile `at` [A] of arrays [A, N] or [A, H, N, ...]."""
    axis = 0 if x.ndim == 2 else 1
    return jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at * size, size, axis))(x, at)


def _row_marks(marks: Marks, at: jax.Array, size: int) -> tuple[jax.Array, ...]:
    return tuple(_take(x, at, size) for x in (marks.number, marks.prompt, marks.position))


def _key_marks(marks: Marks, at: jax.Array, size: int) -> tuple[jax.Array, ...]:
    return tuple(_take(x, at, size) for x in (marks.number, marks.position))


def _visible(rows, keys, valid, kernel):
    """Return what each query of a tile sees of a tile of keys, [A, rows, columns]."""
    return jax.vmap(lambda rows, keys: _seen(rows, keys, kernel))(rows, keys) & valid[:, None, None]


def _plain_forward(kernel, q, k, v, rows, keys, tiles):
    a, h, _, d = q.shape

    def of_rows(x):
        at = jnp.full(a, x)
        own, marks = _take(q, at, kernel.rows), _row_marks(rows, at, kernel.rows)

        def add(j, sums):
            which = tiles.keys[:, x, j]
            seen = _visible(marks, _key_marks(keys, which, kernel.columns), j < tiles.key_count[:, x], kernel)
            tile = (_take(k, which, kernel.columns), _take(v, which, kernel.columns))
            one = functools.partial(add_tile, kernel=kernel)
            return _over_heads(one, False, False, False, False, True)(sums, own, *tile, seen)

        row = (a, h, kernel.rows)
        start = (jnp.zeros((*row, d)), jnp.full(row, MASKED), jnp.zeros(row))
        sums = jax.lax.fori_loop(0, tiles.key_count[:, x].max(), add, start)
        return _over_heads(lambda sums: _finished(sums, v.dtype), False)(sums)

    out, lse = jax.lax.map(of_rows, jnp.arange(tiles.keys.shape[1]))
    return jnp.moveaxis(out, 0, 2).reshape(q.shape), jnp.moveaxis(lse, 0, 2).reshape(q.shape[:3])


def _plain_backward(kernel, q, k, v, rows, keys, tiles, g, lse, delta):
    a, h, _, d = q.shape
    gradients = _over_heads(functools.partial(_tile_gradients, kernel=kernel), *[False] * 6, True)

    def product(x, y, contract):
        return _over_heads(functools.partial(tile_product, contract=contract), False, False)(x, y)

    def of_rows(x):
        at = jnp.full(a, x)
        own, marks = [_take(y, at, kernel.rows) for y in (q, g, lse, delta)], _row_marks(rows, at, kernel.rows)

        def add(j, dq):
            which = tiles.keys[:, x, j]
            seen = _visible(marks, _key_marks(keys, which, kernel.columns), j < tiles.key_count[:, x], kernel)
            tile = (_take(k, which, kernel.columns), _take(v, which, kernel.columns))
            _, slope = gradients(own[0], *tile, *own[1:], seen)
            return dq + product(slope.astype(k.dtype), tile[0], (1, 0))

        return jax.lax.fori_loop(0, tiles.key_count[:, x].max(), add, jnp.zeros((a, h, kernel.rows, d)))

    def of_keys(y):
        at = jnp.full(a, y)
        own, marks = [_take(x, at, kernel.columns) for x in (k, v)], _key_marks(keys, at, kernel.columns)

        def add(j, sums):
            which = tiles.queries[:, y, j]
            seen = _visible(_row_marks(rows, which, kernel.rows), marks, j < tiles.query_count[:, y], kernel)
            tile = [_take(x, which, kernel.rows) for x in (q, g, lse, delta)]
            weights, slope = gradients(tile[0], *own, *tile[1:], seen)
            dk = product(slope.astype(q.dtype), tile[0], (0, 0))
            return sums[0] + dk, sums[1] + product(weights.astype(g.dtype), tile[1], (0, 0))

        start = (jnp.zeros((a, h, kernel.columns, d)),) * 2
        return jax.lax.fori_loop(0, tiles.query_count[:, y].max(), add, start)

    def together(x, like):
        return jnp.moveaxis(x, 0, 2).reshape(like.shape)

    dq = jax.lax.map(of_rows, jnp.arange(tiles.keys.shape[1]))
    dk, dv = jax.lax.map(of_keys, jnp.arange(tiles.queries.shape[1]))
    return together(dq, q), together(dk, k), together(dv, v)


# As kernels for NVIDIA GPUs: one program a tile, which goes through its tiles of the other kind.


def _forward_kernel(q, k, v, number, prompt, position, key, key_position, tiles, count, out, lse, *, kernel):
    own, marks = q[...], (number[...], prompt[...], position[...])

    def add(j, sums):
        at = pl.ds(tiles[j] * kernel.columns, kernel.columns)
        seen = _seen(marks, (key[at], key_position[at]), kernel)
        return add_tile(sums, own, k[at, :], v[at, :], seen, kernel)

    sums = jax.lax.fori_loop(0, count[...], add, start_of_sums(own.shape))
    out[...], lse[...] = _finished(sums, out.dtype)


def _query_kernel(q, k, v, number, prompt, position, key, key_position, tiles, count, g, lse, delta, dq, *, kernel):
    own, marks = (q[...], g[...], lse[...], delta[...]), (number[...], prompt[...], position[...])

    def add(j, total):
        at = pl.ds(tiles[j] * kernel.columns, kernel.columns)
        tile = k[at, :]
        seen = _seen(marks, (key[at], key_position[at]), kernel)
        _, slope = _tile_gradients(own[0], tile, v[at, :], *own[1:], seen, kernel=kernel)
        return total + tile_product(slope.astype(tile.dtype), tile, (1, 0))

    dq[...] = jax.lax.fori_loop(0, count[...], add, jnp.zeros(own[0].shape)).astype(dq.dtype)


def _key_kernel(
    q, k, v, number, prompt, position, key, key_position, tiles, count, g, lse, delta, dk, dv, *, kernel, parts=1
):
    own, marks = (k[...], v[...]), (key[...], key_position[...])
    begin, end = 0, count[...]
    if parts > 1:
        part = pl.program_id(2)
        begin, end = end * part // parts, end * (part + 1) // parts

    def add(j, sums):
        at = pl.ds(tiles[j] * kernel.rows, kernel.rows)
        queries, upstream = q[at, :], g[at, :]
        seen = _seen((number[at], prompt[at], position[at]), marks, kernel)
        weights, slope = _tile_gradients(queries, *own, upstream, lse[at], delta[at], seen, kernel=kernel)
        more = tile_product(slope.astype(queries.dtype), queries, (0, 0))
        return sums[0] + more, sums[1] + tile_product(weights.astype(upstream.dtype), upstream, (0, 0))

    sums = jax.lax.fori_loop(begin, end, add, (jnp.zeros(own[0].shape),) * 2)
    dk[...], dv[...] = sums[0].astype(dk.dtype), sums[1].astype(dv.dtype)


def _call(body, kernel, inputs, outputs, *, by_rows, first=0, count=None, parts=1):
    """Run a kernel over tiles of queries, or of keys; `inputs`: (array, axis that is cut, shared by the heads).

    Over `count` tiles from the `first` on, by default over all. Several `parts` are programs of one tile, each with an
    output of its own, [parts, ...].
    """
    a, h, m, _ = inputs[0][0].shape
    whole = m // kernel.rows if by_rows else inputs[1][0].shape[2] // kernel.columns
    count = whole if count is None else count
    size = {"rows": kernel.rows, "columns": kernel.columns}

    def spec(shape, cut, shared):
        # Along the tiles of this kernel: one tile, or its line of a list. Of the other kind: all of it.
        mine = cut in ("rows" if by_rows else "columns", "line")
        lead = 1 if shared else 2
        length, rest = shape[lead], shape[lead + 1 :]
        block = (None,) * lead + (None if cut == "line" else size[cut] if mine else length, *rest)
        zeros = (0,) * len(rest)
        return pl.BlockSpec(block, lambda i, j, *_: (*(i // h, i % h)[:lead], first + j if mine else 0, *zeros))

    def result(like, cut):
        shape = (*like.shape[:2], count * size[cut], *like.shape[3:])
        block, zeros = (None, None, size[cut], *shape[3:]), (0,) * len(shape[3:])
        if parts == 1:
            return jax.ShapeDtypeStruct(shape, like.dtype), pl.BlockSpec(block, lambda i, j: (i // h, i % h, j, *zeros))
        each = pl.BlockSpec((None, *block), lambda i, j, part: (part, i // h, i % h, j, *zeros))
        return jax.ShapeDtypeStruct((parts, *shape), like.dtype), each

    one = functools.partial(body, kernel=kernel)
    if parts > 1:
        one = functools.partial(one, parts=parts)
    shapes, places = zip(*(result(*output) for output in outputs), strict=True)
    return pl.pallas_call(
        one,
        grid=(a * h, count, parts) if parts > 1 else (a * h, count),
        in_specs=[spec(x.shape, cut, shared) for x, cut, shared in inputs],
        out_specs=places,
        out_shape=shapes,
        interpret=kernel.implementation == "interpreted",
        name=body.__name__.strip("_"),
        compiler_params=compiler_params(kernel.implementation, warps=4, stages=2),
    )(*(x for x, *_ in inputs))


def _inputs(q, k, v, rows, keys, tiles, *, by_rows):
    lists = (tiles.keys, tiles.key_count) if by_rows else (tiles.queries, tiles.query_count)
    marks = [(x, "rows", True) for x in (rows.number, rows.prompt, rows.position)]
    marks += [(x, "columns", True) for x in (keys.number, keys.position)]
    arrays = [(q, "rows", False), (k, "columns", False), (v, "columns", False)]
    return arrays + marks + [(x, "line", True) for x in lists]


def _kernel_forward(kernel, q, k, v, rows, keys, tiles):
    like = jax.ShapeDtypeStruct
    outputs = [(like(q.shape, v.dtype), "rows"), (like(q.shape[:3], jnp.float32), "rows")]
    return _call(_forward_kernel, kernel, _inputs(q, k, v, rows, keys, tiles, by_rows=True), outputs, by_rows=True)


def _kernel_backward(kernel, q, k, v, rows, keys, tiles, g, lse, delta):
    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    more = [(x, "rows", False) for x in (g, lse, delta)]
    inputs = _inputs(q, k, v, rows, keys, tiles, by_rows=True) + more
    (dq,) = _call(_query_kernel, kernel, inputs, [(like(q), "rows")], by_rows=True)
    return dq, *_key_gradients(kernel, _inputs(q, k, v, rows, keys, tiles, by_rows=False) + more)


def _key_gradients(kernel, inputs):
    """Return the gradients of keys and values.

    A tile of a prompt's keys is seen by all queries of its group, and one of a completion's keys by those after it. One
    program for each would leave a GPU waiting for those of the prompts, so several share the queries of such a tile.
    """
    (k, *_), (v, *_) = inputs[1:3]
    whole, shared = k.shape[2] // kernel.columns, -(-kernel.shared // kernel.columns)
    parts = min(MOST_PARTS, inputs[0][0].shape[2] // kernel.rows // LEAST_PART)
    shared = shared if parts > 1 else 0

    def of(first, count, parts=1):
        like = [(jax.ShapeDtypeStruct(x.shape, x.dtype if parts == 1 else jnp.float32), "columns") for x in (k, v)]
        return _call(_key_kernel, kernel, inputs, like, by_rows=False, first=first, count=count, parts=parts)

    own = of(shared, whole - shared) if shared < whole else []
    if not shared:
        return own
    sums = [x.sum(axis=0).astype(like.dtype) for x, like in zip(of(0, shared, parts), (k, v), strict=True)]
    return [jnp.concatenate(both, axis=2) for both in zip(sums, own, strict=True)] if own else sums


# A sink is one more term of the softmax's sum, so it needs no tile: with the log-sum-exp that has it, the gradients of
# the tiles are those of a softmax over more keys.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel, q, k, v, rows, keys, tiles, sinks):
    return _attend_forward(kernel, q, k, v, rows, keys, tiles, sinks)[0]


def _attend_forward(kernel, q, k, v, rows, keys, tiles, sinks):
    forward = _plain_forward if kernel.implementation == "tiles" else _kernel_forward
    out, lse = forward(kernel, q, k, v, rows, keys, tiles)
    if sinks is not None:
        kept = jax.nn.sigmoid(lse - sinks[None])
        out, lse = (out * kept[..., None]).astype(out.dtype), jnp.logaddexp(lse, sinks[None])
    return out, (q, k, v, rows, keys, tiles, sinks, out, lse)


def _attend_backward(kernel, kept, g):
    *inputs, sinks, out, lse = kept
    delta = (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(axis=-1)
    backward: Callable[..., Any] = _plain_backward if kernel.implementation == "tiles" else _kernel_backward
    gradients = backward(kernel, *inputs, g, lse, delta)
    of_sinks = None if sinks is None else -(jnp.exp(sinks[None] - lse) * delta).sum(axis=0)
    gradients = (x.astype(like.dtype) for x, like in zip(gradients, inputs[:3], strict=True))
    return *gradients, None, None, None, of_sinks


_attend.defvjp(_attend_forward, _attend_backward)
