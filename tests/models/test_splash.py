"""Attention of packed sequences with JAX's splash attention kernels: the same values and gradients as einsums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from grpo_jax.models.attention import make_tile_mask, packed_attention, tiled_attention
from grpo_jax.models.attention_tiles import Kernel
from grpo_jax.models.context import Prefix
from grpo_jax.models.packing import SequenceShape, pack
from grpo_jax.models.sharding import make_mesh

B, H, G, P, T, N, D = 4, 2, 6, 40, 150, 928, 16


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Interpret the kernels, so that they run on CPUs."""
    kernel = splash_attention_kernel.SplashAttentionKernel
    on_cpu = lambda *infos, **settings: kernel(*infos, **settings | {"interpret": True})
    monkeypatch.setattr(splash_attention_kernel, "SplashAttentionKernel", on_cpu)


@pytest.mark.parametrize(("dtype", "window", "soft_cap", "group", "axes"), [
    ("float32", None, None, 3, None),
    pytest.param("float32", 30, 2.0, 1, None, marks=pytest.mark.quick),
    ("float32", 170, None, 2, {"data": 2, "tensor": 2}),
    ("bfloat16", None, None, 2, None),
])  # fmt: skip
def test_random_packed_sequences(dtype, window, soft_cap, group, axes):
    """Several prompts, empty completions and padding, in one sequence or in one per device of a mesh."""
    kernel, mesh, a = Kernel("splash", 128, 128, 0.3, window, soft_cap), axes and make_mesh(axes), 2 if axes else 1

    def plain(segments, lengths, q, k, v, pk, pv):
        return packed_attention(q, k, v, (pk, pv, lengths), segments, kernel)

    def ours(segments, lengths, q, k, v, pk, pv):
        prompts = Prefix(((pk, pv),), lengths)
        tile_mask = make_tile_mask((a, 1, N), prompts, segments, kernel, windows={window, 77}, queries_per_kv=group)
        assert tile_mask.tiles[str(window)].keys.shape[-1] <= 4 + 3, "tiles for 128 + T own keys, and for all prompts"
        return tiled_attention(q, k, v, (pk, pv, lengths), tile_mask, kernel, mesh)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(f, weights, segments, lengths, *given):
        weighted = lambda *given: ((f(segments, lengths, *given) * weights).sum(), f(segments, lengths, *given))
        return jax.grad(weighted, range(5), has_aux=True)(*given)

    rng = np.random.default_rng(0)
    mask = np.arange(T) < rng.integers(0, 1 + rng.choice([20, T], (B, G)))[..., None]
    segments = pack(SequenceShape(N, 16, T, whole=False), np.ones(mask.shape, int), mask, shards=a)[0].segments
    assert all(len(set(prompts)) > 1 for prompts in segments.prompt)
    assert (segments.number < 0).any()
    there = np.reshape(segments.number >= 0, (a, 1, 1, N, 1, 1))
    shapes = (a, H, 1, N, group, D), (a, H, 1, N, D), (a, H, 1, N, D), (B, H, D, P), (B, H, P, D)
    weights = rng.standard_normal(shapes[0]) * there
    given = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    fixed = jnp.asarray(weights, dtype), segments, rng.integers(1, P + 1, B)
    grads, out = gradients(ours, *fixed, *given)
    expected_grads, expected = gradients(plain, *fixed, *(x.astype("float32") for x in given))
    assert np.isfinite(out.astype("float32")).all(), "padding is finite too"
    assert not np.any(np.where(there, 0, grads[0])), "padding has no gradient"
    for x, y in zip((there * out, *grads), (there * expected, *expected_grads), strict=True):
        tolerance = (1e-5 if dtype == "float32" else 1e-2) * np.abs(y).max()
        np.testing.assert_allclose(x.astype("float32"), y, rtol=0, atol=tolerance)
