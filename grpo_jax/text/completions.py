"""Decoding of completions for reward functions, and conversion of single tokens to bytes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.text.images import IMAGE_COLUMNS, decode_images
from grpo_jax.text.rows import is_conversation
from grpo_jax.types import Messages, Row, Tokenizer

Array = jax.Array | np.ndarray

CONTEXT = 8
"""Number of prompt tokens that are decoded together with a completion. A character spans at most this many tokens."""

_REPLACEMENT = "\ufffd"  # returned by decoders for an incomplete character


class RewardInputs(NamedTuple):
    """Inputs for reward functions: lists of length B·G in prompt-major order, for B prompts with G completions each.

    `columns` contains the other dataset columns, keyed by name. An assistant prefill at the end of a prompt is moved to
    the completion's message, so that prompt + completion is the whole conversation.
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
    """Decode completions `tokens` [B, G, T] for B dataset rows into inputs for reward functions.

    `mask` [B, G, T] is True on completion tokens. Some tokenizers (Llama 2, SentencePiece) drop a leading space when
    decoding. Completions that continue a string or a prefill are therefore decoded together with the prompt's last
    tokens if `prompt_ids` is given. Other completions are decoded alone, as in TRL. Messages include the prefill.
    """
    group, prompts = np.shape(tokens)[1], [row["prompt"] for row in rows]
    flat_tokens, flat_mask = (np.asarray(x).reshape(-1, x.shape[2]) for x in (tokens, mask))
    ids = [row[keep].tolist() for row, keep in zip(flat_tokens, flat_mask.astype(bool), strict=True)]
    starts = prompt_ids or [()] * len(prompts)
    before = [preceding_text(tokenizer, prompt, start) for prompt, start in zip(prompts, starts, strict=True)]
    decoded = tokenizer.batch_decode(
        [[*before[i // group].tokens, *completion] for i, completion in enumerate(ids)], skip_special_tokens=True
    )
    texts = [
        before[i // group].assistant_prefill + continuation(before[i // group].text, text)
        for i, text in enumerate(decoded)
    ]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    return RewardInputs(
        prompts=[_without_prefill(prompt) for prompt in prompts for _ in range(group)],
        completions=messages if is_conversation(prompts[0]) else texts,
        completion_ids=ids,
        columns={name: [x for x in _column(rows, name) for _ in range(group)] for name in rows[0] if name != "prompt"},
    )


def _column(rows: Sequence[Row], name: str) -> list[Any]:
    return [decode_images(row[name]) if name in IMAGE_COLUMNS else row[name] for row in rows]


class PrecedingText(NamedTuple):
    """The end of a prompt: its last tokens, their decoded text, and the assistant prefill."""

    tokens: list[int]
    text: str
    assistant_prefill: str


def preceding_text(tokenizer: Tokenizer, prompt: str | Messages, ids: Sequence[int]) -> PrecedingText:
    """Return the end of the prompt that completions continue. The result is empty if they start a new message."""
    prefill = _prefill(prompt)
    last = [int(i) for i in ids[-CONTEXT:]] if isinstance(prompt, str) or prefill else []
    text = tokenizer.decode(last, skip_special_tokens=True)
    # If the template strips trailing whitespace from the prefill, the completion may start with whitespace.
    return PrecedingText(last, text, prefill.rstrip() if last and not text.endswith(prefill[-1:]) else prefill)


def continuation(preceding: str, text: str) -> str:
    """Remove from `text` the prefix that it shares with `preceding`: ("caf\ufffd", "café!") → "é!"."""
    return text[common_length(preceding, text) :]


def _prefill(prompt: str | Messages) -> str:
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return ""
    content = prompt[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _without_prefill(prompt: str | Messages) -> str | Messages:
    if isinstance(prompt, str):
        return prompt
    return list(prompt[:-1]) if prompt[-1]["role"] == "assistant" else list(prompt)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest prefix that both sequences share."""
    differ = (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y)
    return next(differ, min(len(one), len(other)))


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return a dict that maps special token ids to strings."""
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return added | {index: token for index, token in named if index is not None}  # None if not in the vocabulary


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return a list with the bytes that each token id adds to decoded text: b"" for special tokens and unused ids.

    Each token is decoded after an ordinary token, because some tokenizers drop a leading space. If a token is only part
    of a character, its bytes are parsed from its vocabulary name, which must use the notation of byte-level BPE (GPT-2,
    Llama 3, Qwen) or byte fallback (SentencePiece). Raises ValueError for names in a different notation.
    """
    vocabulary, special = tokenizer.get_vocab(), special_tokens(tokenizer)
    names = {index: name for name, index in vocabulary.items() if index not in special}
    before = _text_token(tokenizer, names)
    # clean_up_tokenization_spaces would remove spaces between some pairs of tokens.
    texts = tokenizer.batch_decode(
        [[before], *([before, index] for index in names)], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    token_bytes = [b""] * (max(vocabulary.values()) + 1)
    for (index, name), text in zip(names.items(), texts[1:], strict=True):
        added = text.removeprefix(texts[0])
        token_bytes[index] = _bytes_of(name, index) if _REPLACEMENT in added else added.encode()
    return token_bytes


def _text_token(tokenizer: Tokenizer, names: Mapping[int, str]) -> int:
    """Return the id of a token that decodes to text, preferably one that consists of ASCII letters and digits."""
    plain = (index for index, name in names.items() if name.isascii() and name.isalnum())
    for index in itertools.chain(plain, names):
        text = tokenizer.decode([index], skip_special_tokens=True)
        if text and _REPLACEMENT not in text:
            return index
    raise ValueError("no token of the tokenizer decodes to text; use the tokenizer of the checkpoint")


_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)}
"""Mapping from characters in the token names of byte-level BPE to the bytes that they represent."""


def _bytes_of(name: str, index: int) -> bytes:
    """Parse a token's bytes from its vocabulary name. They may be only part of a character."""
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes([int(match[1], 16)])
    if all(character in _BYTES for character in name):
        return bytes(_BYTES[character] for character in name)
    if _REPLACEMENT in name:  # the replacement character itself
        return name.encode()
    raise ValueError(
        f"the tokenizer's token {index} ({name!r}) decodes to an incomplete character, and its name does not encode its"
        " bytes; use a tokenizer with byte-level BPE or byte fallback"
    )
