"""MXFP4: what four bits and a scale mean, and a checkpoint of gpt-oss that is read as bfloat16."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from test_families import raw_config, write_checkpoint

from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
from grpo_jax.hub.quantize import dequantize_mxfp4

E, D, WIDTH = 4, 64, 32  # in whole blocks of 32


def packed(shape, seed=0):
    """Blocks and scales of random weights [E, out, in], with every one of the 16 values in them."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:2], shape[2] // 32, 16), np.uint8)
    return blocks, rng.integers(119, 124, blocks.shape[:-1], np.uint8)


@pytest.mark.quick
def test_the_sixteen_values_of_the_format():
    """Table 5 of the OCP Microscaling specification 1.0 (E2M1), the lower four bits of a byte first."""
    blocks = np.array([[i | (i + 1) << 4 for i in range(0, 16, 2)] * 2], np.uint8)
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for scale in (127, 125, 130):
        weights = dequantize_mxfp4(blocks, np.array([scale], np.uint8))
        assert weights.dtype == jnp.bfloat16
        np.testing.assert_array_equal(weights.astype(np.float32), np.array(expected * 2) * 2.0 ** (scale - 127))


def test_a_checkpoint_in_mxfp4_is_read_and_saved_as_bfloat16(tmp_path):
    from safetensors.numpy import load_file, save_file

    raw = raw_config("gpt_oss") | {"hidden_size": D, "intermediate_size": WIDTH, "num_hidden_layers": 1}
    raw |= {"num_local_experts": E, "layer_types": None}
    directory = write_checkpoint(tmp_path / "model", raw)
    tensors = load_file(directory / "model.safetensors")
    stem = "model.layers.0.mlp.experts."
    expected = {}
    for name, shape in {"gate_up_proj": (E, 2 * WIDTH, D), "down_proj": (E, D, WIDTH)}.items():
        blocks, scales = packed(shape, seed=len(name))
        assert tensors.pop(stem + name).shape == (E, shape[2], shape[1])
        tensors |= {f"{stem}{name}_blocks": blocks, f"{stem}{name}_scales": scales}
        expected[name] = dequantize_mxfp4(blocks, scales).swapaxes(1, 2)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))

    policy = from_pretrained(directory, dtype="bfloat16")
    experts = policy.params["layers_0"]["mlp"]["experts"]
    np.testing.assert_array_equal(experts["gate_proj"], expected["gate_up_proj"][..., ::2])
    np.testing.assert_array_equal(experts["up_proj"], expected["gate_up_proj"][..., 1::2])
    np.testing.assert_array_equal(experts["down_proj"], expected["down_proj"])
    save_pretrained(tmp_path / "saved", policy)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = from_pretrained(tmp_path / "saved", dtype="bfloat16").params["layers_0"]["mlp"]["experts"]
    np.testing.assert_array_equal(again["gate_proj"], experts["gate_proj"])

    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=r"'quantization_config' is \{'quant_method': 'fp8'\}"):
        from_pretrained(directory)
