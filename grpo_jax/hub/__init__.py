"""Hugging Face checkpoints, PEFT adapters, and the table of supported model families."""

from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
from grpo_jax.hub.peft import add_lora, load_lora, merge_lora, save_lora
from grpo_jax.hub.policy import init_policy
from grpo_jax.policy import Policy

__all__ = [
    "Policy",
    "add_lora",
    "from_pretrained",
    "init_policy",
    "load_lora",
    "merge_lora",
    "save_lora",
    "save_pretrained",
]
