"""Attention of packed sequences by JAX's splash attention kernels, interpreted: the values and gradients of einsums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from grpo_jax.models.attention import make_tile_mask, packed_attention, tiled_attention
from grpo_jax.models.context import Prefix
from grpo_jax.models.packing import SequenceShape, pack
from grpo_jax.models.tiles import Kernel

P, T, SIZE, D = 40, 150, 608, 16


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    kernel = splash_attention_kernel.SplashAttentionKernel
    monkeypatch.setattr(
        splash_attention_kernel, "SplashAttentionKernel", lambda *infos, **kw: kernel(*infos, **kw | {"interpret": True})
    )


def case(seed, dtype, group):
    """Return a packed sequence of random completions of several prompts, prompt lengths, and arrays."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 1 + rng.choice([20, T], (4, 5)))  # some are empty
    mask = np.arange(T) < lengths[..., None]
    sequence = pack(SequenceShape(SIZE, 16, T, whole=False), np.ones(mask.shape, int), mask)[0]
    shapes = (1, 2, 1, SIZE, group, D), (1, 2, 1, SIZE, D), (1, 2, 1, SIZE, D), (4, 2, D, P), (4, 2, P, D)
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    return sequence.segments, rng.integers(1, P + 1, 4), arrays


@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap", "group"),
    [("float32", None, None, 3), ("float32", 30, None, 1), ("float32", 200, 2.0, 2), ("bfloat16", None, None, 2)],
)
def test_values_and_gradients_are_those_of_einsums(dtype, window, soft_cap, group):
    settings = {"scale": 0.3, "window": window, "soft_cap": soft_cap}
    kernel = Kernel("splash", 128, 128)._replace(**settings)
    for seed in range(2):
        segments, lengths, given = case(seed, dtype, group)
        there = np.reshape(segments.number[0] >= 0, (1, 1, 1, SIZE, 1, 1))
        assert len(set(segments.prompt[0])) > 1, "several prompts in one sequence"
        assert 0 < there.sum() < SIZE, "padding"

        def plain(q, k, v, pk, pv, segments=segments, lengths=lengths):
            return packed_attention(q, k, v, (pk, pv, lengths), segments, **settings)

        def ours(q, k, v, pk, pv, segments=segments, lengths=lengths):
            prompts = Prefix(((pk, pv),), lengths)
            tile_mask = make_tile_mask((1, 1, SIZE), prompts, segments, kernel, windows={window, 77}, group=group)
            assert tile_mask.tiles[str(window)].keys.shape[-1] <= 9
            return tiled_attention(q, k, v, (pk, pv, lengths), tile_mask, kernel)

        @functools.partial(jax.jit, static_argnums=0)
        def whole(f, *given, there=there):
            weights = jnp.cos(jnp.arange(SIZE * D * group * 2.0)).reshape(given[0].shape) * there
            (_, out), grads = jax.value_and_grad(
                lambda *given: ((f(*given) * weights).sum(), f(*given)), range(5), has_aux=True
            )(*given)
            return out, grads

        (value, grads), (expected, reference) = whole(ours, *given), whole(plain, *(x.astype("float32") for x in given))
        assert np.isfinite(value.astype("float32")).all(), "also in padding"
        tolerance = 1e-5 if dtype == "float32" else 1e-2
        for x, y in zip((there * value, *grads), (there * expected, *reference), strict=True):
            scale = np.abs(y).max()
            np.testing.assert_allclose(x.astype("float32"), y, rtol=0, atol=tolerance * scale)
        assert not np.any(np.where(there, 0, grads[0])), "padding has no gradient"
