"""Dataset rows, prompts, chat templates, tool calls, and decoded completions."""

from grpo_jax.text.completions import reward_inputs
from grpo_jax.text.prompts import EncodedPrompts, encode_prompts, make_prompts
from grpo_jax.text.rows import load_rows

__all__ = ["EncodedPrompts", "encode_prompts", "load_rows", "make_prompts", "reward_inputs"]
