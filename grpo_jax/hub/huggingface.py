"""Read and write checkpoints in Hugging Face's layout, without PyTorch.

`from_pretrained` checks config.json and the headers of the weight files before it loads any parameters. It then loads
one parameter at a time, the largest first, so that the host never holds a second copy of the model.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from grpo_jax.hub.families import read_config
from grpo_jax.hub.files import (
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    Checkpoint,
    StoredTensor,
    atomic_directory,
    check_replaceable,
    parsing,
    read_json,
    stored_tensors,
    write_json,
)
from grpo_jax.hub.gguf import find_gguf, gguf_config, read_gguf
from grpo_jax.hub.keys import has_vision, text_config
from grpo_jax.hub.policy import check_dtype, files_of, quiet_import, state_of
from grpo_jax.hub.quantize import check_method, dequantize_tensors, without_quantization
from grpo_jax.hub.tensors import Tensor, abstract_params, layout_of, prefixes_of, stacked_experts, tensor_plan
from grpo_jax.hub.weights import check_params, check_sizes, check_tensors, read_params, same_weights
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.layers import is_quantized
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import fetch, gather_objects
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.types import Json, Tokenizer

ModelName = str | os.PathLike[str] | Json
"""The name of a model on the hub, a directory, a GGUF file, or a config.json (its path or its content)."""

PROBE = "The quick brown fox is 12 years old, 3 + 4 = 7."
"""A text that every working tokenizer encodes to at least one id."""


def from_pretrained(
    name_or_directory: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    param_dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    revision: str | None = None,
    quantize: str | None = None,
) -> Policy:
    """Load a checkpoint in Hugging Face's layout, or a GGUF file.

    Args:
      name_or_directory: directory, name on the hub (at HF_ENDPOINT if it is set), or GGUF file (its path, or the
        directory or installed package that contains it; requires `grpo_jax[gguf]`). GGUF, bitsandbytes NF4 and MXFP4
        tensors are dequantized.
      dtype: compute dtype, "float32" or "bfloat16". Norms, softmax and logits are always computed in float32.
      param_dtype: dtype of the parameters. None uses `dtype`. "float32" with `dtype="bfloat16"` is mixed precision.
      mesh: mesh over which the parameters are sharded, according to `sharding.TABLE`. None uses the default device.
      revision: branch, tag or commit of a model on the hub. None uses the main branch.
      quantize: format of the projections in decoder layers, for training adapters (`add_lora`): "nf4" (blocks of 64
        weights, double quantization) or "int8" (one scale per output feature). None disables quantization.

    Returns:
      A `Policy`. Its tokenizer is None if the checkpoint does not contain one.

    Raises:
      FileNotFoundError: if the model, its config.json or its safetensors weights do not exist or cannot be downloaded.
      ImportError: if the checkpoint is a GGUF file, and `gguf` is not installed or transformers is too old.
      ValueError: if a dtype, the architecture, a config value or the quantization is not supported; if a tensor is
        missing, unexpected or of the wrong shape; if the tokenizer cannot be loaded or produces no ids for text; or if
        `revision` is set for a local directory or file. These errors are raised before any parameters are loaded.

    Example:
      >>> import tempfile
      >>> from grpo_jax import init_policy
      >>> policy = init_policy({"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as parent:
      ...     save_pretrained(f"{parent}/model", policy)
      ...     loaded = from_pretrained(f"{parent}/model", dtype="bfloat16")
      >>> loaded.params["norm"]["scale"].dtype.name, policy.params["norm"]["scale"].dtype.name
      ('bfloat16', 'float32')
    """
    check_dtype("dtype", dtype)
    check_dtype("param_dtype", param_dtype or dtype)
    check_method(quantize)
    path = find_checkpoint(name_or_directory, revision=revision)
    checkpoint = _open_checkpoint(path)
    raw, stored = checkpoint.raw, checkpoint.stored
    with parsing(path if path.is_file() else path / "config.json"):
        check_sizes(text_config(raw), {name: tensor.shape for name, tensor in stored.items()})
        raw, config = _resolve_tied_embeddings(raw, read_config(without_quantization(raw), dtype=dtype), stored)
        stacked = stacked_experts(stored)
        plan = tensor_plan(raw, config, layout_of(stored), stacked=stacked)
    extra = check_tensors(path, plan, stored, raw, tied=config.tie_word_embeddings)
    return Policy(
        model=Transformer(config),
        params=read_params(plan, stored, abstract_params(config), np.dtype(param_dtype or dtype), mesh, quantize),
        tokenizer=checkpoint.tokenizer,
        config={key: value for key, value in raw.items() if key != "quantization_config"},
        generation_config=checkpoint.generation_config,
        files=checkpoint.files,
        extra_tensors={name: stored[name].to_numpy() for name in extra},
        stacked_experts=stacked,
        loaded_tokenizer=state_of(checkpoint.tokenizer),
    )


def _open_checkpoint(path: Path) -> Checkpoint:
    if path.is_file():
        return read_gguf(path)
    raw = checkpoint_config(path)
    if (path / "adapter_config.json").is_file():
        warnings.warn(
            f"name_or_directory {str(path)!r} also contains an adapter that is not loaded; load it with"
            f" load_lora({str(path)!r}, policy).",
            stacklevel=3,
        )
    present = [name for name in (*TOKENIZER_FILES, *PROCESSOR_FILES) if (path / name).is_file()]
    with parsing(path):
        stored = dequantize_tensors(stored_tensors(path))
    return Checkpoint(
        raw=raw,
        generation_config=read_json(path / "generation_config.json") or {},
        stored=stored,
        tokenizer=load_tokenizer(path) if set(present) & set(TOKENIZER_FILES) else None,
        files={name: (path / name).read_bytes() for name in present},
    )


def read_model(model: ModelName) -> Json:
    """Return the content of a model's config.json, without reading the weights."""
    if isinstance(model, Mapping):
        return dict(model)
    path = Path(model)
    if path.is_file() and path.suffix.lower() != ".gguf":
        return read_json(path) or {}
    return checkpoint_config(find_checkpoint(model, weights=False))


def checkpoint_config(path: Path) -> Json:
    """Return a directory's config.json, or one that is built from a GGUF file's header."""
    if path.is_file():
        return gguf_config(path)
    if (raw := read_json(path / "config.json")) is not None:
        return raw
    if (adapter := read_json(path / "adapter_config.json")) is not None:
        base = adapter.get("base_model_name_or_path")
        raise FileNotFoundError(
            f"name_or_directory {str(path)!r} contains an adapter, not a model: load its base model"
            f"{f' {base}' if base else ''}, then call load_lora({str(path)!r}, policy)."
        )
    raise FileNotFoundError(f"name_or_directory {str(path)!r} does not contain config.json; pass a model directory.")


def save_pretrained(
    directory: str | os.PathLike[str], policy: Policy, *, dtype: str | None = None, max_shard_size: int | str = "5GB"
) -> None:
    """Write a policy as a checkpoint in Hugging Face's layout, for transformers, vLLM, llama.cpp and `from_pretrained`.

    The config and generation config are written unchanged, except for `dtype`. The tokenizer is saved again if it was
    replaced or modified (`policy.tokenizer.chat_template = ...`) or has several chat templates; otherwise its files are
    copied. An existing checkpoint is replaced once all files are written. All processes of a run must call this
    function, but only process 0 writes files.

    Args:
      directory: path of the directory to write.
      policy: policy from `from_pretrained` or `init_policy`, without adapters or quantized params.
      dtype: dtype of the stored weights, "float32", "bfloat16" or "float16". None uses the dtype of the params.
      max_shard_size: maximum size of a weight file, in bytes or as a string such as "5GB".

    Raises:
      FileExistsError: if `directory` is a file or symbolic link, or contains files that do not belong to a checkpoint.
      ValueError: if `dtype` is not supported, or the params are adapters, are quantized or do not match the config.

    Example:
      >>> import tempfile
      >>> from grpo_jax import init_policy
      >>> policy = init_policy({"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as parent:
      ...     save_pretrained(f"{parent}/model", policy)
      ...     sorted(path.name for path in Path(parent, "model").iterdir())
      ['config.json', 'model.safetensors']
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    _check_plain(policy)
    target = Path(directory).expanduser().absolute()
    check_replaceable(target)
    extra, params = policy.extra_tensors, dict(policy.params)
    if (tower := params.pop("tower", None)) is not None:  # a trained tower
        from grpo_jax.hub.vision import tower_tensors

        extra = {**extra, **tower_tensors(policy, fetch(tower))}
    plan = tensor_plan(policy.config, policy.model.config, layout_of(extra), stacked=policy.stacked_experts)
    leaves = flatten_dict(params)
    check_params(plan, leaves)
    if jax.process_count() > 1:
        leaves = fetch(leaves)
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be 'float32', 'bfloat16', 'float16' or None; got {dtype!r}.")
    storage_dtype = np.dtype(dtype or next(iter(leaves.values())).dtype)
    tensors = {tensor.name: tensor for tensor in plan}
    split = split_state_dict_into_shards_factory(
        {**tensors, **extra},
        get_storage_size=lambda x: math.prod(x.shape) * (x if isinstance(x, np.ndarray) else storage_dtype).itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    if jax.process_index() == 0:
        with atomic_directory(target) as scratch:
            for filename, names in split.filename_to_tensors.items():
                arrays = {
                    name: stored_array(tensors[name], leaves).astype(storage_dtype, copy=False)
                    if name in tensors
                    else extra[name]
                    for name in names
                }
                save_file(arrays, scratch / filename, metadata={"format": "pt"})
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                write_json(scratch / "model.safetensors.index.json", index)
            write_json(scratch / "config.json", _with_dtype(policy.config, storage_dtype.name))
            if policy.generation_config:
                write_json(scratch / "generation_config.json", policy.generation_config)
            for name, content in files_of(policy).items():
                (scratch / name).write_bytes(content)
    gather_objects(None)  # a barrier, so that no process returns before the directory is complete


def _check_plain(policy: Policy) -> None:
    if not isinstance(policy.model, Transformer | LoraModel) or not policy.config:
        model = f"{type(policy.model).__name__}{'' if policy.config else ' without a config'}"
        raise ValueError(
            "policy must be created by from_pretrained or init_policy to be written as a checkpoint; its model is a"
            f" {model}. Save policy.params with orbax."
        )
    if isinstance(policy.model, LoraModel):
        raise ValueError("policy has adapters; write them with `save_lora`, or merge them with `merge_lora(policy)`.")
    if is_quantized(policy.params):
        raise ValueError(
            "policy.params are quantized and cannot be saved as a checkpoint. Train adapters with `add_lora` and save"
            " them with `save_lora`, or merge them with `merge_lora(policy)`."
        )


def _with_dtype(config: Json, dtype: str) -> Json:
    """Return a config.json whose `dtype` (or `torch_dtype`) is `dtype`, also in `text_config` if it has such a key."""
    keys, text = ("torch_dtype", "dtype"), dict(config.get("text_config") or {})
    text |= {key: dtype for key in keys if key in text}
    updated: Json = {**config, **dict.fromkeys([key for key in keys if key in config] or ["dtype"], dtype)}
    return {**updated, "text_config": text} if text else updated


def stored_array(tensor: Tensor, leaves: Mapping[tuple[str, ...], jax.Array]) -> np.ndarray:
    """Assemble a checkpoint tensor from parameters, as a contiguous array on the host."""
    parts = []
    for part in tensor.parts:
        leaf = leaves[part.path]
        array = np.asarray(leaf if part.expert is None else leaf[part.expert])
        parts.append(array.T if part.transposed else array)
    if tensor.parts[0].columns is not None:
        whole = np.empty(tensor.shape, parts[0].dtype)
        for part, array in zip(tensor.parts, parts, strict=True):
            (whole.swapaxes(-1, -2) if part.turned else whole)[..., part.columns] = array
        return whole
    return np.ascontiguousarray(np.concatenate(parts) if len(parts) > 1 else parts[0]).reshape(tensor.shape)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer in a directory. Raises ValueError if it cannot be loaded or produces no ids for text.

    transformers selects the tokenizer's class by `model_type`. If a tokenizer of this class encodes text to no ids (for
    example, a word-level tokenizer with a Qwen config), `tokenizer.json` is loaded directly.
    """
    with quiet_import():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    try:
        for kind in (AutoTokenizer, PreTrainedTokenizerFast)[: 1 + Path(directory, "tokenizer.json").exists()]:
            tokenizer: Tokenizer = kind.from_pretrained(str(directory))
            if tokenizer(PROBE, add_special_tokens=False)["input_ids"]:
                return tokenizer
    except Exception as error:
        raise ValueError(
            f"name_or_directory {str(directory)!r} has a tokenizer that transformers cannot load or use ({error}); "
            "repair or remove the tokenizer files."
        ) from error
    raise ValueError(
        f"name_or_directory {str(directory)!r} has a tokenizer that encodes {PROBE!r} to no ids (transformers loads it"
        f" as {type(tokenizer).__name__}); repair the tokenizer files, or add a token for unknown words."
    )


def find_checkpoint(
    name_or_directory: str | os.PathLike[str], *, weights: bool = True, revision: str | None = None
) -> Path:
    """Return a checkpoint's directory or GGUF file. If it is not local, its files are downloaded from the hub.

    If `weights` is False, only config.json is downloaded.
    """
    if (file := find_gguf(name_or_directory)) is not None:
        if revision is not None:
            raise ValueError(f"revision is {revision!r}, but {str(file)!r} is a GGUF file; omit revision.")
        return file
    patterns = ["config.json"]
    if weights:
        patterns += ["generation_config.json", "model.safetensors.index.json", "*.safetensors"]
        patterns += [*TOKENIZER_FILES, *PROCESSOR_FILES, "additional_chat_templates/*"]
    return find_files("name_or_directory", name_or_directory, patterns, revision)


def find_files(
    argument: str, name_or_directory: str | os.PathLike[str], patterns: Sequence[str], revision: str | None = None
) -> Path:
    """Return a local directory, or download the hub files that match `patterns` and return their directory."""
    name = os.fspath(name_or_directory)
    directory = Path(name).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise ValueError(f"revision is {revision!r}, but {argument} {name!r} is a directory; omit revision.")
        return directory
    if isinstance(name_or_directory, Path) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise FileNotFoundError(f"{argument} {name!r} is not a directory; pass an existing directory or a hub name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns], endpoint=hub_endpoint()))
    except Exception as error:
        raise FileNotFoundError(
            f"{argument} {name!r} is not a local directory and could not be downloaded from the hub: {error}"
        ) from error


def hub_endpoint() -> str | None:
    """Return the value of HF_ENDPOINT, or None if it is unset. huggingface_hub reads it only when imported."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _resolve_tied_embeddings(
    raw: Json, config: TransformerConfig, stored: Mapping[str, StoredTensor]
) -> tuple[Json, TransformerConfig]:
    """Return `raw` and `config`, with `tie_word_embeddings` set to False if a stored head differs from the embedding.

    A vision-language config may omit the key. The embeddings are then tied unless the checkpoint contains a head.
    """
    model_prefix, head_prefix = prefixes_of(raw, layout_of(stored))
    head, embedding = stored.get(f"{head_prefix}weight"), stored.get(f"{model_prefix}embed_tokens.weight")
    tied = config.tie_word_embeddings
    if has_vision(raw):
        stated = (raw.get("tie_word_embeddings"), (raw.get("text_config") or {}).get("tie_word_embeddings"))
        tied = next((x for x in stated if x is not None), head is None)
    if tied and head is not None and embedding is not None:
        tied = same_weights(head, embedding)
    if has_vision(raw) or tied != config.tie_word_embeddings:
        lfm2_key = raw.keys() & {"tie_embedding"}
        raw = {**raw, **dict.fromkeys(("tie_word_embeddings", *lfm2_key), tied)}
    return raw, dataclasses.replace(config, tie_word_embeddings=tied)
