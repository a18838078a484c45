"""Tokenization and loss masks of SFT examples, compatible with TRL.

| columns of a row | tokens included in the loss |
|---|---|
| `prompt` and `completion`, strings or messages | the completion; if `completion_only_loss=False`, all |
| `messages` | all; if `assistant_only_loss`, only assistant messages |
| `text`, or only `input_ids` | all |
| `input_ids` and `labels` | where `labels` is not −100 |
| `input_ids` with `assistant_masks`, `completion_mask` or both | where all given masks are 1 |

`assistant_only_loss` also applies to completions that are messages. If `completion_only_loss=False`, `completion_mask`
is ignored. An EOS is appended to strings that do not end with one. Rows without `input_ids` may have images (see
`text.images`), which must precede the tokens in the loss.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.config.sft import SFTConfig
from grpo_jax.messages import show
from grpo_jax.text.calls import parse_arguments
from grpo_jax.text.completions import common_length, special_tokens
from grpo_jax.text.images import ImageSource, assign_images, encode_texts, has_images, image_parts
from grpo_jax.text.prompts import EncodedPrompts, apply_template, template_messages
from grpo_jax.text.rows import Columns, Template, columns_fault, is_conversation, load_checked, messages_fault
from grpo_jax.text.sources import Dataset
from grpo_jax.types import Batch, Json, Messages, Prompts, Row, Tokenizer

if TYPE_CHECKING:
    from grpo_jax.hub.vision import ImageProcessor, Size

_IGNORED = -100  # label of tokens that are excluded from the loss
_MASKS = ("assistant_masks", "completion_mask")


@dataclasses.dataclass(frozen=True)
class Examples(EncodedPrompts):
    """Tokenized SFT examples. `token_ids` contains whole examples, and `masks` is True on tokens included in the loss.

    `blocks` contains a list of example indices for each packed block. Without packing, each block is one example.
    """

    masks: list[list[bool]]
    blocks: list[list[int]]

    @property
    def shared(self) -> int:
        """Length of the longest prefix that all examples have in common and that is always excluded from the loss."""
        first, shared = self.token_ids[0], min(mask.index(True, 1) for mask in self.masks)
        for ids in self.token_ids:
            if ids[:shared] != first[:shared]:
                shared = common_length(first[:shared], ids)
        return shared

    @property
    def starts(self) -> list[int]:
        """Index of each example's first token in the loss. An example's images precede this token."""
        return [mask.index(True, 1) for mask in self.masks]

    def batch(self, blocks: Sequence[int], *, rows: int, length: int, prompt_length: int = 1) -> Batch:
        """Convert the examples in the given blocks to a `Batch` [rows, 1, length] of NumPy arrays.

        The prompt consists of the first `prompt_length` tokens of each example. With images, it consists of all
        tokens before the first token in the loss, padded to `prompt_length`. The remaining tokens become a
        completion with advantage 1 and `sampling_log_probs` 0. Unused rows are masked out.
        """
        examples = [index for block in blocks for index in self.blocks[block]]
        first, tokens = np.zeros((rows, prompt_length), np.int32), np.zeros((rows, 1, length), np.int32)
        mask, lengths = np.zeros(tokens.shape, bool), np.full(rows, prompt_length, np.int32)
        for row, index in enumerate(examples):
            ids, learned = self.token_ids[index], self.masks[index]
            start = prompt_length if self.image_encoder is None else self.starts[index]
            first[row, :start], lengths[row], rest = ids[:start], start, len(ids) - start
            tokens[row, 0, :rest], mask[row, 0, :rest] = ids[start:], learned[start:]
        as_arrays: Any = np.asarray  # the fields of `Batch` are annotated as JAX arrays
        prompts = Prompts(as_arrays(first), as_arrays(lengths))
        if self.image_encoder is not None:
            images = [() if self.images is None else self.images[index] for index in examples]
            prompts = self.image_encoder(prompts, images + [()] * (rows - len(examples)))
        return Batch(
            prompts=prompts,
            tokens=as_arrays(tokens),
            mask=as_arrays(mask),
            advantages=as_arrays(np.ones((rows, 1), np.float32)),
            sampling_log_probs=as_arrays(np.zeros(tokens.shape, np.float32)),
        )


class _Example(NamedTuple):
    ids: list[int]
    mask: list[bool]
    images: Sequence[ImageSource] = ()
    sizes: Sequence[Size] = ()


def load_examples(
    dataset: Dataset,
    *,
    text_field: str = "text",
    columns: Columns | None = None,
    prompt: Template | None = None,
    argument: str = "dataset",
    max_rows: int | None = None,
) -> list[Row]:
    """Read an SFT dataset. `text_field` is the name of the text column; `load_rows` documents the other arguments."""

    kinds = f"'prompt' and 'completion', 'messages', {text_field!r} or 'input_ids'"

    def fault_of(row: Json, first: Json) -> str:
        columns = _columns_of(row, text_field)
        if not columns:
            return f"has none of {kinds}; rename one of its columns {sorted(map(str, row))} or add one"
        if columns == ("input_ids",):
            images = "has images together with 'input_ids'; use strings or messages instead" if has_images(row) else ""
            return _ids_fault(row) or images or columns_fault(row, first)
        faults = [messages_fault(row[name], name) for name in columns]
        if len(columns) == 2 and is_conversation(row["prompt"]) != is_conversation(row["completion"]):
            faults.append("has 'prompt' and 'completion' of different types; use strings or messages for both")
        return next(filter(None, faults), "") or columns_fault(row, first)

    return load_checked(dataset, columns, prompt, argument, max_rows, kinds, fault_of)


def encode_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    config: SFTConfig,
    *,
    eos_token_ids: Sequence[int] = (),
    packing: bool = False,
    processor: ImageProcessor | None = None,
    argument: str = "dataset",
) -> Examples:
    """Tokenize rows from `load_examples`, truncate the token ids to `config.max_length`, and compute loss masks.

    Examples without tokens in the loss are dropped. If `packing`, examples are packed into blocks of up to `max_length`
    tokens by best-fit decreasing, as in TRL 1.16 (`SFTTrainer._prepare_dataset`, `data_utils.pack_dataset`).
    Rows with images require a `processor` from `load_processor_if_needed`. Raises ValueError if a row lacks columns
    that the config requires, if the assistant's turns cannot be located, if the loss includes an image or tokens before
    it, or if no row has tokens in the loss.
    """
    length, encoder = config.max_length, _Encoder(tokenizer, config, eos_token_ids, processor)
    examples = [encoder.encode(row, f"{argument} row {i}") for i, row in enumerate(rows)]
    truncated = sum(length is not None and len(ids) > length for ids, *_ in examples)
    examples = [example._replace(ids=example.ids[:length], mask=example.mask[:length]) for example in examples]
    kept = [i for i, example in enumerate(examples) if any(example.mask[1:])]  # the first token is never predicted
    dropped = sorted(set(range(len(rows))) - set(kept))
    if not kept:
        fix = f"increase max_length={length}" if truncated else "add rows with a completion"
        raise ValueError(f"{argument}: no row has tokens included in the loss (rows: {len(rows)}); {fix}")
    changes = []
    if truncated:
        changes.append(f"truncated {truncated} of {len(rows)} examples (longer than max_length={length})")
    if dropped:
        changes.append(f"dropped {len(dropped)} of {len(rows)} examples (no tokens in the loss)")
    if changes:
        warnings.warn(f"{argument}: {'; '.join(changes)}", stacklevel=2)
    token_ids = [examples[i].ids for i in kept]
    lengths = [len(ids) for ids in token_ids]
    blocks = fill_blocks(lengths, length) if packing and length else [[i] for i in range(len(kept))]
    images = None if processor is None else [tuple(examples[i].images) for i in kept]
    sizes, masks = [list(examples[i].sizes) for i in kept], [examples[i].mask for i in kept]
    return Examples([rows[i] for i in kept], token_ids, dropped, masks, blocks, images=images, image_sizes=sizes)


def fill_blocks(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pack items with the given lengths into blocks of `size` by best-fit decreasing. Returns the indices per block."""
    blocks: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, block index), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        best = bisect.bisect_left(free, (lengths[i], -1))
        if best == len(free):
            left, block = size, len(blocks)
            blocks.append([])
        else:
            left, block = free.pop(best)
        blocks[block].append(i)
        bisect.insort(free, (left - lengths[i], block))
    return blocks


def _columns_of(row: Json, text_field: str) -> tuple[str, ...]:
    for columns in (("input_ids",), ("prompt", "completion"), ("messages",), (text_field,)):
        if all(row.get(name) is not None for name in columns):
            return columns
    return ()


def _ids_fault(row: Json) -> str:
    for name in ("input_ids", "labels", *_MASKS):
        values = row.get(name, row["input_ids"])
        if not isinstance(values, list) or not values or not all(isinstance(x, int) for x in values):
            return f"must have a non-empty list of integers in {name!r}; got {show(values)}"
        if len(values) != len(row["input_ids"]):
            return f"has {len(row['input_ids'])} 'input_ids' but {len(values)} {name!r}; the lengths must be equal"
    if min(row["input_ids"]) < 0:
        return f"has the negative token id {min(row['input_ids'])} in 'input_ids'; only 'labels' may contain {_IGNORED}"
    labels = row.get("labels", row["input_ids"])
    for i, (token, label) in enumerate(zip(row["input_ids"], labels, strict=True)):
        if label not in (token, _IGNORED):
            return f"has 'labels' that differ from 'input_ids' at index {i}; use the token id or {_IGNORED}"
    return ""


class _Encoder:
    """Tokenizes single rows; see `encode_examples` for the arguments."""

    def __init__(
        self, tokenizer: Tokenizer, config: SFTConfig, eos_token_ids: Sequence[int], processor: ImageProcessor | None
    ):
        self.tokenizer, self.config, self.ends, self.processor = tokenizer, config, set(eos_token_ids), processor
        self.seen: set[object] = set()  # see `template_messages`

    def encode(self, row: Row, where: str) -> _Example:
        """Tokenize a row and compute its loss mask. Raises ValueError unless the loss starts after the last image."""
        example = self.encode_row(row, where)
        if self.processor is not None and example.images:
            end = len(example.ids) - example.ids[::-1].index(self.processor.image_token_id)
            if any(example.mask[:end]):
                raise ValueError(
                    f"{where}: the loss must start after the last image (token {end - 1}), but it starts at token"
                    f" {example.mask.index(True)}; use 'prompt' and 'completion' with completion_only_loss=None or"
                    " True, or messages with assistant_only_loss=True. If later turns have images, use one row per turn"
                )
        return example

    def encode_row(self, row: Row, where: str) -> _Example:
        columns, config = _columns_of(row, self.config.dataset_text_field), self.config
        if columns == ("input_ids",):
            return self.encode_ids(row, where)
        messages = is_conversation(row[columns[0]])
        if config.completion_only_loss and columns != ("prompt", "completion"):
            raise ValueError(
                f"completion_only_loss=True requires 'prompt' and 'completion' in {where}; set it to None or add them"
            )
        if config.assistant_only_loss and not messages:
            raise ValueError(f"assistant_only_loss=True requires messages in {where}; set assistant_only_loss=False")
        if messages:
            return self.encode_messages(row, columns, where)
        whole, prompt = row[columns[-1]], row["prompt"] if len(columns) == 2 else ""
        if self.tokenizer.eos_token and not whole.endswith(self.tokenizer.eos_token):
            whole += self.tokenizer.eos_token
        text, images, sizes = assign_images(row, prompt + whole, self.processor, where)
        ids, start = self.tokenize(text, sizes, where, special=True), 0
        if len(columns) == 2 and config.completion_only_loss is not False:
            start = common_length(self.tokenize(prompt, sizes, where, special=True), ids)
        return _Example(ids, [i >= start for i in range(len(ids))], images, sizes)

    def tokenize(self, text: str, sizes: Sequence[Size], where: str, *, special: bool) -> list[int]:
        (ids,) = encode_texts([text], [sizes], self.tokenizer, self.processor, [where], add_special_tokens=special)
        return list(ids)

    def encode_ids(self, row: Row, where: str) -> _Example:
        ids, config = list(row["input_ids"]), self.config
        for name, mask in zip(("assistant_only_loss", "completion_only_loss"), _MASKS, strict=True):
            if getattr(config, name) and mask not in row and "labels" not in row:
                raise ValueError(
                    f"{name}=True requires {mask!r} or 'labels' together with 'input_ids' in {where}; add one of them"
                )
        if "labels" in row:
            return _Example(ids, [label != _IGNORED for label in row["labels"]])
        used = [row[name] for name in _MASKS[: 1 if config.completion_only_loss is False else 2] if name in row]
        return _Example(ids, [all(mask[i] for mask in used) for i in range(len(ids))])

    def encode_messages(self, row: Row, columns: tuple[str, ...], where: str) -> _Example:
        tools = parse_arguments(row.get("tools") or None)  # "" and [] mean no tools
        if isinstance(tools, str):
            raise ValueError(f"{where} has {show(tools)} as 'tools'; use a list of schemas, or such a list as JSON")
        keywords: Json = {**(self.config.chat_template_kwargs or {}), **(row.get("chat_template_kwargs") or {})}
        keywords = {**keywords, "tools": tools} if tools else keywords
        whole = [message for name in columns for message in row[name]]
        messages, images, sizes = assign_images(row, whole, self.processor, where)
        messages = template_messages(messages, self.tokenizer, keywords, where=where, seen=self.seen)

        def apply(messages: Messages, options: Json) -> Any:
            return apply_template(messages, self.tokenizer, {**keywords, **options}, where=where)

        def ids_of(messages: Messages, *, generation_prompt: bool = False) -> list[int]:
            text = apply(messages, {"add_generation_prompt": generation_prompt, "tokenize": False})
            return self.tokenize(text, sizes[: len(image_parts(messages))], where, special=False)

        ids = ids_of(messages)
        mask = [True] * len(ids)
        if self.config.assistant_only_loss:
            template = self.tokenizer.get_chat_template(keywords.get("chat_template"), tools)
            if re.search(r"\{%-?\s*generation\s*-?%\}", template):
                options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
                encoding = apply(messages, options)
                learned = [bool(x) for x in encoding["assistant_masks"]]
                # `encoding` contains only one placeholder per image, so its ids equal `ids` only after the last image.
                shared = common_length(encoding["input_ids"][::-1], ids[::-1])
                first, last = learned[: len(learned) - shared], learned[len(learned) - shared :]
                mask = [any(first)] * (len(ids) - shared) + last
            else:
                mask = self.assistant_mask(messages, ids, ids_of, where)
        if len(columns) == 2 and self.config.completion_only_loss is not False:
            start = common_length(ids_of(messages[: len(row["prompt"])], generation_prompt=True), ids)
            mask = [learned and i >= start for i, learned in enumerate(mask)]
        return _Example(ids, mask, images, sizes)

    def assistant_mask(
        self, messages: Messages, ids: list[int], ids_of: Callable[..., list[int]], where: str
    ) -> list[bool]:
        """Return a mask that is True after each generation prompt, up to the message's last EOS, if any, or its end."""
        mask = [False] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, conversation = ids_of(messages[:i], generation_prompt=True) if i else [], ids_of(messages[: i + 1])
            shared = common_length(conversation, ids)
            if set(conversation[shared:]) <= set(special_tokens(self.tokenizer)):
                conversation = conversation[:shared]  # Phi-3's template adds an EOS only after the last turn
            if ids[: len(prompt)] != prompt or ids[: len(conversation)] != conversation:
                raise ValueError(
                    "assistant_only_loss=True: the chat template lacks generation tags, and it renders"
                    f" {where} up to message {i} differently without the later messages (many templates omit previous"
                    " reasoning). Put {% generation %} … {% endgeneration %} around the assistant's text in the"
                    " template, or use a row with 'prompt' and 'completion' for each turn"
                )
            ends = [j + 1 for j in range(len(prompt), len(conversation)) if ids[j] in self.ends]
            stop = ends[-1] if ends else len(conversation)
            mask[len(prompt) : stop] = [True] * (stop - len(prompt))
        return mask
