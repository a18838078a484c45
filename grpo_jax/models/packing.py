"""Completions of different lengths laid end to end, so that little is computed for padding.

A batch [B, G, T] whose rows end early is mostly padding. Here its rows are cut to their lengths and packed into pieces
of N tokens each, all of one shape: one compiled program serves every batch, however long its completions are. A piece
is a `Lane` of blocks; a block holds rows of one prompt only, so that it looks at one prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.attention import Lane

__all__ = ["BLOCK", "Piece", "pack", "padding_share", "piece_size"]

BLOCK = 64
"""Tokens of a block: rows of the attention's matrix products, and the unit in which a group's rows are padded."""


class Piece(flax.struct.PyTreeNode):
    """Rows of a batch [B, G, T], end to end.

    Attributes:
      tokens: [N] int32; 0 where no row stands.
      lane: what stands where; its rows are numbered within the piece.
      rows: [R] int32, which row b·G + g of the batch each of them is.
      starts: [R] int32, where it starts in the piece.
      lengths: [R] int32, its tokens; 0 for a row that only fills the shape.
    """

    tokens: jax.Array
    lane: Lane
    rows: jax.Array
    starts: jax.Array
    lengths: jax.Array

    def spread(self, x: jax.Array) -> jax.Array:
        """Values [N] of tokens as [R, T]; what stands beyond a row's end is another's."""
        at = self.starts[:, None] + jnp.arange(self.lane.longest)[None]
        return x[jnp.minimum(at, x.shape[0] - 1)]

    def of(self, x: jax.Array) -> jax.Array:
        """The rows [R, ...] of an array [B, G, ...]."""
        return x.reshape(-1, *x.shape[2:])[self.rows]

    @property
    def mask(self) -> jax.Array:
        """[R, T] bool, True where a row of the piece has a token."""
        return jnp.arange(self.lane.longest)[None] < self.lengths[:, None]


def piece_size(tokens: int, longest: int, *, block: int = BLOCK) -> int:
    """Tokens of a piece: at least `tokens`, and room for the longest row, in whole blocks."""
    return -(-max(tokens, longest) // block) * block


def pack(tokens: np.ndarray, mask: np.ndarray, *, size: int, block: int = BLOCK) -> list[Piece]:
    """Lay the rows of a batch end to end.

    Rows stay with their group where they can: group by group, long rows first, each into the first piece with room
    among the last few that were begun.

    Args:
      tokens: [B, G, T] integer.
      mask: [B, G, T] bool; a row ends after its last True, and one without any is left out.
      size: N, a multiple of `block`, at least the longest row.
      block: tokens of a block; where every row is T long, blocks are as long as rows can be cut into.

    Returns:
      Pieces of one shape, at least one.

    Raises:
      ValueError: a size that is no multiple of the block or cannot hold the longest row.

    Example:
      >>> mask = np.arange(6) < np.array([[[2], [6]], [[1], [3]]])
      >>> pieces = pack(np.ones((2, 2, 6), int), mask, size=8, block=2)
      >>> [piece.lengths[piece.lengths > 0].tolist() for piece in pieces]
      [[6, 2], [3, 1]]
    """
    b, g, t = mask.shape
    lengths = np.where(mask.any(axis=-1), t - np.argmax(mask[:, :, ::-1], axis=-1), 0)
    if lengths.max(initial=0) > size or size % block:
        raise ValueError(f"size must be a multiple of {block} and hold the longest row, {lengths.max()}; got {size}.")
    if t % block == 0 and (lengths == t).all():
        # Rows that all run to the end, as those of a young policy may, are blocks themselves where the piece is whole
        # rows: no key is copied for the blocks after. (One of two layouts, so that few programs are compiled.)
        block = math.gcd(size, t)
        reach = t // block - 1
    else:
        reach = min(-(-(t - 1) // block), size // block - 1)
    most = max(8, size // 8)
    # Of each piece: the rows of each prompt, their tokens, and the blocks that they take, whole ones for each group.
    pieces: list[dict[int, list[int]]] = []
    filled: list[dict[int, int]] = []
    used: list[int] = []
    blocks = lambda n: -(-n // block)
    for prompt in range(b):
        for i in np.argsort(-lengths[prompt], kind="stable"):
            n = int(lengths[prompt, i])
            if n == 0:
                continue
            for at in range(max(0, len(pieces) - 4), len(pieces) + 1):
                if at == len(pieces):
                    pieces.append({})
                    filled.append({})
                    used.append(0)
                before = filled[at].get(prompt, 0)
                more = blocks(before + n) - blocks(before)
                if (used[at] + more) * block <= size and sum(map(len, pieces[at].values())) < most:
                    pieces[at].setdefault(prompt, []).append(prompt * g + int(i))
                    filled[at][prompt] = before + n
                    used[at] += more
                    break
    flat, flat_lengths = tokens.reshape(-1, t), lengths.reshape(-1)
    return [
        _lay_out(piece, flat, flat_lengths, size=size, block=block, most=most, reach=reach) for piece in pieces or [{}]
    ]


def _lay_out(
    groups: dict[int, list[int]],
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    size: int,
    block: int,
    most: int,
    reach: int,
) -> Piece:
    """One piece, of the rows of each prompt."""
    flat: Any = np.zeros(size, np.int32)  # NumPy's arrays until they reach the device
    position, row = np.zeros_like(flat), np.full_like(flat, -1)
    prompt: Any = np.zeros(size // block, np.int32)
    rows: Any = np.zeros(most, np.int32)
    starts, counts = np.zeros_like(rows), np.zeros_like(rows)
    at = number = 0
    for b, members in groups.items():
        begin = at
        for i in members:
            n = int(lengths[i])
            flat[at : at + n] = tokens[i, :n]
            position[at : at + n] = np.arange(n)
            row[at : at + n] = number
            rows[number], starts[number], counts[number] = i, at, n
            at, number = at + n, number + 1
        at = -(-at // block) * block
        prompt[begin // block : at // block] = b
    return Piece(flat, Lane(row, position, prompt, tokens.shape[1], reach), rows, starts, counts)


def padding_share(pieces: Sequence[Piece]) -> float:
    """Share of the tokens of some pieces that belong to no row."""
    return 1 - sum(int(piece.lengths.sum()) for piece in pieces) / sum(piece.tokens.shape[0] for piece in pieces)
