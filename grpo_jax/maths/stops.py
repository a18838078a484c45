"""Stop string detection during sampling: a byte automaton with one table lookup per sampled token.

The state is the longest suffix of the text that is a prefix of a stop string. A token advances the state by all of its
bytes, so a stop string may start and end within tokens. The string is found at the token that completes it:

```
stop "</a>"       tokens   x      </      a>       .
                  state    ""  →  "</" →  found →  found
```

Tokens with the same transitions from all states share a kind. The table is small because it has one row per kind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Stops:
    """Automaton that finds stop strings in tokens from a vocabulary. Hashable, for use as a static argument to `jit`.

    Attributes:
      strings: the stop strings.
      digest: hash of the arrays, for equality comparison.
      kinds: [N + 1] unsigned integer, kind of each of N tokens. The last entry is for ids ≥ N, which have no text.
      table: [K, S + 1] int32, next state for each of K kinds and each state. State S is reached if a string is found.
    """

    strings: tuple[str, ...]
    digest: bytes
    kinds: np.ndarray = dataclasses.field(compare=False, repr=False)
    table: np.ndarray = dataclasses.field(compare=False, repr=False)

    @property
    def final_state(self) -> int:
        """The final state, in which a stop string has been found."""
        return int(self.table.shape[1] - 1)

    def advance(self, state: Array, tokens: Array) -> Array:
        """Advance states [...] int32 by tokens [...]. Each turn starts in state 0."""
        xp: Any = np if isinstance(state, np.ndarray) and isinstance(tokens, np.ndarray) else jnp
        kinds = xp.asarray(self.kinds)[xp.minimum(tokens, len(self.kinds) - 1)].astype(np.int32)
        return xp.asarray(self.table)[kinds, state]  # type: ignore[no-any-return]

    def end_of(self, tokens: np.ndarray) -> int | None:
        """Return the number of tokens through the end of the first stop string, or None if no stop string occurs."""
        state = np.zeros(1, np.int32)
        for i in range(len(tokens)):
            state = self.advance(state, tokens[i : i + 1])
            if state[0] == self.final_state:
                return i + 1
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
    missing = [string for string in strings if not _is_reachable(_tables([string.encode()], pieces)[1])]
    if missing:
        raise ValueError(f"the vocabulary's tokens cannot form {', '.join(map(repr, missing))}")
    kinds, table = _tables(encoded, pieces)
    return Stops(tuple(strings), hashlib.sha256(kinds.tobytes() + table.tobytes()).digest(), kinds, table)


def _tables(strings: Sequence[bytes], pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Build the `kinds` and `table` arrays for `Stops`."""
    next_states = _byte_transitions(strings)
    # Replace bytes that occur in no string with 255 (unused in UTF-8), so that few distinct texts remain.
    translation = bytes(byte if byte in b"".join(strings) else 255 for byte in range(256))
    texts = [re.sub(b"\xff+", b"\xff", piece.translate(translation)) for piece in (*pieces, b"")]
    row_of_text = {}
    for text in dict.fromkeys(texts):
        states = np.arange(next_states.shape[1], dtype=np.int32)
        for byte in text:
            states = next_states[byte][states]
        row_of_text[text] = states.tobytes()
    kind_of_row = {row: kind for kind, row in enumerate(dict.fromkeys(row_of_text.values()))}
    kinds = np.array([kind_of_row[row_of_text[text]] for text in texts], np.min_scalar_type(len(kind_of_row)))
    return kinds, np.frombuffer(b"".join(kind_of_row), np.int32).reshape(len(kind_of_row), -1)


def _is_reachable(table: np.ndarray) -> bool:
    """Return whether some token sequence leads from state 0 to the final state."""
    reached, count = np.zeros(1, np.int64), 0
    while len(reached) > count:
        count, reached = len(reached), np.unique(np.append(table[:, reached], reached))
    return bool(reached[-1] == table.shape[1] - 1)


def _byte_transitions(strings: Sequence[bytes]) -> np.ndarray:
    """Return the next state for each byte and state, [256, S + 1] int32. States < S are prefixes, sorted by length."""
    prefixes = {string[:n] for string in strings for n in range(len(string))}
    ordered = sorted(prefixes, key=lambda prefix: (len(prefix), prefix))  # the same order in each process
    state_of, final_state = {prefix: i for i, prefix in enumerate(ordered)}, len(prefixes)
    next_states = np.zeros((256, final_state + 1), np.int32)
    next_states[:, final_state] = final_state
    for prefix, state in state_of.items():
        for byte in set(b"".join(strings)):
            text = prefix + bytes([byte])
            suffixes = (text[n:] for n in range(len(text) + 1))
            longest = next(state_of[suffix] for suffix in suffixes if suffix in state_of)
            next_states[byte, state] = final_state if text.endswith(tuple(strings)) else longest
    return next_states
