"""LoRA adapters of a policy: add, merge, and read and write them in PEFT's format."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from grpo_jax.hub.files import appearing, check_read, check_replaceable, read_json, reading, stored_tensors, write_json
from grpo_jax.hub.huggingface import find_files, save_pretrained
from grpo_jax.hub.policy import files_of
from grpo_jax.hub.tensors import tensor_plan
from grpo_jax.messages import show, some
from grpo_jax.models.lora import TARGETS, LoraModel, init_adapters, merge_adapters
from grpo_jax.models.sharding import fetch, gather_objects
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.types import Json


def add_lora(
    policy: Policy,
    key: jax.Array,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    targets: str = TARGETS,
    dropout: float = 0.0,
    init: Literal["uniform", "gaussian"] = "uniform",
) -> Policy:
    """Freeze a policy and add trainable low-rank adapters (LoRA, arXiv:2106.09685, section 4.1).

    Args:
      policy: from `from_pretrained` or `init_policy`; its projections may be quantized.
      key: typed PRNG key, consumed.
      rank: of the adapters.
      alpha: the adapters' output is scaled by alpha / rank.
      targets: regular expression for the paths of the projections to adapt.
      dropout: rate in [0, 1) on the input of the adapters.
      init: distribution of A: "uniform" in ±in^(−1/2), or "gaussian" with standard deviation 1 / rank.

    Returns:
      A `Policy` with the same outputs. Its params are the adapters; its model contains the base.

    Raises:
      ValueError: an argument out of range, targets without a match, or a policy that already has adapters.

    Example:
      >>> from grpo_jax import init_policy
      >>> policy = init_policy({"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, jax.random.key(0))
      >>> adapted = add_lora(policy, jax.random.key(1), rank=2)
      >>> {name: x.shape for name, x in adapted.params["layers_0"]["self_attn"]["q_proj"].items()}
      {'a': (16, 2), 'b': (2, 16)}
    """
    if isinstance(policy.model, LoraModel):
        raise ValueError("policy already has adapters; merge them by `merge_lora(policy)` before adding others.")
    if not isinstance(policy.model, Transformer):
        raise ValueError(
            f"policy.model is a {type(policy.model).__name__}; adapters need one from from_pretrained or init_policy."
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}; use a rate in [0, 1).")
    adapters = init_adapters(key, policy.params, rank=rank, targets=targets, init=init)
    return policy.replace(model=LoraModel(policy.params, policy.model, alpha / rank, dropout), params=adapters)


def merge_lora(policy: Policy) -> Policy:
    """Add the adapters to the weights, for `save_pretrained` or for training all weights.

    Args:
      policy: from `add_lora` or `load_lora`; `policy.replace(params=state.params)` after a run.

    Returns:
      A `Policy` with the projections W + alpha / rank · A·B. A quantized base becomes plain arrays on the host, with
      its rounding error.

    Raises:
      ValueError: a policy without adapters.

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
    """Write adapters in PEFT's format, float32, with the tokenizer.

    Projections that the base stores as one tensor (Phi-3) become one adapter with the sum of their ranks.

    Args:
      directory: path to write to, as in `save_pretrained`.
      policy: from `add_lora` or `load_lora`.
      base_name: name or directory of the base, written into the config for PEFT.

    Raises:
      FileExistsError: `directory` contains files that do not belong to a checkpoint.
      ValueError: a policy without adapters.

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
    adapters: dict[tuple[str, ...], dict[str, jax.Array]] = {}  # path of the projection: its "a" and "b"
    for path, leaf in flatten_dict(policy.params).items():
        adapters.setdefault(path[:-1], {})[path[-1]] = leaf
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    untouched = set()
    for tensor in tensor_plan(policy.config, model.config):
        if not tensor.parts[0].transposed:  # norms, biases, the embedding
            continue
        module = tensor.name.removesuffix(".weight")
        nodes = [adapters.get(part.path[:-1]) for part in tensor.parts]
        if not any(nodes):
            untouched.add(module.rsplit(".", 1)[-1])
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
        "target_modules": sorted(ranks if names & untouched else names),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with appearing(target) as scratch:
        save_file(tensors, scratch / "adapter_model.safetensors", metadata={"format": "pt"})
        for name, content in files_of(policy).items():
            (scratch / name).write_bytes(content)
        write_json(scratch / "adapter_config.json", config)


def write_policy(directory: str | os.PathLike[str], policy: Policy, *, base_name: str | None = None) -> None:
    """Write a policy by `save_pretrained`, or its adapters by `save_lora`; called by all processes of a run."""
    if not isinstance(policy.model, LoraModel):
        return save_pretrained(directory, policy)
    whole = policy.replace(params=fetch(policy.params))
    if jax.process_index() == 0:
        save_lora(directory, whole, base_name=base_name)
    gather_objects(None)  # a barrier: the directory is complete


def load_lora(directory: str | os.PathLike[str], policy: Policy, *, revision: str | None = None) -> Policy:
    """Add adapters in PEFT's format to a policy.

    Args:
      directory: contains adapter_config.json and adapter_model.safetensors; or the name of a repository on the hub.
      policy: the base that the adapters were trained on.
      revision: branch, tag or commit of a repository on the hub; None for its main branch.

    Returns:
      A `Policy` as from `add_lora`, with the stored adapters.

    Raises:
      FileNotFoundError: no adapter in the directory.
      ValueError: an unsupported kind of adapter, adapters of another base, or a revision of a directory.

    Example:
      >>> import tempfile
      >>> from grpo_jax import init_policy
      >>> policy = init_policy({"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as parent:
      ...     save_lora(f"{parent}/adapter", add_lora(policy, jax.random.key(1), rank=2, alpha=8.0))
      ...     again = load_lora(f"{parent}/adapter", policy)
      >>> again.model.scale
      4.0
    """
    path = find_files("directory", directory, ["adapter_config.json", "adapter_model.safetensors"], revision)
    config = read_json(path / "adapter_config.json")
    if config is None or not (path / "adapter_model.safetensors").is_file():
        raise FileNotFoundError(f"directory {str(path)!r} needs adapter_config.json and adapter_model.safetensors.")
    if isinstance(policy.model, LoraModel):
        raise ValueError("policy already has adapters; merge them by `merge_lora(policy)` before loading others.")
    with reading(path / "adapter_config.json"):
        _check_supported(config)
        power = 0.5 if config.get("use_rslora") else 1.0
        scale = config["lora_alpha"] / config["r"] ** power
    stored = stored_tensors(path, "adapter_model")
    check_read(stored)
    adapters: dict[tuple[str, ...], jax.Array] = {}
    for tensor in tensor_plan(policy.config, policy.model.config):
        module = tensor.name.removesuffix(".weight")
        names = [f"base_model.model.{module}.lora_{side}.weight" for side in "AB"]
        if not stored.keys() >= set(names):
            continue
        sides = [stored.pop(name) for name in names]
        with reading(f"directory {str(path)!r}: the adapter of {module}"):
            (rank, fan_in), (fan_out, _) = sides[0].shape, sides[1].shape
        if (fan_out, fan_in) != tensor.shape or sides[1].shape[1] != rank:
            raise ValueError(
                f"directory {str(path)!r}: the adapter of {module} is {fan_in} → {rank} → {fan_out}, and the policy's "
                f"projection is {tensor.shape[1]} → {tensor.shape[0]}; it belongs to another base."
            )
        # The model has a single scale; B absorbs the difference of an adapter with another rank or alpha.
        patterns = (config.get("alpha_pattern") or {}).items()  # PEFT's keys match the end of a module's name
        alpha = next((x for key, x in patterns if re.search(rf"(^|\.)({key})$", module)), config["lora_alpha"])
        a, b = (side.rows(0, side.shape[0]).astype(np.float32) for side in sides)
        row = 0
        for part in tensor.parts:
            rows = b[row : row + part.rows] * np.float32(alpha / rank**power / scale)
            adapters[(*part.path[:-1], "a")] = jnp.array(a.T, copy=True)
            adapters[(*part.path[:-1], "b")] = jnp.array(rows.T, copy=True)
            row += part.rows
    if stored or not adapters:
        raise ValueError(
            f"directory {str(path)!r} adapts projections that the policy does not have: {some(sorted(stored))}."
        )
    model = LoraModel(policy.params, policy.model, scale, config.get("lora_dropout") or 0.0)
    return policy.replace(model=model, params=unflatten_dict(adapters))


def _check_supported(config: Json) -> None:
    """Raise ValueError unless a PEFT config describes plain low-rank adapters."""
    for key, value in {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False}.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"config key {key!r} is {config[key]!r}, which is not supported; supported: {value!r}.")
    for key in ("modules_to_save", "layers_pattern", "alora_invocation_tokens"):
        if config.get(key):
            raise ValueError(f"config key {key!r} is {config[key]!r}, which is not supported; remove it.")
    dropout, pattern = {"lora_dropout": config.get("lora_dropout") or 0.0}, config.get("alpha_pattern") or {}
    for key, value in {"r": config["r"], "lora_alpha": config["lora_alpha"], **pattern, **dropout}.items():
        re.compile(key)
        most = 1 if key in dropout else math.inf
        if type(value) not in (int, float) or not 0 <= value < most or (value == 0 and key == "r"):
            raise ValueError(f"config key {key!r} is {show(value)}, which is out of range.")


def _lora_model(policy: Policy) -> LoraModel:
    if not isinstance(policy.model, LoraModel):
        raise ValueError("policy has no adapters; add them by `add_lora(policy, key)`.")
    return policy.model
