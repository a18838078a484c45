"""Completions as text, for reward functions and environments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.text.pieces import common_length
from grpo_jax.text.rows import is_conversation
from grpo_jax.types import Messages, Row, Tokenizer

Array = jax.Array | np.ndarray

CONTEXT = 8
"""Tokens of a prompt after which its completion is decoded; no character has as many."""


class RewardInputs(NamedTuple):
    """The lists that reward functions take, each B·G long, in prompt-major order.

    Attributes:
      prompts: text or messages. Where a conversation ends in a prefill, this is the beginning of the completion's
        message and not the end of the prompt, so that prompt + completion is the conversation.
      completions: text or messages.
      completion_ids: token ids without padding.
      columns: every other column of the rows, by its name.
    """

    prompts: list[str | Messages]
    completions: Sequence[str | Messages]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


def reward_inputs(
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    tokens: Array,
    mask: Array,
    *,
    prompt_ids: Sequence[Sequence[int]] | None = None,
) -> RewardInputs:
    """Return the inputs of reward functions for completions [B, G, T] of B rows, each with its `prompt`.

    `tokens`, `mask` and `prompt_ids` are as in `decode_completions`.
    """
    group = range(np.shape(tokens)[1])
    prompts = [row["prompt"] for row in rows]
    return RewardInputs(
        prompts=[_without_prefill(prompt) for prompt in prompts for _ in group],
        completions=decode_completions(tokenizer, tokens, mask, prompts=prompts, prompt_ids=prompt_ids),
        completion_ids=completion_token_ids(tokens, mask),
        columns={name: [row[name] for row in rows for _ in group] for name in rows[0] if name != "prompt"},
    )


def completion_token_ids(tokens: Array, mask: Array) -> list[list[int]]:
    """Return the token ids of each completion where `mask` [B, G, T] is True: B·G lists, prompt-major."""
    tokens, mask = np.asarray(tokens), np.asarray(mask).astype(bool)
    if tokens.ndim != 3 or tokens.shape != mask.shape:
        raise ValueError(f"tokens is {tokens.shape} and mask is {mask.shape}: both are [B, G, T]")
    flat = zip(tokens.reshape(-1, tokens.shape[2]), mask.reshape(-1, tokens.shape[2]), strict=True)
    return [row[keep].tolist() for row, keep in flat]


def decode_completions(
    tokenizer: Tokenizer,
    tokens: Array,
    mask: Array,
    *,
    prompts: Sequence[str | Messages] | None = None,
    prompt_ids: Sequence[Sequence[int]] | None = None,
) -> list[str] | list[Messages]:
    """Return completions as text, or as messages where the prompts are conversations, in prompt-major order.

    Some tokenizers take the first space of what they decode away (Llama 2's, SentencePiece's). So a completion that
    continues a text is decoded behind the end of it: prompt + completion is the text that the model saw. One that is a
    message of its own is decoded alone, as in TRL, and its text begins with the prefill if the prompt had one.

    Args:
      tokenizer: its `batch_decode(ids, skip_special_tokens=True)` is used.
      prompts: the B prompts of the dataset; None if they are text.
      prompt_ids: the tokens of the B prompts; None: completions are decoded alone.
    """
    group, ids = np.shape(tokens)[1], completion_token_ids(tokens, mask)
    prompts, prompt_ids = prompts or [""] * len(tokens), prompt_ids or [()] * len(tokens)
    before = [before_of(tokenizer, prompt, own) for prompt, own in zip(prompts, prompt_ids, strict=True)]
    behind = [[*before[i // group].tokens, *own] for i, own in enumerate(ids)]
    decoded = tokenizer.batch_decode(behind, skip_special_tokens=True)
    texts = [before[i // group].prefill + continuation(before[i // group].text, text) for i, text in enumerate(decoded)]
    return [[{"role": "assistant", "content": text}] for text in texts] if is_conversation(prompts[0]) else texts


class Before(NamedTuple):
    """The text before a completion: its last tokens and their text, and the prefill of the completion's message."""

    tokens: list[int]
    text: str
    prefill: str


def before_of(tokenizer: Tokenizer, prompt: str | Messages, ids: Sequence[int]) -> Before:
    """Return the text that the completions of a prompt with these tokens continue; none if they begin a message."""
    own = _prefill(prompt)
    last, text = list[int](), ""
    if isinstance(prompt, str) or own:
        for count in (CONTEXT, len(ids)):  # all of them, where the last ones are special and have no text
            last = [int(i) for i in ids[-count:]]
            text = tokenizer.decode(last, skip_special_tokens=True)
            if text:
                break
    # A template may trim what the prefill ends with: then the model has not seen it.
    return Before(last, text, own.rstrip() if last and not text.endswith(own[-1:]) else own)


def continuation(before: str, both: str) -> str:
    """Return `both` without the beginning that it shares with `before`.

    Example:
      >>> continuation("upon a", "upon a time"), continuation("caf\ufffd", "café!")  # half a character is completed
      (' time', 'é!')
    """
    return both[common_length(before, both) :]


class Texts:
    """A tokenizer that remembers what is short: games say the same again and again, in thousands of turns."""

    short = 64

    def __init__(self, tokenizer: Tokenizer):
        def decode(ids: bytes, skip: bool) -> str:
            return tokenizer.decode(np.frombuffer(ids, np.int32), skip_special_tokens=skip)

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        self._decode, self._encode = decode, encode
        self._decode_short, self._encode_short = functools.lru_cache(4096)(decode), functools.lru_cache(4096)(encode)

    def decode(self, ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        decode = self._decode_short if len(ids) <= self.short else self._decode
        return decode(np.asarray(ids, np.int32).tobytes(), skip_special_tokens)

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text, and none beside."""
        return (self._encode_short if len(text) <= self.short else self._encode)(text)


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
