"""Token sampling from hidden states: random numbers for each token index, and draws from sharded logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.maths.sampling import Sampling, draw_tokens, greedy_tokens, process_logits, uniforms, vocabulary_blocks
from grpo_jax.maths.stops import Stops
from grpo_jax.models.sharding import constrain
from grpo_jax.types import BuiltinModel, Params

Variables = dict[str, Params]
"""A model's variable collections: "params" and, on a single CPU, "columns"."""


class DecodeSettings(NamedTuple):
    """Settings for sampling tokens and ending turns. They are hashable, as `jax.jit` requires of static arguments.

    `eos_token_ids` contains EOS ids and stop ids. `stops` is the automaton for stop strings; it becomes a compile-time
    constant with one or two bytes per vocabulary token. `mesh` is None on one device.
    """

    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    sampling: Sampling = Sampling()
    stops: Stops | None = None
    mesh: Mesh | None = None


@functools.partial(jax.jit, static_argnames=("num_generations",))
def completion_keys(key: jax.Array, prompt_indices: jax.Array, num_generations: int) -> jax.Array:
    """Return one typed key per completion, [B, G]: fold_in(fold_in(key, prompt_indices[b]), g)."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    fold, group = jax.random.fold_in, jnp.arange(num_generations)
    return jax.vmap(lambda b: jax.vmap(lambda g: fold(fold(key, b), g))(group))(prompt_indices)


def draw(
    u: jax.Array, logits: jax.Array, sampling: Sampling, *, all_gather: Callable[[jax.Array], jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draw tokens [B, G] from logits [B, G, V] with uniforms [B, G, 2].

    Returns the tokens and their log-probs. `all_gather` is passed to `draw_tokens`.
    """
    logits = process_logits(logits, sampling)
    return greedy_tokens(logits) if sampling.temperature == 0 else draw_tokens(u, logits, all_gather=all_gather)


def vocabulary_axes(size: int, mesh: Mesh | None) -> tuple[str, ...]:
    """Return the mesh axes that shard the vocabulary during sampling, in whole blocks (see `vocabulary_blocks`)."""
    if mesh is None:
        return ()
    blocks, width = vocabulary_blocks(size)
    names = tuple(name for name in ("fsdp", "tensor") if mesh.shape.get(name, 1) > 1)
    for axes in (names, names[1:], names[:1]):
        if blocks * width == size and blocks % math.prod(mesh.shape[name] for name in axes) == 0:
            return axes
    return ()


def draw_next(
    model: BuiltinModel, variables: Variables, u: jax.Array, hidden: jax.Array, settings: DecodeSettings
) -> tuple[jax.Array, jax.Array]:
    """Draw tokens [B, G] from hidden states [B, G, D] with uniforms [B, G, 2]. Returns the tokens and log-probs."""
    sampling, mesh = settings.sampling, settings.mesh

    def by_rows(u: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        return draw(u, model.apply(variables, hidden, method="unembed"), sampling)

    if mesh is not None:
        # With a sharded vocabulary, devices exchange only each block's mass and one block of logits per completion.
        axes = vocabulary_axes(model.config.vocab_size, mesh)
        rows = "data" if "data" in mesh.shape and u.shape[0] % mesh.shape["data"] == 0 else None
        place = functools.partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, PartitionSpec(rows)))
        logits = model.apply(variables, place(hidden), method="unembed")
        by_vocabulary = NamedSharding(mesh, PartitionSpec(rows, None, axes))
        logits = jax.lax.with_sharding_constraint(logits, by_vocabulary)
        drawn = draw(place(u), logits, sampling, all_gather=place)
        return jax.tree.map(lambda x: constrain(place(x), mesh), drawn)

    def by_columns(u: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = process_logits(model.apply(variables, rows, method="unembed_columns"), sampling)
        return jax.tree.map(lambda x: x.reshape(u.shape[:-1]), draw_tokens(u.reshape(-1, 2), logits, axis=0))

    # On a CPU, multiplying a large embedding table by a few columns is 25% faster than multiplying a few rows by it.
    is_truncated = sampling != Sampling(sampling.temperature)
    if model.config.tie_word_embeddings and sampling.temperature > 0 and not is_truncated:
        return jax.lax.platform_dependent(u, hidden, cpu=by_columns, default=by_rows)
    return by_rows(u, hidden)


def ended_by(
    tokens: jax.Array, state: jax.Array | None, settings: DecodeSettings
) -> tuple[jax.Array, jax.Array | None]:
    """Return whether each token [B, G] ends a turn, and the stop automaton's state [B, G] after it."""
    ended = jnp.zeros(tokens.shape, bool)
    for eos in settings.eos_token_ids:
        ended |= tokens == eos
    if settings.stops is None or state is None:
        return ended, None
    state = settings.stops.advance(state, tokens)
    return ended | (state == settings.stops.final_state), state


def initial_stop_state(shape: tuple[int, ...], settings: DecodeSettings) -> jax.Array | None:
    """Return the stop automaton's state at the start of a turn, or None if there are no stop strings."""
    return None if settings.stops is None else jnp.zeros(shape, jnp.int32)


def step_uniforms(keys: jax.Array, first: jax.Array | int, steps: int) -> jax.Array:
    """Return uniforms [steps, B, G, 2] for `steps` token indices, starting at `first`, a scalar or [B, G].

    One wide draw per burst is cheaper than many narrow draws. The draw is flat, because XLA's CPU backend compiles it
    two to three times as fast as a four-dimensional draw. B is the draw's major axis, so that prompts can be sharded.
    """
    indices = jnp.broadcast_to(first, keys.shape)[..., None] + jnp.arange(steps)[None, None]
    u = uniforms(jax.vmap(jax.random.fold_in)(jnp.repeat(keys.reshape(-1), steps), indices.reshape(-1)))
    return jnp.moveaxis(u.reshape((*keys.shape, steps, 2)), 2, 0)
