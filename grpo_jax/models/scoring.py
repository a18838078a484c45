"""Log-probs of completions, without ever holding logits [B, G, T, V].

Logits are made for one chunk of tokens at a time and made again in the backward pass. The prompt is read once a group,
and the head runs on completion positions only:

```
reads         p3(last)   c0    c1    c2          hidden states: the prompt's last, then those of the completion
predicts         c0      c1    c2    c3
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from grpo_jax.maths.log_probs import NORMALIZER, log_probs_and_entropy, log_probs_of
from grpo_jax.maths.sampling import Sampling, process_logits
from grpo_jax.models.context import Prefix, Segments
from grpo_jax.models.experts import router_loss
from grpo_jax.models.packing import PackedSequence
from grpo_jax.types import CachedModel, Completions, Model, Params, Prompts, is_cached, join_rows

CHUNK = 1024
"""Tokens whose logits are held at a time: enough to fill a matrix product, little beside the activations."""


class Scores(NamedTuple):
    """Log-probs and entropies of completion tokens, the router's loss on them, and how they compare with others.

    Attributes:
      log_probs: [..., T] float32, 0 where the mask is 0.
      entropies: [..., T] float32 nats, of the distributions that the tokens were drawn from; 0 where the mask is 0.
      router_loss: [] float32, `experts.router_loss` of these tokens; None where it was not asked for.
      compared: [..., T] float32, as a `Comparison` says it of each token; None where there is nothing to compare with.
    """

    log_probs: jax.Array
    entropies: jax.Array
    router_loss: jax.Array | None = None
    compared: jax.Array | None = None


class Comparison(NamedTuple):
    """A comparison of the policy's distributions with others, or with tokens, wherever their logits are made.

    Attributes:
      function: the logits [..., V] of a chunk of tokens, and what `beside` has of these tokens → [...] float32.
      beside: arrays [..., T, X] that belong to the tokens.
    """

    function: Callable[..., jax.Array]
    beside: tuple[jax.Array, ...]


def chunked(
    unembed: Callable[[Params, jax.Array], jax.Array],
    params: Params,
    hidden: jax.Array,
    tokens: jax.Array,
    sampling: Sampling,
    *,
    with_entropy: bool,
    chunk: int | None = None,
    compared: Comparison | None = None,
) -> tuple[jax.Array, ...]:
    """Log-probs (and entropies, else zeros) [B, N] of tokens [B, N] from states [B, N, D], chunk by chunk.

    A chunk, of `CHUNK` tokens unless another number is given, has some of the N tokens of every prompt: where prompts
    are cut over devices, each computes its own. With a comparison, its arrays [B, N, X], its results [B, N] come third.
    """
    chex.assert_equal_shape_prefix((hidden, tokens), 2)
    chunk = CHUNK if chunk is None else chunk

    def one(params: Params, hidden: jax.Array, tokens: jax.Array, *beside: jax.Array) -> tuple[jax.Array, ...]:
        logits = process_logits(unembed(params, hidden), sampling, keep=tokens)
        return _score_logits(logits, tokens, with_entropy, compared, beside)

    b, n = tokens.shape
    beside = () if compared is None else compared.beside
    if b * n <= chunk:
        # The backward pass of a single chunk comes right after it: nothing to wait for, nothing to make again.
        return one(params, hidden, tokens, *beside)
    chunks = -(-n // max(1, chunk // b))
    size = -(-n // chunks)  # equal chunks: the last one is not mostly padding
    pad = chunks * size - n
    states = [
        jnp.pad(x, ((0, 0), (0, pad), (0, 0))).reshape(b, chunks, size, -1).swapaxes(0, 1) for x in (hidden, *beside)
    ]
    tokens = jnp.pad(tokens, ((0, 0), (0, pad))).reshape(b, chunks, size).swapaxes(0, 1)
    again = jax.checkpoint(one, policy=jax.checkpoint_policies.save_only_these_names(*NORMALIZER))
    results = jax.lax.map(lambda x: again(params, *x), (states[0], tokens, *states[1:]))
    return tuple(x.swapaxes(0, 1).reshape(b, -1)[:, :n] for x in results)


def _score_logits(
    logits: jax.Array, tokens: jax.Array, with_entropy: bool, compared: Comparison | None, beside: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Log-probs of tokens by their logits, entropies or zeros, and what they are compared with."""
    if with_entropy:
        log_probs, entropy = log_probs_and_entropy(logits, tokens)
    else:
        log_probs = log_probs_of(logits, tokens)
        entropy = jnp.zeros_like(log_probs)
    return (log_probs, entropy) if compared is None else (log_probs, entropy, compared.function(logits, *beside))


def score_completions(
    model: Model,
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    mask: jax.Array,
    sampling: Sampling,
    *,
    with_entropy: bool = True,
    with_router: bool = False,
    rngs: dict[str, jax.Array] | None = None,
    compared: Comparison | None = None,
) -> Scores:
    """Log-probs [B, G, T] of completion tokens, and the entropies of the distributions they were drawn from.

    The distribution is the one that the sampler drew from: the same settings give the sampler's log-probs back. A drawn
    token is never cut, so its log-prob stays finite while the params move.

    Args:
      tokens: [B, G, T] int32.
      mask: [B, G, T] bool.
      sampling: as the sampler had it.
      with_entropy: False leaves the entropies zero and saves their pass over the vocabulary.
      with_router: whether the load-balancing loss of the masked-in tokens is wanted, for a mixture of experts.
      rngs: keys for `apply`, `{"dropout": key}` in training; None for none.
      compared: with what the distributions are compared, by arrays [B, G, T, X]; None: with nothing.

    Returns:
      `Scores` of [B, G, T].
    """
    b, g, t = tokens.shape
    states, balance = predicting_states(model, params, prompts, tokens, mask if with_router else None, rngs=rngs)
    if is_cached(model):
        if compared is not None:
            compared = compared._replace(beside=tuple(x.reshape(b, g * t, -1) for x in compared.beside))
        flat = (states.reshape(b, g * t, -1), tokens.reshape(b, -1))
        scored = chunked(unembed_of(model), params, *flat, sampling, with_entropy=with_entropy, compared=compared)
        scored = tuple(x.reshape(b, g, t) for x in scored)
    else:
        logits = process_logits(states, sampling, keep=tokens)
        scored = _score_logits(logits, tokens, True, compared, () if compared is None else compared.beside)
    log_probs, entropy, *far = (jnp.where(mask, x, 0.0) for x in scored)
    return Scores(log_probs, entropy, balance, *far)


def predicting_states(
    model: Model,
    params: Params,
    prompts: Prompts,
    tokens: jax.Array,
    counted: jax.Array | None = None,
    *,
    rngs: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """States [B, G, T, D] by which completion tokens are predicted: of a model without a cache its logits [B, G, T, V].

    Args:
      tokens: [B, G, T] int32.
      counted: [B, G, T] bool, the tokens whose load-balancing loss is wanted, which comes second; None: it isn't.
      rngs: as in `score_completions`.
    """
    b, g, t = tokens.shape
    if is_cached(model):
        last, prefix = model.apply({"params": params}, prompts.tokens, prompts.lengths, method="prefill", rngs=rngs)
        hidden, balance = jnp.broadcast_to(last[:, None, None], (b, g, 1, last.shape[-1])), None
        if t > 1 or counted is not None:
            # The last token's state predicts nothing; it comes along so that T keeps the round number it has.
            rest, balance = _read_on(model, params, tokens, prefix, counted, rngs=rngs)
            hidden = jnp.concatenate([hidden, rest[:, :, :-1]], axis=2)
        return hidden, balance
    whole, start = join_rows(prompts, tokens)
    logits = model.apply({"params": params}, whole)
    at = start[:, None] - 1 + jnp.arange(t)[None]
    return jnp.take_along_axis(logits, at[..., None], axis=1).reshape(b, g, t, -1), None


def _read_on(
    model: CachedModel,
    params: Params,
    tokens: jax.Array,
    prefix: Prefix,
    counted: jax.Array | None,
    *,
    rngs: dict[str, jax.Array] | None,
    segments: Segments | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Hidden states of tokens behind their prompts; with a mask of those that count, also `router_loss`."""
    read = functools.partial(
        model.apply, {"params": params}, tokens, prefix, segments=segments, rngs=rngs, method="hidden"
    )
    if counted is None:
        return read()[0], None
    (hidden, _), written = read(mutable=["router"])
    chosen = model.config.num_experts_per_token
    return hidden, router_loss(written, counted, num_experts_per_token=chosen)


def unembed_of(model: Model) -> Callable[[Params, jax.Array], jax.Array]:
    """The way from params and `predicting_states` to logits."""
    if not is_cached(model):
        return lambda params, states: states
    return lambda params, hidden: model.apply({"params": params}, hidden, method="unembed")


class ReadPrompts(NamedTuple):
    """Prompts as their completions see them.

    Attributes:
      last: [B, D] hidden state of each prompt's last token.
      layers: those of a `Prefix`: keys and values [B, ...], or a recurrent layer's state.
    """

    last: jax.Array
    layers: tuple[Any, ...]


def read_prompts(
    model: CachedModel, params: Params, prompts: Prompts, *, rngs: dict[str, jax.Array] | None = None
) -> ReadPrompts:
    """Read prompts once, for `score_packed` of all of their completions."""
    last, prefix = model.apply({"params": params}, prompts.tokens, prompts.lengths, method="prefill", rngs=rngs)
    return ReadPrompts(last, prefix.layers)


def score_packed(
    model: CachedModel,
    params: Params,
    read: ReadPrompts,
    lengths: jax.Array,
    sequence: PackedSequence,
    sampling: Sampling,
    *,
    counted: jax.Array | None = None,
    with_entropy: bool = True,
    rngs: dict[str, jax.Array] | None = None,
    compared: Comparison | None = None,
) -> Scores:
    """`score_completions` for the segments of a `packing.PackedSequence`.

    Args:
      read: from `read_prompts`, for all prompts of the batch.
      sequence: some completions of the batch.
      counted: [A, S, T] bool, the tokens of the segments whose load-balancing loss is wanted; None: it isn't.
      sampling, with_entropy, rngs: as in `score_completions`.
      compared: likewise, by arrays [A, N, X].

    Returns:
      `Scores` of [A, S, T], 0 beyond the ends of the segments.
    """
    before, balance = packed_states(model, params, read, lengths, sequence, counted=counted, rngs=rngs)
    scored = chunked(
        unembed_of(model),
        params,
        before,
        sequence.tokens,
        sampling,
        with_entropy=with_entropy,
        chunk=before.shape[0] * CHUNK,  # each device holds the logits of a chunk
        compared=compared,
    )
    mask = sequence.mask
    log_probs, entropies, *far = (jnp.where(mask, sequence.by_segment(x), 0.0) for x in scored)
    return Scores(log_probs, entropies, balance, *far)


def packed_states(
    model: CachedModel,
    params: Params,
    read: ReadPrompts,
    lengths: jax.Array,
    sequence: PackedSequence,
    *,
    counted: jax.Array | None = None,
    rngs: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`predicting_states` [A, N, D] of the tokens of a packed sequence, and the load-balancing loss of some of them.

    The arguments are those of `score_packed`.
    """
    chex.assert_equal_shape_prefix((read.last, lengths), 1)
    tokens, segments = sequence.tokens[:, None], sequence.segments
    counted = None if counted is None else sequence.by_token(counted)
    hidden, balance = _read_on(
        model, params, tokens, Prefix(read.layers, lengths), counted, segments=segments, rngs=rngs
    )
    hidden = hidden[:, 0]
    a, n, _ = hidden.shape
    # A token is predicted by the state before it: the first of a completion by that of the prompt's last token.
    before = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
    prompt = jnp.repeat(segments.prompt, n // segments.prompt.shape[1], axis=1)
    first = jax.vmap(lambda last, prompt: last[prompt])(read.last.reshape(a, -1, read.last.shape[-1]), prompt)
    return jnp.where((segments.position == 0)[..., None], first, before), balance


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
    """Log-prob of each completion token given its prompt and the tokens before it.

    l[b, g, t] = log π(tokens[b, g, t] | prompt b, tokens[b, g, :t]), π the distribution that the sampler draws from
    with the same settings.

    Args:
      model: a model of this package, or any `apply` by `types.Model`.
      params: its parameters; the gradient flows to them.
      prompts: tokens [B, P] int32.
      completions: tokens and mask [B, G, T].
      temperature: > 0, unitless.
      top_k: as in `sampling.Sampling`.
      top_p: likewise.
      min_p: likewise.

    Returns:
      [B, G, T] float32; 0 where mask is 0.

    Raises:
      ValueError: shapes that do not match, or a temperature that is not positive.

    Example:
      >>> import jax
      >>> from grpo_jax.models.transformer import Transformer
      >>> from grpo_jax.models.config import TransformerConfig
      >>> from grpo_jax.rollout.generate import generate
      >>> model = Transformer(TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> prompts = Prompts(jax.numpy.ones((2, 3), "int32"), jax.numpy.array([3, 2]))
      >>> params = model.init(jax.random.key(0), prompts.tokens)["params"]
      >>> completions = generate(model, params, prompts, jax.random.key(1), num_generations=2, max_completion_length=4)
      >>> log_probs = completion_log_probs(model, params, prompts, completions)
      >>> bool(abs(log_probs - completions.log_probs).max() < 1e-5)
      True
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0; got {temperature!r} (score greedy completions at temperature 1).")
    tokens, mask = completions.tokens, completions.mask
    if tokens.ndim != 3 or tokens.shape != mask.shape or tokens.shape[0] != prompts.tokens.shape[0]:
        raise ValueError(
            "completions must have tokens and mask [B, G, T] for prompts [B, P]; got "
            f"tokens {tokens.shape}, mask {mask.shape}, prompts {prompts.tokens.shape}."
        )
    sampling = Sampling(temperature, top_k, top_p, min_p)
    return score_completions(model, params, prompts, tokens, mask, sampling, with_entropy=False).log_probs
