"""Which completions stand where on the device, and what each layout costs."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import numpy as np

from grpo_jax.devices.streams import count_streams, devices_of
from grpo_jax.models.attention import Cache, Prefix
from grpo_jax.models.bounds import DecodeStep
from grpo_jax.types import Params

STREAM_ROWS = 16
"""Rows of one stream at least: fewer leave the matrix products too thin."""


FEWEST = 8
"""Rows that are left in a batch at least: a product with fewer takes a CPU as long."""


WORTH_A_MOVE = 0.8
"""Share of the present layout's cost that another may have at most: a move costs a copy of the cache, and a program."""


class _Rows(flax.struct.PyTreeNode):
    """Rows that are decoded together, as they stand on the device.

    Attributes:
      prefix: of the prompts, B of them.
      cache: own keys and values, `_without_ones`.
      token: [B, G] the last token of each row.
      ended: [B, G] whether that was its last.
      keys: [B, G] typed keys.
      start: [B] int32, slot of the cache in which the rows of each prompt begin.
    """

    prefix: Prefix
    cache: Cache
    token: jax.Array
    ended: jax.Array
    keys: jax.Array
    start: jax.Array


Drawn = tuple[jax.Array, jax.Array, jax.Array]
"""Tokens, log-probs and mask, each [B, G, steps]."""


def _bucket(n: int, largest: int, *, smallest: int = 1, factor: int = 2) -> int:
    """The smallest of smallest, factor·smallest, factor²·smallest, … that holds n, at most `largest`."""
    while smallest < n:
        smallest *= factor
    return min(smallest, largest)


def _survivors(alive: np.ndarray, step: DecodeStep) -> tuple[np.ndarray, np.ndarray] | None:
    """Which rows of alive [B', G'] to keep, as groups [B''] and order [B'', G'']; None to leave the layout as it is.

    One of three layouts: the present one, unless another saves a fifth; every row by itself with a prompt of its own;
    the groups that live, as wide as the widest of them has to be, where that is cheaper by a quarter. So, and by sizes
    that are far apart, there are few layouts, and few programs are compiled.
    """
    b, g = alive.shape
    if alive.size <= FEWEST:
        return None
    counts = alive.sum(axis=1)
    living = np.flatnonzero(counts)
    width = _bucket(int(counts.max()), g)
    groups = _bucket(len(living), b, smallest=min(b, max(1, FEWEST // width)))
    single = _bucket(int(counts.sum()), b * g, smallest=FEWEST, factor=4)
    grouped, apart = step.cost(groups, width), step.cost(single, 1)
    if min(grouped, apart) > WORTH_A_MOVE * step.cost(b, g):
        return None
    if grouped <= 0.75 * apart:
        chosen = np.argsort(counts == 0, kind="stable")[:groups]
        return chosen, np.argsort(~alive[chosen], axis=1, kind="stable")[:, :width]
    # Fillers are rows that have ended: they draw nothing.
    flat = np.argsort(~alive.reshape(-1), kind="stable")[:single]
    return flat // g, (flat % g)[:, None]


def _narrower(alive: np.ndarray, step: DecodeStep, shards: int) -> np.ndarray | None:
    """Which rows of each group of alive [B', G'] to keep, as order [B', G'']; None to leave the layout as it is.

    For a mesh, where no group leaves its device, of which each has its share: all are as wide as the widest has to be.
    """
    b, g = alive.shape
    width = _bucket(int(alive.sum(axis=1).max()), g)
    if step.cost(b // shards, width) > WORTH_A_MOVE * step.cost(b // shards, g):
        return None
    return np.argsort(~alive, axis=1, kind="stable")[:, :width]


def _decode_step(model: Any, params: Params, rows: _Rows) -> DecodeStep:
    """What a step of these rows costs; a CPU multiplies eight times in the time of one byte, a GPU a hundred times."""
    values, cache = rows.prefix.layers[0][1], rows.cache[0][1]
    held = jax.tree.leaves((model, params))
    on_cpu = all(device.platform == "cpu" for device in devices_of(params))
    return DecodeStep.of(
        model.config,
        prompt_length=values.shape[2],
        row_length=cache.shape[-2],
        itemsize=values.dtype.itemsize,
        weight_itemsize=sum(x.nbytes for x in held) / sum(x.size for x in held),
        bytes_per_operation=0.13 if on_cpu else 0.01,
    )


def _streams(params: Params, groups: int, width: int) -> int:
    """How many lanes [groups, width] rows are decoded in."""
    most = count_streams(params, min(groups, groups * width // STREAM_ROWS))
    return max(n for n in range(1, most + 1) if groups % n == 0)


class _Table:
    """The whole call's tokens, log-probs and mask on the host, and which of its rows stands where on the device.

    Attributes:
      rows: [B', G'] which row of the call stands where; −1 for one that has ended or only fills the shape.
      drawn: [B'] tokens drawn of each group's rows.
      finished: [B·G] whether a row has drawn an EOS.
    """

    def __init__(self, count: int, length: int, pad_token_id: int, eos_token_ids: tuple[int, ...]):
        self.tokens = np.full((count, length), pad_token_id, np.int32)
        self.log_probs = np.zeros((count, length), np.float32)
        self.mask = np.zeros((count, length), bool)
        self.finished = np.zeros(count, bool)
        self.rows = np.zeros((0, 0), int)
        self.drawn = np.zeros(0, int)
        self._eos = eos_token_ids

    @property
    def length(self) -> int:
        """T, the most tokens of a row."""
        return self.tokens.shape[1]

    def note(self, rows: np.ndarray, before: np.ndarray, drawn: Drawn, count: int) -> np.ndarray:
        """Take in `count` tokens more of rows [B', G'] that had `before` [B']; return which rows go on [B', G']."""
        tokens, log_probs, mask = (np.asarray(x)[:, :, :count] for x in drawn)
        at = before[:, None, None] + np.arange(count)
        here = (rows >= 0)[:, :, None] & (at < self.length)
        where = np.broadcast_to(rows[:, :, None], here.shape)[here], np.broadcast_to(at, here.shape)[here]
        for whole, part in ((self.tokens, tokens), (self.log_probs, log_probs), (self.mask, mask)):
            whole[where] = part[here]
        ended = (np.isin(tokens, self._eos) & mask & here).any(axis=-1)
        self.finished[rows[ended]] = True
        return (rows >= 0) & ~ended & (before[:, None] + count < self.length)


def places(groups: int, num_generations: int, batch_size: int | None, shards: int) -> int:
    """How many groups stand on the devices at a time: at most `batch_size` completions, as many on each device.

    Args:
      groups: B, all that there are.
      num_generations: G.
      batch_size: completions at a time over all devices; None: all.
      shards: devices that prompts are cut over.

    Example:
      >>> places(30, 4, None, 8), places(30, 4, 70, 8), places(30, 4, 70, 1)
      (32, 16, 17)
    """
    most = groups if batch_size is None else min(groups, batch_size // num_generations // shards * shards)
    return -(-most // shards) * shards
