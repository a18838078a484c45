"""The header of a GGUF file: the keys of its architecture, and what most architectures read from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax.messages import show, some
from grpo_jax.types import Json

_UNREAD = ("vocab_size", "attention.value_length", "attention.value_length_swa", "rope.scaling.finetuned")
"""Keys that say again what others or the tensors say, or what only an inference engine asks for."""


class Header:
    """The keys of one architecture, without its name before them, and which of them have been asked for.

    Attributes:
      architecture: as llama.cpp names it.
      shapes: of the file's tensors, by name.
      factors: of the rotary embedding, [frequencies], for the file's tensors that hold some; by name.
    """

    def __init__(
        self, fields: Json, shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, np.ndarray] | None = None
    ):
        self.architecture: str = fields["general.architecture"]
        self.shapes = shapes
        self.factors = factors or {}
        self.fields = fields
        prefix = f"{self.architecture}."
        self._own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
        self._asked: set[str] = set(_UNREAD)

    def get(self, key: str, default: object = None) -> Any:
        """The value of a key of the architecture, or the default."""
        self._asked.add(key)
        return self._own.get(key, default)

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ValueError(f"GGUF key '{self.architecture}.{key}' is missing, and {self.architecture} needs it.")
        return value

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which may be more than there are tokens."""
        if "token_embd.weight" not in self.shapes:
            raise ValueError("tensor 'token_embd.weight' is missing.")
        return self.shapes["token_embd.weight"][0]

    def refuse(self, key: str, supported: str) -> ValueError:
        """The error for a value that the decoder has no switch for."""
        name, value = f"{self.architecture}.{key}", show(self._own.get(key))
        return ValueError(f"GGUF key {name!r} is {value}, which is not supported; supported: {supported}.")

    def has(self, tensor: str) -> bool:
        """Whether the first layer has a tensor."""
        return f"blk.0.{tensor}" in self.shapes

    def check_all_read(self) -> None:
        """Raise ValueError if the file has keys of the architecture that nothing has asked for."""
        left = [key for key, value in self._own.items() if key not in self._asked and value not in (0, 0.0, False, [])]
        if left:
            names = some([f"{self.architecture}.{key} = {show(self._own[key])}" for key in sorted(left)])
            raise ValueError(f"GGUF keys that are not known, and without which the model is another one: {names}.")


def common_keys(header: Header) -> Json:
    """The keys of every config.json."""
    if not header.get("attention.causal", True):
        raise header.refuse("attention.causal", "True")
    heads = header["attention.head_count"]
    raw = {
        "vocab_size": header.vocab_size,
        "hidden_size": header["embedding_length"],
        "intermediate_size": header.get("feed_forward_length", 0),
        "num_hidden_layers": header["block_count"] - header.get("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "max_position_embeddings": header["context_length"],
        "rms_norm_eps": header["attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": "output.weight" not in header.shapes,
    }
    if (size := header.get("attention.key_length")) is not None:
        raw["head_dim"] = size
    return raw


def head_dim(header: Header) -> int:
    return header.get("attention.key_length") or header["embedding_length"] // header["attention.head_count"]


def rope_keys(header: Header) -> Json:
    """The rotary embedding of whole heads: its base and its scaling."""
    if header.get("rope.dimension_count", head_dim(header)) != head_dim(header):
        raise header.refuse("rope.dimension_count", f"the size of a head, {head_dim(header)}")
    return {"rope_parameters": {"rope_theta": header.get("rope.freq_base", 10000.0), **scaling_of(header)}}


def scaling_of(header: Header) -> Json:
    """The scaling of a rotary embedding, as `rope_parameters` has it."""
    kind = header.get("rope.scaling.type", "none")
    numbers = {
        "factor": header.get("rope.scaling.factor"),
        "original_max_position_embeddings": header.get("rope.scaling.original_context_length"),
        "beta_fast": header.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": header.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": header.get("rope.scaling.yarn_attn_factor"),
    }
    if kind == "none":
        return _by_factors(header)
    if kind not in ("linear", "yarn"):
        raise header.refuse("rope.scaling.type", "none, linear, yarn")
    kept = numbers if kind == "yarn" else {"factor": numbers["factor"]}
    return {"rope_type": kind, **{key: value for key, value in kept.items() if value is not None}}


def _by_factors(header: Header) -> Json:
    """Llama 3's scaling, of which a file has only what each frequency is divided by."""
    factors = header.factors.get("rope_freqs.weight")
    if factors is None:
        return {"rope_type": "default"}
    theta, original = header.get("rope.freq_base", 10000.0), 8192
    waves = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / waves - 1) / 3, 0, 1)
    usual = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if np.allclose(factors, 1 / ((1 - smooth) / usual["factor"] + smooth), rtol=1e-5):
        return {"rope_type": "llama3", **usual, "original_max_position_embeddings": original}
    each = [float(factor) for factor in factors]
    return {"rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0}


def bias_keys(header: Header) -> dict[str, bool]:
    return {"attention_bias": header.has("attn_q.bias")}
