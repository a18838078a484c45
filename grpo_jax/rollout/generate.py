"""Completions of prompts: each prompt read once, one compiled decode, ended completions left behind.

Completion (b, g) of a call with `key` draws its token t with fold_in(fold_in(fold_in(key, prompt_indices[b]), g), t): a
sample does not depend on the other completions, on devices, batches, or moves between layouts.

Decoding runs in bursts of a few steps on the device. Between two, the host gives the places of ended completions to
waiting prompts; once none waits, it moves the others to a smaller layout (`ladder`). The cache grows in few steps, or
is a ring if prompts wait. All completions write to the same slot, and later ones begin in a later slot:

```
slot        0 1 2 3 4 5 6 7
group 0     a b c d e · · ·     start 0
group 1     · · x y z · · ·     start 2, in the place of a group that ended after slot 1
group 2     s t u · · · q r     start 6: slots 8, 9, 10 are 0, 1, 2 again
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.maths.sampling import Sampling, check_sampling
from grpo_jax.models.sharding import fetch, mesh_of, shard_count
from grpo_jax.rollout.decode import decode, prefill
from grpo_jax.rollout.draw import (
    DecodeSettings,
    completion_keys,
    decode_settings,
    draw,
    ended_by,
    first_state,
    step_uniforms,
)
from grpo_jax.rollout.layout import Layout, places
from grpo_jax.rollout.rollout import Rollout
from grpo_jax.types import (
    CachedModel,
    Completions,
    Model,
    Params,
    Prompts,
    Tokenizer,
    as_argument,
    is_cached,
    join_rows,
)

Watch = Callable[[np.ndarray, np.ndarray], None]
"""What is called with tokens and mask [B, G, T] of what has been drawn so far."""


def _generate_in_bursts(rollout: Rollout, at_once: int, watch: Watch | None) -> Completions:
    """Decode in bursts, moving living completions together between them: the tokens are those of one long decode.

    At most `at_once` groups are on the device, and the others enter some at a time; on a mesh completions move inside
    their device, and waiting prompts enter when all have ended. Returns NumPy's arrays.
    """
    (b, g), table = rollout.keys.shape, rollout.table
    if rollout.mesh is not None and at_once < b:
        waves = [rollout.part(first, first + at_once) for first in range(0, b, at_once)]
        return jax.tree.map(lambda *x: np.concatenate(x), *(_generate_in_bursts(x, at_once, watch) for x in waves))
    layout = Layout.of(rollout, at_once)
    while True:
        rollout.interrupt()
        if watch is not None:
            watch(table.tokens.reshape(b, g, -1), table.mask.reshape(b, g, -1))
        if layout.prompts_wait and layout.has_places:
            layout = layout.refill()
        elif layout.empty.all():
            return layout.all_completions()
        elif not layout.prompts_wait:
            layout = layout.compact()
        if not layout.empty.all():  # else all that have just entered ended with their first token
            layout = layout.make_room().decode()


def _generate_in_one(
    model: CachedModel, params: Params, prompts: Prompts, keys: jax.Array, *, settings: DecodeSettings, length: int
) -> Completions:
    """The same decode as one traced loop, for use inside someone else's `jit`."""
    stream, drawn = prefill(model, params, prompts, keys, 0, settings=settings, slots=max(1, length - 1))
    ended = stream.ended
    if length > 1:
        (_, _, ended, _), rest = decode(
            *(model, {"params": params}, stream.cache, stream.replace(cache=()), 0, length - 1),
            settings=settings,
            steps=length - 1,
        )
        drawn = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), drawn, rest)
    tokens, log_probs, mask = drawn
    return Completions(tokens=tokens, mask=mask, log_probs=log_probs, ended=ended)


@functools.partial(jax.jit, static_argnames=("settings", "length"))
def _generate_uncached(
    model: Model, params: Params, prompts: Prompts, keys: jax.Array, *, settings: DecodeSettings, length: int
) -> Completions:
    """For a model that has `apply` and nothing else: prompt and completion are read again for every token."""
    b, g = keys.shape

    def step(t, carry):
        tokens, log_probs, mask, ended, state = carry
        whole, start = join_rows(prompts, tokens)
        logits = model.apply({"params": params}, whole)
        at = (start - 1 + t)[:, None, None]
        logits = jnp.take_along_axis(logits, at, axis=1)[:, 0].reshape(b, g, -1)
        drawn, log_prob = draw(step_uniforms(keys, t, 1)[0], logits, settings.sampling)
        drawn = jnp.where(ended, settings.pad_token_id, drawn)
        tokens = tokens.at[:, :, t].set(drawn)
        log_probs = log_probs.at[:, :, t].set(jnp.where(ended, 0.0, log_prob))
        last, state = ended_by(drawn, state, settings)
        return tokens, log_probs, mask.at[:, :, t].set(~ended), ended | last, state

    start = (
        jnp.full((b, g, length), settings.pad_token_id, jnp.int32),
        jnp.zeros((b, g, length), jnp.float32),
        jnp.zeros((b, g, length), bool),
        jnp.zeros((b, g), bool),
        first_state((b, g), settings),
    )
    tokens, log_probs, mask, ended, _ = jax.lax.fori_loop(0, length, step, start)
    return Completions(tokens=tokens, mask=mask, log_probs=log_probs, ended=ended)


def _padded(completions: Completions, length: int, settings: DecodeSettings) -> Completions:
    """Completions [B, G, T] of one turn, with a longer T."""
    if completions.tokens.shape[-1] == length:
        return completions
    xp = np if isinstance(completions.tokens, np.ndarray) else jnp
    more = [(0, 0), (0, 0), (0, length - completions.tokens.shape[-1])]
    return completions.replace(
        tokens=xp.pad(completions.tokens, more, constant_values=settings.pad_token_id),
        mask=xp.pad(completions.mask, more),
        log_probs=xp.pad(completions.log_probs, more),
    )


def check_request(
    prompts: Prompts,
    sampling: Sampling,
    num_generations: int,
    max_completion_length: int,
    batch_size: int | None,
    max_turn_length: int | None,
    *,
    shards: int,
) -> None:
    """Raise a `ValueError` for shapes, counts or sampling settings that make no sense, on so many devices."""
    check_sampling(sampling)
    if prompts.tokens.ndim != 2 or prompts.lengths.shape != prompts.tokens.shape[:1]:
        raise ValueError(
            f"prompts must have tokens [B, P] and lengths [B]; got {prompts.tokens.shape} and {prompts.lengths.shape}."
        )
    for name, value in (
        ("num_generations", num_generations),
        ("max_completion_length", max_completion_length),
        ("max_turn_length", 1 if max_turn_length is None else max_turn_length),
    ):
        if int(value) != value or value < 1:
            raise ValueError(f"{name} must be an integer ≥ 1; got {value!r}.")
    if batch_size is not None and batch_size < shards * num_generations:
        each = f" on each of the {shards} devices that prompts are cut over" if shards > 1 else ""
        raise ValueError(f"batch_size must hold a group of {num_generations} completions{each}; got {batch_size!r}.")


def generate(
    model: Model,
    params: Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    num_generations: int,
    max_completion_length: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
    eos_token_ids: Sequence[int] = (),
    stop: str | Sequence[str] | None = None,
    stop_token_ids: int | Sequence[int] | None = None,
    max_turn_length: int | None = None,
    tokenizer: Tokenizer | None = None,
    pad_token_id: int = 0,
    prompt_indices: jax.Array | np.ndarray | None = None,
    batch_size: int | None = None,
    interrupt: Callable[[], None] = lambda: None,
    watch: Watch | None = None,
    on_host: bool = False,
) -> Completions:
    """Sample `num_generations` completions of each prompt.

    Args:
      model: a model of this package, or any `apply` by `types.Model` (then without a cache, and slow).
      params: its parameters.
      prompts: tokens [B, P] int32 right-padded, lengths [B].
      key: a typed PRNG key, consumed; completion (b, g) uses fold_in(fold_in(key, prompt_indices[b]), g).
      num_generations: G ≥ 1.
      max_completion_length: T ≥ 1, in tokens; a completion that has not drawn an EOS by then is truncated.
      temperature: ≥ 0; 0 is greedy.
      top_k: as in `sampling.Sampling`.
      top_p: as there.
      min_p: as there.
      eos_token_ids: any number of token ids that end a completion; the one that was drawn belongs to it.
      stop: texts that end a completion, found over the borders of tokens in what it spells, and not in its prompt; the
        token that completes one belongs to it, with all that it spells. Needs `tokenizer`.
      stop_token_ids: further ids, as `eos_token_ids`.
      max_turn_length: tokens after which a completion, which has one turn here, is truncated before T; None: T.
      tokenizer: of the model, for `stop`.
      pad_token_id: what stands after the end of a completion.
      prompt_indices: [B] integers that number the prompts in the key derivation, by default 0..B-1. A prompt keeps its
        samples wherever it stands, if it keeps its number.
      batch_size: completions that are decoded at a time, in whole groups; further prompts wait and take the places of
        those that have ended, which changes no sample. On a mesh as many groups on each device as it holds, one at
        least, and the next ones begin when all of these have ended. None: all at once. Not inside a `jit`.
      interrupt: called on the host every few tokens; what it raises ends the sampling. Not inside a `jit`.
      watch: called likewise, with the tokens and the mask [B, G, T] of what has been drawn so far (on a mesh, of the
        prompts that are decoded together); for completions that are shown as they come.
      on_host: return NumPy's arrays, as the host has put them together, in the place of JAX's. Not inside a `jit`.

    Returns:
      `Completions`, with the log-probs that the tokens were drawn with. No gradient flows through them.

    Raises:
      ValueError: shapes, counts or sampling settings that make no sense.

    Example:
      >>> import jax
      >>> from grpo_jax.models.transformer import Transformer
      >>> from grpo_jax.models.layers import TransformerConfig
      >>> model = Transformer(TransformerConfig(32, 16, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> prompts = Prompts(jax.numpy.ones((2, 3), "int32"), jax.numpy.array([3, 2]))
      >>> params = model.init(jax.random.key(0), prompts.tokens)["params"]
      >>> completions = generate(model, params, prompts, jax.random.key(1), num_generations=4, max_completion_length=6)
      >>> completions.tokens.shape
      (2, 4, 6)
    """
    sampling, shards = Sampling(temperature, top_k, top_p, min_p), shard_count(mesh_of(params))
    check_request(prompts, sampling, num_generations, max_completion_length, batch_size, max_turn_length, shards=shards)
    if prompt_indices is None:
        prompt_indices = jnp.arange(prompts.tokens.shape[0])
    keys = completion_keys(key, jnp.asarray(prompt_indices), num_generations)
    settings = decode_settings(
        sampling, eos_token_ids, pad_token_id, stop=stop, stop_token_ids=stop_token_ids, tokenizer=tokenizer
    )
    length = min(int(max_completion_length), int(max_turn_length or max_completion_length))
    if not is_cached(model):
        completions = _generate_uncached(as_argument(model), params, prompts, keys, settings=settings, length=length)
        completions = fetch(completions) if on_host else completions
    elif any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, prompts, key))):
        completions = _generate_in_one(as_argument(model), params, prompts, keys, settings=settings, length=length)
    else:
        rollout = Rollout.of(model, params, prompts, keys, settings, length, interrupt)
        completions = _generate_in_bursts(rollout, places(len(keys), num_generations, batch_size, shards), watch)
        completions = completions if on_host else jax.tree.map(jnp.asarray, completions)
    return _padded(completions, int(max_completion_length), settings)
