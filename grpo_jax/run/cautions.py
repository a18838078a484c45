"""Checks of a policy and of tokenized rows that `train`, `sft`, `evaluate` and `chat` share, errors and warnings."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_jax.config.checks import position_problems
from grpo_jax.messages import show
from grpo_jax.models.layers import is_quantized
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import reward_names
from grpo_jax.rollout.ends import BY_EOS, TurnEnds
from grpo_jax.run.placement import shape_of, vocab_size
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.text.templates import ChatTemplate
from grpo_jax.types import Json, Messages, Params, RewardFn, Row, Tokenizer

_THINK = "<think>"
_LAST = 8
"""Tokens at the end of a prompt that may be the tag of a thought, and the space behind it."""

_PARTS = 100
"""Parts of an object that are looked at."""


def check_policy(policy: Any, ends: TurnEnds = BY_EOS, *, trained: bool = True) -> None:
    """Raise unless it is a policy that can be sampled from, and trained."""
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be what from_pretrained returns, a Policy; got {type(policy).__name__}.")
    if trained and is_quantized(policy.params):
        raise ValueError(
            "policy.params are quantized, and quantized weights cannot be trained: give the policy adapters by"
            " `add_lora(policy, key)`, or load it without `quantize`."
        )
    policy.check_model()
    policy.check_tokenizer()
    if not (policy.eos_token_ids or ends.stop or ends.stop_token_ids):
        raise ValueError(
            "policy has no EOS token, so no completion could ever end: give eos_token_id in generation_config.json, "
            "config.json or the tokenizer, or policy.replace(generation_config={'eos_token_id': ...}); or stop."
        )
    eos, ids = getattr(policy.tokenizer, "eos_token_id", None), list(policy.eos_token_ids)
    if eos is not None and eos not in ids:
        warnings.warn(
            f"policy.tokenizer ends a text with {policy.tokenizer.eos_token!r} ({eos}), and completions end with"
            f" policy.eos_token_ids = {ids} alone: if it is to end them too, {_with_eos(policy, eos)}",
            stacklevel=2,
        )


def _with_eos(policy: Policy, token: int) -> str:
    """The call that lets a token end completions."""
    return f"policy.replace(generation_config={{'eos_token_id': {[token, *policy.eos_token_ids]}}})"


def check_ends(ends: TurnEnds, policy: Policy, params: Params) -> None:
    """Raise a `ValueError` for texts and ids that no turn of a policy can end with."""
    ends.check(policy.tokenizer, vocab_size(policy.model, params) if ends.stop_token_ids else None)


def check_tokens(policy: Policy, data: EncodedPrompts, max_completion_length: int = 0) -> None:
    """Raise if the model does not have a token, or not the positions of the longest prompt and such a completion."""
    largest, shape = max(max(ids) for ids in data.token_ids), shape_of(policy)
    if shape is None:
        return
    if largest >= shape.vocab_size:
        raise ValueError(
            f"policy.tokenizer gives the token id {largest}, and the model has a vocabulary of {shape.vocab_size}: "
            "the two do not belong together."
        )
    if max_completion_length:
        longest, positions = max(map(len, data.token_ids)), shape.max_position_embeddings
        for problem in position_problems(longest, max_completion_length, positions):
            raise ValueError(problem)


def warn_of_tokens(
    data: EncodedPrompts,
    policy: Policy,
    argument: str,
    *,
    reward_fns: Sequence[RewardFn] = (),
    ends: TurnEnds = BY_EOS,
    template_kwargs: Json | None = None,
) -> None:
    """Warn of prompts or examples of SFT in which special tokens come twice, calls of tools have None for an argument,
    nothing ends a turn, or <think> is opened by the prompt where a reward function asks for it.
    """
    for line in (
        *_special_twice(data, policy, argument),
        _empty_arguments(data.rows, argument),
        _endless(data, policy, ends, template_kwargs, argument),
        _opened_thought(data, policy.tokenizer, reward_fns) if reward_fns else None,
    ):
        if line is not None:
            warnings.warn(line, stacklevel=3)


def _messages_in(row: Row) -> Messages:
    """The messages of a row, [] where it has text or tokens."""
    columns = [row.get(name) for name in ("prompt", "completion", "messages")]
    return [one for column in columns if isinstance(column, list | tuple) for one in column if isinstance(one, dict)]


def _special_twice(data: EncodedPrompts, policy: Policy, argument: str) -> Iterator[str]:
    """Warns of texts to which the tokenizer adds a token that they have; a chat template writes its own, once."""
    bos, eos = (getattr(policy.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
    examples = data.masks is not None  # which end with one EOS
    texts = [ids for row, ids in zip(data.rows, data.token_ids, strict=True) if not _messages_in(row)]
    ended = [ids for ids in texts if ids[-1] == eos and (not examples or ids[-2:-1] == ids[-1:])]
    twice = [ids for ids in texts if bos is not None and list(ids[:2]) == [bos, bos]]
    end = "end with an EOS twice" if examples else "end with an EOS, behind which completions begin"
    for said, found in (("begin with the BOS twice", twice), (end, ended)):
        if found:
            yield (
                f"{argument}: {len(found)} of {len(data.rows)} texts {said}, the first of them"
                f" {show(policy.tokenizer.decode(found[0]))}: the tokenizer adds special tokens (add_bos_token,"
                " add_eos_token). Take them out of the texts, or give the messages that these were made of"
            )


def _endless(
    data: EncodedPrompts, policy: Policy, ends: TurnEnds, template_kwargs: Json | None, argument: str
) -> str | None:
    """Warns where no learned token ends a turn, or where the chat template ends turns with a token that does not."""
    stops, token, foreign = {*policy.eos_token_ids, *ends.stop_token_ids}, None, None
    if _messages_in(data.rows[0]):
        token = ChatTemplate(policy.tokenizer, template_kwargs, eos_token_ids=stops).closing_token()
    if token is not None:
        name = policy.tokenizer.decode([token])
        foreign = (
            f"the chat template ends a turn with {name!r} ({token}), which ends no completion (policy.eos_token_ids ="
            f" {list(policy.eos_token_ids)}): {_with_eos(policy, token)}"
        )
    if data.masks is None:
        return f"{argument}: {foreign}, or stop_token_ids=[{token}]" if foreign and not ends.stop else None
    for ids, mask in zip(data.token_ids, data.masks, strict=True):
        if not stops.isdisjoint(itertools.compress(ids[1:], mask[1:])):
            return None
    return f"{argument}: no learned token ends a turn, so completions will not end: " + (
        foreign
        or "end texts with tokenizer.eos_token, or use a chat template that writes an EOS after the assistant's turns,"
        " inside of its generation tags; where max_length cuts all examples off, raise it"
    )


def _empty_arguments(rows: Sequence[Row], argument: str) -> str | None:
    """Warns of calls of tools that have None for an argument."""
    found = [(i, name) for i, row in enumerate(rows) for name, value in _arguments(row) if value is None]
    if not found:
        return None
    row, name = found[0]
    return (
        f"{argument} row {row} has a call of a tool with the argument {name!r} = None ({len(found)} such arguments in"
        " all): the package datasets fills in what calls of other rows have, and the policy reads null. Take them out,"
        " or store arguments as JSON text, which is decoded for the chat template"
    )


def _arguments(row: Row) -> Iterator[tuple[str, object]]:
    """Names and values of the arguments of all calls in a row."""
    for message in _messages_in(row):
        for call in message.get("tool_calls") or ():
            arguments = (call.get("function") or call).get("arguments")
            yield from arguments.items() if isinstance(arguments, Mapping) else ()


def _opened_thought(data: EncodedPrompts, tokenizer: Tokenizer, reward_fns: Sequence[RewardFn]) -> str | None:
    """Warns where completions begin inside a thought and reward functions look for its beginning."""
    ends = tokenizer.decode(list(data.token_ids[0][-_LAST:]))
    if not ends.rstrip().endswith(_THINK):
        return None
    names = reward_names(reward_fns)
    asking = [repr(name) for name, fn in zip(names, reward_fns, strict=True) if _mentions(fn, _THINK)]
    if not asking:
        return None
    several = len(asking) > 1
    return (
        f"prompts end with {_THINK}, which their template opens, so completions begin inside the thought, and reward"
        f" function{'s' * several} {', '.join(asking)} name{'s' * (not several)} {_THINK}: where it has to be there,"
        f" every reward is 0. Ask for </think> alone, or close the thought by chat_template_kwargs"
        " ({'enable_thinking': False} in many templates)"
    )


def _mentions(fn: Callable[..., Any], word: str) -> bool:
    """Whether a word stands in the strings and patterns that a function is made of, its docstring aside."""
    doc = getattr(fn, "__doc__", None)
    return any(word in text.replace("\\", "") for text in _texts(fn, depth=5) if text != doc)


def _texts(value: object, depth: int) -> Iterator[str]:
    """The strings in a function, down to some depth: its constants, what it closes over, the globals that it names and
    the parts of objects that are called."""
    parts: Iterable[object] = ()
    if isinstance(value, str | re.Pattern):
        yield str(getattr(value, "pattern", value))
    elif isinstance(value, types.CodeType):
        parts = value.co_consts
    elif isinstance(value, types.MethodType):
        parts = (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        with contextlib.suppress(ValueError):  # a cell that is empty still
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            named = [value.__globals__.get(name) for name in _names(value.__code__)]
            parts = (value.__code__, *held, *(x for x in named if isinstance(x, str | re.Pattern | types.FunctionType)))
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        parts = (inspect.getattr_static(type(value), "__call__", None), *vars(value).values())
    for part in itertools.islice(parts, _PARTS) if depth else ():
        yield from _texts(part, depth - 1)


def _names(code: types.CodeType) -> list[str]:
    """The global names in a function's code, those of its comprehensions and inner functions included."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return [*code.co_names, *inner]
