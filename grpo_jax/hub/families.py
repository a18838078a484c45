"""The table of model families: what each architecture of Hugging Face sets in the one decoder.

Two questions are answered here, both without touching a file: which `TransformerConfig` a config.json means
(`read_config`), and which tensor of a checkpoint holds which parameters (`tensor_plan`). A new family is one row of
`FAMILIES`, and, if it brings a new idea, one switch in the decoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from grpo_jax.hub.hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, hybrid
from grpo_jax.models.layers import TransformerConfig
from grpo_jax.models.rope import Rope

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names of `hidden_act` in a config.json, and ours."""


ROPE_NUMBERS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": ...},
    "dynamic": {"factor": ...},
    "llama3": {"factor": ..., "low_freq_factor": ..., "high_freq_factor": ...},
    "yarn": {
        "factor": None,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
    },
    "longrope": {"factor": None, "attention_factor": None, "short_factor": ..., "long_factor": ...},
}
"""The numbers a scaling needs and their defaults; `...` marks one that the config has to give."""


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "layer_types": None,
    "quantization_config": None,
}


class Keys:
    """A config.json with the defaults of its family; a key that is in neither is an error that names it."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.raw = raw
        self.defaults = {**_DEFAULTS, **defaults}

    def __getitem__(self, key: str) -> Any:
        if key in self.raw:
            return self.raw[key]
        if key in self.defaults:
            return self.defaults[key]
        raise ValueError(f"config key {key!r} is missing; a {self.architecture} config.json has to give it.")

    @property
    def architecture(self) -> str:
        return self.raw["architectures"][0]

    def refuse(self, key: str, value: Any, supported: str) -> ValueError:
        """The error for a value that the decoder has no switch for."""
        return ValueError(f"config key {key!r} is {value!r}, which is not supported; supported: {supported}.")


@dataclasses.dataclass(frozen=True)
class Family:
    """What one architecture sets.

    Attributes:
      model_type: as in config.json.
      fields: from the keys of a config to the `TransformerConfig` fields in which the family differs from Llama.
      defaults: values of config keys that the family's files may omit.
      only: config keys with the one value (beside its absence) that is supported.
      fused: a projection stored as one tensor, and the parameters that it holds, in order of its rows.
      spare: regular expressions for tensors that its files may hold beside the decoder, and that are left there.
    """

    model_type: str
    fields: Callable[[Keys], dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    spare: tuple[str, ...] = ()


def _check_window(keys: Keys) -> int:
    window = keys["sliding_window"]
    if not isinstance(window, int) or window < 1:
        raise keys.refuse("sliding_window", window, "a positive int where layers slide")
    return window


def _windows(keys: Keys, sliding: Callable[[int], bool]) -> tuple[int | None, ...] | None:
    """The window of each layer: `layer_types` if the config lists them, else where `sliding(layer)` says so."""
    layers, types = keys["num_hidden_layers"], keys["layer_types"]
    if types is None:
        types = ["sliding_attention" if sliding(i) else "full_attention" for i in range(layers)]
    if len(types) != layers or set(types) - {"sliding_attention", "full_attention"}:
        raise keys.refuse("layer_types", types, "one 'full_attention' or 'sliding_attention' for each layer")
    if "sliding_attention" not in types:
        return None
    window = _check_window(keys)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _late_windows(keys: Keys) -> tuple[int | None, ...] | None:
    """Qwen's windows: off unless `use_sliding_window`; then on the layers from `max_window_layers` on."""
    on = keys["use_sliding_window"] and keys["sliding_window"] is not None
    windows = _windows(keys, lambda i: on and i >= keys["max_window_layers"])
    return windows if on else None


def _all_windows(keys: Keys) -> tuple[int | None, ...] | None:
    """One window for every layer, None for full attention."""
    if keys["sliding_window"] is None:
        return None
    return (_check_window(keys),) * keys["num_hidden_layers"]


def _biases(keys: Keys) -> dict[str, Any]:
    return {"qkv_bias": keys["attention_bias"], "o_bias": keys["attention_bias"]}


def _smollm3(keys: Keys) -> dict[str, Any]:
    layers, rotary = keys["num_hidden_layers"], keys["no_rope_layers"]
    if rotary is None:  # The key names its opposite: 1 is a layer with rotary embedding.
        rotary = [(i + 1) % keys["no_rope_layer_interval"] != 0 for i in range(layers)]
    if len(rotary) != layers:
        raise keys.refuse("no_rope_layers", rotary, "one 0 or 1 for each layer")
    windows = _windows(keys, lambda i: not rotary[i]) if keys["use_sliding_window"] and keys["sliding_window"] else None
    return {
        **_biases(keys),
        "mlp_bias": keys["mlp_bias"],
        "rotary_layers": tuple(bool(r) for r in rotary),
        "windows": windows,
    }


def _gemma(keys: Keys) -> dict[str, Any]:
    """What both Gemmas share: sandwich norms around zero, scaled embeddings, a query scale of its own."""
    return {
        **_biases(keys),
        "norms": "sandwich",
        "norm_offset": 1.0,
        "activation": _activation(keys, "hidden_activation"),
        "query_scale": keys["query_pre_attn_scalar"] ** -0.5,
        "embedding_scale": keys["hidden_size"] ** 0.5,
        "logit_soft_cap": keys["final_logit_softcapping"],
    }


def _gemma2(keys: Keys) -> dict[str, Any]:
    return {
        **_gemma(keys),
        "attention_soft_cap": keys["attn_logit_softcapping"],
        "windows": _windows(keys, lambda i: (i + 1) % 2 != 0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    ropes = keys["rope_parameters"] or {}
    if ropes and set(ropes) - {"full_attention", "sliding_attention"}:
        raise keys.refuse("rope_parameters", ropes, "one entry each for 'full_attention' and 'sliding_attention'")
    scaling = {**(keys["rope_scaling"] or {}), **(ropes.get("full_attention") or {})}
    local = ropes.get("sliding_attention") or {}
    return {
        **_gemma(keys),
        "qk_norm": "head",
        "windows": _windows(keys, lambda i: (i + 1) % keys["sliding_window_pattern"] != 0),
        "rope": _rope(keys, {"rope_theta": keys["rope_theta"], **scaling}),
        "local_rope": _rope(keys, {"rope_theta": keys["rope_local_base_freq"], **local}),
    }


def _experts(keys: Keys) -> dict[str, Any]:
    layers, step, dense = keys["num_hidden_layers"], keys["decoder_sparse_step"], keys["mlp_only_layers"] or ()
    experts = keys["num_local_experts"] or keys["num_experts"]  # What transformers 5 calls it when it saves.
    chosen = keys["num_experts_per_tok"]
    if not 1 <= chosen <= experts:
        raise keys.refuse("num_experts_per_tok", chosen, f"1 to num_experts = {experts}")
    return {
        "num_experts": experts,
        "num_experts_per_token": chosen,
        "expert_size": keys["moe_intermediate_size"],
        "expert_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        "normalize_expert_weights": keys["norm_topk_prob"],
        "router_loss_coef": keys["router_aux_loss_coef"],
    }


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    windows = _all_windows(keys) if keys["use_sliding_window"] else None
    return {**_biases(keys), **_experts(keys), "qk_norm": "head", "windows": windows}


def _sparse_hybrid(keys: Keys) -> dict[str, Any]:
    return {**hybrid(keys), **_experts(keys), "shared_expert_size": keys["shared_expert_intermediate_size"]}


_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


FAMILIES: dict[str, Family] = {
    "Qwen2ForCausalLM": Family(
        "qwen2", lambda keys: {"qkv_bias": True, "windows": _late_windows(keys)}, defaults={"sliding_window": 4096}
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        lambda keys: {**_biases(keys), "qk_norm": "head", "windows": _late_windows(keys)},
        defaults={"head_dim": 128, "sliding_window": 4096},
    ),
    "LlamaForCausalLM": Family("llama", lambda keys: {**_biases(keys), "mlp_bias": keys["mlp_bias"]}),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        _smollm3,
        defaults={
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
    ),
    "MistralForCausalLM": Family(
        "mistral",
        lambda keys: {"windows": _all_windows(keys)},
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        only={"layer_types": None},
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _gemma2,
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        only={"use_bidirectional_attention": None},
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _gemma3,
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        },
        # transformers reads attn_logit_softcapping here and then does not apply it: neither reading of it is safe.
        only={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        lambda keys: {"windows": _all_windows(keys)},
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        fused=(("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", lambda keys: {**_biases(keys), "qk_norm": "flat", "norms": "post"}, defaults={"rms_norm_eps": 1e-5}
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _qwen3_moe,
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_local_experts": None,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", hybrid, **QWEN3_5),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", _sparse_hybrid, **QWEN3_5_MOE),
    "Qwen3NextForCausalLM": Family("qwen3_next", _sparse_hybrid, **QWEN3_NEXT),
}


def family_of(raw: Mapping[str, Any]) -> Family:
    """The row of `FAMILIES` for a config.json; an architecture without one is an error that lists those with one."""
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ValueError(
            f"config key 'architectures' is {names}, which is not supported; supported: {', '.join(FAMILIES)}."
        )
    return FAMILIES[names[0]]


def _activation(keys: Keys, key: str) -> str:
    if keys[key] not in ACTIVATIONS:
        raise keys.refuse(key, keys[key], ", ".join(sorted(ACTIVATIONS)))
    return ACTIVATIONS[keys[key]]


def _rope(keys: Keys, given: Mapping[str, Any]) -> Rope:
    """A rotary embedding from `rope_parameters`, or from the older `rope_theta` beside `rope_scaling`."""
    where = "rope_parameters" if keys["rope_parameters"] else "rope_scaling"
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in ("su", "yarn") and keys.raw["architectures"] == ["Phi3ForCausalLM"]:
        kind = "longrope"  # What early Phi-3 files called it.
    if kind not in ROPE_NUMBERS:
        raise keys.refuse(f"{where}.rope_type", kind, ", ".join(ROPE_NUMBERS))
    numbers = {}
    for name, default in ROPE_NUMBERS[kind].items():
        value = given.get(name)
        value = default if value is None else value
        if value is ...:
            raise ValueError(f"config key '{where}.{name}' is missing; rope_type {kind!r} needs it.")
        numbers[name] = tuple(value) if isinstance(value, list) else value
    if kind in ("dynamic", "longrope", "yarn"):
        numbers["max_position_embeddings"] = keys["max_position_embeddings"]
    if kind in ("llama3", "yarn", "longrope"):
        # Phi-3 keeps the number beside the scaling, the others in it; either may be left out.
        original = keys["original_max_position_embeddings"] or given.get("original_max_position_embeddings")
        numbers["original_max_position_embeddings"] = original or keys["max_position_embeddings"]
    fraction = given.get("partial_rotary_factor")
    fraction = keys["partial_rotary_factor"] if fraction is None else fraction
    partial = [name for name, family in FAMILIES.items() if "partial_rotary_factor" in family.defaults]
    if fraction != 1 and keys.architecture not in partial:
        # transformers would ignore it in the other families.
        raise keys.refuse("partial_rotary_factor", fraction, f"1.0, and others in a {' or '.join(partial)}")
    return Rope(
        theta=float(given["rope_theta"]), kind=kind, scaling=tuple(sorted(numbers.items())), fraction=float(fraction)
    )


def read_config(raw: Mapping[str, Any], *, dtype: str = "float32") -> TransformerConfig:
    """The decoder that a config.json describes.

    Args:
      raw: the content of a config.json.
      dtype: compute dtype, "float32" or "bfloat16".

    Returns:
      The config of `Transformer`.

    Raises:
      ValueError: naming the config key, if a key is missing or has a value that the decoder has no switch for.

    Example:
      >>> raw = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
      ...        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
      >>> config = read_config(raw)
      >>> config.head_dim, config.qkv_bias, config.windows
      (8, True, None)
    """
    family = family_of(raw)
    keys = Keys(raw, family.defaults)
    for key in _REQUIRED:
        if not isinstance(keys[key], int) or keys[key] < 1:
            raise keys.refuse(key, keys[key], "a positive int")
    for key, value in {"quantization_config": None, **family.only}.items():
        if raw.get(key) not in (None, value):
            raise keys.refuse(key, raw[key], repr(value))
    heads = keys["num_attention_heads"]
    kv_heads = keys["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise keys.refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    fields: dict[str, Any] = {
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
    fields |= family.fields(keys)
    if "activation" not in fields:
        fields["activation"] = _activation(keys, "hidden_act")
    if "rope" not in fields:
        given = keys["rope_parameters"] or keys["rope_scaling"] or {}
        fields["rope"] = _rope(keys, {"rope_theta": keys["rope_theta"], **given})
    return TransformerConfig(**fields)
