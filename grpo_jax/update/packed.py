"""Scoring and updating without the padding, on one device: `update.train_step`, piece by piece.

Rows are cut to their lengths and laid end to end in `packing` pieces. The prompts are read once for all pieces, and one
backward pass through them ends the update:

```
prompts ─► last states, keys and values ─► piece 1 ─► loss ─► gradient of the params
                    ▲                └───► piece 2 ─► loss ─►  + …
                    └── gradient of these, summed over the pieces ─► + gradient of the params
```

One program serves all pieces, and the loop over them is on the host: it never waits for the device.

From the reading of the prompts to the backward pass through them, only activations are kept. What that pass needs of
the weights alone, themselves or cast to the compute dtype, is made anew there: kept, it would be a copy for each part.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal, jaxpr_as_fun

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.sharding import keep_placed, mesh_of, split
from grpo_jax.devices.streams import count_streams, devices_of, in_turn, run_in_streams
from grpo_jax.maths.metrics import MetricSums
from grpo_jax.models.packing import Piece, pack, padding_share, piece_size
from grpo_jax.models.scoring import read_prompts, score_piece
from grpo_jax.types import Batch, Model, Params, Prompts, as_argument, is_cached
from grpo_jax.update.objective import apply_gradients, count_totals, loss_of_rows, sampling_settings
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import gradients as gradients_of_batch
from grpo_jax.update.step import score_batch, train_step, zeros_like

__all__ = ["gradients", "kept_bytes", "lower_score", "lower_update", "score", "update"]

CPU_TOKENS = 512
"""Tokens of a piece on a CPU at most: enough to fill the matrix products of all cores; with more, activations leave the
cache."""


@functools.partial(
    jax.jit, static_argnames=("optimizer", "config", "on_policy", "micro", "mesh"), donate_argnames=("state",)
)
def _jit_train_step(state, batch, *, mesh=None, **settings):
    state, metrics = train_step(state, batch, **settings)
    return keep_placed(state, mesh), metrics


_jit_gradients = jax.jit(gradients_of_batch, static_argnames=("config", "on_policy", "micro"))
_jit_score_batch = jax.jit(score_batch, static_argnames=("config", "micro"))
_jit_apply = jax.jit(apply_gradients, static_argnames=("optimizer", "config"), donate_argnames=("state",))
_jit_totals = jax.jit(count_totals, static_argnames=("config",))


def score(
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    model: Model,
    config: GRPOConfig,
    micro: tuple[int, int],
) -> jax.Array:
    """Log-probs [B, G, T] of completions under any params (reference, initial policy); 0 where mask is 0.

    They may still be on their way when this returns; on a CPU, the last piece of a single stream at most.
    """
    if not _packs(model, params):
        at: dict[str, Any] = {"model": as_argument(model), "config": config, "micro": micro}
        return _jit_score_batch(params, *split((prompts, tokens, mask), mesh_of(params)), **at)
    pieces = _pieces(params, tokens, mask, micro)
    return _score_pieces(params, prompts, mask, pieces, as_argument(model), config, with_entropy=False)[0]


def update(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    optimizer: optax.GradientTransformation,
    config: GRPOConfig,
    on_policy: bool,
    micro: tuple[int, int],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`update.train_step`, compiled, and packed where the model allows it. `state` is consumed.

    A packed update adds the metric `padding_share`, the share of the trained columns that hold no token.
    """
    how: dict[str, Any] = {"config": config, "on_policy": on_policy, "micro": micro}
    if not _packs(model, state.params):
        mesh = mesh_of(state.params)
        return _jit_train_step(
            state, split(batch, mesh), model=as_argument(model), optimizer=optimizer, mesh=mesh, **how
        )
    grads, sums, pieces = _gradients(state, batch, model=model, **how)
    state, metrics = _jit_apply(state, grads, sums, optimizer=optimizer, config=config)
    # Pieces count the rows that fill their shape, and miss those without a token.
    rows = batch.mask.shape[0] * batch.mask.shape[1]
    return state, {**metrics, "rows": jnp.float32(rows), "padding_share": jnp.float32(padding_share(pieces))}


def gradients(
    state: TrainState, batch: Batch, *, model: Model, config: GRPOConfig, on_policy: bool, micro: tuple[int, int]
) -> tuple[Params, list[MetricSums]]:
    """The first half of `update`: the gradient of a batch, and the metric sums of its parts."""
    how: dict[str, Any] = {"config": config, "on_policy": on_policy, "micro": micro}
    if not _packs(model, state.params):
        return _jit_gradients(state, batch, model=as_argument(model), **how)
    grads, sums, _ = _gradients(state, batch, model=model, **how)
    return grads, sums


def _gradients(
    state: TrainState, batch: Batch, *, model: Model, config: GRPOConfig, on_policy: bool, micro: tuple[int, int]
) -> tuple[Params, list[MetricSums], list[Piece]]:
    """Gradient and metric sums of a packed batch, and its pieces."""
    fixed: dict[str, Any] = {"model": as_argument(model), "config": config, "on_policy": on_policy}
    pieces = _pieces(state.params, batch.tokens, batch.mask, micro)
    entropies = None
    if config.top_entropy_quantile < 1:
        _, entropies = _score_pieces(
            state.params, batch.prompts, batch.mask, pieces, fixed["model"], config, with_entropy=True
        )
    totals = _jit_totals(batch, config=config, entropies=entropies)
    dropout = jax.random.fold_in(jax.random.fold_in(state.key, 1), state.step) if getattr(model, "dropout", 0) else None

    read, kept = _read(state.params, batch.prompts, dropout, fixed["model"], pieces, backward=True)

    def gradients_of(numbers: range) -> tuple[Any, list[Any]]:
        grads, sums = _zeros((state.params, read)), []
        for i in numbers:
            grads, more = _add_piece(in_turn(grads), state, read, batch, pieces[i], totals, dropout, i, **fixed)
            sums.append(more)
        return grads, sums

    program = ("gradients", *_shape(pieces, read), jax.tree.structure(fixed["model"]), config, on_policy)
    results = run_in_streams(gradients_of, _shares(state.params, len(pieces)), program=program)
    sums = [more for _, sums in results for more in sums]
    totals_of, reads = zip(*(grads for grads, _ in results), strict=True)
    of_read = _sum(reads)

    def with_prompts(share: tuple[Params, range]) -> Params:
        total, numbers = share
        for i in numbers:
            given = (state.params, batch.prompts, dropout, fixed["model"], i)
            total = _add_prompts(in_turn(total), kept[i], of_read, read, *given, parts=len(kept))
        return total

    # One stream's part of the prompts goes on top of the same stream's pieces; a stream may have none.
    shares = [range(i, len(kept), len(totals_of)) for i in range(len(totals_of))]
    shared = list(zip(totals_of, shares, strict=True))
    program = ("prompts", *_shape(pieces, read), jax.tree.structure(fixed["model"]), len(kept))
    return _sum(run_in_streams(with_prompts, shared, program=program)), sums, pieces


def lower_update(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    optimizer: optax.GradientTransformation,
    config: GRPOConfig,
    on_policy: bool,
    micro: tuple[int, int],
    mesh: Any = None,
    tokens: int | None = None,
) -> Any:
    """The largest program of `update`, lowered for batches whose rows are all T long; only shapes are looked at.

    `tokens` of a piece are those of the present device unless they are given.
    """
    how: dict[str, Any] = {"model": as_argument(model), "config": config, "on_policy": on_policy}
    if mesh is not None or not _packs(model, state.params):
        return _jit_train_step.lower(state, batch, optimizer=optimizer, micro=micro, mesh=mesh, **how)
    pieces = _full_pieces(state, batch, micro, tokens)
    parts, read, _ = _read_shapes(state, batch, model, pieces)
    read = jax.eval_shape(_join, [read] * parts)
    dropout = state.key if getattr(model, "dropout", 0) else None
    entropies = batch.sampling_log_probs if config.top_entropy_quantile < 1 else None
    totals = jax.eval_shape(lambda batch, x: count_totals(batch, config, x), batch, entropies)
    zeros = jax.eval_shape(_zeros, (state.params, read))
    return _add_piece.lower(zeros, state, read, batch, pieces[0], totals, dropout, 0, **how)


def kept_bytes(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    micro: tuple[int, int],
    mesh: Any = None,
    tokens: int | None = None,
) -> int:
    """Bytes that `update` holds beside the program of `lower_update`: activations of all prompts, for the way back.

    Only shapes are looked at; arguments as there. 0 on a mesh, and for a model whose batches are not packed.
    """
    if mesh is not None or not _packs(model, state.params):
        return 0
    parts, _, kept = _read_shapes(state, batch, model, _full_pieces(state, batch, micro, tokens))
    return parts * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))


def _full_pieces(state: TrainState, batch: Batch, micro: tuple[int, int], tokens: int | None) -> list[Piece]:
    """The pieces of a batch whose rows are all T long."""
    full: Any = np.ones(batch.mask.shape, bool)
    return _pieces(state.params, full.astype(np.int32), full, micro, tokens)


def _read_shapes(state: TrainState, batch: Batch, model: Model, pieces: list[Piece]) -> tuple[int, Any, Any]:
    """How many parts the prompts are read in, and the shapes of what `_read_part` returns of each."""
    parts = _parts(batch.prompts, pieces)
    dropout = state.key if getattr(model, "dropout", 0) else None
    read_part = functools.partial(_read_part, parts=parts, backward=True)
    return parts, *jax.eval_shape(read_part, state.params, batch.prompts, dropout, as_argument(model), 0)


def lower_score(
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    model: Model,
    config: GRPOConfig,
    micro: Any,
) -> Any:
    """The program that scores a batch on a mesh, lowered; only shapes are looked at."""
    at: dict[str, Any] = {"model": as_argument(model), "config": config, "micro": micro}
    return _jit_score_batch.lower(params, prompts, tokens, mask, **at)


def _packs(model: Model, params: Params) -> bool:
    """Whether a batch is packed: for models of this package, on one device."""
    return is_cached(model) and len(devices_of(params)) < 2


def _pieces(
    params: Params, tokens: jax.Array, mask: jax.Array, micro: tuple[int, int], most: int | None = None
) -> list[Piece]:
    """The pieces of a batch, with at most as many tokens as a micro-batch has."""
    longest = tokens.shape[2]
    given, most = most, micro[0] * micro[1] * longest
    if given is not None:
        most = given
    elif all(device.platform == "cpu" for device in devices_of(params)):
        most = min(most, CPU_TOKENS)
    return pack(np.asarray(tokens), np.asarray(mask), size=piece_size(most, longest))


def _shares(params: Params, count: int) -> list[range]:
    """Which of so many parts each stream computes."""
    streams = count_streams(params, count)
    return [range(i, count, streams) for i in range(streams)]


def _shape(pieces: list[Piece], read: Any) -> tuple[Any, ...]:
    """What a piece's program depends on, beside the model and the settings."""
    piece = pieces[0]
    return piece.tokens.shape, jax.tree.structure(piece), jax.tree.map(jnp.shape, read[1])


def _read(
    params: Params, prompts: Prompts, dropout: jax.Array | None, model: Any, pieces: list[Piece], *, backward: bool
) -> tuple[Any, list[Any]]:
    """`read_prompts` of all prompts, in parts of a piece's size; and what each part keeps for the way back."""
    count = _parts(prompts, pieces)

    def read_some(numbers: range) -> list[Any]:
        how: dict[str, Any] = {"parts": count, "backward": backward}
        return [in_turn(_read_part(params, prompts, dropout, model, i, **how)) for i in numbers]

    program = ("read", backward, prompts.tokens.shape, jax.tree.structure(model), count)
    shares = _shares(params, count)
    results = run_in_streams(read_some, shares, program=program)
    parts = [results[i % len(shares)][i // len(shares)] for i in range(count)]
    return _join([read for read, _ in parts]), [kept for _, kept in parts]


def _parts(prompts: Prompts, pieces: list[Piece]) -> int:
    """How many equal parts prompts are read in, so that none is larger than a piece (or it is a single prompt)."""
    b, p = prompts.tokens.shape
    return b // max(n for n in range(1, b + 1) if b % n == 0 and (n == 1 or n * p <= pieces[0].tokens.shape[0]))


def _part(tree: Any, number: jax.Array | int, parts: int) -> Any:
    """One of so many equal parts of arrays, along their first axis."""
    slice_of = lambda x: jax.lax.dynamic_slice_in_dim(x, number * (x.shape[0] // parts), x.shape[0] // parts)
    return jax.tree.map(slice_of, tree)


def _keys(dropout: jax.Array | None, *numbers: jax.Array | int) -> dict[str, jax.Array] | None:
    return None if dropout is None else {"dropout": functools.reduce(jax.random.fold_in, numbers, dropout)}


def _read_one(params, prompts, dropout, model, number, *, parts):
    return read_prompts(model, params, _part(prompts, number, parts), rngs=_keys(dropout, 0, number))


@functools.partial(jax.jit, static_argnames=("parts", "backward"))
def _read_part(params, prompts, dropout, model, number, *, parts, backward):
    """`read_prompts` of one part, and what it keeps for the way back: the pullback's leaves that are activations."""
    if not backward:
        return _read_one(params, prompts, dropout, model, number, parts=parts), None
    read, leaves, activation, _ = _linearize(params, prompts, dropout, model, number, parts=parts)
    return read, [leaf for leaf, keep in zip(leaves, activation, strict=True) if keep]


def _linearize(params, prompts, dropout, model, number, *, parts):
    """What is read from one part; of its pullback the leaves, which of them are activations, and the structure."""
    structure = []

    def forward(params, model, prompts, dropout, number):
        read = lambda params: _read_one(params, prompts, dropout, model, number, parts=parts)
        result, pullback = jax.vjp(read, params)
        leaves, tree = jax.tree.flatten(pullback)
        structure.append(tree)
        return result, leaves

    weights, given = (params, model), (prompts, dropout, number)
    traced, shapes = jax.make_jaxpr(forward, return_shape=True)(*weights, *given)
    of_given = [False] * len(jax.tree.leaves(weights)) + [True] * len(jax.tree.leaves(given))
    depends = _depend(traced.jaxpr, of_given)
    results = jaxpr_as_fun(traced)(*jax.tree.leaves((*weights, *given)))
    read, leaves = jax.tree.unflatten(jax.tree.structure(shapes), results)
    return read, leaves, depends[len(depends) - len(leaves) :], structure[0]


def _depend(jaxpr: Any, given: list[bool]) -> list[bool]:
    """Which results of a jaxpr depend on those of its arguments that are marked; in doubt they do."""
    marked = {x for x, mark in zip(jaxpr.invars, given, strict=True) if mark}
    marks_of = lambda values: [not isinstance(x, Literal) and x in marked for x in values]
    for step in jaxpr.eqns:
        marks = marks_of(step.invars)
        if step.primitive.name in ("jit", "pjit", "checkpoint"):  # calls: what goes in is what the inner jaxpr is given
            inner = step.params["jaxpr"]
            marks = _depend(getattr(inner, "jaxpr", inner), marks)
        else:
            marks = [any(marks)] * len(step.outvars)
        marked.update(x for x, mark in zip(step.outvars, marks, strict=True) if mark)
    return marks_of(jaxpr.outvars)


@jax.jit
def _sum(trees):
    return jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *trees)


@jax.jit
def _join(reads):
    return jax.tree.map(lambda *x: jnp.concatenate(x), *reads)


@jax.jit
def _zeros(like):
    # Also of what was read: gradients of keys and values are sums over many pieces, whatever the compute dtype.
    return zeros_like(like)


@functools.partial(jax.jit, static_argnames=("config", "on_policy"), donate_argnums=(0,))
def _add_piece(gradients, state, read, batch, piece, totals, dropout, number, *, model, config, on_policy):
    """Gradients of the params and of what was read from the prompts, with those of one piece added to them."""
    rows = batch.replace(prompts=None, counted=None)
    rows = jax.tree.map(piece.of, rows)
    rows = rows.replace(mask=rows.mask & piece.mask)

    def loss_fn(params, read):
        log_probs, entropies = score_piece(
            model,
            params,
            read,
            batch.prompts.lengths,
            piece,
            rngs=_keys(dropout, 1, number),
            **sampling_settings(config),
        )
        return loss_of_rows(log_probs, entropies, rows, state, totals, config=config, on_policy=on_policy)

    more, sums = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(state.params, read)
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), gradients, more), sums


@functools.partial(jax.jit, static_argnames=("parts",), donate_argnums=(0,))
def _add_prompts(total, kept, of_read, read, params, prompts, dropout, model, number, *, parts):
    """The gradient of the params with what comes through one part of the prompts added to it."""
    # Traced once more for what comes of weights alone; XLA drops the rest of it.
    _, leaves, activation, tree = _linearize(params, prompts, dropout, model, number, parts=parts)
    rest = iter(kept)
    pullback = jax.tree.unflatten(
        tree, [next(rest) if keep else leaf for leaf, keep in zip(leaves, activation, strict=True)]
    )
    of_read = jax.tree.map(lambda g, x: g.astype(x.dtype), of_read, read)
    (more,) = pullback(_part(of_read, number, parts))
    return jax.tree.map(jnp.add, total, more)


def _score_pieces(
    params: Params, prompts: Prompts, mask: jax.Array, pieces: list[Piece], model: Any, config: GRPOConfig, **how: bool
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [B, G, T] of all rows."""
    read, _ = _read(params, prompts, None, model, pieces, backward=False)

    def scores_of(numbers: range) -> tuple[jax.Array, jax.Array]:
        scores = (jnp.zeros(mask.shape), jnp.zeros(mask.shape))
        for i in numbers:
            scores = _score_piece(
                in_turn(scores), params, read, prompts.lengths, mask, pieces[i], model=model, config=config, **how
            )
        return scores

    program = ("scores", *_shape(pieces, read), jax.tree.structure(model), config)
    return _sum(run_in_streams(scores_of, _shares(params, len(pieces)), program=program))


@functools.partial(jax.jit, static_argnames=("config", "with_entropy"), donate_argnums=(0,))
def _score_piece(scores, params, read, lengths, mask, piece, *, model, config, with_entropy):
    new = score_piece(model, params, read, lengths, piece, with_entropy=with_entropy, **sampling_settings(config))
    seen = piece.of(mask)
    # A row that only fills the shape adds zeros to row 0.
    put = lambda old, x: old.reshape(-1, old.shape[-1]).at[piece.rows].add(jnp.where(seen, x, 0)).reshape(old.shape)
    return jax.tree.map(put, scores, new)
