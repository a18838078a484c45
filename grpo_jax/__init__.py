"""GRPO (Group Relative Policy Optimization) as pure functions in JAX and Flax.

Importing this does no work, and not even jax is imported: a public name is looked up in its module when it is first
asked for, so that the command line answers at once. transformers, orbax and matplotlib come when something needs them.
"""

import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_jax.config.config import GRPOConfig
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
    from grpo_jax.plan.estimate import Plan, plan
    from grpo_jax.policy import Policy
    from grpo_jax.rollout.generate import generate
    from grpo_jax.run.evaluate import evaluate
    from grpo_jax.run.publish import push_to_hub
    from grpo_jax.run.rehearse import rehearse
    from grpo_jax.run.replay import replay
    from grpo_jax.run.train import train
    from grpo_jax.text.prompts import make_prompts
    from grpo_jax.types import Batch, Completions, Environment, Prompts
    from grpo_jax.update.state import TrainState
    from grpo_jax.update.step import train_step

__all__ = [
    "Batch",
    "Completions",
    "Environment",
    "GRPOConfig",
    "Plan",
    "Policy",
    "Prompts",
    "TrainState",
    "add_lora",
    "completion_log_probs",
    "compute_advantages",
    "evaluate",
    "from_pretrained",
    "generate",
    "grpo_loss",
    "init_policy",
    "kl_divergence",
    "load_lora",
    "make_prompts",
    "merge_lora",
    "mixup",
    "plan",
    "push_to_hub",
    "rehearse",
    "replay",
    "sample_tokens",
    "save_lora",
    "save_pretrained",
    "sync_reference",
    "token_log_probs",
    "train",
    "train_step",
    "zero_signal_groups",
]

# The imports above once more, for the program; a test compares the two.
_NAMES_OF = {
    "config.config": "GRPOConfig",
    "hub.huggingface": "from_pretrained save_pretrained",
    "hub.peft": "add_lora load_lora merge_lora save_lora",
    "hub.policy": "init_policy",
    "maths.advantages": "compute_advantages zero_signal_groups",
    "maths.kl": "kl_divergence",
    "maths.log_probs": "token_log_probs",
    "maths.losses": "grpo_loss",
    "maths.reference": "mixup sync_reference",
    "maths.sampling": "sample_tokens",
    "models.scoring": "completion_log_probs",
    "plan.estimate": "Plan plan",
    "policy": "Policy",
    "rollout.generate": "generate",
    "run.evaluate": "evaluate",
    "run.publish": "push_to_hub",
    "run.rehearse": "rehearse",
    "run.replay": "replay",
    "run.train": "train",
    "text.prompts": "make_prompts",
    "types": "Batch Completions Environment Prompts",
    "update.state": "TrainState",
    "update.step": "train_step",
}
_HOME = {name: f"{__name__}.{module}" for module, names in _NAMES_OF.items() for name in names.split()}


class _Package(ModuleType):
    """`grpo_jax.plan` is the function, though importing the room of that name would put the room in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.plan if name == "plan" and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # to a type checker a module with `__getattr__` would have every name

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), name)
            setattr(sys.modules[__name__], name, value)
            return value
        if name == "__version__":  # pyproject.toml says it, and nothing else does
            return importlib.metadata.version(__name__)
        # The rooms, which `import grpo_jax` alone has always given.
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
