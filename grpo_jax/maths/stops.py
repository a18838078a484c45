"""Stop string detection during sampling: a byte automaton with one table lookup per sampled token.

The state is the longest suffix of the text that is a prefix of a stop string. A token advances the state by all of its
bytes, so a stop string may start and end within tokens. It is found at the token that completes it:

```
stop "</a>"       tokens   x      </      a>       .
                  state    ""  →  "</" →  found →  found
```

Tokens with the same effect on every state share a kind. The table is small because it has one row per kind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)

_TEXTS = 1 << 13
"""Number of tokens processed at a time, to limit memory use."""


@dataclasses.dataclass(frozen=True)
class Stops:
    """Automaton that finds stop strings in tokens from a vocabulary. Hashable, for use as a static argument to `jit`.

    Attributes:
      strings: the stop strings.
      digest: hash of the arrays, for equality comparison.
      kinds: [N + 1] unsigned integer, kind of each token. The last entry is for ids ≥ N, which have no text.
      table: [kinds, S + 1] int32, next state for each token kind and state. State S is final: a string was found.
    """

    strings: tuple[str, ...]
    digest: bytes
    kinds: np.ndarray = dataclasses.field(compare=False, repr=False)
    table: np.ndarray = dataclasses.field(compare=False, repr=False)

    @property
    def found(self) -> int:
        """The final state, in which a stop string has been found."""
        return int(self.table.shape[1] - 1)

    def after(self, state: Array, tokens: Array) -> Array:
        """Advance states [...] int32 by tokens [...]. Each turn starts in state 0."""
        if isinstance(state, np.ndarray) and isinstance(tokens, np.ndarray):
            found: np.ndarray = self.table[self.kinds[np.minimum(tokens, len(self.kinds) - 1)], state]
            return found
        kinds = jnp.asarray(self.kinds)[jnp.minimum(tokens, len(self.kinds) - 1)].astype(jnp.int32)
        return jnp.asarray(self.table)[kinds, state]

    def end_of(self, tokens: np.ndarray) -> int | None:
        """Return the number of tokens through the end of the first stop string, or None if no stop string occurs."""
        state = np.zeros(1, np.int32)
        for at in range(len(tokens)):
            state = self.after(state, tokens[at : at + 1])
            if state[0] == self.found:
                return at + 1
        return None


def make_stops(strings: Sequence[str], pieces: Sequence[bytes]) -> Stops:
    """Build the automaton for non-empty stop strings over a vocabulary.

    `pieces` contains the UTF-8 bytes of each of the N tokens, b"" for a token without text. Raises ValueError if a stop
    string cannot be formed from these tokens.

    Example:
      >>> stops = make_stops(["</a>"], [b"x", b"</", b"a>.", b"<", b"a"])
      >>> stops.end_of(np.array([0, 3, 1, 2, 0])), stops.end_of(np.array([1, 0, 2]))
      (4, None)
    """
    encoded = [string.encode() for string in strings]
    alone = [_tables([string], pieces) for string in encoded]
    missing = [string for string, (_, table) in zip(strings, alone, strict=True) if not _is_reachable(table)]
    if missing:
        raise ValueError(f"the tokens of this vocabulary cannot form {', '.join(map(repr, missing))}")
    kinds, table = alone[0] if len(alone) == 1 else _tables(encoded, pieces)
    return Stops(tuple(strings), hashlib.sha256(kinds.tobytes() + table.tobytes()).digest(), kinds, table)


def _tables(strings: Sequence[bytes], pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Build the `kinds` and `table` arrays for `Stops`."""
    steps, rows = _byte_steps(strings), dict[bytes, int]()
    # Replace bytes that occur in no string with 255 (unused in UTF-8), so that few distinct pieces remain.
    same = bytes(byte if byte in b"".join(strings) else 255 for byte in range(256))
    texts = [re.sub(b"\xff+", b"\xff", piece.translate(same)) for piece in (*pieces, b"")]
    different = sorted(set(texts), key=len, reverse=True)
    kind_of = dict[bytes, int]()
    for first in range(0, len(different), _TEXTS):
        some = different[first : first + _TEXTS]
        lengths = np.array([*map(len, some)])
        there = np.frombuffer(b"".join(text.ljust(lengths[0]) for text in some), np.uint8).reshape(len(some), -1)
        states = np.tile(np.arange(len(steps)), (len(some), 1))
        for at in range(lengths[0]):
            count = int((lengths > at).sum())  # texts are sorted longest first
            states[:count] = steps[states[:count], there[:count, at, None]]
        for text, row in zip(some, states.astype(np.int32), strict=True):
            kind_of[text] = rows.setdefault(row.tobytes(), len(rows))
    kinds = np.array([kind_of[text] for text in texts], np.min_scalar_type(len(rows)))
    return kinds, np.frombuffer(b"".join(rows), np.int32).reshape(len(rows), -1)


def _is_reachable(table: np.ndarray) -> bool:
    """Return whether some token sequence leads from state 0 to the final state."""
    reached, count = np.zeros(1, np.int64), 0
    while len(reached) > count:
        count, reached = len(reached), np.unique(np.append(table[:, reached], reached))
    return bool(reached[-1] == table.shape[1] - 1)


def _byte_steps(strings: Sequence[bytes]) -> np.ndarray:
    """Compute the next state for each state and byte, [S + 1, 256]. Non-final states are prefixes sorted by length."""
    states = sorted({string[:n] for string in strings for n in range(len(string))}, key=len)
    number, found = {text: i for i, text in enumerate(states)}, len(states)
    steps = np.zeros((found + 1, 256), np.int64)
    steps[found] = found
    for i, state in enumerate(states):
        for byte in set(b"".join(strings)):
            text = state + bytes([byte])
            ends = (number.get(text[n:]) for n in range(len(text) + 1))
            steps[i, byte] = found if text.endswith(tuple(strings)) else next(n for n in ends if n is not None)
    return steps
