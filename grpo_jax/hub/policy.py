"""Policies made anew, and set up for a run: fresh weights, a config's settings, devices."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.config.sft import Config
from grpo_jax.hub.families import family_of, read_config
from grpo_jax.hub.files import TOKENIZER_FILES
from grpo_jax.hub.keys import sees, text_config
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.platform import compute_dtype, has_wide_sums, platform_of
from grpo_jax.models.sharding import place
from grpo_jax.models.sight import implementation
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.types import Json, Model, Params, Tokenizer


def init_policy(
    config: Json,
    key: jax.Array,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Json | None = None,
    dtype: str = "float32",
) -> Policy:
    """Make a policy with fresh weights, for `save_pretrained` to write as a checkpoint.

    Args:
      config: what config.json shall say: at least `architectures`, `vocab_size`, `hidden_size`, `intermediate_size`,
        `num_hidden_layers` and `num_attention_heads`; `model_type` is added.
      key: typed PRNG key, consumed.
      tokenizer: that of transformers, or None.
      generation_config: what generation_config.json shall say; None means the token ids of `config`.
      dtype: compute and parameter dtype.

    Returns:
      A `Policy`; matrices are normal with `initializer_range`, norms one, biases zero.

    Example:
      >>> import jax
      >>> policy = init_policy({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...                       "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
      ...                       "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": 3}, jax.random.key(0))
      >>> policy.eos_token_ids, policy.config["model_type"]
      ((3,), 'qwen3')
    """
    if sees(config):
        inner = text_config(config)["architectures"]
        raise ValueError(
            f"config key 'architectures' is {config['architectures']}: what sees is not made; use {inner}."
        )
    raw = {**config, "model_type": family_of(config).model_type, "dtype": dtype}
    model = Transformer(read_config(raw, dtype=dtype))
    params = _random_params(model, key)
    if generation_config is None:
        generation_config = {
            name: raw[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if raw.get(name) is not None
        }
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return Policy(model, params, tokenizer, raw, dict(generation_config), files, loaded_tokenizer=state_of(tokenizer))


def state_of(tokenizer: Tokenizer | None) -> object:
    """The tokenizer and what of it is changed in place; None without one."""
    if tokenizer is None:
        return None
    changing = [getattr(tokenizer, name, None) for name in ("chat_template", "special_tokens_map")]
    return tokenizer, copy.deepcopy(changing), len(tokenizer) if isinstance(tokenizer, Sized) else 0


def files_of(policy: Policy) -> dict[str, bytes]:
    """The files to write with a policy: those that it was loaded with, or those of the tokenizer that it now has."""
    if policy.loaded_tokenizer == state_of(policy.tokenizer):
        return dict(policy.files)
    others = {name: content for name, content in policy.files.items() if name not in TOKENIZER_FILES}
    return others | (tokenizer_files(policy.tokenizer) if hasattr(policy.tokenizer, "save_pretrained") else {})


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that a tokenizer of transformers is saved as, name to bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        return {path.name: path.read_bytes() for path in Path(scratch).iterdir() if path.name in TOKENIZER_FILES}


def _random_params(model: Transformer, key: jax.Array) -> Params:
    """Params as `model.init` makes them.

    In one program a GPU's compiler takes a third of a second for the random numbers of each matrix, one after another:
    on an H100's machine 71 s for 24 layers. So there each shape is a program.
    """
    if platform_of()[0] == "cpu":
        return jax.jit(model.init)(key, jnp.zeros((1, 1), jnp.int32))["params"]
    return model.lazy_init(key, jax.ShapeDtypeStruct((1, 1), jnp.int32), mutable=["params"])["params"]


def with_settings(
    model: Model, config: Config, devices: Sequence[Any] = (), mesh: jax.sharding.Mesh | None = None
) -> Model:
    """The model with the config's compute dtype and recomputation, and the attention that suits the devices.

    A model of the user's own is left as it is.
    """
    if not isinstance(model, Transformer | LoraModel):
        return model
    return _with_shape(
        model,
        dtype=compute_dtype(config.compute_dtype, devices),
        remat=bool(config.gradient_checkpointing),
        # On a mesh the layers would wait for a number from another device.
        remat_on_cpu=(mesh is None or mesh.size == 1) and platform_of(devices)[0] == "cpu",
        attention=implementation(model.config.attention, devices),
        mesh=mesh if mesh is not None and mesh.size > 1 else None,
        wide_sums=has_wide_sums(devices) if model.config.wide_sums is None else model.config.wide_sums,
        # Its compiler takes a second or more for each layer.
        loop_layers=any(device.platform == "tpu" for device in devices),
    )


def with_checkpointing(model: Model, *, recompute: bool) -> Model:
    """The model whose layers are recomputed in the backward pass, or kept; one of the user's own is left as it is."""
    return _with_shape(model, remat=recompute)


def place_policy(policy: Policy, mesh: jax.sharding.Mesh | None) -> Policy:
    """The policy with its params, and a frozen base, on a mesh by `sharding.TABLE`; itself without a mesh."""
    model = policy.model if mesh is None else _with_shape(policy.model, mesh=mesh if mesh.size > 1 else None)
    frozen = not jax.tree_util.all_leaves([model])
    return policy.replace(model=place(model, mesh) if frozen else model, params=place(policy.params, mesh))


def _with_shape(model: Model, **changes: Any) -> Model:
    """The model with other fields of its `TransformerConfig`; one of the user's own is left as it is."""
    if not isinstance(model, Transformer | LoraModel):
        return model
    decoder = Transformer(dataclasses.replace(model.config, **changes))
    return dataclasses.replace(model, model=decoder) if isinstance(model, LoraModel) else decoder


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Import transformers without its advice that PyTorch was not found: nothing here needs it."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
