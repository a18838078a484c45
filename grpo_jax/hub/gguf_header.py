"""The config.json and the tokenizer that the header of a GGUF file describes.

`ARCHITECTURES` has one row for each llama.cpp architecture, with the values that llama.cpp hard-codes for it. A key
that no row reads is an error, because without it the model would be a different one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from grpo_jax.hub.families import FAMILIES
from grpo_jax.hub.keys import PARTIAL_ROTARY
from grpo_jax.hub.weights import check_sizes
from grpo_jax.messages import show, some
from grpo_jax.types import Json, Tokenizer

NEEDS = "pip install 'grpo_jax[gguf]'"

_UNREAD = ("vocab_size", "attention.value_length", "attention.value_length_swa", "rope.scaling.finetuned")
"""Keys that repeat others or the tensors' shapes, or that only matter to an inference engine."""


class Header:
    """All keys of a GGUF file (`fields`), the shapes of its tensors, and divisors of rotary frequencies (`factors`).

    The keys of its architecture are read without their prefix, and those that were read are recorded.
    """

    def __init__(self, fields: Json, shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, np.ndarray]):
        self.architecture: str = fields["general.architecture"]
        self.fields, self.shapes, self.factors = fields, shapes, factors
        prefix = f"{self.architecture}."
        self._own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
        self._read: set[str] = set(_UNREAD)

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of a key of the architecture, or the default."""
        self._read.add(key)
        return self._own.get(key, default)

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ValueError(f"GGUF key '{self.architecture}.{key}' is missing, and {self.architecture} needs it.")
        return value

    def read(self, keys: Mapping[str, str | tuple[str, object]]) -> Json:
        """Return the values of config keys, given the GGUF key of each, or its GGUF key and the default."""
        return {name: self[at] if isinstance(at, str) else self.get(at[0], at[1]) for name, at in keys.items()}

    @property
    def head_dim(self) -> int:
        return self.get("attention.key_length") or self["embedding_length"] // self["attention.head_count"]

    def refuse(self, key: str, supported: str) -> ValueError:
        """Return the error for a value that the decoder does not support."""
        name, value = f"{self.architecture}.{key}", show(self._own.get(key))
        return ValueError(f"GGUF key {name!r} is {value}, which is not supported; supported: {supported}.")

    def check_all_read(self) -> None:
        """Raise ValueError if the file has keys of the architecture that were not read."""
        left = [key for key, value in self._own.items() if key not in self._read and value not in (0, 0.0, False, [])]
        if left:
            names = some([f"{self.architecture}.{key} = {show(self._own[key])}" for key in sorted(left)])
            raise ValueError(f"GGUF keys that are not known, and without which the model is another one: {names}.")


Keys = Mapping[str, str | tuple[str, object]]
More = Callable[[Header, Json], Json]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How llama.cpp writes one architecture.

    Attributes:
      family: key of `FAMILIES`.
      keys: config keys in addition to Llama's, as in `Header.read`.
      more: (header, config so far) → further config keys.
      pairs: rotary dimensions of queries and keys are stored interleaved, not in two halves.
      shifted: norm weights are stored with 1 added; Hugging Face stores them around zero.
    """

    family: str
    keys: Keys = dataclasses.field(default_factory=dict)
    more: More | None = None
    pairs: bool = False
    shifted: bool = False


_COMMON: Keys = {
    "hidden_size": "embedding_length",
    "intermediate_size": ("feed_forward_length", 0),
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def read_header(header: Header) -> tuple[Architecture, Json]:
    """Return the row of `ARCHITECTURES` and the config.json that the header describes.

    A ValueError names an architecture, a key or a value that is not supported.
    """
    name = header.architecture
    if name not in ARCHITECTURES:
        raise ValueError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}.")
    if "token_embd.weight" not in header.shapes:
        raise ValueError("tensor 'token_embd.weight' is missing.")
    if not header.get("attention.causal", True):
        raise header.refuse("attention.causal", "True")
    row = ARCHITECTURES[name]
    check_sizes({"num_hidden_layers": header["block_count"]}, header.shapes)
    ids = {key: header.fields.get(f"tokenizer.ggml.{each}_token_id") for key, each in _IDS.items()}
    raw: Json = {
        "architectures": [row.family],
        "vocab_size": header.shapes["token_embd.weight"][0],  # may exceed the number of tokens
        **header.read(_COMMON),
        "num_hidden_layers": header["block_count"] - header.get("nextn_predict_layers", 0),
        "num_key_value_heads": header.get("attention.head_count_kv", header["attention.head_count"]),
        "head_dim": header.head_dim,
        "attention_bias": "blk.0.attn_q.bias" in header.shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.shapes,
        "tie_word_embeddings": "output.weight" not in header.shapes,
        "rope_parameters": _rope(header),
        **{key: value for key, value in ids.items() if value is not None},
        **header.read(row.keys),
    }
    if row.more is not None:
        raw = {**raw, **row.more(header, raw)}
    header.check_all_read()
    check_sizes(raw, header.shapes)
    return row, {**raw, "model_type": FAMILIES[raw["architectures"][0]].model_type}


_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}

_YARN: Keys = {
    "factor": ("rope.scaling.factor", None),
    "original_max_position_embeddings": ("rope.scaling.original_context_length", None),
    "beta_fast": ("rope.scaling.yarn_beta_fast", None),
    "beta_slow": ("rope.scaling.yarn_beta_slow", None),
    "attention_factor": ("rope.scaling.yarn_attn_factor", None),
}


def _rope(header: Header) -> Json:
    """Return the `rope_parameters` of a header: base, rotated part of a head, and scaling."""
    theta, kind = header.get("rope.freq_base", 10000.0), header.get("rope.scaling.type", "none")
    header.get("rope.scaling.attn_factor")  # of longrope; follows from its two context lengths
    part = header.get("rope.dimension_count", header.head_dim) / header.head_dim
    partial = part != 1 or ARCHITECTURES[header.architecture].family in PARTIAL_ROTARY
    rope: Json = {"rope_theta": theta, **({"partial_rotary_factor": part} if partial else {})}
    numbers = {key: value for key, value in header.read(_YARN).items() if value is not None}
    names = {f"{size}_factor": f"rope_factors_{size}.weight" for size in ("short", "long")}
    each = {key: header.factors[name].tolist() for key, name in names.items() if name in header.factors}
    if kind in ("none", "longrope") and each:
        return {**rope, "rope_type": "longrope", **each}
    if kind == "none":
        return {**rope, **_by_factors(theta, header.factors.get("rope_freqs.weight"))}
    if kind == "linear":
        return {**rope, "rope_type": kind, "factor": header["rope.scaling.factor"]}
    if kind != "yarn":
        raise header.refuse("rope.scaling.type", "none, linear, yarn, and longrope with its factors")
    return {**rope, "rope_type": kind, **numbers}


def _by_factors(theta: float, factors: np.ndarray | None) -> Json:
    """Return Llama 3's scaling; a file holds only the divisor of each frequency."""
    if factors is None:
        return {"rope_type": "default"}
    original = 8192
    waves = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / waves - 1) / 3, 0, 1)
    usual = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if np.allclose(factors, 1 / ((1 - smooth) / usual["factor"] + smooth), rtol=1e-5):
        return {"rope_type": "llama3", **usual, "original_max_position_embeddings": original}
    each = factors.tolist()
    return {"rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0}


def _kinds(sliding: Iterable[object]) -> list[str]:
    return ["sliding_attention" if x else "full_attention" for x in sliding]


def _two_ropes(header: Header, full: Json, theta: float) -> Json:
    local = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", theta)}
    return {"full_attention": full, "sliding_attention": local}


def _ministral3(header: Header, raw: Json) -> Json:
    scale = header.get("rope.scaling.yarn_log_multiplier", 1.0)
    more = {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": header["attention.temperature_scale"]}
    return {"rope_parameters": {**raw["rope_parameters"], **more}}


def _gemma(header: Header, raw: Json) -> Json:
    """Queries are scaled by the head size, except in the 27B models, which llama.cpp identifies by their layers."""
    of_27b = raw["hidden_size"] // raw["num_attention_heads"]
    return {"query_pre_attn_scalar": of_27b if raw["num_hidden_layers"] in (46, 62) else raw["head_dim"]}


def _gemma3(header: Header, raw: Json) -> Json:
    window, layers = raw["sliding_window"], range(raw["num_hidden_layers"])
    return {
        **_gemma(header, raw),
        "sliding_window": window or 4096,
        "layer_types": _kinds(window and (i + 1) % 6 for i in layers),
        "rope_parameters": _two_ropes(header, raw["rope_parameters"], 10000.0),
    }


def _gemma4(header: Header, raw: Json) -> Json:
    sliding, shared = header["attention.sliding_window_pattern"], header.get("attention.shared_kv_layers", 0)
    widths, heads = (
        value if isinstance(value, list) else [value] * len(sliding)
        for value in (raw["intermediate_size"], raw["num_key_value_heads"])
    )
    header.get("rope.dimension_count_swa")  # all of a head; the factors say which of its frequencies turn
    full = [i for i, x in enumerate(sliding) if not x]
    own = [f"blk.{i}.attn_v.weight" in header.shapes for i in full if i < len(sliding) - shared]
    turned = float(np.mean(header.factors["rope_freqs.weight"] == 1))
    rope = {"rope_type": "proportional", "partial_rotary_factor": turned, "rope_theta": header["rope.freq_base"]}
    experts = header.read({**_EXPERTS, "top_k_experts": "expert_used_count"}) if header.get("expert_count") else {}
    return {
        "global_head_dim": raw["head_dim"],
        "head_dim": header["attention.key_length_swa"],
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_key_value_heads": heads[sliding.index(True)],
        "num_global_key_value_heads": heads[full[0]],
        "attention_k_eq_v": not all(own),
        "num_kv_shared_layers": shared,
        "layer_types": _kinds(sliding),
        "vocab_size_per_layer_input": raw["vocab_size"],
        "rope_parameters": _two_ropes(header, rope, 10000.0),
        **({"enable_moe_block": True, **experts} if experts else {}),
    }


def _phi3(header: Header, raw: Json) -> Json:
    original = header.get("rope.scaling.original_context_length", raw["max_position_embeddings"])
    part = raw["rope_parameters"]["partial_rotary_factor"]
    window = raw["sliding_window"] or None
    return {"sliding_window": window, "original_max_position_embeddings": original, "partial_rotary_factor": part}


def _olmo(header: Header, raw: Json) -> Json:
    """Olmo 3 if layers have a window, else Olmo 2."""
    if not (window := header.get("attention.sliding_window")):
        return {}
    usual = [(i + 1) % 4 for i in range(raw["num_hidden_layers"])]
    rope = raw["rope_parameters"]
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": _kinds(header.get("attention.sliding_window_pattern", usual)),
        "rope_parameters": _two_ropes(header, rope, rope["rope_theta"]),
    }


def _gpt_oss(header: Header, raw: Json) -> Json:
    yarn = raw["rope_parameters"]["rope_type"] == "yarn"
    return {"rope_parameters": raw["rope_parameters"] | ({"truncate": False} if yarn else {})}


def _hybrid(header: Header, raw: Json) -> Json:
    """Delta nets between layers of attention."""
    header.get("rope.dimension_sections")  # positions of images; text has the same position in each section
    every, layers = header.get("full_attention_interval", 4), range(raw["num_hidden_layers"])
    recurrent = header.get("attention.recurrent_layers") or [(i + 1) % every for i in layers]
    return {
        "layer_types": ["linear_attention" if recurrent[i] else "full_attention" for i in layers],
        "linear_value_head_dim": header["ssm.inner_size"] // raw["linear_num_value_heads"],
        # Files in which every layer has experts may leave out the dense width.
        "intermediate_size": raw["intermediate_size"] or raw.get("moe_intermediate_size", 0),
    }


def _lfm2(header: Header, raw: Json) -> Json:
    return {
        "num_key_value_heads": max(raw["num_key_value_heads"]),
        "layer_types": ["full_attention" if heads else "conv" for heads in raw["num_key_value_heads"]],
        "norm_eps": raw["rms_norm_eps"],
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in header.shapes),
        "block_auto_adjust_ff_dim": False,
    }


_EXPERTS: Keys = {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
_QWEN_EXPERTS: Keys = {
    **_EXPERTS, "num_experts_per_tok": "expert_used_count", "norm_topk_prob": ("expert_weights_norm", True)
}  # fmt: skip
_DELTA: Keys = {
    "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
}  # fmt: skip
_SPARSE: Keys = {**_DELTA, **_QWEN_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_GRANITE: Keys = {
    "embedding_multiplier": ("embedding_scale", 1.0), "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": "logit_scale",
}  # fmt: skip
_GEMMA2: Keys = {
    "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
    "final_logit_softcapping": ("final_logit_softcapping", 30.0),
    "sliding_window": ("attention.sliding_window", 4096),
}
_GEMMA3: Keys = {
    "final_logit_softcapping": ("final_logit_softcapping", None), "sliding_window": ("attention.sliding_window", 0)
}  # fmt: skip
_GEMMA4: Keys = {
    "final_logit_softcapping": ("final_logit_softcapping", None), "sliding_window": "attention.sliding_window",
    "hidden_size_per_layer_input": ("embedding_length_per_layer_input", 0),
}  # fmt: skip
_GPT_OSS: Keys = {
    "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window",
}  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _QWEN_EXPERTS),
    "smollm3": Architecture("SmolLM3ForCausalLM", pairs=True),
    "gemma2": Architecture("Gemma2ForCausalLM", _GEMMA2, _gemma, shifted=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _GEMMA3, _gemma3, shifted=True),
    "gemma4": Architecture("Gemma4ForCausalLM", _GEMMA4, _gemma4),
    "phi3": Architecture("Phi3ForCausalLM", {"sliding_window": ("attention.sliding_window", None)}, _phi3),
    "glm4": Architecture("Glm4ForCausalLM"),
    "granite": Architecture(
        "GraniteForCausalLM",
        _GRANITE,
        lambda header, _: {"attention_multiplier": header.get("attention.scale", header.head_dim**-0.5)},
        pairs=True,
    ),
    "mistral3": Architecture("Ministral3ForCausalLM", {}, _ministral3, pairs=True),
    "olmo2": Architecture("Olmo2ForCausalLM", {}, _olmo),
    "gpt-oss": Architecture("GptOssForCausalLM", _GPT_OSS, _gpt_oss),
    "qwen35": Architecture("Qwen3_5ForCausalLM", _DELTA, _hybrid, shifted=True),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", _SPARSE, _hybrid, shifted=True),
    "lfm2": Architecture("Lfm2ForCausalLM", {"conv_L_cache": "shortconv.l_cache"}, _lfm2),
}
"""By `general.architecture`. Mistral's first models are written as `llama`, Olmo 3 as `olmo2`."""


# Tokenizer ------------------------------------------------------------------------------------------------------------

_GPT2 = ("gpt-2", "olmo", "granite-docling", "smollm", "refact")
_LLAMA3 = ("glm4", "chatglm-bpe")
"""Values of tokenizer.ggml.pre that transformers does not list and splits as GPT-2: the ones for which that is right,
and the ones that split as Llama 3. llama.cpp splits the digits of `smollm` and `refact` first, so its ids differ from
transformers' where a number follows two or more spaces."""


def read_tokenizer(fields: Json) -> Tokenizer | None:
    """Return the tokenizer that transformers makes of a GGUF file's vocabulary; None if the file has none."""
    kind = fields.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return None
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import gguf_tokenizer_mapping as made
    except ImportError as error:
        raise ImportError(f"transformers is too old for the tokenizers of GGUF files: {NEEDS}") from error
    split = fields.get("tokenizer.ggml.pre")
    known = {*made.GGUF_PRE_TOKENIZER_SPLITS, *_GPT2, *_LLAMA3}
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ValueError(f"tokenizer.ggml.model is {kind!r}, which is not supported; supported: gpt2, llama, gemma4.")
    if kind == "gpt2" and split not in known:
        supported = ", ".join(sorted(known))
        raise ValueError(f"tokenizer.ggml.pre is {split!r}, which is not supported; supported: {supported}.")
    names = made.GGUF_TOKENIZER_MAPPING["tokenizer"]
    parts = {name: fields[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in fields}
    if split in _LLAMA3:
        parts["pre_tokenizer_type"] = "llama3"
    backend, _ = made.convert_gguf_tokenizer(fields["general.architecture"], parts)

    def special(name: str) -> str | None:
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if token is None else parts["tokens"][token]

    # Older sentencepiece files have no flag. Gemma 4's chat template writes the token itself.
    begins = fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and kind != "gemma4"
    tokenizer: Tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        add_bos_token=begins,
        add_eos_token=fields.get("tokenizer.ggml.add_eos_token", False),
        chat_template=fields.get("tokenizer.chat_template"),
    )
    return tokenizer
