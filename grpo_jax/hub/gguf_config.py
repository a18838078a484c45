"""A config.json from the header of a GGUF file: one row of `ARCHITECTURES` for each that llama.cpp names.

The keys of such a header are llama.cpp's, and what that program takes for granted of an architecture is not in it: the
rows say so. A key that no row has looked at is an error, since the model would be another one without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from grpo_jax.hub.families import FAMILIES
from grpo_jax.hub.gguf_header import Header, bias_keys, common_keys, head_dim, rope_keys, scaling_of
from grpo_jax.types import Json


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How llama.cpp writes one architecture.

    Attributes:
      family: key of `FAMILIES`, or what gives it for a header.
      fields: from a header to the keys of config.json in which the architecture differs from Llama.
      pairs: rotary dimensions of queries and keys lie beside each other, and not in two halves.
      shifted: norms are stored as they multiply, and Hugging Face stores them around zero.
    """

    family: str | Callable[[Header], str]
    fields: Callable[[Header], Json]
    pairs: bool = False
    shifted: bool = False


def read_header(header: Header) -> tuple[Architecture, Json]:
    """The row of `ARCHITECTURES`, and the config.json that the header means.

    Raises:
      ValueError: an architecture, a key or a value that is not supported; named.
    """
    name = header.architecture
    if name not in ARCHITECTURES:
        raise ValueError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}.")
    row = ARCHITECTURES[name]
    family = row.family if isinstance(row.family, str) else row.family(header)
    ids = {key: header.fields.get(f"tokenizer.ggml.{name}_token_id") for key, name in _IDS.items()}
    raw = {
        "architectures": [family],
        "model_type": FAMILIES[family].model_type,
        **common_keys(header),
        **row.fields(header),
    }
    header.check_all_read()
    return row, raw | {key: value for key, value in ids.items() if value is not None}


_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _llama(header: Header) -> Json:
    return {
        "head_dim": head_dim(header),
        **bias_keys(header),
        "mlp_bias": header.has("ffn_gate.bias"),
        **rope_keys(header),
    }


def _granite(header: Header) -> Json:
    scales = {
        "attention_multiplier": header.get("attention.scale", head_dim(header) ** -0.5),
        "embedding_multiplier": header.get("embedding_scale", 1.0),
        "residual_multiplier": header.get("residual_scale", 1.0),
        "logits_scaling": header["logit_scale"],
    }
    return {**_llama(header), **scales}


def _ministral3(header: Header) -> Json:
    raw, scale = dict(_llama(header)), header.get("rope.scaling.yarn_log_multiplier", 1.0)
    more = {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": header["attention.temperature_scale"]}
    return raw | {"rope_parameters": {**raw["rope_parameters"], **more}}


def _qwen_moe(header: Header) -> Json:
    return {
        "num_experts": header["expert_count"],
        "num_experts_per_tok": header["expert_used_count"],
        "moe_intermediate_size": header["expert_feed_forward_length"],
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


def _query_scale(header: Header, layers: int) -> dict[str, int]:
    """Gemma's: llama.cpp knows the model of 27B, which divides by another number, by its layers."""
    usual, of_27b = head_dim(header), header["embedding_length"] // header["attention.head_count"]
    return {"query_pre_attn_scalar": of_27b if header["block_count"] == layers else usual}


def _gemma2(header: Header) -> Json:
    return {
        **rope_keys(header),
        **_query_scale(header, 46),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", 30.0),
        "sliding_window": header.get("attention.sliding_window", 4096),
    }


def _gemma3(header: Header) -> Json:
    window, layers = header.get("attention.sliding_window", 0), header["block_count"]
    rope = rope_keys(header)["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10000.0)}
    return {
        **_query_scale(header, 62),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "sliding_window": window or 4096,
        "layer_types": [_kind(bool(window) and (i + 1) % 6 != 0) for i in range(layers)],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _kind(sliding: bool) -> str:
    return "sliding_attention" if sliding else "full_attention"


def _gemma4(header: Header) -> Json:
    sliding = [bool(x) for x in header["attention.sliding_window_pattern"]]
    widths, heads = _each(header, "feed_forward_length", sliding), _each(header, "attention.head_count_kv", sliding)
    shared, experts = header.get("attention.shared_kv_layers", 0), header.get("expert_count", 0)
    factors = header.factors["rope_freqs.weight"]
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        header.get(key)  # all of a head; the factors say which of its frequencies turn
    full = [i for i, x in enumerate(sliding) if not x]
    own = [f"blk.{i}.attn_v.weight" in header.shapes for i in full if i < len(sliding) - shared]
    raw = {
        "head_dim": header["attention.key_length_swa"],
        "global_head_dim": header["attention.key_length"],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_key_value_heads": heads[sliding.index(True)],
        "num_global_key_value_heads": heads[full[0]],
        "attention_k_eq_v": not all(own),
        "num_kv_shared_layers": shared,
        "sliding_window": header["attention.sliding_window"],
        "layer_types": [_kind(x) for x in sliding],
        "hidden_size_per_layer_input": header.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": header.vocab_size,
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": float(np.mean(factors == 1)),
                "rope_theta": header["rope.freq_base"],
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10000.0)},
        },
    }
    if experts:
        raw |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": header["expert_used_count"],
            "moe_intermediate_size": header["expert_feed_forward_length"],
        }
    return raw


def _each(header: Header, key: str, layers: list[bool]) -> list[int]:
    """A key that has one number for all layers, or one for each."""
    value = header[key]
    return list(value) if isinstance(value, list) else [value] * len(layers)


def _phi3(header: Header) -> Json:
    theta, part = header.get("rope.freq_base", 10000.0), header["rope.dimension_count"] / head_dim(header)
    original = header.get("rope.scaling.original_context_length", header["context_length"])
    header.get("rope.scaling.attn_factor")  # follows from the two lengths
    raw = {
        "sliding_window": header.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": part,
    }
    if header.get("rope.scaling.type", "longrope") not in ("none", "longrope"):
        raise header.refuse("rope.scaling.type", "none, longrope")
    found = {size: header.factors.get(f"rope_factors_{size}.weight") for size in ("short", "long")}
    each = {f"{size}_factor": [float(x) for x in factors] for size, factors in found.items() if factors is not None}
    scaling = {"rope_type": "longrope", **each} if each else {"rope_type": "default"}
    return raw | {"rope_parameters": {"rope_theta": theta, "partial_rotary_factor": part, **scaling}}


def _glm4(header: Header) -> Json:
    part = header["rope.dimension_count"] / head_dim(header)
    theta = header.get("rope.freq_base", 10000.0)
    rope = {"rope_theta": theta, "partial_rotary_factor": part, **scaling_of(header)}
    return {**bias_keys(header), "rope_parameters": rope}


def _slides(header: Header) -> bool:
    """Whether a file of `olmo2` is one of Olmo 3, which has layers with a window."""
    return bool(header.get("attention.sliding_window", 0))


def _olmo(header: Header) -> Json:
    rope = rope_keys(header)["rope_parameters"]
    if not _slides(header):
        return {**bias_keys(header), "rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", rope["rope_theta"])}
    usual = [(i + 1) % 4 != 0 for i in range(header["block_count"])]
    return {
        **bias_keys(header),
        "sliding_window": header["attention.sliding_window"],
        "layer_types": [_kind(bool(x)) for x in header.get("attention.sliding_window_pattern", usual)],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _gpt_oss(header: Header) -> Json:
    rope = rope_keys(header)["rope_parameters"]
    return {
        **bias_keys(header),
        "num_local_experts": header["expert_count"],
        "num_experts_per_tok": header["expert_used_count"],
        "intermediate_size": header["expert_feed_forward_length"],
        "sliding_window": header["attention.sliding_window"],
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _hybrid(header: Header) -> Json:
    """Delta nets between layers of attention."""
    header.get("rope.dimension_sections")  # where pictures stand; text has the same position in all of them
    every, layers = header.get("full_attention_interval", 4), header["block_count"]
    layers -= header.get("nextn_predict_layers", 0)
    recurrent = header.get("attention.recurrent_layers") or [(i + 1) % every != 0 for i in range(layers)]
    values, part = header["ssm.time_step_rank"], header["rope.dimension_count"] / head_dim(header)
    return {
        **bias_keys(header),
        "layer_types": ["linear_attention" if x else "full_attention" for x in recurrent[:layers]],
        "linear_conv_kernel_dim": header["ssm.conv_kernel"],
        "linear_key_head_dim": header["ssm.state_size"],
        "linear_value_head_dim": header["ssm.inner_size"] // values,
        "linear_num_key_heads": header["ssm.group_count"],
        "linear_num_value_heads": values,
        "rope_parameters": {
            "rope_theta": header["rope.freq_base"],
            "partial_rotary_factor": part,
            **scaling_of(header),
        },
    }


def _sparse_hybrid(header: Header) -> Json:
    shared = {"shared_expert_intermediate_size": header["expert_shared_feed_forward_length"]}
    dense = header.get("feed_forward_length") or header["expert_feed_forward_length"]  # where no layer has one
    return {**_hybrid(header), **_qwen_moe(header), **shared, "intermediate_size": dense}


def _lfm2(header: Header) -> Json:
    heads = header["attention.head_count_kv"]
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if n else "conv" for n in heads],
        "norm_eps": header["attention.layer_norm_rms_epsilon"],
        "conv_L_cache": header["shortconv.l_cache"],
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in header.shapes),
        "block_auto_adjust_ff_dim": False,
        **rope_keys(header),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", _llama, pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", rope_keys),
    "qwen3": Architecture("Qwen3ForCausalLM", lambda h: {**bias_keys(h), **rope_keys(h)}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", lambda h: {**bias_keys(h), **_qwen_moe(h), **rope_keys(h)}),
    "smollm3": Architecture("SmolLM3ForCausalLM", _llama, pairs=True),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2, shifted=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3, shifted=True),
    "gemma4": Architecture("Gemma4ForCausalLM", _gemma4),
    "phi3": Architecture("Phi3ForCausalLM", _phi3),
    "glm4": Architecture("Glm4ForCausalLM", _glm4),
    "granite": Architecture("GraniteForCausalLM", _granite, pairs=True),
    "mistral3": Architecture("Ministral3ForCausalLM", _ministral3, pairs=True),
    "olmo2": Architecture(lambda h: "Olmo3ForCausalLM" if _slides(h) else "Olmo2ForCausalLM", _olmo),
    "gpt-oss": Architecture("GptOssForCausalLM", _gpt_oss),
    "qwen3next": Architecture("Qwen3NextForCausalLM", _sparse_hybrid, shifted=True),
    "qwen35": Architecture("Qwen3_5ForCausalLM", _hybrid, shifted=True),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", _sparse_hybrid, shifted=True),
    "lfm2": Architecture("Lfm2ForCausalLM", _lfm2),
}
"""By `general.architecture`; Mistral's first models are written as `llama`, Olmo 3 as `olmo2`."""
