"""GRPO (Group Relative Policy Optimization) as pure functions in JAX and Flax.

Importing this does no work: transformers, orbax and matplotlib are imported when something needs them.
"""

from grpo_jax.config.config import GRPOConfig
from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
from grpo_jax.hub.peft import add_lora, load_lora, merge_lora, save_lora
from grpo_jax.hub.policy import Policy, init_policy
from grpo_jax.maths.advantages import compute_advantages, zero_signal_groups
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.log_probs import token_log_probs
from grpo_jax.maths.losses import grpo_loss
from grpo_jax.maths.reference import mixup, sync_reference
from grpo_jax.maths.sampling import sample_tokens
from grpo_jax.models.scoring import completion_log_probs
from grpo_jax.plan.estimate import Plan, plan
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
