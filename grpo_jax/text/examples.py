"""Rows that SFT learns from → tokens, and a mask of those that are learned.

| columns of a row | learned |
|---|---|
| `prompt` and `completion`, text or messages | the completion; with `completion_only_loss=False` all |
| `messages` | all; with `assistant_only_loss` what the assistant says |
| `text` | all |
| `input_ids`, and `labels` | what `labels` does not mark by −100 |
| `input_ids`, and `assistant_masks` or `completion_mask` | their ones (`completion_only_loss=False`: of the first) |

These are TRL's. Text of the first and third kind gets an EOS at its end, and so does an assistant's last message where
the template leaves the end of a turn to the next one's opening (GLM-4).
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.messages import show
from grpo_jax.text.completions import common_length, special_tokens
from grpo_jax.text.prompts import EncodedPrompts, apply_template, readable
from grpo_jax.text.rows import (
    Columns,
    Template,
    checked_rows,
    content_fault,
    filled_rows,
    is_conversation,
    messages_fault,
)
from grpo_jax.text.sources import Dataset
from grpo_jax.text.templates import opening_token
from grpo_jax.types import Batch, Json, Message, Messages, Prompts, Row, Tokenizer

_KINDS = "'prompt' and 'completion', 'messages', 'text' or 'input_ids'"
_IGNORED = -100  # PyTorch's label of what no loss looks at
_MASKS = ("assistant_masks", "completion_mask")


@dataclasses.dataclass(frozen=True)
class Examples(EncodedPrompts):
    """The examples of a dataset: as `EncodedPrompts`, whose `token_ids` are whole examples here.

    Attributes:
      masks: N lists of bools, True on the tokens that are learned.
      blocks: lists of indices of examples; a batch counts blocks. Without packing each example is one.
    """

    masks: list[list[bool]]
    blocks: list[list[int]]

    @property
    def shared(self) -> int:
        """How many tokens all examples begin with and none learns; 0 where their first tokens differ."""
        first, shared = self.token_ids[0], min(mask.index(True, 1) for mask in self.masks)
        for ids in self.token_ids:
            if ids[:shared] != first[:shared]:
                shared = common_length(first[:shared], ids)
        return shared

    def batch(self, blocks: Sequence[int], *, rows: int, length: int, prompt_length: int = 1) -> Batch:
        """The examples of some blocks as a `Batch` [rows, 1, length], in NumPy's arrays.

        An example is its first tokens as the prompt (`shared` ones, or one, which nothing predicts), and the others as
        a completion of advantage 1; rows that are left over hold none. Nothing has sampled, so `sampling_log_probs` are
        0.
        """
        numbers = [number for block in blocks for number in self.blocks[block]]
        first, tokens = np.zeros((rows, prompt_length), np.int32), np.zeros((rows, 1, length), np.int32)
        mask = np.zeros(tokens.shape, bool)
        for row, number in enumerate(numbers):
            ids, learned = self.token_ids[number], self.masks[number]
            first[row], rest = ids[:prompt_length], len(ids) - prompt_length
            tokens[row, 0, :rest], mask[row, 0, :rest] = ids[prompt_length:], learned[prompt_length:]
        as_arrays: Any = np.asarray  # the types say JAX's arrays
        return Batch(
            prompts=Prompts(as_arrays(first), as_arrays(np.full(rows, prompt_length, np.int32))),
            tokens=as_arrays(tokens),
            mask=as_arrays(mask),
            advantages=as_arrays(np.ones((rows, 1), np.float32)),
            sampling_log_probs=as_arrays(np.zeros(tokens.shape, np.float32)),
        )

    def count_tokens(self, blocks: Sequence[int]) -> int:
        """Tokens of the examples of some blocks, those that are not learned among them."""
        return sum(len(self.token_ids[number]) for block in blocks for number in self.blocks[block])


class _Example(NamedTuple):
    ids: list[int]
    mask: list[bool]


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How rows become examples; fields as in `SFTConfig`."""

    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    dataset_text_field: str = "text"
    chat_template_kwargs: Json | None = None
    eos_token_ids: Sequence[int] = ()


def load_examples(
    dataset: Dataset,
    *,
    text_field: str = "text",
    columns: Columns | None = None,
    prompt: Template | None = None,
    argument: str = "dataset",
    most: int | None = None,
) -> list[Row]:
    """Turn a dataset into a list of rows that SFT can learn from; arguments and errors as in `load_rows`.

    Example:
      >>> load_examples([{"question": "1+1=", "completion": "2"}], prompt="{question}")[0]["prompt"]
      '1+1='
    """

    def fault_of(row: object, first: Json) -> str:
        if not isinstance(row, Mapping):
            return f"is {show(row)}: each row is a dict with {_KINDS}"
        columns = _columns_of(row, text_field)
        if not columns:
            return f"has none of {_KINDS}; its columns are {sorted(map(str, row))}: rename or add one"
        if columns == ("input_ids",):
            return _ids_fault(row) or content_fault(row, first)
        faults = [messages_fault(row[name], name) for name in columns]
        if columns == ("messages",) and isinstance(row["messages"], str):
            faults.append(f"has the text {show(row['messages'])} as its 'messages': call the column {text_field!r}")
        if columns == (text_field,) and is_conversation(row[text_field]):
            faults.append(f"has messages as its {text_field!r}: call the column 'messages'")
        if len(columns) == 2 and is_conversation(row["prompt"]) != is_conversation(row["completion"]):
            faults.append("has text and messages as its 'prompt' and 'completion': give two of a kind")
        return next(filter(None, faults), "") or content_fault(row, first)

    rows = filled_rows(dataset, columns, prompt, argument, most)
    if not rows:
        raise ValueError(f"{argument} is empty: give at least one row with {_KINDS}")
    return checked_rows(rows, fault_of, argument)


def encode_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    encoding: Encoding,
    *,
    max_length: int | None = None,
    packing: bool = False,
    argument: str = "dataset",
) -> Examples:
    """Tokenize rows of `load_examples` and mark what is learned; cut at `max_length`.

    Examples with nothing left to learn are left out. With `packing`, blocks of `max_length` tokens are filled, best fit
    with the longest first; else each example is a block. ValueError: rows that do not have what a setting needs, or
    whose assistant's turns cannot be found in what the chat template writes.

    References:
      TRL 1.16, `SFTTrainer._prepare_dataset` and `data_utils.pack_dataset`.
    """
    shown: set[object] = set()
    found = [_encode(row, tokenizer, encoding, f"{argument} row {i}", shown) for i, row in enumerate(rows)]
    cut = sum(max_length is not None and len(ids) > max_length for ids, _ in found)
    found = [_Example(ids[:max_length], mask[:max_length]) for ids, mask in found]
    kept = [i for i, example in enumerate(found) if any(example.mask[1:])]  # nothing predicts the first token
    dropped = sorted(set(range(len(rows))) - set(kept))
    if not kept:
        cause = f"max_length = {max_length} cuts off what there is: raise it" if cut else "give rows with a completion"
        raise ValueError(f"{argument}: none of its {len(rows)} rows has a token to learn; {cause}")
    if cut or dropped:
        warnings.warn(
            f"{argument}: {cut} of {len(rows)} examples are longer than max_length = {max_length} and cut there, and"
            f" {len(dropped)} have nothing to learn and are left out",
            stacklevel=2,
        )
    token_ids = [found[i].ids for i in kept]
    lengths = [len(ids) for ids in token_ids]
    blocks = fill_blocks(lengths, max_length) if packing and max_length else [[i] for i in range(len(kept))]
    return Examples([rows[i] for i in kept], token_ids, dropped, [found[i].mask for i in kept], blocks)


def fill_blocks(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the indices of the lengths that share a block of `size`: best fit decreasing."""
    blocks: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, block), in order
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(rooms, (lengths[i], -1))
        if at == len(rooms):
            room, block = size, len(blocks)
            blocks.append([])
        else:
            room, block = rooms.pop(at)
        blocks[block].append(i)
        bisect.insort(rooms, (room - lengths[i], block))
    return blocks


def _columns_of(row: Json, text_field: str) -> tuple[str, ...]:
    """The columns that a row is learned from."""
    for columns in (("input_ids",), ("prompt", "completion"), ("messages",), (text_field,)):
        if all(row.get(name) is not None for name in columns):
            return columns
    return ()


def _ids_fault(row: Json) -> str:
    """Return what is wrong with tokens, labels and masks, "" if nothing is."""
    for name in ("input_ids", "labels", *_MASKS):
        values = row.get(name, row["input_ids"])
        if not isinstance(values, list) or not values or not all(isinstance(x, int) for x in values):
            return f"has {show(values)} as its {name!r}: give a list of whole numbers"
        if len(values) != len(row["input_ids"]):
            return f"has {len(row['input_ids'])} 'input_ids' and {len(values)} {name!r}: give one for each"
    labels = row.get("labels", row["input_ids"])
    if wrong := [i for i, (x, y) in enumerate(zip(row["input_ids"], labels, strict=True)) if y not in (x, _IGNORED)]:
        return f"has another token in its 'labels' at {wrong[0]} than in its 'input_ids': give the token, or {_IGNORED}"
    return ""


def _encode_ids(row: Row, encoding: Encoding, where: str) -> _Example:
    """Tokens and mask of a row that has been tokenized already."""
    asked = (encoding.assistant_only_loss, encoding.completion_only_loss)
    for name, mask, needed in zip(("assistant_only_loss", "completion_only_loss"), _MASKS, asked, strict=True):
        if needed and mask not in row and "labels" not in row:
            raise ValueError(f"{name} = True: {where} has 'input_ids' without {mask!r} or 'labels': add one of them")
    if "labels" in row:
        return _Example(list(row["input_ids"]), [label != _IGNORED for label in row["labels"]])
    used = _MASKS[: 1 if encoding.completion_only_loss is False else 2]
    masks = zip(row["input_ids"], *(row[name] for name in used if name in row), strict=True)
    return _Example(list(row["input_ids"]), [all(bits) for _, *bits in masks])


def _encode(row: Row, tokenizer: Tokenizer, encoding: Encoding, where: str, shown: set[object]) -> _Example:
    """Tokens and mask of a row; `shown` is `seen` of `readable`."""
    columns = _columns_of(row, encoding.dataset_text_field)
    if columns == ("input_ids",):
        return _encode_ids(row, encoding, where)
    messages = columns[-1] in ("messages", "completion") and is_conversation(row[columns[0]])
    if encoding.completion_only_loss and columns != ("prompt", "completion"):
        raise ValueError(f"completion_only_loss = True: {where} has no 'prompt' and 'completion'; leave it at None")
    if encoding.assistant_only_loss and not messages:
        raise ValueError(f"assistant_only_loss = True: {where} has no messages, only text; leave it False")
    if messages:
        return _encode_messages(row, columns, tokenizer, encoding, where, shown)
    whole = row[columns[-1]]
    if tokenizer.eos_token and not whole.endswith(tokenizer.eos_token):
        whole += tokenizer.eos_token
    prompt = row["prompt"] if len(columns) == 2 else ""
    ids = list(tokenizer(prompt + whole)["input_ids"])
    mask = [True] * len(ids)
    if len(columns) == 2 and encoding.completion_only_loss is not False:
        start = common_length(tokenizer(prompt)["input_ids"], ids)
        mask = [i >= start for i in range(len(ids))]
    return _Example(ids, mask)


def _encode_messages(
    row: Row, columns: tuple[str, ...], tokenizer: Tokenizer, encoding: Encoding, where: str, shown: set[object]
) -> _Example:
    """Tokens and mask of a row of messages."""
    template = _Template(tokenizer, row, encoding.chat_template_kwargs, where)
    messages = [message for name in columns for message in row[name]]
    messages = readable(messages, tokenizer, template.keywords, where=where, seen=shown)
    if encoding.assistant_only_loss:
        ids, mask = template.assistant_mask(messages, encoding.eos_token_ids)
    else:
        ids = template.ids(messages)
        mask = [True] * len(ids)
    if len(columns) == 2 and encoding.completion_only_loss is not False:
        start = common_length(template.ids(messages[: len(row["prompt"])], opens=True), ids)
        mask = [learned and i >= start for i, learned in enumerate(mask)]
    template.learn_openings(ids, mask, messages[-1], encoding.eos_token_ids)
    return _Example(ids, mask)


class _Template:
    """The chat template as it shows one row."""

    def __init__(self, tokenizer: Tokenizer, row: Row, keywords: Json | None, where: str):
        tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
        self.keywords: Json = {**(keywords or {}), **(row.get("chat_template_kwargs") or {})}
        self.keywords = {**self.keywords, **({"tools": tools} if tools else {})}
        self._tokenizer, self._where = tokenizer, where
        if getattr(tokenizer, "chat_template", None) is None and "chat_template" not in self.keywords:
            raise ValueError(
                f"{where} is made of messages, but the tokenizer has no chat template: set tokenizer.chat_template, use"
                " an instruct checkpoint, or give text"
            )

    def learn_openings(self, ids: list[int], mask: list[bool], last: Message, eos_token_ids: Sequence[int]) -> None:
        """Learn tokens that end the assistant's turns by opening the next ones, and add the one after the last turn."""
        ends = set(eos_token_ids)
        if ends.isdisjoint(ids) or not ends.isdisjoint(ids[-2:]):  # no EOS opens a turn, or one closes the last one
            return
        role = "tool" if last.get("tool_calls") else "user"
        end = opening_token(self._tokenizer, role, chat_template_kwargs=self.keywords, eos_token_ids=eos_token_ids)
        if end is None:
            return
        for i in range(len(ids) - 1):
            mask[i + 1] |= mask[i] and ids[i] not in ends and ids[i + 1] in ends
        if mask[-1] and last["role"] == "assistant":
            ids.append(end)
            mask.append(True)

    def ids(self, messages: Messages, *, opens: bool = False) -> list[int]:
        """The tokens of a conversation; with `opens` those that open the assistant's turn after them."""
        return list(self._apply(messages, {"add_generation_prompt": opens})["input_ids"])

    def assistant_mask(self, messages: Messages, eos_token_ids: Sequence[int]) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and which of them the assistant says."""
        if self._has_tags():
            found = self._apply(messages, {"return_assistant_tokens_mask": True})
            ids, mask = list(found["input_ids"]), [bool(x) for x in found["assistant_masks"]]
        else:
            ids = self.ids(messages)
            mask = self._by_growing(messages, ids, eos_token_ids)
        if not any(mask):
            raise ValueError(
                f"assistant_only_loss = True: {self._where} has no token of the assistant; give a conversation with"
                " an assistant's message that the chat template writes"
            )
        return ids, mask

    def _has_tags(self) -> bool:
        template = self.keywords.get("chat_template") or self._tokenizer.get_chat_template(
            tools=self.keywords.get("tools")
        )
        return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def _by_growing(self, messages: Messages, ids: list[int], eos_token_ids: Sequence[int]) -> list[bool]:
        """The assistant's tokens: what each of its messages adds to the opened turn, up to its last EOS."""
        mask = [False] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened, closed = self.ids(messages[:i], opens=True) if i else [], self.ids(messages[: i + 1])
            shared = common_length(closed, ids)
            if set(closed[shared:]) <= special_tokens(self._tokenizer).keys():
                closed = closed[:shared]  # Phi-3 writes an EOS after the last turn alone
            if ids[: len(opened)] != opened or ids[: len(closed)] != closed:
                raise ValueError(
                    "assistant_only_loss = True: the chat template has no generation tags, and what it writes of"
                    f" {self._where} up to message {i} is no beginning of the whole: it shows earlier messages"
                    " otherwise than the last one, as thoughts are often left out. Put {% generation %} …"
                    " {% endgeneration %} around the assistant's words in it, or make each turn a row of 'prompt' and"
                    " 'completion'"
                )
            ends = [at + 1 for at in range(len(opened), len(closed)) if ids[at] in eos_token_ids]
            stop = ends[-1] if ends else len(closed)
            mask[len(opened) : stop] = [True] * (stop - len(opened))
        return mask

    def _apply(self, messages: Messages, keywords: Json) -> Mapping[str, list[int]]:
        keywords = {**self.keywords, "tokenize": True, "return_dict": True, **keywords}
        found: Mapping[str, list[int]] = apply_template(messages, self._tokenizer, keywords, where=self._where)
        return found
