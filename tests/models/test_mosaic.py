"""Attention kernels for Hopper GPUs: the same values and gradients as einsums, without races, in JAX's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params", reason="needs the interpreter of jax 0.10")
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

from grpo_jax.models import mosaic, tiles
from grpo_jax.models.attention import make_tile_mask, packed_attention, tiled_attention
from grpo_jax.models.context import Prefix
from grpo_jax.models.packing import SequenceShape, pack
from grpo_jax.models.tiles import Kernel

B, H, G, P, T, N, D = 2, 2, 3, 9, 12, 48, 8


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Interpret the kernels, with small tiles. Only products in registers and layouts are replaced."""

    def add_product(total, x, y):
        return total + jnp.dot(x.astype(y.dtype), y[...], preferred_element_type=jnp.float32)

    def product(x, y):
        return jnp.dot(x[...], y[...].T, preferred_element_type=jnp.float32)

    monkeypatch.setattr(mosaic, "HALF", 8)
    monkeypatch.setattr(mosaic, "_add_product", add_product)
    monkeypatch.setattr(mosaic, "_product", product)
    monkeypatch.setattr(mosaic, "_in_layout", lambda x, layout: x)
    monkeypatch.setattr(mosaic, "_indices", lambda shape, axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis))
    with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)):
        yield
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize(
    ("dtype", "window", "group", "sinks", "least_part"),
    [("float32", None, 3, False, 2), ("float32", 7, 1, True, 64), ("bfloat16", None, 2, False, 64)],
)
def test_random_packed_sequences(dtype, window, group, sinks, least_part, monkeypatch):
    """Several prompts, empty completions and padding in a sequence."""
    monkeypatch.setattr(tiles, "LEAST_PART", least_part)
    settings = {"scale": 0.3, "window": window}
    kernel = Kernel("mosaic", 16, 16, **settings)
    rng = np.random.default_rng(0)
    mask = np.arange(T) < rng.integers(0, T + 1, (B, G))[..., None]
    segments = pack(SequenceShape(N, 4, T, whole=True), np.ones(mask.shape, int), mask)[0].segments
    assert len(set(segments.prompt[0])) == 2, "two prompts in one sequence"
    there, lengths = np.reshape(segments.number >= 0, (1, 1, 1, N, 1, 1)), rng.integers(1, P + 1, B)
    shapes = (1, H, 1, N, group, D), (1, H, 1, N, D), (1, H, 1, N, D), (B, H, D, P), (B, H, P, D)
    given = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    given += [jnp.asarray(rng.standard_normal((H, group)), "float32")] if sinks else []
    weights = jnp.asarray(rng.standard_normal(shapes[0]) * there, dtype)

    def plain(q, k, v, pk, pv, sinks=None):
        return packed_attention(q, k, v, (pk, pv, lengths), segments, sinks=sinks, **settings)

    def ours(q, k, v, pk, pv, sinks=None):
        prompts = Prefix(((pk, pv),), lengths)
        tile_mask = make_tile_mask((1, 1, N), prompts, segments, kernel, windows={window}, group=group)
        return tiled_attention(q, k, v, (pk, pv, lengths), tile_mask, kernel, sinks=sinks)

    def gradients(f, *given):
        weighted = lambda *given: ((f(*given) * weights).sum(), f(*given))
        grads, out = jax.jit(jax.grad(weighted, range(len(given)), has_aux=True))(*given)
        return there * out, *grads

    expected = gradients(plain, *(x.astype("float32") for x in given))
    for x, y in zip(gradients(ours, *given), expected, strict=True):
        tolerance = (1e-5 if dtype == "float32" else 1e-2) * np.abs(y).max()
        np.testing.assert_allclose(x.astype("float32"), y, rtol=0, atol=tolerance)
