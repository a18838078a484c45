"""The policy of a trainer, as TRL has it: its EOS, its tokenizer, and the directory that it is written into."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import jax

from grpo_jax.devices.sharding import gather_objects
from grpo_jax.hub.files import PROCESSOR_FILES, TOKENIZER_FILES, read_json
from grpo_jax.hub.peft import write_policy
from grpo_jax.hub.policy import tokenizer_files
from grpo_jax.models.lora import LoraModel
from grpo_jax.policy import Policy
from grpo_jax.types import Tokenizer

_OF_A_MODEL = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")


def with_tokenizer(policy: Policy, tokenizer: Tokenizer | None = None) -> Policy:
    """Return the policy with another tokenizer, or its own, whose EOS ends completions as well.

    As in TRL, a completion ends with any EOS of generation_config.json and with the tokenizer's; a warning says so
    where the files do not name it.

    Args:
      policy: the policy.
      tokenizer: of transformers, or a processor that has one; None for the policy's own.
    """
    if tokenizer is not None:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        of_others = {name: content for name, content in policy.files.items() if name in PROCESSOR_FILES}
        files = tokenizer_files(tokenizer) if hasattr(tokenizer, "save_pretrained") else {}
        policy = policy.replace(tokenizer=tokenizer, files=of_others | files)
    eos, ids = getattr(policy.tokenizer, "eos_token_id", None), policy.eos_token_ids
    if eos is None or eos in ids:
        return policy
    warnings.warn(
        f"the EOS of the tokenizer, {policy.tokenizer.eos_token!r} ({eos}), ends completions too; the model's files"
        f" name {list(ids)} alone",
        stacklevel=4,
    )
    return policy.replace(generation_config={**policy.generation_config, "eos_token_id": [eos, *ids]})


def quantized_as(config: object, *, adapted: bool) -> str | None:
    """Return the `quantize` of `from_pretrained` that a `BitsAndBytesConfig` asks for; None for no config.

    Args:
      config: the config, or any object with some of its attributes.
      adapted: whether there are adapters to train on the base.

    Raises:
      ValueError: a config of another kind, other four bits, or no adapters.

    Example:
      >>> from types import SimpleNamespace
      >>> quantized_as(SimpleNamespace(load_in_4bit=True, bnb_4bit_quant_type="nf4"), adapted=True)
      'nf4'
    """
    if config is None:
        return None
    four, eight = (bool(getattr(config, f"load_in_{bits}bit", False)) for bits in (4, 8))
    kind = getattr(config, "bnb_4bit_quant_type", "nf4")
    if four == eight or (four and kind != "nf4"):
        raise ValueError(
            f"quantization_config asks for {kind!r} with load_in_4bit = {four}, load_in_8bit = {eight}: give a"
            ' BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), or load_in_8bit=True'
        )
    if not adapted:
        raise ValueError("quantization_config is given without a peft_config: quantized weights are not trained")
    return "nf4" if four else "int8"


def write_into(directory: str | os.PathLike[str], policy: Policy, *, base_name: str | None = None) -> None:
    """Write a policy with its tokenizer into a directory, beside what else is there: a run's files, say.

    It is written in a directory inside and then moved, file by file, in the place of a model that was there before. All
    processes of a run call it together.

    Args:
      directory: where to.
      policy: with adapters or without.
      base_name: name or directory of the base of adapters, for PEFT to find it.
    """
    target = Path(directory).expanduser().absolute()
    scratch = target / ".model"
    if jax.process_index() == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    gather_objects(None)
    write_policy(scratch, policy, base_name=base_name)
    if jax.process_index() == 0:
        if isinstance(policy.model, LoraModel):  # of which PEFT's format has the adapters alone
            for name in policy.files.keys() & {*TOKENIZER_FILES}:
                (scratch / name).write_bytes(policy.files[name])
        _keep_settings(target)
        new = {path.name for path in scratch.iterdir()}
        known = {*_OF_A_MODEL, *TOKENIZER_FILES, *PROCESSOR_FILES}
        for path in target.iterdir():
            if path.name not in new and (path.name in known or path.match("*.safetensors")):
                path.unlink()
        for path in scratch.iterdir():
            path.replace(target / path.name)
        scratch.rmdir()
    gather_objects(None)  # the others wait until all is there


def _keep_settings(run_dir: Path) -> None:
    """Give the settings of an earlier version's run, which stand where a model has its own, their present name."""
    old, new = run_dir / "config.json", run_dir / "run.json"
    if not new.exists() and "config" in (read_json(old) or {}):
        old.rename(new)
