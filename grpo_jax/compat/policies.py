"""Load and save a trainer's policy and tokenizer, and create adapters from PEFT's `LoraConfig`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from grpo_jax.hub.huggingface import checkpoint_config, find_checkpoint, from_pretrained
from grpo_jax.hub.peft import add_lora, write_policy
from grpo_jax.models.devices import compute_dtype
from grpo_jax.models.lora import TARGETS
from grpo_jax.models.sharding import gather_objects
from grpo_jax.models.transformer import projections
from grpo_jax.policy import Policy
from grpo_jax.types import Tokenizer

# Accepted fields of a `LoraConfig`: fields that are read below, metadata, and fields that have no effect here.
_PEFT_FIELDS = (
    "r lora_alpha lora_dropout use_rslora target_modules peft_type task_type auto_mapping peft_version revision"
    " base_model_name_or_path runtime_config fan_in_fan_out megatron_core qalora_group_size ensure_weight_tying"
    " layers_pattern"
)


def load_policy(model: str | Path | Policy, dtype: str | None, compute: str) -> tuple[Policy, str]:
    """Load a policy with params in `dtype`. Returns it and the run's compute dtype: `compute`, except as below.

    A dtype of None means float32. "auto" means float32 for float32 checkpoints (also if config.json has no dtype).
    For all others, it means bfloat16, also as the compute dtype. A `Policy` is returned unchanged if `dtype` is None.
    """
    if isinstance(model, Policy):
        if dtype is not None:
            raise ValueError(
                f"model_init_kwargs sets dtype {dtype!r}, but model is a Policy; load it in that dtype instead"
            )
        return model, compute
    if dtype == "auto":
        stored = checkpoint_config(find_checkpoint(model, weights=False))
        dtype = "float32" if stored.get("dtype", stored.get("torch_dtype")) in (None, "float32") else "bfloat16"
        compute = "bfloat16" if dtype == "bfloat16" else compute
    return from_pretrained(model, dtype=compute_dtype(compute), param_dtype=dtype or "float32"), compute


def with_tokenizer(policy: Policy, tokenizer: Tokenizer | None) -> Policy:
    """Return the policy with a tokenizer (or a processor's), if given. The tokenizer's EOS also ends completions."""
    if tokenizer is not None:
        policy = policy.replace(tokenizer=getattr(tokenizer, "tokenizer", tokenizer))
    eos, ids = getattr(policy.tokenizer, "eos_token_id", None), policy.eos_token_ids
    if eos is None or eos in ids:
        return policy
    return policy.replace(generation_config={**policy.generation_config, "eos_token_id": [eos, *ids]})


def with_adapters(policy: Policy, peft: Any, *, seed: int) -> Policy:
    """Add new adapters to a policy, as configured by a `peft.LoraConfig`. Raises ValueError for unsupported fields.

    `target_modules` must be "all-linear" or a list of names, such as "q_proj" or "self_attn.q_proj".
    """
    peft_type = getattr(peft, "peft_type", None)
    if getattr(peft_type, "value", peft_type) != "LORA":
        raise ValueError(f"peft_config must be a LoraConfig; got {type(peft).__name__}")
    default: dict[str, object] = {"bias": "none", "init_lora_weights": True}
    if dataclasses.is_dataclass(peft):
        default |= {x.name: x.default for x in dataclasses.fields(peft) if x.default is not dataclasses.MISSING}
    fields = {
        name: x for name, x in vars(peft).items() if not name.startswith("_") and name not in _PEFT_FIELDS.split()
    }
    rejected = [name for name, x in fields.items() if x != default.get(name) and (x or default.get(name))]
    if rejected:
        settings = ", ".join(f"{name} = {fields[name]!r}" for name in sorted(rejected))
        raise ValueError(f"peft_config sets unsupported fields: {settings}; remove them")
    scale = math.sqrt(peft.r) if getattr(peft, "use_rslora", False) else 1.0
    return add_lora(
        policy,
        jax.random.key(seed),
        rank=peft.r,
        alpha=peft.lora_alpha * scale,  # rank-stabilized LoRA scales by alpha / √rank instead of alpha / rank
        targets="|".join(map(re.escape, _targets(policy, peft.target_modules))),
        dropout=float(getattr(peft, "lora_dropout", 0.0)),
    )


def _targets(policy: Policy, names: str | Iterable[str] | None) -> list[str]:
    paths = [path for path in ("/".join(path) for path, _ in projections(policy.params)) if re.fullmatch(TARGETS, path)]
    if isinstance(names, str) and names.lower() == "all-linear":
        return paths
    listed = [] if names is None or isinstance(names, str) else sorted(names)  # `LoraConfig` stores a set
    matches = {name: [path for path in paths if f"/{path}".endswith("/" + name.replace(".", "/"))] for name in listed}
    if not matches or not all(matches.values()):
        unknown = next((name for name in matches if not matches[name]), names)
        last = ", ".join(sorted({path.rsplit("/", 1)[-1] for path in paths}))
        raise ValueError(f"target_modules must list projections ({last}) or be 'all-linear'; got {unknown!r}")
    return [path for path in paths if any(path in selected for selected in matches.values())]


def write_into(directory: Path, policy: Policy, base_name: str | None) -> None:
    """Write a policy and its tokenizer to a directory. Replaces the previous model and keeps other files.

    All processes must call it. `base_name` is the name of the base model in the adapters' PEFT config.
    """
    scratch = directory / ".model"
    write_policy(scratch, policy, base_name=base_name)
    if jax.process_index() == 0:
        for old in (*directory.glob("model*.safetensors*"), *directory.glob("adapter_*")):
            old.unlink()
        for path in scratch.iterdir():
            path.replace(directory / path.name)
        scratch.rmdir()
    gather_objects(None)  # wait until process 0 has written all files
