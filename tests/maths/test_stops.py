"""The stop-string automaton over tokens ends turns at the same token as a plain search in the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.maths.stops import make_stops

pytestmark = pytest.mark.quick

PIECES = b"|a|b|ab|ba|aab| a|b.|..|abab|\xc3|\xa9|x\xc3|\xa9b|c".split(b"|")


def searched(strings, pieces, turn):
    """Return the number of tokens up to the first stop string, searching the whole text again after each token."""
    for count in range(1, len(turn) + 1):
        text = b"".join(pieces[i] for i in turn[:count])
        if any(string.encode() in text for string in strings):
            return count
    return None


STRINGS = [x.split("|") for x in ("a", "ab", "abab", "aab|bab", "é", "bé|ab", "b..|a.|b ab", "aaba|ab|b", "ababab")]


@pytest.mark.parametrize("strings", STRINGS, ids=str)
def test_turn_ends_where_a_search_in_the_bytes_finds_a_stop_string(strings):
    """A turn ends at the token that completes a stop string, which may span tokens and split characters."""
    stops, rng = make_stops(strings, PIECES), np.random.default_rng(0)
    assert stops.strings == tuple(strings)
    ends = set()
    for turn in rng.integers(0, len(PIECES), (300, 12)):
        expected = searched(strings, PIECES, turn)
        assert stops.end_of(turn) == expected
        ends.add(expected)
    assert len(ends) > 3


def test_automaton_gives_the_same_ends_on_the_device_and_stays_in_the_found_state():
    stops, rng = make_stops(["aab", "é"], PIECES), np.random.default_rng(1)
    turns = rng.integers(0, len(PIECES), (8, 16, 20)).astype(np.int32)
    after = jax.jit(lambda state, tokens: stops.advance(state, tokens))
    state, ours = jnp.zeros((8, 16), jnp.int32), np.zeros((8, 16), np.int32)
    found = []
    for t in range(20):
        state, ours = after(state, jnp.asarray(turns[..., t])), stops.advance(ours, turns[..., t])
        np.testing.assert_array_equal(state, ours)
        assert state.dtype == ours.dtype == np.int32
        found.append(ours == stops.final_state)
    count = np.sum(np.logical_not(found), axis=0) + 1
    ends = [stops.end_of(turn) or 21 for turn in turns.reshape(-1, 20)]
    assert count.reshape(-1).tolist() == ends
    assert 5 < (count < 21).sum() < 128


def test_unknown_ids_match_nothing_and_strings_that_no_tokens_form_are_refused():
    stops = make_stops(["ab"], [b"a", b"b"])
    assert stops.end_of(np.array([0, 7, 2, 1, 0])) == 4
    assert stops.advance(jnp.zeros(3, jnp.int32), jnp.array([0, 1, 9])).tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="the vocabulary's tokens cannot form 'ac', 'cab'"):
        make_stops(["ab", "ac", "cab"], [b"a", b"xcb", b"b"])
    make_stops(["xcbab"], [b"a", b"xcb", b"b"])
    make_stops(["cb"], [b"a", b"xcb", b"b"])  # in the middle of the token "xcb"


def test_large_vocabulary_has_few_kinds_of_tokens():
    """For a large vocabulary the transition table stays small, and the device holds one byte per token."""
    rng = np.random.default_rng(2)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz <>/.", np.uint8)
    pieces = [bytes(rng.choice(letters, n)) for n in rng.integers(1, 9, 20_000)] + [
        b" " * 128,
        *map(bytes, letters[:, None]),
    ]
    stops = make_stops(["</answer>", "."], pieces)
    assert stops.kinds.dtype == np.uint8
    assert stops.table.shape[0] < 64
    turn = rng.integers(0, len(pieces), 30)
    assert stops.end_of(turn) == searched(stops.strings, pieces, turn)
    assert hash(stops) == hash(make_stops(["</answer>", "."], pieces))
    assert stops == make_stops(["</answer>", "."], pieces) != make_stops(["</answer>", "."], pieces[::-1])


def test_automaton_is_the_same_in_each_process():
    """Bytes have a different hash in each process, but the tables are constants of programs that are cached."""
    assert make_stops(["aaba", "ab", "b a", "bab"], PIECES).digest.hex().startswith("5105542e")
