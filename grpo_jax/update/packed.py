"""Scoring and updating without the padding: `step.train_step`, one packed sequence at a time.

Completions are cut to their lengths and laid end to end in packed sequences. The prompts are read once for all of them,
and one backward pass through the prompts ends the update:

```
prompts ─► last states, keys and values ─► sequence 1 ─► loss ─► gradient of the params
                    ▲                └───► sequence 2 ─► loss ─►  + …
                    └── gradient of these, summed over the sequences ─► + gradient of the params
```

One program serves all sequences, and the loop over them is on the host: it never waits for the device. On a mesh each
device has sequences of its own prompts, as many as the device that needs most, and all are at work on theirs together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.sharding import (
    abstract,
    constrain,
    keep_placed,
    place_of,
    shard_count,
    split,
    split_sharding,
    tree_sharding,
)
from grpo_jax.devices.streams import devices_of, in_turn, run_in_streams, shared
from grpo_jax.maths.metrics import MetricSums, merge_metrics, top_entropy_mask
from grpo_jax.models.packing import BLOCK, PackedSequence, evenly, lengths_of, pack, padding_share, sequence_size
from grpo_jax.models.scoring import score_packed
from grpo_jax.models.sight import implementation
from grpo_jax.types import Batch, Params, Prompts
from grpo_jax.update.objective import apply_gradients, count_totals, loss_of, router_coef, sampling_of
from grpo_jax.update.prompts import (
    Spread,
    add_prompts,
    count_reads,
    cut_reads,
    deal,
    join_reads,
    read_all,
    read_some,
    rngs_of,
)
from grpo_jax.update.state import TrainState, same_shapes
from grpo_jax.update.step import dropout_key, zeros_like

CPU_TOKENS = 512
"""Tokens of a packed sequence on a CPU at most: enough to fill the matrix products of all cores; with more, activations
leave the cache."""


ACCELERATOR_TOKENS = 32768
"""Those on one GPU or TPU: the products of so many keep any of them busy, and more would only take more memory."""


def sequence_tokens(tokens: int, longest: int, *, cpu: bool) -> int:
    """Tokens of a packed sequence at most, of a micro-batch with so many on a device.

    Example:
      >>> sequence_tokens(8 * 16384, 16384, cpu=False), sequence_tokens(8 * 65536, 65536, cpu=False)
      (32768, 65536)
    """
    return min(tokens, CPU_TOKENS if cpu else max(longest, ACCELERATOR_TOKENS))


class _Shape(NamedTuple):
    """What packed sequences of one compiled program have in common, as `packing.pack` takes it."""

    size: int
    longest: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class PackedUpdater:
    """How a run scores completions and makes its updates, for the models of this package (`PaddedUpdater` for others).

    All is compiled, and computed one packed sequence at a time.

    Attributes:
      model: a `types.CachedModel`, as an argument of a compiled function.
      config: the settings.
      micro: (prompts, completions per prompt) of a micro-batch; its packed sequences have no more tokens.
      optimizer: the transformation that made `state.opt_state`; None where nothing is updated.
      on_policy: as in `step.train_step`.
      mesh: where params are; None for one device.
    """

    model: Any
    config: GRPOConfig
    micro: tuple[int, int]
    optimizer: optax.GradientTransformation | None = None
    on_policy: bool = True
    mesh: jax.sharding.Mesh | None = None

    def columns(self, longest: int) -> int:
        """To how many tokens the arrays of a batch are to be cut whose longest completion has so many.

        Always T: what stands behind the ends of completions costs nothing.
        """
        return self.config.max_completion_length

    def score(self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Log-probs [B, G, T] of completions under any params (reference, initial policy); 0 where mask is 0.

        They may still be on their way when this returns: with a single stream the last sequence is.
        """
        sequences = self._pack(params, tokens, mask)
        prompts, mask = split((prompts, mask), self.mesh)
        return self._score(params, prompts, mask, sequences, with_entropy=False)[0]

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state` is consumed. The metric `padding_share` is added."""
        grads, sums, sequences = self._gradients(state, batch)
        state, metrics = _jit_apply(state, grads, sums, optimizer=self.optimizer, config=self.config, mesh=self.mesh)
        # A sequence counts the segments that only fill its shape, and completions without a token are in none.
        rows = batch.mask.shape[0] * batch.mask.shape[1]
        return state, {**metrics, "rows": jnp.float32(rows), "padding_share": jnp.float32(padding_share(sequences))}

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums]:
        """The first half of `update`: the gradient of a minibatch, and its metric sums."""
        grads, sums, _ = self._gradients(state, batch)
        return grads, sums

    def lower(
        self, state: TrainState, batch: Batch, *, tokens: int | None = None, sequence: PackedSequence | None = None
    ) -> Any:
        """The largest program of `update`, lowered for completions that are all T long; only shapes are looked at.

        `tokens` of a packed sequence are those of the present device unless they are given; or it is of the shape of
        another `sequence`.
        """
        spread, full = self._spread(batch.prompts), self._full_sequence(state.params, batch, tokens)
        state, batch = abstract((state, batch))
        count, read, _ = self._shapes_read(state, batch, full)
        read = jax.eval_shape(functools.partial(join_reads, spread=spread), [read] * count)
        selected = batch.mask if self.config.top_entropy_quantile < 1 else None
        totals = jax.eval_shape(count_totals, batch, selected)
        zeros = jax.eval_shape(functools.partial(_zeros, spread=spread), (state.params, read))
        dropout = jax.eval_shape(lambda state: dropout_key(self.model, state), state)
        zeros, read, dropout = self._placed((zeros, read, dropout), state.params)
        selected = self._placed(selected, (batch, state.params))
        totals = self._placed(totals, (batch, selected))
        sequence = full if sequence is None else sequence
        given = self._placed((state, batch, sequence))
        given = (zeros, given[0], read, *given[1:], totals, selected, dropout, 0)
        return _add_sequence.lower(*given, **self._how, spread=spread)

    def lower_score(
        self,
        params: Params,
        batch: Batch,
        *,
        tokens: int | None = None,
        sequence: PackedSequence | None = None,
        with_entropy: bool = False,
    ) -> Any:
        """The largest program of `score`, lowered in the same way."""
        spread, full = self._spread(batch.prompts), self._full_sequence(params, batch, tokens)
        params, batch = abstract((params, batch))
        how: dict[str, Any] = {"spread": spread}
        count = count_reads(batch.prompts, full.tokens.shape[1], spread)
        some = functools.partial(read_some, count=count, backward=False, **how)
        read, _ = jax.eval_shape(some, params, batch.prompts, None, self.model, 0)
        read = jax.eval_shape(functools.partial(join_reads, **how), [read] * count)
        scores = (jax.ShapeDtypeStruct(batch.mask.shape, jnp.float32),) * 2
        how |= {"model": self.model, "sampling": sampling_of(self.config), "with_entropy": with_entropy}
        sequence = full if sequence is None else sequence
        given = self._placed((scores, params)), self._placed(read, params)
        given = (*given[0], given[1], *self._placed((batch.prompts.lengths, batch.mask, sequence)))
        return _score_sequence.lower(*given, **how)

    def lower_all(self, state: TrainState, batch: Batch) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Name and lowering of each program whose shape is that of the packed sequences: the only ones that may come
        late."""
        t = batch.mask.shape[2]
        most = self._most(state.params, t)
        scored = batch.ref_log_probs is not None or batch.old_log_probs is not None
        scores = [False] * scored + [True] * (self.config.top_entropy_quantile < 1)
        state = abstract(state)  # the arrays will be taken by the first update
        for shape in self._shapes(state.params, t):
            sequence = self._any_sequence(batch, shape)
            name = f"{shape.size} tokens, completions of {'' if shape.whole else 'up to '}{shape.longest}"
            yield f"update {name}", functools.partial(self.lower, state, batch, sequence=sequence, tokens=most)
            score = functools.partial(self.lower_score, batch=batch, sequence=sequence, tokens=most)
            for entropy in scores:
                scored_by = functools.partial(score, state.params, with_entropy=entropy)
                yield f"score {name}{', with entropy' * entropy}", scored_by
            if state.ref_params is not None and not same_shapes(state.ref_params, state.params):
                yield f"score {name}, by the reference", functools.partial(score, state.ref_params)

    def kept_bytes(self, state: TrainState, batch: Batch, *, tokens: int | None = None) -> int:
        """Bytes that `update` holds on a device beside the program of `lower`: activations of all prompts."""
        count, _, kept = self._shapes_read(state, batch, self._full_sequence(state.params, batch, tokens))
        kept_of_all = count * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
        return kept_of_all // self._spread(batch.prompts).devices

    @property
    def _how(self) -> dict[str, Any]:
        return {"model": self.model, "config": self.config, "on_policy": self.on_policy}

    def _spread(self, prompts: Prompts) -> Spread:
        """Over how many devices the prompts of a batch are cut; where they don't divide, all compute all."""
        devices = shard_count(self.mesh)
        return Spread(self.mesh, devices if prompts.lengths.shape[0] % devices == 0 else 1)

    def _placed(self, tree: Any, source: Any = None) -> Any:
        """Shapes where the arrays of a run are: on a mesh params by their table and all others by prompts; on one
        device where the `source` is, from which they are computed."""
        if self.mesh is None:
            at = place_of(source)
            return tree if at is None else jax.tree.map(lambda x: _at(x, at), tree)
        both = split_sharding(tree, self.mesh), tree_sharding(tree, self.mesh)
        return jax.tree.map(lambda x, prompts, table: _at(x, table if any(table.spec) else prompts), tree, *both)

    def _most(self, params: Params, t: int) -> int:
        """Tokens of a packed sequence at most."""
        tokens = max(1, self.micro[0] // shard_count(self.mesh)) * self.micro[1] * t
        return sequence_tokens(tokens, t, cpu=all(device.platform == "cpu" for device in devices_of(params)))

    def _shapes(self, params: Params, t: int, most: int | None = None) -> list[_Shape]:
        """The shapes that packed sequences of completions [B, G, T] may have: each is a program, so they are few.

        With a fused attention two sizes. With one that writes out the scores of whole blocks, the block and how far
        back it has to look: for completions of any length, for short ones, and for such as all run to the end.
        """
        most = self._most(params, t) if most is None else most
        size, short = sequence_size(most, t), -(-t // 4)
        shapes = [_Shape(size, t, whole=False)]
        if implementation(self.model.config.attention) != "einsum":
            smaller = sequence_size(size // 4, t)
            return [*shapes, shapes[0]._replace(size=smaller)] if 2 * smaller <= size else shapes
        if t % BLOCK == 0:
            shapes.append(shapes[0]._replace(whole=True))
        return [*shapes, shapes[0]._replace(longest=short)] if short >= BLOCK else shapes

    def _pack(self, params: Params, tokens: Any, mask: Any) -> list[PackedSequence]:
        """The packed sequences of a batch, of the shape that fits it best."""
        tokens, mask = np.asarray(tokens), np.asarray(mask)
        lengths, devices = lengths_of(mask), shard_count(self.mesh)
        devices = devices if len(lengths) % devices == 0 else 1
        t = mask.shape[2]
        most = int(lengths.reshape(devices, -1).sum(axis=1).max())
        fitting = [shape for shape in self._shapes(params, t) if lengths.max() <= shape.longest]
        if any(shape.whole for shape in fitting):
            fitting = [shape for shape in fitting if shape.whole == bool((lengths == t).all())]
        # The fewest tokens, then those made for the shortest completions.
        best = min(fitting, key=lambda shape: (-(-most // shape.size) * shape.size, shape.longest, -shape.size))
        return pack(tokens, mask, devices=devices, **best._asdict())

    def _any_sequence(self, batch: Batch, shape: _Shape) -> PackedSequence:
        """A packed sequence of that shape."""
        mask = np.ones(batch.mask.shape, bool)
        if not shape.whole:
            mask[:, :, shape.longest // 2 :] = False
        devices = self._spread(batch.prompts).devices
        return pack(mask.astype(np.int32), mask, devices=devices, **shape._asdict())[0]

    def _full_sequence(self, params: Params, batch: Batch, tokens: int | None) -> PackedSequence:
        """A packed sequence of a batch whose completions are all T long."""
        shapes = self._shapes(params, batch.mask.shape[2], tokens)
        return self._any_sequence(batch, next((shape for shape in shapes if shape.whole), shapes[0]))

    def _shapes_read(self, state: TrainState, batch: Batch, sequence: PackedSequence) -> tuple[int, Any, Any]:
        """How many times prompts are read, and the shapes of what `read_some` returns each time."""
        spread = self._spread(batch.prompts)
        count = count_reads(batch.prompts, sequence.tokens.shape[1], spread)
        some = functools.partial(read_some, count=count, backward=True, spread=spread)
        dropout = dropout_key(self.model, state)
        return count, *jax.eval_shape(some, state.params, batch.prompts, dropout, self.model, 0)

    def _size(self, params: Params, t: int) -> int:
        """Tokens of the largest packed sequence: by these, prompts are read."""
        return max(shape.size for shape in self._shapes(params, t))

    def _gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums, list[PackedSequence]]:
        """Gradient and metric sums of a batch, and its packed sequences."""
        model, spread = self.model, self._spread(batch.prompts)
        size, mask = self._size(state.params, batch.mask.shape[2]), np.asarray(batch.mask)
        order = evenly(lengths_of(mask).sum(axis=1), spread.devices)
        sequences = self._pack(state.params, np.asarray(batch.tokens)[order], mask[order])
        batch = split(batch, self.mesh)
        if spread.devices > 1:
            batch = _reorder(batch, order, spread=spread)
        selected, quantile = None, self.config.top_entropy_quantile
        if quantile < 1:
            _, entropies = self._score(state.params, batch.prompts, batch.mask, sequences, with_entropy=True)
            selected = _select(entropies, batch.mask, quantile=quantile, mesh=self.mesh)
        totals = _jit_totals(batch, selected)
        dropout = dropout_key(model, state)
        given = (state.params, batch.prompts, dropout, model)
        read, kept = read_all(*given, size, spread, backward=True)

        def gradients_of(numbers: range) -> tuple[Any, MetricSums]:
            grads, sums = _zeros((state.params, read), spread=spread), list[MetricSums]()
            for i in numbers:
                given = (state, read, batch, split(sequences[i], self.mesh), totals, selected, dropout, i)
                grads, more = _add_sequence(in_turn(grads), *given, **self._how, spread=spread)
                sums = [more] if not sums else [_merge(*sums, more)]  # one by one: whatever their number, one program
            return grads, sums[0]

        results = run_in_streams(gradients_of, deal(state.params, len(sequences)))
        totals_of, of_reads = zip(*(grads for grads, _ in results), strict=True)
        of_read = _sum(of_reads)

        def with_prompts(share: tuple[Params, range]) -> Params:
            total, numbers = share
            for i in numbers:
                given = (state.params, batch.prompts, dropout, model, i)
                total = add_prompts(in_turn(total), kept[i], of_read, read, *given, count=len(kept), spread=spread)
            return total

        # A stream's prompts are added to the gradient of the same stream's sequences; a stream may have none.
        shares = [range(i, len(kept), len(totals_of)) for i in range(len(totals_of))]
        grads = _sum(run_in_streams(with_prompts, list(zip(totals_of, shares, strict=True))))
        return grads, functools.reduce(_merge, (sums for _, sums in results)), sequences

    def _score(
        self, params: Params, prompts: Prompts, mask: jax.Array, sequences: list[PackedSequence], *, with_entropy: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies [B, G, T] of all completions."""
        spread = self._spread(prompts)
        read, _ = read_all(params, prompts, None, self.model, self._size(params, mask.shape[2]), spread, backward=False)
        how: dict[str, Any] = {"model": self.model, "sampling": sampling_of(self.config), "with_entropy": with_entropy}

        def scores_of(numbers: range) -> tuple[jax.Array, jax.Array]:
            scores = split((jnp.zeros(mask.shape), jnp.zeros(mask.shape)), self.mesh)
            for i in numbers:
                given = (params, read, prompts.lengths, mask, split(sequences[i], self.mesh))
                scores = _score_sequence(in_turn(scores), *given, **how, spread=spread)
            return scores

        return _sum(run_in_streams(scores_of, deal(params, len(sequences))))


def _at(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """A shape with that place, unless it has one."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or sharding)


def _apply(state, grads, sums, *, mesh, **how):
    state, metrics = apply_gradients(state, grads, sums, **how)
    return keep_placed(state, mesh), metrics


_jit_apply = jax.jit(_apply, static_argnames=("optimizer", "config", "mesh"), donate_argnames=("state",))
_jit_totals = jax.jit(count_totals)
_merge = jax.jit(merge_metrics)


@functools.partial(jax.jit, static_argnames=("quantile", "mesh"))
def _select(entropies, mask, *, quantile, mesh):
    return constrain(top_entropy_mask(entropies, mask, quantile), mesh)


def _sum(trees):
    return trees[0] if len(trees) == 1 else _add_up(tuple(trees))


@jax.jit
def _add_up(trees):
    return jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *trees)


@functools.partial(jax.jit, static_argnames=("spread",))
def _reorder(batch, order, *, spread):
    """The batch with its prompts in that order: sums over them are the same."""
    return jax.tree.map(lambda x: constrain(x[order], spread.mesh), batch)


@functools.partial(jax.jit, static_argnames=("spread",))
def _zeros(like, *, spread):
    # Also of what was read: gradients of keys and values are sums over many sequences, whatever the compute dtype.
    return _keep_gradients(zeros_like(like), spread)


def _keep_gradients(gradients, spread):
    """Gradients of the params and of what was read, where these are."""
    of_params, of_read = gradients
    return keep_placed(of_params, spread.mesh), cut_reads(of_read, spread)


@shared
@functools.partial(jax.jit, static_argnames=("config", "on_policy", "spread"), donate_argnums=(0,))
def _add_sequence(
    gradients, state, read, batch, sequence, totals, selected, dropout, number, *, model, config, on_policy, spread
):
    """Gradients of the params and of what was read from the prompts, with those of one packed sequence added."""
    own = jax.tree.map(sequence.of, batch.replace(prompts=None, counted=None))
    own, aux_coef = own.replace(mask=own.mask & sequence.mask), router_coef(model, config)
    selected = None if selected is None else sequence.of(selected)

    def loss_fn(params, read):
        given = (read, batch.prompts.lengths, sequence, sampling_of(config))
        counted = own.mask if aux_coef else None
        scores = score_packed(model, params, *given, counted=counted, rngs=rngs_of(dropout, 1, number))
        return loss_of(
            scores.log_probs,
            scores.entropies,
            own,
            state,
            totals,
            config=config,
            on_policy=on_policy,
            selected=selected,
            aux_loss=scores.router_loss,
            aux_coef=aux_coef,
        )

    more, sums = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(state.params, read)
    total = jax.tree.map(lambda total, x: total + x.astype(total.dtype), gradients, more)
    return _keep_gradients(total, spread), sums


@shared
@functools.partial(jax.jit, static_argnames=("sampling", "with_entropy", "spread"), donate_argnums=(0,))
def _score_sequence(scores, params, read, lengths, mask, sequence, *, model, sampling, with_entropy, spread):
    """Log-probs and entropies [B, G, T] with those of one packed sequence in their places."""
    new = score_packed(model, params, read, lengths, sequence, sampling, with_entropy=with_entropy)[:2]
    seen = sequence.of(mask)
    # A segment that only fills the shape adds zeros to the first completion.
    put = lambda old, x: constrain(sequence.put(old, jnp.where(seen, x, 0)), spread.mesh)
    return jax.tree.map(put, scores, new)
