"""Decoding: completions as inputs of reward functions, and the bytes of each token."""

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
"""Number of prompt tokens decoded together with a completion. No character spans more tokens."""

_REPLACEMENT = "\ufffd"  # written by decoders for an incomplete character


class RewardInputs(NamedTuple):
    """Inputs of reward functions: lists of length B·G in prompt-major order.

    `columns` maps the name of each other dataset column to its values. An assistant prefill at the end of a prompt
    belongs to the completion's message, so that prompt + completion is the conversation.
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
    """Return the inputs of reward functions for completions `tokens` [B, G, T] of B dataset rows.

    `mask` [B, G, T] is True on completion tokens. Some tokenizers (Llama 2, SentencePiece) drop the first space when
    they decode. A completion of a text prompt is therefore decoded together with the prompt's last tokens, unless
    `prompt_ids` is None. A message is decoded alone, as in TRL, and starts with the prefill if there is one.
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
    """Return the token ids where `mask` [B, G, T] is True as B·G lists in prompt-major order."""
    tokens, mask = np.asarray(tokens), np.asarray(mask).astype(bool)
    flat = zip(tokens.reshape(-1, tokens.shape[2]), mask.reshape(-1, tokens.shape[2]), strict=True)
    return [row[keep].tolist() for row, keep in flat]


class PrecedingText(NamedTuple):
    """The text before a completion: its last tokens, their text, and the prefill of the completion's message."""

    tokens: list[int]
    text: str
    prefill: str


def preceding_text(tokenizer: Tokenizer, prompt: str | Messages, ids: Sequence[int]) -> PrecedingText:
    """Return the text that completions of a prompt continue. It is empty if they start a new message."""
    prefill = _prefill(prompt)
    last, text = list[int](), ""
    if isinstance(prompt, str) or prefill:
        for count in (CONTEXT, len(ids)):  # all tokens, if the last ones are special and decode to ""
            last = [int(i) for i in ids[-count:]]
            text = tokenizer.decode(last, skip_special_tokens=True)
            if text:
                break
    # A template may strip white space from the end of the prefill, so that the model never sees it.
    return PrecedingText(last, text, prefill.rstrip() if last and not text.endswith(prefill[-1:]) else prefill)


def continuation(before: str, both: str) -> str:
    """Return `both` without its common prefix with `before`: ("caf\ufffd", "café!") → "é!"."""
    return both[common_length(before, both) :]


class CachedTokenizer:
    """A tokenizer with a cache: in games the same strings recur in thousands of turns."""

    def __init__(self, tokenizer: Tokenizer):
        @functools.lru_cache(1024)
        def decode(ids: bytes, skip: bool) -> str:
            return tokenizer.decode(np.frombuffer(ids, np.int32), skip_special_tokens=skip)

        @functools.lru_cache(1024)
        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

        self._decode, self.encode = decode, encode

    def decode(self, ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        return self._decode(np.asarray(ids, np.int32).tobytes(), skip_special_tokens)


def _prefill(prompt: str | Messages) -> str:
    """Return the prefill of the assistant's turn at the end of a prompt, or ""."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return ""
    content = prompt[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _without_prefill(prompt: str | Messages) -> str | Messages:
    if isinstance(prompt, str):
        return prompt
    return list(prompt[:-1]) if prompt[-1]["role"] == "assistant" else list(prompt)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common prefix."""
    differ = (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y)
    return next(differ, min(len(one), len(other)))


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return a dict from the id of each special token to its string."""
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return added | {index: token for index, token in named if index is not None}  # None: not in the vocabulary


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes that each token adds to decoded text; b"" for special tokens and unused ids.

    Each token is decoded after an ordinary token, because some tokenizers drop a leading space. Tokens that are not
    whole characters are decoded from their names, as written by byte-level BPE (GPT-2, Llama 3, Qwen) and by byte
    fallback (SentencePiece). Raises ValueError for other names and for tokenizers whose tokens decode differently next
    to others (CLIP).
    """
    vocabulary, special = tokenizer.get_vocab(), special_tokens(tokenizer)
    names = {index: name for name, index in vocabulary.items() if index not in special}
    before = _ordinary(tokenizer, names)
    # clean_up_tokenization_spaces would change pairs of tokens.
    texts = tokenizer.batch_decode(
        [[before], *([before, index] for index in names)], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    found, whole = [b""] * (max(vocabulary.values()) + 1), {before: texts[0]}
    for (index, name), text in zip(names.items(), texts[1:], strict=True):
        added = text.removeprefix(texts[0])
        found[index] = _bytes_of(name, index) if _REPLACEMENT in added else added.encode()
        if _REPLACEMENT not in added:
            whole.setdefault(index, added)
    one_text = tokenizer.batch_decode([[*whole]], skip_special_tokens=True, clean_up_tokenization_spaces=False)[0]
    if one_text != "".join(whole.values()):
        raise ValueError("the tokenizer decodes tokens differently depending on their neighbours")
    return found


def _ordinary(tokenizer: Tokenizer, names: Mapping[int, str]) -> int:
    """Return a token that decodes to text, if possible to letters or digits."""
    plain = (index for index, name in names.items() if name.isascii() and name.isalnum())
    for index in itertools.chain(plain, names):
        text = tokenizer.decode([index], skip_special_tokens=True)
        if text and _REPLACEMENT not in text:
            return index
    raise ValueError("no token of the tokenizer decodes to text")


_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)}
"""Bytes by their characters in token names of byte-level BPE."""


def _bytes_of(name: str, index: int) -> bytes:
    """Return the bytes of a token that is not a whole character, from its name."""
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes([int(found[1], 16)])
    if all(character in _BYTES for character in name):
        return bytes(_BYTES[character] for character in name)
    if _REPLACEMENT in name:  # the replacement character itself
        return name.encode()
    raise ValueError(
        f"token {index} of the tokenizer, {name!r}, is not a whole character, and its bytes are not in its name"
    )
