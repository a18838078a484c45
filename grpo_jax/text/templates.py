"""An observation's tokens: what a chat template writes between the end of one turn of the policy and its next.

What the policy drew is never encoded again, nor is anything before it: a stand-in conversation is rendered instead,

```
user: …  assistant: <mark> </turn> tool: 42 </turn> assistant:
         ▲ stand-in        ▲ closing token; all behind it is the observation, and is encoded
```

so it does not matter what a template does to earlier turns (many remove their thinking): only what stands behind the
closing token is used, and that this token closes the stand-in's turn is checked once for each template.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from grpo_jax.messages import raise_all
from grpo_jax.text.pieces import common_length, special_tokens
from grpo_jax.types import Json, Message, Messages, Tokenizer

_MARK = "Zq7"
_PROBE = "Xw5"
_USER: Message = {"role": "user", "content": "Go."}
# Stands within what looks like a special token but is part of a message: text is encoded in parts that are cut there.
_CUT = "\U000f5ca1"


class _Template(NamedTuple):
    """A tokenizer's chat template, and all that it is rendered with beside the messages."""

    tokenizer: Tokenizer
    kwargs: Json
    tools: list[Json] | None
    eos_token_ids: tuple[int, ...]

    def render(self, messages: Messages, *, generation_prompt: bool = True) -> str:
        """Return a conversation as the template writes it."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, add_generation_prompt=generation_prompt, tokenize=False, **self.kwargs
            )
        except ImportError:  # jinja2 is missing, and the message says so
            raise
        except Exception as error:  # jinja2's errors and those a template raises itself have no nearer common class
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"it refuses a conversation of {roles} ({type(error).__name__}: {error})") from error

    def after_mark(self, messages: Messages, mark: str, *, generation_prompt: bool = True) -> str:
        """Return what the template writes after the last mark of a conversation that a user opens."""
        text = self.render([_USER, *messages], generation_prompt=generation_prompt)
        _, found, after = text.rpartition(mark)
        if not found:
            raise ValueError("it does not show what the assistant said before: use a template that writes its turns")
        return after

    def eos_texts(self) -> list[str]:
        """Return the tokens that end a turn, as text."""
        ids = self.eos_token_ids or (self.tokenizer.eos_token_id,)
        texts = [self.tokenizer.decode([index], skip_special_tokens=False) for index in ids if index is not None]
        if not any(texts):
            raise ValueError("the tokenizer has no EOS: set tokenizer.eos_token, or give eos_token_ids")
        return [text for text in texts if text]


def _template(
    tokenizer: Tokenizer, kwargs: Json | None, tools: Sequence[Json] | None, eos_token_ids: Collection[int] | None
) -> _Template:
    further = dict(kwargs or {})
    own = further.pop("tools", None)
    return _Template(tokenizer, further, list(tools or own or ()) or None, tuple(sorted(eos_token_ids or ())))


class _End(NamedTuple):
    """How a template ends the stand-in's turn.

    Attributes:
      text: from its mark on.
      closing: the token that the text ends with, an EOS.
      opens: whether it opens the next turn too, as GLM-4's <|user|> does; then it is not that of every turn.
    """

    text: str
    closing: str
    opens: bool = False


# For each tokenizer: what does not depend on the messages.
_ENDS: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[Any, ...], _End]] = weakref.WeakKeyDictionary()


def observation_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template_kwargs: Json | None = None,
    tools: Sequence[Json] | None = None,
    eos_token_ids: Collection[int] | None = None,
    drawn: int | None = None,
) -> list[int]:
    """Return the tokens that follow a turn of the policy: messages, and the next turn's opening.

    A text within a message that reads like a special token is encoded as text: no tool can end a turn or open one.

    Args:
      tokenizer: a transformers tokenizer with a chat template.
      messages: of the roles tool or user, at least one. The turn before them is a call if the first is a tool's.
      chat_template_kwargs: further keywords for the chat template.
      tools: the schemas given to the template with the prompt.
      eos_token_ids: those that end a turn; default is the tokenizer's own.
      drawn: the last one of the turn, where it may be none of these, nor the one that opens the next turn; None: as the
        template writes it.

    Returns:
      Token ids without the closing EOS, if the policy drew one, and with what the template writes after it (a newline,
      for instance). Behind a turn that a stop string, a stop id or its length has ended, the EOS is the first. No BOS.

    Raises:
      ValueError: the template refuses the messages, or cannot be used in this way (`check_template` says so earlier).

    Example:
      >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
      >>> from transformers import PreTrainedTokenizerFast
      >>> vocab = {t: i for i, t in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
      >>> bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
      >>> bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
      >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
      >>> tokenizer.chat_template = (
      ...     "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\\n{% endfor %}"
      ...     "{% if add_generation_prompt %}assistant: {% endif %}"
      ... )
      >>> tokenizer.decode(observation_ids(tokenizer, [{"role": "user", "content": "higher"}]))
      '\\nuser: higher<eos>\\nassistant: '
    """
    if not messages:
        raise ValueError("messages is empty: an observation is at least one message of a tool or of the user")
    template = _template(tokenizer, chat_template_kwargs, tools, eos_token_ids)
    mark = _MARK
    while mark in str(messages):
        mark += "q"
    end = _end_of_turn(template, messages[0]["role"], mark)
    special = sorted(special_tokens(tokenizer).values())
    guarded = [_guard(dict(message), special) for message in messages]
    after = template.after_mark([_stand_in(messages[0], mark), *guarded], mark)
    if not after.startswith(end.text):
        raise ValueError(
            f"the chat template ends the turn before the messages with {after[: len(end.text)]!r}, and before others "
            f"with {end.text!r}: use a template that closes every turn in the same way"
        )
    ids, closing = _encode_after(tokenizer, end.closing, after[len(end.text) :]), _encode(tokenizer, end.closing)
    ends = (eos_token_ids or (tokenizer.eos_token_id,)) if not end.opens else closing
    return ids if drawn is None or drawn in ends else closing + ids


def check_template(
    tokenizer: Tokenizer,
    *,
    roles: Sequence[str] = ("tool",),
    chat_template_kwargs: Json | None = None,
    tools: Sequence[Json] | None = None,
    eos_token_ids: Collection[int] | None = None,
) -> None:
    """Raise if `observation_ids` cannot be had of a tokenizer's chat template; to be called before anything is sampled.

    Args:
      tokenizer: a transformers tokenizer.
      roles: of the messages that will follow a turn: "tool" where there are tools, "user" where an environment speaks.
      chat_template_kwargs: as they will be given to `observation_ids`.
      tools: likewise; the template has to show them.
      eos_token_ids: likewise.

    Raises:
      ValueError: no chat template; it refuses such messages, or does not show them; it does not show the tools; it does
        not end the policy's turn with an EOS. Of several faults, all.
    """
    template = _template(tokenizer, chat_template_kwargs, tools, eos_token_ids)
    if template_of(tokenizer, chat_template_kwargs=chat_template_kwargs, tools=tools) is None:
        raise ValueError(
            "several turns need a chat template, and the tokenizer has none: set tokenizer.chat_template, or use an "
            "instruct checkpoint"
        )
    problems = []
    for role in roles:
        try:
            _end_of_turn(template, role, _MARK)
        except ValueError as error:
            problems.append(str(error))
    if tools and not problems and _shown_the_same(template):
        problems.append(
            "it writes the same prompt with tools and without: a template without tool support; use one that shows "
            "`tools` to the policy"
        )
    raise_all("the chat template", problems)


def _shown_the_same(template: _Template) -> bool:
    """Return whether a prompt looks the same with tools and without."""
    try:
        return template.render([_USER]) == template._replace(tools=None).render([_USER])
    except ValueError:  # a template for tools alone, which cannot be rendered without
        return False


def template_of(
    tokenizer: Tokenizer, *, chat_template_kwargs: Json | None = None, tools: Sequence[Json] | None = None
) -> str | None:
    """Return the chat template that is used; None if there is none.

    It is what the keyword `chat_template` says, which may be a name; else, of several under names, "tool_use" with
    tools and "default" without, as transformers chooses.
    """
    named = (chat_template_kwargs or {}).get("chat_template")
    if named is None and getattr(tokenizer, "chat_template", None) is None:
        return None
    try:
        return tokenizer.get_chat_template(named, list(tools) if tools else None)
    except ValueError as error:  # several under names, and none of them for this
        raise ValueError(f"the tokenizer has no chat template for this: {error}") from error


def opens_thinking(
    tokenizer: Tokenizer, *, chat_template_kwargs: Json | None = None, tools: Sequence[Json] | None = None
) -> bool:
    """Return whether the generation prompt opens <think>, so that a turn begins in the middle of a thought."""
    text = _template(tokenizer, chat_template_kwargs, tools, None).render([_USER])
    opening = text[text.rfind(_USER["content"]) :]
    return opening.rfind("<think>") > opening.rfind("</think>")


def turn_of(
    tokenizer: Tokenizer,
    message: Message,
    *,
    chat_template_kwargs: Json | None = None,
    tools: Sequence[Json] | None = None,
) -> tuple[str, bool]:
    """Return a message of the assistant as the template writes it, from where the generation prompt ends.

    The second value is whether the text follows the whole generation prompt: a template may open a thought there, and
    write none in turns of the past. A ValueError says that the template refuses the message.
    """
    template = _template(tokenizer, chat_template_kwargs, tools, None)
    opening = template.render([_USER])
    whole = template.render([_USER, message], generation_prompt=False)
    if whole.startswith(opening):
        return whole[len(opening) :], True
    same = whole[: common_length(opening, whole)]
    # Both may go on with a tag, of which the first letters are the same.
    return whole[max(same.rfind(">"), same.rfind("\n")) + 1 :], False


def closing_token(
    tokenizer: Tokenizer, ends: Collection[int], *, chat_template_kwargs: Json | None = None
) -> int | None:
    """Return the special token that the template writes after a last turn of the assistant; None if it writes none, or
    one of `ends` too.
    """
    template = _template(tokenizer, chat_template_kwargs, None, None)
    try:
        after = template.after_mark([{"role": "assistant", "content": _MARK}], _MARK, generation_prompt=False)
    except ValueError:  # it refuses such a conversation, or does not show it
        return None
    special = {text: index for index, text in special_tokens(tokenizer).items() if text in after}
    found = _first(after, sorted(special))
    return None if found is None or set(ends) & set(special.values()) else special[found[1]]


def opening_token(
    tokenizer: Tokenizer, role: str, *, chat_template_kwargs: Json | None = None, eos_token_ids: Collection[int]
) -> int | None:
    """Return the EOS that ends a turn by opening the message of `role` after it (GLM-4's <|user|>); else None."""
    template = _template(tokenizer, chat_template_kwargs, None, eos_token_ids)
    try:
        end = _end_of_turn(template, role, _MARK)
    except ValueError:  # such a turn has no end, or cannot be written
        return None
    return _encode(tokenizer, end.closing)[0] if end.opens else None


def _stand_in(message: Message, mark: str) -> Message:
    """Return the turn that stands in for the policy's: one call of a tool if a tool's message follows."""
    turn: Message = {"role": "assistant", "content": mark}
    if message["role"] == "tool":
        # One call alone: some templates refuse two, and others name an answer after the first.
        function = {"name": message.get("name", "tool"), "arguments": {"value": mark}}
        turn["tool_calls"] = [{"type": "function", "function": function}]
    return turn


def _end_of_turn(template: _Template, role: str, mark: str) -> _End:
    """Return how the turn before a message of `role` ends, by a probe; remembered."""
    tokenizer, kwargs, tools, eos_token_ids = template
    described = json.dumps([kwargs, tools], sort_keys=True, default=repr)
    key = (str(tokenizer.chat_template), role, mark, described, eos_token_ids)
    known = _ENDS.setdefault(tokenizer, {})
    if key not in known:
        known[key] = _read_end(template, role, mark)
    return known[key]


def _read_end(template: _Template, role: str, mark: str) -> _End:
    """Return how the turn before a message of `role` ends; raise if it does not, or if the message is not shown."""
    probe = {"role": role, "name": "tool", "content": _PROBE} if role == "tool" else {"role": role, "content": _PROBE}
    turn = _stand_in(probe, mark)
    after = template.after_mark([turn, probe], mark)
    if _PROBE not in after:
        support = ": a template without tool support" if role == "tool" else ""
        raise ValueError(f"it does not show messages of the role {role!r}{support}; use one that writes them")
    # Up to where it goes on differently with the message and without, both are about the turn itself.
    common = after[: common_length(template.after_mark([turn], mark), after)]
    ends, special = template.eos_texts(), sorted(special_tokens(template.tokenizer).values())
    found = _first(common, ends)
    opening = _first(after[: after.find(_PROBE)], [*ends, *special])
    if found is None and opening is not None and opening[1] in ends:
        position, closing = opening
        return _End(after[: position + len(closing)], closing, opens=True)
    if found is None:
        # gpt-oss ends a turn of the past with another token than the one that the policy draws at its end.
        found = _first(common, special)
        last = template.after_mark([turn], mark, generation_prompt=False)
        if found is None or not last[found[0] :].startswith(tuple(ends)):
            raise ValueError(
                f"it does not end the turn before a message of the role {role!r} with an EOS ({', '.join(ends)}), but "
                f"goes on with {common[:40]!r}: if another token ends a turn, name its id as an EOS, by"
                ' policy.replace(generation_config={"eos_token_id": [...]}) or in generation_config.json; else use a'
                " template that writes an EOS"
            )
    position, closing = found
    return _End(after[: position + len(closing)], closing)


def _first(text: str, tokens: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first of some tokens stands in a text, and which; of several there, the longest."""
    places = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return (min(places)[0], min(places)[2]) if places else None


def _guard(value: Any, special: Sequence[str]) -> Any:
    """Return a message in which no text is a special token: a cut stands after the first character of each."""
    if isinstance(value, str):
        value = value.replace(_CUT, "\ufffd")
        pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
        return re.sub(pattern, lambda found: found[0][0] + _CUT + found[0][1:], value) if pattern else value
    if isinstance(value, dict):
        return {key: _guard(item, special) for key, item in value.items()}
    return [_guard(item, special) for item in value] if isinstance(value, list) else value


def _encode_after(tokenizer: Tokenizer, closing: str, text: str) -> list[int]:
    """Return the ids of a text that stands after a closing token."""
    first, *rest = text.split(_CUT)
    # Encoded behind the closing token, since some tokenizers treat the beginning of a text, or what follows a token, in
    # a way of their own.
    before, ids = _encode(tokenizer, closing), _encode(tokenizer, closing + first)
    ids = ids[len(before) :] if ids[: len(before)] == before else _encode(tokenizer, first)
    return ids + [index for part in rest for index in _encode(tokenizer, part)]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text=text, add_special_tokens=False)["input_ids"]) if text else []
