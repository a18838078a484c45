"""Compiled functions for rollouts: prompt prefill, decoding, observation prefill, and cache rearrangement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax.models.context import Cache, Prefix, empty_cache, pad_slots, rotate_ring
from grpo_jax.models.sharding import constrain, reshard_embedding, reshard_head
from grpo_jax.models.threads import compile_once_across_threads
from grpo_jax.rollout.draw import (
    DecodeSettings,
    Variables,
    draw,
    draw_next,
    ended_by,
    initial_stop_state,
    step_uniforms,
    vocabulary_axes,
)
from grpo_jax.types import BuiltinModel, Completions, Model, Params, Prompts, join_rows


class DecodeState(flax.struct.PyTreeNode):
    """Device state for completions that are decoded together.

    At each step, all completions write to the same slot of a ring buffer. A completion whose turn has ended stops
    writing, so completions end in different slots. Before the next turns, `rearrange` rotates each completion's ring so
    that all observations, which are prefilled next, end in the same slot:

    ```
                       turn ends             rotated       prefilled next
    completion 0   a b c d · · · ·       · · · a b c d   │ x
    completion 1   e f · · · · · ·       · · · · · e f   │ u
    completion 2   g h i j k l · ·       · g h i j k l   │ y
    ```
    """

    prefix: Prefix  # keys and values, or recurrent states, for the B prompts
    cache: Cache  # keys and values (or states) for the completions, in a ring of slots; see `_squeeze_cache`
    token: jax.Array  # [B, G] last token of each completion, not yet in the cache
    ended: jax.Array  # [B, G] True if the completion or its turn has ended
    keys: jax.Array  # [B, G] typed PRNG keys
    start: jax.Array | None = None  # [B, G] int32 first slot of each completion; None for single-turn completions
    stop_state: jax.Array | None = None  # [B, G] int32 state of the automaton for stop strings


Drawn = tuple[jax.Array, jax.Array, jax.Array]
"""Tokens, log-probs and mask, each [B, G, steps]."""

Carry = tuple[jax.Array, Cache, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array, jax.Array]
UncachedCarry = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]
"""Loop variables of `decode` and of `generate_uncached`."""


def _squeeze_cache(cache: Cache) -> Cache:
    """Squeeze B, H_kv and G axes of size 1. XLA's CPU backend would copy an unsqueezed cache at every step."""
    return jax.tree.map(lambda x: x.squeeze(tuple(i for i in range(x.ndim - 2) if x.shape[i] == 1)), cache)


def _unsqueeze_cache(state: DecodeState) -> Cache:
    """Restore the axes that `_squeeze_cache` squeezed."""
    b, g = state.token.shape

    def unsqueeze(x: jax.Array, prompt_cache: jax.Array) -> jax.Array:
        return x.reshape(b, prompt_cache.shape[1], g, x.shape[-2], x.shape[-1])

    return jax.tree.map(unsqueeze, state.cache, state.prefix.layers)


@compile_once_across_threads
@functools.partial(jax.jit, static_argnames=("settings", "slots", "multi_turn"))
def prefill(
    model: BuiltinModel,
    params: Params,
    prompts: Prompts,
    keys: jax.Array,
    *,
    settings: DecodeSettings,
    slots: int,
    multi_turn: bool = False,
) -> tuple[DecodeState, Drawn]:
    """Prefill each prompt once and draw the first token of each of its completions.

    `multi_turn` is True for completions with several turns. On a mesh, the cached keys and values are sharded over
    prompts and heads. Returns the state, and `Drawn` with one step.
    """
    b, g = keys.shape
    model, params = reshard_embedding((model, params), settings.mesh)  # for looking up the embeddings of prompt tokens
    last_hidden, prefix = model.apply({"params": params}, prompts, method="prefill")
    logits = model.apply({"params": params}, last_hidden, method="unembed")
    logits = jnp.broadcast_to(logits[:, None], (b, g, logits.shape[-1]))
    tokens, log_probs = draw(step_uniforms(keys, 0, 1)[0], logits, settings.sampling)
    ended, stop_state = ended_by(tokens, initial_stop_state((b, g), settings), settings)
    cache, start = empty_cache(prefix.layers, g, slots), None
    if multi_turn:
        start = jnp.zeros((b, g), jnp.int32)
    elif settings.mesh is None:
        cache = _squeeze_cache(cache)
    state = DecodeState(prefix, cache, tokens, ended, keys, start, stop_state)
    drawn = tokens[..., None], log_probs[..., None], jnp.ones((b, g, 1), bool)
    return place_state(state, settings.mesh, constrain), drawn


@compile_once_across_threads
@functools.partial(jax.jit, static_argnames=("settings", "steps", "all_steps"), donate_argnames=("state",))
def decode(
    model: BuiltinModel,
    variables: Variables,
    state: DecodeState,
    slot: jax.Array | int,
    count: jax.Array | int,
    *,
    settings: DecodeSettings,
    steps: int,
    all_steps: bool = False,
) -> tuple[DecodeState, Drawn]:
    """Draw up to `steps` tokens for each completion, starting at `slot`. Returns the new state and the drawn tokens.

    The loop stops early when all completions have ended, unless `all_steps` is True. On an accelerator or a mesh, its
    data-dependent condition would synchronize with the host at each step. `count` is the maximum number of tokens to
    draw: [B, G] for multi-turn completions, or a scalar for single-turn completions, which is ignored if `all_steps`.
    Donates `state`.
    """
    b, g = state.token.shape
    chex.assert_shape([state.ended, state.keys], (b, g))
    multi_turn = state.start is not None
    chex.assert_shape(count, (b, g) if multi_turn else ())
    u = step_uniforms(state.keys, slot + 1 if state.start is None else slot - state.start + 1, steps)
    tokens = jnp.full((steps, b, g), settings.pad_token_id, jnp.int32)
    log_probs = jnp.zeros((steps, b, g), jnp.float32)
    mask = jnp.zeros((steps, b, g), bool)
    # On a mesh, the output head is resharded once per call, outside the loop. For multi-turn completions it is not
    # resharded, so that logits are rounded exactly as in `prefill_chunk`.
    mesh, axes = settings.mesh, vocabulary_axes(model.config.vocab_size, settings.mesh)
    head_model, head_variables = reshard_head((model, variables), None if multi_turn else mesh, axes)

    def unfinished(carry: Carry) -> jax.Array:
        i, ended = carry[0], carry[3]
        return (i < (steps if multi_turn else count)) & ~ended.all()

    def step(carry: Carry) -> Carry:
        i, cache, token, ended, stop_state, tokens, log_probs, mask = carry
        hidden, cache = model.apply(
            variables,
            token[:, :, None],
            state.prefix,
            cache,
            slot + i,
            state.start,
            write=~ended[..., None] if multi_turn else None,
            method="hidden",
        )
        drawn, log_prob = draw_next(head_model, head_variables, u[i], hidden[:, :, 0], settings)
        drawn = jnp.where(ended, settings.pad_token_id, drawn)
        tokens = tokens.at[i].set(drawn)
        log_probs = log_probs.at[i].set(jnp.where(ended, 0.0, log_prob))
        mask = mask.at[i].set(~ended)
        just_ended, stop_state = ended_by(drawn, stop_state, settings)
        ended |= just_ended
        if multi_turn:
            ended |= i + 1 >= count
        return i + 1, cache, drawn, ended, stop_state, tokens, log_probs, mask

    carry = (jnp.int32(0), state.cache, state.token, state.ended, state.stop_state, tokens, log_probs, mask)
    if all_steps:
        carry = jax.lax.fori_loop(0, steps, lambda _, carry: step(carry), carry)
    else:
        carry = jax.lax.while_loop(unfinished, step, carry)
    _, cache, token, ended, stop_state, *drawn = carry
    tokens, log_probs, mask = (jnp.moveaxis(x, 0, -1) for x in drawn)
    new_state = state.replace(cache=cache, token=token, ended=ended, stop_state=stop_state)
    return place_state(new_state, mesh, constrain), (tokens, log_probs, mask)


@compile_once_across_threads
@functools.partial(jax.jit, static_argnames=("settings",), donate_argnames=("state",))
def prefill_chunk(
    model: BuiltinModel,
    variables: Variables,
    state: DecodeState,
    slot: jax.Array | int,
    tokens: jax.Array,
    valid: jax.Array,
    *,
    settings: DecodeSettings,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Prefill a chunk of right-aligned observation tokens [B, G, N], starting at `slot`, and draw the next token.

    `valid` [B, G, N] is False on padding. Donates `state`. Returns the state with the new cache, and the next tokens
    and their log-probs [B, G], which are valid only after the last chunk and where the last entry of `valid` is True.
    """
    assert state.start is not None
    hidden, cache = model.apply(
        variables, tokens, state.prefix, state.cache, slot, state.start, write=valid, method="hidden"
    )
    u = step_uniforms(state.keys, slot + tokens.shape[-1] - state.start, 1)[0]
    token, log_prob = draw_next(model, variables, u, hidden[:, :, -1], settings)
    return place_state(state.replace(cache=cache), settings.mesh, constrain), token, log_prob


@functools.partial(jax.jit, static_argnames=("slots", "parts", "mesh"))
def rearrange(
    states: tuple[DecodeState, ...],
    groups: jax.Array | None,
    order: jax.Array,
    start: jax.Array | None = None,
    *,
    slots: int,
    parts: int = 1,
    mesh: Mesh | None = None,
) -> tuple[DecodeState, ...]:
    """Gather completions from all states into `parts` new states whose caches have `slots` slots.

    `groups` [B'] contains the indices of the groups to keep, counted over all states, and `order` [B', G'] the indices
    of completions within these groups. On a mesh, `groups` is None, and each group stays on its device. For multi-turn
    completions, which have only one state, `start` [B', G'] contains the new first slots; otherwise, it is None.
    """
    unsqueezed = [state.replace(cache=_unsqueeze_cache(state)) for state in states]
    state = jax.tree.map(lambda *x: jnp.concatenate(x), *unsqueezed)

    def pick(x: jax.Array) -> jax.Array:
        """Gather [B', G', …] from [B, G, …]."""
        return jax.vmap(lambda group, i: group[i])(x, order) if groups is None else x[groups[:, None], order]

    cache = jax.tree.map(lambda x: pick(x.swapaxes(1, 2)).swapaxes(1, 2), state.cache)
    if start is None or state.start is None:
        cache = pad_slots(cache, slots)
    else:
        cache = rotate_ring(cache, pick(state.start) - start, slots)
    prefix = state.prefix if groups is None else jax.tree.map(lambda x: x[groups], state.prefix)
    token, ended, keys, stop_state = jax.tree.map(pick, (state.token, state.ended, state.keys, state.stop_state))
    new_state = DecodeState(prefix, cache, token, ended, keys, start, stop_state)
    if start is not None or mesh is not None:
        return (place_state(new_state, mesh, constrain),)
    size = len(order) // parts
    split_states = (jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], new_state) for i in range(parts))
    return tuple(part.replace(cache=_squeeze_cache(part.cache)) for part in split_states)


@functools.partial(jax.jit, static_argnames=("slots", "mesh"))
def grow(state: DecodeState, *, slots: int, mesh: Mesh | None = None) -> DecodeState:
    """Enlarge a state's cache to `slots` slots."""
    return place_state(state.replace(cache=pad_slots(state.cache, slots)), mesh, constrain)


def place_state(state: DecodeState, mesh: Mesh | None, place: Callable[..., Any]) -> DecodeState:
    """Shard a state over prompts, and cached keys and values also over heads. Without a mesh, return it unchanged.

    `place(x, mesh, *axes)` is `constrain`, or a function that returns a `ShapeDtypeStruct` with the same sharding.
    """
    if mesh is None:
        return state

    def by_heads(tree: Any) -> Any:
        return jax.tree.map(lambda x: place(x, mesh, "tensor"), tree)

    placed = jax.tree.map(lambda x: place(x, mesh), state.replace(cache=None))
    prefix = placed.prefix.replace(layers=by_heads(state.prefix.layers))
    return placed.replace(prefix=prefix, cache=by_heads(state.cache))


def generate_traced(
    model: BuiltinModel, params: Params, prompts: Prompts, keys: jax.Array, *, settings: DecodeSettings, length: int
) -> Completions:
    """Generate single-turn completions in one compiled loop, for calls to `generate` under `jit`."""
    state, drawn = prefill(model, params, prompts, keys, settings=settings, slots=max(1, length - 1))
    if length > 1:
        steps = length - 1
        state, rest = decode(model, {"params": params}, state, 0, steps, settings=settings, steps=steps)
        drawn = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), drawn, rest)
    tokens, log_probs, mask = drawn
    return Completions(tokens=tokens, mask=mask, log_probs=log_probs, ended=state.ended)


@functools.partial(jax.jit, static_argnames=("settings", "length"))
def generate_uncached(
    model: Model, params: Params, prompts: Prompts, keys: jax.Array, *, settings: DecodeSettings, length: int
) -> Completions:
    """Generate single-turn completions with a model that has no cache. Each step processes all tokens again."""
    b, g = keys.shape

    def step(t: jax.Array, carry: UncachedCarry) -> UncachedCarry:
        tokens, log_probs, mask, ended, stop_state = carry
        rows, start = join_rows(prompts, tokens)
        logits = model.apply({"params": params}, rows)
        index = (start - 1 + t)[:, None, None]
        logits = jnp.take_along_axis(logits, index, axis=1)[:, 0].reshape(b, g, -1)
        drawn, log_prob = draw(step_uniforms(keys, t, 1)[0], logits, settings.sampling)
        drawn = jnp.where(ended, settings.pad_token_id, drawn)
        tokens = tokens.at[:, :, t].set(drawn)
        log_probs = log_probs.at[:, :, t].set(jnp.where(ended, 0.0, log_prob))
        just_ended, stop_state = ended_by(drawn, stop_state, settings)
        return tokens, log_probs, mask.at[:, :, t].set(~ended), ended | just_ended, stop_state

    initial = (
        jnp.full((b, g, length), settings.pad_token_id, jnp.int32),
        jnp.zeros((b, g, length), jnp.float32),
        jnp.zeros((b, g, length), bool),
        jnp.zeros((b, g), bool),
        initial_stop_state((b, g), settings),
    )
    tokens, log_probs, mask, ended, _ = jax.lax.fori_loop(0, length, step, initial)
    return Completions(tokens=tokens, mask=mask, log_probs=log_probs, ended=ended)
