"""Completions of different lengths laid end to end, so that little is computed for padding.

A batch [B, G, T] of short completions is mostly padding. Here completions are cut to their lengths and laid end to end
in packed sequences of N tokens. All packed sequences have one shape, so that one compiled program serves every batch.
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
"""Tokens per block: the queries of one matrix product of attention. A group is padded to whole blocks."""


class PackedSequence(flax.struct.PyTreeNode):
    """Some completions of a batch [B, G, T] laid end to end: S segments in N tokens, on each of A devices.

    Each device has the completions of its own B / A prompts.

    Attributes:
      tokens: [A, N] int32; 0 in padding.
      segments: the segment of each token.
      completions: [A, S] int32, the index b·G + g of each segment's completion in the device's part of the batch.
      starts: [A, S] int32, first token of each segment.
      lengths: [A, S] int32, tokens of each segment; 0 for unused segments.
    """

    tokens: jax.Array
    segments: Segments
    completions: jax.Array
    starts: jax.Array
    lengths: jax.Array

    def by_segment(self, x: jax.Array) -> jax.Array:
        """Return values [A, N] of tokens as [A, S, T]. Values beyond a segment's end belong to other segments."""
        at = self.starts[..., None] + jnp.arange(self.segments.longest)[None, None]
        return jax.vmap(lambda x, at: x[at])(x, jnp.minimum(at, x.shape[1] - 1))

    def by_token(self, x: jax.Array) -> jax.Array:
        """Return values [A, S, T, ...] of segments as [A, N, ...], 0 in padding; the inverse of `by_segment`."""
        number, position = self.segments.number, self.segments.position
        values = jax.vmap(lambda x, number, position: x[number, position])(x, number, position)
        return jnp.where(jnp.expand_dims(number, range(2, values.ndim)) < 0, 0, values)

    def take(self, x: jax.Array) -> jax.Array:
        """Return the segments' part of an array [B, G] or [B, G, T, ...]: [A, S], or [A, S, longest, ...]."""
        devices = self.tokens.shape[0]
        own = jax.vmap(lambda x, at: x[at])(x.reshape((devices, -1, *x.shape[2:])), self.completions)
        return own if x.ndim == 2 else own[:, :, : self.segments.longest]

    def add_to(self, whole: jax.Array, x: jax.Array) -> jax.Array:
        """Return `whole` [B, G, T] plus the values [A, S, T] of the segments; the inverse of `take`."""
        devices, t = self.tokens.shape[0], self.segments.longest
        parts = whole.reshape(devices, -1, whole.shape[-1])
        added = jax.vmap(lambda own, at, x: own.at[at, :t].add(x))(parts, self.completions, x)
        return added.reshape(whole.shape)

    @property
    def mask(self) -> jax.Array:
        """[A, S, T] bool, True where a segment has a token."""
        return jnp.arange(self.segments.longest)[None, None] < self.lengths[..., None]


HALF = 256
"""Smallest number of tokens of a half-size sequence. The fixed cost of shorter sequences outweighs their gain."""

FEW = 8
"""Largest number of sequences of a batch that may be packed in half-size ones, which save half a sequence at best."""

OPEN = (1, 2, 4)
"""Numbers of open sequences in which a completion is tried before a new one starts. The smallest number that needs as
few sequences as the largest is used: the prompts of a sequence are then near each other, and an update keeps the
activations of fewer prompts."""


def sequence_size(tokens: int, longest: int, *, block: int = BLOCK) -> int:
    """Return N: the smallest multiple of `block` that is at least `tokens` and the longest completion."""
    return -(-max(tokens, longest) // block) * block


class SequenceShape(NamedTuple):
    """The shape of packed sequences, which determines their compiled program."""

    size: int  # N, a multiple of `block`, at least the longest completion
    block: int  # tokens per block
    longest: int  # upper bound of the tokens of a segment
    whole: bool  # whether completions that are all T long get larger blocks, gcd(N, T)


def sequence_shapes(tokens: int, t: int, *, fused: bool, batch_tokens: int) -> list[SequenceShape]:
    """Return the shapes that packed sequences of completions [B, G, T] may have; few, since each is a program.

    Fused attention has two sizes. Attention that stores the scores of whole blocks depends on the block and on the
    number of earlier blocks it reads. It has shapes for completions of any length, for completions that are all T long,
    for short ones, and for a batch of few sequences one of half the size in half blocks.

    Args:
      tokens: largest number of tokens of a packed sequence, unless the longest completion needs more.
      t: T.
      fused: whether attention is fused.
      batch_tokens: tokens of a device's part of the batch if all completions are T long.
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
    """Return the shape with the fewest tokens for lengths [B, G], at a tie the one for the shortest completions.

    Each `neighbours` consecutive prompts of a device are packed separately; None packs all of them together.
    """
    groups = lengths.sum(axis=1).reshape(devices, -1)
    begins = range(0, groups.shape[1], neighbours or groups.shape[1])

    def tokens(shape: SequenceShape) -> int:
        """The tokens of all sequences; each group takes whole blocks."""
        blocks = np.add.reduceat(-(-groups // shape.block), begins, axis=1).max(axis=0)
        return int((-(-blocks * shape.block // shape.size)).sum()) * shape.size

    fitting = [shape for shape in shapes if lengths.max() <= shape.longest]
    if any(shape.whole for shape in fitting):
        fitting = [shape for shape in fitting if shape.whole == bool((lengths == t).all())]
    return min(fitting, key=lambda shape: (tokens(shape), shape.longest, -shape.size))


def pack(shape: SequenceShape, tokens: np.ndarray, mask: np.ndarray, *, devices: int = 1) -> list[PackedSequence]:
    """Pack completions [B, G, T] into sequences of one shape; returns at least one.

    Groups are packed in order, the long completions of a group first. Each completion goes into the first of the last
    few sequences (`OPEN`) with enough free tokens. A completion ends after its last True in the mask, and an empty one
    is left out. The number of devices divides B.
    """
    size, block, longest, whole = shape
    b, g, t = mask.shape
    lengths = lengths_of(mask)
    if lengths.max(initial=0) > size or size % block:
        raise ValueError(
            f"size must be a multiple of {block} and hold the longest completion, {lengths.max()}; got {size}."
        )
    if whole and longest == t and t % block == 0 and (lengths == t).all():
        # Where T divides N, a completion is one block and reads no earlier block, so that no keys are copied.
        block = math.gcd(size, t)
        reach = t // block - 1
    else:
        reach = min(-(-(longest - 1) // block), size // block - 1)
    # A bound of S keeps arrays [S, T] small compared with logits [N, V]. Completions of four tokens still fill a
    # sequence.
    most = max(8, min(size // 4, 32 * size // longest))
    flat, own = tokens.reshape(devices, -1, t), lengths.reshape(devices, b // devices, g)
    lay_out = functools.partial(_lay_out, size=size, block=block, most=most)
    chosen = [_choose(part, size // block, block, most) for part in own]
    members = list(itertools.zip_longest(*chosen, fillvalue={}))
    sequences = []
    for groups in members or [({},) * devices]:
        parts = map(lay_out, groups, flat, own.reshape(devices, -1))
        arrays: Any = [np.stack(x) for x in zip(*parts, strict=True)]
        laid, number, position, prompt, completions, starts, counts = arrays
        segments = Segments(number, position, prompt, longest, reach)
        sequences.append(PackedSequence(laid, segments, completions, starts, counts))
    return sequences


def lengths_of(mask: np.ndarray) -> np.ndarray:
    """Return the lengths [B, G] of completions up to the last True of mask [B, G, T]."""
    return np.where(mask.any(axis=-1), mask.shape[-1] - np.argmax(mask[:, :, ::-1], axis=-1), 0)


def evenly(tokens: np.ndarray, devices: int) -> np.ndarray:
    """Return an order of prompts with `tokens` [B] that gives each device about the same number of tokens."""
    parts: list[list[int]] = [[] for _ in range(devices)]
    sums, share = np.zeros(devices), len(tokens) // devices
    for i in np.argsort(-tokens, kind="stable"):
        least = min((part for part in range(devices) if len(parts[part]) < share), key=lambda part: sums[part])
        parts[least].append(int(i))
        sums[least] += tokens[i]
    return np.array([i for part in parts for i in part], int) if devices > 1 else np.arange(len(tokens))


def order_prompts(work: np.ndarray, learns: np.ndarray, *, cells: int, each: int) -> np.ndarray:
    """Return prompt indices in the order in which they fill cells of `each` prompts; −1 marks an empty slot.

    Prompts that learn come first. Cells that run together, `cells` at a time, have about the same `work` [B].
    """
    order = np.argsort(~learns, kind="stable")
    order = np.pad(order, (0, -len(order) % (cells * each)), constant_values=-1).reshape(-1, cells * each)
    return np.concatenate([own[evenly(np.where(own < 0, 0, work[own]), cells)] for own in order])


def _choose(lengths: np.ndarray, blocks: int, block: int, most: int) -> list[dict[int, list[int]]]:
    """Return the completions of each sequence by prompt; a sequence has `blocks` blocks and at most `most` segments."""
    *few, many = OPEN
    full = _fill(lengths, blocks, block, most, tried=many)
    for tried in few:
        members = _fill(lengths, blocks, block, most, tried=tried)
        if len(members) <= len(full):
            return members
    return full


def _fill(lengths: np.ndarray, blocks: int, block: int, most: int, *, tried: int) -> list[dict[int, list[int]]]:
    """Return `_choose` for sequences filled first-fit among the last `tried`."""
    members: list[dict[int, list[int]]] = []
    filled: list[dict[int, int]] = []  # tokens of each prompt in each sequence
    used: list[int] = []  # blocks used in each sequence
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
                if used[at] + more <= blocks and sum(map(len, members[at].values())) < most:
                    members[at].setdefault(prompt, []).append(prompt * lengths.shape[1] + int(i))
                    filled[at][prompt] = before + n
                    used[at] += more
                    break
    return members


def _lay_out(
    groups: dict[int, list[int]], tokens: np.ndarray, lengths: np.ndarray, *, size: int, block: int, most: int
) -> tuple[np.ndarray, ...]:
    """Return the arrays of a `PackedSequence` for one device, from the indices of each prompt's completions."""
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
    """Return the fraction of padding among the tokens of packed sequences."""
    return 1 - sum(int(x.lengths.sum()) for x in sequences) / sum(x.tokens.size for x in sequences)
