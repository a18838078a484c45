"""Completions as text: what reward functions see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.text.rows import Messages, Row, is_conversation


def reward_inputs(tokenizer: Any, rows: Sequence[Row], tokens: Any, mask: Any) -> dict[str, Any]:
    """Return what reward functions are given for a batch of completions, as keywords of `rewards.compute_rewards`.

    Args:
      tokenizer: decodes the completions.
      rows: the B dataset rows of the batch, each with its `prompt`.
      tokens: [B, G, T] int completion tokens.
      mask: [B, G, T] bool, True on the tokens of a completion.

    Returns:
      A dict of `prompts`, `completions`, `completion_ids` (lists of B·G in prompt-major order) and `columns` (every
      other column of the rows, repeated likewise). Where a conversation ends in a prefill, the prefill is the beginning
      of the completion's message and not the end of the prompt, so that prompt + completion is the conversation.
    """
    group = range(np.shape(tokens)[1])
    prompts = [_without_prefill(row["prompt"]) for row in rows for _ in group]
    names = [name for name in rows[0] if name != "prompt"]
    return {
        "prompts": prompts,
        "completions": decode_completions(tokenizer, tokens, mask, prompts=[row["prompt"] for row in rows]),
        "completion_ids": completion_token_ids(tokens, mask),
        "columns": {name: [row[name] for row in rows for _ in group] for name in names},
    }


def completion_token_ids(tokens: Any, mask: Any) -> list[list[int]]:
    """Return the unpadded token ids of each completion, in prompt-major order.

    Args:
      tokens: [B, G, T] int.
      mask: [B, G, T] bool; the ids where it is True are kept, the EOS with them.

    Returns:
      B·G lists; the G completions of the first prompt come first.

    Example:
      >>> completion_token_ids(np.array([[[7, 2, 0], [8, 9, 2]]]), np.array([[[1, 1, 0], [1, 1, 1]]], bool))
      [[7, 2], [8, 9, 2]]
    """
    tokens, mask = np.asarray(tokens), np.asarray(mask).astype(bool)
    if tokens.ndim != 3 or tokens.shape != mask.shape:
        raise ValueError(f"tokens is {tokens.shape} and mask is {mask.shape}: both are [B, G, T]")
    flat = zip(tokens.reshape(-1, tokens.shape[2]), mask.reshape(-1, tokens.shape[2]), strict=True)
    return [row[keep].tolist() for row, keep in flat]


def decode_completions(
    tokenizer: Any, tokens: Any, mask: Any, *, prompts: Sequence[str | Messages] | None = None
) -> list[str] | list[Messages]:
    """Return completions as text, or as messages where the prompts are conversations, in prompt-major order.

    Args:
      tokenizer: its `batch_decode(ids, skip_special_tokens=True)` is used, as TRL does.
      tokens: [B, G, T] int.
      mask: [B, G, T] bool.
      prompts: the B prompts of the dataset; None if they are text.

    Returns:
      B·G strings; or B·G lists of one message, `[{"role": "assistant", "content": text}]`, whose text begins with the
      prefill if the prompt had one: a reward function sees the whole turn.
    """
    texts = tokenizer.batch_decode(completion_token_ids(tokens, mask), skip_special_tokens=True)
    if prompts is None or not is_conversation(prompts[0]):
        return texts
    num_generations = np.shape(tokens)[1]
    return [
        [{"role": "assistant", "content": _prefill(prompts[index // num_generations]) + text}]
        for index, text in enumerate(texts)
    ]


def _prefill(prompt: str | Messages) -> str:
    """Return the text the assistant's turn begins with, "" if the prompt gives none."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return ""
    content = prompt[-1]["content"]
    # Content may be a list of typed parts; only text can be continued.
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _without_prefill(prompt: str | Messages) -> str | Messages:
    """Return a prompt without the assistant's turn it ends in, if it does."""
    if isinstance(prompt, str):
        return prompt
    return list(prompt[:-1]) if prompt[-1]["role"] == "assistant" else list(prompt)
