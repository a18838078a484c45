"""Attention kernels for Hopper GPUs: the same values and gradients as einsums, without races, in JAX's interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_devices import H100
from test_fused import arrays, assert_same, packed
from tiny import tiny_model

from grpo_jax import GRPOConfig
from grpo_jax.models import attention, attention_tiles
from grpo_jax.models.attention import mosaic_error
from grpo_jax.models.attention_tiles import Kernel, attention_implementation
from grpo_jax.models.packing import SequenceShape, pack
from grpo_jax.run import placement

B, H, G, P, T, N, D = 2, 1, 3, 8, 7, 24, 8


@pytest.fixture
def interpreted(monkeypatch):
    """Interpret the kernels, with small tiles. Products of registers and layouts, which it lacks, are replaced."""
    if jax.__version_info__ < (0, 10, 2):
        pytest.skip("needs the kernels and the interpreter of jax 0.10.2")
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

    from grpo_jax.models import mosaic

    def read(x):
        value = x[...]
        mosaic.plgpu.commit_smem()  # tensor cores read like copies; `x[...]` must be fenced from them
        return value

    def add_product(total, x, y):
        return total + jnp.dot(x.astype(y.dtype), read(y), preferred_element_type=jnp.float32)

    def product(x, y):
        return jnp.dot(read(x), read(y).T, preferred_element_type=jnp.float32)

    monkeypatch.setattr(mosaic, "HALF", 8)
    monkeypatch.setattr(mosaic, "_add_product", add_product)
    monkeypatch.setattr(mosaic, "_product", product)
    monkeypatch.setattr(mosaic, "_in_layout", lambda x, layout: x)
    monkeypatch.setattr(mosaic, "_indices", lambda shape, axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis))
    monkeypatch.setattr(attention_tiles, "MIN_PART", 1)
    with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)):
        yield
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.usefixtures("interpreted")
def test_random_packed_sequence():
    """Several prompts, empty completions and padding, with a window; two programs share the prompts' tile of keys."""
    mask = np.arange(T) < np.array([[7, 0, 3], [5, 1, 2]])[..., None]
    segments = pack(SequenceShape(N, 2, T, whole=True), np.ones(mask.shape, int), mask)[0].segments
    given = arrays((1, H, 1, N, 1, D), (1, H, 1, N, D), (1, H, 1, N, D), (B, H, D, P), (B, H, P, D))
    attention = packed(segments, np.array([P, 4]), lambda kind: Kernel(kind, 16, 16, 0.3, 6))
    assert_same(*attention, given, kinds=["mosaic"])


@pytest.mark.quick
@pytest.mark.parametrize("fault", [None, "differ by 50", "differ by 100", "differ by nan", "no such instruction"])
def test_output_and_gradients_of_the_kernels_are_compared_with_tiles(fault, monkeypatch):
    """A wrong output, a wrong gradient, a NaN in one gradient, and an error are reported."""

    def stand_in(q, k, v, prefix, tile_mask, kernel):
        if kernel.implementation == "mosaic" and fault == "no such instruction":
            raise NotImplementedError(fault)
        if kernel.implementation == "mosaic" and fault == "differ by 100":
            v = jax.lax.stop_gradient(v)
        if kernel.implementation == "mosaic" and fault == "differ by nan":
            v = jnp.sqrt(v * 0) + v  # the derivative of sqrt at 0 times 0 is NaN
        scale = 1.5 if kernel.implementation == "mosaic" and fault == "differ by 50" else 1
        out = q + (k + v)[..., None, :] + (prefix[0].sum() + prefix[1].sum()) / 100
        return out + jax.lax.stop_gradient(out * (scale - 1))

    monkeypatch.setattr(attention, "tiled_attention", stand_in)
    found = mosaic_error.__wrapped__(jax.devices()[0], 8)
    assert found is None if fault is None else fault in found


@pytest.mark.quick
def test_a_run_falls_back_to_other_kernels_if_they_disagree(monkeypatch):
    """The check is made once, on a device that is here, for models that the kernels support."""
    asked = []
    monkeypatch.setattr(placement, "mosaic_error", lambda device, width: asked.append(width) or "a reason")
    chosen_kernels = lambda name, devices: "mosaic" if name == "auto" else name
    monkeypatch.setattr(placement, "attention_implementation", chosen_kernels)
    model, _ = tiny_model()
    config = GRPOConfig(compute_dtype="bfloat16")

    def chosen(devices, attention="auto", **changes):
        one = model.clone(config=dataclasses.replace(model.config, attention=attention))
        return placement.with_settings(one, dataclasses.replace(config, **changes), devices).config.attention

    assert chosen([H100]) == chosen(jax.devices()[:1], compute_dtype="float32") == "mosaic"
    assert chosen(jax.devices()[:1], "mosaic") == "mosaic"
    assert asked == []
    with pytest.warns(UserWarning, match="do not work with jax .* a reason. Try another version"):
        assert chosen(jax.devices()[:1]) == "triton"
    assert asked == [model.config.head_dim]


@pytest.mark.skipif(attention_implementation("auto") != "mosaic", reason="needs a Hopper GPU")
@pytest.mark.parametrize("width", [64, 128])
def test_on_a_gpu(width):
    assert mosaic_error(jax.devices()[0], width) is None
