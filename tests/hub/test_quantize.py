"""Base models in 4 and 8 bits: quantized while loading, read from NF4 or MXFP4, and trained with adapters."""

import base64
import functools
import json
import operator
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_families import raw_config, rewrite, write_checkpoint

from grpo_jax import GRPOConfig, train
from grpo_jax.hub import weights
from grpo_jax.hub.files import computed
from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
from grpo_jax.hub.peft import add_lora, merge_lora
from grpo_jax.hub.quantize import Source, dequantize_mxfp4, dequantize_tensors, dynamic_levels, read_quantized
from grpo_jax.hub.tensors import ParamSlice
from grpo_jax.models.layers import NF4, Quantized
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import make_mesh
from grpo_jax.run.placement import place_policy
from grpo_jax.update.state import create_state

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
BITSANDBYTES = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": True,
}  # fmt: skip
# Three tensors stored by bitsandbytes and their dequantized float32 weights: blocks with nested scales, blocks that
# span the ends of rows, and blocks with plain scales. The weights are not from the CPU kernel of bitsandbytes, which in
# 0.50.2 starts a new block in each row.
GOLDEN = json.loads((Path(__file__).parent / "golden" / "nf4.json").read_text())


TOKENS = np.arange(24).reshape(4, 6) * 3
array = lambda entry: np.frombuffer(base64.b64decode(entry["data"]), entry["dtype"]).reshape(entry["shape"])
in_memory = lambda x: computed(Path(), x.shape, lambda first, count: x[first : first + count], x.dtype)
kernel = lambda policy, *path: functools.reduce(operator.getitem, path, policy.params["layers_0"])["kernel"]


def dequantized(name):
    return np.frombuffer(base64.b64decode(GOLDEN[name]["float32"]), np.float32).reshape(GOLDEN[name]["shape"])


def quantized(x, method):
    """Return a kernel [in, out] as `Quantized`."""
    source = Source(in_memory(np.asarray(x).T), 0, ParamSlice(("layers_0", "up_proj", "kernel"), x.shape))
    return read_quantized(x.shape, [source], method, "float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("quantize") / "model", QWEN3)


def with_nf4(checkpoint, change=lambda tensors: tensors, **config):
    """Replace two of a checkpoint's projections with tensors stored by bitsandbytes."""
    golden = {
        f"model.layers.0.self_attn.{name}.weight{part}": array(entry)
        for name in ("k_proj", "v_proj")
        for part, entry in GOLDEN[name]["parts"].items()
    }
    return rewrite(checkpoint, lambda tensors: change(tensors | golden), quantization_config=BITSANDBYTES | config)


@pytest.mark.quick
def test_nf4_rounds_to_the_nearest_value_in_blocks_of_64():
    x = np.random.default_rng(0).standard_normal((128, 6)).astype(np.float32)
    w = quantized(x, "nf4")
    blocks = x.T.reshape(6, 2, 64)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    nearest = NF4[np.abs(blocks[..., None] / largest[..., None] - NF4).argmin(axis=-1)]
    codes = np.stack([w.codes >> 4, w.codes & 15], axis=-1)
    np.testing.assert_array_equal(NF4[codes].reshape(6, 2, 64), nearest)
    # Quantizing the scales changes them, and with them the largest weight in each block.
    rows = np.asarray(w.rows(jnp.float32)).reshape(6, 2, 64)
    near = np.abs(rows).max(axis=2, keepdims=True)  # a block's largest weight maps to ±1
    np.testing.assert_allclose(near, largest, atol=0.02 * (largest.max() - largest.min()))
    assert np.abs(rows - nearest * near).max() < 1e-6
    assert w.codes.nbytes + w.scales.nbytes == 128 * 6 // 2 + 6 * 2
    stored = array(GOLDEN["k_proj"]["parts"][".nested_quant_map"])
    np.testing.assert_allclose(dynamic_levels(), stored, atol=1e-7)
    assert dynamic_levels().shape == (256,)


@pytest.mark.quick
def test_int8_rounds_each_row_to_127_steps_and_keeps_zeros():
    x = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
    x[:, 2] = 0
    w = quantized(x, "int8")
    assert np.abs(np.asarray(w.matrix()) - x).max() <= np.abs(x).max() / 254 * 1.001
    assert not np.asarray(w.matrix())[:, 2].any()
    assert not np.asarray(quantized(np.zeros((64, 3), np.float32), "nf4").matrix()).any()


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_base_is_quantized_while_loading(checkpoint, method, monkeypatch):
    plain = from_pretrained(checkpoint)
    monkeypatch.setattr("grpo_jax.hub.quantize.CHUNK", 5 * 64)  # a few rows at a time
    held = from_pretrained(checkpoint, quantize=method, dtype="bfloat16", param_dtype="float32")
    for path, width in ((("self_attn", "q_proj"), 64), (("mlp", "down_proj"), 128)):
        ours, theirs = kernel(held, *path), quantized(kernel(plain, *path), method)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        assert ours.shape == kernel(plain, *path).shape
        assert ours.block == (64 if method == "nf4" else width)
    assert held.params["embed_tokens"]["embedding"].dtype == "float32"
    assert not isinstance(held.params["lm_head"]["kernel"], Quantized)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["k_proj", "o_proj", "v_proj"])
def test_bitsandbytes_tensors_are_dequantized_exactly(name):
    weights = dequantized(name)
    parts = {f"w{part}": in_memory(array(x)) for part, x in GOLDEN[name]["parts"].items()}
    (plain,) = dequantize_tensors(parts).values()
    np.testing.assert_array_equal(plain.rows(0, len(weights)), weights)
    np.testing.assert_array_equal(plain.rows(3, 2), weights[3:5])


def test_bitsandbytes_checkpoint_is_dequantized_or_keeps_its_codes(checkpoint, tmp_path):
    directory = with_nf4(shutil.copytree(checkpoint, tmp_path / "nf4"))
    plain, held = from_pretrained(directory), from_pretrained(directory, quantize="nf4")
    assert "quantization_config" not in plain.config
    for name in ("k_proj", "v_proj"):
        weights = dequantized(name)
        np.testing.assert_array_equal(kernel(plain, "self_attn", name), weights.T)
        again = kernel(held, "self_attn", name)
        np.testing.assert_array_equal(again.codes.ravel(), array(GOLDEN[name]["parts"][""]).ravel())
        np.testing.assert_allclose(again.rows(jnp.float32), weights, rtol=0.02)  # the scales are quantized again


def without(part):
    return lambda tensors: {name: x for name, x in tensors.items() if not name.endswith("k_proj.weight" + part)}


@pytest.mark.parametrize(("change", "config", "message"), [
    (without(".absmax"), {}, r"nf4: 'model.*k_proj\.weight\.absmax' is missing"),
    (without(".nested_absmax"), {}, r"\.nested_absmax' is missing"),
    (lambda tensors: {name: x[:4] if name.endswith("k_proj.weight") else x for name, x in tensors.items()}, {},
        r"k_proj.weight' of shape \[8, 64\] must be .*'uint8'\); got uint8\[4, 1\]"),
    (without(".quant_state.bitsandbytes__nf4"), {}, r"unexpected: .*k_proj.weight.absmax"),
    (lambda tensors: tensors, {"bnb_4bit_quant_type": "fp4"}, "'quantization_config' is"),
    (lambda tensors: tensors, {"load_in_4bit": False, "load_in_8bit": True}, "'quantization_config' is"),
])  # fmt: skip
def test_other_formats_are_refused_before_weights_are_read(checkpoint, change, config, message, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_place", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match=message):
        from_pretrained(with_nf4(shutil.copytree(checkpoint, tmp_path / "nf4"), change, **config))


@pytest.mark.quick
def test_invalid_uses_of_quantization_are_refused(checkpoint, tmp_path):
    """Training and exporting quantized weights, unknown methods, and sizes that blocks do not fit are refused."""
    policy = from_pretrained(checkpoint, quantize="nf4")
    with pytest.raises(ValueError, match=r"policy.params are quantized.*add_lora\(policy, key\)"):
        train(policy, [{"prompt": "a"}], lambda completions: [0.0], GRPOConfig())
    with pytest.raises(ValueError, match=r"policy.params are quantized.*merge_lora"):
        save_pretrained(tmp_path / "copy", policy)
    assert not (tmp_path / "copy").exists()
    with pytest.raises(ValueError, match=r"params\['layers_0'\].*codes must have a float dtype .*; got uint8"):
        create_state(policy.params, None, jax.random.key(0))
    with pytest.raises(ValueError, match="quantize must be 'nf4', 'int8' or None; got 'int4'"):
        from_pretrained("nowhere", quantize="int4")
    write_checkpoint(tmp_path / "odd", {**QWEN3, "intermediate_size": 96})
    with pytest.raises(ValueError, match=r"rows of layers_0/mlp/down_proj/kernel have 96; use quantize='int8'"):
        from_pretrained(tmp_path / "odd", quantize="nf4")


def trained(policy, std=0.1, **options):
    """Return the policy with adapters as after training: B is not zero."""
    fresh = jax.eval_shape(lambda: add_lora(policy, jax.random.key(1), **{"rank": 2, **options}).params)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, std, x.shape).astype(np.float32)), fresh)
    return policy.replace(model=LoraModel(policy.params, policy.model, scale=2.0), params=params)


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_merged_adapters_add_no_error_to_the_base(checkpoint, method, tmp_path):
    """Merging adapters into a quantized base adds no error beyond the rounding of the base and of bfloat16."""
    plain, held = from_pretrained(checkpoint), from_pretrained(checkpoint, quantize=method)
    save_pretrained(tmp_path / "merged", merge_lora(trained(held)), dtype="bfloat16")
    exported = from_pretrained(tmp_path / "merged", dtype="bfloat16")
    exact = merge_lora(trained(plain))
    for path in (("self_attn", "q_proj"), ("mlp", "down_proj")):
        ours, wanted = (np.asarray(kernel(x, *path), np.float32) for x in (exported, exact))
        rounding = np.abs(np.asarray(kernel(held, *path).matrix()) - np.asarray(kernel(plain, *path)))
        # bfloat16 adds a relative error of 2^-9.
        assert (np.abs(ours - wanted) <= rounding + np.abs(ours) * 2.0**-8).all()


def test_quantized_experts_on_a_mesh_equal_the_dequantized_weights(tmp_path):
    raw = {**QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
    raw |= {"moe_intermediate_size": 128, "hidden_size": 128}
    write_checkpoint(tmp_path / "model", raw)
    policy = trained(from_pretrained(tmp_path / "model", quantize="nf4"))
    held = place_policy(policy, make_mesh({"fsdp": 2, "tensor": 2}))
    base = held.model.base["layers_0"]
    assert base["mlp"]["experts"]["up_proj"].shape == (4, 128, 128)
    assert base["self_attn"]["q_proj"]["kernel"].codes.sharding.spec == P("tensor", "fsdp")
    assert base["mlp"]["experts"]["down_proj"].codes.sharding.spec == P(None, "fsdp", "tensor")
    ours = jax.jit(lambda model, params: model.apply({"params": params}, TOKENS))(held.model, held.params)
    plain = jax.jit(policy.model.model.apply)({"params": merge_lora(held).params}, TOKENS)
    np.testing.assert_allclose(ours, plain, atol=1e-4)


# MXFP4


@pytest.mark.quick
def test_values_of_mxfp4_codes():
    """MXFP4 codes have the values in table 5 of OCP Microscaling 1.0 (E2M1); the lower 4 bits of a byte come first."""
    blocks = np.array([[i | (i + 1) << 4 for i in range(0, 16, 2)] * 2], np.uint8)
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for scale in (127, 125, 130):
        weights = dequantize_mxfp4(blocks, np.array([scale], np.uint8))
        assert weights.dtype == jnp.bfloat16
        np.testing.assert_array_equal(weights.astype(np.float32), np.array(expected * 2) * 2.0 ** (scale - 127))


def test_mxfp4_checkpoint_is_loaded_and_saved_as_bfloat16(tmp_path):
    rng, (experts, d, width) = np.random.default_rng(0), (4, 64, 32)  # multiples of the block size 32
    raw = raw_config("gpt_oss") | {"hidden_size": d, "intermediate_size": width, "num_hidden_layers": 1}
    raw |= {"num_local_experts": experts, "layer_types": None}
    directory = write_checkpoint(tmp_path / "model", raw)
    stem, packed, expected = "model.layers.0.mlp.experts.", {}, {}
    for name, shape in {"gate_up_proj": (experts, 2 * width, d), "down_proj": (experts, d, width)}.items():
        blocks = rng.integers(0, 256, (*shape[:2], shape[2] // 32, 16), np.uint8)
        scales = rng.integers(119, 124, blocks.shape[:-1], np.uint8)
        packed |= {f"{stem}{name}_blocks": blocks, f"{stem}{name}_scales": scales}
        expected[name] = dequantize_mxfp4(blocks, scales).swapaxes(1, 2)

    def pack(tensors):
        return {name: x for name, x in tensors.items() if name.removeprefix(stem) not in expected} | packed

    rewrite(directory, pack, quantization_config={"quant_method": "mxfp4"})
    policy = from_pretrained(directory, dtype="bfloat16")
    held = policy.params["layers_0"]["mlp"]["experts"]
    np.testing.assert_array_equal(held["gate_proj"], expected["gate_up_proj"][..., ::2])
    np.testing.assert_array_equal(held["up_proj"], expected["gate_up_proj"][..., 1::2])
    np.testing.assert_array_equal(held["down_proj"], expected["down_proj"])
    save_pretrained(tmp_path / "saved", policy)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = from_pretrained(tmp_path / "saved", dtype="bfloat16").params["layers_0"]["mlp"]["experts"]
    np.testing.assert_array_equal(again["gate_proj"], held["gate_proj"])
