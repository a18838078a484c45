"""Tiny vision-language checkpoints of each family: random weights, a tokenizer and processor files, without PyTorch."""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from grpo_jax.hub.families import read_config
from grpo_jax.hub.tensors import tensor_plan

FAMILIES = ("gemma3", "idefics3", "smolvlm", "qwen2_5_vl")
"""Idefics 3 splits images into tiles of 28 x 28 pixels; SmolVLM's processor is configured not to."""

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
QWEN = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 28, "out_hidden_size": 32, "fullatt_block_indexes": [1],
    "hidden_act": "silu",
}  # fmt: skip

SPECIAL = {
    "gemma3": ("<pad>", "<bos>", "<end_of_turn>", "<start_of_turn>", "<start_of_image>", "<end_of_image>",
        "<image_soft_token>"),
    "idefics3": ("<|im_end|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>",
        "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))),
    "qwen2_5_vl": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
        "<|image_pad|>", "<|video_pad|>"),
}  # fmt: skip
"""Special tokens of each family: padding first, EOS third. Their ids are 0, 1, ... in this order."""
SPECIAL["smolvlm"] = SPECIAL["idefics3"]

MESSAGE = (
    "{% for m in messages %}START{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}END\n{% endfor %}{% if add_generation_prompt %}{{ 'GENERATE' }}{% endif %}"
)
TEMPLATES = {
    "gemma3": "{{ bos_token }}" + MESSAGE.replace("START", "{{ '<start_of_turn>' + m['role'] + '\n' }}")
    .replace("IMAGE", "<start_of_image>").replace("END", "<end_of_turn>")
    .replace("GENERATE", "<start_of_turn>model\n"),
    "idefics3": "<|im_start|>" + MESSAGE.replace("START", "{{ m['role'] | capitalize + ':' }}")
    .replace("IMAGE", "<image>").replace("END", "<end_of_utterance>").replace("GENERATE", "Assistant:"),
    "qwen2_5_vl": MESSAGE.replace("START", "{{ '<|im_start|>' + m['role'] + '\n' }}")
    .replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>").replace("END", "<|im_end|>")
    .replace("GENERATE", "<|im_start|>assistant\n"),
}  # fmt: skip
TEMPLATES["smolvlm"] = TEMPLATES["idefics3"]

NORMALIZED = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
SPLIT = {"max_image_size": {"longest_edge": 28}, "size": {"longest_edge": 56}, "do_pad": True, "resample": 1}
PREPROCESSOR = {
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor",
        "do_pan_and_scan": None, "size": {"height": 28, "width": 28}, "resample": 2, "image_seq_length": 4},
    "idefics3": {"image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor", **SPLIT,
        "do_image_splitting": True},
    "smolvlm": {"image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor", **SPLIT,
        "do_image_splitting": False},
    "qwen2_5_vl": {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 14 * 14, "max_pixels": 56 * 56, "patch_size": 7, "merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip
PROCESSOR = {
    "gemma3": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
    "idefics3": {"image_seq_len": 4, "processor_class": "Idefics3Processor"},
    "smolvlm": {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
    "qwen2_5_vl": None,
}
ROLES = {
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    "idefics3": {"image_token": "<image>"},
    "smolvlm": {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"},
    "qwen2_5_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
}  # fmt: skip


def vision_config(family):
    """Return the config.json of a family. Qwen2.5-VL's is flat, as on the hub."""
    special = {token: i for i, token in enumerate(SPECIAL[family])}
    text = {**TEXT, "vocab_size": len(vocabulary(family)), "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    if family == "gemma3":
        text |= {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        text |= {"num_hidden_layers": 2, "query_pre_attn_scalar": 16, "model_type": "gemma3_text"}
        config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "mm_tokens_per_image": 4}
        config |= {"vision_config": {**SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False}}
        config |= {"boi_token_index": special["<start_of_image>"], "eoi_token_index": special["<end_of_image>"]}
        return config | {"image_token_index": special["<image_soft_token>"], "model_type": family, "dtype": "float32"}
    if family == "qwen2_5_vl":
        config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], **text, "rope_theta": 1e4}
        config |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "vision_config": QWEN}
        for key in ("vision_start", "vision_end", "image", "video"):
            config[f"{key}_token_id"] = special[f"<|{key}{'_pad' if key in ('image', 'video') else ''}|>"]
        return config | {"tie_word_embeddings": True, "model_type": family, "torch_dtype": "float32"}
    architecture = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family] + "ForConditionalGeneration"
    config = {"architectures": [architecture], "text_config": {**text, "model_type": "llama"}, "scale_factor": 2}
    config |= {"vision_config": {**SIGLIP, "model_type": f"{family}_vision"}, "image_token_id": special["<image>"]}
    return config | {"tie_word_embeddings": False, "model_type": family, "dtype": "float32", "pad_token_id": 0}


def vocabulary(family):
    """Return the special tokens and the byte-level tokens of printable ASCII, space and newline."""
    return [*SPECIAL[family], *(chr(i) for i in range(33, 127)), "Ġ", "Ċ"]


def tower_shapes(family):
    """Return the tower's tensors in published checkpoints: name -> shape."""
    if family == "qwen2_5_vl":
        shapes = {"visual.patch_embed.proj": (32, 3, 2, 7, 7)}
        for i in range(3):
            block = f"visual.blocks.{i}."
            shapes |= {f"{block}norm1": (32,), f"{block}norm2": (32,), f"{block}mlp.down_proj": (32, 24)}
            shapes |= {f"{block}attn.qkv": (96, 32), f"{block}attn.proj": (32, 32)}
            shapes |= {f"{block}mlp.gate_proj": (24, 32), f"{block}mlp.up_proj": (24, 32)}
        shapes |= {"visual.merger.ln_q": (32,), "visual.merger.mlp.0": (128, 128), "visual.merger.mlp.2": (32, 128)}
        bare = (".ln_q", ".norm1", ".norm2", "embed.proj")  # without a bias
    else:
        start = "vision_tower.vision_model." if family == "gemma3" else "model.vision_model."
        embeddings = f"{start}embeddings."
        shapes = {f"{embeddings}patch_embedding": (16, 3, 7, 7), f"{embeddings}position_embedding": (16, 16)}
        for i in range(2):
            layer = f"{start}encoder.layers.{i}."
            shapes |= {f"{layer}layer_norm1": (16,), f"{layer}layer_norm2": (16,)}
            shapes |= {f"{layer}mlp.fc1": (24, 16), f"{layer}mlp.fc2": (16, 24)}
            shapes |= {f"{layer}self_attn.{name}_proj": (16, 16) for name in ("q", "k", "v", "out")}
        shapes |= {f"{start}post_layernorm": (16,)}
        bare = (".position_embedding",)
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()} | {
        f"{name}.bias": shape[:1] for name, shape in shapes.items() if not name.endswith(bare)
    }
    if family == "gemma3":
        shapes |= {"multi_modal_projector.mm_input_projection_weight": (16, 32)}
        shapes |= {"multi_modal_projector.mm_soft_emb_norm.weight": (16,)}
    elif family != "qwen2_5_vl":
        shapes |= {"model.connector.modality_projection.proj.weight": (32, 64)}
    return shapes


def write_vision_model(directory, family, *, seed=0):
    """Write a checkpoint of a family with random weights, which transformers can also load, and return its path."""
    from safetensors.numpy import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    raw = vision_config(family)
    layout = {"gemma3": 1, "qwen2_5_vl": 2}.get(family, 0)
    shapes = {tensor.name: tensor.shape for tensor in tensor_plan(raw, read_config(raw), layout)}
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in {**shapes, **tower_shapes(family)}.items():
        scale = 0.1 if len(shape) == 1 else 0.3 if "embed_tokens" in name else np.prod(shape[1:]) ** -0.5
        # Norm weights are stored around 1, except Gemma's, which are stored around 0.
        gemma = family == "gemma3" and ("language_model" in name or "soft_emb_norm" in name)
        offset = 1.0 if len(shape) == 1 and name.endswith("weight") and not gemma else 0.0
        tensors[name] = (offset + scale * rng.normal(size=shape)).astype(np.float32)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": SPECIAL[family][0], "eos_token": SPECIAL[family][2],
        "bos_token": SPECIAL[family][1], "extra_special_tokens": ROLES[family], "model_max_length": 512,
        "processor_class": PREPROCESSOR[family]["processor_class"], "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    contents = {
        "config.json": raw, "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1},
        "tokenizer_config.json": tokenizer_config, "preprocessor_config.json": {**NORMALIZED, **PREPROCESSOR[family]},
        "processor_config.json": PROCESSOR[family],
    }  # fmt: skip
    for name, content in contents.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content, indent=2))
    (directory / "chat_template.jinja").write_text(TEMPLATES[family])
    _tokenizer(family).save(str(directory / "tokenizer.json"))
    return directory


def _tokenizer(family):
    tokens = vocabulary(family)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL[family]])
    return tokenizer


def random_images(sizes, seed=3):
    """Return images of random pixels with the given heights and widths."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
