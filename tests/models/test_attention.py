"""Attention over rows side by side and over rows packed end to end equals attention over each row alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.attention import group_attention, packed_attention
from grpo_jax.models.attention_tiles import Kernel
from grpo_jax.models.packing import SequenceShape, pack

B, G, T, P, H, R, WIDTH = 3, 4, 10, 6, 2, 3, 4


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, H, G, T, R, WIDTH), *[(B, H, G, T, WIDTH)] * 2, *[(B, H, P, WIDTH)] * 2
    q, k, v, pk, pv = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return q, k, v, (pk.swapaxes(-1, -2), pv, rng.integers(1, P + 1, B)), rng.integers(0, T + 1, (B, G))


def kernel_of(*, scale, window=None, soft_cap=None, sinks=None):
    return Kernel("einsum", 0, 0, scale, window, soft_cap)


def compiled(attention, settings, **how):
    """Compile the attention with these settings as one program, instead of one program per operation."""
    return jax.jit(functools.partial(attention, kernel=kernel_of(**settings), sinks=settings.get("sinks"), **how))


def one_by_one(q, k, v, prefix, lengths, *, scale, window, soft_cap, sinks=None):
    """Compute attention for each query of each row by a softmax over its visible keys, one query at a time."""
    out = np.zeros(q.shape)
    for b, h, g, r in np.ndindex(B, H, G, R):
        p = int(prefix[2][b])
        keys = np.concatenate([prefix[0][b, h, :, :p].T, k[b, h, g]])
        values = np.concatenate([prefix[1][b, h, :p], v[b, h, g]])
        for t in range(int(lengths[b, g])):
            first = 0 if window is None else max(0, p + t - window + 1)
            score = keys[first : p + t + 1] @ np.asarray(q[b, h, g, t, r]) * scale
            score = score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)
            weight = np.exp(score - score.max())
            sink = 0 if sinks is None else np.exp(sinks[h, r] - score.max())
            out[b, h, g, t, r] = weight @ values[first : p + t + 1] / (weight.sum() + sink)
    return out


SETTINGS = [
    {"scale": 0.5, "window": None, "soft_cap": None},
    {"scale": 0.3, "window": 3, "soft_cap": None},
    {"scale": 1.0, "window": 12, "soft_cap": 2.0},
    {"scale": 0.5, "window": 4, "soft_cap": None, "sinks": np.linspace(-2, 9, H * R, dtype=np.float32).reshape(H, R)},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_side_by_side_equal_rows_alone(settings):
    q, k, v, prefix, lengths = arrays()
    got = compiled(group_attention, settings, index=0)(q, k.swapaxes(-1, -2), v, prefix)
    real = (np.arange(T) < lengths[..., None]).reshape(B, 1, G, T, 1, 1)
    np.testing.assert_allclose(np.where(real, got, 0), one_by_one(q, k, v, prefix, lengths, **settings), atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("full", "size", "block"), [(False, 40, 4), (True, 40, T // 2)])
def test_rows_packed_end_to_end_equal_rows_alone(settings, full, size, block):
    q, k, v, prefix, lengths = arrays(1)
    if full:
        lengths[:] = T
    expected = one_by_one(q, k, v, prefix, lengths, **settings).swapaxes(1, 2).reshape(B * G, H, T, R, WIDTH)
    mask = np.arange(T) < lengths[..., None]
    rows = [x.swapaxes(1, 2).reshape(B * G, *x.shape[1:2], *x.shape[3:]) for x in (q, k, v)]
    attention, met = compiled(packed_attention, settings), 0
    for sequence in pack(SequenceShape(size, block, mask.shape[2], whole=True), np.zeros(mask.shape, int), mask):
        lay_out = [np.zeros((H, size, *x.shape[3:])) for x in rows]
        placed = list(zip(sequence.completions[0], sequence.starts[0], sequence.lengths[0], strict=True))
        for row, start, n in placed:
            for flat, x in zip(lay_out, rows, strict=True):
                flat[:, start : start + n] = x[row, :, :n]
        lq, lk, lv = (np.float32(x)[None, :, None] for x in lay_out)
        got = np.asarray(attention(lq, lk, lv, prefix, sequence.segments))[0, :, 0]
        assert np.isfinite(got).all(), "padding must be finite too"
        for row, start, n in placed:
            np.testing.assert_allclose(got[:, start : start + n], expected[row, :, :n], atol=1e-5)
            met += n
    assert met == lengths.sum()


@pytest.mark.quick
def test_infinite_keys_in_padding_give_finite_gradients():
    """Slots after a prompt's end may contain any value: a huge or infinite masked key does not make gradients NaN."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q, k, v = draw(1, 1, 2, 3, 2, 4), draw(1, 1, 2, 4, 3), draw(1, 1, 2, 3, 4)
    pk, pv = draw(1, 1, 4, 5), draw(1, 1, 5, 4)
    pk[..., 3:], pv[:, :, 3:] = 1e30, 0.0

    def gradient(pk, pv):
        attention = compiled(group_attention, {"scale": 0.5}, index=0)
        return jax.grad(lambda q: attention(q, k, v, (pk, pv, np.array([3]))).sum())(q)

    np.testing.assert_allclose(gradient(pk, pv), gradient(pk[..., :3], pv[:, :, :3]), atol=1e-6)


@pytest.mark.parametrize("form", ["side by side", "without prompts", "end to end"])
def test_only_weights_and_results_are_rounded_in_bfloat16(form):
    """In bfloat16 only weights and results are rounded, so results are within 2 · 2⁻⁹ of the largest value."""
    half = lambda x: np.asarray(x, jnp.bfloat16)
    exact = lambda x: np.asarray(x, np.float64)
    q, k, v, (pk, pv, ends), _ = arrays(3)
    q, k, v, pk, pv = (half(x) for x in (8 * q, k, v, pk, pv))
    ends = np.zeros_like(ends) if form == "without prompts" else ends
    full = np.full((B, G), T)
    settings = {"scale": 1.0, "window": None, "soft_cap": None}
    wide = tuple(exact(x) for x in (q, k, v))
    assert np.abs(np.einsum("bhgtrd,bhgsd->bhgtrs", *wide[:2])).max() > 40
    expected = one_by_one(*wide, (exact(pk), exact(pv), ends), full, **settings)
    if form != "end to end":
        prefix = None if form == "without prompts" else (pk, pv, ends)
        got = compiled(group_attention, settings, index=0)(q, k.swapaxes(-1, -2), v, prefix)
    else:
        mask = np.ones((B, G, T), bool)
        (sequence,) = pack(SequenceShape(B * G * T, T, T, whole=True), np.zeros(mask.shape, int), mask)
        rows = (np.moveaxis(x, 1, 0).reshape(1, H, 1, B * G * T, *x.shape[4:]) for x in (q, k, v))
        got = compiled(packed_attention, settings)(*rows, (pk, pv, ends), sequence.segments)
        got = np.moveaxis(np.asarray(got).reshape(H, B, G, T, R, WIDTH), 0, 1)
    assert got.dtype == jnp.bfloat16
    assert np.abs(exact(got) - expected).max() < 2 * 2.0**-9 * np.abs(wide[2]).max()
