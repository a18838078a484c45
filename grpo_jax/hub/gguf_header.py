"""Build a config.json and a tokenizer from the header of a GGUF file.

`ARCHITECTURES` has an entry for each supported architecture, with the values that llama.cpp hard-codes for it.
Unknown keys of an architecture raise an error if they are set, since ignoring them could change the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from grpo_jax.hub.families import FAMILIES
from grpo_jax.hub.weights import check_sizes
from grpo_jax.messages import shorten, show
from grpo_jax.types import Json, Tokenizer

_IGNORED_KEYS = ("vocab_size", "attention.value_length", "attention.value_length_swa", "rope.scaling.finetuned")
"""Keys that are redundant with other keys or tensor shapes, or that only inference engines use."""


class Header:
    """Header of a GGUF file: all keys (`fields`), tensor shapes, and divisors of the RoPE frequencies (`factors`).

    `get` and `[]` look up an architecture key by its name without the prefix (such as `llama.`), and mark it as read.
    """

    def __init__(self, fields: Json, shapes: Mapping[str, tuple[int, ...]], factors: np.ndarray | None):
        self.architecture: str = fields["general.architecture"]
        self.fields, self.shapes, self.factors = fields, shapes, factors
        prefix = f"{self.architecture}."
        self._keys = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
        self._read: set[str] = set(_IGNORED_KEYS)

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of an architecture key, or `default` if it is missing."""
        self._read.add(key)
        return self._keys.get(key, default)

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ValueError(f"GGUF key '{self.architecture}.{key}' is missing; the architecture requires it.")
        return value

    def check_all_read(self) -> None:
        """Raise ValueError if an architecture key was not read, unless its value is zero, False or empty."""
        unread = [key for key, x in self._keys.items() if key not in self._read and x not in (0, 0.0, False, [])]
        if unread:
            names = shorten([f"{self.architecture}.{key} = {show(self._keys[key])}" for key in sorted(unread)])
            raise ValueError(f"unknown GGUF keys could change the model: {names}; load a safetensors checkpoint.")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """llama.cpp's conventions for one architecture."""

    family: str  # key in `FAMILIES`
    extra_keys: Callable[[Header, Json], Json] = lambda header, config: {}  # (header, config.json) → additional keys
    interleaved: bool = False  # whether a rotary pair's dimensions are adjacent, not half a head apart
    norms_plus_one: bool = False  # whether norm weights are stored with 1 added, unlike in Hugging Face checkpoints


def read_header(header: Header) -> tuple[Architecture, Json]:
    """Return a header's `ARCHITECTURES` entry and config.json. Raises ValueError if the model is not supported."""
    name, shapes = header.architecture, header.shapes
    if name not in ARCHITECTURES:
        raise ValueError(
            f"GGUF architecture {name!r} is not supported; load this model's safetensors checkpoint instead. "
            f"Supported architectures: {', '.join(ARCHITECTURES)}."
        )
    if "token_embd.weight" not in shapes:
        raise ValueError("tensor 'token_embd.weight' is missing; use a file that contains a whole model.")
    if not header.get("attention.causal", True):
        raise ValueError(f"GGUF key '{name}.attention.causal' is False; only causal models are supported.")
    architecture = ARCHITECTURES[name]
    check_sizes({"num_hidden_layers": header["block_count"]}, shapes)
    head_dim = header.get("attention.key_length") or header["embedding_length"] // header["attention.head_count"]
    config: Json = {
        "architectures": [architecture.family],
        "vocab_size": shapes["token_embd.weight"][0],  # may exceed the size of the tokenizer's vocabulary
        "hidden_size": header["embedding_length"],
        "intermediate_size": header["feed_forward_length"],
        "num_hidden_layers": header["block_count"],
        "num_attention_heads": header["attention.head_count"],
        "num_key_value_heads": header.get("attention.head_count_kv", header["attention.head_count"]),
        "head_dim": head_dim,
        "max_position_embeddings": header["context_length"],
        "rms_norm_eps": header["attention.layer_norm_rms_epsilon"],
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(header, head_dim),
    }
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {key: header.fields.get(f"tokenizer.ggml.{stored}_token_id") for key, stored in names.items()}
    ids = {key: token for key, token in ids.items() if token is not None}
    config = {**config, **ids, **architecture.extra_keys(header, config)}
    header.check_all_read()
    check_sizes(config, shapes)
    return architecture, {**config, "model_type": FAMILIES[architecture.family].model_type}


def _rope(header: Header, head_dim: int) -> Json:
    """Return `rope_parameters` with the base, the rotated fraction of a head's dimensions, and the scaling."""
    kind = header.get("rope.scaling.type", "none")
    fraction = header.get("rope.dimension_count", head_dim) / head_dim
    rope: Json = {
        "rope_theta": header.get("rope.freq_base", 10000.0),
        **({"partial_rotary_factor": fraction} if fraction != 1 else {}),
    }
    values = {
        "factor": header.get("rope.scaling.factor"),
        "original_max_position_embeddings": header.get("rope.scaling.original_context_length"),
        "beta_fast": header.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": header.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": header.get("rope.scaling.yarn_attn_factor"),
    }
    if kind in ("linear", "yarn"):
        return {**rope, "rope_type": kind, **{key: value for key, value in values.items() if value is not None}}
    if kind != "none":
        name = f"{header.architecture}.rope.scaling.type"
        raise ValueError(f"GGUF key {name!r} must be none, linear or yarn; got {kind!r}.")
    return {**rope, **_scaling_of(rope["rope_theta"], header.factors)}


def _scaling_of(theta: float, factors: np.ndarray | None) -> Json:
    """Return the RoPE scaling for frequency divisors: default for None, llama3 if its formula fits, else longrope."""
    if factors is None:
        return {"rope_type": "default"}
    original_length, largest = 8192, float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original_length / wavelengths - 1) / 3, 0, 1)
    if np.allclose(factors, 1 / ((1 - smooth) / largest + smooth), rtol=1e-5):
        bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original_length}
        return {"rope_type": "llama3", "factor": largest, **bounds}
    values = factors.tolist()
    return {"rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0}


def _gemma3(header: Header, config: Json) -> Json:
    window, layers = header.get("attention.sliding_window", 0), range(config["num_hidden_layers"])
    local_rope = {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10000.0)}
    width_per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        # head_dim, except hidden_size / heads in the 27B model, which llama.cpp also identifies by its 62 layers.
        "query_pre_attn_scalar": width_per_head if config["num_hidden_layers"] == 62 else config["head_dim"],
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "sliding_window": window or 4096,
        "layer_types": ["sliding_attention" if window and (i + 1) % 6 else "full_attention" for i in layers],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local_rope},
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3, norms_plus_one=True),
}
"""Mapping from supported values of `general.architecture` to their conventions. Mistral models use `llama`."""

_GPT2 = ("gpt-2", "smollm")
"""Values of tokenizer.ggml.pre that stand for GPT-2's pre-tokenizer but are not listed in transformers. For `smollm`,
llama.cpp splits digits first, so its ids differ from transformers' if a number follows two or more spaces."""


def read_tokenizer(fields: Json) -> Tokenizer | None:
    """Build a transformers tokenizer from a GGUF file's metadata. Returns None if the file has no tokenizer."""
    kind, pre_tokenizer = fields.get("tokenizer.ggml.model", "none"), fields.get("tokenizer.ggml.pre")
    if kind == "none":
        return None
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as gguf_tokenizers

    supported = {*gguf_tokenizers.GGUF_PRE_TOKENIZER_SPLITS, *_GPT2}
    if kind == "gpt2" and pre_tokenizer not in supported:
        raise ValueError(
            f"GGUF key 'tokenizer.ggml.pre' must be one of {', '.join(sorted(supported))}; got {pre_tokenizer!r}."
        )
    names = gguf_tokenizers.GGUF_TOKENIZER_MAPPING["tokenizer"]
    tokenizer_fields = {name: fields[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in fields}
    backend, _ = gguf_tokenizers.convert_gguf_tokenizer(fields["general.architecture"], tokenizer_fields)

    def special(name: str) -> str | None:
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if token is None else tokenizer_fields["tokens"][token]

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        add_bos_token=fields.get("tokenizer.ggml.add_bos_token", kind == "llama"),  # missing in older files
        add_eos_token=fields.get("tokenizer.ggml.add_eos_token", False),
        chat_template=fields.get("tokenizer.chat_template"),
    )
