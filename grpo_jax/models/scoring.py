"""Log-probs of completions, without storing logits [B, G, T, V].

Logits are computed for one chunk of tokens at a time and recomputed in the backward pass. Each prompt is processed once
for its whole group. Its last hidden state predicts the first token of each completion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from grpo_jax.maths.log_probs import NORMALIZER, log_probs_and_entropy, log_probs_of
from grpo_jax.maths.sampling import Sampling, process_logits
from grpo_jax.models.context import Prefix, Segments
from grpo_jax.models.experts import router_loss
from grpo_jax.models.packing import PackedSequence
from grpo_jax.types import BuiltinModel, Completions, Model, Params, Prompts, is_builtin, join_rows

CHUNK = 1024
"""Tokens per chunk: enough for an efficient matrix product, with logits that are small compared to activations."""


class Scores(NamedTuple):
    """Log-probs and entropies [..., T] float32 for completion tokens, 0 where the mask is False."""

    log_probs: jax.Array
    entropies: jax.Array  # entropies of the sampling distributions, in nats
    router_loss: jax.Array | None = None  # scalar, from `experts.router_loss`
    fn_of_logits_values: jax.Array | None = None  # [..., T], result of a `FnOfLogits`


Arrays = tuple[jax.Array, ...]


class FnOfLogits(NamedTuple):
    """A function of each token's logits, evaluated chunk by chunk while the logits are in memory."""

    function: Callable[..., jax.Array]  # maps logits [..., V] and a chunk of each array to [...] float32
    arrays: Arrays  # additional arguments to the function, [..., T, X]


def score_chunks(
    unembed: Callable[[Params, jax.Array], jax.Array],
    params: Params,
    hidden: jax.Array,
    tokens: jax.Array,
    sampling: Sampling,
    *,
    with_entropy: bool,
    chunk: int | None = None,
    fn_of_logits: FnOfLogits | None = None,
) -> Scores:
    """Compute `Scores` [B, N] for tokens [B, N] from states [B, N, D], `chunk` tokens at a time.

    `chunk` defaults to `CHUNK`. A chunk has the same number of tokens from each prompt, so that each device computes
    the logits for its own prompts. The arrays in `fn_of_logits` are [B, N, X].
    """
    chex.assert_equal_shape_prefix((hidden, tokens), 2)
    chunk = CHUNK if chunk is None else chunk

    def score(params: Params, chunk: tuple[jax.Array, jax.Array, Arrays]) -> Scores:
        hidden, tokens, arrays = chunk
        logits = process_logits(unembed(params, hidden), sampling, keep=tokens)
        return _score_logits(logits, tokens, with_entropy, fn_of_logits, arrays)

    b, n = tokens.shape
    inputs = hidden, tokens, () if fn_of_logits is None else fn_of_logits.arrays
    if b * n <= chunk:
        # With a single chunk, the backward pass follows immediately, so recomputing its logits would not save memory.
        return score(params, inputs)
    chunks = -(-n // max(1, chunk // b))
    size = -(-n // chunks)  # equal sizes, so that the last chunk is not mostly padding

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * size - n)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape((b, chunks, size, *x.shape[2:])).swapaxes(0, 1)

    # The loop sums the chunks' gradients in float32, the dtype of `wide`. The values of `wide` are not used or stored.
    frozen, wide = jax.lax.stop_gradient(params), jax.tree.map(_widened, params)

    def score_wide(wide: Params, chunk: tuple[jax.Array, jax.Array, Arrays]) -> Scores:
        return score(jax.tree.map(_with_gradient_of, wide, frozen), chunk)

    # The forward and backward passes are separate loops, which CSE cannot merge. Barriers would keep `wide` in memory.
    policy = jax.checkpoint_policies.save_only_these_names(*NORMALIZER)
    recomputed = jax.checkpoint(score_wide, policy=policy, prevent_cse=False)
    scores = jax.lax.map(functools.partial(recomputed, wide), jax.tree.map(split, inputs))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(b, -1)[:, :n], scores)


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


@jax.custom_jvp
def _with_gradient_of(wide: jax.Array, x: jax.Array) -> jax.Array:
    """Return x in the dtype of `wide`, differentiated as if it were `wide`."""
    return x.astype(wide.dtype)


@_with_gradient_of.defjvp
def _with_gradient_of_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _with_gradient_of(*primals), tangents[0]


def _score_logits(
    logits: jax.Array, tokens: jax.Array, with_entropy: bool, fn_of_logits: FnOfLogits | None, arrays: Arrays
) -> Scores:
    if with_entropy:
        log_probs, entropies = log_probs_and_entropy(logits, tokens)
    else:
        log_probs = log_probs_of(logits, tokens)
        entropies = jnp.zeros_like(log_probs)
    values = None if fn_of_logits is None else fn_of_logits.function(logits, *arrays)
    return Scores(log_probs, entropies, fn_of_logits_values=values)


def score_completions(
    model: Model,
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    mask: jax.Array,
    sampling: Sampling,
    *,
    with_entropy: bool = True,
    with_router_loss: bool = False,
    rngs: dict[str, jax.Array] | None = None,
    fn_of_logits: FnOfLogits | None = None,
) -> Scores:
    """Compute `Scores` [B, G, T] for completion tokens under the sampling distribution.

    top_k, top_p and min_p always keep these tokens, so that their log-probs remain finite when the params change. If
    `with_entropy` is False, built-in models return entropies of 0, which saves a pass over the vocabulary. If
    `with_router_loss` is True, the router loss over the mask's tokens is also computed. `rngs` is `{"dropout": key}` in
    training. If None, dropout is disabled. The arrays in `fn_of_logits` are [B, G, T, X].
    """
    b, g, t = tokens.shape
    router_mask = mask if with_router_loss else None
    states, aux = completion_hidden_states(model, params, prompts, tokens, router_mask, rngs=rngs)
    if is_builtin(model):
        if fn_of_logits is not None:
            fn_of_logits = fn_of_logits._replace(arrays=tuple(x.reshape(b, g * t, -1) for x in fn_of_logits.arrays))
        scores = score_chunks(
            unembed_of(model),
            params,
            states.reshape(b, g * t, -1),
            tokens.reshape(b, -1),
            sampling,
            with_entropy=with_entropy,
            fn_of_logits=fn_of_logits,
        )
        scores = jax.tree.map(lambda x: x.reshape(b, g, t), scores)
    else:
        logits = process_logits(states, sampling, keep=tokens)
        scores = _score_logits(logits, tokens, True, fn_of_logits, () if fn_of_logits is None else fn_of_logits.arrays)
    return _masked(scores, mask, aux)


def _masked(scores: Scores, mask: jax.Array, aux: jax.Array | None) -> Scores:
    scores = jax.tree.map(lambda x: jnp.where(mask, x, 0.0), scores)
    return scores._replace(router_loss=aux)


def completion_hidden_states(
    model: Model,
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    router_mask: jax.Array | None = None,
    *,
    rngs: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the states [B, G, T, D] that predict tokens [B, G, T], and the router loss over `router_mask`.

    `router_mask` [B, G, T] bool selects tokens. If it is None, the router loss is None. For models that are not
    built in, logits [B, G, T, V] are returned as states, and the router loss is None.
    """
    b, g, t = tokens.shape
    if is_builtin(model):
        last, prefix = model.apply({"params": params}, prompts, method="prefill", rngs=rngs)
        hidden, aux = jnp.broadcast_to(last[:, None, None], (b, g, 1, last.shape[-1])), None
        if t > 1 or router_mask is not None:
            # The last token's state is not needed, but T is usually a more efficient size than T − 1.
            later, aux = _hidden(model, params, tokens, prefix, router_mask, rngs=rngs)
            hidden = jnp.concatenate([hidden, later[:, :, :-1]], axis=2)
        return hidden, aux
    whole, start = join_rows(prompts, tokens)
    logits = model.apply({"params": params}, whole)
    index = start[:, None] - 1 + jnp.arange(t)[None]
    return jnp.take_along_axis(logits, index[..., None], axis=1).reshape(b, g, t, -1), None


def _hidden(
    model: BuiltinModel,
    params: Params,
    tokens: jax.Array,
    prefix: Prefix,
    router_mask: jax.Array | None,
    *,
    rngs: dict[str, jax.Array] | None,
    segments: Segments | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute hidden states for tokens that follow their prompts, and the router loss over `router_mask`."""
    apply = functools.partial(
        model.apply, {"params": params}, tokens, prefix, segments=segments, rngs=rngs, method="hidden"
    )
    if router_mask is None:
        return apply()[0], None
    (hidden, _), written = apply(mutable=["router"])
    chosen = model.config.num_experts_per_token
    return hidden, router_loss(written, router_mask, num_experts_per_token=chosen)


def unembed_of(model: Model) -> Callable[[Params, jax.Array], jax.Array]:
    """Return a function that maps params and states from `completion_hidden_states` to logits."""
    if not is_builtin(model):
        return lambda params, states: states
    return lambda params, hidden: model.apply({"params": params}, hidden, method="unembed")


class PromptStates(NamedTuple):
    """The last hidden state of each prompt, [B, D], and the `layers` field of the prompts' `Prefix`."""

    last_hidden: jax.Array
    layers: tuple[Any, ...]


def prefill_prompts(
    model: BuiltinModel, params: Params, prompts: Prompts, *, rngs: dict[str, jax.Array] | None = None
) -> PromptStates:
    """Compute the states of prompts, which all `score_packed` calls for these prompts' completions reuse."""
    last, prefix = model.apply({"params": params}, prompts, method="prefill", rngs=rngs)
    return PromptStates(last, prefix.layers)


def score_packed(
    model: BuiltinModel,
    params: Params,
    prompt_states: PromptStates,
    lengths: jax.Array,
    sequence: PackedSequence,
    sampling: Sampling,
    *,
    router_mask: jax.Array | None = None,
    with_entropy: bool = True,
    rngs: dict[str, jax.Array] | None = None,
    fn_of_logits: FnOfLogits | None = None,
) -> Scores:
    """Compute `Scores` [A, S, L] for the segments of a packed sequence, 0 past the end of each segment.

    `prompt_states` and prompt `lengths` [B] cover the whole batch. `router_mask` [A, S, L] bool selects tokens
    for the router loss, which is not computed if `router_mask` is None. The arrays in `fn_of_logits` are [A, N, X]. The
    other arguments are as in `score_completions`.
    """
    states, aux = packed_states(model, params, prompt_states, lengths, sequence, router_mask=router_mask, rngs=rngs)
    scores = score_chunks(
        unembed_of(model),
        params,
        states,
        sequence.tokens,
        sampling,
        with_entropy=with_entropy,
        # A chunk has CHUNK to 2 · CHUNK tokens per device. In long sequences, larger chunks are faster.
        chunk=states.shape[0] * max(CHUNK, min(2 * CHUNK, states.shape[1] // 10)),
        fn_of_logits=fn_of_logits,
    )
    return _masked(jax.tree.map(sequence.to_segments, scores), sequence.segment_mask, aux)


def packed_states(
    model: BuiltinModel,
    params: Params,
    prompt_states: PromptStates,
    lengths: jax.Array,
    sequence: PackedSequence,
    *,
    router_mask: jax.Array | None = None,
    rngs: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute states [A, N, D] and the router loss for a packed sequence, as in `completion_hidden_states`."""
    chex.assert_equal_shape_prefix((prompt_states.last_hidden, lengths), 1)
    tokens, segments = sequence.tokens[:, None], sequence.segments
    router_mask = None if router_mask is None else sequence.to_packed(router_mask)
    prefix = Prefix(prompt_states.layers, lengths)
    hidden, aux = _hidden(model, params, tokens, prefix, router_mask, segments=segments, rngs=rngs)
    hidden = hidden[:, 0]
    a, n, _ = hidden.shape
    # The state before a token predicts it. For a completion's first token, this is the prompt's last state.
    before = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
    prompt = jnp.repeat(segments.prompt, n // segments.prompt.shape[1], axis=1)
    last = prompt_states.last_hidden.reshape(a, -1, hidden.shape[-1])
    first = jax.vmap(lambda last, prompt: last[prompt])(last, prompt)
    return jnp.where((segments.position == 0)[..., None], first, before), aux


def completion_log_probs(
    model: Model,
    params: Params,
    prompts: Prompts,
    completions: Completions,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
) -> jax.Array:
    """Compute the log-prob of each completion token, given its prompt and the previous tokens.

    l[b, g, t] = log π(tokens[b, g, t] | prompt b, tokens[b, g, :t]), where π is the sampling distribution.

    Args:
      model: one of this package's models, or any `types.Model`.
      params: the model's parameters. The result is differentiable with respect to them.
      prompts: prompts with tokens [B, P] int32.
      completions: completions with tokens and mask [B, G, T].
      temperature: unitless divisor of the logits, > 0.
      top_k: as in `sampling.Sampling`.
      top_p: as in `sampling.Sampling`.
      min_p: as in `sampling.Sampling`.

    Returns:
      Log-probs [B, G, T] float32, 0 where the mask is False.

    Raises:
      ValueError: if the shapes do not match or the temperature is not positive.

    Example:
      >>> from flax import linen
      >>> model, params = linen.Embed(4, 4), {"embedding": jnp.zeros((4, 4))}  # logits from the last token only
      >>> prompts, mask = Prompts(jnp.ones((1, 3), int), jnp.array([3])), jnp.ones((1, 2, 5), bool)
      >>> completions = Completions(1 * mask, mask, 0.0 * mask, mask[..., 0])
      >>> round(float(completion_log_probs(model, params, prompts, completions)[0, 1, 4]), 4)  # log(1 / 4)
      -1.3863
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0; got {temperature!r}. Use 1.0 for greedily sampled completions.")
    tokens, mask = completions.tokens, completions.mask
    if tokens.ndim != 3 or tokens.shape != mask.shape or tokens.shape[0] != prompts.tokens.shape[0]:
        raise ValueError(
            "completions must have tokens and mask of shape [B, G, T] for prompts of shape [B, P]; got shapes "
            f"{tokens.shape} for tokens, {mask.shape} for mask and {prompts.tokens.shape} for prompts."
        )
    sampling = Sampling(temperature, top_k, top_p, min_p)
    return score_completions(model, params, prompts, tokens, mask, sampling, with_entropy=False).log_probs
