"""Completions of different lengths laid end to end, so that little is computed for padding.

A batch [B, G, T] whose completions end early is mostly padding. Here they are cut to their lengths and laid into packed
sequences of N tokens each, all of one shape: one compiled program serves every batch, however long its completions are.
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
"""Tokens of a block: queries of one of attention's matrix products, and the unit to which a group is padded."""


class PackedSequence(flax.struct.PyTreeNode):
    """Some completions of a batch [B, G, T], end to end: S segments in N tokens, on each of A devices.

    The batch's prompts are cut over the devices, B / A to each, and each has its own.

    Attributes:
      tokens: [A, N] int32; 0 where there is no segment.
      segments: which segment each token belongs to.
      completions: [A, S] int32, which completion b·G + g of the device's part of the batch each segment is.
      starts: [A, S] int32, where it starts.
      lengths: [A, S] int32, its tokens; 0 for one that only fills the shape.
    """

    tokens: jax.Array
    segments: Segments
    completions: jax.Array
    starts: jax.Array
    lengths: jax.Array

    def by_segment(self, x: jax.Array) -> jax.Array:
        """Values [A, N] of tokens as [A, S, T]; those beyond a segment's end are another's."""
        at = self.starts[..., None] + jnp.arange(self.segments.longest)[None, None]
        return jax.vmap(lambda x, at: x[at])(x, jnp.minimum(at, x.shape[1] - 1))

    def by_token(self, x: jax.Array) -> jax.Array:
        """The inverse of `by_segment`: values [A, S, T, ...] as [A, N, ...], 0 where there is no segment."""
        number, position = self.segments.number, self.segments.position
        values = jax.vmap(lambda x, number, position: x[number, position])(x, number, position)
        return jnp.where(jnp.expand_dims(number, range(2, values.ndim)) < 0, 0, values)

    def take(self, x: jax.Array) -> jax.Array:
        """The segments' part of an array [B, G] or [B, G, T, ...]: [A, S], or [A, S, T, ...] up to the longest."""
        devices = self.tokens.shape[0]
        own = jax.vmap(lambda x, at: x[at])(x.reshape(devices, -1, *x.shape[2:]), self.completions)
        return own if x.ndim == 2 else own[:, :, : self.segments.longest]

    def add_to(self, whole: jax.Array, x: jax.Array) -> jax.Array:
        """The array `whole` [B, G, T] with values [A, S, T] of the segments added to it; the inverse of `take`."""
        devices, t = self.tokens.shape[0], self.segments.longest
        parts = whole.reshape(devices, -1, whole.shape[-1])
        added = jax.vmap(lambda own, at, x: own.at[at, :t].add(x))(parts, self.completions, x)
        return added.reshape(whole.shape)

    @property
    def mask(self) -> jax.Array:
        """[A, S, T] bool, True where a segment has a token."""
        return jnp.arange(self.segments.longest)[None, None] < self.lengths[..., None]


HALF = 256
"""Tokens of half a sequence, at least, for which there are such: in fewer, what each sequence costs weighs more."""

FEW = 8
"""A batch of so many sequences at most may be packed in halves: that saves half of one at best."""

OPEN = (1, 2, 4)
"""Sequences that a completion is tried in before a new one is begun: as few of them as need no more sequences than the
most. With few, the prompts of a sequence are near each other, and an update keeps the activations of fewer prompts."""


def sequence_size(tokens: int, longest: int, *, block: int = BLOCK) -> int:
    """N of packed sequences: at least `tokens`, and room for the longest completion, in whole blocks."""
    return -(-max(tokens, longest) // block) * block


class SequenceShape(NamedTuple):
    """The shape of all packed sequences of one compiled program, as `pack` takes it.

    Attributes:
      size: N.
      block: tokens of a block.
      longest: tokens of the longest segment that they hold.
      whole: whether they are for completions that are all T long.
    """

    size: int
    block: int
    longest: int
    whole: bool


def sequence_shapes(tokens: int, t: int, *, fused: bool, batch_tokens: int) -> list[SequenceShape]:
    """The shapes that packed sequences of completions [B, G, T] may have: each is a program, so they are few.

    Args:
      tokens: of a packed sequence at most, if the longest completion leaves the choice.
      t: T.
      fused: whether attention is fused: then there are two sizes. One that writes out the scores of whole blocks has
        to know the block and how far back it looks: there is one shape for completions of any length, one for such as
        are all T long, and one for short ones; and for a batch of few sequences one of half the size, in half blocks.
      batch_tokens: of the whole batch on a device, if all its completions are T long.
    """
    size, short = sequence_size(tokens, t, block=BLOCK), -(-t // 4)
    shapes = [SequenceShape(size, BLOCK, t, whole=False)]
    if fused:
        smaller = sequence_size(size // 4, t, block=BLOCK)
        return [*shapes, shapes[0]._replace(size=smaller)] if 2 * smaller <= size else shapes
    if t % BLOCK == 0:
        shapes.append(shapes[0]._replace(whole=True))
    if short >= BLOCK:
        shapes.append(shapes[0]._replace(longest=short))
    half = sequence_size(size // 2, t, block=BLOCK // 2)
    if half >= HALF and 2 * half <= size and batch_tokens <= FEW * size:
        shapes.append(SequenceShape(half, BLOCK // 2, t, whole=False))
    return shapes


def best_shape(
    shapes: Sequence[SequenceShape], lengths: np.ndarray, t: int, *, devices: int = 1, neighbours: int | None = None
) -> SequenceShape:
    """The shape with the fewest tokens for completions of these lengths [B, G]; of equals that for the shortest ones.

    `neighbours` prompts of a device at a time fill sequences of their own; if None, all together.
    """
    groups = lengths.sum(axis=1).reshape(devices, -1)
    begins = range(0, groups.shape[1], neighbours or groups.shape[1])

    def tokens(shape: SequenceShape) -> int:
        """Those of all sequences: each group takes whole blocks, and neighbours fill sequences of their own."""
        blocks = np.add.reduceat(-(-groups // shape.block), begins, axis=1).max(axis=0)
        return int((-(-blocks * shape.block // shape.size)).sum()) * shape.size

    fitting = [shape for shape in shapes if lengths.max() <= shape.longest]
    if any(shape.whole for shape in fitting):
        fitting = [shape for shape in fitting if shape.whole == bool((lengths == t).all())]
    return min(fitting, key=lambda shape: (tokens(shape), shape.longest, -shape.size))


def pack(
    tokens: np.ndarray,
    mask: np.ndarray,
    *,
    size: int,
    block: int = BLOCK,
    longest: int | None = None,
    devices: int = 1,
    whole: bool = True,
) -> list[PackedSequence]:
    """Lay the completions of a batch end to end.

    They stay with their group where they can: group by group, long ones first, each into the first sequence with room
    among the last few that were begun (`OPEN`).

    Args:
      tokens: [B, G, T] integer.
      mask: [B, G, T] bool; a completion ends after its last True, and one without any is left out.
      size: N, a multiple of `block`, at least the longest completion.
      block: tokens of a block; where every completion is T long, blocks are as long as completions can be cut into.
      longest: tokens of the longest segment that the sequences are made for; None: T.
      devices: A, a divisor of B.
      whole: whether there is that special case of blocks for completions that are all T long.

    Returns:
      Packed sequences of one shape, at least one.

    Raises:
      ValueError: a size that is no multiple of the block or cannot hold the longest completion.

    Example:
      >>> mask = np.arange(6) < np.array([[[2], [6]], [[1], [3]]])
      >>> sequences = pack(np.ones((2, 2, 6), int), mask, size=8, block=2)
      >>> [x.lengths[x.lengths > 0].tolist() for x in sequences]
      [[6, 2], [3, 1]]
    """
    b, g, t = mask.shape
    lengths = lengths_of(mask)
    if lengths.max(initial=0) > size or size % block:
        raise ValueError(
            f"size must be a multiple of {block} and hold the longest completion, {lengths.max()}; got {size}."
        )
    longest = t if longest is None else longest
    if whole and longest == t and t % block == 0 and (lengths == t).all():
        # If every completion is T long, as a young policy's may be, a block is gcd(N, T) tokens: where T divides N, a
        # completion is one block and looks at none before it, so that no keys are copied.
        block = math.gcd(size, t)
        reach = t // block - 1
    else:
        reach = min(-(-(longest - 1) // block), size // block - 1)
    # A bound on S, the segments, so that arrays [S, T] are of the order of N, beside logits [N, V] nothing. Completions
    # of four tokens, which a policy may turn to, fill a sequence all the same.
    most = max(8, min(size // 4, 32 * size // longest))
    flat, own = tokens.reshape(devices, -1, t), lengths.reshape(devices, b // devices, g)
    lay_out = functools.partial(_lay_out, size=size, block=block, most=most)
    chosen = [_choose(part, size // block, block, most) for part in own]
    members = [*itertools.zip_longest(*chosen, fillvalue={})]
    sequences = []
    for groups in members or [({},) * devices]:
        parts = map(lay_out, groups, flat, own.reshape(devices, -1))
        arrays: Any = [np.stack(x) for x in zip(*parts, strict=True)]  # NumPy's until they reach the device
        laid, number, position, prompt, *rest = arrays
        sequences.append(PackedSequence(laid, Segments(number, position, prompt, longest, reach), *rest))
    return sequences


def pack_as(shape: SequenceShape, tokens: np.ndarray, mask: np.ndarray, *, devices: int = 1) -> list[PackedSequence]:
    """`pack` in that shape."""
    return pack(tokens, mask, **shape._asdict(), devices=devices)


def lengths_of(mask: np.ndarray) -> np.ndarray:
    """Tokens [B, G] of completions up to the last True of mask [B, G, T]."""
    return np.where(mask.any(axis=-1), mask.shape[-1] - np.argmax(mask[:, :, ::-1], axis=-1), 0)


def evenly(tokens: np.ndarray, devices: int) -> np.ndarray:
    """An order of prompts with `tokens` [B] in which each device's part has about as many tokens as the others.

    Example:
      >>> evenly(np.array([9, 8, 1, 1]), 2).tolist()
      [0, 3, 1, 2]
    """
    parts: list[list[int]] = [[] for _ in range(devices)]
    sums, room = np.zeros(devices), len(tokens) // devices
    for i in np.argsort(-tokens, kind="stable"):
        least = min((part for part in range(devices) if len(parts[part]) < room), key=lambda part: sums[part])
        parts[least].append(int(i))
        sums[least] += tokens[i]
    return np.array([i for part in parts for i in part], int) if devices > 1 else np.arange(len(tokens))


def order_prompts(work: np.ndarray, learns: np.ndarray, *, cells: int, each: int) -> np.ndarray:
    """The numbers of prompts in the order in which they fill cells of `each` prompts; -1 fills the last ones.

    Prompts that learn come first, and `cells` at a time have about as much `work` [B].

    Example:
      >>> order_prompts(np.array([9, 8, 1, 1, 3]), np.ones(5, bool), cells=2, each=2).tolist()
      [0, 3, 1, 2, 4, -1, -1, -1]
    """
    order = np.argsort(~learns, kind="stable")
    order = np.pad(order, (0, -len(order) % (cells * each)), constant_values=-1).reshape(-1, cells * each)
    return np.concatenate([own[evenly(np.where(own < 0, 0, work[own]), cells)] for own in order])


def _choose(lengths: np.ndarray, room: int, block: int, most: int) -> list[dict[int, list[int]]]:
    """The completions of each sequence of `room` blocks, at most `most`, by their prompts; lengths [B, G].

    No sequences for completions that have no token.
    """
    *few, many = OPEN
    full = _fill(lengths, room, block, most, tried=many)
    for tried in few:
        members = _fill(lengths, room, block, most, tried=tried)
        if len(members) <= len(full):
            return members
    return full


def _fill(lengths: np.ndarray, room: int, block: int, most: int, *, tried: int) -> list[dict[int, list[int]]]:
    """`_choose`, each completion into the first sequence with room of the last `tried`."""
    members: list[dict[int, list[int]]] = []
    filled: list[dict[int, int]] = []  # of each sequence, tokens of each prompt's completions
    used: list[int] = []  # and the blocks that all of them take
    for prompt, own in enumerate(lengths):
        for i in np.argsort(-own, kind="stable"):
            n = int(own[i])
            if n == 0:
                continue
            for at in range(max(0, len(members) - tried), len(members) + 1):
                if at == len(members):
                    members.append({})
                    filled.append({})
                    used.append(0)
                before = filled[at].get(prompt, 0)
                more = math.ceil((before + n) / block) - math.ceil(before / block)
                if used[at] + more <= room and sum(map(len, members[at].values())) < most:
                    members[at].setdefault(prompt, []).append(prompt * lengths.shape[1] + int(i))
                    filled[at][prompt] = before + n
                    used[at] += more
                    break
    return members


def _lay_out(
    groups: dict[int, list[int]], tokens: np.ndarray, lengths: np.ndarray, *, size: int, block: int, most: int
) -> tuple[np.ndarray, ...]:
    """One device's part of a sequence, of these completions of each prompt: the arrays of a `PackedSequence`."""
    flat = np.zeros(size, np.int32)
    position, segment = np.zeros_like(flat), np.full_like(flat, -1)
    prompt = np.zeros(size // block, np.int32)
    completions = np.zeros(most, np.int32)
    starts, counts = np.zeros_like(completions), np.zeros_like(completions)
    at = number = 0
    for b, members in groups.items():
        begin = at
        for i in members:
            n = int(lengths[i])
            flat[at : at + n] = tokens[i, :n]
            position[at : at + n] = np.arange(n)
            segment[at : at + n] = number
            completions[number], starts[number], counts[number] = i, at, n
            at, number = at + n, number + 1
        at = -(-at // block) * block
        prompt[begin // block : at // block] = b
    return flat, segment, position, prompt, completions, starts, counts


def padding_share(sequences: Sequence[PackedSequence]) -> float:
    """Share of the tokens of some packed sequences that belong to no segment."""
    return 1 - sum(int(x.lengths.sum()) for x in sequences) / sum(x.tokens.size for x in sequences)
