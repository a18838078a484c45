"""Model families with mixed layer types: delta nets, short convolutions, mixtures of experts, and Gemma 4."""

from __future__ import annotations

import dataclasses

from grpo_jax.hub.keys import Family, Fields, Keys, activation_of, biases_of, two_ropes, windows_of
from grpo_jax.models.config import ConvShape, DeltaShape
from grpo_jax.types import Json

MIXERS = {"full_attention": "attention", "linear_attention": "delta", "conv": "conv"}
"""Mapping from `layer_types` in a config.json to the decoder's names for the mixers."""


def hybrid(keys: Keys) -> Fields:
    """Return the fields for Qwen3.5 and Qwen3-Next: delta nets, gated attention, and norms with an offset of 1."""
    interval = keys["full_attention_interval"]
    types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(keys["num_hidden_layers"])]
    return {
        **biases_of(keys),
        "mixers": _mixers(keys, types, "linear_attention"),
        "delta": delta_nets(keys),
        "attention_gate": True,
        "qk_norm": "head",
        "norm_offset": 1.0,
    }


def lfm2(keys: Keys) -> Fields:
    """Return the fields for LFM2: gated short convolutions, attention, and an MLP of adjusted width."""
    layers, attention_layers = keys["num_hidden_layers"], keys["full_attn_idxs"]
    attention_layers = range(layers) if attention_layers is None else attention_layers
    types = ["full_attention" if i in attention_layers else "conv" for i in range(layers)]
    tied = keys["tie_word_embeddings"] if keys["tie_embedding"] is None else keys["tie_embedding"]
    return {
        "mixers": _mixers(keys, types, "conv"),
        "conv": ConvShape(keys["hidden_size"], keys["conv_L_cache"], keys["conv_bias"]),
        "intermediate_size": _adjusted_size(keys),
        "qk_norm": "head",
        "rms_norm_eps": keys["norm_eps"],
        "tie_word_embeddings": tied,
    }


def _adjusted_size(keys: Keys) -> int:
    """Return LFM2's MLP width.

    If `block_auto_adjust_ff_dim` is True, the configured width is multiplied by 2/3 and by `block_ffn_dim_multiplier`,
    and rounded up to a multiple of `block_multiple_of`. If the multiplier is None, only the factor 2/3 is applied.
    """
    size = keys["block_ff_dim"] or keys["intermediate_size"]
    if not keys["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    factor, multiple = keys["block_ffn_dim_multiplier"], keys["block_multiple_of"]
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


def _mixers(keys: Keys, types: list[str], recurrent: str) -> tuple[str, ...]:
    """Return the mixer of each layer. `types` is used if the config does not contain `layer_types`."""
    types, supported = types if keys["layer_types"] is None else keys["layer_types"], ("full_attention", recurrent)
    if len(types) != keys["num_hidden_layers"] or set(types) - set(supported):
        raise keys.refuse("layer_types", types, f"a list with one of {', '.join(map(repr, supported))} per layer")
    return tuple(MIXERS[kind] for kind in types)


def delta_nets(keys: Keys) -> DeltaShape:
    """Return the sizes of the gated delta nets. Raises ValueError if they are inconsistent."""
    key_heads, value_heads = keys["linear_num_key_heads"], keys["linear_num_value_heads"]
    if value_heads % key_heads:
        raise keys.refuse("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads = {key_heads}")
    sizes = (keys["linear_key_head_dim"], keys["linear_value_head_dim"], keys["linear_conv_kernel_dim"])
    return DeltaShape(key_heads, value_heads, *sizes, keys.architecture == "Qwen3NextForCausalLM")


def gemma4(keys: Keys) -> Fields:
    """Return the fields for Gemma 4: two kinds of attention layers, shared keys and values, and per-layer inputs."""
    windows = windows_of(keys, lambda i: (i + 1) % 6 != 0) or (None,) * keys["num_hidden_layers"]
    windows = (*windows[:-1], None)  # transformers always uses full attention in the last layer
    shared = _shared_layers(keys, windows)
    return {
        **biases_of(keys),
        **two_ropes(keys, 10000.0),
        **_experts(keys),
        "norms": "sandwich",
        "qk_norm": "head",
        "v_norm": True,
        "activation": activation_of(keys, "hidden_activation"),
        "query_scale": 1.0,
        "embedding_scale": keys["hidden_size"] ** 0.5,
        "logit_soft_cap": keys["final_logit_softcapping"],
        "layer_scalar": True,
        "windows": windows,
        "full_heads": _full_heads(keys, windows),
        "values_are_keys": keys["attention_k_eq_v"],
        "shared_kv_layers": shared,
        "shared_kv_mlp": 2 * keys["intermediate_size"] if shared and keys["use_double_wide_mlp"] else 0,
        "layer_input_size": keys["hidden_size_per_layer_input"] or 0,
    }


def _shared_layers(keys: Keys, windows: tuple[int | None, ...]) -> int:
    shared, layers = keys["num_kv_shared_layers"], keys["num_hidden_layers"]
    if set(windows) != set(windows[: layers - shared]):
        raise keys.refuse("num_kv_shared_layers", shared, "small enough to leave an unshared layer of each type")
    return shared


def _full_heads(keys: Keys, windows: tuple[int | None, ...]) -> tuple[int, int]:
    """Return the number of key-value heads and the head size of the layers with full attention."""
    kv_heads, head_dim, per_layer = keys["num_key_value_heads"], keys["head_dim"], keys["per_layer_config"]
    if per_layer is None:
        full_kv_heads = keys["num_global_key_value_heads"] if keys["attention_k_eq_v"] else None
        return full_kv_heads or kv_heads, keys["global_head_dim"]
    # transformers may save these values separately for each layer.
    names, values = {"num_key_value_heads", "head_dim"}, {int(i): x or {} for i, x in per_layer.items()}
    full = [values.pop(i, {}) for i, window in enumerate(windows) if window is None]
    if any(x != full[0] for x in full) or set(full[0]) - names or any(values.values()):
        required = f"the same {' and '.join(sorted(names))} for all layers with full attention"
        raise keys.refuse("per_layer_config", per_layer, f"a dict with {required} and no values for other layers")
    return full[0].get("num_key_value_heads", kv_heads), full[0].get("head_dim", head_dim)


def _experts(keys: Keys) -> Fields:
    if not keys["enable_moe_block"]:
        return {}
    return {
        **mixture(keys, keys["num_experts"], keys["moe_intermediate_size"], "top_k_experts"),
        "expert_layers": (True,) * keys["num_hidden_layers"],
        "parallel_experts": True,
    }


def mixture(keys: Keys, experts: int, size: int, chosen: str = "num_experts_per_tok") -> Fields:
    """Return the fields for a mixture of experts. `chosen` is the config key for the number of experts per token."""
    if not 1 <= keys[chosen] <= experts:
        raise keys.refuse(chosen, keys[chosen], f"between 1 and the number of experts ({experts})")
    return {
        "num_experts": experts,
        "num_experts_per_token": keys[chosen],
        "expert_size": size,
        "router_loss_coef": keys["router_aux_loss_coef"],
    }


def qwen_experts(keys: Keys) -> Fields:
    layers, step, dense = keys["num_hidden_layers"], keys["decoder_sparse_step"], keys["mlp_only_layers"] or ()
    experts = keys["num_local_experts"] or keys["num_experts"]  # transformers 5 saves `num_local_experts`
    return {
        **mixture(keys, experts, keys["moe_intermediate_size"]),
        "expert_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        "normalize_expert_weights": keys["norm_topk_prob"],
    }


def sparse_hybrid(keys: Keys) -> Fields:
    return {**hybrid(keys), **qwen_experts(keys), "shared_expert_size": keys["shared_expert_intermediate_size"]}


_HYBRID_DEFAULTS: Json = {
    "head_dim": 256, "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
_SPARSE_DEFAULTS: Json = {
    **_HYBRID_DEFAULTS, "num_key_value_heads": 2, "num_local_experts": None, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_HYBRID_ONLY = {"hidden_act": "silu", "attn_output_gate": True}  # the delta nets implement only SiLU

QWEN3_5 = Family("qwen3_5_text", hybrid, _HYBRID_DEFAULTS, _HYBRID_ONLY, spare=(r"mtp\..*",))  # multi-token prediction
QWEN3_NEXT = dataclasses.replace(
    QWEN3_5,
    model_type="qwen3_next",
    fields=sparse_hybrid,
    defaults={**_SPARSE_DEFAULTS, "intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10},
)
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    fields=sparse_hybrid,  # no layer has a dense MLP
    defaults={**_SPARSE_DEFAULTS, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8},
    only={**_HYBRID_ONLY, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
LFM2 = Family(
    "lfm2", lfm2,
    defaults={"intermediate_size": 12288, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
        "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True, "tie_embedding": None, "conv_bias": False,
        "conv_L_cache": 3, "block_ff_dim": None, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True, "full_attn_idxs": None},
    only={"hidden_act": "silu", "block_use_swiglu": True, "use_pos_enc": True},
    renamed={"norm": "embedding_norm", "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
        "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "o_proj": "out_proj",
        "q_norm": "q_layernorm", "k_norm": "k_layernorm", "conv1d": "conv.weight", "conv1d_bias": "conv.bias"},
)  # fmt: skip
GEMMA4 = Family(
    "gemma4_text", gemma4,
    defaults={"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "num_key_value_heads": 4,
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": None, "per_layer_config": None,
        "attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "sliding_window": 512,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "final_logit_softcapping": None, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
        "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
        "router_aux_loss_coef": 0.0},
    # "vision" affects only image tokens. transformers does not read the older RoPE keys for this family.
    only={"use_bidirectional_attention": "vision", "partial_rotary_factor": 1.0, "rope_scaling": None},
    stacked="halves",
    # Layers that reuse keys and values from an earlier layer do not need these weights.
    spare=(r"model\.(language_model\.)?layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight",),
)  # fmt: skip
