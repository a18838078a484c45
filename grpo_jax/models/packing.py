"""Completions of different lengths laid end to end, so that little is computed for padding.

A batch [B, G, T] whose completions end early is mostly padding. Here they are cut to their lengths and laid into packed
sequences of N tokens each, all of one shape: one compiled program serves every batch, however long its completions are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.attention import Segments

BLOCK = 64
"""Tokens of a block: queries of one of attention's matrix products, and the unit to which a group is padded."""


class PackedSequence(flax.struct.PyTreeNode):
    """Some completions of a batch [B, G, T], end to end: S segments in N tokens.

    Attributes:
      tokens: [N] int32; 0 where there is no segment.
      segments: which segment each token belongs to.
      completions: [S] int32, which completion b·G + g of the batch each segment is.
      starts: [S] int32, where it starts.
      lengths: [S] int32, its tokens; 0 for one that only fills the shape.
    """

    tokens: jax.Array
    segments: Segments
    completions: jax.Array
    starts: jax.Array
    lengths: jax.Array

    def spread(self, x: jax.Array) -> jax.Array:
        """Values [N] of tokens as [S, T]; what stands beyond a segment's end is another's."""
        at = self.starts[:, None] + jnp.arange(self.segments.longest)[None]
        return x[jnp.minimum(at, x.shape[0] - 1)]

    def of(self, x: jax.Array) -> jax.Array:
        """Of an array [B, G, ...], what belongs to the segments [S, ...]."""
        return x.reshape(-1, *x.shape[2:])[self.completions]

    @property
    def mask(self) -> jax.Array:
        """[S, T] bool, True where a segment has a token."""
        return jnp.arange(self.segments.longest)[None] < self.lengths[:, None]


def sequence_size(tokens: int, longest: int, *, block: int = BLOCK) -> int:
    """N of packed sequences: at least `tokens`, and room for the longest completion, in whole blocks."""
    return -(-max(tokens, longest) // block) * block


def pack(tokens: np.ndarray, mask: np.ndarray, *, size: int, block: int = BLOCK) -> list[PackedSequence]:
    """Lay the completions of a batch end to end.

    They stay with their group where they can: group by group, long ones first, each into the first sequence with room
    among the last few that were begun.

    Args:
      tokens: [B, G, T] integer.
      mask: [B, G, T] bool; a completion ends after its last True, and one without any is left out.
      size: N, a multiple of `block`, at least the longest completion.
      block: tokens of a block; where every completion is T long, blocks are as long as completions can be cut into.

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
    lengths = np.where(mask.any(axis=-1), t - np.argmax(mask[:, :, ::-1], axis=-1), 0)
    if lengths.max(initial=0) > size or size % block:
        raise ValueError(
            f"size must be a multiple of {block} and hold the longest completion, {lengths.max()}; got {size}."
        )
    if t % block == 0 and (lengths == t).all():
        # Completions that all run to the end, as those of a young policy may, are blocks themselves where a sequence
        # is whole completions: no key is copied for the blocks after. (One of two layouts, so few are compiled.)
        block = math.gcd(size, t)
        reach = t // block - 1
    else:
        reach = min(-(-(t - 1) // block), size // block - 1)
    most = max(8, min(size // 8, 32 * size // t))  # [S, T] is as long as the tokens, and not as long as their square
    # Of each sequence: the completions of each prompt, their tokens, and the blocks that all of them take.
    members: list[dict[int, list[int]]] = []
    filled: list[dict[int, int]] = []
    used: list[int] = []
    blocks = lambda n: -(-n // block)
    for prompt in range(b):
        for i in np.argsort(-lengths[prompt], kind="stable"):
            n = int(lengths[prompt, i])
            if n == 0:
                continue
            for at in range(max(0, len(members) - 4), len(members) + 1):
                if at == len(members):
                    members.append({})
                    filled.append({})
                    used.append(0)
                before = filled[at].get(prompt, 0)
                more = blocks(before + n) - blocks(before)
                if (used[at] + more) * block <= size and sum(map(len, members[at].values())) < most:
                    members[at].setdefault(prompt, []).append(prompt * g + int(i))
                    filled[at][prompt] = before + n
                    used[at] += more
                    break
    flat, flat_lengths = tokens.reshape(-1, t), lengths.reshape(-1)
    how = {"size": size, "block": block, "most": most, "reach": reach}
    return [_lay_out(groups, flat, flat_lengths, **how) for groups in members or [{}]]


def _lay_out(
    groups: dict[int, list[int]],
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    size: int,
    block: int,
    most: int,
    reach: int,
) -> PackedSequence:
    """One sequence, of these completions of each prompt."""
    flat: Any = np.zeros(size, np.int32)  # NumPy's arrays until they reach the device
    position, segment = np.zeros_like(flat), np.full_like(flat, -1)
    prompt: Any = np.zeros(size // block, np.int32)
    completions: Any = np.zeros(most, np.int32)
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
    return PackedSequence(
        flat, Segments(segment, position, prompt, tokens.shape[1], reach), completions, starts, counts
    )


def padding_share(sequences: Sequence[PackedSequence]) -> float:
    """Share of the tokens of some packed sequences that belong to no segment."""
    return 1 - sum(int(x.lengths.sum()) for x in sequences) / sum(x.tokens.shape[0] for x in sequences)
