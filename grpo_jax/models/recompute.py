"""A function whose inner values are computed again in the backward pass, by a way that holds on CPUs.

`jax.checkpoint` keeps the two computations apart by an optimization barrier. XLA's compiler for CPUs drops barriers
before it looks for values that are computed twice, finds all of them, and keeps the first: a program takes as much
memory as without. Here the second computation begins with a number that comes of the cotangent, so it is another one,
and it cannot begin before the cotangent is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Result = TypeVar("Result")


def recomputed(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function, of which nothing is kept for the backward pass but its arguments.

    Its gradient is that of `function`, held at the same arguments; it is not differentiated forward or twice.

    Args:
      function: of pytrees of arrays. The first argument, such as weights, goes into the second computation as it is;
        to the floating-point arrays of the others 0 · (elements of the cotangent) is added.

    Example:
      >>> square = recomputed(lambda weights, x: jnp.sin(weights * x) ** 2)
      >>> round(float(jax.grad(square, argnums=1)(2.0, 0.5)), 4), round(float(2 * jnp.sin(2.0)), 4)
      (1.8186, 1.8186)
    """

    @jax.custom_vjp
    def call(*arguments: object) -> Result:
        return function(*arguments)

    def forward(*arguments: object) -> tuple[Result, tuple[object, ...]]:
        return function(*arguments), arguments

    def backward(arguments: tuple[object, ...], cotangents: Result) -> tuple[object, ...]:
        first, *others = arguments
        zero = functools.reduce(jnp.add, [0 * x.reshape(-1)[0] for x in jax.tree.leaves(cotangents) if _moves(x)])
        tied = jax.tree.map(lambda x: x + zero.astype(x.dtype) if _moves(x) else x, others)
        leaves, tree = jax.tree.flatten((first, *tied))
        moving = [i for i, x in enumerate(leaves) if _moves(x)]

        def of(*values: jax.Array) -> Result:
            there = dict(zip(moving, values, strict=True))
            return function(*jax.tree.unflatten(tree, [there.get(i, x) for i, x in enumerate(leaves)]))

        _, pullback = jax.vjp(of, *(leaves[i] for i in moving))
        found = dict(zip(moving, pullback(cotangents), strict=True))
        none = [np.zeros(np.shape(x), jax.dtypes.float0) for x in leaves]
        return jax.tree.unflatten(tree, [found.get(i, none[i]) for i in range(len(leaves))])

    call.defvjp(forward, backward)
    return call


def _moves(x: ArrayLike) -> bool:
    """Whether a gradient with respect to it exists."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))
