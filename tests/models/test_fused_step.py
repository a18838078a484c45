"""The attention kernel for a decode step gives the same values as materialized scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_turns
from test_fused import arrays
from tiny import random_params

from grpo_jax.models import block, fused_step
from grpo_jax.models.attention import group_attention
from grpo_jax.models.attention_tiles import Kernel, attention_implementation
from grpo_jax.models.fused_step import NormAndRope, has_step_kernel, step_attention
from grpo_jax.models.layers import unit_rms
from grpo_jax.models.rope import Rope, rope_table, rotate
from grpo_jax.models.sharding import make_mesh
from grpo_jax.models.transformer import Transformer

KERNEL = "triton" if attention_implementation("auto") in ("triton", "mosaic") else "interpreted"
ONE = len(jax.devices()) < 4
B, H, G, R = 2, 2, 3, 2


def of_both(*, slots, p=40, d=16, index=5, start=None, window=None, soft_cap=None, sinks=False, axes=None, own=(),
            rope=None, norms=False, write=None, cached=False):  # fmt: skip
    """Return outputs and caches of the kernel, and of separate norms, rotation, writing and materialized scores."""
    shapes = (B, G, H, R, d), (B, G, H, d), (B, G, H, d), (B, H, G, d, slots), (B, H, G, slots, d)
    q, k, v, keys, values, pk, pv, scores, *scales = arrays(*shapes, (B, H, d, p), (B, H, p, d), (H, R), (d,), (d,))
    lengths, sinks = np.array([p, p // 3]), scores if sinks else None
    # Unwritten slots must not be read: a NaN in them would appear in the sums.
    for x, at in zip((keys, values), own, strict=False):
        x[(..., *at)] = np.nan
    position = lengths[:, None] + np.arange(G)[None]
    table = rope and rope_table(jnp.asarray(position[:, :, None]), rope, d)
    how = NormAndRope(tuple(scales) if norms else None, table, 1e-6, 0.5, rope.pairs if rope else False)
    mesh = None if axes is None else make_mesh(axes)
    kernel = Kernel(KERNEL, 0, 0, d**-0.5, window, soft_cap)
    places, prefix = {"index": index, "start": start}, (pk, pv, lengths)

    @jax.jit
    def ours(q, k, v, keys, values):
        new = None if cached else (k, v)
        return step_attention(q, new, (keys, values), prefix, how, write=write, kernel=kernel, mesh=mesh, sinks=sinks,
                              **places)  # fmt: skip

    @jax.jit
    def plain(q, k, v, keys, values):
        def prepared(x, scale):
            x = unit_rms(x, 1e-6) * (scale + 0.5).reshape(1, 1, 1, 1, d) if norms else x
            return rotate(x, table, pairs=rope.pairs) if rope else x

        q = prepared(q.reshape(B, G, 1, H * R, d), scales[0]).reshape(B, G, H, R, d).swapaxes(1, 2)[:, :, :, None]
        if not cached:
            k = prepared(k[:, :, None], scales[1])[:, :, 0].swapaxes(1, 2)
            slot = np.broadcast_to(np.reshape(index, (-1, 1, 1, 1, 1)) % slots, (B, 1, 1, 1, 1))
            kept = True if write is None else write[:, None, :, None, None]
            keys = jnp.where((jnp.arange(slots).reshape(1, 1, 1, 1, -1) == slot) & kept, k[..., None], keys)
            v = v.swapaxes(1, 2)[:, :, :, None]
            values = jnp.where((jnp.arange(slots).reshape(1, 1, 1, -1, 1) == slot) & kept, v, values)
        given = jnp.nan_to_num(keys), jnp.nan_to_num(values), prefix
        out = group_attention(q, *given, kernel=kernel, sinks=sinks, **places)
        return out[:, :, :, 0].swapaxes(1, 2), (keys, values)

    return ours(q, k, v, keys, values), plain(q, k, v, keys, values)


MESH = {"fsdp": 2, "tensor": 2}
LATER = ((slice(None), slice(64, None)), (slice(64, None), slice(None)))
WRITE = np.array([[True, False, True], [False, True, True]])


@pytest.mark.parametrize("given", [
    pytest.param({"slots": 512, "index": 300, "d": 64, "rope": Rope()}, id="several tiles"),
    pytest.param({"slots": 50, "index": 49, "p": 37, "cached": True}, id="sizes that no tile divides, a shared cache"),
    pytest.param({"slots": 64, "index": 70, "start": np.array([[20], [60]])}, id="a wrapped ring buffer"),
    pytest.param({"slots": 64, "index": 40, "start": np.array([[0, 3, 40], [7, 39, 38]])}, id="a start for each"),
    pytest.param({"slots": 64, "index": 40, "window": 9, "soft_cap": 2.0, "norms": True}, id="a window, a cap, norms"),
    pytest.param({"slots": 256, "index": 3, "window": 17, "d": 256, "sinks": True}, id="a window into the prompt"),
    pytest.param({"slots": 32, "index": np.array([4, 31]), "sinks": True}, id="an index per prompt, sinks"),
    pytest.param({"slots": 256, "index": 63, "d": 64, "own": LATER, "write": WRITE}, id="unwritten slots"),
    pytest.param({"slots": 64, "rope": Rope(pairs=True, fraction=0.5), "norms": True}, id="part of the channels"),
    pytest.param({"slots": 64, "axes": MESH, "rope": Rope(fraction=0.5), "norms": True}, id="a mesh",
                 marks=pytest.mark.skipif(ONE, reason="one device")),
])  # fmt: skip
def test_step_kernel_equals_materialized_scores(given):
    (ours, cache), (plain, written) = of_both(**given)
    real = np.ones(plain.shape[:2], bool) if "write" not in given else given["write"]
    np.testing.assert_allclose(ours[real], plain[real], atol=2e-6)
    for x, y in zip(cache, written, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_step_kernel_in_several_turns(monkeypatch):
    """A rollout with several turns, where completions have their own slots, gives the same tokens with the kernel."""
    shape = dataclasses.replace(test_turns.SHAPE, num_layers=2, windows=(None, 9), mixers=None)
    params = random_params(Transformer(shape))
    plain, _ = test_turns.play(model=Transformer(shape), params=params)
    monkeypatch.setattr(fused_step, "MIN_TILE_SIDE", 1)
    model = Transformer(dataclasses.replace(shape, attention="interpreted"))
    steps, own = [], fused_step.step_attention
    monkeypatch.setattr(block, "step_attention", lambda *given, **how: (steps.append(1), own(*given, **how))[1])
    ours, _ = test_turns.play(model=model, params=params)
    assert steps
    assert (ours.tokens == plain.tokens).all()
    np.testing.assert_allclose(ours.log_probs, plain.log_probs, atol=1e-5)


@pytest.mark.quick
def test_step_kernel_needs_many_completions_and_supported_sizes():
    def has(**other):
        return has_step_kernel("triton", **{"head_dim": 64, "keys": (512, 100), "programs": 128} | other)

    assert has()
    assert not any(has(**one) for one in ({"head_dim": 80}, {"head_dim": 512}, {"keys": (512, 8)}, {"programs": 64}))
    assert not has_step_kernel("einsum", head_dim=64, keys=(64, 64), programs=128)
