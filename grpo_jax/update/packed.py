"""Scoring and updating without the padding, on one device: `step.train_step`, one packed sequence at a time.

Completions are cut to their lengths and laid end to end in packed sequences. The prompts are read once for all of them,
and one backward pass through the prompts ends the update:

```
prompts ─► last states, keys and values ─► sequence 1 ─► loss ─► gradient of the params
                    ▲                └───► sequence 2 ─► loss ─►  + …
                    └── gradient of these, summed over the sequences ─► + gradient of the params
```

One program serves all sequences, and the loop over them is on the host: it never waits for the device.

From the reading of the prompts to the backward pass through them, only activations are kept. What that pass needs of
the weights alone, themselves or cast to the compute dtype, is made anew there: kept, it would be a copy for each batch
of prompts that is read at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal, jaxpr_as_fun

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.streams import count_streams, devices_of, in_turn, run_in_streams, shared
from grpo_jax.maths.metrics import MetricSums
from grpo_jax.models.packing import PackedSequence, pack, padding_share, sequence_size
from grpo_jax.models.scoring import read_prompts, score_packed
from grpo_jax.types import Batch, Params, Prompts
from grpo_jax.update.objective import apply_gradients, count_totals, loss_of, sampling_of
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import dropout_key, zeros_like

CPU_TOKENS = 512
"""Tokens of a packed sequence on a CPU at most: enough to fill the matrix products of all cores; with more, activations
leave the cache."""


@dataclasses.dataclass(frozen=True)
class PackedUpdater:
    """`updater.Updater` for the models of this package, on one device.

    Attributes:
      model: a `types.CachedModel`, as an argument of a compiled function.
      config: the settings.
      micro: (prompts, completions per prompt) of a micro-batch; a packed sequence has no more tokens.
      optimizer: the transformation that made `state.opt_state`; None where nothing is updated.
      on_policy: as in `step.train_step`.
    """

    model: Any
    config: GRPOConfig
    micro: tuple[int, int]
    optimizer: optax.GradientTransformation | None = None
    on_policy: bool = True

    def score(self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Log-probs [B, G, T] of completions; the last sequence of a single stream may still be on its way."""
        return self._score(params, prompts, mask, self._pack(params, tokens, mask), with_entropy=False)[0]

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state` is consumed. The metric `padding_share` is added."""
        grads, sums, sequences = self._gradients(state, batch)
        state, metrics = _jit_apply(state, grads, sums, optimizer=self.optimizer, config=self.config)
        # A sequence counts the segments that only fill its shape, and completions without a token are in none.
        rows = batch.mask.shape[0] * batch.mask.shape[1]
        return state, {**metrics, "rows": jnp.float32(rows), "padding_share": jnp.float32(padding_share(sequences))}

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Params, list[MetricSums]]:
        """The first half of `update`: the gradient of a minibatch, and the metric sums of its parts."""
        return self._gradients(state, batch)[:2]

    def lower(self, state: TrainState, batch: Batch, *, tokens: int | None = None) -> Any:
        """The largest program of `update`, lowered for completions that are all T long; only shapes are looked at.

        `tokens` of a packed sequence are those of the present device unless they are given.
        """
        sequences = self._full_sequences(state.params, batch, tokens)
        count, read, _ = self._shapes_read(state, batch, sequences)
        read = jax.eval_shape(_join, [read] * count)
        entropies = batch.sampling_log_probs if self.config.top_entropy_quantile < 1 else None
        totals = jax.eval_shape(lambda batch, x: count_totals(batch, self.config, x), batch, entropies)
        zeros = jax.eval_shape(_zeros, (state.params, read))
        given = (zeros, state, read, batch, sequences[0], totals, dropout_key(self.model, state), 0)
        return _add_sequence.lower(*given, model=self.model, config=self.config, on_policy=self.on_policy)

    def lower_score(self, params: Params, batch: Batch, *, tokens: int | None = None) -> Any:
        """The largest program of `score`, lowered in the same way."""
        sequences = self._full_sequences(params, batch, tokens)
        count = _count_reads(batch.prompts, sequences)
        read_some = functools.partial(_read_some, count=count, backward=False)
        read, _ = jax.eval_shape(read_some, params, batch.prompts, None, self.model, 0)
        read = jax.eval_shape(_join, [read] * count)
        scores = (jax.ShapeDtypeStruct(batch.mask.shape, jnp.float32),) * 2
        how = {"model": self.model, "sampling": sampling_of(self.config), "with_entropy": False}
        return _score_sequence.lower(scores, params, read, batch.prompts.lengths, batch.mask, sequences[0], **how)

    def kept_bytes(self, state: TrainState, batch: Batch, *, tokens: int | None = None) -> int:
        """Bytes that `update` holds beside the program of `lower`: activations of all prompts, for the way back."""
        count, _, kept = self._shapes_read(state, batch, self._full_sequences(state.params, batch, tokens))
        return count * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))

    def _pack(self, params: Params, tokens: Any, mask: Any, most: int | None = None) -> list[PackedSequence]:
        """The packed sequences of a batch, of at most `most` tokens; None: as many as a micro-batch, fewer on a CPU."""
        longest = tokens.shape[2]
        if most is None:
            most = self.micro[0] * self.micro[1] * longest
            if all(device.platform == "cpu" for device in devices_of(params)):
                most = min(most, CPU_TOKENS)
        return pack(np.asarray(tokens), np.asarray(mask), size=sequence_size(most, longest))

    def _full_sequences(self, params: Params, batch: Batch, tokens: int | None) -> list[PackedSequence]:
        """The packed sequences of a batch whose completions are all T long."""
        full = np.ones(batch.mask.shape, bool)
        return self._pack(params, full.astype(np.int32), full, tokens)

    def _shapes_read(self, state: TrainState, batch: Batch, sequences: list[PackedSequence]) -> tuple[int, Any, Any]:
        """How many times prompts are read, and the shapes of what `_read_some` returns each time."""
        count = _count_reads(batch.prompts, sequences)
        read_some = functools.partial(_read_some, count=count, backward=True)
        dropout = dropout_key(self.model, state)
        return count, *jax.eval_shape(read_some, state.params, batch.prompts, dropout, self.model, 0)

    def _gradients(self, state: TrainState, batch: Batch) -> tuple[Params, list[MetricSums], list[PackedSequence]]:
        """Gradient and metric sums of a batch, and its packed sequences."""
        model, how = self.model, {"model": self.model, "config": self.config, "on_policy": self.on_policy}
        sequences = self._pack(state.params, batch.tokens, batch.mask)
        entropies = None
        if self.config.top_entropy_quantile < 1:
            _, entropies = self._score(state.params, batch.prompts, batch.mask, sequences, with_entropy=True)
        totals = _jit_totals(batch, config=self.config, entropies=entropies)
        dropout = dropout_key(model, state)
        read, kept = _read_all(state.params, batch.prompts, dropout, model, sequences, backward=True)

        def gradients_of(numbers: range) -> tuple[Any, list[Any]]:
            grads, sums = _zeros((state.params, read)), []
            for i in numbers:
                given = (state, read, batch, sequences[i], totals, dropout, i)
                grads, more = _add_sequence(in_turn(grads), *given, **how)
                sums.append(more)
            return grads, sums

        results = run_in_streams(gradients_of, _deal(state.params, len(sequences)))
        sums = [more for _, sums in results for more in sums]
        totals_of, of_reads = zip(*(grads for grads, _ in results), strict=True)
        of_read = _sum(of_reads)

        def with_prompts(share: tuple[Params, range]) -> Params:
            total, numbers = share
            for i in numbers:
                given = (state.params, batch.prompts, dropout, model, i)
                total = _add_prompts(in_turn(total), kept[i], of_read, read, *given, count=len(kept))
            return total

        # A stream's prompts are added to the gradient of the same stream's sequences; a stream may have none.
        shares = [range(i, len(kept), len(totals_of)) for i in range(len(totals_of))]
        return _sum(run_in_streams(with_prompts, list(zip(totals_of, shares, strict=True)))), sums, sequences

    def _score(
        self, params: Params, prompts: Prompts, mask: jax.Array, sequences: list[PackedSequence], *, with_entropy: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies [B, G, T] of all completions."""
        read, _ = _read_all(params, prompts, None, self.model, sequences, backward=False)
        how = {"model": self.model, "sampling": sampling_of(self.config), "with_entropy": with_entropy}

        def scores_of(numbers: range) -> tuple[jax.Array, jax.Array]:
            scores = (jnp.zeros(mask.shape), jnp.zeros(mask.shape))
            for i in numbers:
                scores = _score_sequence(in_turn(scores), params, read, prompts.lengths, mask, sequences[i], **how)
            return scores

        return _sum(run_in_streams(scores_of, _deal(params, len(sequences))))


_jit_apply = jax.jit(apply_gradients, static_argnames=("optimizer", "config"), donate_argnames=("state",))
_jit_totals = jax.jit(count_totals, static_argnames=("config",))


def _deal(params: Params, count: int) -> list[range]:
    """The numbers 0 … count − 1 dealt out to the streams."""
    streams = count_streams(params, count)
    return [range(i, count, streams) for i in range(streams)]


def _read_all(
    params: Params,
    prompts: Prompts,
    dropout: jax.Array | None,
    model: Any,
    sequences: list[PackedSequence],
    *,
    backward: bool,
) -> tuple[Any, list[Any]]:
    """`read_prompts` of all prompts, some at a time; and what each time keeps for the way back."""
    count = _count_reads(prompts, sequences)

    def read_share(numbers: range) -> list[Any]:
        how: dict[str, Any] = {"count": count, "backward": backward}
        return [in_turn(_read_some(params, prompts, dropout, model, i, **how)) for i in numbers]

    shares = _deal(params, count)
    results = run_in_streams(read_share, shares)
    in_order = [results[i % len(shares)][i // len(shares)] for i in range(count)]
    return _join([read for read, _ in in_order]), [kept for _, kept in in_order]


def _count_reads(prompts: Prompts, sequences: list[PackedSequence]) -> int:
    """How many times equally many prompts are read: none has more tokens than a sequence, or it is a single prompt."""
    b, p = prompts.tokens.shape
    return b // max(n for n in range(1, b + 1) if b % n == 0 and (n == 1 or n * p <= sequences[0].tokens.shape[0]))


def _take(tree: Any, number: jax.Array | int, count: int) -> Any:
    """Of arrays [B, ...], those of the prompts that are read at time `number` of `count`."""
    some = lambda x: jax.lax.dynamic_slice_in_dim(x, number * (x.shape[0] // count), x.shape[0] // count)
    return jax.tree.map(some, tree)


def _rngs(dropout: jax.Array | None, *numbers: jax.Array | int) -> dict[str, jax.Array] | None:
    """The keys of `apply`, different for different numbers."""
    return None if dropout is None else {"dropout": functools.reduce(jax.random.fold_in, numbers, dropout)}


def _read(params, prompts, dropout, model, number, *, count):
    return read_prompts(model, params, _take(prompts, number, count), rngs=_rngs(dropout, 0, number))


@shared
@functools.partial(jax.jit, static_argnames=("count", "backward"))
def _read_some(params, prompts, dropout, model, number, *, count, backward):
    """`_read`, and what it keeps for the way back: the pullback's leaves that are activations."""
    if not backward:
        return _read(params, prompts, dropout, model, number, count=count), None
    read, leaves, activation, _ = _linearize(params, prompts, dropout, model, number, count=count)
    return read, [leaf for leaf, keep in zip(leaves, activation, strict=True) if keep]


def _linearize(params, prompts, dropout, model, number, *, count):
    """`_read`; and of its pullback the leaves, which of them are activations, and the structure."""
    structure = []

    def forward(params, model, prompts, dropout, number):
        read = lambda params: _read(params, prompts, dropout, model, number, count=count)
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
        if step.primitive.name in ("jit", "pjit", "checkpoint"):  # calls: what goes in is what the inner jaxpr is given
            inner = step.params["jaxpr"]
            marks = _depend(getattr(inner, "jaxpr", inner), marks)
        else:
            marks = [any(marks)] * len(step.outvars)
        marked.update(x for x, mark in zip(step.outvars, marks, strict=True) if mark)
    return marks_of(jaxpr.outvars)


@jax.jit
def _sum(trees):
    return jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *trees)


@jax.jit
def _join(reads):
    return jax.tree.map(lambda *x: jnp.concatenate(x), *reads)


@jax.jit
def _zeros(like):
    # Also of what was read: gradients of keys and values are sums over many sequences, whatever the compute dtype.
    return zeros_like(like)


@shared
@functools.partial(jax.jit, static_argnames=("config", "on_policy"), donate_argnums=(0,))
def _add_sequence(gradients, state, read, batch, sequence, totals, dropout, number, *, model, config, on_policy):
    """Gradients of the params and of what was read from the prompts, with those of one packed sequence added."""
    own = jax.tree.map(sequence.of, batch.replace(prompts=None, counted=None))
    own = own.replace(mask=own.mask & sequence.mask)

    def loss_fn(params, read):
        given = (read, batch.prompts.lengths, sequence, sampling_of(config))
        log_probs, entropies = score_packed(model, params, *given, rngs=_rngs(dropout, 1, number))
        return loss_of(log_probs, entropies, own, state, totals, config=config, on_policy=on_policy)

    more, sums = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(state.params, read)
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), gradients, more), sums


@shared
@functools.partial(jax.jit, static_argnames=("count",), donate_argnums=(0,))
def _add_prompts(total, kept, of_read, read, params, prompts, dropout, model, number, *, count):
    """The gradient of the params with what comes through the prompts of one `_read` added to it."""
    # Traced once more for what comes of weights alone; XLA drops the rest of it.
    _, leaves, activation, tree = _linearize(params, prompts, dropout, model, number, count=count)
    rest = iter(kept)
    leaves = [next(rest) if keep else leaf for leaf, keep in zip(leaves, activation, strict=True)]
    of_read = jax.tree.map(lambda g, x: g.astype(x.dtype), of_read, read)
    (more,) = jax.tree.unflatten(tree, leaves)(_take(of_read, number, count))
    return jax.tree.map(jnp.add, total, more)


@shared
@functools.partial(jax.jit, static_argnames=("sampling", "with_entropy"), donate_argnums=(0,))
def _score_sequence(scores, params, read, lengths, mask, sequence, *, model, sampling, with_entropy):
    """Log-probs and entropies [B, G, T] with those of one packed sequence in their places."""
    new = score_packed(model, params, read, lengths, sequence, sampling, with_entropy=with_entropy)
    seen = sequence.of(mask)
    flat = lambda x: x.reshape(-1, x.shape[-1])
    # A segment that only fills the shape adds zeros to the first completion.
    put = lambda old, x: flat(old).at[sequence.completions].add(jnp.where(seen, x, 0)).reshape(old.shape)
    return jax.tree.map(put, scores, new)
