"""Gemma 4: what its layers share and in what they differ, by the keys of a config.json."""

from __future__ import annotations

from grpo_jax.hub.keys import Fields, Keys, activation_of, biases_of, two_ropes, windows_of
from grpo_jax.types import Json

GEMMA4: Json = {
    "defaults": {
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    # "vision" is about pictures. transformers reads no older key of a rotary embedding here.
    "only": {"use_bidirectional_attention": "vision", "partial_rotary_factor": 1.0, "rope_scaling": None},
    "stacked": "halves",
    # Files also hold what layers over the keys and values of others do not use.
    "spare": (r"model\.(language_model\.)?layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight",),
}
"""Arguments of `Family` for Gemma 4, but for `model_type` and `fields`."""


def gemma4(keys: Keys) -> Fields:
    """The fields in which the family differs from Llama."""
    layers = keys["num_hidden_layers"]
    windows = windows_of(keys, lambda i: (i + 1) % 6 != 0) or (None,) * layers
    windows = (*windows[:-1], None)  # transformers makes the last layer one of full attention
    shared = _shared_layers(keys, windows)
    inputs = keys["hidden_size_per_layer_input"] or 0
    if inputs and keys["vocab_size_per_layer_input"] != keys["vocab_size"]:
        size = keys["vocab_size_per_layer_input"]
        raise keys.refuse("vocab_size_per_layer_input", size, f"vocab_size = {keys['vocab_size']}")
    return {
        **biases_of(keys),
        **_ropes(keys),
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
        "layer_input_size": inputs,
    }


def _shared_layers(keys: Keys, windows: tuple[int | None, ...]) -> int:
    """How many layers are over the keys and values of an earlier one."""
    shared, layers = keys["num_kv_shared_layers"], keys["num_hidden_layers"]
    if not isinstance(shared, int) or not 0 <= shared < layers:
        raise keys.refuse("num_kv_shared_layers", shared, f"0 to num_hidden_layers − 1 = {layers - 1}")
    if set(windows) != set(windows[: layers - shared]):
        raise keys.refuse("num_kv_shared_layers", shared, "fewer: each kind of layer_types needs a layer before them")
    return shared


def _full_heads(keys: Keys, windows: tuple[int | None, ...]) -> tuple[int, int]:
    """Key heads, and the width of a head, of the layers of full attention."""
    heads, usual = keys["num_attention_heads"], (keys["num_key_value_heads"], keys["head_dim"])
    per_layer = keys["per_layer_config"]
    if per_layer is None:
        of_keys = keys["num_global_key_value_heads"] if keys["attention_k_eq_v"] else None
        found = (of_keys or usual[0], keys["global_head_dim"])
    else:  # as transformers writes it
        names, of = ("num_key_value_heads", "head_dim"), {str(i): x for i, x in per_layer.items()}
        each = [(of.get(str(i)) or {}, window is None) for i, window in enumerate(windows)]
        full = {tuple(x.get(n, u) for n, u in zip(names, usual, strict=True)) for x, whole in each if whole}
        if len(full) > 1 or any(set(x) - set(names if whole else ()) for x, whole in each):
            wanted = f"{names[0]!r} and {names[1]!r}, the same for every layer of full attention and for no other"
            raise keys.refuse("per_layer_config", per_layer, wanted)
        found = full.pop()
    if not all(isinstance(x, int) and x > 0 for x in found) or heads % found[0]:
        both = "(num_global_key_value_heads, global_head_dim)"
        raise keys.refuse(both, found, f"a divisor of num_attention_heads = {heads}, and a positive int")
    return found


def _ropes(keys: Keys) -> Fields:
    for kind in ("full_attention", "sliding_attention"):
        rotary = (keys["rope_parameters"] or {}).get(kind)
        if not rotary or "rope_theta" not in rotary:
            raise keys.refuse(f"rope_parameters.{kind}", rotary, "a rotary embedding with 'rope_theta'")
    return two_ropes(keys, 0.0)


def _experts(keys: Keys) -> Fields:
    if not keys["enable_moe_block"]:
        return {}
    experts, chosen, size = (keys[name] for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    for name, value in {"num_experts": experts, "moe_intermediate_size": size}.items():
        if not isinstance(value, int) or value < 1:
            raise keys.refuse(name, value, "a positive int where enable_moe_block is true")
    if not isinstance(chosen, int) or not 1 <= chosen <= experts:
        raise keys.refuse("top_k_experts", chosen, f"1 to num_experts = {experts}")
    return {
        "num_experts": experts,
        "num_experts_per_token": chosen,
        "expert_size": size,
        "expert_layers": (True,) * keys["num_hidden_layers"],
        "experts_beside_mlp": True,
    }
