"""The attention kernel for a decode step gives the same values as materialized scores."""

import dataclasses

import jax
import numpy as np
import pytest
import test_turns
from test_fused import arrays
from tiny import random_params

from grpo_jax.models import block, fused_step
from grpo_jax.models.attention import group_attention
from grpo_jax.models.fused_step import has_step_kernel, step_attention
from grpo_jax.models.sharding import make_mesh
from grpo_jax.models.tiles import Kernel, implementation
from grpo_jax.models.transformer import Transformer

KERNEL = "triton" if implementation("auto") in ("triton", "mosaic") else "interpreted"
ONE = len(jax.devices()) < 4
B, H, G, R = 2, 2, 3, 2


def of_both(*, slots, p=40, d=16, index=5, start=None, window=None, soft_cap=None, sinks=False, axes=None, own=()):
    shapes = (B, H, G, 1, R, d), (B, H, G, d, slots), (B, H, G, slots, d), (B, H, d, p), (B, H, p, d), (H, R)
    q, k, v, pk, pv, scores = arrays(*shapes)
    sinks, lengths = scores if sinks else None, np.array([p, p // 3])
    # Unwritten slots must not be read: a NaN in them would appear in the sums.
    for x, at in zip((k, v), own, strict=False):
        x[(..., *at)] = np.nan
    mesh = None if axes is None else make_mesh(axes)
    kernel = Kernel(KERNEL, 0, 0, d**-0.5, window, soft_cap)
    places = {"index": index, "start": start}
    ours = jax.jit(lambda *x: step_attention(*x, (pk, pv, lengths), kernel=kernel, mesh=mesh, sinks=sinks, **places))
    how = {"scale": kernel.scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, **places}
    plain = jax.jit(lambda *x: group_attention(*x, (pk, pv, lengths), **how))
    return ours(q, k, v), plain(q, np.nan_to_num(k), np.nan_to_num(v))


MESH = {"fsdp": 2, "tensor": 2}
LATER = ((slice(None), slice(64, None)), (slice(64, None), slice(None)))


@pytest.mark.parametrize("given", [
    pytest.param({"slots": 512, "index": 300, "d": 64}, id="several tiles"),
    pytest.param({"slots": 50, "index": 49, "p": 37}, id="sizes that no tile divides"),
    pytest.param({"slots": 64, "index": 70, "start": np.array([20, 60])}, id="a wrapped ring buffer"),
    pytest.param({"slots": 64, "index": 40, "start": np.array([[0, 3, 40], [7, 39, 38]])}, id="a start for each"),
    pytest.param({"slots": 64, "index": 40, "window": 9, "soft_cap": 2.0}, id="a window, a soft cap"),
    pytest.param({"slots": 256, "index": 3, "window": 17, "d": 256, "sinks": True}, id="a window into the prompt"),
    pytest.param({"slots": 32, "index": np.array([4, 31]), "sinks": True}, id="an index per prompt, sinks"),
    pytest.param({"slots": 256, "index": 63, "d": 64, "own": LATER}, id="unwritten slots"),
    pytest.param({"slots": 64, "axes": MESH}, id="a mesh", marks=pytest.mark.skipif(ONE, reason="one device")),
])  # fmt: skip
def test_step_kernel_equals_materialized_scores(given):
    ours, plain = of_both(**given)
    np.testing.assert_allclose(ours, plain, atol=2e-6)


def test_step_kernel_in_several_turns(monkeypatch):
    """A rollout with several turns, where completions have their own slots, gives the same tokens with the kernel."""
    shape = dataclasses.replace(test_turns.SHAPE, num_layers=2, windows=(None, 9), mixers=None)
    params = random_params(Transformer(shape))
    plain, _ = test_turns.play(model=Transformer(shape), params=params)
    monkeypatch.setattr(fused_step, "LEAST_SIDE", 1)
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
