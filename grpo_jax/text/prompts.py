"""Rows of a dataset to tokens, in an order that one integer resumes, and completions back to text.

```
rows ── load_rows ──► list of dicts ── encode_prompts ──► token ids ── make_prompts ──► Prompts [B, P]
Completions [B, G, T] ── reward_inputs ──► the lists that reward functions take, prompt-major, B·G long
```

The tokenizer is always an argument (anything with the interface of a transformers tokenizer), so that importing this
module imports neither transformers nor a model.
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


# encode_prompts decides these: with another value the template would not return the ids of a prompt to continue.
_OWN_TEMPLATE_KWARGS = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors")


def make_prompts(
    token_ids: Sequence[Sequence[int]], *, pad_to_multiple_of: int = 1, length: int | None = None, on_host: bool = False
) -> Prompts:
    """Right-pad lists of token ids to one `Prompts`.

    Args:
      token_ids: B lists of token ids, none of them empty.
      pad_to_multiple_of: P is rounded up to a multiple of this, so that few different shapes get compiled.
      length: P before rounding; default is the longest prompt.
      on_host: return NumPy's arrays in the place of JAX's.

    Returns:
      `Prompts` with tokens [B, P] int32, 0 as padding, and lengths [B] int32.

    Raises:
      ValueError: no prompt, an empty prompt, ids that are not integers in 0..2³¹−1, or a prompt longer than `length`.

    Example:
      >>> prompts = make_prompts([[5, 6, 7], [8]], pad_to_multiple_of=4)
      >>> prompts.tokens.tolist(), prompts.lengths.tolist()
      ([[5, 6, 7, 0], [8, 0, 0, 0]], [3, 1])
    """
    if len(token_ids) == 0:
        raise ValueError("token_ids is empty: give at least one prompt")
    if pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of is {pad_to_multiple_of}: give 1 or more")
    rows = [_id_array(ids, f"token_ids[{index}]") for index, ids in enumerate(token_ids)]
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = int(lengths.max())
    if length is not None and longest > length:
        raise ValueError(
            f"length is {length}, but token_ids[{int(lengths.argmax())}] has {longest} tokens: raise length or drop "
            "the prompt; it is not cut"
        )
    padded_length = -(-(length or longest) // pad_to_multiple_of) * pad_to_multiple_of
    tokens = np.zeros((len(rows), padded_length), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    array: Any = np.asarray if on_host else jnp.asarray
    return Prompts(tokens=array(tokens), lengths=array(lengths))


def _id_array(ids: Any, where: str) -> np.ndarray:
    """Return the ids of one prompt as an array, or say what is wrong with them."""
    if isinstance(ids, str):
        raise ValueError(f"{where} is text, {show(ids)}: make_prompts takes token ids; encode_prompts takes text")
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"{where} is {show(ids)}: give a list of lists of token ids, one list for each prompt")
    if array.size == 0:
        raise ValueError(f"{where} is empty: a prompt needs at least one token (a BOS, for instance)")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{where} holds {array.dtype} values, {show(ids)}: token ids are integers")
    if array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"{where} holds ids from {array.min()} to {array.max()}: token ids are in 0..2³¹−1")
    return array


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """Rows of a dataset, the token ids of each row's prompt, and the indices of rows dropped for being too long.

    `parts` are the names of several datasets whose rows these are in turn, and how many are from each.
    """

    rows: list[Row]
    token_ids: list[list[int]]
    dropped: list[int]
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict, kw_only=True)

    def by_part(self) -> dict[str, EncodedPrompts]:
        """The rows of each of several datasets by name; those of one dataset under ""."""
        parts, found, end = self.parts or {"": len(self.rows)}, {}, 0
        for name, count in parts.items():
            at, end = slice(end, end + count), end + count
            found[name] = EncodedPrompts(self.rows[at], self.token_ids[at], [])
        return found


def join_prompts(encoded: Mapping[str, EncodedPrompts]) -> EncodedPrompts:
    """Several encoded datasets as one, which still has them as its `parts`."""
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
    """Tokenize the prompt of every row; a prompt that is too long is an error or is left out, never cut.

    Text is encoded with the tokenizer's own special tokens, messages by its chat template with the opening of the
    assistant's turn. Where the last message is the assistant's, it is a prefill: the turn is left open after it and the
    completion continues it.

    Args:
      rows: as `load_rows` returns them.
      tokenizer: a transformers tokenizer, or anything with its `__call__`, `apply_chat_template` and `chat_template`.
      max_prompt_length: in tokens; None for no bound.
      on_long_prompt: "error", or "drop" to leave the row out and name it in `dropped`.
      chat_template_kwargs: further keywords for the chat template, `{"enable_thinking": False}` for instance.
      tools: the schemas that the template shows with each row's prompt; None: with none.
      argument: the caller's name for the dataset, for the messages.

    Raises:
      ValueError: a prompt over the bound, or with "drop" all of them; messages that the chat template refuses or leaves
        out, as many do with a role that they do not know; a prompt that encodes to no token.

    References:
      Special tokens and template as in TRL 1.16 (`GRPOTrainer._tokenize_prompts`), which closes a last message of the
      assistant and opens another turn; we continue it.
    """
    if on_long_prompt not in ON_LONG_PROMPT:
        raise ValueError(f"on_long_prompt is {on_long_prompt!r}: choose one of {', '.join(map(repr, ON_LONG_PROMPT))}")
    template_kwargs: dict[str, Any] = dict(chat_template_kwargs or {})
    for name in _OWN_TEMPLATE_KWARGS:
        if name in template_kwargs:
            raise ValueError(f"chat_template_kwargs has {name!r}, which encode_prompts sets itself: take it out")
    prompts = [row["prompt"] for row in rows]
    if all(isinstance(prompt, str) for prompt in prompts):
        token_ids = tokenizer(text=prompts)["input_ids"] if prompts else []
    else:
        shown = [template_kwargs | ({"tools": own} if own else {}) for own in tools or [None] * len(prompts)]
        opened = [{**own, **_opening(prompt)} for own, prompt in zip(shown, prompts, strict=True)]
        seen: set[object] = set()
        prompts = [
            readable(prompt, tokenizer, kwargs, where=f"{argument} row {index}", seen=seen)
            for index, (prompt, kwargs) in enumerate(zip(prompts, opened, strict=True))
        ]
        token_ids = _encode_together(prompts, tokenizer, opened) or [
            _encode_messages(prompt, tokenizer, kwargs, where=f"{argument} row {index}")
            for index, (prompt, kwargs) in enumerate(zip(prompts, opened, strict=True))
        ]
    for index, ids in enumerate(token_ids):
        if len(ids) == 0:
            raise ValueError(
                f"{argument} row {index}: the tokenizer encodes the prompt {show(prompts[index])} to no token at "
                "all: check that the tokenizer belongs to the checkpoint, and that the prompt is not empty"
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
    return EncodedPrompts(
        rows=[rows[index] for index in kept], token_ids=[token_ids[index] for index in kept], dropped=long
    )


def _encode_together(
    prompts: Sequence[Messages], tokenizer: Tokenizer, template_kwargs: Sequence[Json]
) -> list[list[int]] | None:
    """Return what `_encode_messages` does for each conversation, by few calls of a tokenizer of transformers.

    None where it cannot: another tokenizer may not take several, and of one by one a message can name the row at fault.
    """
    if not any(kind.__module__.partition(".")[0] == "transformers" for kind in type(tokenizer).__mro__):
        return None
    kinds: dict[str, list[int]] = {}
    for index, kwargs in enumerate(template_kwargs):
        kinds.setdefault(repr(kwargs), []).append(index)
    token_ids: list[list[int]] = [[]] * len(prompts)
    try:
        for members in kinds.values():
            keywords = {**template_kwargs[members[0]], "tokenize": True}
            together = apply_template([list(prompts[i]) for i in members], tokenizer, keywords, where="several")
            for index, ids in zip(members, together, strict=True):
                token_ids[index] = ids
    except Exception:  # whatever it is, the calls one by one meet it too
        return None
    return token_ids


def _opening(prompt: Messages) -> Json:
    """Return the keywords by which a template leaves a conversation open: to speak, or to go on."""
    prefilled = prompt[-1]["role"] == "assistant"
    # Without return_dict transformers 5 would return a dict of ids and attention mask.
    return {"add_generation_prompt": not prefilled, "continue_final_message": prefilled, "return_dict": False}


def _encode_messages(prompt: Messages, tokenizer: Tokenizer, template_kwargs: Json, *, where: str) -> list[int]:
    """Return the token ids of one conversation, open for the assistant to speak."""
    if getattr(tokenizer, "chat_template", None) is None and "chat_template" not in template_kwargs:
        raise ValueError(
            f"{where}: 'prompt' is a list of messages, but the tokenizer has no chat template: set "
            "tokenizer.chat_template, use an instruct checkpoint, or give prompts as text"
        )
    return list(apply_template(prompt, tokenizer, {**template_kwargs, "tokenize": True}, where=where))


def apply_template(messages: Messages | Sequence[Messages], tokenizer: Tokenizer, keywords: Json, *, where: str) -> Any:
    """Return a conversation, or several, as the chat template writes it, by these keywords of `apply_chat_template`.

    A ValueError, which begins with `where`, says that the template refuses it.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **keywords)
    except ImportError:  # jinja2 is missing, and the message says so
        raise
    except Exception as error:  # jinja2's errors and those a template raises itself have no nearer common class
        raise ValueError(
            f"{where}: the chat template refused the messages ({type(error).__name__}: {error}); they are"
            f" {show(list(messages))}"
        ) from error


def readable(
    messages: Messages, tokenizer: Tokenizer, template_kwargs: Json, *, where: str, seen: set[object]
) -> Messages:
    """Return a conversation as the chat template takes its calls (`calls.decoded_arguments`).

    A message or a call that the template leaves out is a ValueError: the conversation is rendered with marks in their
    places, since of the contents a template may take something out on purpose (white space, earlier thoughts). `seen`
    holds the orders of roles and calls that were looked at before, for which nothing is rendered.
    """
    keywords = {**template_kwargs, "tokenize": False}
    messages = decoded_arguments(messages, lambda changed: apply_template(changed, tokenizer, keywords, where=where))
    marks: dict[str, tuple[int, str]] = {}  # mark → its message, and the tool that is called or ""

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
    kind = (*kinds, *marks, "tools" in template_kwargs)
    if kind in seen:
        return messages
    seen.add(kind)
    try:
        shown = apply_template(marked, tokenizer, keywords, where=where)
    except Exception:  # one that looks into the contents, which the marks have replaced
        return messages
    for mark, (place, tool) in marks.items():
        if mark not in shown:
            content, role = show(messages[place]["content"]), messages[place]["role"]
            what = f"the call of the tool {tool!r} in" if tool else f"the content {content} of"
            raise ValueError(
                f"{where}: the chat template leaves out {what} message {place}, whose role is {role!r}, so the policy"
                " would never see it: give roles that the template writes (mostly 'system', 'user', 'assistant' and"
                " 'tool'), contents as it takes them (text, or a list of parts), and calls to a template with tools"
            )
    return messages


def prompt_indices(start: int, count: int, *, num_rows: int, seed: int, shuffle: bool = True) -> list[tuple[int, int]]:
    """Return entries start..start+count−1 of the infinite sequence of (epoch, row index).

    The sequence has one permutation of 0..num_rows−1 for each epoch (with `shuffle=False` the order of the dataset), so
    no row is skipped or doubled within an epoch, and batches may span the end of one. It depends on nothing but the
    arguments: a data cursor is the one integer `start`, and resuming is calling this again.
    """
    if num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}: there has to be at least one row")
    for name, value in (("start", start), ("count", count), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{name} is {value}: give 0 or more")
    entries: list[tuple[int, int]] = []
    while len(entries) < count:
        epoch, position = divmod(start + len(entries), num_rows)
        order = _epoch_order(epoch, num_rows, seed) if shuffle else np.arange(num_rows)
        taken = order[position : position + count - len(entries)]
        entries.extend((epoch, int(row)) for row in taken)
    return entries


@functools.lru_cache(maxsize=2)  # every batch of an epoch asks for it, a batch at most for two: 0.2 s at a million rows
def _epoch_order(epoch: int, num_rows: int, seed: int) -> np.ndarray:
    """Return the permutation of one epoch."""
    # Sorting raw bits, not Generator.permutation: NumPy keeps the streams of its bit generators the same for ever and
    # not those of Generator's methods (NEP 19), and a run may be resumed under a newer NumPy.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_rows)
    return np.argsort(bits, kind="stable")
