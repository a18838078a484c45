"""The bytes that each token of a vocabulary adds to a text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from grpo_jax.types import Tokenizer

_LOST = "\ufffd"
"""What stands in a text for bytes that are no character."""


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common prefix."""
    differ = (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y)
    return next(differ, min(len(one), len(other)))


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of every special token of a tokenizer, by its id."""
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return added | {index: token for index, token in named if index is not None}  # one in no vocabulary has no id


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes that each token adds to a text; b"" for special tokens, and for ids that no token has.

    Each is decoded behind another token: a tokenizer that takes a text's first space away does not take it here. A part
    of a character, which no decoder shows, is read off the token's name, as byte-level BPE (GPT-2, Llama 3, Qwen) and
    byte fallback (SentencePiece) write it. A name of neither kind is a ValueError, and so are tokens whose texts depend
    on their neighbours, as in CLIP, where they end in a space unless nothing follows.
    """
    vocabulary, special = tokenizer.get_vocab(), special_tokens(tokenizer)
    names = {index: name for name, index in vocabulary.items() if index not in special}
    before = _ordinary(tokenizer, names)
    # As they are spelt: clean_up_tokenization_spaces would look at pairs of tokens.
    texts = tokenizer.batch_decode(
        [[before], *([before, index] for index in names)], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    pieces, whole = [b""] * (max(vocabulary.values()) + 1), {before: texts[0]}
    for (index, name), text in zip(names.items(), texts[1:], strict=True):
        own = text.removeprefix(texts[0])
        pieces[index] = _bytes_of(name, index) if _LOST in own else own.encode()
        if _LOST not in own:
            whole.setdefault(index, own)
    one_text = tokenizer.batch_decode([[*whole]], skip_special_tokens=True, clean_up_tokenization_spaces=False)[0]
    if one_text != "".join(whole.values()):
        raise ValueError("the tokenizer's tokens change the text of their neighbours")
    return pieces


def _ordinary(tokenizer: Tokenizer, names: Mapping[int, str]) -> int:
    """Return a token with a text that nothing takes away, letters or digits if there are any."""
    plain = (index for index, name in names.items() if name.isascii() and name.isalnum())
    for index in itertools.chain(plain, names):
        text = tokenizer.decode([index], skip_special_tokens=True)
        if text and _LOST not in text:
            return index
    raise ValueError("the tokenizer has no token with a text")


_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)}
"""Character → the byte that it stands for in the names of byte-level BPE's tokens."""


def _bytes_of(name: str, index: int) -> bytes:
    """Return the bytes of a token that has a part of a character, by its name."""
    found = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)
    if found:
        return bytes([int(found[1], 16)])
    if all(character in _BYTES for character in name):
        return bytes(_BYTES[character] for character in name)
    if _LOST in name:  # it is that character
        return name.encode()
    raise ValueError(
        f"the tokenizer's token {index}, {name!r}, is no whole character, and its name does not say which bytes it has"
    )
