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
import math

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
    evenly,
    lengths_of,
    pack_best,
    padding_share,
    sequence_shapes,
)
from grpo_jax.models.scoring import ReadPrompts
from grpo_jax.models.sharding import constrain, keep_placed, shard_count, split
from grpo_jax.models.streams import devices_of, in_turn, run_in_streams
from grpo_jax.models.tiles import implementation
from grpo_jax.types import Batch, CachedModel, Model, Params, Prompts, as_argument, is_cached
from grpo_jax.update.objective import count_totals, learns_by_advantages, sampling_of
from grpo_jax.update.order import Packing, count_needs, count_work, plan_order
from grpo_jax.update.prompts import (
    PromptsInTurn,
    Reading,
    Shards,
    count_neighbours,
    deal,
    read_all,
    sum_trees,
    zero_gradients,
)
from grpo_jax.update.sequences import Minibatch, add_gradients, add_scores, measure
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import BaseUpdater, PaddedUpdater, apply_gradients, dropout_key
from grpo_jax.update.teaching import Teacher

CPU_TOKENS = 512
"""Tokens that a packed sequence is made for on a CPU, at most: enough to fill the matrix products of all cores; with
more, activations leave the cache."""

WIDE_TOKENS = 1024
"""The same where matrix units of a CPU multiply (`models.matmul`), and rounding weights per sequence costs more."""

ACCELERATOR_TOKENS = 32768
"""Those on one GPU or TPU: the products of so many keep any of them busy, and more would only take more memory."""


def sequence_tokens(tokens: int, longest: int, *, cpu: bool, wide: bool = False) -> int:
    """Tokens that a packed sequence is made for, where a micro-batch has `tokens` on a device.

    It gets more where the longest completion has more, and up to a whole number of blocks.

    Example:
      >>> sequence_tokens(8 * 16384, 16384, cpu=False), sequence_tokens(8 * 65536, 65536, cpu=False)
      (32768, 65536)
    """
    return min(tokens, (WIDE_TOKENS if wide else CPU_TOKENS) if cpu else max(longest, ACCELERATOR_TOKENS))


@dataclasses.dataclass(frozen=True)
class PackedUpdater(BaseUpdater):
    """How a run scores completions and makes its updates with a model of this package, one packed sequence at a time.

    A packed sequence is made for the tokens of a micro-batch at most.
    """

    model: CachedModel

    def columns(self, longest: int) -> int:
        """Length of a batch's arrays when its longest completion has `longest` tokens.

        Always T: what stands behind the ends of completions costs nothing.
        """
        return self.config.max_completion_length

    def score(self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Log-probs [B, G, T] of completions under any params (reference, initial policy); 0 where mask is 0.

        The last sequence may still be at work when this returns; reading the array waits for it.
        """
        shards, shapes = self.shards(prompts), self.shapes(params, mask.shape)
        sequences = pack_best(np.asarray(tokens), np.asarray(mask), shapes, devices=shards.devices)
        prompts, mask = split((prompts, mask), self.mesh)
        return self._score(params, prompts, mask, Packing(sequences, [], shards, shapes[0].size), with_entropy=False)[0]

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state` is consumed. The metric `padding_share` is added."""
        batch, packing = self.lay_out(state.params, batch)
        grads, sums = self._gradients(state, batch, packing)
        state, metrics = apply_sums(state, grads, sums, optimizer=self.optimizer, config=self.config, mesh=self.mesh)
        # A sequence counts the segments that only fill its shape, and completions without a token are in none.
        rows = batch.mask.shape[0] * batch.mask.shape[1]
        return state, {
            **metrics,
            "rows": jnp.float32(rows),
            "padding_share": jnp.float32(padding_share([*packing.sequences, *packing.measured])),
        }

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums]:
        """The first half of `update`: the gradient of a minibatch, and its metric sums."""
        return self._gradients(state, *self.lay_out(state.params, batch))

    def lay_out(self, params: Params, batch: Batch) -> tuple[Batch, Packing]:
        """The batch on its devices, and how it is packed.

        On a mesh its prompts get an order in which all devices have about as many tokens, and on each device, also a
        single one, those come first that have a gradient; sums over them are the same.
        """
        shards, shapes = self.shards(batch.prompts), self.shapes(params, batch.mask.shape)
        neighbours = count_neighbours(batch.prompts, shapes[0].size, shards)
        mask, learns = np.asarray(batch.mask), self.learns(batch)
        work = lengths_of(mask).sum(axis=1) * np.where(learns, 3, 1)  # the way back is twice the way there
        each = evenly(work, shards.devices).reshape(shards.devices, -1)
        order = np.concatenate([prompts[np.argsort(~learns[prompts], kind="stable")] for prompts in each])
        if (order != np.arange(len(order))).any():
            batch = jax.tree.map(lambda x: np.asarray(x)[order], batch)
        tokens, mask, learns = np.asarray(batch.tokens), mask[order], learns[order]
        pack = functools.partial(pack_best, tokens, shapes=shapes, devices=shards.devices)
        packing = Packing(pack(mask, neighbours=neighbours), [], shards, shapes[0].size)
        of_learning = mask & learns[:, None, None]
        if mask.any() and not learns.all():
            some = pack(of_learning, neighbours=neighbours) if of_learning.any() else []
            # Nothing is kept for the others, so that their prompts need not be near each other.
            other = packing._replace(sequences=some, measured=pack(mask ^ of_learning))
            # Two kinds are two last sequences that are not full, which may cost more than the way back.
            packing = min((packing, other), key=lambda packing: count_work(packing, batch))
        return split(batch, self.mesh), packing

    @property
    def skips(self) -> bool:
        """Whether the way back is left out for zero-signal groups: where they have no gradient."""
        return self.skip and learns_by_advantages(self.model, self.config, self.surrogate)

    def learns(self, batch: Batch) -> np.ndarray:
        """Which prompts [B] have completions with a gradient: all, or where the update `skips` those with advantages.

        A zero-signal group has none: its metrics take a forward pass, which is a third of the work.
        """
        if not self.skips:
            return np.ones(len(batch.mask), bool)
        advantages = np.asarray(batch.advantages)
        return (advantages != 0).any(axis=tuple(range(1, advantages.ndim)))

    def shards(self, prompts: Prompts) -> Shards:
        """How the prompts of a batch are cut over the mesh."""
        count = shard_count(self.mesh)
        return Shards(self.mesh, count if prompts.lengths.shape[0] % count == 0 else 1)

    def shapes(self, params: Params, batch: tuple[int, ...]) -> list[SequenceShape]:
        """The shapes that packed sequences of a `batch` [B, G, T] may have; none has more tokens than the first."""
        t = batch[-1]
        micro = max(1, self.micro[0] // shard_count(self.mesh)) * self.micro[1] * t
        cpu = all(device.platform == "cpu" for device in devices_of(params))
        tokens = sequence_tokens(micro, t, cpu=cpu, wide=self.model.config.uses_float32_sums)
        fused = implementation(self.model.config.attention) != "einsum"
        return sequence_shapes(tokens, t, fused=fused, batch_tokens=math.prod(batch) // shard_count(self.mesh))

    def _gradients(self, state: TrainState, batch: Batch, packing: Packing) -> tuple[Params, MetricSums]:
        """Gradient and metric sums of a minibatch that is laid out."""
        sequences, measured, shards, size = packing
        selected, quantile = None, self.config.top_entropy_quantile
        if quantile < 1:
            _, entropies = self._score(state.params, batch.prompts, batch.mask, packing, with_entropy=True)
            selected = _select(entropies, batch.mask, quantile=quantile, mesh=self.mesh)
        totals, dropout = _count_totals(batch, selected), dropout_key(self.model, state)
        prompts = PromptsInTurn(Reading(state.params, batch.prompts, dropout, self.model), size, shards)
        teacher = (self.teacher, self.read_teacher(batch, packing))
        needs, asked = (count_needs(some, batch, size, shards) for some in (sequences, measured))
        # Streams are for small models. They would wait for each other at the end of every leg.
        streams = len(deal(state.params, len(sequences)))
        grads, sums = list[tuple[Params, ReadPrompts]](), list[MetricSums]()
        legs = plan_order(needs, at_once=streams > 1) if needs else []
        for leg in legs:
            read = prompts.read(leg.reads)
            minibatch = Minibatch(state, read, batch, totals, selected, dropout, *teacher)
            grads = grads or [zero_gradients((state.params, read), shards=shards) for _ in range(streams)]

            def add_share(stream: int, grads=grads, minibatch=minibatch, numbers=leg.sequences):
                total, found = grads[stream], []
                for i in numbers[stream::streams]:
                    add = self.add_sequence(in_turn(total), minibatch, split(sequences[i], self.mesh), i, shards)
                    total, more = add()
                    found.append(more)
                return total, found

            results = run_in_streams(add_share, range(streams))
            sums += [more for _, found in results for more in found]
            # The way back through the prompts is dealt out to the streams too, each adding to the gradient of its own
            # sequences; the streams' gradients are added last.
            of_read = sum_trees([of_read for (_, of_read), _ in results])
            of_params = prompts.leave(leg.backs, [of_params for (of_params, _), _ in results], of_read)
            grads = [(own, of_read) for own, ((_, of_read), _) in zip(of_params, results, strict=True)]
        if measured:  # they have completions, so there is something to read
            rest = set().union(*asked).difference(*(leg.reads for leg in legs))
            read = prompts.read(sorted(rest), backward=False)
            minibatch = Minibatch(state, read, batch, totals, selected, dropout, *teacher)
            grads = grads or [zero_gradients((state.params, minibatch.read), shards=shards)]
            sums += self._measure(minibatch, measured, len(sequences))
        # Metrics two by two: whatever the number of sequences, one program.
        return sum_trees([own for own, _ in grads]), functools.reduce(_merge, sums)

    def _measure(self, minibatch: Minibatch, sequences: list[PackedSequence], first: int) -> list[MetricSums]:
        """Metric sums of packed sequences without a gradient, which are numbered from `first` on."""

        def measure_share(numbers: range) -> list[MetricSums]:
            return [
                in_turn(self.measure_sequence(minibatch, split(sequences[i], self.mesh), first + i)()) for i in numbers
            ]

        shares = run_in_streams(measure_share, deal(minibatch.state.params, len(sequences)))
        return [sums for share in shares for sums in share]

    def read_teacher(self, batch: Batch, packing: Packing) -> ReadPrompts | None:
        """The prompts of a batch that is laid out, read by the teacher; None where it has no part in an update."""
        if self.teacher is None:
            return None
        assert is_cached(self.teacher.model)
        reading = Reading(self.teacher.params, batch.prompts, None, self.teacher.model)
        return read_all(reading, packing.size, packing.shards)

    def _score(
        self, params: Params, prompts: Prompts, mask: jax.Array, packing: Packing, *, with_entropy: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies [B, G, T] of all completions."""
        sequences, shards, size = [*packing.sequences, *packing.measured], packing.shards, packing.size
        reading = Reading(params, prompts, None, self.model)
        read = read_all(reading, size, shards)

        def put_sequences(numbers: range) -> tuple[jax.Array, jax.Array]:
            scores = split((jnp.zeros(mask.shape), jnp.zeros(mask.shape)), self.mesh)
            for i in numbers:
                sequence = split(sequences[i], self.mesh)
                put = self.put_scores(
                    in_turn(scores), params, read, prompts.lengths, mask, sequence, shards, with_entropy=with_entropy
                )
                scores = put()
            return scores

        return sum_trees(run_in_streams(put_sequences, deal(params, len(sequences))))

    def add_sequence(
        self,
        grads: tuple[Params, ReadPrompts],
        minibatch: Minibatch,
        sequence: PackedSequence,
        number: int,
        shards: Shards,
    ) -> functools.partial[tuple[tuple[Params, ReadPrompts], MetricSums]]:
        """The call that adds the gradients of a packed sequence; of arrays or of shapes."""
        return functools.partial(
            add_gradients,
            *(grads, minibatch, sequence, number),
            model=self.model,
            config=self.config,
            on_policy=self.on_policy,
            surrogate=self.surrogate,
            shards=shards,
        )

    def measure_sequence(
        self, minibatch: Minibatch, sequence: PackedSequence, number: int
    ) -> functools.partial[MetricSums]:
        """The call for the metric sums of a packed sequence without a gradient; of arrays or of shapes."""
        return functools.partial(
            measure,
            *(minibatch, sequence, number),
            model=self.model,
            config=self.config,
            on_policy=self.on_policy,
            surrogate=self.surrogate,
        )

    def put_scores(
        self,
        scores: tuple[jax.Array, jax.Array],
        params: Params,
        read: ReadPrompts,
        lengths: jax.Array,
        mask: jax.Array,
        sequence: PackedSequence,
        shards: Shards,
        *,
        with_entropy: bool,
    ) -> functools.partial[tuple[jax.Array, jax.Array]]:
        """The call that puts the scores of a packed sequence in their places; of arrays or of shapes."""
        return functools.partial(
            add_scores,
            *(scores, params, read, lengths, mask, sequence),
            model=self.model,
            sampling=sampling_of(self.config),
            with_entropy=with_entropy,
            shards=shards,
        )


Updater = PackedUpdater | PaddedUpdater
"""A run has one of the two, as `choose_updater` chooses; both have the same methods."""


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

    `micro` is (prompts, completions per prompt) of a micro-batch; `on_policy` None is what the config says.
    """
    kind = PackedUpdater if is_cached(model) and (teacher is None or is_cached(teacher.model)) else PaddedUpdater
    on_policy = config.on_policy if on_policy is None else on_policy
    mesh = None if mesh is None or mesh.size == 1 else mesh
    return kind(
        as_argument(model),
        config,
        micro,
        optimizer=optimizer,
        on_policy=on_policy,
        mesh=mesh,
        surrogate=surrogate,
        teacher=teacher,
    )


@functools.partial(jax.jit, static_argnames=("optimizer", "config", "mesh"), donate_argnames=("state",))
def apply_sums(state, grads, sums, *, optimizer, config, mesh):
    state, metrics = apply_gradients(state, grads, sums, optimizer=optimizer, config=config)
    return keep_placed(state, mesh), metrics


_count_totals = jax.jit(count_totals)
_merge = jax.jit(merge_metrics)


@functools.partial(jax.jit, static_argnames=("quantile", "mesh"))
def _select(entropies, mask, *, quantile, mesh):
    return constrain(top_entropy_mask(entropies, mask, quantile), mesh)
