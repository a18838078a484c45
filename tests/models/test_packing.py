"""Packing: every token appears exactly once, where its segment says, and there is little padding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.packing import BLOCK, SequenceShape, best_shape, pack, padding_share, sequence_shapes

pytestmark = pytest.mark.quick


def rows_of(b=5, g=7, t=40, seed=0, shortest=0):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(1 / 12, (b, g)) - 1 + shortest, t)
    return rng.integers(1, 100, (b, g, t)), np.arange(t) < lengths[..., None]


def packed(tokens, mask, size, block=BLOCK, longest=None, **how):
    return pack(SequenceShape(size, block, longest or mask.shape[2], whole=True), tokens, mask, **how)


def only(sequence):
    """Return the only device's sequence, without the device axis."""
    assert sequence.tokens.shape[0] == 1
    return jax.tree.map(lambda x: x[0], sequence)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "block"), [(40, 8), (64, 16), (512, 4)])
def test_every_token_is_packed_once(seed, size, block):
    """Every token appears exactly once in the packed sequences, at the position that the segments give."""
    tokens, mask = rows_of(seed=seed)
    sequences = packed(tokens, mask, size, block)
    seen = np.zeros(mask.shape, int).reshape(-1, mask.shape[2])
    for sequence in sequences:
        sequence = only(sequence)
        taken = np.zeros(size, bool)
        for number, (row, start, length) in enumerate(
            zip(sequence.completions, sequence.starts, sequence.lengths, strict=True)
        ):
            at = slice(start, start + length)
            np.testing.assert_array_equal(sequence.tokens[at], tokens.reshape(-1, mask.shape[2])[row, :length])
            np.testing.assert_array_equal(sequence.segments.number[at], number)
            np.testing.assert_array_equal(sequence.segments.position[at], np.arange(length))
            assert set(np.arange(start, start + length) // block) <= set(
                np.flatnonzero(sequence.segments.prompt == row // mask.shape[1])
            )
            assert not taken[at].any()
            taken[at] = True
            seen[row, :length] += 1
        assert (sequence.segments.number[~taken] == -1).all()
    np.testing.assert_array_equal(seen.reshape(mask.shape), mask)
    shapes = [[x.shape for x in (p.tokens, p.segments.prompt, p.completions, p.starts, p.lengths)] for p in sequences]
    assert shapes == [shapes[0]] * len(sequences), "sequences must have equal shapes to share a program"


def test_completions_can_be_recovered_from_packed_sequences():
    (sequence,) = packed(np.ones((2, 2, 4), int), np.zeros((2, 2, 4), bool), size=4, block=2)
    assert sequence.lengths.sum() == 0
    assert (sequence.segments.number == -1).all(), "a batch without tokens is one empty sequence"
    hole = np.array([[[1, 0, 1, 0], [0, 0, 0, 0]]], bool)
    (sequence,) = packed(np.arange(8).reshape(1, 2, 4), hole, size=8, block=4)
    assert sequence.lengths[sequence.lengths > 0].tolist() == [3], "a hole in the mask does not end a row"
    tokens, mask = rows_of()
    for sequence in packed(tokens, mask, size=64, block=8):
        real = sequence.lengths > 0
        spread = np.where(sequence.segment_mask, sequence.to_segments(jnp.asarray(sequence.tokens)), 0)[real]
        whole = np.where(mask, tokens, 0).reshape(-1, mask.shape[2])
        np.testing.assert_array_equal(spread, whole[sequence.completions[real]])
        np.testing.assert_array_equal(np.asarray(sequence.segment_mask)[~real], False)


def test_sequence_too_short_for_a_completion_is_refused():
    tokens, mask = rows_of(shortest=30)
    with pytest.raises(ValueError, match=r"size must be a multiple of 8 and at least the length of .* \(40\)"):
        packed(tokens, mask, size=32, block=8)
    with pytest.raises(ValueError, match="size must be a multiple of 8"):
        packed(tokens, mask, size=44, block=8)


@pytest.mark.parametrize(("t", "size", "expected"), [(128, 512, 128), (64, 512, 64), (384, 512, 128), (384, 768, 384)])
def test_blocks_of_full_rows_have_the_largest_possible_size(t, size, expected):
    for sequence in packed(np.ones((3, 4, t), int), np.ones((3, 4, t), bool), size):
        assert sequence.segments.prompt.shape == (1, size // expected)
        assert sequence.segments.reach == t // expected - 1


@pytest.mark.parametrize("longest", [None, 20])
def test_each_device_packs_its_own_prompts(longest):
    """Each device's sequences are the ones packed from its own prompts alone."""
    tokens, mask = rows_of(b=6, seed=3)
    mask &= np.arange(40) < (longest or 40)
    mask[4:, 1:] = False  # the last device has fewer tokens
    how = {"size": 64, "block": 8, "longest": longest}
    together = packed(tokens, mask, shards=3, **how)
    counts = []
    for device in range(3):
        own = slice(2 * device, 2 * device + 2)
        alone = [only(sequence) for sequence in packed(tokens[own], mask[own], **how)]
        counts.append(len(alone))
        here = [jax.tree.map(lambda x, device=device: x[device], sequence) for sequence in together]
        chex.assert_trees_all_equal(here[: len(alone)], alone)
        assert all(sequence.lengths.sum() == 0 for sequence in here[len(alone) :])
    assert len(together) == max(counts) > min(counts)
    assert padding_share(together) == pytest.approx(1 - mask.sum() / (len(together) * 3 * 64))
    for sequence in together:
        assert sequence.segment_mask.shape[2] == (longest or 40)
        values = jnp.where(
            sequence.rows_from_batch(jnp.asarray(mask)), sequence.rows_from_batch(jnp.asarray(tokens, jnp.float32)), 0
        )
        back = sequence.add_rows_to_batch(jnp.zeros(mask.shape), jnp.where(sequence.segment_mask, values, 0))
        there = np.asarray(back) > 0
        np.testing.assert_array_equal(np.asarray(back)[there], tokens[there])
        assert there.sum() == sequence.lengths.sum()


@pytest.mark.parametrize(("lengths", "size", "count"), [
    ([[3] * 8] * 8, 256, 1),  # groups of 24 tokens: one half block each
    ([[3] * 8] * 7 + [[3] * 7 + [64]], 256, 2),  # the group of 85 tokens needs three half blocks
    ([[8] * 8] * 8, 512, 1),  # whole blocks: 512 tokens in one sequence or in two
    ([[9] * 8] * 8, 256, 3),  # groups of 72 tokens: three half blocks (768 in all) or two whole (1,024)
    ([[8] * 7 + [9]] * 7 + [[0] * 8], 256, 3),  # 14 whole blocks take 1,024 tokens, 21 half blocks 768
    ([[64] * 8] * 8, 512, 8),
    ([[0] * 8] * 8, 512, 1),
])  # fmt: skip
def test_shape_with_the_fewest_tokens_is_chosen(lengths, size, count):
    lengths = np.array(lengths)
    mask = np.arange(64) < lengths[..., None]
    shapes = sequence_shapes(512, 64, fused=False, batch_tokens=8 * 8 * 64)
    shape = best_shape(shapes, lengths, 64)
    sequences = pack(shape, np.ones(mask.shape, int), mask)
    assert {sequence.tokens.shape for sequence in sequences} == {(1, size)} == {(1, shape.size)}
    assert len(sequences) == count
