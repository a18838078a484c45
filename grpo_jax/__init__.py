"""GRPO (Group Relative Policy Optimization) as pure functions in JAX and Flax.

Importing this does no work: transformers, orbax and matplotlib are imported when something needs them.
"""

from grpo_jax.advantages import compute_advantages, zero_signal_groups
from grpo_jax.config import GRPOConfig
from grpo_jax.evaluate import evaluate
from grpo_jax.kl import kl_divergence
from grpo_jax.log_probs import completion_log_probs, token_log_probs
from grpo_jax.losses import grpo_loss
from grpo_jax.models.huggingface import Policy, from_pretrained, init_policy, save_pretrained
from grpo_jax.models.peft import add_lora, load_lora, merge_lora, save_lora
from grpo_jax.plan import Plan, plan
from grpo_jax.prompts import make_prompts
from grpo_jax.reference import mixup, sync_reference
from grpo_jax.replay import replay
from grpo_jax.rollout import generate
from grpo_jax.sampling import sample_tokens
from grpo_jax.state import TrainState
from grpo_jax.train import train, train_step
from grpo_jax.types import Batch, Completions, Prompts

__all__ = [
    "Batch",
    "Completions",
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
