"""Prompts of a dataset's rows to tokens, and the order in which a run takes the rows.

```
rows ── load_rows ──► list of dicts ── encode_prompts ──► token ids ── make_prompts ──► Prompts [B, P]
Completions [B, G, T] ── reward_inputs ──► the lists that reward functions take, prompt-major, B·G long
```
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.messages import show
from grpo_jax.text.calls import changed_calls, decoded_arguments
from grpo_jax.types import Json, Messages, Prompts, Row, Tokenizer

ON_LONG_PROMPT = ("error", "drop")

# Set by encode_prompts: with other values the template would not write a prompt to continue.
_OWN_TEMPLATE_KWARGS = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors")


def make_prompts(token_ids: Sequence[Sequence[int]], *, length: int | None = None, on_host: bool = False) -> Prompts:
    """Right-pad lists of token ids to one `Prompts`.

    Args:
      token_ids: B lists of token ids, none of them empty.
      length: P; None means the length of the longest prompt.
      on_host: return NumPy arrays instead of JAX arrays.

    Returns:
      `Prompts` with tokens [B, P] int32, padded by 0, and lengths [B] int32.

    Raises:
      ValueError: no prompts, an empty one, ids that are not integers in 0..2³¹−1, or a prompt longer than `length`.

    Example:
      >>> prompts = make_prompts([[5, 6, 7], [8]])
      >>> prompts.tokens.tolist(), prompts.lengths.tolist()
      ([[5, 6, 7], [8, 0, 0]], [3, 1])
    """
    if len(token_ids) == 0:
        raise ValueError("token_ids is empty: give at least one prompt")
    rows = [_id_array(ids, f"token_ids[{index}]") for index, ids in enumerate(token_ids)]
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = int(lengths.max())
    if length is not None and longest > length:
        raise ValueError(
            f"length is {length}, but token_ids[{int(lengths.argmax())}] has {longest} tokens: raise length or drop "
            "the prompt; it is not cut"
        )
    tokens = np.zeros((len(rows), length or longest), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    array: Any = np.asarray if on_host else jnp.asarray
    return Prompts(tokens=array(tokens), lengths=array(lengths))


def _id_array(ids: object, where: str) -> np.ndarray:
    """Return the ids of one prompt as an array; ValueError if they are not token ids."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"{where} is {show(ids)}: give a list of token ids with at least one (encode_prompts takes text)"
        )
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"{where} is {show(ids)}: token ids are integers in 0..2³¹−1")
    return array


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """Rows of a dataset with the token ids of their prompts.

    Attributes:
      rows: dicts.
      token_ids: of each row's prompt.
      dropped: indices of the rows that were left out because they are too long.
      parts: of several joined datasets, the number of rows of each by name, in order; empty for one dataset.
      masks: of examples, the tokens that are learned (`text.examples.Examples`); None for prompts.
      blocks: of examples, the blocks that a batch counts; None for prompts.
    """

    rows: list[Row]
    token_ids: list[list[int]]
    dropped: list[int]
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict, kw_only=True)
    masks: list[list[bool]] | None = dataclasses.field(default=None, kw_only=True)
    blocks: list[list[int]] | None = dataclasses.field(default=None, kw_only=True)

    def by_part(self) -> dict[str, EncodedPrompts]:
        """Return the rows of each joined dataset by name; of a single dataset under ""."""
        parts, found, end = self.parts or {"": len(self.rows)}, {}, 0
        for name, count in parts.items():
            at, end = slice(end, end + count), end + count
            found[name] = EncodedPrompts(self.rows[at], self.token_ids[at], [])
        return found


def join_prompts(encoded: Mapping[str, EncodedPrompts]) -> EncodedPrompts:
    """Join several encoded datasets into one with `parts`."""
    rows = [row for some in encoded.values() for row in some.rows]
    token_ids = [ids for some in encoded.values() for ids in some.token_ids]
    dropped = [index for some in encoded.values() for index in some.dropped]
    return EncodedPrompts(rows, token_ids, dropped, parts={name: len(some.rows) for name, some in encoded.items()})


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int | None = None,
    on_long_prompt: str = "error",
    chat_template_kwargs: Json | None = None,
    tools: Sequence[list[Json] | None] | None = None,
    argument: str = "dataset",
) -> EncodedPrompts:
    """Tokenize the prompt of every row. A prompt that is too long is an error or is left out; it is never cut.

    Text is encoded with the tokenizer's special tokens, messages by its chat template with the opening of the
    assistant's turn. A last message of the assistant is a prefill: its turn is left open for the completion.

    Args:
      rows: from `load_rows`.
      tokenizer: a transformers tokenizer, or an object with its `__call__`, `apply_chat_template` and `chat_template`.
      max_prompt_length: in tokens; None for no limit.
      on_long_prompt: "error", or "drop" to leave the row out and list it in `dropped`.
      chat_template_kwargs: further keywords for the chat template, such as `{"enable_thinking": False}`.
      tools: schemas that the template shows with each row's prompt; None for no tools.
      argument: name of the dataset in messages.

    Raises:
      ValueError: a prompt over the limit, or with "drop" all of them; messages that the chat template refuses or leaves
        out (many leave out roles that they do not know); a prompt that encodes to no token.

    References:
      Special tokens and template as in TRL 1.16 (`GRPOTrainer._tokenize_prompts`), which closes a last message of the
      assistant and opens another turn; here it is continued.
    """
    if on_long_prompt not in ON_LONG_PROMPT:
        raise ValueError(f"on_long_prompt is {on_long_prompt!r}: choose one of {', '.join(map(repr, ON_LONG_PROMPT))}")
    template_kwargs = dict(chat_template_kwargs or {})
    for name in _OWN_TEMPLATE_KWARGS:
        if name in template_kwargs:
            raise ValueError(f"chat_template_kwargs has {name!r}, which encode_prompts sets: remove it")
    prompts = [row["prompt"] for row in rows]
    if all(isinstance(prompt, str) for prompt in prompts):
        token_ids = tokenizer(text=prompts)["input_ids"] if prompts else []
    else:
        seen: set[object] = set()
        texts = []
        for index, (prompt, shown) in enumerate(zip(prompts, tools or [None] * len(prompts), strict=True)):
            keywords = template_kwargs | ({"tools": shown} if shown else {})
            texts.append(_opened_text(prompt, tokenizer, keywords, where=f"{argument} row {index}", seen=seen))
        token_ids = tokenizer(text=texts, add_special_tokens=False)["input_ids"]
    for index, ids in enumerate(token_ids):
        if len(ids) == 0:
            raise ValueError(
                f"{argument} row {index}: the tokenizer encodes the prompt {show(prompts[index])} to no tokens: check"
                " that the tokenizer belongs to the checkpoint, and that the prompt is not empty"
            )
    bound = max_prompt_length if max_prompt_length is not None else max(map(len, token_ids), default=0)
    long = [index for index, ids in enumerate(token_ids) if len(ids) > bound]
    if long and (on_long_prompt == "error" or len(long) == len(rows)):
        longest = max(long, key=lambda index: len(token_ids[index]))
        drop = " or leave such rows out with on_long_prompt='drop'" if len(long) < len(rows) else ""
        raise ValueError(
            f"max_prompt_length is {max_prompt_length}, but {len(long)} of {len(rows)} prompts are longer; the "
            f"longest, of {argument} row {longest}, has {len(token_ids[longest])} tokens: raise max_prompt_length{drop}"
        )
    kept = [index for index, ids in enumerate(token_ids) if len(ids) <= bound]
    return EncodedPrompts([rows[index] for index in kept], [token_ids[index] for index in kept], dropped=long)


def _opened_text(prompt: Messages, tokenizer: Tokenizer, keywords: Json, *, where: str, seen: set[object]) -> str:
    """Return the text of a conversation with the assistant's turn open; `seen` as in `readable`."""
    prefilled = prompt[-1]["role"] == "assistant"
    keywords = {**keywords, "add_generation_prompt": not prefilled, "continue_final_message": prefilled}
    messages = readable(prompt, tokenizer, keywords, where=where, seen=seen)
    return apply_template(messages, tokenizer, {**keywords, "tokenize": False}, where=where)


def apply_template(messages: Messages, tokenizer: Tokenizer, keywords: Json, *, where: str) -> Any:
    """Return what `apply_chat_template` returns for a conversation; ValueError without a template, or if it refuses."""
    if getattr(tokenizer, "chat_template", None) is None and "chat_template" not in keywords:
        raise ValueError(
            f"{where} is made of messages, but the tokenizer has no chat template: set tokenizer.chat_template, use an"
            " instruct checkpoint, or give text"
        )
    try:
        return tokenizer.apply_chat_template(list(messages), **keywords)
    except ImportError:  # jinja2 is missing
        raise
    except Exception as error:  # jinja2's errors and the ones that templates raise have no closer common class
        raise ValueError(
            f"{where}: the chat template refused the messages ({type(error).__name__}: {error}); they are"
            f" {show(list(messages))}"
        ) from error


def readable(messages: Messages, tokenizer: Tokenizer, keywords: Json, *, where: str, seen: set[object]) -> Messages:
    """Return a conversation with arguments of tool calls as the chat template takes them (`decoded_arguments`).

    A message or call that the template leaves out is a ValueError. To find it, the conversation is rendered with marks
    as contents, since a template may change contents on purpose (white space, earlier thoughts). `seen` collects the
    kinds of conversations that were checked before, which are not rendered again.
    """
    keywords = {**keywords, "tokenize": False}
    messages = decoded_arguments(messages, lambda changed: apply_template(changed, tokenizer, keywords, where=where))
    marks: dict[str, tuple[int, str]] = {}  # mark → its message, and the called tool or ""

    def mark_call(place: int, number: int, function: Json) -> Json:
        if not function.get("name"):
            return function
        marks[f"Zq{place}c{number}w"] = place, function["name"]
        return {**function, "name": f"Zq{place}c{number}w"}

    marked = changed_calls(messages, mark_call)
    for place, message in enumerate(marked):
        content, mark = message["content"], f"Zq{place}w"
        if not message.get("tool_calls") and any(str(part).strip() for part in content or ()):
            marks[mark] = place, ""
            message["content"] = mark if isinstance(content, str) else [{"type": "text", "text": mark}]
    kinds = [(str(message["role"]), type(message["content"])) for message in marked]
    kind = (*kinds, *marks, "tools" in keywords)
    if kind in seen:
        return messages
    seen.add(kind)
    try:
        shown = apply_template(marked, tokenizer, keywords, where=where)
    except Exception:  # a template that reads contents, which the marks have replaced
        return messages
    for mark, (place, tool) in marks.items():
        if mark not in shown:
            content, role = show(messages[place]["content"]), messages[place]["role"]
            what = f"the call of the tool {tool!r} in" if tool else f"the content {content} of"
            raise ValueError(
                f"{where}: the chat template leaves out {what} message {place}, whose role is {role!r}, so the policy"
                " would never see it: use roles that the template writes (mostly 'system', 'user', 'assistant' and"
                " 'tool'), contents of a supported type (text, or a list of parts), and for calls a template with tools"
            )
    return messages


def prompt_indices(start: int, count: int, *, num_rows: int, seed: int, shuffle: bool = True) -> list[tuple[int, int]]:
    """Return entries start..start+count−1 of the infinite sequence of (epoch, row index).

    The sequence has one permutation of 0..num_rows−1 for each epoch (the dataset's order with `shuffle=False`). It
    depends on the arguments alone, so that the integer `start` is all that a run stores to resume.
    """
    entries: list[tuple[int, int]] = []
    while len(entries) < count:
        epoch, position = divmod(start + len(entries), num_rows)
        order = _epoch_order(epoch, num_rows, seed) if shuffle else np.arange(num_rows)
        taken = order[position : position + count - len(entries)]
        entries.extend((epoch, int(row)) for row in taken)
    return entries


@functools.lru_cache(maxsize=2)  # a batch may span two epochs; 0.2 s for a million rows
def _epoch_order(epoch: int, num_rows: int, seed: int) -> np.ndarray:
    """Return the permutation of one epoch."""
    # Sorting raw bits instead of Generator.permutation: NumPy guarantees the stream of a bit generator across versions,
    # and not the results of Generator's methods (NEP 19); a run may be resumed with a newer NumPy.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_rows)
    return np.argsort(bits, kind="stable")
