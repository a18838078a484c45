"""Models that also see: the language model in their config.json."""

from __future__ import annotations

from grpo_jax.types import Json

SEEING: dict[str, tuple[dict[str, str], Json]] = {
    "Gemma3ForConditionalGeneration": ({"gemma3_text": "Gemma3ForCausalLM"}, {"model_type": "gemma3_text",
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "max_position_embeddings": 131072}),
    "Gemma4ForConditionalGeneration": ({"gemma4_text": "Gemma4ForCausalLM"}, {"model_type": "gemma4_text",
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8}),
    "Mistral3ForConditionalGeneration": ({"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-5}),
    "Qwen3_5ForConditionalGeneration": ({"qwen3_5_text": "Qwen3_5ForCausalLM"}, {"model_type": "qwen3_5_text",
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16}),
    "Qwen3_5MoeForConditionalGeneration": ({"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        {"model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16}),
}  # fmt: skip
"""Models that also see: the architecture of their language model by its `model_type`, and defaults of its config.

Of such a model the language model is loaded; what is beside it goes from the checkpoint into an export as it came."""


def sees(raw: Json) -> bool:
    """Whether a config.json is that of a model with a language model inside."""
    names = raw.get("architectures") or []
    return len(names) == 1 and names[0] in SEEING


def text_config(raw: Json) -> Json:
    """The config of the language model alone: `text_config` of a model that sees, else the config as it is."""
    if not sees(raw):
        return raw
    architectures, defaults = SEEING[raw["architectures"][0]]
    inner = {**defaults, **(raw.get("text_config") or {})}
    if inner["model_type"] not in architectures:
        supported = ", ".join(map(repr, architectures))
        raise ValueError(
            f"config key 'text_config.model_type' is {inner['model_type']!r}, which is not supported; "
            f"supported: {supported}."
        )
    # What is said of the whole model counts for the language model too.
    of_all = ("tie_word_embeddings", "quantization_config", "compression_config")
    whole = {key: raw[key] for key in of_all if raw.get(key) is not None}
    return {**inner, **whole, "architectures": [architectures[inner["model_type"]]]}
