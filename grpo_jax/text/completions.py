"""Tokens to text: completions as reward functions and environments see them, and the bytes of each token."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.text.rows import is_conversation
from grpo_jax.types import Messages, Row, Tokenizer

Array = jax.Array | np.ndarray

CONTEXT = 8
"""Tokens of a prompt that its completion is decoded after; no character takes as many."""

_LOST = "\ufffd"
"""Replacement character that decoders write for bytes that are not a whole character."""


class RewardInputs(NamedTuple):
    """The lists that reward functions take, each B·G long, in prompt-major order.

    Attributes:
      prompts: text or messages. A prefill that ends a conversation is part of the completion's message, not of the
        prompt, so that prompt + completion is the conversation.
      completions: text or messages.
      completion_ids: token ids without padding.
      columns: every other column of the rows, by name.
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

    Some tokenizers (Llama 2's, SentencePiece's) drop the first space of a text that they decode. A completion that
    continues a text is therefore decoded after the prompt's last tokens. One that is a message is decoded alone, as in
    TRL, and its text begins with the prefill if the prompt has one.

    Args:
      tokenizer: its `batch_decode(ids, skip_special_tokens=True)` is used.
      rows: of the dataset.
      tokens: [B, G, T].
      mask: [B, G, T], True on the tokens of the completion.
      prompt_ids: tokens of the B prompts; None decodes every completion alone.
    """
    group, prompts = np.shape(tokens)[1], [row["prompt"] for row in rows]
    ids = completion_token_ids(tokens, mask)
    starts = prompt_ids or [()] * len(prompts)
    before = [preceding_text(tokenizer, prompt, start) for prompt, start in zip(prompts, starts, strict=True)]
    decoded = tokenizer.batch_decode(
        [[*before[i // group].tokens, *completion] for i, completion in enumerate(ids)], skip_special_tokens=True
    )
    texts = [before[i // group].prefill + continuation(before[i // group].text, text) for i, text in enumerate(decoded)]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    return RewardInputs(
        prompts=[_without_prefill(prompt) for prompt in prompts for _ in range(group)],
        completions=messages if is_conversation(prompts[0]) else texts,
        completion_ids=ids,
        columns={name: [row[name] for row in rows for _ in range(group)] for name in rows[0] if name != "prompt"},
    )


def completion_token_ids(tokens: Array, mask: Array) -> list[list[int]]:
    """Return the token ids of each completion where `mask` [B, G, T] is True: B·G lists, prompt-major."""
    tokens, mask = np.asarray(tokens), np.asarray(mask).astype(bool)
    if tokens.ndim != 3 or tokens.shape != mask.shape:
        raise ValueError(f"tokens is {tokens.shape} and mask is {mask.shape}: both are [B, G, T]")
    flat = zip(tokens.reshape(-1, tokens.shape[2]), mask.reshape(-1, tokens.shape[2]), strict=True)
    return [row[keep].tolist() for row, keep in flat]


class PrecedingText(NamedTuple):
    """The text before a completion: its last tokens and their text, and the prefill of the completion's message."""

    tokens: list[int]
    text: str
    prefill: str


def preceding_text(tokenizer: Tokenizer, prompt: str | Messages, ids: Sequence[int]) -> PrecedingText:
    """Return the text that completions of a prompt with these tokens continue; empty if they begin a message."""
    prefill = _prefill(prompt)
    last, text = list[int](), ""
    if isinstance(prompt, str) or prefill:
        for count in (CONTEXT, len(ids)):  # all, if the last ones are special tokens without a text
            last = [int(i) for i in ids[-count:]]
            text = tokenizer.decode(last, skip_special_tokens=True)
            if text:
                break
    # A template may trim the end of the prefill, so that the model has not seen it.
    return PrecedingText(last, text, prefill.rstrip() if last and not text.endswith(prefill[-1:]) else prefill)


def continuation(before: str, both: str) -> str:
    """Return `both` without the beginning that it shares with `before`.

    Example:
      >>> continuation("upon a", "upon a time"), continuation("caf\ufffd", "café!")  # half a character is completed
      (' time', 'é!')
    """
    return both[common_length(before, both) :]


class CachedTokenizer:
    """A tokenizer with a cache: in games the same texts recur in thousands of turns."""

    def __init__(self, tokenizer: Tokenizer):
        @functools.lru_cache(1024)
        def decode(ids: bytes, skip: bool) -> str:
            return tokenizer.decode(np.frombuffer(ids, np.int32), skip_special_tokens=skip)

        @functools.lru_cache(1024)
        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        self._decode, self.encode = decode, encode

    def decode(self, ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return self._decode(np.asarray(ids, np.int32).tobytes(), skip_special_tokens)


def _prefill(prompt: str | Messages) -> str:
    """Return the text that the assistant's turn begins with; "" if the prompt has none."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return ""
    content = prompt[-1]["content"]
    # Content may be a list of typed parts; only text can be continued.
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _without_prefill(prompt: str | Messages) -> str | Messages:
    if isinstance(prompt, str):
        return prompt
    return list(prompt[:-1]) if prompt[-1]["role"] == "assistant" else list(prompt)


# Tokens ---------------------------------------------------------------------------------------------------------------


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common prefix."""
    differ = (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y)
    return next(differ, min(len(one), len(other)))


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of every special token of a tokenizer, by its id."""
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return added | {index: token for index, token in named if index is not None}  # None: not in the vocabulary


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes that each token adds to a text; b"" for special tokens and unused ids.

    Each token is decoded after another one, so that a tokenizer that drops a text's first space keeps this one's. The
    bytes of a part of a character follow from the token's name, as byte-level BPE (GPT-2, Llama 3, Qwen) and byte
    fallback (SentencePiece) write it.

    Raises:
      ValueError: a name of neither kind, or tokens whose text depends on their neighbours (as in CLIP, where the last
        token of a word ends in a space unless nothing follows).
    """
    vocabulary, special = tokenizer.get_vocab(), special_tokens(tokenizer)
    names = {index: name for name, index in vocabulary.items() if index not in special}
    before = _ordinary(tokenizer, names)
    # Without clean_up_tokenization_spaces, which changes pairs of tokens.
    texts = tokenizer.batch_decode(
        [[before], *([before, index] for index in names)], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    found, whole = [b""] * (max(vocabulary.values()) + 1), {before: texts[0]}
    for (index, name), text in zip(names.items(), texts[1:], strict=True):
        own = text.removeprefix(texts[0])
        found[index] = _bytes_of(name, index) if _LOST in own else own.encode()
        if _LOST not in own:
            whole.setdefault(index, own)
    one_text = tokenizer.batch_decode([[*whole]], skip_special_tokens=True, clean_up_tokenization_spaces=False)[0]
    if one_text != "".join(whole.values()):
        raise ValueError("the tokenizer's tokens change the text of their neighbours")
    return found


def _ordinary(tokenizer: Tokenizer, names: Mapping[int, str]) -> int:
    """Return a token that has a text, of letters or digits if possible."""
    plain = (index for index, name in names.items() if name.isascii() and name.isalnum())
    for index in itertools.chain(plain, names):
        text = tokenizer.decode([index], skip_special_tokens=True)
        if text and _LOST not in text:
            return index
    raise ValueError("the tokenizer has no token with a text")


_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)}
"""Characters in the names of byte-level BPE's tokens, and the bytes that they stand for."""


def _bytes_of(name: str, index: int) -> bytes:
    """Return the bytes of a token that is not whole characters, by its name."""
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes([int(found[1], 16)])
    if all(character in _BYTES for character in name):
        return bytes(_BYTES[character] for character in name)
    if _LOST in name:  # the token is that character
        return name.encode()
    raise ValueError(
        f"the tokenizer's token {index}, {name!r}, is not a whole character, and its name does not give its bytes"
    )
