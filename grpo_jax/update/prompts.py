"""The prompts of an update: read once for all of their completions, and the way back through them.

From the reading of the prompts to the backward pass through them, only activations are kept. What that pass needs of
the weights alone, themselves or cast to the compute dtype, is made anew there: kept, it would be a copy for each batch
of prompts that is read at a time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun

from grpo_jax.devices.sharding import constrain, keep_placed
from grpo_jax.devices.streams import count_streams, in_turn, run_in_streams, shared
from grpo_jax.models.scoring import read_prompts
from grpo_jax.types import Params, Prompts


class Spread(NamedTuple):
    """Where the prompts of a batch are: B / `devices` of them, one after another, on each of so many devices."""

    mesh: jax.sharding.Mesh | None = None
    devices: int = 1


def deal(params: Params, count: int) -> list[range]:
    """The numbers 0 … count − 1 dealt out to the streams."""
    streams = count_streams(params, count)
    return [range(i, count, streams) for i in range(streams)]


def read_all(
    params: Params,
    prompts: Prompts,
    dropout: jax.Array | None,
    model: Any,
    size: int,
    spread: Spread,
    *,
    backward: bool,
) -> tuple[Any, list[Any]]:
    """`read_prompts` of all prompts, at most `size` tokens at a time; and what each time keeps for the way back."""
    count = count_reads(prompts, size, spread)

    def read_share(numbers: range) -> list[Any]:
        how: dict[str, Any] = {"count": count, "backward": backward, "spread": spread}
        return [in_turn(read_some(params, prompts, dropout, model, i, **how)) for i in numbers]

    shares = deal(params, count)
    results = run_in_streams(read_share, shares)
    in_order = [results[i % len(shares)][i // len(shares)] for i in range(count)]
    return join_reads([read for read, _ in in_order], spread=spread), [kept for _, kept in in_order]


def count_reads(prompts: Prompts, size: int, spread: Spread) -> int:
    """How many times equally many prompts are read: none has more tokens than a sequence, or it is a single prompt."""
    b, p = prompts.tokens.shape
    b //= spread.devices
    return b // max(n for n in range(1, b + 1) if b % n == 0 and (n == 1 or n * p <= size))


def _take(tree: Any, number: jax.Array | int, count: int, spread: Spread) -> Any:
    """Of arrays [B, ...], those of the prompts that are read at time `number` of `count`: of each device its share."""

    def some(x: jax.Array) -> jax.Array:
        size = x.shape[0] // spread.devices // count
        parts = x.reshape(spread.devices, -1, *x.shape[1:])
        return jax.lax.dynamic_slice_in_dim(parts, number * size, size, axis=1).reshape(-1, *x.shape[1:])

    return jax.tree.map(some, tree)


def cut_reads(read: Any, spread: Spread) -> Any:
    """What `read_prompts` returned, each device's part where its prompts are."""
    last, layers = read
    heads = jax.tree.map(lambda x: constrain(x, spread.mesh, "tensor"), layers)
    return constrain(last, spread.mesh), heads


def rngs_of(dropout: jax.Array | None, *numbers: jax.Array | int) -> dict[str, jax.Array] | None:
    """The keys of `apply`, different for different numbers."""
    return None if dropout is None else {"dropout": functools.reduce(jax.random.fold_in, numbers, dropout)}


def _read(params, prompts, dropout, model, number, *, count, spread):
    some = _take(prompts, number, count, spread)
    return cut_reads(read_prompts(model, params, some, rngs=rngs_of(dropout, 0, number)), spread)


@shared
@functools.partial(jax.jit, static_argnames=("count", "backward", "spread"))
def read_some(params, prompts, dropout, model, number, *, count, backward, spread):
    """`_read`, and what it keeps for the way back: the pullback's leaves that are activations."""
    if not backward:
        return _read(params, prompts, dropout, model, number, count=count, spread=spread), None
    read, leaves, activation, _ = _linearize(params, prompts, dropout, model, number, count=count, spread=spread)
    return read, [leaf for leaf, keep in zip(leaves, activation, strict=True) if keep]


def _linearize(params, prompts, dropout, model, number, *, count, spread):
    """`_read`; and of its pullback the leaves, which of them are activations, and the structure."""
    structure = []

    def forward(params, model, prompts, dropout, number):
        read = lambda params: _read(params, prompts, dropout, model, number, count=count, spread=spread)
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
        if step.primitive.name in ("jit", "checkpoint"):  # calls: what goes in is what the inner jaxpr is given
            inner = step.params["jaxpr"]
            marks = _depend(getattr(inner, "jaxpr", inner), marks)
        else:
            marks = [any(marks)] * len(step.outvars)
        marked.update(x for x, mark in zip(step.outvars, marks, strict=True) if mark)
    return marks_of(jaxpr.outvars)


@functools.partial(jax.jit, static_argnames=("spread",))
def join_reads(reads, *, spread):
    """All prompts [B, ...] of some reads, on each device its own one after another."""
    parts = lambda x: x.reshape(spread.devices, -1, *x.shape[1:])
    both = lambda *x: jnp.concatenate([parts(x) for x in x], axis=1).reshape(-1, *x[0].shape[1:])
    return cut_reads(jax.tree.map(both, *reads), spread)


@shared
@functools.partial(jax.jit, static_argnames=("count", "spread"), donate_argnums=(0,))
def add_prompts(total, kept, of_read, read, params, prompts, dropout, model, number, *, count, spread):
    """The gradient of the params with what comes through the prompts of one `_read` added to it."""
    # Traced once more for what comes of weights alone; XLA drops the rest of it.
    how: dict[str, Any] = {"count": count, "spread": spread}
    _, leaves, activation, tree = _linearize(params, prompts, dropout, model, number, **how)
    rest = iter(kept)
    leaves = [next(rest) if keep else leaf for leaf, keep in zip(leaves, activation, strict=True)]
    of_read = jax.tree.map(lambda g, x: g.astype(x.dtype), of_read, read)
    (more,) = jax.tree.unflatten(tree, leaves)(_take(of_read, number, count, spread))
    return keep_placed(jax.tree.map(jnp.add, total, more), spread.mesh)
