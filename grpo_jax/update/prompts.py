"""The prompts of an update: read once for all of their completions, and the way back through them.

They are read in equal parts, and the activations of a part are kept as long as a packed sequence needs it (`order`).
From the reading of the prompts to the backward pass through them, only residuals that depend on tokens are kept. Those
that are weights, or weights cast to the compute dtype, are made anew in the backward pass: kept, they would be a copy
of the weights for each batch of prompts that is read at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun

from grpo_jax.models.scoring import ReadPrompts, read_prompts
from grpo_jax.models.sharding import constrain, keep_placed
from grpo_jax.models.streams import count_streams, in_turn, run_in_streams, shared
from grpo_jax.types import CachedModel, Params, Prompts
from grpo_jax.update.step import zeros_like

Tree = TypeVar("Tree")

Activations = list[jax.Array]
"""Those leaves of a pullback that depend on more than weights: what the way back through the prompts needs."""


LEAST_KEPT = 4096
"""Tokens of prompts whose activations may be kept at the same time on a device, however small a packed sequence is."""


class Shards(NamedTuple):
    """How the prompts of a batch are cut over a mesh: B / `devices` of them, one after another, on each.

    Where B does not divide, `devices` is 1 and all devices compute all of them.
    """

    mesh: jax.sharding.Mesh | None = None
    devices: int = 1


def deal(params: Params, count: int) -> list[range]:
    """The numbers 0 … count − 1, dealt out to as many streams as there may be."""
    streams = count_streams(params, count)
    return [range(i, count, streams) for i in range(streams)]


class Reading(NamedTuple):
    """All that the reading of prompts depends on; a pytree. `dropout` is `step.dropout_key`, None without dropout."""

    params: Params
    prompts: Prompts
    dropout: jax.Array | None
    model: CachedModel


def read_all(reading: Reading, size: int, shards: Shards) -> ReadPrompts:
    """`read_prompts` of all prompts, at most `size` tokens at a time."""
    prompts = PromptsInTurn(reading, size, shards)
    return prompts.read(range(prompts.count), backward=False)


class PromptsInTurn:
    """The prompts of an update in `count` equal parts of at most `size` tokens, or of a single prompt.

    Each is read when it is needed; its activations are in `kept`, by its number, until nothing needs them.
    """

    def __init__(self, reading: Reading, size: int, shards: Shards):
        self.count = count_reads(reading.prompts, size, shards)
        self.kept: dict[int, Activations] = {}
        self._reading, self._shards = reading, shards
        self._read: ReadPrompts | None = None

    def read(self, parts: Sequence[int], *, backward: bool = True) -> ReadPrompts:
        """All prompts, of which these parts have been read and those before; the others are zeros.

        The parts are dealt out to the streams. What an earlier call returned is consumed. Without `backward` no
        activations of theirs are kept.
        """

        def read_share(numbers: range) -> list[tuple[ReadPrompts, Activations]]:
            count, shards = self.count, self._shards
            some = functools.partial(read_some, self._reading, count=count, backward=backward, shards=shards)
            return [in_turn(some(parts[i])) for i in numbers]

        shares = run_in_streams(read_share, deal(self._reading.params, len(parts))) if parts else []
        for i, number in enumerate(parts):
            read, activations = shares[i % len(shares)][i // len(shares)]
            self._put(read, number)
            if backward:
                self.kept[number] = activations
        assert self._read is not None, "the first call reads at least one part"
        return self._read

    def _put(self, read: ReadPrompts, number: int) -> None:
        """One part among all prompts."""
        if self.count == 1:
            self._read = read
            return
        if self._read is None:
            self._read = zero_reads(read, count=self.count, shards=self._shards)
        self._read = put_read(self._read, read, number, count=self.count, shards=self._shards)

    def leave(self, parts: Sequence[int], sums: Sequence[Params], read_grads: ReadPrompts) -> list[Params]:
        """Go back through some parts: the gradient of the params from that of what was read of them.

        It is added to sums of gradients, one for each stream, which are consumed.
        """

        def add_share(stream: int) -> Params:
            total, count, shards = sums[stream], self.count, self._shards
            for number in parts[stream :: len(sums)]:  # a stream may have none
                kept = self.kept.pop(number)
                total = add_prompts(
                    in_turn(total), kept, read_grads, self._read, self._reading, number, count=count, shards=shards
                )
            return total

        return run_in_streams(add_share, range(len(sums)))


def sum_trees(trees: Sequence[Tree]) -> Tree:
    """The sum of trees of one structure."""
    return trees[0] if len(trees) == 1 else _add_up(tuple(trees))


@jax.jit
def _add_up(trees):
    return jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *trees)


def count_reads(prompts: Prompts, size: int, shards: Shards) -> int:
    """In how many equal parts the prompts are read: each has at most `size` tokens, or is a single prompt."""
    b, p = prompts.tokens.shape
    b //= shards.devices
    return b // max(n for n in range(1, b + 1) if b % n == 0 and (n == 1 or n * p <= size))


def count_neighbours(prompts: Prompts, size: int, shards: Shards) -> int:
    """Prompts of a device that may have completions in one packed sequence, so that their activations are kept at once.

    Whole parts, with the tokens of a packed sequence or `LEAST_KEPT`; with fewer, short completions would fill none.
    """
    count = count_reads(prompts, size, shards)
    tokens = prompts.tokens.size // shards.devices // count
    groups = -(-count // max(1, max(size, LEAST_KEPT) // tokens))
    return -(-count // groups) * (prompts.tokens.shape[0] // shards.devices // count)


def _take(tree: Tree, number: jax.Array | int, count: int, shards: Shards) -> Tree:
    """The `number`-th of `count` parts of arrays [B, ...], which has a share of every device's prompts."""

    def some(x: jax.Array) -> jax.Array:
        size = x.shape[0] // shards.devices // count
        parts = x.reshape(shards.devices, -1, *x.shape[1:])
        return jax.lax.dynamic_slice_in_dim(parts, number * size, size, axis=1).reshape(-1, *x.shape[1:])

    return jax.tree.map(some, tree)


def place_read(read: ReadPrompts, shards: Shards) -> ReadPrompts:
    """Inside a compiled function: the states, keys and values of each prompt on its own device."""
    heads = jax.tree.map(lambda x: constrain(x, shards.mesh, "tensor"), read.layers)
    return ReadPrompts(constrain(read.last, shards.mesh), heads)


def rngs_of(dropout: jax.Array | None, *numbers: jax.Array | int) -> dict[str, jax.Array] | None:
    """The keys of `apply`, different for different numbers."""
    return None if dropout is None else {"dropout": functools.reduce(jax.random.fold_in, numbers, dropout)}


def _read(reading, number, *, count, shards):
    params, prompts, dropout, model = reading
    some = _take(prompts, number, count, shards)
    return place_read(read_prompts(model, params, some, rngs=rngs_of(dropout, 0, number)), shards)


@shared
@functools.partial(jax.jit, static_argnames=("count", "backward", "shards"))
def read_some(reading, number, *, count, backward, shards):
    """One part of the prompts read, and with `backward` its `Activations`."""
    if not backward:
        return _read(reading, number, count=count, shards=shards), None
    read, leaves, activation, _ = _linearize(reading, number, count=count, shards=shards)
    return read, [leaf for leaf, keep in zip(leaves, activation, strict=True) if keep]


def _linearize(reading, number, *, count, shards):
    """`_read`; and its pullback as leaves, a mark for each leaf that is an activation, and their structure."""
    structure = []

    def forward(params, model, prompts, dropout, number):
        def read(params):
            return _read(Reading(params, prompts, dropout, model), number, count=count, shards=shards)

        result, pullback = jax.vjp(read, params)
        leaves, tree = jax.tree.flatten(pullback)
        structure.append(tree)
        return result, leaves

    arguments = (reading.params, reading.model, reading.prompts, reading.dropout, number)
    traced, shapes = jax.make_jaxpr(forward, return_shape=True)(*arguments)
    leaves, weights = jax.tree.leaves(arguments), len(jax.tree.leaves(arguments[:2]))
    depends = _depend(traced.jaxpr, [i >= weights for i in range(len(leaves))])
    results = jaxpr_as_fun(traced)(*leaves)
    read, leaves = jax.tree.unflatten(jax.tree.structure(shapes), results)
    return read, leaves, depends[len(depends) - len(leaves) :], structure[0]


def _depend(jaxpr: Jaxpr, arguments: list[bool]) -> list[bool]:
    """Which results of a jaxpr depend on those of its arguments that are marked; in doubt they do."""
    marked = {x for x, mark in zip(jaxpr.invars, arguments, strict=True) if mark}

    def marks_of(values: Sequence[object]) -> list[bool]:
        return [not isinstance(x, Literal) and x in marked for x in values]

    for step in jaxpr.eqns:
        marks = marks_of(step.invars)
        if step.primitive.name in ("jit", "checkpoint"):  # calls: what goes in is what the inner jaxpr is given
            inner = step.params["jaxpr"]
            marks = _depend(getattr(inner, "jaxpr", inner), marks)
        else:
            marks = [any(marks)] * len(step.outvars)
        marked.update(x for x, mark in zip(step.outvars, marks, strict=True) if mark)
    return marks_of(jaxpr.outvars)


@functools.partial(jax.jit, static_argnames=("count", "shards"))
def zero_reads(read, *, count, shards):
    """Room for all prompts, by the shapes of one of `count` parts."""
    return place_read(jax.tree.map(lambda x: jnp.zeros((count * x.shape[0], *x.shape[1:]), x.dtype), read), shards)


@functools.partial(jax.jit, static_argnames=("count", "shards"), donate_argnums=(0,))
def put_read(whole, read, number, *, count, shards):
    """All prompts [B, ...] with one part among them, on each device its own."""

    def put(whole: jax.Array, x: jax.Array) -> jax.Array:
        parts, own = (y.reshape(shards.devices, -1, *x.shape[1:]) for y in (whole, x))
        return jax.lax.dynamic_update_slice_in_dim(parts, own, number * own.shape[1], axis=1).reshape(whole.shape)

    return place_read(jax.tree.map(put, whole, read), shards)


@shared
@functools.partial(jax.jit, static_argnames=("count", "shards"), donate_argnums=(0,))
def add_prompts(total, kept, read_grads, read, reading, number, *, count, shards):
    """The gradient of the params, with what comes through one part of the prompts added to it."""
    # Traced once more for what comes of weights alone; XLA drops the rest of it.
    _, leaves, activation, tree = _linearize(reading, number, count=count, shards=shards)
    rest = iter(kept)
    leaves = [next(rest) if keep else leaf for leaf, keep in zip(leaves, activation, strict=True)]
    read_grads = jax.tree.map(lambda g, x: g.astype(x.dtype), read_grads, read)
    (more,) = jax.tree.unflatten(tree, leaves)(_take(read_grads, number, count, shards))
    return keep_placed(jax.tree.map(jnp.add, total, more), shards.mesh)


@functools.partial(jax.jit, static_argnames=("shards",))
def zero_gradients(like, *, shards):
    # Also of what was read: gradients of keys and values are sums over many sequences, whatever the compute dtype.
    return place_gradients(zeros_like(like), shards)


def place_gradients(grads: tuple[Params, ReadPrompts], shards: Shards) -> tuple[Params, ReadPrompts]:
    """Gradients of the params and of the read prompts, where these are."""
    of_params, of_read = grads
    return keep_placed(of_params, shards.mesh), place_read(of_read, shards)
