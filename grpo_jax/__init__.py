"""GRPO (Group Relative Policy Optimization) as pure functions in JAX and Flax.

Public names are imported from their modules on first use, so `import grpo_jax` does not import jax and the command line
starts quickly. Functions that need transformers, orbax or matplotlib import them when called.
"""

import importlib.metadata
import importlib.util
import sys
from typing import TYPE_CHECKING

from grpo_jax.messages import foreign_names

if TYPE_CHECKING:
    from grpo_jax.config.config import GRPOConfig
    from grpo_jax.config.sft import SFTConfig
    from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
    from grpo_jax.hub.peft import add_lora, load_lora, merge_lora, save_lora
    from grpo_jax.hub.policy import init_policy
    from grpo_jax.maths.advantages import compute_advantages, zero_signal_groups
    from grpo_jax.maths.kl import kl_divergence
    from grpo_jax.maths.log_probs import token_log_probs
    from grpo_jax.maths.losses import grpo_loss
    from grpo_jax.maths.reference import mixup, sync_reference
    from grpo_jax.maths.sampling import sample_tokens
    from grpo_jax.models.scoring import completion_log_probs
    from grpo_jax.models.sharding import make_mesh
    from grpo_jax.planning import Plan, plan
    from grpo_jax.policy import Policy
    from grpo_jax.rollout.generate import generate
    from grpo_jax.run.evaluate import evaluate
    from grpo_jax.run.publish import push_to_hub
    from grpo_jax.run.rehearse import DryRun, rehearse
    from grpo_jax.run.sampler import Sampler
    from grpo_jax.run.sft import sft
    from grpo_jax.run.train import train
    from grpo_jax.text.prompts import make_prompts
    from grpo_jax.types import Batch, Completions, Environment, Prompts, as_jit_argument
    from grpo_jax.update.state import TrainState, create_state
    from grpo_jax.update.step import train_step

__all__ = [
    "Batch", "Completions", "DryRun", "Environment", "GRPOConfig", "Plan", "Policy", "Prompts", "SFTConfig",
    "Sampler", "TrainState", "add_lora", "as_jit_argument", "completion_log_probs", "compute_advantages",
    "create_state", "evaluate", "from_pretrained", "generate", "grpo_loss", "init_policy",
    "kl_divergence", "load_lora", "make_mesh", "make_prompts", "merge_lora", "mixup", "plan", "push_to_hub",
    "rehearse", "sample_tokens", "save_lora", "save_pretrained", "sft", "sync_reference", "token_log_probs",
    "train", "train_step", "zero_signal_groups",
]  # fmt: skip

# Where to import each public name from. A test checks that this table matches the imports above.
_NAMES_OF = {
    "config.config": "GRPOConfig",
    "config.sft": "SFTConfig",
    "hub.huggingface": "from_pretrained save_pretrained",
    "hub.peft": "add_lora load_lora merge_lora save_lora",
    "hub.policy": "init_policy",
    "run.publish": "push_to_hub",
    "maths.advantages": "compute_advantages zero_signal_groups",
    "maths.kl": "kl_divergence",
    "maths.log_probs": "token_log_probs",
    "maths.losses": "grpo_loss",
    "maths.reference": "mixup sync_reference",
    "maths.sampling": "sample_tokens",
    "models.scoring": "completion_log_probs",
    "models.sharding": "make_mesh",
    "planning": "Plan plan",
    "policy": "Policy",
    "rollout.generate": "generate",
    "run.evaluate": "evaluate",
    "run.rehearse": "DryRun rehearse",
    "run.sampler": "Sampler",
    "run.sft": "sft",
    "run.train": "train",
    "text.prompts": "make_prompts",
    "types": "Batch Completions Environment Prompts as_jit_argument",
    "update.state": "TrainState create_state",
    "update.step": "train_step",
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _NAMES_OF.items() for name in names.split()}


# Register the TRL field table for error messages from `config`, which must not import `compat`.
foreign_names.append(lambda: importlib.import_module("grpo_jax.compat.trl_fields").HINTS)

if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
            setattr(sys.modules[__name__], name, value)
            return value
        if name == "__version__":  # defined in pyproject.toml
            return importlib.metadata.version(__name__)
        # Subpackages are available without an explicit import.
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
