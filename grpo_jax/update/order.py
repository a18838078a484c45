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


class Leg(NamedTuple):
    """One step of that order.

    Attributes:
      reads: parts of the prompts that are read first.
      sequences: packed sequences that are added then.
      backs: parts that the backward pass goes through last: those that no later sequence needs.
    """

    reads: list[int]
    sequences: list[int]
    backs: list[int]


def plan_order(needs: Sequence[set[int]], *, at_once: bool = False) -> list[Leg]:
    """The legs of an update whose packed sequences need these parts of the prompts.

    Args:
      needs: for each packed sequence, the parts that its completions belong to.
      at_once: for sequences that are at work beside each other: a leg ends only where nothing is kept.

    Returns:
      At least one leg, and at least one part that is read in it.

    Example:
      >>> [tuple(leg) for leg in plan_order([{0, 1}, {1, 2}])]
      [([0, 1], [0], [0]), ([2], [1], [1, 2])]
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
