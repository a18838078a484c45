"""Families with recurrent layers: which layers those are, and their shape, by the keys of a config.json."""

from __future__ import annotations

from grpo_jax.hub.keys import Fields, Keys, biases_of
from grpo_jax.models.layers import ConvShape, DeltaShape
from grpo_jax.types import Json

MIXERS = {"full_attention": "attention", "linear_attention": "delta", "conv": "conv"}
"""Names of `layer_types` in a config.json, and ours."""


QWEN3_5: Json = {
    "defaults": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "only": {"hidden_act": "silu", "attn_output_gate": True},  # the activation of the convolution too
    "spare": (r"mtp\..*",),  # heads that guess several tokens at once
}

_SPARSE: Json = {
    **QWEN3_5["defaults"], "num_key_value_heads": 2, "num_local_experts": None, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip

QWEN3_NEXT: Json = {
    **QWEN3_5,
    "defaults": {**_SPARSE, "intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10},
}

QWEN3_5_MOE: Json = {
    **QWEN3_5,
    # No layer has a dense MLP.
    "defaults": {**_SPARSE, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8},
    "only": {**QWEN3_5["only"], "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
LFM2: Json = {
    "defaults": {"intermediate_size": 12288, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
        "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True, "tie_embedding": None, "conv_bias": False,
        "conv_L_cache": 3, "block_ff_dim": None, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True, "full_attn_idxs": None},
    "only": {"hidden_act": "silu", "block_use_swiglu": True, "use_pos_enc": True},
    "renamed": {"norm": "embedding_norm", "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
        "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "o_proj": "out_proj",
        "q_norm": "q_layernorm", "k_norm": "k_layernorm", "conv1d": "conv.weight", "conv1d_bias": "conv.bias"},
}  # fmt: skip
"""Arguments of `Family` for the recurrent families, but for `model_type` and `fields`."""


def hybrid(keys: Keys) -> Fields:
    """Fields that Qwen3.5 and Qwen3-Next share: delta nets between layers of gated attention, norms around zero."""
    layers = {"mixers": full_attention_last(keys), "delta": delta_nets(keys), "attention_gate": True}
    return {**biases_of(keys), **layers, "qk_norm": "head", "norm_offset": 1.0}


def lfm2(keys: Keys) -> Fields:
    """Gated short convolutions between layers of attention, and an MLP whose width is worked out from the config."""
    layers, kernel, full = keys["num_hidden_layers"], keys["conv_L_cache"], keys["full_attn_idxs"]
    if not isinstance(kernel, int) or kernel < 2:
        raise keys.refuse("conv_L_cache", kernel, "an int ≥ 2")
    full = range(layers) if full is None else full
    types = ["full_attention" if i in full else "conv" for i in range(layers)]
    tied = keys["tie_word_embeddings"] if keys["tie_embedding"] is None else keys["tie_embedding"]
    return {
        "mixers": _mixers(keys, types, "conv"),
        "conv": ConvShape(keys["hidden_size"], kernel, keys["conv_bias"]),
        "intermediate_size": _adjusted_size(keys),
        "qk_norm": "head",
        "rms_norm_eps": keys["norm_eps"],
        "tie_word_embeddings": tied,
    }


def _adjusted_size(keys: Keys) -> int:
    """Width of LFM2's MLP: two thirds of what the config says, times a factor, up to the next multiple."""
    size = keys["block_ff_dim"] or keys["intermediate_size"]
    if not keys["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    factor, multiple = keys["block_ffn_dim_multiplier"], keys["block_multiple_of"]
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


def full_attention_last(keys: Keys) -> tuple[str, ...]:
    """The mixer of each layer: `layer_types` if the config lists them, else attention in each n-th layer."""
    every = keys["full_attention_interval"]
    types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(keys["num_hidden_layers"])]
    return _mixers(keys, types, "linear_attention")


def _mixers(keys: Keys, types: list[str], recurrent: str) -> tuple[str, ...]:
    """The mixer of each layer: by `layer_types` if the config lists them, else by `types`."""
    types, known = types if keys["layer_types"] is None else keys["layer_types"], ("full_attention", recurrent)
    if len(types) != keys["num_hidden_layers"] or set(types) - set(known):
        raise keys.refuse("layer_types", types, f"one of {', '.join(map(repr, known))} for each layer")
    return tuple(MIXERS[kind] for kind in types)


def delta_nets(keys: Keys) -> DeltaShape:
    """The shape of a config's gated delta nets."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = {name: keys[f"linear_{name}"] for name in names}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1 + (name == "conv_kernel_dim"):
            raise keys.refuse(f"linear_{name}", size, f"an int ≥ {1 + (name == 'conv_kernel_dim')}")
    heads, values = sizes["num_key_heads"], sizes["num_value_heads"]
    if values % heads:
        raise keys.refuse("linear_num_value_heads", values, f"a multiple of linear_num_key_heads = {heads}")
    widths = sizes["key_head_dim"], sizes["value_head_dim"], sizes["conv_kernel_dim"]
    return DeltaShape(heads, values, *widths, keys.architecture == "Qwen3NextForCausalLM")
