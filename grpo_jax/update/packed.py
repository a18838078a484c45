"""Scoring and updating without the padding: the gradient of `step.train_step`, one packed sequence at a time.

The completions of some prompts are cut to their lengths and laid end to end in packed sequences. One program reads
these prompts once, loops over their sequences, and takes the gradient with respect to the prompts' keys and values,
which is a sum over the sequences, back through the prompts:

```
prompts ─► last states, keys and values ─► sequence 1 ─► loss ─► gradient of the params
                    ▲                └───► sequence 2 ─► loss ─►  + …
                    └── gradient of these, summed over the sequences ─► + gradient of the params
```

A minibatch has one or more such parts. The number of sequences is an argument, so that one compilation is enough.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config.sft import Config
from grpo_jax.maths.metrics import MetricSums, merge_metrics, top_entropy_mask
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.models.packing import (
    PackedSequence,
    SequenceShape,
    best_shape,
    lengths_of,
    order_prompts,
    pack_as,
    padding_share,
    sequence_shapes,
)
from grpo_jax.models.scoring import ReadPrompts, read_prompts, score_packed
from grpo_jax.models.sharding import constrain, fetch, keep_placed, shard_count, split
from grpo_jax.models.streams import count_streams, devices_of, in_turn, run_in_streams, shared
from grpo_jax.models.tiles import implementation
from grpo_jax.types import Batch, CachedModel, Model, Params, Prompts, as_argument, is_cached
from grpo_jax.update.objective import count_totals, learns_by_advantages, loss_of, router_coef, sampling_of
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import Updater, apply_gradients, dropout_key, zeros_like
from grpo_jax.update.teaching import Teacher, compare_packed

CPU_TOKENS = 512
"""Tokens of a packed sequence on a CPU, at most, unless one completion has more: enough to fill the matrix products of
all cores; with more, activations leave the cache."""

WIDE_TOKENS = 1024
"""`CPU_TOKENS` where matrix units of a CPU multiply (`models.matmul`), and rounding weights per sequence costs more."""

ACCELERATOR_TOKENS = 32768
"""`CPU_TOKENS` of a GPU or TPU: the products of so many keep any of them busy, and more would only take more memory."""

PROMPT_TOKENS = 512
"""Prompt tokens of a part on a device, about, if packed sequences are short: all activations of these are kept."""


class Packed(flax.struct.PyTreeNode):
    """A part of a minibatch: K prompts on each of A devices, with their completions in packed sequences.

    Attributes:
      batch: the prompts [A·K, P] and their completions [A·K, G, T].
      selected: [A·K, G, T] bool, the part's `top_entropy_mask`; None if all tokens are trained.
      sequences: [A, S, ...], S packed sequences: first those with a gradient, then those without one, then unused ones.
      trained: [] int32, how many sequences have a gradient.
      used: [] int32, how many have completions, at least 1.
      number: [] int32, the number of the part in its minibatch.
    """

    batch: Batch
    selected: jax.Array | None
    sequences: PackedSequence
    trained: jax.Array
    used: jax.Array
    number: jax.Array

    def sequence(self, i: jax.Array | int) -> PackedSequence:
        """The i-th packed sequence."""
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=i, axis=1, keepdims=False)
        return jax.tree.map(take, self.sequences)


class PackedUpdater(Updater):
    """Scores completions and makes updates with a model of this package, one packed sequence at a time."""

    model: CachedModel

    def columns(self, longest: int) -> int:
        """Length of a batch's arrays when its longest completion has `longest` tokens: always T."""
        return self.config.max_completion_length

    def score(self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Log-probs [B, G, T] of completions under any params (reference, initial policy); 0 where mask is 0.

        The device may still be at work when this returns; reading the array waits for it.
        """
        return self._score(params, prompts, tokens, mask, with_entropy=False)[0]

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state` is consumed. The metric `padding_share` is added."""
        grads, sums, padding = self._gradients(state, batch)
        state, metrics = apply_sums(self, state, grads, sums)
        # A sequence counts the segments that only fill its shape, and completions without a token are in none.
        rows = math.prod(batch.mask.shape[:2])
        return state, {**metrics, "rows": jnp.float32(rows), "padding_share": jnp.float32(padding)}

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums]:
        """The first half of `update`: the gradient of a minibatch, and its metric sums."""
        return self._gradients(state, batch)[:2]

    def _gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums, float]:
        """`gradients`, and the share of the tokens that are padding."""
        selected = None
        if self.config.top_entropy_quantile < 1:
            _, entropies = self._score(state.params, batch.prompts, batch.tokens, batch.mask, with_entropy=True)
            selected = fetch(_select(entropies, split(batch.mask, self.mesh), self.config.top_entropy_quantile))
        parts, _ = self.pack(state.params, batch, selected)
        totals, streams = _count_totals(batch, selected), count_streams(state.params, len(parts))
        zeros = [zero_gradients(self, state.params) for _ in range(streams)]

        def add_parts(stream: int) -> tuple[Params, list[MetricSums]]:
            total, found = zeros[stream], []
            for part in parts[stream::streams]:
                total, sums = add_gradients(self, in_turn(total), state, split(part, self.mesh), totals)
                found.append(sums)
            return total, found

        results = run_in_streams(add_parts, range(streams))
        sums = functools.reduce(_merge, [sums for _, found in results for sums in found])
        grads = results[0][0] if streams == 1 else _add([grads for grads, _ in results])
        used = [jax.tree.map(operator.itemgetter(np.s_[:, : part.used]), part.sequences) for part in parts]
        return grads, sums, padding_share(used)

    def _score(
        self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array, *, with_entropy: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies [B, G, T] of all completions."""
        batch = Batch(prompts, tokens, mask, advantages=mask, sampling_log_probs=mask)  # neither of them is read
        parts, numbers = self.pack(params, batch, scored=True)
        streams = count_streams(params, len(parts))

        def score_parts(stream: int) -> list[tuple[jax.Array, jax.Array]]:
            own = parts[stream::streams]
            return [in_turn(score_part(self, params, split(part, self.mesh), with_entropy)) for part in own]

        shares = run_in_streams(score_parts, range(streams))
        scores = [shares[i % streams][i // streams] for i in range(len(parts))]
        return _in_order(self, scores, np.argsort(numbers.ravel(), kind="stable")[-len(mask) :])

    def pack(
        self, params: Params, batch: Batch, selected: jax.Array | None = None, *, scored: bool = False
    ) -> tuple[list[Packed], np.ndarray]:
        """The parts of a batch, on the host; and the numbers [parts, A·K] of their prompts, -1 where one has fewer.

        All parts and devices have about as many tokens. Prompts without a gradient come last, so that whole parts have
        none, and parts without completions are left out unless the batch is only `scored`.
        """
        (_, g, t), devices = batch.mask.shape, shard_count(self.mesh)
        learns = np.ones(len(batch.mask), bool) if scored else self.learns(batch)
        streams, parts, each = self.count_parts(params, batch)
        lengths = lengths_of(np.asarray(batch.mask))
        work = lengths.sum(axis=1) * np.where(learns, 3, 1)  # the backward pass is twice the forward one
        numbers = order_prompts(work, learns, cells=streams * devices, each=each).reshape(parts, devices, each)
        padded = np.where(numbers[..., None] < 0, 0, lengths[numbers])
        shape = best_shape(
            *(self.shapes(params, batch.mask.shape), padded.swapaxes(0, 1).reshape(-1, g), t),
            devices=devices,
            neighbours=each,
        )
        of_parts, packed = numbers.reshape(parts, -1), list[Packed]()
        for own in of_parts:
            part, of_part = jax.tree.map(lambda x, own=own: np.asarray(x)[own], (batch.replace(counted=None), selected))
            part = part.replace(mask=part.mask & (own >= 0)[:, None, None])
            if scored or part.mask.any():
                packed.append(self.pack_part(part, of_part, learns[own], shape, len(packed)))
        return packed or [self.pack_part(part, of_part, learns[own], shape, 0)], of_parts

    def pack_part(
        self, part: Batch, selected: jax.Array | None, learns: np.ndarray, shape: SequenceShape, number: int
    ) -> Packed:
        """A part of a minibatch with its sequences of that shape; `learns` [A·K] says which prompts have a gradient."""
        devices, mask = shard_count(self.mesh), np.asarray(part.mask)
        pack = functools.partial(pack_as, shape, np.asarray(part.tokens), devices=devices)
        with_gradient = mask & learns[:, None, None]
        together = pack(mask)
        trained, measured = (pack(own) if own.any() else [] for own in (with_gradient, mask ^ with_gradient))
        # Two kinds have two last sequences that are not full, which may cost more than the backward pass.
        if 3 * len(together) <= 3 * len(trained) + len(measured):
            trained, measured = together, []
        sequences = [*trained, *measured] or together
        # As many as completions of any lengths may need; two kinds of sequences have two last ones.
        completions = shape.size // (-(-shape.longest // shape.block) * shape.block)
        most = -(-(mask[..., 0].size // devices) // completions) + self.skips
        filled = sequences + sequences[-1:] * (most - len(sequences))
        stacked = jax.tree.map(lambda *x: np.stack(x, axis=1), *filled)
        counts: list[Any] = [np.int32(x) for x in (len(trained), max(1, len(trained) + len(measured)), number)]
        return Packed(part, selected, stacked, *counts)

    def count_parts(self, params: Params, batch: Batch) -> tuple[int, int, int]:
        """How many streams there are, how many parts of a batch, and how many prompts K a device has of each part."""
        b, p = batch.prompts.tokens.shape
        b, size = -(-b // shard_count(self.mesh)), self.shapes(params, batch.mask.shape)[0].size
        streams = count_streams(params, b)
        rounds = -(-min(-(-b * p // max(size // 16, PROMPT_TOKENS)), b) // streams)
        each = -(-b // (rounds * streams))
        return streams, -(-b // (each * streams)) * streams, each

    @property
    def skips(self) -> bool:
        """Whether the backward pass is left out for zero-signal groups: where they have no gradient."""
        return self.skip and learns_by_advantages(self.model, self.config, self.surrogate)

    def learns(self, batch: Batch) -> np.ndarray:
        """Which prompts [B] have completions with a gradient: all, or if the update `skips` those with advantages."""
        if not self.skips:
            return np.ones(len(batch.mask), bool)
        advantages = np.asarray(batch.advantages)
        return (advantages != 0).any(axis=tuple(range(1, advantages.ndim)))

    def shapes(self, params: Params, batch: tuple[int, ...]) -> list[SequenceShape]:
        """The shapes that packed sequences of a `batch` [B, G, T] may have; none has more tokens than the first."""
        t = batch[-1]
        micro = max(1, self.micro[0] // shard_count(self.mesh)) * self.micro[1] * t
        cpu = all(device.platform == "cpu" for device in devices_of(params))
        tokens = sequence_tokens(micro, t, cpu=cpu, wide=self.model.config.uses_float32_sums)
        fused = implementation(self.model.config.attention) != "einsum"
        return sequence_shapes(tokens, t, fused=fused, batch_tokens=math.prod(batch) // shard_count(self.mesh))


def choose_updater(
    model: Model,
    config: Config,
    *,
    micro: tuple[int, int],
    optimizer: optax.GradientTransformation | None = None,
    mesh: jax.sharding.Mesh | None = None,
    on_policy: bool | None = None,
    surrogate: Surrogate | None = None,
    teacher: Teacher | None = None,
) -> Updater:
    """Packed for the models of this package, padded for any other, and with a teacher that is any other.

    `micro` is (prompts, completions per prompt) of a micro-batch; if `on_policy` is None, the config decides.
    """
    kind = PackedUpdater if is_cached(model) and (teacher is None or is_cached(teacher.model)) else Updater
    on_policy = config.on_policy if on_policy is None else on_policy
    mesh = None if mesh is None or mesh.size == 1 else mesh
    return kind(as_argument(model), config, micro, optimizer, on_policy, mesh, surrogate, teacher)


def sequence_tokens(tokens: int, longest: int, *, cpu: bool, wide: bool = False) -> int:
    """Tokens of a packed sequence where a micro-batch has `tokens` on a device, before whole blocks.

    Example:
      >>> sequence_tokens(8 * 16384, 16384, cpu=False), sequence_tokens(8 * 65536, 65536, cpu=False)
      (32768, 65536)
    """
    return min(tokens, (WIDE_TOKENS if wide else CPU_TOKENS) if cpu else max(longest, ACCELERATOR_TOKENS))


def _read(
    model: CachedModel, params: Params, prompts: Prompts, mesh: jax.sharding.Mesh | None, key: jax.Array | None
) -> ReadPrompts:
    """The states, keys and values of prompts, each on its prompt's device."""
    read = read_prompts(model, params, prompts, rngs=None if key is None else {"dropout": key})
    heads = jax.tree.map(lambda x: constrain(x, mesh, "tensor"), read.layers)
    return ReadPrompts(constrain(read.last, mesh), heads)


def _key(updater: PackedUpdater, state: TrainState, part: Packed, i: jax.Array | int) -> jax.Array | None:
    """The key of the dropouts of a part's prompts (0) or of its i-th sequence, counted from 1; None without dropout."""
    key = dropout_key(updater.model, state)
    return None if key is None else jax.random.fold_in(jax.random.fold_in(key, part.number), i)


def _loss(
    updater: PackedUpdater,
    state: TrainState,
    part: Packed,
    totals: dict[str, jax.Array],
    read: ReadPrompts,
    by_teacher: ReadPrompts | None,
    i: jax.Array | int,
) -> tuple[jax.Array, MetricSums]:
    """`loss_of` the completions of the i-th sequence, given its prompts as the policy and the teacher read them."""
    model, config, lengths = updater.model, updater.config, part.batch.prompts.lengths
    sequence, key, coef = part.sequence(i), _key(updater, state, part, i + 1), router_coef(model, config)
    own = jax.tree.map(sequence.take, part.batch.replace(prompts=None))
    own = own.replace(mask=own.mask & sequence.mask)
    scores = score_packed(
        *(model, state.params, read, lengths, sequence, sampling_of(config)),
        counted=own.mask if coef else None,
        rngs=None if key is None else {"dropout": key},
        compared=compare_packed(updater.teacher, by_teacher, lengths, sequence, own, config),
    )
    return loss_of(
        *(scores, own, state, totals),
        config=config,
        on_policy=updater.on_policy,
        surrogate=updater.surrogate,
        selected=None if part.selected is None else sequence.take(part.selected),
        router_coef=coef,
    )


@shared
@functools.partial(jax.jit, donate_argnames=("total",))
def add_gradients(
    updater: PackedUpdater, total: Params, state: TrainState, part: Packed, totals: dict[str, jax.Array]
) -> tuple[Params, MetricSums]:
    """The gradient of the params, with the gradient of one part added; and its metric sums.

    `totals` are the `count_totals` of the whole minibatch.
    """
    model, mesh, teacher, prompts = updater.model, updater.mesh, updater.teacher, part.batch.prompts
    key, by_teacher = _key(updater, state, part, 0), None
    read, back = jax.vjp(lambda params: _read(model, params, prompts, mesh, key), state.params)
    if teacher is not None:
        assert is_cached(teacher.model), "or the updater would not be packed"
        by_teacher = _read(teacher.model, teacher.params, prompts, mesh, None)

    def loss_fn(params: Params, read: ReadPrompts, i: jax.Array | int) -> tuple[jax.Array, MetricSums]:
        return _loss(updater, state.replace(params=params), part, totals, read, by_teacher, i)

    def add(i: jax.Array, carry: tuple[Params, ReadPrompts, MetricSums]) -> tuple[Params, ReadPrompts, MetricSums]:
        of_params, of_read, sums = carry
        more, new = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(state.params, read, i)
        of_params, of_read = jax.tree.map(lambda x, y: x + y.astype(x.dtype), (of_params, of_read), more)
        return keep_placed(of_params, mesh), of_read, merge_metrics(sums, new)

    def measure(i: jax.Array, sums: MetricSums) -> MetricSums:
        return merge_metrics(sums, loss_fn(state.params, read, i)[1])

    def add_prompts(total: Params) -> Params:
        (more,) = back(jax.tree.map(lambda g, x: g.astype(x.dtype), of_read, read))
        return keep_placed(jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, more), mesh)

    _, shapes = jax.eval_shape(loss_fn, state.params, read, 0)
    sums = MetricSums(
        sums=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.sums),
        maxes=jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), shapes.maxes),
    )
    # Gradients of keys and values are summed in float32 too, whatever the compute dtype.
    total, of_read, sums = jax.lax.fori_loop(0, part.trained, add, (total, zeros_like(read), sums))
    if not updater.skips:
        return add_prompts(total), sums
    sums = jax.lax.fori_loop(part.trained, part.used, measure, sums)
    return jax.lax.cond(part.trained > 0, add_prompts, lambda total: total, total), sums


@shared
@functools.partial(jax.jit, static_argnames=("with_entropy",))
def score_part(updater: PackedUpdater, params: Params, part: Packed, with_entropy: bool) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies [A·K, G, T] of the completions of one part; 0 where the mask is 0."""
    prompts, mask, sampling = part.batch.prompts, part.batch.mask, sampling_of(updater.config)
    read = _read(updater.model, params, prompts, updater.mesh, None)

    def add(i: jax.Array, scores: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sequence = part.sequence(i)
        own = (updater.model, params, read, prompts.lengths, sequence, sampling)
        new, seen = score_packed(*own, with_entropy=with_entropy)[:2], sequence.take(mask)
        # A segment that only fills the shape adds zeros to the first completion.
        return jax.tree.map(lambda x, y: sequence.add_to(x, jnp.where(seen, y, 0)), scores, new)

    zeros = constrain(jnp.zeros(mask.shape), updater.mesh)
    return jax.lax.fori_loop(0, part.used, add, (zeros, zeros))


@functools.partial(jax.jit, donate_argnames=("state",))
def apply_sums(
    updater: PackedUpdater, state: TrainState, grads: Params, sums: MetricSums
) -> tuple[TrainState, dict[str, jax.Array]]:
    state, metrics = apply_gradients(state, grads, sums, optimizer=updater.optimizer, config=updater.config)
    return keep_placed(state, updater.mesh), metrics


@jax.jit
def zero_gradients(updater: PackedUpdater, params: Params) -> Params:
    """Where gradients are summed, each leaf placed as its parameter."""
    return keep_placed(zeros_like(params), updater.mesh)


@jax.jit
def _in_order(updater: PackedUpdater, parts: list[tuple[jax.Array, ...]], at: jax.Array) -> tuple[jax.Array, ...]:
    """The scores of all parts, one after another, in the order of the batch."""
    return jax.tree.map(lambda *x: constrain(jnp.concatenate(x)[at], updater.mesh), *parts)


_count_totals = jax.jit(count_totals)
_merge = jax.jit(merge_metrics)
_add = jax.jit(lambda trees: jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *trees))
_select = jax.jit(top_entropy_mask)
