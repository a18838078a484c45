"""Keys in config.json that model families share, and the text model's config in vision-language configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from grpo_jax.messages import show
from grpo_jax.models.rope import Rope
from grpo_jax.types import Json

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
"""Mapping from `hidden_act` in a config.json to the decoder's name for the activation."""

ROPE_NUMBERS: dict[str, dict[str, Any]] = {
    "default": {}, "linear": {"factor": ...}, "dynamic": {"factor": ...},
    "llama3": {"factor": ..., "low_freq_factor": ..., "high_freq_factor": ...},
    "yarn": {"factor": None, "attention_factor": None, "mscale": None, "mscale_all_dim": None, "beta_fast": 32,
        "beta_slow": 1, "truncate": True},
    "longrope": {"factor": None, "attention_factor": None, "short_factor": ..., "long_factor": ...},
    "proportional": {"factor": 1.0, "partial_rotary_factor": 1.0},
}  # fmt: skip
"""Parameters of each RoPE type and their defaults; `...` marks a parameter that the config must contain."""

PARTIAL_ROTARY = (
    "Phi3ForCausalLM", "Glm4ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM",
)  # fmt: skip
"""Architectures that may apply RoPE to only part of each head's dimensions."""

Fields = dict[str, Any]
"""Keyword arguments to `TransformerConfig`."""

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Config keys whose values must be positive integers."""

_DEFAULTS = {
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 32768,
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None, "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 28, "layer_types": None, "quantization_config": None,
}  # fmt: skip


class Keys:
    """A config.json with the defaults of its family. If neither contains a key, a lookup raises ValueError."""

    def __init__(self, raw: Json, defaults: Json):
        self.raw = raw
        self.defaults = {**_DEFAULTS, **defaults}

    def __getitem__(self, key: str) -> Any:
        if key in self.raw:
            return self.raw[key]
        if key in self.defaults:
            return self.defaults[key]
        raise ValueError(f"config key {key!r} is missing; a {self.architecture} config.json must contain it.")

    @property
    def architecture(self) -> str:
        return self.raw["architectures"][0]

    def refuse(self, key: str, value: object, supported: str) -> ValueError:
        """Return a ValueError for a config key. `supported` describes its supported values."""
        return ValueError(f"config key {key!r} must be {supported}; got {value!r}.")

    def refuse_quantized(self, methods: Collection[str]) -> None:
        """Raise ValueError if the weights are quantized with a method that is not in `methods`."""
        for key in ("quantization_config", "compression_config"):  # older checkpoints use the second key
            stored = self.raw.get(key) or {}
            method = stored.get("quant_method")
            if stored and method not in methods:
                raise ValueError(
                    f"config key {key!r} is {show(stored)}: weights quantized"
                    f" {'without a quant_method' if method is None else f'with {method}'} are not supported; only"
                    " bitsandbytes NF4 and gpt-oss MXFP4 are. Load the original bfloat16 checkpoint; to quantize it for"
                    " training adapters, pass quantize='nf4' or quantize='int8' to from_pretrained."
                )


@dataclasses.dataclass(frozen=True)
class Family:
    """An entry of `families.FAMILIES`: how an architecture's config.json is read and its tensors are named."""

    model_type: str
    fields: Callable[[Keys], Fields]  # returns the `TransformerConfig` fields that differ from Llama's
    defaults: Json = dataclasses.field(default_factory=dict)  # values of config keys that a config.json may omit
    only: Json = dataclasses.field(default_factory=dict)  # config key → its only supported value besides null
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (tensor name, projections that it concatenates)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # decoder module → its name in a checkpoint
    stacked: str = ""  # if experts are stacked: gate and up are "columns" (alternating) or "halves" (gate first)
    quantized: tuple[str, ...] = ()  # supported values of `quant_method`; weights are dequantized to bfloat16
    spare: tuple[str, ...] = ()  # regular expressions for the names of tensors that are ignored if present


def check_window(keys: Keys) -> int:
    """Return `sliding_window`. Raises ValueError unless it is a positive integer."""
    window = keys["sliding_window"]
    if not isinstance(window, int) or window < 1:
        raise keys.refuse("sliding_window", window, "a positive integer if layers have sliding windows")
    return window


def windows_of(keys: Keys, sliding: Callable[[int], bool]) -> tuple[int | None, ...] | None:
    """Return each layer's window, or None if no layer has one. Without `layer_types`, `sliding(layer)` is used."""
    layers, types = keys["num_hidden_layers"], keys["layer_types"]
    if types is None:
        types = ["sliding_attention" if sliding(i) else "full_attention" for i in range(layers)]
    if len(types) != layers or set(types) - {"sliding_attention", "full_attention"}:
        raise keys.refuse("layer_types", types, "a list with 'full_attention' or 'sliding_attention' for each layer")
    if "sliding_attention" not in types:
        return None
    window = check_window(keys)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def all_windows(keys: Keys) -> tuple[int | None, ...] | None:
    """Return `sliding_window` for every layer, or None (full attention) if the key is unset."""
    if keys["sliding_window"] is None:
        return None
    return (check_window(keys),) * keys["num_hidden_layers"]


def biases_of(keys: Keys) -> Fields:
    return {"qkv_bias": keys["attention_bias"], "o_bias": keys["attention_bias"]}


def activation_of(keys: Keys, key: str) -> str:
    if keys[key] not in ACTIVATIONS:
        raise keys.refuse(key, keys[key], f"one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[keys[key]]


def rope_of(keys: Keys, rotary: Json | None = None) -> Rope:
    """Build a `Rope` from `rotary`, which defaults to the config's `rope_parameters` or the older `rope_scaling`."""
    rotary = keys["rope_parameters"] or keys["rope_scaling"] or {} if rotary is None else rotary
    rotary = {"rope_theta": keys["rope_theta"], **rotary}
    where = "rope_parameters" if keys["rope_parameters"] else "rope_scaling"
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind in ("su", "yarn") and keys.raw["architectures"] == ["Phi3ForCausalLM"]:
        kind = "longrope"  # called "su" or "yarn" in early Phi-3 files
    if kind not in ROPE_NUMBERS:
        raise keys.refuse(f"{where}.rope_type", kind, f"one of {', '.join(ROPE_NUMBERS)}")
    scaling = {}
    for name, default in ROPE_NUMBERS[kind].items():
        value = rotary.get(name)
        value = default if value is None else value
        if value is ...:
            raise ValueError(f"config key '{where}.{name}' is missing; rope_type {kind!r} requires it.")
        scaling[name] = tuple(value) if isinstance(value, list) else value
    if kind in ("dynamic", "longrope", "yarn"):
        scaling["max_position_embeddings"] = keys["max_position_embeddings"]
    if kind in ("llama3", "yarn", "longrope"):
        # Phi-3 stores this key at the top level, other families in `rotary`. It is optional.
        original = keys["original_max_position_embeddings"] or rotary.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = original or keys["max_position_embeddings"]
    fraction = rotary.get("partial_rotary_factor")
    fraction = keys["partial_rotary_factor"] if fraction is None else fraction
    if kind == "proportional":  # the fraction of frequencies, not of head dimensions
        scaling["partial_rotary_factor"], fraction = fraction, 1.0
    if fraction != 1 and keys.architecture not in PARTIAL_ROTARY:
        # transformers ignores the factor for other architectures.
        supported = f"1.0 unless the architecture is one of {', '.join(PARTIAL_ROTARY)}"
        raise keys.refuse("partial_rotary_factor", fraction, supported)
    return Rope(
        theta=float(rotary["rope_theta"]), kind=kind, scaling=tuple(sorted(scaling.items())), fraction=float(fraction)
    )


def two_ropes(keys: Keys, local_theta: float) -> Fields:
    """Return the rotary embeddings for full attention (where `rope_scaling` applies) and for sliding windows."""
    ropes = keys["rope_parameters"] or {}
    if ropes and set(ropes) - {"full_attention", "sliding_attention"}:
        raise keys.refuse("rope_parameters", ropes, "a dict with the keys 'full_attention' and 'sliding_attention'")
    scaling = {**(keys["rope_scaling"] or {}), **(ropes.get("full_attention") or {})}
    local = ropes.get("sliding_attention") or {}
    return {"rope": rope_of(keys, scaling), "local_rope": rope_of(keys, {"rope_theta": local_theta, **local})}


VISION_MODELS: dict[str, tuple[dict[str, str], Json]] = {
    "Gemma3ForConditionalGeneration": ({"gemma3_text": "Gemma3ForCausalLM"}, {"model_type": "gemma3_text",
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "max_position_embeddings": 131072}),
    "Gemma4ForConditionalGeneration": ({"gemma4_text": "Gemma4ForCausalLM"}, {"model_type": "gemma4_text",
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8}),
    "Idefics3ForConditionalGeneration": ({"llama": "LlamaForCausalLM"}, {"model_type": "llama"}),
    "SmolVLMForConditionalGeneration": ({"llama": "LlamaForCausalLM"}, {"model_type": "llama"}),
    "Mistral3ForConditionalGeneration": ({"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-5}),
    "Qwen2_5_VLForConditionalGeneration": ({"qwen2_5_vl_text": "Qwen2ForCausalLM"}, {"model_type": "qwen2_5_vl_text",
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}),
    "Qwen3_5ForConditionalGeneration": ({"qwen3_5_text": "Qwen3_5ForCausalLM"}, {"model_type": "qwen3_5_text",
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16}),
    "Qwen3_5MoeForConditionalGeneration": ({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        {"model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16}),
}  # fmt: skip
"""Vision-language models. Each has a dict that maps the text model's `model_type` to its architecture, and the defaults
of the text model's config. `from_pretrained` builds only the text model, but keeps the other tensors for saving."""


def has_vision(raw: Json) -> bool:
    """Return whether a config.json describes a vision-language model."""
    names = raw.get("architectures") or []
    return len(names) == 1 and names[0] in VISION_MODELS


def text_config(raw: Json) -> Json:
    """Return the text model's config: `text_config` of a vision-language model, otherwise `raw` itself."""
    if not has_vision(raw):
        return raw
    architectures, defaults = VISION_MODELS[raw["architectures"][0]]
    # Qwen2.5-VL's published checkpoints have the text model's keys at the top level.
    flat = {key: value for key, value in raw.items() if key != "model_type"}
    inner = {**defaults, **(raw.get("text_config") or flat)}
    if inner["model_type"] not in architectures:
        supported = " or ".join(map(repr, architectures))
        raise ValueError(f"config key 'text_config.model_type' must be {supported}; got {inner['model_type']!r}.")
    # Top-level keys that also apply to the text model.
    shared = ("tie_word_embeddings", "quantization_config", "compression_config")
    whole = {key: raw[key] for key in shared if raw.get(key) is not None}
    return {**inner, **whole, "architectures": [architectures[inner["model_type"]]]}
