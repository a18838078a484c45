"""Policies with random weights, and serialization of tokenizers."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Iterator, Sized
from pathlib import Path

import jax
import jax.numpy as jnp

from grpo_jax.config.fields import NO_FLOAT16
from grpo_jax.hub.families import family_of, read_config
from grpo_jax.hub.files import TOKENIZER_FILES
from grpo_jax.hub.keys import has_vision, text_config
from grpo_jax.models.devices import platform_of
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.types import Json, Params, Tokenizer


def init_policy(
    config: Json,
    key: jax.Array,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Json | None = None,
    dtype: str = "float32",
) -> Policy:
    """Create a policy with random weights.

    Args:
      config: content of config.json, with at least `architectures`, `vocab_size`, `hidden_size`, `intermediate_size`,
        `num_hidden_layers` and `num_attention_heads`. `model_type` is set automatically.
      key: typed PRNG key; do not reuse it.
      tokenizer: transformers tokenizer. None creates a policy without a tokenizer.
      generation_config: content of generation_config.json. If None, the token ids in `config` are used.
      dtype: dtype of the computation and the parameters, "float32" or "bfloat16".

    Returns:
      A `Policy`. Matrices are drawn from N(0, `initializer_range`²). Norms scale by 1, and projection biases are 0.

    Raises:
      ValueError: if the architecture, a config value or `dtype` is not supported.

    Example:
      >>> policy = init_policy({"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": 3},
      ...     jax.random.key(0))
      >>> policy.eos_token_ids, policy.config["model_type"]
      ((3,), 'llama')
    """
    check_dtype("dtype", dtype)
    if has_vision(config):
        inner = text_config(config)["architectures"]
        raise ValueError(f"config key 'architectures' must be {inner}, the text model; got {config['architectures']}.")
    raw = {**config, "model_type": family_of(config).model_type, "dtype": dtype}
    model = Transformer(read_config(raw, dtype=dtype))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), _random_params(model, key))
    if generation_config is None:
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        generation_config = {name: raw[name] for name in ids if raw.get(name) is not None}
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    return Policy(model, params, tokenizer, raw, dict(generation_config), files, loaded_tokenizer=state_of(tokenizer))


def check_dtype(argument: str, value: str) -> None:
    """Raise ValueError unless `value` is a supported dtype for params and computation."""
    if value not in ("float32", "bfloat16"):
        reason = f": {NO_FLOAT16}" if value == "float16" else ""
        raise ValueError(f"{argument} must be 'float32' or 'bfloat16'; got {value!r}{reason}.")


def state_of(tokenizer: Tokenizer | None) -> object:
    """Return a value that changes if the tokenizer is replaced or modified, or None if there is no tokenizer."""
    if tokenizer is None:
        return None
    attributes = [getattr(tokenizer, x, None) for x in ("chat_template", "special_tokens_map", "model_max_length")]
    added = tokenizer("")["input_ids"]  # add_bos_token is False for some tokenizers that add a BOS token
    return tokenizer, copy.deepcopy(attributes), added, len(tokenizer) if isinstance(tokenizer, Sized) else 0


def files_of(policy: Policy) -> dict[str, bytes]:
    """Return the content of each file to save with a policy, keyed by name. A changed tokenizer is saved again."""
    named = isinstance(getattr(policy.tokenizer, "chat_template", None), dict)  # saved in a subdirectory by default
    if policy.loaded_tokenizer == state_of(policy.tokenizer) and not named:
        return dict(policy.files)
    others = {name: content for name, content in policy.files.items() if name not in TOKENIZER_FILES}
    return others | (tokenizer_files(policy.tokenizer) if hasattr(policy.tokenizer, "save_pretrained") else {})


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return a tokenizer's files as bytes, keyed by name. Named chat templates are stored in tokenizer_config.json."""
    named = isinstance(getattr(tokenizer, "chat_template", None), dict)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch, save_jinja_files=not named)
        return {path.name: path.read_bytes() for path in Path(scratch).iterdir() if path.name in TOKENIZER_FILES}


def _random_params(model: Transformer, key: jax.Array) -> Params:
    """Return initial params.

    On accelerators, a program is compiled for each param shape, since a single program for all params compiles slowly.
    """
    if platform_of()[0] == "cpu":
        return jax.jit(model.init)(key, jnp.zeros((1, 1), jnp.int32))["params"]
    return model.lazy_init(key, jax.ShapeDtypeStruct((1, 1), jnp.int32), mutable=["params"])["params"]


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress transformers' warning that PyTorch was not found."""
    previous = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS", "")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        yield
    finally:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = previous
