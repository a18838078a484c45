"""Which layers of a decoder are recurrent, and their shape, by the keys of a config.json."""

from __future__ import annotations

from typing import Any

from grpo_jax.models.layers import DeltaShape

MIXERS = {"full_attention": "attention", "linear_attention": "delta"}
"""Names of `layer_types` in a config.json, and ours."""


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
    return DeltaShape(*sizes.values(), by_key_heads=keys.architecture == "Qwen3NextForCausalLM")
