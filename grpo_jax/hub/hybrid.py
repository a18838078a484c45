"""Families with recurrent layers: which layers those are, and their shape, by the keys of a config.json."""

from __future__ import annotations

from typing import Any

from grpo_jax.models.layers import DeltaShape

MIXERS = {"full_attention": "attention", "linear_attention": "delta"}
"""Names of `layer_types` in a config.json, and ours."""


QWEN3_5: dict[str, Any] = {
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

_SPARSE: dict[str, Any] = {
    **QWEN3_5["defaults"],
    "num_key_value_heads": 2,
    "num_local_experts": None,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}

QWEN3_NEXT: dict[str, Any] = {
    **QWEN3_5,
    "defaults": {**_SPARSE, "intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10},
}

QWEN3_5_MOE: dict[str, Any] = {
    **QWEN3_5,
    # No layer has a dense MLP.
    "defaults": {**_SPARSE, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8},
    "only": {**QWEN3_5["only"], "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
"""What the rows of `families.FAMILIES` say, but for names and fields."""


def hybrid(keys: Any) -> dict[str, Any]:
    """What Qwen3.5 and Qwen3-Next share: gated delta nets between layers of gated attention, norms around zero."""
    layers = {"mixers": full_attention_last(keys), "delta": delta_nets(keys), "attention_gate": True}
    biases = {"qkv_bias": keys["attention_bias"], "o_bias": keys["attention_bias"]}
    return {**biases, **layers, "qk_norm": "head", "norm_offset": 1.0}


def full_attention_last(keys: Any) -> tuple[str, ...]:
    """What mixes the tokens of each layer: `layer_types` if the config lists them, else attention in each n-th."""
    layers, types, every = keys["num_hidden_layers"], keys["layer_types"], keys["full_attention_interval"]
    if types is None:
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if len(types) != layers or set(types) - set(MIXERS):
        raise keys.refuse("layer_types", types, f"one of {', '.join(map(repr, MIXERS))} for each layer")
    return tuple(MIXERS[kind] for kind in types)


def delta_nets(keys: Any) -> DeltaShape:
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
