"""Tokenization of prompts, and the order in which a run reads its dataset.

```
dataset ── load_rows ──► list of dicts ── encode_prompts ──► token ids ── make_prompts ──► Prompts [B, P]
Completions [B, G, T] ── reward_inputs ──► inputs for reward functions: lists of length B·G, prompt-major
```
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.messages import show
from grpo_jax.text.calls import decode_arguments, map_calls
from grpo_jax.text.images import ImageSource, assign_images, encode_texts
from grpo_jax.types import Json, Messages, Prompts, Row, Tokenizer

if TYPE_CHECKING:
    from grpo_jax.hub.vision import ImageProcessor, Size


def make_prompts(token_ids: Sequence[Sequence[int]], *, length: int | None = None, as_numpy: bool = False) -> Prompts:
    """Stack lists of token ids with padding on the right.

    Args:
      token_ids: B non-empty lists of token ids.
      length: padded length P. If None, the length of the longest prompt is used.
      as_numpy: whether to return NumPy arrays instead of JAX arrays.

    Returns:
      `Prompts` with tokens [B, P] int32, padded with 0, and lengths [B] int32.

    Raises:
      ValueError: if there are no prompts, a prompt is empty or too long, or an id is not an integer in [0, 2³¹).

    Example:
      >>> prompts = make_prompts([[5, 6, 7], [8]])
      >>> prompts.tokens.tolist(), prompts.lengths.tolist()
      ([[5, 6, 7], [8, 0, 0]], [3, 1])
    """
    if len(token_ids) == 0:
        raise ValueError("token_ids is empty; pass at least one prompt")
    rows = [_id_array(ids, f"token_ids[{index}]") for index, ids in enumerate(token_ids)]
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = int(lengths.max())
    if length is not None and longest > length:
        raise ValueError(
            f"length={length} is too small for token_ids[{int(lengths.argmax())}] with {longest} tokens; increase"
            " length or drop the prompt (prompts are not truncated)"
        )
    tokens = np.zeros((len(rows), length or longest), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    array: Any = np.asarray if as_numpy else jnp.asarray
    return Prompts(tokens=array(tokens), lengths=array(lengths))


def _id_array(ids: object, where: str) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"{where} must be a non-empty list of token ids; got {show(ids)}; for text, use encode_prompts"
        )
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"{where} must contain integers in [0, 2³¹); got {show(ids)}")
    return array


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """Dataset rows with the token ids of their prompts.

    `dropped` contains the indices of removed rows: prompts that are too long, or SFT examples without loss tokens.
    `parts` maps the names of joined datasets to their numbers of rows. `masks` and `blocks` are set only for SFT
    examples. `images` contains the images of each row in the order of their tokens, or is None if no row has images.
    `image_sizes` contains the images' heights and widths. `image_encoder` is an `ImageEncoder` (`run.images`), or None.
    """

    rows: list[Row]
    token_ids: list[list[int]]
    dropped: list[int]
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict, kw_only=True)
    masks: list[list[bool]] | None = dataclasses.field(default=None, kw_only=True)
    blocks: list[list[int]] | None = dataclasses.field(default=None, kw_only=True)
    images: list[tuple[ImageSource, ...]] | None = dataclasses.field(default=None, kw_only=True)
    image_sizes: list[list[Size]] | None = dataclasses.field(default=None, kw_only=True)
    image_encoder: Any = dataclasses.field(default=None, kw_only=True)

    def prompts(
        self, indices: Sequence[int], *, length: int | None = None, token_ids: Sequence[Sequence[int]] | None = None
    ) -> Prompts:
        """Return the prompts at the given indices as NumPy arrays, padded by `make_prompts`, with their images.

        `token_ids`, if given, are used instead of the token ids of these rows. The images remain the same.
        """
        ids = [self.token_ids[i] for i in indices] if token_ids is None else token_ids
        prompts = make_prompts(ids, length=length, as_numpy=True)
        if self.image_encoder is not None:
            prompts = self.image_encoder(prompts, [() if self.images is None else self.images[i] for i in indices])
        return prompts

    def by_part(self) -> dict[str, EncodedPrompts]:
        """Split joined datasets into a dict, keyed by name. A single dataset has the name ""."""
        parts, datasets, end = self.parts or {"": len(self.rows)}, {}, 0
        for name, count in parts.items():
            part, end = slice(end, end + count), end + count
            images = None if self.images is None else self.images[part]
            datasets[name] = dataclasses.replace(
                self, rows=self.rows[part], token_ids=self.token_ids[part], dropped=[], parts={}, images=images
            )
        return datasets


def join_prompts(encoded: Mapping[str, EncodedPrompts]) -> EncodedPrompts:
    """Concatenate encoded datasets and record their sizes in `parts`."""
    rows = [row for part in encoded.values() for row in part.rows]
    token_ids = [ids for part in encoded.values() for ids in part.token_ids]
    dropped = [index for part in encoded.values() for index in part.dropped]
    images = [row_images for part in encoded.values() for row_images in part.images or [()] * len(part.rows)]
    parts = {name: len(part.rows) for name, part in encoded.items()}
    image_encoder = next((part.image_encoder for part in encoded.values()), None)
    joined = EncodedPrompts(rows, token_ids, dropped, parts=parts, image_encoder=image_encoder)
    return dataclasses.replace(joined, images=images) if any(images) else joined


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int | None = None,
    on_long_prompt: str = "error",
    chat_template_kwargs: Json | None = None,
    tools: Sequence[list[Json] | None] | None = None,
    processor: ImageProcessor | None = None,
    argument: str = "dataset",
) -> EncodedPrompts:
    """Tokenize the prompts in rows from `load_rows`.

    Strings are encoded with the tokenizer's special tokens. Messages are rendered with the chat template, including the
    generation prompt and the row's `tools`. A final assistant message is left open, so that the completion continues it
    (TRL 1.16 closes the message and starts a new turn). Prompts longer than `max_prompt_length` are dropped if
    `on_long_prompt` is "drop". Rows with images (see `text.images`) require a `processor` from
    `load_processor_if_needed`.

    Raises ValueError if a prompt is too long (with "drop", if all prompts are), if a prompt has no tokens, if
    the chat template rejects or omits a message, or if an image cannot be read or has no placeholder. In error
    messages, `argument` is the name of the dataset.
    """
    where = [f"{argument} row {index}" for index in range(len(rows))]
    prompts = [assign_images(row, row["prompt"], processor, name) for row, name in zip(rows, where, strict=True)]
    texts = [prompt.prompt for prompt in prompts]
    strings = all(isinstance(text, str) for text in texts)
    if not strings:
        texts = _render(texts, tokenizer, chat_template_kwargs or {}, tools or [None] * len(rows), where)
    sizes = [prompt.sizes for prompt in prompts]
    token_ids = encode_texts(texts, sizes, tokenizer, processor, where, add_special_tokens=strings)
    for name, row, ids in zip(where, rows, token_ids, strict=True):
        if len(ids) == 0:
            raise ValueError(
                f"{name}: the prompt {show(row['prompt'])} has no tokens; check that it is not empty and that"
                " the tokenizer belongs to the checkpoint"
            )
    too_long = [i for i, ids in enumerate(token_ids) if max_prompt_length is not None and len(ids) > max_prompt_length]
    if too_long and (on_long_prompt == "error" or len(too_long) == len(rows)):
        longest = max(too_long, key=lambda index: len(token_ids[index]))
        drop = " or set on_long_prompt='drop'" if len(too_long) < len(rows) else ""
        raise ValueError(
            f"max_prompt_length={max_prompt_length} is exceeded by {len(too_long)} of {len(rows)} prompts; the longest"
            f" is {argument} row {longest} with {len(token_ids[longest])} tokens. Increase max_prompt_length{drop}"
        )
    kept = sorted(set(range(len(rows))) - set(too_long))
    images = None if processor is None else [tuple(prompts[i].images) for i in kept]
    return EncodedPrompts(
        [rows[i] for i in kept],
        [token_ids[i] for i in kept],
        dropped=too_long,
        images=images,
        image_sizes=[sizes[i] for i in kept],
    )


def _render(
    prompts: Sequence[Messages],
    tokenizer: Tokenizer,
    template_kwargs: Json,
    tools: Sequence[list[Json] | None],
    where: Sequence[str],
) -> list[str]:
    """Render each conversation and its tools with the chat template, including the generation prompt or prefill."""
    seen: set[object] = set()
    texts = []
    for prompt, row_tools, name in zip(prompts, tools, where, strict=True):
        prefilled = prompt[-1]["role"] == "assistant"
        opening = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled}
        keywords = {**template_kwargs, **opening, **({"tools": row_tools} if row_tools else {})}
        messages = template_messages(prompt, tokenizer, keywords, where=name, seen=seen)
        texts.append(apply_template(messages, tokenizer, {**keywords, "tokenize": False}, where=name))
    return texts


def apply_template(messages: Messages, tokenizer: Tokenizer, keywords: Json, *, where: str) -> Any:
    """Call `apply_chat_template`. Raises ValueError if there is no template or the template rejects the messages."""
    if getattr(tokenizer, "chat_template", None) is None and "chat_template" not in keywords:
        raise ValueError(
            f"{where} consists of messages, but the tokenizer has no chat template; set tokenizer.chat_template, use an"
            " instruct checkpoint, or pass strings"
        )
    try:
        return tokenizer.apply_chat_template(list(messages), **keywords)
    except ImportError:  # jinja2 is missing
        raise
    except Exception as error:  # no narrower class covers both jinja2's errors and errors raised in templates
        raise ValueError(
            f"{where}: the chat template rejected {show(list(messages))} ({type(error).__name__}: {error}); change the"
            " messages, or use a template that supports them"
        ) from error


def template_messages(
    messages: Messages, tokenizer: Tokenizer, keywords: Json, *, where: str, seen: set[object]
) -> Messages:
    """Convert tool call arguments to the form that the chat template expects (see `decode_arguments`).

    Raises ValueError if the template omits a message or call. The check renders markers instead of the contents, since
    templates may modify contents on purpose (whitespace, earlier reasoning). `seen` collects the structures of checked
    conversations, so that each structure is checked only once.
    """
    keywords = {**keywords, "tokenize": False}
    messages = decode_arguments(messages, lambda changed: apply_template(changed, tokenizer, keywords, where=where))
    marks: dict[str, tuple[int, str]] = {}  # marker → (message index, called tool or "")

    def mark_call(index: int, call: int, function: Json) -> Json:
        if not function.get("name"):
            return function
        marks[f"Zq{index}c{call}w"] = index, function["name"]
        return {**function, "name": f"Zq{index}c{call}w"}

    marked = map_calls(mark_call, messages)
    for index, message in enumerate(marked):
        content, mark = message["content"], f"Zq{index}w"
        if not message.get("tool_calls") and any(str(part).strip() for part in content or ()):
            marks[mark] = index, ""
            message["content"] = mark if isinstance(content, str) else [{"type": "text", "text": mark}]
    structure = (*((str(m["role"]), type(m["content"])) for m in marked), *marks, "tools" in keywords)
    if structure in seen:
        return messages
    seen.add(structure)
    try:
        text = apply_template(marked, tokenizer, keywords, where=where)
    except Exception:  # the template parses contents and fails on the markers
        return messages
    for mark, (index, tool) in marks.items():
        if mark not in text:
            content, role = show(messages[index]["content"]), messages[index]["role"]
            what = f"the call to the tool {tool!r} in" if tool else f"the content {content} of"
            raise ValueError(
                f"{where}: the chat template omits {what} message {index} with role {role!r}. Use roles and content"
                " types that the template supports (usually 'system', 'user', 'assistant' and 'tool', with a string or"
                " a list of parts); for calls, use a template with tool support"
            )
    return messages


def prompt_indices(start: int, count: int, *, num_rows: int, seed: int, shuffle: bool = True) -> list[int]:
    """Return entries start..start+count−1 of an infinite sequence of row indices.

    Each epoch is a permutation of 0..num_rows−1, or the dataset order if `shuffle` is False. The sequence depends only
    on `num_rows`, `seed` and `shuffle`, so a run can be resumed from the integer `start`.
    """
    entries: list[int] = []
    while len(entries) < count:
        epoch, position = divmod(start + len(entries), num_rows)
        order = _epoch_order(epoch, num_rows, seed) if shuffle else np.arange(num_rows)
        entries += order[position : position + count - len(entries)].tolist()
    return entries


@functools.lru_cache(maxsize=2)  # a batch may span two epochs; sorting a million rows takes 0.2 s
def _epoch_order(epoch: int, num_rows: int, seed: int) -> np.ndarray:
    # Sort raw bits instead of Generator.permutation: NumPy keeps bit generator streams stable across versions, but
    # not the results of Generator's methods (NEP 19), and a run may be resumed with a newer version.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_rows)
    return np.argsort(bits, kind="stable")
