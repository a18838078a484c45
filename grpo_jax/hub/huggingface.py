"""Checkpoints in Hugging Face's layout, in and out, without PyTorch.

`from_pretrained` checks everything that can be checked from config.json and the headers of the weight files before it
reads the first weight. Tensors are read by rows into their parameters one at a time, the largest first, so the host
never holds a second copy of the model. `save_pretrained` writes into a directory of a temporary name and renames it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.devices.sharding import fetch, gather_objects, parameter_sharding
from grpo_jax.hub.families import read_config
from grpo_jax.hub.files import (
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    StoredTensor,
    appearing,
    check_read,
    check_replaceable,
    read_json,
    some,
    stored_tensors,
    write_json,
)
from grpo_jax.hub.mxfp4 import Source, unpacked
from grpo_jax.hub.policy import Policy
from grpo_jax.hub.seeing import sees
from grpo_jax.hub.tensors import LAYOUTS, Part, Tensor, abstract_params, layout_of, nest, parameter_paths, tensor_plan
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import Transformer
from grpo_jax.types import Params

WEIGHT_FILES = ("model.safetensors.index.json", "*.safetensors")


BLOCK = 1 << 24
"""Bytes read at a time, so that a tensor on its way into its parameter costs no second tensor."""


PROBE = "The quick brown fox is 12 years old, 3 + 4 = 7."
"""A text that no working tokenizer encodes to nothing."""


def from_pretrained(
    name_or_directory: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    param_dtype: str | None = None,
    remat: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Policy:
    """Load a checkpoint in Hugging Face's layout.

    Args:
      name_or_directory: a directory, or the name of a model on the hub.
      dtype: compute dtype, "float32" or "bfloat16"; norms, softmax and logits are float32 either way.
      param_dtype: dtype of the parameters; None means `dtype`. "float32" beside `dtype="bfloat16"` is mixed precision.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      mesh: devices to place the parameters on, each tensor straight into its shards by `sharding.TABLE`; None for the
        default device.

    Returns:
      A `Policy`. Its tokenizer is None where the directory has no tokenizer files.

    Raises:
      FileNotFoundError: no such directory or model, or one without config.json or without safetensors weights.
      ValueError: an architecture or a config value that is not supported; tensors that are missing, unexpected or of
        another shape; a tokenizer that encodes text to nothing. All of this is found before a weight is read.

    Example:
      >>> import tempfile
      >>> from grpo_jax import init_policy
      >>> policy = init_policy({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...                       "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
      ...                       "num_key_value_heads": 1, "head_dim": 8}, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as parent:
      ...     save_pretrained(f"{parent}/model", policy)
      ...     again = from_pretrained(f"{parent}/model", dtype="bfloat16")
      >>> again.params["norm"]["scale"].dtype.name, policy.params["norm"]["scale"].dtype.name
      ('bfloat16', 'float32')
    """
    for argument, value in (("dtype", dtype), ("param_dtype", param_dtype or dtype)):
        if value not in ("float32", "bfloat16"):
            raise ValueError(f"{argument} is {value!r}; use 'float32' or 'bfloat16'.")
    directory = find_checkpoint(name_or_directory)
    raw = read_json(directory / "config.json")
    if raw is None:
        raise FileNotFoundError(f"name_or_directory {str(directory)!r} has no config.json; is it a model checkpoint?")
    config = dataclasses.replace(read_config(raw, dtype=dtype), remat=remat)
    stored = unpacked(stored_tensors(directory))
    if sees(raw):
        raw = _with_head(raw, stored)
        config = dataclasses.replace(config, tie_word_embeddings=raw["tie_word_embeddings"])
    plan = tensor_plan(raw, config, layout_of(stored))
    beside = _check_tensors(directory, plan, stored, tied=config.tie_word_embeddings, seeing=sees(raw))
    there = [name for name in (*TOKENIZER_FILES, *PROCESSOR_FILES) if (directory / name).is_file()]
    return Policy(
        model=Transformer(config),
        params=_read_params(plan, stored, abstract_params(config), np.dtype(param_dtype or dtype), mesh),
        tokenizer=load_tokenizer(directory) if set(there) & set(TOKENIZER_FILES) else None,
        # Weights that were quantized are not any more, here and when they are saved.
        config={key: value for key, value in raw.items() if key != "quantization_config"},
        generation_config=read_json(directory / "generation_config.json") or {},
        files={name: (directory / name).read_bytes() for name in there},
        beside={name: x.mapped() for name in beside if isinstance(x := stored[name], StoredTensor)},
    )


def save_pretrained(
    directory: str | os.PathLike[str], policy: Policy, *, dtype: str | None = None, max_shard_size: int | str = "5GB"
) -> None:
    """Write a policy as a checkpoint in Hugging Face's layout, for transformers, vLLM, llama.cpp and `from_pretrained`.

    Config, generation config and tokenizer files are written as they came; only `dtype` in config.json follows the
    weights. The directory appears under its name when it is complete, and replaces an older checkpoint of that name.
    Processes of one run call it together; the first one writes, and the others wait for it.

    Args:
      directory: where to.
      policy: what to write.
      dtype: of the stored weights, "float32", "bfloat16" or "float16"; None means that of the parameters.
      max_shard_size: bytes of one weight file, as 5_000_000_000 or "5GB"; beyond it the weights are split.

    Raises:
      FileExistsError: `directory` exists and holds files that are no checkpoint's.
      ValueError: another dtype, or parameters that are not those of the config.

    Example:
      >>> import tempfile
      >>> from grpo_jax import init_policy
      >>> policy = init_policy({"architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...                       "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
      ...                       "num_key_value_heads": 1, "head_dim": 8}, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as parent:
      ...     save_pretrained(f"{parent}/model", policy)
      ...     sorted(path.name for path in Path(parent, "model").iterdir())
      ['config.json', 'model.safetensors']
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    if isinstance(policy.model, LoraModel):
        raise ValueError("policy has adapters; write them by `save_lora`, or all weights after `merge_lora(policy)`.")
    target = Path(directory).expanduser().absolute()
    check_replaceable(target)
    if sees(policy.config) and not policy.beside:
        raise ValueError("policy.beside is empty: load what a model sees by from `from_pretrained`.")
    plan = tensor_plan(policy.config, policy.model.config, layout_of(policy.beside))
    leaves = dict(parameter_paths(policy.params))
    _check_params(plan, leaves)
    if jax.process_count() > 1:
        leaves = fetch(leaves)
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(
            f"dtype is {dtype!r}; use 'float32', 'bfloat16', 'float16', or None to keep that of the params."
        )
    stored = np.dtype(dtype or next(iter(leaves.values())).dtype)

    split = split_state_dict_into_shards_factory(
        {**{tensor.name: tensor for tensor in plan}, **policy.beside},
        get_storage_size=lambda x: math.prod(x.shape) * (x if isinstance(x, np.ndarray) else stored).itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    tensors = {tensor.name: tensor for tensor in plan}
    config = _with_dtype(policy.config, stored.name)
    if jax.process_index() == 0:
        with appearing(target) as scratch:
            for filename, names in split.filename_to_tensors.items():
                made = [name for name in names if name in tensors]
                arrays = {name: stored_array(tensors[name], leaves).astype(stored, copy=False) for name in made}
                arrays |= {name: policy.beside[name] for name in names if name not in tensors}
                save_file(arrays, scratch / filename, metadata={"format": "pt"})
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                write_json(scratch / "model.safetensors.index.json", index)
            write_json(scratch / "config.json", config)
            if policy.generation_config:
                write_json(scratch / "generation_config.json", policy.generation_config)
            for name, content in policy.files.items():
                (scratch / name).write_bytes(content)
    gather_objects(None)  # the others wait until all is there


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json that names the dtype of the weights, also that of the language model in it."""
    named = {**config, "torch_dtype" if "torch_dtype" in config else "dtype": dtype}
    inner = dict(config.get("text_config") or {})
    inner |= {key: dtype for key in ("torch_dtype", "dtype") if key in inner}
    return named | ({"text_config": inner} if inner else {})


def stored_array(tensor: Tensor, leaves: Mapping[tuple[str, ...], Any]) -> np.ndarray:
    """The array of one tensor of a checkpoint, from the parameters by path; on the host, contiguous."""
    parts = []
    for part in tensor.parts:
        leaf = leaves[part.path]
        array = np.asarray(leaf if part.expert is None else leaf[part.expert])
        parts.append(array.T if part.transposed else array)
    if tensor.parts[0].column is not None:
        return np.stack(parts, axis=-1).reshape(tensor.shape)
    return np.ascontiguousarray(np.concatenate(parts) if len(parts) > 1 else parts[0])


def load_tokenizer(directory: str | os.PathLike[str]) -> Any:
    """The tokenizer of a directory, by transformers; one that encodes text to no ids is refused.

    transformers makes some tokenizers anew from their vocabulary, by `model_type` in config.json, and so breaks one
    made at home (a word-level one beside a Qwen config, say). Where that encodes text to nothing, `tokenizer.json` is
    taken as it stands.

    Args:
      directory: with tokenizer files.

    Returns:
      What `AutoTokenizer` makes of it, or a `PreTrainedTokenizerFast`.

    Raises:
      ValueError: it cannot be loaded, or it encodes a probe text to nothing.
    """
    with _quiet_import():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    try:
        for kind in (AutoTokenizer, PreTrainedTokenizerFast):
            tokenizer = kind.from_pretrained(str(directory))
            if tokenizer(PROBE, add_special_tokens=False)["input_ids"]:
                return tokenizer
            if not (Path(directory) / "tokenizer.json").exists():
                break
    except Exception as error:
        raise ValueError(
            f"name_or_directory {str(directory)!r} has a tokenizer that transformers cannot load or use ({error}); "
            "mend or remove its tokenizer files."
        ) from error
    raise ValueError(
        f"name_or_directory {str(directory)!r} has a tokenizer that encodes {PROBE!r} to no ids (transformers loads it "
        f"as {type(tokenizer).__name__}); mend its tokenizer files, or give it a token for unknown words."
    )


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
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


def find_checkpoint(name_or_directory: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The local directory of a checkpoint, fetched from the hub where the name is one of the hub's; by choice only its
    config."""
    name = os.fspath(name_or_directory)
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if isinstance(name_or_directory, Path) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise FileNotFoundError(
            f"name_or_directory {name!r} is no directory; give one, or a hub name like owner/model."
        )
    from huggingface_hub import snapshot_download

    more = ("generation_config.json", *WEIGHT_FILES, *TOKENIZER_FILES, *PROCESSOR_FILES) if weights else ()
    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", *more]))
    except Exception as error:
        raise FileNotFoundError(
            f"name_or_directory {name!r} is no local directory, and the hub did not give it: {error}"
        ) from error


def _with_head(raw: dict[str, Any], stored: Mapping[str, Source]) -> dict[str, Any]:
    """The config of a model that sees, with a word on whether its head is its embedding: else the checkpoint says."""
    said = (raw.get("tie_word_embeddings"), (raw.get("text_config") or {}).get("tie_word_embeddings"))
    tied = next((x for x in said if x is not None), not any(head + "weight" in stored for _, head in LAYOUTS))
    return {**raw, "tie_word_embeddings": tied}


def _check_tensors(
    directory: Path, plan: tuple[Tensor, ...], stored: Mapping[str, Source], tied: bool, seeing: bool
) -> list[str]:
    """Compare the names and shapes of a checkpoint with those of its config; the names beside the language model."""
    wanted = {tensor.name: tensor.shape for tensor in plan}
    # A tied head may be stored a second time, and old files keep the frequencies that the config gives anyhow.
    heads = {head + "weight" for _, head in LAYOUTS} if tied else set()
    spare = {name for name in stored if name.endswith("rotary_emb.inv_freq")} | heads
    others = [name for name in stored if name not in wanted and name not in spare]
    model, head = LAYOUTS[layout_of(stored)]
    problems = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": [name for name in others if not seeing or name.startswith((model, head))],
        "of another shape": [
            f"{name} {list(stored[name].shape)} where config.json says {list(shape)}"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    told = [f"{what}: {some(names)}" for what, names in problems.items() if names]
    if told:
        raise ValueError(f"name_or_directory {str(directory)!r}: config.json and weights disagree; {'; '.join(told)}.")
    check_read(stored, wanted)
    return others


def _check_params(plan: tuple[Tensor, ...], leaves: Mapping[tuple[str, ...], Any]) -> None:
    """Compare a tree of parameters with the config that it is saved beside."""
    wanted = {part.path: part.shape for tensor in plan for part in tensor.parts}
    problems = [f"{'/'.join(path)} is missing" for path in wanted if path not in leaves]
    problems += [f"{'/'.join(path)} is unexpected" for path in leaves if path not in wanted]
    problems += [
        f"{'/'.join(path)} has shape {leaves[path].shape}, not {shape}"
        for path, shape in wanted.items()
        if path in leaves and leaves[path].shape[-len(shape) :] != shape
    ]
    if problems:
        raise ValueError(f"policy.params are not those of policy.config: {some(problems)}.")


def _read_params(
    plan: tuple[Tensor, ...],
    stored: Mapping[str, Source],
    abstract: Params,
    dtype: np.dtype,
    mesh: jax.sharding.Mesh | None,
) -> Params:
    """Read every parameter, the largest first: the peak is then all of them, and little beside the largest."""
    sources: dict[tuple[str, ...], list[tuple[Source, int, Part]]] = {}
    for tensor in plan:
        first = 0
        for part in tensor.parts:
            sources.setdefault(part.path, []).append((stored[tensor.name], first, part))
            first += part.rows if part.column is None else 0
    shapes = {path: leaf.shape for path, leaf in parameter_paths(abstract)}
    arrays = {}
    for path in sorted(shapes, key=lambda path: -math.prod(shapes[path])):
        array = np.empty(shapes[path], dtype)
        for source, first, part in sources[path]:
            _copy_rows(source, first, part, array if part.expert is None else array[part.expert])
        arrays[path] = _place(path, array, mesh)
        del array
    return nest({path: arrays[path] for path in shapes})


def _copy_rows(source: Source, first: int, part: Part, out: np.ndarray) -> None:
    """Copy rows of a stored tensor into a parameter, a block at a time."""
    width = math.prod(source.shape[1:]) * source.dtype.itemsize
    step = max(1, BLOCK // max(width, 1))
    for start in range(0, part.rows, step):
        count = min(step, part.rows - start)
        block = source.rows(first + start, count)
        block = block if part.column is None else block[..., part.column :: 2]
        if part.transposed:
            out[:, start : start + count] = block.T
        else:
            out[start : start + count] = block


def _place(path: tuple[str, ...], array: np.ndarray, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Put one parameter on its devices, each shard on its own."""
    if mesh is None:
        return jnp.array(array, copy=True)
    sharding = parameter_sharding(path, array.shape, mesh)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
