"""Sequence packing: completions of different lengths are concatenated to avoid computation on padding.

All packed sequences of a batch have the same shape, with N tokens. Each shape needs a program, so few shapes are used.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.context import Segments

BLOCK = 64
"""Usual number of tokens per block, and of queries per product in attention. Groups are padded to whole blocks."""


class PackedSequence(flax.struct.PyTreeNode):
    """Concatenated completions from a batch [B, G, T]: S segments in N tokens, in each of A data shards.

    Each shard holds completions for B / A prompts. L is `segments.max_segment_length`.
    """

    tokens: jax.Array  # [A, N] int32 token ids; 0 in padding
    segments: Segments  # segment and position of each token, and prompt of each block
    completions: jax.Array  # [A, S] int32 index b·G + g of each segment's completion in its shard of the batch
    starts: jax.Array  # [A, S] int32 index of the first token of each segment
    lengths: jax.Array  # [A, S] int32 number of tokens in each segment; 0 for unused segments

    def to_segments(self, x: jax.Array) -> jax.Array:
        """Convert per-token values [A, N] to [A, S, L]. Values past a segment's end are arbitrary."""
        index = self.starts[..., None] + jnp.arange(self.segments.max_segment_length)[None, None]
        return jax.vmap(lambda x, index: x[index])(x, jnp.minimum(index, x.shape[1] - 1))

    def to_packed(self, x: jax.Array) -> jax.Array:
        """Convert per-segment values [A, S, L, ...] to [A, N, ...], 0 in padding. Inverts `to_segments`."""
        number, position = self.segments.number, self.segments.position
        values = jax.vmap(lambda x, number, position: x[number, position])(x, number, position)
        return jnp.where(jnp.expand_dims(number, range(2, values.ndim)) < 0, 0, values)

    def rows_from_batch(self, x: jax.Array) -> jax.Array:
        """Return each segment's row of an array [B, G] or [B, G, T, ...], as [A, S] or [A, S, L, ...]."""
        values = jax.vmap(lambda x, i: x[i])(x.reshape((len(self.tokens), -1, *x.shape[2:])), self.completions)
        return values if x.ndim == 2 else values[:, :, : self.segments.max_segment_length]

    def add_rows_to_batch(self, whole: jax.Array, x: jax.Array) -> jax.Array:
        """Return `whole` [B, G, T] plus segment values [A, S, L], which must be 0 past the end of a segment."""
        shards, t = self.tokens.shape[0], self.segments.max_segment_length
        parts = whole.reshape(shards, -1, whole.shape[-1])
        return jax.vmap(lambda part, i, x: part.at[i, :t].add(x))(parts, self.completions, x).reshape(whole.shape)

    @property
    def segment_mask(self) -> jax.Array:
        """Mask [A, S, L] bool, True for the tokens of each segment."""
        return jnp.arange(self.segments.max_segment_length)[None, None] < self.lengths[..., None]


MIN_HALF_SIZE = 256
"""Minimum number of tokens in a half-size sequence. For shorter sequences, the fixed cost outweighs the gain."""

FEW_SEQUENCES = 8
"""Half-size sequences are used only for batches of at most this many sequences. They save at most half a sequence."""

OPEN_SEQUENCES = (1, 2, 4)
"""How many of the last sequences are tried for a completion before a new sequence is started. Packing uses the smallest
of these numbers that needs no more sequences than the largest number does. With a smaller number, the prompts in a
sequence are closer together, and an update keeps activations for fewer prompts."""


def sequence_size(tokens: int, longest: int, *, block: int = BLOCK) -> int:
    """Return N, the smallest multiple of `block` that is at least max(tokens, longest)."""
    return -(-max(tokens, longest) // block) * block


class SequenceShape(NamedTuple):
    """Shape of packed sequences. Each shape needs a compiled program."""

    size: int  # N, a multiple of `block`, at least the length of the longest completion
    block: int  # tokens per attention block
    max_segment_length: int  # upper bound on the tokens per segment
    whole: bool  # whether all completions have T tokens, in which case blocks may have gcd(N, T) tokens


def sequence_shapes(tokens: int, t: int, *, fused: bool, batch_tokens: int) -> list[SequenceShape]:
    """Return the shapes that packed sequences for completions [B, G, T] may have.

    The first shape has max(`tokens`, T) tokens, rounded up to whole blocks. With fused attention, a second shape may
    have a quarter to half as many tokens. Without it, the cost depends on the block size and on the number of previous
    blocks that a block reads, so further shapes may be returned: one for completions that all have T tokens, one for
    completions of up to T / 4 tokens and, for batches of few sequences, one with half the size and half the block size.
    `batch_tokens` is the number of tokens in a shard of the batch if all completions have T tokens.
    """
    size, short = sequence_size(tokens, t, block=BLOCK), -(-t // 4)
    shapes = [SequenceShape(size, BLOCK, t, whole=False)]
    if fused:
        smaller = sequence_size(size // 4, t, block=BLOCK)
        return [*shapes, shapes[0]._replace(size=smaller)] if 2 * smaller <= size else shapes
    if t % BLOCK == 0:
        shapes.append(shapes[0]._replace(whole=True))
    if short >= BLOCK:
        shapes.append(shapes[0]._replace(max_segment_length=short))
    half = sequence_size(size // 2, t, block=BLOCK // 2)
    if half >= MIN_HALF_SIZE and 2 * half <= size and batch_tokens <= FEW_SEQUENCES * size:
        shapes.append(SequenceShape(half, BLOCK // 2, t, whole=False))
    return shapes


def best_shape(
    shapes: Sequence[SequenceShape], lengths: np.ndarray, t: int, *, shards: int = 1, part_size: int | None = None
) -> SequenceShape:
    """Return the shape that packs lengths [B, G] into the fewest tokens. Ties go to the smallest `max_segment_length`.

    A shard's prompts are packed in parts of `part_size` consecutive prompts, or all together if `part_size` is None.
    """
    groups = lengths.sum(axis=1).reshape(shards, -1)
    begins = range(0, groups.shape[1], part_size or groups.shape[1])

    def tokens(shape: SequenceShape) -> int:
        """Count the tokens in all sequences, where each group occupies whole blocks."""
        blocks = np.add.reduceat(-(-groups // shape.block), begins, axis=1).max(axis=0)
        return int((-(-blocks * shape.block // shape.size)).sum()) * shape.size

    fitting = [shape for shape in shapes if lengths.max() <= shape.max_segment_length]
    if any(shape.whole for shape in fitting):
        fitting = [shape for shape in fitting if shape.whole == bool((lengths == t).all())]
    return min(fitting, key=lambda shape: (tokens(shape), shape.max_segment_length, -shape.size))


def pack(shape: SequenceShape, tokens: np.ndarray, mask: np.ndarray, *, shards: int = 1) -> list[PackedSequence]:
    """Pack completions [B, G, T] into one or more sequences of the same shape.

    Groups are packed in order, with a group's longest completions first. Each completion is added to the first of the
    last few sequences (`OPEN_SEQUENCES`) with enough space, or to a new sequence. A completion ends at its last True in
    the mask, and empty completions are omitted. B must be divisible by the number of shards.
    """
    size, block, max_length, whole = shape
    b, g, t = mask.shape
    lengths = lengths_to_last_true(mask)
    n = lengths.max(initial=0)
    if n > size or size % block:
        raise ValueError(
            f"shape.size must be a multiple of {block} and at least the length of the longest completion ({n}); got"
            f" {size}."
        )
    if whole and max_length == t and t % block == 0 and (lengths == t).all():
        # If T divides N, each completion is one block that does not read previous blocks, so keys are not copied.
        block = math.gcd(size, t)
        reach = t // block - 1
    else:
        reach = min(-(-(max_length - 1) // block), size // block - 1)
    # For S > 8, arrays [S, L] have at most 32 N elements, which is small compared with logits [N, V].
    most = max(8, min(size // 4, 32 * size // max_length))
    flat, by_shard = tokens.reshape(shards, -1, t), lengths.reshape(shards, b // shards, g)
    lay_out = functools.partial(_lay_out, size=size, block=block, most=most)
    chosen = [_choose(part, size // block, block, most) for part in by_shard]
    members = list(itertools.zip_longest(*chosen, fillvalue={}))
    sequences = []
    for groups in members or [({},) * shards]:
        parts = map(lay_out, groups, flat, by_shard.reshape(shards, -1))
        arrays: Any = [np.stack(x) for x in zip(*parts, strict=True)]
        packed, number, position, prompt, completions, starts, counts = arrays
        segments = Segments(number, position, prompt, max_length, reach)
        sequences.append(PackedSequence(packed, segments, completions, starts, counts))
    return sequences


def lengths_to_last_true(mask: np.ndarray) -> np.ndarray:
    """Return completion lengths [B, G], counted through the last True in mask [B, G, T]."""
    return np.where(mask.any(axis=-1), mask.shape[-1] - np.argmax(mask[:, :, ::-1], axis=-1), 0)


def balanced_order(tokens: np.ndarray, shards: int) -> np.ndarray:
    """Return prompt indices in an order that balances the prompts' token counts `tokens` [B] across shards."""
    parts: list[list[int]] = [[] for _ in range(shards)]
    sums, share = np.zeros(shards), len(tokens) // shards
    for i in np.argsort(-tokens, kind="stable"):
        least = min((part for part in range(shards) if len(parts[part]) < share), key=lambda part: sums[part])
        parts[least].append(int(i))
        sums[least] += tokens[i]
    return np.array([i for part in parts for i in part], int) if shards > 1 else np.arange(len(tokens))


def order_prompts(work: np.ndarray, has_gradient: np.ndarray, *, parallel_bins: int, bin_size: int) -> np.ndarray:
    """Return prompt indices in consecutive bins of `bin_size` prompts, where −1 marks an empty position.

    Every `parallel_bins` consecutive bins form a group, and a group's bins have similar total `work`. Prompts with a
    gradient (`has_gradient` [B]) are in the first groups.
    """
    group, order = parallel_bins * bin_size, np.argsort(~has_gradient, kind="stable")
    order = np.pad(order, (0, -len(order) % group), constant_values=-1).reshape(-1, group)
    return np.concatenate([part[balanced_order(np.where(part < 0, 0, work[part]), parallel_bins)] for part in order])


def _choose(lengths: np.ndarray, blocks: int, block: int, most: int) -> list[dict[int, list[int]]]:
    """Return a dict {prompt: indices of completions} per sequence of up to `blocks` blocks and `most` segments."""
    *few, many = OPEN_SEQUENCES
    full = _fill(lengths, blocks, block, most, num_open=many)
    for num_open in few:
        members = _fill(lengths, blocks, block, most, num_open=num_open)
        if len(members) <= len(full):
            return members
    return full


def _fill(lengths: np.ndarray, blocks: int, block: int, most: int, *, num_open: int) -> list[dict[int, list[int]]]:
    """Assign completions to sequences as in `_choose`, by first-fit packing into the last `num_open` sequences."""
    members: list[dict[int, list[int]]] = []
    filled: list[dict[int, int]] = []  # tokens per prompt in each sequence
    used_blocks: list[int] = []  # blocks used in each sequence
    for prompt, group in enumerate(lengths):
        for i in np.argsort(-group, kind="stable"):
            n = int(group[i])
            if n == 0:
                continue
            for index in range(max(0, len(members) - num_open), len(members) + 1):
                if index == len(members):
                    members.append({})
                    filled.append({})
                    used_blocks.append(0)
                previous = filled[index].get(prompt, 0)
                new_blocks = math.ceil((previous + n) / block) - math.ceil(previous / block)
                if used_blocks[index] + new_blocks <= blocks and sum(map(len, members[index].values())) < most:
                    members[index].setdefault(prompt, []).append(prompt * lengths.shape[1] + int(i))
                    filled[index][prompt] = previous + n
                    used_blocks[index] += new_blocks
                    break
    return members


def _lay_out(
    groups: dict[int, list[int]], tokens: np.ndarray, lengths: np.ndarray, *, size: int, block: int, most: int
) -> tuple[np.ndarray, ...]:
    """Build the `PackedSequence` arrays for one shard, given each prompt's completion indices."""
    flat = np.zeros(size, np.int32)
    position, segment = np.zeros_like(flat), np.full_like(flat, -1)
    prompt = np.zeros(size // block, np.int32)
    completions = np.zeros(most, np.int32)
    starts, counts = np.zeros_like(completions), np.zeros_like(completions)
    end = number = 0
    for b, members in groups.items():
        start = end
        for i in members:
            n = int(lengths[i])
            flat[end : end + n] = tokens[i, :n]
            position[end : end + n] = np.arange(n)
            segment[end : end + n] = number
            completions[number], starts[number], counts[number] = i, end, n
            end, number = end + n, number + 1
        end = -(-end // block) * block
        prompt[start // block : end // block] = b
    return flat, segment, position, prompt, completions, starts, counts


def padding_share(sequences: Sequence[PackedSequence]) -> float:
    """Return the fraction of tokens in packed sequences that are padding."""
    return 1 - sum(int(x.lengths.sum()) for x in sequences) / sum(x.tokens.size for x in sequences)
