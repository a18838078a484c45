"""The largest compiled functions in an update, bound to abstract arguments, to plan memory without arrays."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from grpo_jax.models.sharding import abstract, place_of, shard_count, split_sharding, tree_sharding
from grpo_jax.types import Batch
from grpo_jax.update.objective import count_totals
from grpo_jax.update.packed import Packed, PackedUpdater, add_gradients, score_part, zero_gradients
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import Updater, score_padded, update_padded

Tree = TypeVar("Tree")


class UpdateCalls(NamedTuple):
    """An updater's largest compiled functions, bound to abstract completions of the maximum length T.

    Attributes:
      update: computes the gradient for one part of a minibatch, or runs the whole step if completions are padded.
      score: computes log-probs under the reference, or under the policy if there is no reference.
    """

    update: functools.partial[Any]
    score: functools.partial[Any]


def update_calls(updater: Updater, state: TrainState, batch: Batch) -> UpdateCalls:
    """Bind an updater's functions to `state` and `batch`, which may contain arrays or `ShapeDtypeStruct`s."""
    scored_by = state.params if state.ref_params is None else state.ref_params
    if not isinstance(updater, PackedUpdater):
        scores = functools.partial(score_padded, updater, scored_by, batch.prompts, batch.tokens, batch.mask)
        return UpdateCalls(functools.partial(update_padded, updater, state, batch), scores)
    mesh, part = updater.mesh, abstract_part(updater, state, batch)
    state, batch = abstract((state, batch))
    selected = None if part.selected is None else batch.mask
    totals = _placed(jax.eval_shape(count_totals, batch, selected), mesh, (batch, part))
    total = jax.eval_shape(zero_gradients, updater, state.params)
    if mesh is not None:  # use the sharding table, which also names the leaves to replicate
        total = jax.tree.map(_at, total, tree_sharding(total, mesh))
    total, state = _placed(total, mesh, state.params), _placed(state, mesh)
    scored_by = state.params if state.ref_params is None else state.ref_params
    return UpdateCalls(
        functools.partial(add_gradients, updater, total, state, part, totals),
        functools.partial(score_part, updater, scored_by, part, False),
    )


def abstract_part(updater: PackedUpdater, state: TrainState, batch: Batch) -> Packed:
    """Return an abstract part of a minibatch whose completions all have the maximum length T."""
    _, _, each = updater.count_parts(state.params, batch)
    rows, shapes = each * shard_count(updater.mesh), updater.shapes(state.params, batch.mask.shape)
    part: Batch = jax.tree.map(lambda x: np.zeros((rows, *x.shape[1:]), x.dtype), batch.replace(counted=None))
    part = part.replace(mask=~part.mask)
    selected = part.mask if updater.config.top_entropy_quantile < 1 else None
    shape = next((shape for shape in shapes if shape.whole), shapes[0])
    packed = updater.pack_part(part, selected, np.ones(rows, bool), shape, 0)
    return _placed(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), packed), updater.mesh)


def _placed(tree: Tree, mesh: jax.sharding.Mesh | None, source: object = None) -> Tree:
    """Add shardings to abstract arrays. On a mesh, params are sharded according to the table and other arrays along
    prompts. Without a mesh, arrays get the sharding that results computed from `source` would have."""
    if mesh is None:
        at = place_of(source)
        return tree if at is None else jax.tree.map(lambda x: _at(x, at), tree)
    by_prompts, by_table = split_sharding(tree, mesh), tree_sharding(tree, mesh)
    return jax.tree.map(
        lambda x, prompts, table: _at(x, table if any(table.spec) else prompts), tree, by_prompts, by_table
    )


def _at(x: jax.Array | jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Make an array abstract, with the given sharding unless it already has a sharding."""
    sharding = getattr(x, "sharding", None) or sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))
