"""Supported model families: how each Hugging Face architecture maps to a `TransformerConfig`.

To add a family, add an entry to `FAMILIES`. An unsupported mechanism needs a new `TransformerConfig` field.
"""

from __future__ import annotations

import dataclasses

from grpo_jax.hub.hybrid import GEMMA4, LFM2, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, mixture, qwen_experts
from grpo_jax.hub.keys import (
    REQUIRED,
    VISION_MODELS,
    Family,
    Fields,
    Keys,
    activation_of,
    all_windows,
    biases_of,
    rope_of,
    text_config,
    two_ropes,
    windows_of,
)
from grpo_jax.models.config import TransformerConfig
from grpo_jax.types import Json


def _late_windows(keys: Keys) -> tuple[int | None, ...] | None:
    """Return each layer's window, or None if `use_sliding_window` is False or no layer has a window.

    Without `layer_types`, the layers from index `max_window_layers` on have sliding windows.
    """
    on = keys["use_sliding_window"] and keys["sliding_window"] is not None
    windows = windows_of(keys, lambda i: on and i >= keys["max_window_layers"])
    return windows if on else None


def _qwen2(keys: Keys) -> Fields:
    fields = {"qkv_bias": True, "windows": _late_windows(keys)}
    if keys.raw.get("model_type") != "qwen2_5_vl_text":
        return fields
    rotary = keys["rope_parameters"] or keys["rope_scaling"] or {}
    sections, half = rotary.get("mrope_section", [16, 24, 24]), keys["hidden_size"] // keys["num_attention_heads"] // 2
    if len(sections) != 3 or sum(sections) != half:
        raise keys.refuse("mrope_section", sections, f"three integers whose sum is {half}")
    kind = {"type": "default"} if rotary.get("type") == "mrope" else {}  # "mrope" uses the default frequencies
    rope = rope_of(keys, {**rotary, **kind})
    return {**fields, "rope": dataclasses.replace(rope, sections=tuple(sections))}


def _smollm3(keys: Keys) -> Fields:
    layers, rotary = keys["num_hidden_layers"], keys["no_rope_layers"]
    if rotary is None:  # Despite the key's name, 1 marks a layer with a rotary embedding.
        rotary = [(i + 1) % keys["no_rope_layer_interval"] != 0 for i in range(layers)]
    if len(rotary) != layers:
        raise keys.refuse("no_rope_layers", rotary, "a list with one 0 or 1 per layer")
    on = keys["use_sliding_window"] and keys["sliding_window"]
    windows = windows_of(keys, lambda i: not rotary[i]) if on else None
    return {
        **biases_of(keys),
        "mlp_bias": keys["mlp_bias"],
        "rotary_layers": tuple(bool(r) for r in rotary),
        "windows": windows,
    }


def _gemma(keys: Keys) -> Fields:
    """Return the fields that Gemma 2 and 3 share, such as sandwich norms with an offset of 1."""
    return {
        **biases_of(keys),
        "norms": "sandwich",
        "norm_offset": 1.0,
        "activation": activation_of(keys, "hidden_activation"),
        "query_scale": keys["query_pre_attn_scalar"] ** -0.5,
        "embedding_scale": keys["hidden_size"] ** 0.5,
        "logit_soft_cap": keys["final_logit_softcapping"],
    }


def _gemma2(keys: Keys) -> Fields:
    return {
        **_gemma(keys),
        "attention_soft_cap": keys["attn_logit_softcapping"],
        "windows": windows_of(keys, lambda i: (i + 1) % 2 != 0),
    }


def _gemma3(keys: Keys) -> Fields:
    return {
        **_gemma(keys),
        "qk_norm": "head",
        "windows": windows_of(keys, lambda i: (i + 1) % keys["sliding_window_pattern"] != 0),
        **two_ropes(keys, keys["rope_local_base_freq"]),
    }


def _glm4(keys: Keys) -> Fields:
    rope = dataclasses.replace(rope_of(keys), pairs=True)
    return {"qkv_bias": keys["attention_bias"], "norms": "sandwich", "rope": rope}


def _granite(keys: Keys) -> Fields:
    return {
        **biases_of(keys),
        "mlp_bias": keys["mlp_bias"],
        "embedding_scale": keys["embedding_multiplier"],
        "query_scale": keys["attention_multiplier"],
        "residual_scale": keys["residual_multiplier"],
        "logit_scale": 1 / keys["logits_scaling"],
    }


def _ministral3(keys: Keys) -> Fields:
    rotary = keys["rope_parameters"] or {}
    growth = tuple(rotary.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    positive = [x for x in growth if isinstance(x, int | float) and x > 0]
    if len(positive) < 2:
        required = "a dict with positive llama_4_scaling_beta and original_max_position_embeddings"
        raise keys.refuse("rope_parameters", rotary, required)
    rope = dataclasses.replace(rope_of(keys, rotary), growth=(float(positive[0]), int(positive[1])))
    return {"windows": all_windows(keys), "rope": rope}


def _olmo3(keys: Keys) -> Fields:
    theta = keys["rope_theta"]
    if theta != 5e5 and not keys["rope_parameters"]:
        # transformers uses `rope_theta` only for full attention; sliding-window layers always use 500000.
        raise keys.refuse("rope_theta", theta, "500000.0 unless 'rope_parameters' sets the RoPE base for all layers")
    return {
        **biases_of(keys),
        "qk_norm": "flat",
        "norms": "post",
        "windows": windows_of(keys, lambda i: (i + 1) % 4 != 0),
        **two_ropes(keys, theta),
    }


def _qwen3_moe(keys: Keys) -> Fields:
    windows = all_windows(keys) if keys["use_sliding_window"] else None
    return {**biases_of(keys), **qwen_experts(keys), "qk_norm": "head", "windows": windows}


_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _gpt_oss(keys: Keys) -> Fields:
    return {
        **biases_of(keys),
        "attention_sinks": True,
        "windows": windows_of(keys, lambda i: (i + 1) % 2 != 0),
        "rope": rope_of(keys, keys["rope_parameters"] or keys["rope_scaling"] or _GPT_OSS_ROPE),
        **mixture(keys, keys["num_local_experts"], keys["intermediate_size"]),
        "expert_layers": (True,) * keys["num_hidden_layers"],
        "expert_bias": True,
        "expert_swiglu": (keys["swiglu_alpha"], keys["swiglu_limit"]),
        "normalize_expert_weights": True,
    }


_GEMMA_DEFAULTS = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, defaults={"sliding_window": 4096}),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        lambda keys: {**biases_of(keys), "qk_norm": "head", "windows": _late_windows(keys)},
        defaults={"head_dim": 128, "sliding_window": 4096},
    ),
    "LlamaForCausalLM": Family("llama", lambda keys: {**biases_of(keys), "mlp_bias": keys["mlp_bias"]}),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        _smollm3,
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 2000000.0,
            "no_rope_layers": None, "no_rope_layer_interval": 4},
    ),
    "MistralForCausalLM": Family(
        "mistral",
        lambda keys: {"windows": all_windows(keys)},
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        only={"layer_types": None},
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _gemma2,
        defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 4, "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0},
        only={"use_bidirectional_attention": None},
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _gemma3,
        defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 4, "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6, "final_logit_softcapping": None},
        # transformers reads attn_logit_softcapping but does not apply it, so its intended effect is unclear.
        only={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    ),
    "Gemma4ForCausalLM": GEMMA4,
    "Phi3ForCausalLM": Family(
        "phi3",
        lambda keys: {"windows": all_windows(keys)},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        fused=(("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))),
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        _glm4,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-07,
            "partial_rotary_factor": 0.5},
        fused=(("gate_up_proj", ("gate_proj", "up_proj")),),
        renamed={"post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm"},
    ),
    "GraniteForCausalLM": Family(
        "granite",
        _granite,
        defaults={"max_position_embeddings": 2048, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
            "residual_multiplier": 1.0, "attention_multiplier": 1.0},
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        _ministral3,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
        only={"layer_types": None},
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", lambda keys: {**biases_of(keys), "qk_norm": "flat", "norms": "post"}, defaults={"rms_norm_eps": 1e-5}
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3", _olmo3, defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096}
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        _gpt_oss,
        defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
            "attention_bias": True, "max_position_embeddings": 131072, "sliding_window": 128, "num_local_experts": 128,
            "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.001},
        only={"hidden_act": "silu"},
        renamed={"gate": "router"},
        stacked="columns",
        quantized=("mxfp4",),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _qwen3_moe,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128, "num_local_experts": None,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": None,
            "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
    ),
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Lfm2ForCausalLM": LFM2,
}  # fmt: skip


def family_of(raw: Json) -> Family:
    """Return the entry of `FAMILIES` for a config.json. Raises ValueError if the architecture is not supported."""
    raw = text_config(raw)
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILIES:
        supported = ", ".join((*FAMILIES, *VISION_MODELS))
        raise ValueError(f"config key 'architectures' must contain exactly one of {supported}; got {names}.")
    return FAMILIES[names[0]]


def read_config(raw: Json, *, dtype: str = "float32") -> TransformerConfig:
    """Convert a config.json to a `TransformerConfig`. Raises ValueError if a key is missing or a value unsupported."""
    family, whole, raw = family_of(raw), raw, text_config(raw)
    keys = Keys(raw, family.defaults)
    for key in REQUIRED:
        if not isinstance(keys[key], int) or keys[key] < 1:
            raise keys.refuse(key, keys[key], "a positive integer")
    keys.refuse_quantized(family.quantized)
    for key, value in family.only.items():
        if raw.get(key) not in (None, value):
            raise keys.refuse(key, raw[key], "absent or null" if value is None else repr(value))
    heads = keys["num_attention_heads"]
    kv_heads = keys["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise keys.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    fields: Fields = {
        "vocab_size": keys["vocab_size"],
        "hidden_size": keys["hidden_size"],
        "intermediate_size": keys["intermediate_size"],
        "num_layers": keys["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": keys["head_dim"] or keys["hidden_size"] // heads,
        "rms_norm_eps": keys["rms_norm_eps"],
        "tie_word_embeddings": keys["tie_word_embeddings"],
        "max_position_embeddings": keys["max_position_embeddings"],
        "initializer_range": keys["initializer_range"],
        "dtype": dtype,
    }
    fields["bidirectional_images"] = whole["architectures"] == ["Gemma3ForConditionalGeneration"]
    fields |= family.fields(keys)
    if "activation" not in fields:
        fields["activation"] = activation_of(keys, "hidden_act")
    if "rope" not in fields:
        fields["rope"] = rope_of(keys)
    return TransformerConfig(**fields)
