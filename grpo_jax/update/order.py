"""In which order an update goes through prompts and packed sequences, so that few activations are held at a time.

A part of the prompts is read right before the first packed sequence with a completion of it, and the backward pass goes
through it right after the last one:

```
read parts 0, 1 ─► sequence 0 ─► back through 0 ─► read 2 ─► sequence 1 ─► back through 1, 2 ─► …
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.models.packing import PackedSequence
from grpo_jax.types import Batch
from grpo_jax.update.prompts import Shards, count_reads


class Packing(NamedTuple):
    """How the completions of a batch are packed.

    Attributes:
      sequences: all of one shape, on the host.
      measured: likewise, of completions that have no gradient, so that nothing goes back through them.
      shards: how the prompts are cut over the mesh.
      size: tokens of prompts that are read at a time, at most.
    """

    sequences: list[PackedSequence]
    measured: list[PackedSequence]
    shards: Shards
    size: int


class Leg(NamedTuple):
    """One step: parts of the prompts to read, packed sequences to add, and parts that no later sequence needs."""

    reads: list[int]
    sequences: list[int]
    backs: list[int]


def plan_order(needs: Sequence[set[int]], *, at_once: bool = False) -> list[Leg]:
    """The legs of an update whose packed sequences need these parts of the prompts; at least one, which reads a part.

    Args:
      needs: for each packed sequence, the parts that its completions belong to.
      at_once: for sequences that are computed in parallel: a leg ends only where nothing is kept.
    """
    needs = [*needs] if any(needs) else [{0}, *needs[1:]]  # without any completion too there is something to read
    last = {part: number for number, parts in enumerate(needs) for part in parts}
    legs, known, kept = list[Leg](), set[int](), set[int]()
    for number, parts in enumerate(needs):
        backs = [part for part in sorted(parts) if last[part] == number]
        leg = Leg(sorted(parts - known), [number], backs)
        if at_once and kept:
            leg = Leg(*(before + now for before, now in zip(legs.pop(), leg, strict=True)))
        legs.append(leg)
        known, kept = known | parts, (kept | parts) - set(backs)
    return legs


def parts_needed(sequence: PackedSequence, group: int, prompts: int) -> set[int]:
    """The parts of the prompts, of `prompts` each on every device, that a packed sequence has completions of.

    The sequence is on the host; `group` is G.
    """
    completions, lengths = np.asarray(sequence.completions), np.asarray(sequence.lengths)
    return set((completions[lengths > 0] // group // prompts).tolist())


def count_needs(sequences: Sequence[PackedSequence], batch: Batch, size: int, shards: Shards) -> list[set[int]]:
    """For each packed sequence of a batch, the parts of the prompts that its completions belong to."""
    b, g, _ = batch.mask.shape
    part = b // shards.devices // count_reads(batch.prompts, size, shards)
    return [parts_needed(sequence, g, part) for sequence in sequences]


def count_work(packing: Packing, batch: Batch) -> int:
    """Tokens that an update brings through the model, a backward pass as two forward ones: sequences and prompts."""
    sequences, measured, shards, size = packing

    def count(some: Sequence[PackedSequence]) -> int:
        parts = set[int]().union(*count_needs(some, batch, size, shards))
        prompts = batch.prompts.tokens.size // count_reads(batch.prompts, size, shards)
        return sum(sequence.tokens.size for sequence in some) + len(parts) * prompts

    return 2 * count(sequences) + count([*sequences, *measured])
