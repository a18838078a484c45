"""Models that also see: their language model is loaded, and the rest goes through an export byte for byte."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_families import GEMMA4, SHAPE, SLIDING, WINDOW, YARN, T, numpy_weight, raw_config, write_checkpoint

from grpo_jax.hub.families import FAMILIES, family_of, read_config
from grpo_jax.hub.files import stored_tensors
from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
from grpo_jax.hub.peft import add_lora, save_lora
from grpo_jax.hub.policy import init_policy
from grpo_jax.hub.seeing import SEEING
from grpo_jax.hub.tensors import LAYOUTS, tensor_plan

TEXT = {
    "gemma3": ("Gemma3ForConditionalGeneration", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING}),
    "gemma4": ("Gemma4ForConditionalGeneration", {**GEMMA4, "pad_token_id": 0}),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", "head_dim": 12, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
    ),
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
TOWER = {
    "vision_tower.patches.weight": np.arange(12, dtype=np.float16).reshape(3, 4),
    "vision_tower.codes": np.arange(5, dtype=np.uint8),
    "vision_tower.position_ids": np.arange(4)[None],
    "multi_modal_projector.scale": np.full(3, 1.5).astype(jnp.float8_e4m3fn),
}


# What the classes of transformers are made with, beside the language model.
GEMMA4_AUDIO = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 12}
GEMMA4_AUDIO |= {"subsampling_conv_channels": [4, 4]}
BESIDE = {
    "gemma3": {
        "vision_config": VISION,
        **{"image_token_index": 60, "mm_tokens_per_image": 4, "boi_token_index": 61, "eoi_token_index": 62},
    },
    "gemma4": {
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8, "standardize": True},
        "audio_config": GEMMA4_AUDIO,
        **{"image_token_id": 60, "video_token_id": 61, "audio_token_id": 62},
    },
    "mistral3": {"vision_config": {**VISION, "head_dim": 8, "model_type": "pixtral"}, "image_token_index": 60},
}


def raw_of(name, **fields):
    architecture, text = TEXT[name]
    return {"architectures": [architecture], "text_config": {**SHAPE, **text, **fields}, "dtype": "float32"}


def write(directory, name, *, layout=1, tower=TOWER, **fields):
    """A checkpoint whose tower is a few tensors of other dtypes."""
    from safetensors.numpy import save_file

    directory.mkdir()
    raw = raw_of(name, **fields)
    plan = tensor_plan(raw, read_config(raw), layout)
    before = "model." if layout == 0 else ""
    tensors = {t.name: numpy_weight(t.name, t.shape) for t in plan} | {before + n: x for n, x in tower.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "preprocessor_config.json").write_text('{"size":  3}')
    return directory


def bytes_of(directory):
    return {name: tensor.mapped().tobytes() for name, tensor in stored_tensors(directory).items()}


@pytest.mark.quick
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("name", list(TEXT))
def test_what_is_beside_the_language_model_passes_through(tmp_path, name, layout):
    """Also where the checkpoint is replaced by the export itself, and in a lower precision of the language model."""
    directory = write(tmp_path / "model", name, layout=layout, tie_word_embeddings=False)
    before = bytes_of(directory)
    policy = from_pretrained(directory)
    assert len(policy.beside) == len(TOWER)
    save_pretrained(tmp_path / "half", policy, dtype="bfloat16", max_shard_size="10KB")
    save_pretrained(directory, policy, max_shard_size="10KB")
    assert bytes_of(directory) == before
    assert (directory / "preprocessor_config.json").read_text() == '{"size":  3}'
    assert len(list(directory.glob("*.safetensors"))) > 1
    half = bytes_of(tmp_path / "half")
    prefix = LAYOUTS[layout][0]
    assert {len(before[n]) // len(half[n]) for n in before if n.startswith(prefix)} == {2}
    assert all(half[n] == before[n] for n in policy.beside)


@pytest.mark.quick
def test_the_language_model_is_that_of_its_own_class(tmp_path):
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


@pytest.mark.quick
def test_the_checkpoint_says_whether_the_head_is_the_embedding(tmp_path):
    assert not from_pretrained(write(tmp_path / "own", "mistral3")).model.config.tie_word_embeddings
    tied = from_pretrained(write(tmp_path / "tied", "mistral3", tie_word_embeddings=True))
    assert tied.model.config.tie_word_embeddings
    unsaid = json.loads((tmp_path / "tied" / "config.json").read_text())
    del unsaid["text_config"]["tie_word_embeddings"]
    (tmp_path / "tied" / "config.json").write_text(json.dumps(unsaid))
    assert from_pretrained(tmp_path / "tied").config["tie_word_embeddings"]


@pytest.mark.quick
def test_sparse_configs_mean_what_transformers_means():
    """As the 4B model of Gemma 3 has it: no vocabulary, no heads."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = read_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text | scaling})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.tie_word_embeddings
    assert config.rope.kind == "linear"


@pytest.mark.quick
def test_what_cannot_be_is_named(tmp_path):
    raw = raw_of("gemma3")
    with pytest.raises(ValueError, match=r"'text_config.model_type' is 'llama'.*'gemma3_text'"):
        read_config({**raw, "text_config": {**raw["text_config"], "model_type": "llama"}})
    with pytest.raises(ValueError, match="'hidden_size' is 0"):
        read_config(raw_of("mistral3", hidden_size=0))
    with pytest.raises(ValueError, match=r"'quantization_config' is .*fp8"):
        read_config({**raw, "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ValueError, match=r"'architectures' is .*use \['Gemma3ForCausalLM'\]"):
        init_policy(raw, jax.random.key(0))
    stray = {"language_model.model.layers.9.mlp.up_proj.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(ValueError, match=r"unexpected: language_model.model.layers.9"):
        from_pretrained(write(tmp_path / "stray", "gemma3", tower=stray))
    alone = from_pretrained(write_checkpoint(tmp_path / "text", raw_config("gemma3")))
    with pytest.raises(ValueError, match="beside is empty"):
        save_pretrained(tmp_path / "out", alone.replace(config=raw))


@pytest.mark.parametrize("name", list(TEXT))
def test_logits_and_exported_bytes_are_those_of_pytorch(tmp_path, name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    raw = raw_of(name)
    kind = getattr(transformers, raw["architectures"][0])
    config = kind.config_class(text_config=raw["text_config"], **BESIDE[name])
    model = kind(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            weight = numpy_weight(path, tuple(parameter.shape))
            learned = len(weight) ** -0.5 if name == "gemma4" and "q_norm" in path else 1.0
            parameter.copy_(torch.tensor(weight * np.float32(learned)))
    model.save_pretrained(tmp_path / "theirs")
    policy = from_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(7).integers(0, 60, (2, T))
    ours = jax.jit(policy.model.apply)({"params": policy.params}, tokens)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
        row = torch.tensor(tokens[:1])
        text = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=8, do_sample=False)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert int(ours[0, -1].argmax()) == int(text[0, T])
    save_pretrained(tmp_path / "ours", policy, max_shard_size="10KB")
    before, after = model.state_dict(), kind.from_pretrained(tmp_path / "ours").state_dict()
    assert before.keys() == after.keys()
    assert all(x.numpy().tobytes() == after[path].numpy().tobytes() for path, x in before.items())


@pytest.mark.quick
def test_each_model_that_sees_has_its_case():
    assert {architecture for architecture, _ in TEXT.values()} == set(SEEING)
