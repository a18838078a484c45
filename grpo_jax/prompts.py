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
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.types import Prompts

Row = dict[str, Any]
Messages = list[dict[str, Any]]

ON_LONG_PROMPT = ("error", "drop")
_MOST_ROWS = 10**9
# encode_prompts decides these: with another value the template would not return the ids of a prompt to continue.
_OWN_TEMPLATE_KWARGS = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors")


def make_prompts(
    token_ids: Sequence[Sequence[int]], *, pad_to_multiple_of: int = 1, length: int | None = None
) -> Prompts:
    """Right-pad lists of token ids to one `Prompts`.

    Args:
      token_ids: B lists of token ids, none of them empty.
      pad_to_multiple_of: P is rounded up to a multiple of this, so that few different shapes get compiled.
      length: P before rounding; default is the longest prompt.

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
    return Prompts(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths))


def _id_array(ids: Any, where: str) -> np.ndarray:
    """Return the ids of one prompt as an array, or say what is wrong with them."""
    if isinstance(ids, str):
        raise ValueError(f"{where} is text, {_short(ids)}: make_prompts takes token ids; encode_prompts takes text")
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"{where} is {_short(ids)}: give a list of lists of token ids, one list for each prompt")
    if array.size == 0:
        raise ValueError(f"{where} is empty: a prompt needs at least one token (a BOS, for instance)")
    if array.dtype.kind not in "iu":
        raise ValueError(f"{where} holds {array.dtype} values, {_short(ids)}: token ids are integers")
    if array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"{where} holds ids from {array.min()} to {array.max()}: token ids are in 0..2³¹−1")
    return array


def load_rows(dataset: Any, *, argument: str = "dataset") -> list[Row]:
    """Turn a dataset into a list of dict rows, each with a `prompt` and all with the same columns.

    Args:
      dataset: a list of dicts; anything with `len` and integer indexing that gives dicts (`datasets.Dataset`, a grain
        source or `MapDataset`); what can be iterated over, read to its end (a generator, `datasets.IterableDataset`);
        or the path of a JSONL file. All become the same list, so that order, epochs and resuming are the same for all.
      argument: what the caller calls it, for the messages.

    Returns:
      A list of dicts. `prompt` is text in every row, or in every row a list of messages with `role` and `content`.

    Raises:
      ValueError: no rows; a row that is no dict; no `prompt`, or one that is neither text nor messages; rows whose
        columns differ; a line of the file that is not JSON.
      FileNotFoundError: the path does not exist.

    Example:
      >>> load_rows({"prompt": p, "answer": a} for p, a in [("1+1=", "2"), ("2+2=", "4")])[1]
      {'prompt': '2+2=', 'answer': '4'}
    """
    rows = _read_rows(dataset, argument)
    if not rows:
        raise ValueError(f"{argument} is empty: give at least one row with a 'prompt'")
    faults = [f"{argument} row {i} {fault}" for i, row in enumerate(rows) if (fault := _row_fault(row, rows[0]))]
    if faults:
        more = f" ({len(faults) - 1} more of the {len(rows)} rows have faults)" if len(faults) > 1 else ""
        raise ValueError(faults[0] + more)
    return [dict(row) for row in rows]


def _row_fault(row: Any, first: Any) -> str:
    """Return what is wrong with a row, "" if nothing is; `first` is the row that the others are like."""
    if not isinstance(row, Mapping):
        return f"is {_short(row)}: each row is a dict with a 'prompt' and any other columns"
    if "prompt" not in row:
        return f"has no 'prompt'; its columns are {sorted(map(str, row))}: rename or add one"
    if fault := _prompt_fault(row["prompt"]):
        return fault
    unnamed = [name for name in row if not isinstance(name, str)]
    if unnamed:
        return f"has a column {unnamed[0]!r}: names of columns are text, since reward functions get them as keywords"
    if row.keys() != first.keys():
        missing, extra = (sorted(x - y, key=str) for x, y in ((first.keys(), row.keys()), (row.keys(), first.keys())))
        return (
            f"differs from row 0 in its columns (missing: {missing}, only here: {extra}): give every row the same "
            "columns, None where there is no value"
        )
    if is_conversation(row["prompt"]) != is_conversation(first["prompt"]):
        return (
            "and row 0 differ in kind, one prompt is text and the other a list of messages: reward functions would get "
            "both; make them all the same"
        )
    return ""


def _read_rows(dataset: Any, argument: str) -> list[Any]:
    """Read whatever stands for a dataset into a list."""
    if isinstance(dataset, (str, os.PathLike)):
        return _read_jsonl(dataset, argument)
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"{argument} is a dict with the keys {sorted(map(str, dataset))}: give a list of rows, each a dict "
            "(of a dataset with splits, choose one: dataset['train'])"
        )
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        if len(dataset) > _MOST_ROWS:
            raise ValueError(
                f"{argument} says that it has {len(dataset)} rows, as a source does that repeats for ever: give it "
                "without its repetition (num_train_epochs and max_steps say how long to train)"
            )
        # By index, not by iteration: random-access sources need not be iterable.
        try:
            rows = [dataset[index] for index in range(len(dataset))]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{argument} is of type {type(dataset).__name__}, whose rows cannot be had by number "
                f"({type(error).__name__}: {error}): give a list of dicts (of a pandas DataFrame "
                "frame.to_dict('records'))"
            ) from error
        if type(dataset).__module__.partition(".")[0] == "grain":
            rows = [row for row in rows if row is not None]  # which is how grain says that a filter left one out
        return rows
    if isinstance(dataset, Iterable):
        return list(dataset)
    raise ValueError(
        f"{argument} is {_short(dataset)}: give a list of dicts, a datasets.Dataset, an iterator of dicts or the path "
        "of a JSONL file"
    )


def _read_jsonl(path: str | os.PathLike[str], argument: str) -> list[Any]:
    """Read one JSON value from each non-empty line."""
    rows: list[Any] = []
    name = os.fspath(path)
    if not os.path.isfile(path):
        what = "a directory" if os.path.isdir(path) else "no file"
        raise FileNotFoundError(f"{argument} is {name!r}, which is {what}: give the path of a JSONL file")
    try:
        with open(path, encoding="utf-8-sig") as lines:  # some programs begin a file with a byte-order mark
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{argument}: line {number} of {name!r}"
                try:
                    row = json.loads(line.strip())
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{where} is not JSON ({error.msg} at column {error.colno}): a JSONL file has one object on "
                        "each line"
                    ) from error
                if isinstance(row, list) and not rows:
                    raise ValueError(
                        f"{where} holds a JSON list: write one object on each line, or give json.load of the file"
                    )
                if not isinstance(row, dict):
                    raise ValueError(f"{where} is {_short(row)}: a JSONL file has one object on each line")
                rows.append(row)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{argument}: {name!r} is no text in UTF-8: give a JSONL file, or read the file yourself (Parquet and CSV:"
            " datasets.load_dataset) and give its rows"
        ) from error
    return rows


def _prompt_fault(prompt: Any) -> str:
    """Return what is wrong with a prompt, "" if it is text or a list of messages."""
    if isinstance(prompt, str):
        return ""
    wanted = 'give text, or a list of messages [{"role": "user", "content": ...}]'
    if not isinstance(prompt, (list, tuple)):
        return f"has the 'prompt' {_short(prompt)}, of type {type(prompt).__name__}: {wanted}"
    if not prompt:
        return "has an empty list as its 'prompt': give at least one message"
    for index, message in enumerate(prompt):
        where = f"has {_short(message)} as message {index} of its 'prompt'"
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            return f"{where}: a message is a dict with 'role' and 'content'; {wanted}"
        if not isinstance(message["role"], str):
            return f"{where}: its 'role' is text, such as \"user\""
        # A call of a tool has no content; anything else that is None would be the word None in the prompt.
        if not isinstance(message["content"], (str, list)) and not message.get("tool_calls"):
            return f"{where}: its 'content' is text, or a list of parts"
    return ""


def is_conversation(prompt: Any) -> bool:
    """Return whether a prompt is a list of messages rather than text.

    Example:
      >>> is_conversation([{"role": "user", "content": "Hi"}]), is_conversation("Hi")
      (True, False)
    """
    return not isinstance(prompt, str)


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """The rows of a dataset beside their tokens.

    Attributes:
      rows: N dict rows, those that were kept.
      token_ids: N lists of token ids; `token_ids[i]` is the prompt of `rows[i]`.
      dropped: indices, in the dataset as it came, of the rows left out for being too long.
    """

    rows: list[Row]
    token_ids: list[list[int]]
    dropped: list[int]


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_prompt_length: int | None = None,
    on_long_prompt: str = "error",
    chat_template_kwargs: Mapping[str, Any] | None = None,
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
      argument: what the caller calls the dataset, for the messages.

    Returns:
      `EncodedPrompts`.

    Raises:
      ValueError: a prompt over the bound (with "error"), or all of them; messages without a chat template, or that the
        template refuses; a prompt that encodes to no token; a bad `on_long_prompt` or `chat_template_kwargs`.

    References:
      Special tokens and template as in TRL 1.16 (`GRPOTrainer._tokenize_prompts`), which closes a last message of the
      assistant and opens another turn; we continue it.
    """
    if on_long_prompt not in ON_LONG_PROMPT:
        raise ValueError(f"on_long_prompt is {on_long_prompt!r}: choose one of {', '.join(map(repr, ON_LONG_PROMPT))}")
    template_kwargs = dict(chat_template_kwargs or {})
    for name in _OWN_TEMPLATE_KWARGS:
        if name in template_kwargs:
            raise ValueError(f"chat_template_kwargs has {name!r}, which encode_prompts sets itself: take it out")
    prompts = [row["prompt"] for row in rows]
    if all(isinstance(prompt, str) for prompt in prompts):
        token_ids = tokenizer(text=prompts)["input_ids"] if prompts else []
    else:
        token_ids = [
            _encode_messages(prompt, tokenizer, template_kwargs, where=f"{argument} row {index}")
            for index, prompt in enumerate(prompts)
        ]
    for index, ids in enumerate(token_ids):
        if len(ids) == 0:
            raise ValueError(
                f"{argument} row {index}: the tokenizer encodes the prompt {_short(prompts[index])} to no token at "
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


def _encode_messages(prompt: Messages, tokenizer: Any, template_kwargs: dict[str, Any], *, where: str) -> list[int]:
    """Return the token ids of one conversation, open for the assistant to speak."""
    if getattr(tokenizer, "chat_template", None) is None and "chat_template" not in template_kwargs:
        raise ValueError(
            f"{where}: 'prompt' is a list of messages, but the tokenizer has no chat template: set "
            "tokenizer.chat_template, use an instruct checkpoint, or give prompts as text"
        )
    prefilled = prompt[-1]["role"] == "assistant"
    try:
        # return_dict=False: transformers 5 would return a dict of ids and attention mask.
        return tokenizer.apply_chat_template(
            list(prompt),
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            tokenize=True,
            return_dict=False,
            **template_kwargs,
        )
    except ImportError:  # jinja2 is missing, and the message says so
        raise
    except Exception as error:  # jinja2's errors and those a template raises itself have no nearer common class
        raise ValueError(
            f"{where}: the chat template refused the messages ({type(error).__name__}: {error}); the prompt is "
            f"{_short(prompt)}"
        ) from error


def prompt_indices(start: int, count: int, *, num_rows: int, seed: int, shuffle: bool = True) -> list[tuple[int, int]]:
    """Return entries start..start+count−1 of the infinite sequence of (epoch, row index).

    The sequence is one permutation of 0..num_rows−1 after the other, one for each epoch, so no row is skipped or
    doubled within an epoch, and batches may span the end of one. It depends on nothing but the arguments: a data cursor
    is the one integer `start`, and resuming is calling this again.

    Args:
      start: how many entries have been used so far.
      count: how many to return.
      num_rows: rows in the dataset.
      seed: ≥ 0; decides the permutations, together with the number of the epoch.
      shuffle: False for the order of the dataset in every epoch.

    Raises:
      ValueError: num_rows < 1, or a negative start, count or seed.

    Example:
      >>> prompt_indices(2, 3, num_rows=3, seed=0, shuffle=False)
      [(0, 2), (1, 0), (1, 1)]
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


def reward_inputs(tokenizer: Any, rows: Sequence[Row], tokens: Any, mask: Any) -> dict[str, Any]:
    """Return what reward functions are given for a batch of completions, as keywords of `rewards.compute_rewards`.

    Args:
      tokenizer: decodes the completions.
      rows: the B dataset rows of the batch, each with its `prompt`.
      tokens: [B, G, T] int completion tokens.
      mask: [B, G, T] bool, True on the tokens of a completion.

    Returns:
      A dict of `prompts`, `completions`, `completion_ids` (lists of B·G in prompt-major order) and `columns` (every
      other column of the rows, repeated likewise). Where a conversation ends in a prefill, the prefill is the beginning
      of the completion's message and not the end of the prompt, so that prompt + completion is the conversation.
    """
    group = range(np.shape(tokens)[1])
    prompts = [_without_prefill(row["prompt"]) for row in rows for _ in group]
    names = [name for name in rows[0] if name != "prompt"]
    return {
        "prompts": prompts,
        "completions": decode_completions(tokenizer, tokens, mask, prompts=[row["prompt"] for row in rows]),
        "completion_ids": completion_token_ids(tokens, mask),
        "columns": {name: [row[name] for row in rows for _ in group] for name in names},
    }


def completion_token_ids(tokens: Any, mask: Any) -> list[list[int]]:
    """Return the unpadded token ids of each completion, in prompt-major order.

    Args:
      tokens: [B, G, T] int.
      mask: [B, G, T] bool; the ids where it is True are kept, the EOS with them.

    Returns:
      B·G lists; the G completions of the first prompt come first.

    Example:
      >>> completion_token_ids(np.array([[[7, 2, 0], [8, 9, 2]]]), np.array([[[1, 1, 0], [1, 1, 1]]], bool))
      [[7, 2], [8, 9, 2]]
    """
    tokens, mask = np.asarray(tokens), np.asarray(mask).astype(bool)
    if tokens.ndim != 3 or tokens.shape != mask.shape:
        raise ValueError(f"tokens is {tokens.shape} and mask is {mask.shape}: both are [B, G, T]")
    flat = zip(tokens.reshape(-1, tokens.shape[2]), mask.reshape(-1, tokens.shape[2]), strict=True)
    return [row[keep].tolist() for row, keep in flat]


def decode_completions(
    tokenizer: Any, tokens: Any, mask: Any, *, prompts: Sequence[str | Messages] | None = None
) -> list[str] | list[Messages]:
    """Return completions as text, or as messages where the prompts are conversations, in prompt-major order.

    Args:
      tokenizer: its `batch_decode(ids, skip_special_tokens=True)` is used, as TRL does.
      tokens: [B, G, T] int.
      mask: [B, G, T] bool.
      prompts: the B prompts of the dataset; None if they are text.

    Returns:
      B·G strings; or B·G lists of one message, `[{"role": "assistant", "content": text}]`, whose text begins with the
      prefill if the prompt had one: a reward function sees the whole turn.
    """
    texts = tokenizer.batch_decode(completion_token_ids(tokens, mask), skip_special_tokens=True)
    if prompts is None or not is_conversation(prompts[0]):
        return texts
    num_generations = np.shape(tokens)[1]
    return [
        [{"role": "assistant", "content": _prefill(prompts[index // num_generations]) + text}]
        for index, text in enumerate(texts)
    ]


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


def _short(value: Any, limit: int = 80) -> str:
    """Return the repr of a value, cut for a message."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
