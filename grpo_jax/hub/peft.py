"""Add LoRA adapters to a policy, merge them, and read and write them in PEFT's format."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.hub.files import (
    atomic_directory,
    check_dtypes,
    check_replaceable,
    parsing,
    read_json,
    stored_tensors,
    write_json,
)
from grpo_jax.hub.huggingface import find_files, save_pretrained
from grpo_jax.hub.policy import files_of
from grpo_jax.hub.tensors import tensor_plan
from grpo_jax.messages import shorten, show
from grpo_jax.models.lora import TARGETS, LoraModel, init_adapters, merge_adapters
from grpo_jax.models.sharding import fetch, gather_objects
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.types import Json


def add_lora(
    policy: Policy, key: jax.Array, *, rank: int = 16, alpha: float = 32.0, targets: str = TARGETS, dropout: float = 0.0
) -> Policy:
    """Freeze a policy and add trainable low-rank adapters (LoRA, arXiv:2106.09685, section 4.1).

    Args:
      policy: policy from `from_pretrained` or `init_policy`. Its projections may be quantized.
      key: typed PRNG key; do not reuse it.
      rank: rank of the adapters, at least 1.
      alpha: scaling parameter. The adapters' output is multiplied by alpha / rank.
      targets: regular expression for the full paths of the projections to adapt, such as layers_0/self_attn/q_proj.
      dropout: dropout rate in [0, 1) for the adapters' input.

    Returns:
      A `Policy` with the same outputs. Its params are the adapters; its model contains the frozen base weights.

    Raises:
      ValueError: if an argument is out of range, `targets` matches nothing, or the model is custom or has adapters.

    Example:
      >>> from grpo_jax import init_policy
      >>> policy = init_policy({"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, jax.random.key(0))
      >>> adapted = add_lora(policy, jax.random.key(1), rank=2)
      >>> {name: x.shape for name, x in adapted.params["layers_0"]["self_attn"]["q_proj"].items()}
      {'a': (16, 2), 'b': (2, 16)}
    """
    if isinstance(policy.model, LoraModel):
        raise ValueError("policy already has adapters; merge them with `merge_lora(policy)` before adding more.")
    if not isinstance(policy.model, Transformer):
        raise ValueError(
            f"policy must be created by from_pretrained or init_policy; its model is a {type(policy.model).__name__}."
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1); got {dropout}.")
    adapters = init_adapters(key, policy.params, rank=rank, targets=targets)
    return policy.replace(model=LoraModel(policy.params, policy.model, alpha / rank, dropout), params=adapters)


def merge_lora(policy: Policy) -> Policy:
    """Merge the adapters into the weights, for `save_pretrained` or for training all weights.

    Args:
      policy: policy from `add_lora` or `load_lora`. After a run, pass `policy.replace(params=state.params)`.

    Returns:
      A `Policy` with the projections W + alpha / rank · A·B, for base weights W and adapters A [in, rank] and
      B [rank, out]. A quantized base is dequantized to arrays on the host; the quantization error remains.

    Raises:
      ValueError: if the policy does not have adapters.

    Example:
      >>> base = {"layers_0": {"self_attn": {"q_proj": {"kernel": jnp.zeros((2, 2))}}}}
      >>> trained = {"layers_0": {"self_attn": {"q_proj": {"a": jnp.array([[1.0], [2.0]]), "b": jnp.ones((1, 2))}}}}
      >>> merged = merge_lora(Policy(LoraModel(base, None, scale=0.5), trained))
      >>> merged.params["layers_0"]["self_attn"]["q_proj"]["kernel"].tolist()
      [[0.5, 0.5], [1.0, 1.0]]
    """
    model = _lora_model(policy)
    return policy.replace(model=model.model, params=merge_adapters(model.base, policy.params, model.scale))


def save_lora(directory: str | os.PathLike[str], policy: Policy, *, base_name: str | None = None) -> None:
    """Write adapters in PEFT's format as float32, together with the tokenizer and any processor files.

    If the base checkpoint stores several projections as one tensor (as for Phi-3), their adapters are combined into one
    adapter, whose rank is the sum of their ranks.

    Args:
      directory: path of the directory to write; see `save_pretrained`.
      policy: policy from `add_lora` or `load_lora`.
      base_name: name or directory of the base model, to be stored in adapter_config.json for PEFT. None stores null.

    Raises:
      FileExistsError: if `directory` is a file or symbolic link, or contains files that do not belong to a checkpoint.
      ValueError: if the policy does not have adapters.

    Example:
      >>> import tempfile
      >>> from grpo_jax import init_policy
      >>> policy = init_policy({"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as parent:
      ...     save_lora(f"{parent}/adapter", add_lora(policy, jax.random.key(1), rank=2))
      ...     sorted(path.name for path in Path(parent, "adapter").iterdir())
      ['adapter_config.json', 'adapter_model.safetensors']
    """
    from safetensors.numpy import save_file

    model = _lora_model(policy)
    target = Path(directory).expanduser().absolute()
    check_replaceable(target)
    adapters: dict[tuple[str, ...], dict[str, jax.Array]] = {}  # path of a projection → its "a" and "b"
    for path, leaf in flatten_dict(policy.params).items():
        adapters.setdefault(path[:-1], {})[path[-1]] = leaf
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    unadapted = set()
    for tensor in tensor_plan(policy.config, model.config):
        if not tensor.parts[0].transposed:  # a norm, a bias or the embedding
            continue
        module = tensor.name.removesuffix(".weight")
        nodes = [adapters.get(part.path[:-1]) for part in tensor.parts]
        if not any(nodes):
            unadapted.add(module.rsplit(".", 1)[-1])
            continue
        ranks[module] = sum(node["a"].shape[1] for node in nodes if node)
        b = np.zeros((tensor.shape[0], ranks[module]), np.float32)
        row = column = 0
        for part, node in zip(tensor.parts, nodes, strict=True):
            if node:
                width = node["a"].shape[1]
                b[row : row + part.rows, column : column + width] = np.asarray(node["b"], np.float32).T
                column += width
            row += part.rows
        a = [np.asarray(node["a"], np.float32).T for node in nodes if node]
        tensors[f"base_model.model.{module}.lora_A.weight"] = np.ascontiguousarray(np.concatenate(a))
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    rank = min(ranks.values())
    names = {module.rsplit(".", 1)[-1] for module in ranks}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": model.scale * rank,
        "rank_pattern": {module: r for module, r in ranks.items() if r != rank},
        "alpha_pattern": {module: model.scale * r for module, r in ranks.items() if r != rank},
        "lora_dropout": model.dropout,
        "target_modules": sorted(ranks if policy.extra_tensors or names & unadapted else names),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with atomic_directory(target) as scratch:
        save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        for name, content in files_of(policy).items():
            (scratch / name).write_bytes(content)
        write_json(scratch / "adapter_config.json", config)


def write_policy(directory: str | os.PathLike[str], policy: Policy, *, base_name: str | None = None) -> None:
    """Write a policy with `save_pretrained`, or its adapters with `save_lora`. All processes must call it."""
    if not isinstance(policy.model, LoraModel):
        return save_pretrained(directory, policy)
    fetched = policy.replace(params=fetch(policy.params))
    if jax.process_index() == 0:
        save_lora(directory, fetched, base_name=base_name)
    gather_objects(None)  # a barrier, so that no process returns before the directory is complete


def load_lora(directory: str | os.PathLike[str], policy: Policy, *, revision: str | None = None) -> Policy:
    """Load adapters in PEFT's format and add them to a policy.

    Args:
      directory: directory with adapter_config.json and adapter_model.safetensors, or the name of a hub repository.
      policy: policy with the base model that the adapters were trained on.
      revision: branch, tag or commit of a hub repository. If None, the main branch is used.

    Returns:
      A `Policy` as returned by `add_lora`, with the stored adapters.

    Raises:
      FileNotFoundError: if `directory` does not contain an adapter, does not exist or cannot be downloaded.
      ValueError: if the adapters are not supported or do not match the policy, if the policy already has adapters, or
        if `revision` is set for a directory.

    Example:
      >>> import tempfile
      >>> from grpo_jax import init_policy
      >>> policy = init_policy({"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as parent:
      ...     save_lora(f"{parent}/adapter", add_lora(policy, jax.random.key(1), rank=2, alpha=8.0))
      ...     loaded = load_lora(f"{parent}/adapter", policy)
      >>> loaded.model.scale
      4.0
    """
    path = find_files("directory", directory, ["adapter_config.json", "adapter_model.safetensors"], revision)
    config = read_json(path / "adapter_config.json")
    if config is None or not (path / "adapter_model.safetensors").is_file():
        problem = "lacks adapter_config.json or adapter_model.safetensors"
        raise FileNotFoundError(f"directory {str(path)!r} {problem}; pass the directory of an adapter.")
    if isinstance(policy.model, LoraModel):
        raise ValueError("policy already has adapters; merge them with `merge_lora(policy)` before loading more.")
    with parsing(path / "adapter_config.json"):
        _check_supported(config)
        power = 0.5 if config.get("use_rslora") else 1.0
        scale = config["lora_alpha"] / config["r"] ** power
    stored = stored_tensors(path, "adapter_model")
    check_dtypes(stored)
    adapters: dict[tuple[str, ...], jax.Array] = {}
    for tensor in tensor_plan(policy.config, policy.model.config):
        module = tensor.name.removesuffix(".weight")
        names = [f"base_model.model.{module}.lora_{side}.weight" for side in "AB"]
        if not stored.keys() >= set(names):
            continue
        sides = [stored.pop(name) for name in names]
        with parsing(f"directory {str(path)!r}: the adapter of {module}"):
            (rank, fan_in), (fan_out, _) = sides[0].shape, sides[1].shape
        if (fan_out, fan_in) != tensor.shape or sides[1].shape[1] != rank:
            raise ValueError(
                f"directory {str(path)!r}: the adapter of {module} maps {fan_in} → {rank} → {fan_out}, but the "
                f"projection maps {tensor.shape[1]} → {tensor.shape[0]}; load the adapter's base model."
            )
        # The model has a single scale. If a projection's rank or alpha differs from `r` or `lora_alpha`, B is rescaled.
        patterns = (config.get("alpha_pattern") or {}).items()  # PEFT matches keys against the end of a module's name
        alpha = next((x for key, x in patterns if re.search(rf"(^|\.)({key})$", module)), config["lora_alpha"])
        a, b = (side.rows(0, side.shape[0]).astype(np.float32) for side in sides)
        row = 0
        for part in tensor.parts:
            rows = b[row : row + part.rows] * np.float32(alpha / rank**power / scale)
            adapters[(*part.path[:-1], "a")] = jnp.array(a.T, copy=True)
            adapters[(*part.path[:-1], "b")] = jnp.array(rows.T, copy=True)
            row += part.rows
    if stored or not adapters:
        problem = f"adapters for projections the policy lacks ({shorten(sorted(stored))})" if stored else "no adapters"
        raise ValueError(f"directory {str(path)!r} has {problem}; pass adapters that were trained on this model.")
    model = LoraModel(policy.params, policy.model, scale, config.get("lora_dropout") or 0.0)
    return policy.replace(model=model, params=unflatten_dict(adapters))


def _check_supported(config: Json) -> None:
    """Raise ValueError unless a PEFT config describes LoRA adapters without unsupported extensions such as DoRA."""
    for key, value in {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False}.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"config key {key!r} must be {value!r}; got {config[key]!r}.")
    unset = ("modules_to_save", "layers_pattern", "layer_replication", "alora_invocation_tokens", "kasa_config")
    for key in (*unset, "arrow_config", "use_bdlora"):
        if config.get(key):
            raise ValueError(f"config key {key!r} must be unset; got {config[key]!r}.")
    init = str(config.get("init_lora_weights")).lower()
    if init.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
        raise ValueError(f"config key 'init_lora_weights' must keep the base weights; {init!r} changes them.")
    dropout, pattern = {"lora_dropout": config.get("lora_dropout") or 0.0}, config.get("alpha_pattern") or {}
    for key, value in {"r": config["r"], "lora_alpha": config["lora_alpha"], **pattern, **dropout}.items():
        re.compile(key)
        limit, kind = (1, "number in [0, 1)") if key in dropout else (math.inf, "positive number")
        if type(value) not in (int, float) or not 0 <= value < limit or (value == 0 and key in ("r", "lora_alpha")):
            key, kind = (f"alpha_pattern.{key}", "non-negative number") if key in pattern else (key, kind)
            raise ValueError(f"config key {key!r} must be a {kind}; got {show(value)}.")


def _lora_model(policy: Policy) -> LoraModel:
    if not isinstance(policy.model, LoraModel):
        raise ValueError("policy does not have adapters; add them with `add_lora(policy, key)`.")
    return policy.model
