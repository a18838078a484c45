"""Log-probs and updates without padding: the same gradient as `step.train_step`, computed on packed sequences.

Completions for several prompts are concatenated, as segments of packed sequences. A compiled function prefills the
prompts once and loops over the sequences. It accumulates the gradients with respect to the prompts' keys and values,
then backpropagates the sum through the prompts:

```
prompts ─► last states, keys and values ─► sequence 1 ─► loss ─► gradient of the params
                    ▲                └───► sequence 2 ─► loss ─►  + …
                    └── their gradient, summed over the sequences ─► + gradient of the params
```

A minibatch is split into parts. The same program processes each part as above, with a dynamic number of iterations.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config.sft import GRPOOrSFTConfig
from grpo_jax.maths.metrics import MetricSums, empty_sums, merge_metrics, top_entropy_mask
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.models.attention_tiles import attention_implementation
from grpo_jax.models.packing import (
    PackedSequence,
    SequenceShape,
    best_shape,
    lengths_to_last_true,
    order_prompts,
    pack,
    padding_share,
    sequence_shapes,
)
from grpo_jax.models.scoring import PromptStates, packed_states, prefill_prompts, score_packed
from grpo_jax.models.sharding import constrain, constrain_params, fetch, shape_structs, shard, shard_count
from grpo_jax.models.threads import (
    block_if_cpu,
    compile_once_across_threads,
    count_threads,
    devices_of,
    in_background,
    run_in_threads,
)
from grpo_jax.types import Batch, BuiltinModel, Model, Params, Prompts, as_jit_argument, is_builtin
from grpo_jax.update.objective import Teacher, compute_loss, count_totals, make_fn_of_logits
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import Updater, apply_gradients, dropout_key, float32_zeros

CPU_TOKENS = 512
"""Maximum number of tokens in a packed sequence on a CPU, unless a completion is longer. Keeps activations in cache."""

CPU_CAST_TOKENS = 1024
"""Replaces `CPU_TOKENS` for models that use float32 sums, to cast their weights for fewer sequences."""

ACCELERATOR_TOKENS = 32768
"""Like `CPU_TOKENS`, for GPUs and TPUs. Longer sequences would need more memory without being faster."""

PROMPT_TOKENS = 512
"""Target number of prompt tokens per part and shard, or 1/16 of a packed sequence if that is larger."""


class Part(flax.struct.PyTreeNode):
    """A part of a minibatch: K prompts in each of A data shards, with their completions in packed sequences.

    Attributes:
      batch: prompts [A·K, P] and their completions [A·K, G, T].
      selected: [A·K, G, T] bool slice of the `top_entropy_mask`, or None if all tokens contribute to the loss.
      sequences: [A, S, ...], S packed sequences per shard, in order: with a gradient, without a gradient, unused.
      num_with_grad: [] int32 number of sequences with a gradient.
      num_used: [] int32 number of sequences with completions, at least 1.
      index: [] int32 position of the part in its minibatch.
    """

    batch: Batch
    selected: jax.Array | None
    sequences: PackedSequence
    num_with_grad: jax.Array | np.int32
    num_used: jax.Array | np.int32
    index: jax.Array | np.int32

    def sequence(self, i: jax.Array | int) -> PackedSequence:
        """Return the i-th packed sequence of each shard."""
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), self.sequences)


class PackedUpdater(Updater):
    """Updater for this package's models. Processes packed sequences one at a time, or on CPUs one per thread."""

    model: BuiltinModel

    def padded_length(self, min_length: int) -> int:
        """Return `max_completion_length`. Packing removes the padding, so a shorter batch would not be faster."""
        return self.config.max_completion_length

    def log_probs(self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        return self._score(params, prompts, tokens, mask, with_entropy=False)[0]

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Run one optimizer step and return the new state and metrics, including `padding_share`. Donates `state`."""
        grads, sums, padding_fraction = self._gradients(state, batch)
        state, metrics = apply_update(self, state, grads, sums)
        # Count completions here: sequences contain empty segments and omit empty completions.
        rows = jnp.float32(math.prod(batch.mask.shape[:2]))
        return state, metrics | {"rows": rows, "padding_share": jnp.float32(padding_fraction)}

    def gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums]:
        return self._gradients(state, batch)[:2]

    def _gradients(self, state: TrainState, batch: Batch) -> tuple[Params, MetricSums, float]:
        """Return the results of `gradients` and the fraction of tokens that are padding."""
        selected = None
        if self.config.top_entropy_quantile < 1:
            _, entropies = self._score(state.params, batch.prompts, batch.tokens, batch.mask, with_entropy=True)
            selected = fetch(_entropy_mask(entropies, shard(batch.mask, self.mesh), self.config.top_entropy_quantile))
        parts, _ = self.pack(state.params, batch, selected)
        totals, threads = _count_totals(batch, selected), count_threads(state.params, len(parts))
        zeros = [zero_gradients(self, state.params) for _ in range(threads)]

        def add_parts(thread: int) -> tuple[Params, list[MetricSums]]:
            grads_sum, sums = zeros[thread], []
            for part in parts[thread::threads]:
                placed = shard(part, self.mesh)
                if part.num_with_grad > 0:
                    grads_sum, part_sums = block_if_cpu(add_gradients(self, grads_sum, state, placed, totals))
                    sums.append(part_sums)
                if part.num_used > part.num_with_grad:
                    sums.append(block_if_cpu(sum_metrics(self, state, placed, totals)))
            return grads_sum, sums

        def compile_next() -> None:
            """Compile the programs that follow `add_gradients`, while `add_gradients` compiles."""
            arguments = self, state, parts[0], totals
            if threads == 1 and any(part.num_used > part.num_with_grad for part in parts):
                sum_metrics.lower(*arguments).compile()
            if self.optimizer is not None:
                grads, sums = zero_gradients.eval_shape(self, state.params), sum_metrics.eval_shape(*arguments)
                apply_update.lower(self, state, *shape_structs((grads, sums), placed_like=state)).compile()

        with in_background(compile_next) if self.mesh is None else contextlib.nullcontext():
            results = run_in_threads(add_parts, range(threads))
        sums = functools.reduce(_merge, [part_sums for _, sums in results for part_sums in sums])
        grads = results[0][0] if threads == 1 else _add([grads for grads, _ in results])
        used = [jax.tree.map(operator.itemgetter(np.s_[:, : part.num_used]), part.sequences) for part in parts]
        return grads, sums, padding_share(used)

    def _score(
        self, params: Params, prompts: Prompts, tokens: jax.Array, mask: jax.Array, *, with_entropy: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return log-probs and entropies [B, G, T] of all completions."""
        batch = Batch(prompts, tokens, mask, advantages=mask, sampling_log_probs=mask)  # unused placeholders
        parts, indices = self.pack(params, batch, for_scoring=True)
        threads = count_threads(params, len(parts))

        def score_parts(thread: int) -> list[tuple[jax.Array, jax.Array]]:
            thread_parts = (shard(part, self.mesh) for part in parts[thread::threads])
            return [block_if_cpu(score_part(self, params, part, with_entropy)) for part in thread_parts]

        by_thread = run_in_threads(score_parts, range(threads))
        scores = [by_thread[i % threads][i // threads] for i in range(len(parts))]
        return _in_order(self, scores, np.argsort(indices.ravel())[-len(mask) :])  # −1 (padding) sorts first

    def pack(
        self, params: Params, batch: Batch, selected: jax.Array | None = None, *, for_scoring: bool = False
    ) -> tuple[list[Part], np.ndarray]:
        """Split a batch into parts. Returns the parts and prompt indices [parts, A·K], with −1 for empty positions.

        Prompts without a gradient come last, so that some parts need only a forward pass. Parts without completion
        tokens are omitted unless `for_scoring` is True, but at least one part is returned.
        """
        (_, g, t), shards = batch.mask.shape, shard_count(self.mesh)
        has_gradient = np.ones(len(batch.mask), bool) if for_scoring else self.has_gradient(batch)  # scoring: no split
        threads, num_parts, prompts_per_part = self.plan_parts(params, batch)
        lengths = lengths_to_last_true(np.asarray(batch.mask))
        work = lengths.sum(axis=1) * np.where(has_gradient, 3, 1)  # a backward pass costs two forward passes
        indices = order_prompts(work, has_gradient, parallel_bins=threads * shards, bin_size=prompts_per_part)
        indices = indices.reshape(num_parts, shards, prompts_per_part)
        lengths_by_shard = np.where(indices[..., None] < 0, 0, lengths[indices]).swapaxes(0, 1).reshape(-1, g)
        shapes = self.shapes(params, batch.mask.shape)
        shape = best_shape(shapes, lengths_by_shard, t, shards=shards, part_size=prompts_per_part)
        by_part, parts = indices.reshape(num_parts, -1), list[Part]()
        arrays = jax.tree.map(np.asarray, (batch.replace(counted=None), selected))
        for part_indices in by_part:
            part_batch, part_selected = jax.tree.map(operator.itemgetter(part_indices), arrays)
            part_batch = part_batch.replace(mask=part_batch.mask & (part_indices >= 0)[:, None, None])
            if for_scoring or part_batch.mask.any():
                parts.append(self.pack_part(part_batch, part_selected, has_gradient[part_indices], shape, len(parts)))
        return parts or [self.pack_part(part_batch, part_selected, has_gradient[part_indices], shape, 0)], by_part

    def pack_part(
        self, batch: Batch, selected: jax.Array | None, has_gradient: np.ndarray, shape: SequenceShape, index: int
    ) -> Part:
        """Pack the completions of one part of a minibatch. `has_gradient` [A·K] has one entry per prompt."""
        shards, mask = shard_count(self.mesh), np.asarray(batch.mask)
        packed = functools.partial(pack, shape, np.asarray(batch.tokens), shards=shards)
        gradient_mask, mixed = mask & has_gradient[:, None, None], packed(mask)
        with_grad, without_grad = (packed(x) if x.any() else [] for x in (gradient_mask, mask ^ gradient_mask))
        # Pad to the number needed if all completions had maximum length (+ 1 if those without a gradient are separate).
        completions_per_sequence = shape.size // (-(-shape.max_segment_length // shape.block) * shape.block)
        max_sequences = -(-(mask[..., 0].size // shards) // completions_per_sequence) + self.omits_zero_signal_backward
        # A sequence costs 3 with a backward pass and 1 without. Mixed sequences all need a backward pass.
        num_separate = len(with_grad) + len(without_grad)
        if 3 * len(mixed) <= 2 * len(with_grad) + num_separate or num_separate > max_sequences:
            with_grad, without_grad = mixed, []
        sequences = [*with_grad, *without_grad] or mixed
        padded_sequences = sequences + sequences[-1:] * (max_sequences - len(sequences))
        return Part(
            batch,
            selected,
            jax.tree.map(lambda *x: np.stack(x, axis=1), *padded_sequences),
            num_with_grad=np.int32(len(with_grad)),
            num_used=np.int32(max(1, len(with_grad) + len(without_grad))),
            index=np.int32(index),
        )

    def plan_parts(self, params: Params, batch: Batch) -> tuple[int, int, int]:
        """Return the number of threads, the number of parts, and the number of prompts per part in each shard."""
        b, p = batch.prompts.tokens.shape
        prompts = math.ceil(b / shard_count(self.mesh))  # per shard
        threads = count_threads(params, prompts)
        tokens = max(self.shapes(params, batch.mask.shape)[0].size // 16, PROMPT_TOKENS)  # prompt tokens per part
        parts_per_thread = math.ceil(min(math.ceil(prompts * p / tokens), prompts) / threads)
        max_k = math.ceil(prompts / (parts_per_thread * threads))
        # Decrease K by up to a third if the parts then have fewer empty positions.
        k = min(range(max_k, max_k - max_k // 3 - 1, -1), key=lambda k: -prompts % (k * threads))
        return threads, math.ceil(prompts / (k * threads)) * threads, k

    def has_gradient(self, batch: Batch) -> np.ndarray:
        """Return a mask [B] of prompts with at least one completion that has a gradient."""
        if not self.omits_zero_signal_backward:
            return np.ones(len(batch.mask), bool)
        return np.count_nonzero(np.asarray(batch.advantages).reshape(len(batch.mask), -1), axis=1) > 0

    def shapes(self, params: Params, batch_shape: tuple[int, ...]) -> list[SequenceShape]:
        """Return candidate shapes for packed sequences, largest first. `batch_shape` is (B, G, T)."""
        t, cpu_tokens = batch_shape[-1], CPU_CAST_TOKENS if self.model.config.uses_float32_sums else CPU_TOKENS
        micro_tokens = max(1, self.micro_shape[0] // shard_count(self.mesh)) * self.micro_shape[1] * t
        cpu = all(device.platform == "cpu" for device in devices_of(params))
        tokens = min(micro_tokens, cpu_tokens if cpu else max(t, ACCELERATOR_TOKENS))
        fused = attention_implementation(self.model.config.attention) != "einsum"
        return sequence_shapes(tokens, t, fused=fused, batch_tokens=math.prod(batch_shape) // shard_count(self.mesh))


def choose_updater(
    model: Model,
    config: GRPOOrSFTConfig,
    *,
    micro_shape: tuple[int, int],
    optimizer: optax.GradientTransformation | None = None,
    mesh: jax.sharding.Mesh | None = None,
    surrogate: Surrogate | None = None,
    teacher: Teacher | None = None,
) -> Updater:
    """Return a `PackedUpdater` if the model and any teacher model come from this package, else an `Updater`."""
    kind = PackedUpdater if is_builtin(model) and (teacher is None or is_builtin(teacher.model)) else Updater
    mesh = mesh if mesh and mesh.size > 1 else None
    return kind(as_jit_argument(model), config, micro_shape, optimizer, config.on_policy, mesh, surrogate, teacher)


def _prefill(
    model: BuiltinModel, params: Params, prompts: Prompts, mesh: jax.sharding.Mesh | None, key: jax.Array | None
) -> PromptStates:
    """Prefill the prompts. Returns their last hidden states, keys and values, sharded over the mesh."""
    states = prefill_prompts(model, params, prompts, rngs=None if key is None else {"dropout": key})
    layers = jax.tree.map(lambda x: constrain(x, mesh, "tensor"), states.layers)
    return PromptStates(constrain(states.last_hidden, mesh), layers)


def _loss(
    updater: PackedUpdater,
    state: TrainState,
    part: Part,
    totals: dict[str, jax.Array],
    prompt_states: PromptStates,
    teacher_prompts: PromptStates | None,
    i: jax.Array | int,
) -> tuple[jax.Array, MetricSums]:
    """Compute the loss and metric sums for the i-th sequence, given the policy's and the teacher's prompt states."""
    model, config, teacher, lengths = updater.model, updater.config, updater.teacher, part.batch.prompts.lengths
    sequence, key = part.sequence(i), dropout_key(model, state, part.index, i + 1)
    batch = jax.tree.map(sequence.rows_from_batch, part.batch.replace(prompts=None))
    batch = batch.replace(mask=batch.mask & sequence.segment_mask)  # False in unused segments
    teacher_states = None
    top_ids, top_log_probs = jax.tree.map(sequence.to_packed, (batch.teacher_top_ids, batch.teacher_top_log_probs))
    if teacher is not None and teacher_prompts is not None and is_builtin(teacher.model):
        clipped = sequence.replace(tokens=teacher.clip_to_vocab(sequence.tokens))
        teacher_states, _ = packed_states(teacher.model, teacher.params, teacher_prompts, lengths, clipped)
    fn_of_logits = make_fn_of_logits(  # the divergence from the teacher, or the token accuracy in SFT
        config, sequence.tokens, teacher=teacher, states=teacher_states, top_ids=top_ids, top_log_probs=top_log_probs
    )
    scores = score_packed(
        model,
        state.params,
        prompt_states,
        lengths,
        sequence,
        updater.sampling,
        router_mask=batch.mask if updater.router_loss_coef else None,
        rngs=None if key is None else {"dropout": key},
        fn_of_logits=fn_of_logits,
    )
    return compute_loss(
        scores,
        batch,
        state,
        totals,
        config=config,
        on_policy=updater.on_policy,
        surrogate=updater.surrogate,
        selected=None if part.selected is None else sequence.rows_from_batch(part.selected),
        router_loss_coef=updater.router_loss_coef,
    )


@compile_once_across_threads
@functools.partial(jax.jit, donate_argnames=("grads",))
def add_gradients(
    updater: PackedUpdater, grads: Params, state: TrainState, part: Part, totals: dict[str, jax.Array]
) -> tuple[Params, MetricSums]:
    """Return `grads` plus the gradient of the params for one part, and the part's metric sums. Donates `grads`."""
    model, mesh, prompts = updater.model, updater.mesh, part.batch.prompts
    key, teacher_prompts = dropout_key(model, state, part.index, 0), _prefill_teacher(updater, prompts)
    prompt_states, pull_back = jax.vjp(lambda params: _prefill(model, params, prompts, mesh, key), state.params)

    def loss_fn(params: Params, prompt_states: PromptStates, i: jax.Array | int) -> tuple[jax.Array, MetricSums]:
        return _loss(updater, state.replace(params=params), part, totals, prompt_states, teacher_prompts, i)

    def add(i: jax.Array, carry: tuple[Params, PromptStates, MetricSums]) -> tuple[Params, PromptStates, MetricSums]:
        params_grad, prompts_grad, sums = carry
        new, new_sums = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(state.params, prompt_states, i)
        params_grad, prompts_grad = jax.tree.map(lambda x, y: x + y.astype(x.dtype), (params_grad, prompts_grad), new)
        return constrain_params(params_grad, mesh), prompts_grad, merge_metrics(sums, new_sums)

    # Gradients of keys and values are also accumulated in float32, regardless of the compute dtype.
    zeros = float32_zeros(prompt_states), empty_sums(jax.eval_shape(loss_fn, state.params, prompt_states, 0)[1])
    grads, prompts_grad, sums = jax.lax.fori_loop(0, part.num_with_grad, add, (grads, *zeros))
    (new,) = pull_back(jax.tree.map(lambda g, x: g.astype(x.dtype), prompts_grad, prompt_states))
    return constrain_params(jax.tree.map(lambda x, y: x + y.astype(x.dtype), grads, new), mesh), sums


@compile_once_across_threads
@jax.jit
def sum_metrics(updater: PackedUpdater, state: TrainState, part: Part, totals: dict[str, jax.Array]) -> MetricSums:
    """Return the metric sums over the sequences of one part that have no gradient."""
    model, prompts = updater.model, part.batch.prompts
    prompt_states = _prefill(model, state.params, prompts, updater.mesh, dropout_key(model, state, part.index, 0))
    loss = functools.partial(_loss, updater, state, part, totals, prompt_states, _prefill_teacher(updater, prompts))
    sums = empty_sums(jax.eval_shape(loss, 0)[1])
    return jax.lax.fori_loop(part.num_with_grad, part.num_used, lambda i, old: merge_metrics(old, loss(i)[1]), sums)


def _prefill_teacher(updater: PackedUpdater, prompts: Prompts) -> PromptStates | None:
    """Return the prompts' states under the teacher, or None if there is no teacher model from this package."""
    if (teacher := updater.teacher) is None or not is_builtin(teacher.model):
        return None
    return _prefill(teacher.model, teacher.params, prompts, updater.mesh, None)


@compile_once_across_threads
@functools.partial(jax.jit, static_argnames=("with_entropy",))
def score_part(updater: PackedUpdater, params: Params, part: Part, with_entropy: bool) -> tuple[jax.Array, jax.Array]:
    """Return log-probs and entropies [A·K, G, T] for the completions in one part, 0 where the mask is 0."""
    model, prompts, mask = updater.model, part.batch.prompts, part.batch.mask
    states, sampling = _prefill(model, params, prompts, updater.mesh, None), updater.sampling

    def add(i: jax.Array, scores: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sequence = part.sequence(i)
        new = score_packed(model, params, states, prompts.lengths, sequence, sampling, with_entropy=with_entropy)
        # A segment without tokens refers to the first completion and adds zeros to it.
        has_token = sequence.rows_from_batch(mask)
        return jax.tree.map(lambda x, y: sequence.add_rows_to_batch(x, jnp.where(has_token, y, 0)), scores, new[:2])

    return jax.lax.fori_loop(0, part.num_used, add, (constrain(jnp.zeros(mask.shape), updater.mesh),) * 2)


@functools.partial(jax.jit, keep_unused=True)  # otherwise, jit drops `params`, and the zeros are not committed
def zero_gradients(updater: PackedUpdater, params: Params) -> Params:
    """Return zeros for accumulating gradients, with each leaf sharded like its parameter."""
    return constrain_params(float32_zeros(params), updater.mesh)


@jax.jit
def _in_order(updater: PackedUpdater, parts: list[tuple[jax.Array, ...]], order: jax.Array) -> tuple[jax.Array, ...]:
    """Concatenate the parts' arrays and restore the batch order by indexing with `order`."""
    return jax.tree.map(lambda *x: constrain(jnp.concatenate(x)[order], updater.mesh), *parts)


apply_update = jax.jit(apply_gradients, donate_argnames=("state",))
_count_totals = jax.jit(count_totals)
_merge = jax.jit(merge_metrics)
_add = jax.jit(lambda trees: jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *trees))
_entropy_mask = jax.jit(top_entropy_mask)
