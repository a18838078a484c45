"""Multimodal models: their language model is loaded, and an export preserves all other tensors byte for byte."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_families as texts
from test_quantize import BITSANDBYTES, GOLDEN, array, dequantized

from grpo_jax.hub.families import FAMILIES, family_of, read_config
from grpo_jax.hub.files import stored_tensors
from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
from grpo_jax.hub.keys import VISION_MODELS
from grpo_jax.hub.peft import add_lora, save_lora
from grpo_jax.hub.policy import init_policy
from grpo_jax.hub.tensors import prefixes_of, tensor_plan

TEXT = {
    "gemma3": ("Gemma3ForConditionalGeneration", {"head_dim": 16, "sliding_window": texts.WINDOW,
        "layer_types": texts.SLIDING}),
    "gemma4": ("Gemma4ForConditionalGeneration", {**texts.GEMMA4, "pad_token_id": 0}),
    "mistral3": ("Mistral3ForConditionalGeneration", {"model_type": "ministral3", "head_dim": 12,
        "rope_parameters": {**texts.YARN, "llama_4_scaling_beta": 0.5}}),
}  # fmt: skip
# Interleaved positions of three kinds, which are equal for text.
TURNS = {"rope_type": "default", "rope_theta": 1e5, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
HYBRID = {**texts.HYBRID, "layer_types": texts.DELTA, "rope_parameters": {**TURNS, "partial_rotary_factor": 0.5}}
TEXT |= {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", {"model_type": "qwen3_5_text", **HYBRID}),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", {"model_type": "qwen3_5_moe_text", **HYBRID, **texts.SPARSE}),
}  # fmt: skip
TEXT |= {name: (f"{prefix}ForConditionalGeneration", {"model_type": "llama", "rms_norm_eps": 1e-5})
    for name, prefix in {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}.items()}  # fmt: skip
TEXT["qwen2_5_vl"] = ("Qwen2_5_VLForConditionalGeneration", {"model_type": "qwen2_5_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}})  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
QWEN_VISION |= {"num_position_embeddings": 16, "patch_size": 4}
GEMMA4_AUDIO = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 12}
GEMMA4_AUDIO |= {"subsampling_conv_channels": [4, 4]}
OF_CLASS = {
    "gemma3": {"mm_tokens_per_image": 4, "boi_token_index": 61, "eoi_token_index": 62, "vision_config": VISION},
    "gemma4": {"vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8, "standardize": True},
        "audio_config": GEMMA4_AUDIO, **{"image_token_id": 60, "video_token_id": 61, "audio_token_id": 62}},
    "mistral3": {"vision_config": {**VISION, "head_dim": 8, "model_type": "pixtral"}},
    "qwen3_5": {"image_token_id": 60, "vision_config": QWEN_VISION},
    "qwen3_5_moe": {"image_token_id": 60, "vision_config": QWEN_VISION},
    "idefics3": {"image_token_id": 60, "vision_config": VISION},
    "smolvlm": {"image_token_id": 60, "vision_config": VISION},
    "qwen2_5_vl": {"image_token_id": 60, "vision_config": {**QWEN_VISION, "num_heads": 2, "window_size": 16}},
}  # fmt: skip
TOWER = {
    "mtp.layers.0.mlp.experts.down_proj": np.ones((2, 3, 4), np.float32),
    "vision_tower.patches.weight": np.arange(12, dtype = np.float16).reshape(3, 4),
    "vision_tower.codes": np.arange(5, dtype = np.uint8), "vision_tower.position_ids": np.arange(4) [None],
    "multi_modal_projector.scale": np.full(3, 1.5).astype(jnp.float8_e4m3fn),
}  # fmt: skip
bytes_of = lambda directory: {name: tensor.to_numpy().tobytes() for name, tensor in stored_tensors(directory).items()}


def raw_of(name, **fields):
    architecture, text = TEXT[name]
    return {"architectures": [architecture], "text_config": {**texts.SHAPE, **text, **fields}, "dtype": "float32"}


def write(directory, name, *, layout=1, stacked=False, tower=TOWER, **fields):
    """Write a checkpoint whose tower is a few tensors with other dtypes."""
    from safetensors.numpy import save_file

    directory.mkdir()
    raw = raw_of(name, **fields)
    plan = tensor_plan(raw, read_config(raw), layout, stacked=stacked)
    start = ("model.visual.", "", "visual.")[layout]
    named = {n if n.startswith("mtp") else start + n: x for n, x in tower.items()}
    tensors = {t.name: texts.numpy_weight(t.name, t.shape) for t in plan} | named
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "preprocessor_config.json").write_text('{"size":  3}')
    return directory


@pytest.mark.parametrize(
    ("name", "layout"),
    [(n, i) for n in TEXT for i in {"idefics3": (0,), "smolvlm": (0,), "qwen2_5_vl": (0, 2)}.get(n, (0, 1))],
)
def test_export_preserves_non_language_tensors(tmp_path, name, layout):
    """An export preserves non-language tensors, even if it replaces its source or stores bfloat16 weights."""
    directory = write(tmp_path / "model", name, layout=layout, tie_word_embeddings=False)
    before = bytes_of(directory)
    policy = from_pretrained(directory)
    assert len(policy.extra_tensors) == len(TOWER)
    save_pretrained(tmp_path / "half", policy, dtype="bfloat16", max_shard_size="10KB")
    save_pretrained(directory, policy, max_shard_size="10KB")
    assert bytes_of(directory) == before
    assert (directory / "preprocessor_config.json").read_text() == '{"size":  3}'
    assert len(list(directory.glob("*.safetensors"))) > 1
    half = bytes_of(tmp_path / "half")
    prefix = prefixes_of(policy.config, layout)[0]
    assert {len(before[n]) // len(half[n]) for n in before if n.startswith(prefix)} == {2}
    assert all(half[n] == before[n] for n in policy.extra_tensors)


def test_quantized_tower_is_dequantized(tmp_path):
    stored = {f"vision_tower.fc1.weight{part}": array(x) for part, x in GOLDEN["k_proj"]["parts"].items()}
    directory = write(tmp_path / "model", "gemma3", tower=TOWER | stored)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": BITSANDBYTES}))
    save_pretrained(tmp_path / "out", from_pretrained(directory))
    found = stored_tensors(tmp_path / "out")
    assert sum("vision_tower" in name for name in found) == sum("vision_tower" in name for name in TOWER) + 1
    np.testing.assert_array_equal(found["vision_tower.fc1.weight"].to_numpy(), dequantized("k_proj"))


def test_stacked_experts_keep_their_layout(tmp_path):
    """Stacked experts (as on the hub, gate and up in one tensor per layer) load like separate ones and stay stacked."""
    from safetensors.numpy import load_file, save_file

    tower = {name: x for name, x in TOWER.items() if name.startswith("mtp")}
    stacked = write(tmp_path / "stacked", "qwen3_5_moe", layout=0, stacked=True, tower=tower)
    tensors = load_file(stacked / "model.safetensors")
    whole = "model.language_model.layers.1.mlp.experts"
    assert tensors[f"{whole}.gate_up_proj"].shape == (6, 2 * 24, 32)
    apart = {name: x for name, x in tensors.items() if ".mlp.experts." not in name or name.startswith("mtp")}
    for name in set(tensors) - set(apart):
        stem, kind = name.rsplit(".", 1)
        for e, expert in enumerate(tensors[name]):
            parts = dict(gate_proj=expert[:24], up_proj=expert[24:]) if kind == "gate_up_proj" else {kind: expert}
            apart |= {f"{stem}.{e}.{part}.weight": np.ascontiguousarray(x) for part, x in parts.items()}
    (tmp_path / "apart").mkdir()
    save_file(apart, tmp_path / "apart" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "apart" / "config.json").write_bytes((stacked / "config.json").read_bytes())
    for quantize in (None, "int8"):
        ours, theirs = (from_pretrained(tmp_path / name, quantize=quantize) for name in ("stacked", "apart"))
        jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    for directory in (stacked, tmp_path / "apart"):
        before = bytes_of(directory)
        save_pretrained(directory, from_pretrained(directory))
        assert bytes_of(directory) == before


@pytest.mark.quick
def test_language_model_equals_that_of_its_text_class_with_its_head(tmp_path):
    directory = write(tmp_path / "sees", "mistral3")
    seeing = from_pretrained(directory)
    alone = {**raw_of("mistral3")["text_config"], "architectures": ["Ministral3ForCausalLM"]}
    assert seeing.model.config == read_config(alone)
    assert family_of(seeing.config) is FAMILIES["Ministral3ForCausalLM"]
    assert seeing.replace(config={**seeing.config, "text_config": {"eos_token_id": 7}}).eos_token_ids == (7,)
    adapted = add_lora(seeing, jax.random.key(0), rank=2)
    save_lora(tmp_path / "lora", adapted)
    names = stored_tensors(tmp_path / "lora", "adapter_model")
    assert "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in names
    targets = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["target_modules"]
    assert all(name.startswith("model.language_model.layers.") for name in targets), "PEFT must not adapt the tower"
    assert not from_pretrained(write(tmp_path / "own", "mistral3")).model.config.tie_word_embeddings
    tied = from_pretrained(write(tmp_path / "tied", "mistral3", tie_word_embeddings=True))
    assert tied.model.config.tie_word_embeddings
    (tmp_path / "tied" / "config.json").write_text(json.dumps(raw_of("mistral3")))  # without the key
    assert from_pretrained(tmp_path / "tied").config["tie_word_embeddings"]


@pytest.mark.quick
def test_invalid_multimodal_models_are_refused(tmp_path):
    assert {architecture for architecture, _ in TEXT.values()} == set(VISION_MODELS), "each class needs a case"
    raw = raw_of("gemma3")
    with pytest.raises(ValueError, match=r"'text_config.model_type' must be .*'gemma3_text'; got 'llama'"):
        read_config({**raw, "text_config": {**raw["text_config"], "model_type": "llama"}})
    with pytest.raises(ValueError, match=r"'architectures' must be \['Gemma3ForCausalLM'\], the text model"):
        init_policy(raw, jax.random.key(0))
    stray = {"language_model.model.layers.9.mlp.up_proj.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(ValueError, match=r"unexpected: language_model.model.layers.9"):
        from_pretrained(write(tmp_path / "stray", "gemma3", tower=stray))


@pytest.mark.parametrize("name", list(TEXT))
def test_logits_and_exported_bytes_equal_pytorch(tmp_path, name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import transformers

    raw = raw_of(name)
    kind = getattr(transformers, raw["architectures"][0])
    picture = {} if "image_token_id" in OF_CLASS[name] else {"image_token_index": 60}
    config = kind.config_class(text_config=raw["text_config"], **OF_CLASS[name], **picture)
    model = kind(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            weight = texts.numpy_weight(path, tuple(parameter.shape))
            learned = len(weight) ** -0.5 if name == "gemma4" and "q_norm" in path else 1.0
            parameter.copy_(torch.tensor(weight * np.float32(learned)))
    model.save_pretrained(tmp_path / "theirs", save_original_format=name != "qwen3_5_moe")
    policy = from_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(7).integers(0, 60, (2, texts.T))
    ours = jax.jit(policy.model.apply)({"params": policy.params}, tokens)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
        row = torch.tensor(tokens[:1])
        text = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=8, do_sample=False)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert int(ours[0, -1].argmax()) == int(text[0, texts.T])
    save_pretrained(tmp_path / "ours", policy, max_shard_size="10KB")
    before, after = model.state_dict(), kind.from_pretrained(tmp_path / "ours").state_dict()
    assert before.keys() == after.keys()
    assert all(x.numpy().tobytes() == after[path].numpy().tobytes() for path, x in before.items())
